"""The arms of a line-up: what they are in the published comparison, and that a model of any size can have them."""

import pytest
import torch

import vitmods as vm
from vitmods.changes import LINEUPS, parse_changes
from vitmods.layers.norms import NORMS
from vitmods.util.errors import UserError

ARMS = [(lineup, name) for lineup in LINEUPS for name in LINEUPS[lineup].arms]


def changed(lineup, name, model):
    return vm.apply(model, *parse_changes(LINEUPS[lineup].arms[name]))


def base(name="mu2/8", **options):
    torch.manual_seed(0)
    return vm.vit(name, img_size=32, num_classes=10, **options)


@pytest.mark.parametrize(("lineup", "name"), ARMS)
def test_every_arm_is_another_model_with_the_same_weights(lineup, name):
    old = base()
    new = changed(lineup, name, old)
    images = torch.randn(8, 3, 32, 32)
    old.head.weight.data.normal_()  # a new head gives zeros
    new.head.weight.data.copy_(old.head.weight.data)
    assert (new(images) - old(images)).abs().max() > 1e-3
    assert torch.equal(new.get_parameter("blocks.1.mlp.fc2.weight"), old.get_parameter("blocks.1.mlp.fc2.weight"))
    new(images).square().sum().backward()
    assert all(parameter.grad is not None for parameter in new.parameters())


@pytest.mark.parametrize(("size", "options"), [("Ti/4", {}), ("S*/8", {}), ("mu3/4", {"pool": "avg", "reg_tokens": 2})])
def test_every_arm_suits_models_of_any_size(size, options):
    config = vm.ViTConfig.from_name(size, img_size=32, num_classes=10, **options)
    for lineup in LINEUPS.values():
        for changes in lineup.arms.values():
            (change,) = parse_changes(changes)
            assert change.edit(config) != config


def test_norms_have_the_parameters_of_the_published_comparison():
    config = vm.ViTConfig.from_name("S*/16")

    def edited(name):
        (change,) = parse_changes(LINEUPS["norms"].arms[name])
        return change.edit(config)

    def kind(name):
        return edited(name).attn.before.kind, dict(edited(name).attn.before.options)

    for name, option, value in (("power", "warmup", 3000), ("scale", "gain", "channel"), ("switchable", "batch", True)):
        assert kind(name) == (name, {})
        assert NORMS[name].arguments[option].default == value
    for name in ("power", "batch", "instance", "group", "switchable"):
        assert edited(name).mlp.before == edited(name).attn.before
        assert edited(name).final_norm == config.final_norm
    model = changed("norms", "group", base("mu2/8"))
    assert model.blocks[0].norm1.groups == model.vit_config.num_heads
    dtn = edited("dtn")
    assert (dtn.first_blocks.count, dtn.prefix_from) == (10, 10)
    assert dtn.first_blocks.attn.before.kind == "dynamic_token"
    assert dtn.first_blocks.mlp == config.mlp
    assert dtn.first_blocks.attn.before.eps == 1e-5


def test_a_model_that_an_arm_cannot_change_is_refused_with_a_remedy():
    with pytest.raises(UserError, match=r"needs a second block.*take a deeper one"):
        changed("norms", "dtn", base("mu/8"))
    single = base("mu2/32", class_token=False, pool="avg")
    for name in ("instance", "switchable"):
        with pytest.raises(UserError, match="one token: take smaller patches"):
            changed("norms", name, single)
