"""apply, diff and verify: what they refuse, and that promises are enforced."""

import dataclasses
import math

import pytest
import torch

import vitmods as vm
from vitmods.changes import REGISTRY, Change
from vitmods.layers import LayerNorm, RMSNorm
from vitmods.model.slots import NormConfig
from vitmods.util.errors import UserError


def test_another_start_for_a_layer_scale_that_was_not_trained(base):
    model = vm.apply(base, vm.LayerScale(1e-6))
    again = vm.apply(model, vm.LayerScale(0.5))
    assert again.vit_config.layer_scale == 0.5
    gammas = [gamma for name, gamma in again.named_parameters() if name.endswith("gamma")]
    assert torch.cat(gammas).unique().tolist() == [0.5]
    with pytest.raises(UserError, match="keeps the function of a model without LayerScale"):
        vm.apply(model, vm.LayerScale(1.0))
    with torch.no_grad():
        model.blocks[0].ls1.gamma[0] += 1
    with pytest.raises(UserError, match="was trained"):
        vm.apply(model, vm.LayerScale(0.5))
    with pytest.raises(UserError, match="was trained"):
        vm.apply(model, vm.LayerScale(0.5), in_place=True)


@pytest.mark.parametrize(
    "changes",
    ["dpn(after=false)+dpn(before=false)", "dpn+rms+normformer", "subln+dpn+layerscale",
     "postnorm+norm(kind=rms,exact=false)+dpn"],
)  # fmt: skip
def test_changes_for_different_slots_go_together_in_any_order(base, changes):
    parts = vm.parse_changes(changes)
    forward, backward = vm.apply(base, *parts), vm.apply(base, *reversed(parts))
    assert forward.changes == parts
    assert {m.__class__ for m in forward.modules()} == {m.__class__ for m in backward.modules()}
    step_by_step = base
    for part in parts:
        step_by_step = vm.apply(step_by_step, part)
    assert (step_by_step.vit_config, step_by_step.changes) == (forward.vit_config, parts)


@pytest.fixture
def liar():
    """Makes a change with a given promise and behavior, and takes it out of the registry afterwards."""

    def make(preserves, edit, carry=lambda weights: weights, drops=()):
        promise = preserves

        @dataclasses.dataclass(frozen=True)
        class Liar(Change):
            name = "liar"
            title = paper = url = summary = cost = published = "-"
            preserves = promise
            fills = frozenset({"head"})

            def edit(self, config):
                return edit(config)

            def carry(self, weights, old, new):
                return carry(weights)

            def drops(self, old, new):
                return drops

        return Liar()

    yield make
    if "liar" in REGISTRY:
        REGISTRY.remove("liar")


def with_layer_scale(value):
    return lambda config: config.with_(layer_scale=value)


def without(name):
    return lambda weights: {n: v for n, v in weights.items() if n != name}


def altered(name):
    return lambda weights: {n: v * 2 if n == name else v for n, v in weights.items()}


def test_a_change_that_keeps_its_promise_passes(base, liar):
    vm.apply(base, liar("function", with_layer_scale(1.0)))
    vm.apply(base, liar("weights", with_layer_scale(0.5)))
    vm.apply(base, liar("nothing", with_layer_scale(0.5), altered("head.weight")))
    vm.apply(base, liar("weights", lambda c: c.with_(final_norm=None), drops=("norm.*",)))


@pytest.mark.parametrize(
    ("promise", "says"),
    [("function", "promised the same function|without saying so"), ("weights", "promises the weights")],
)
@pytest.mark.parametrize(
    "carry",
    [altered("head.weight"), altered("blocks.1.attn.qkv.bias"), without("pos_embed")],
    ids=["head", "qkv", "lost"],
)
def test_weights_that_are_promised_and_altered_or_lost_are_caught(base, liar, promise, says, carry):
    with pytest.raises(AssertionError, match=says):
        vm.apply(base, liar(promise, with_layer_scale(1.0), carry))


def test_a_carry_that_writes_in_place_is_caught_and_the_old_model_is_as_it_was(base, liar):
    before = base.head.weight.clone()
    with pytest.raises(AssertionError, match=r"head\.weight in place"):
        vm.apply(base, liar("nothing", with_layer_scale(0.5), lambda w: w["head.weight"].mul_(2) is None or w))
    assert torch.equal(base.head.weight, before)


def test_a_promised_function_may_have_other_weights(base, liar):
    def double_keys_and_halve_queries(weights):
        scale = torch.tensor([0.5, 2.0, 1.0]).repeat_interleave(base.vit_config.embed_dim)
        weight, bias = (weights[f"blocks.0.attn.qkv.{kind}"] for kind in ("weight", "bias"))
        return weights | {"blocks.0.attn.qkv.weight": weight * scale[:, None], "blocks.0.attn.qkv.bias": bias * scale}

    vm.apply(base, liar("function", with_layer_scale(1.0), double_keys_and_halve_queries))


@pytest.mark.parametrize("zero_head", [False, True])
def test_a_function_that_is_promised_and_altered_is_caught(base, liar, zero_head):
    if zero_head:
        torch.nn.init.zeros_(base.head.weight)
    with pytest.raises(AssertionError, match="promised the same function"):
        vm.apply(base, liar("function", with_layer_scale(0.99)))


def test_weights_lost_without_saying_so_are_caught(base, liar):
    """Even where nothing is promised; and where they are carried, but the new model does not have their place."""
    with pytest.raises(AssertionError, match="pos_embed"):
        vm.apply(base, liar("nothing", with_layer_scale(0.5), without("pos_embed")))
    with pytest.raises(UserError, match=r"'?liar'? leaves no place for norm\.(weight|bias).*`carry`.*`drops`"):
        vm.apply(base, liar("weights", lambda c: c.with_(final_norm=None)))
    with pytest.raises(UserError, match=r"liar gives blocks\.0\.mlp\.fc1\.\w+ another shape.*\(40.*`carry`.*`drops`"):
        vm.apply(base, liar("weights", lambda c: c.with_(mlp_dim=40)))


def test_verify_measures_and_leaves_modes_and_the_random_state_alone(base):
    same, other = vm.apply(base, vm.LayerScale(1.0)), vm.apply(base, vm.DualPatchNorm())
    base.train()
    other.eval()
    state = torch.get_rng_state()
    assert vm.verify(base, same, vm.LayerScale(1.0)) <= 1e-6
    assert vm.verify(base, other) > 1e-3
    assert torch.equal(torch.get_rng_state(), state)
    assert base.training
    assert not other.training
    with pytest.raises(AssertionError, match="same function"):
        vm.verify(base, other, vm.LayerScale(1.0))


def test_no_change_gives_an_equal_copy_and_equal_seeds_equal_new_parameters(base):
    for changes in ((), (vm.NormFormer(head_scale=True),)):
        models = []
        for _ in range(2):
            torch.manual_seed(5)
            models.append(vm.apply(base, *changes))
        assert models[0] is not base
        assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters()))
    assert vm.verify(base, vm.apply(base)) == 0


def test_norm_changes_every_norm_of_the_blocks_and_the_end_and_no_other(base):
    model = vm.apply(base, vm.DualPatchNorm(), vm.NormFormer(), vm.Norm("rms", exact=False))
    assert not [n for n, m in model.blocks.named_modules() if isinstance(m, LayerNorm)]
    assert sum(isinstance(m, RMSNorm) for m in model.blocks.modules()) == 2 * 4
    assert (type(model.norm), type(model.patch_embed.norm)) == (RMSNorm, LayerNorm)
    assert model.vit_config.attn.branch == NormConfig("rms", 1e-5)  # eps is kept
    assert torch.equal(model.norm.weight, base.norm.weight)
    assert not vm.apply(model, vm.Norm("layer")).norm.bias.any()


def test_subln_multiplies_value_projection_output_projection_and_mlp(base):
    gain = math.sqrt(math.log(2 * 2))
    model = vm.apply(base, vm.SubLN())
    for name, value in base.state_dict().items():
        new = model.state_dict()[name]
        if ".attn.qkv." in name:
            torch.testing.assert_close(new[:64], value[:64], atol=0, rtol=0)
            torch.testing.assert_close(new[64:], value[64:] * gain)
        elif ".attn.proj." in name or ".mlp.fc" in name:
            torch.testing.assert_close(new, value * gain)
        else:
            assert torch.equal(new, value)
    kept = vm.apply(base, vm.SubLN(rescale=False)).state_dict()
    assert all(torch.equal(kept[name], value) for name, value in base.state_dict().items())


def test_eps_are_those_of_the_papers_code_and_an_ablation_does_not_claim_the_gain_of_the_whole(base):
    assert vm.apply(base, vm.SubLN()).blocks[0].attn.norm.eps == 1e-5
    assert vm.apply(base, vm.NormFormer()).blocks[0].mlp.norm.eps == 1e-5
    assert vm.apply(base, vm.DualPatchNorm()).patch_embed.norm_before.eps == 1e-6
    assert "73.9" in vm.DualPatchNorm().describe()["published"]
    for ablation in (vm.DualPatchNorm(after=False), vm.DualPatchNorm(norm="rms")):
        assert ablation.describe()["published"] == ""


def test_dual_patchnorms_ablations_fill_the_slots_they_name(base):
    def slots(text):
        config = vm.apply(base, *vm.parse_changes(text)).vit_config
        return config.stem.before, config.stem.after, config.position_norm

    layer = NormConfig("layer")
    assert slots("dpn") == (layer, layer, None)
    assert slots("dpn(after=false)") == (layer, None, None)
    assert slots("dpn(before=false)") == (None, layer, None)
    assert slots("dpn(before=false,after=false,after_position=true)") == (None, None, layer)
    assert slots("dpn(norm=no_learnable)")[0] == NormConfig("layer", affine=False)
    assert slots("dpn(norm=rms)")[1] == NormConfig("rms")


def test_diff_groups_what_is_the_same_in_every_block(base):
    difference = vm.diff(base, vm.apply(base, vm.NormFormer(), vm.Norm("rms"), vm.DualPatchNorm()))
    assert "blocks.1.mlp.norm" in difference.added
    assert "patch_embed.norm_before" in difference.added
    assert "patch_embed: LinearStem -> DualPatchNormStem" in difference.changed
    assert "blocks.*.mlp.norm  (2x)" in str(difference)
    assert difference.preserves == "weights"
    assert difference.changes == ("normformer", "rms", "dpn")
    moved = vm.diff(base, vm.apply(base, vm.Placement("post", "post")))
    assert {"norm", "blocks.0.norm1"} <= set(moved.removed)
    same = vm.diff(base, base)
    assert (same.added, same.removed, same.changed, same.drift) == ((), (), (), 0)
    assert "changes        none" in str(same)


def test_two_changes_of_one_name_and_a_slot_that_is_none_are_refused(base, liar):
    with pytest.raises(UserError, match="dpn"):

        class Imposter(Change):
            name = "dpn"

    assert REGISTRY["dpn"] is vm.DualPatchNorm
    change, message = liar("weights", with_layer_scale(0.5)), "fills 'mlp nrom before', which is not a slot"
    type(change).fills = frozenset({"mlp nrom before"})
    with pytest.raises(UserError, match=f"'liar' {message}.*'mlp norm before'"):
        vm.apply(base, change)


def test_models_that_cannot_be_changed_or_compared(base):
    empty = vm.vit(base.vit_config).to("meta")
    changed = vm.apply(empty, vm.Norm("batch"))
    assert changed.vit_config != empty.vit_config
    assert all(parameter.is_meta for parameter in changed.parameters())
    with pytest.raises(UserError, match="meta device and has no weights"):
        vm.diff(base, empty)
    for call in (lambda other: vm.apply(other, vm.DualPatchNorm()), lambda other: vm.diff(base, other)):
        with pytest.raises(UserError, match="Linear"):
            call(torch.nn.Linear(2, 2))
    base.blocks[1].norm1 = base.blocks[0].norm1
    with pytest.raises(UserError, match=r"blocks.0.norm1.weight and blocks.1.norm1.weight are one parameter"):
        vm.apply(base, vm.Norm("batch"))
