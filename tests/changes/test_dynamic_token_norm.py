"""DTN and GPSA in the first blocks: where they sit, where the tokens join, what is carried, and the two together."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import vitmods as vm
from vitmods.layers import DynamicTokenNorm, LayerNorm
from vitmods.model.flops import count_macs, count_params
from vitmods.model.slots import NormConfig
from vitmods.util.errors import UserError


def build(changes="", **overrides):
    torch.manual_seed(0)
    model = vm.vit("mu12/4", **({"img_size": (12, 16), "num_classes": 5} | overrides)).eval()
    for token in (model.cls_token, model.reg_token, model.pos_embed):
        if token is not None:
            torch.nn.init.normal_(token, std=0.5)
    return vm.apply(model, *vm.parse_changes(changes)) if changes else model


def images():
    return torch.randn(2, 3, 12, 16, generator=torch.Generator().manual_seed(1))


def is_dtn(norm):
    return isinstance(norm, DynamicTokenNorm)


@pytest.mark.parametrize(
    ("text", "fields", "dtn", "mlp", "positions", "seen"),
    [
        ("dtn", {}, 10, 0, 0, [12] * 10 + [13] * 2),
        ("dtn(norms=both)", {}, 10, 10, 0, [12] * 10 + [13] * 2),
        ("dtn(blocks=4)", {"reg_tokens": 2}, 4, 0, 0, [12] * 4 + [15] * 8),
        ("dtn(blocks=12)", {"class_token": False, "pool": "avg"}, 12, 0, 0, [12] * 12),
        ("gpsa", {}, 0, 0, 10, [12] * 10 + [13] * 2),
        ("dtn(blocks=4)+gpsa(blocks=7)", {}, 4, 0, 7, [12] * 7 + [13] * 5),
    ],
)
def test_first_blocks_have_it_and_tokens_join_after_them(text, fields, dtn, mlp, positions, seen):
    model, counts = build(text, **fields), []
    assert [is_dtn(block.norm1) for block in model.blocks] == [True] * dtn + [False] * (12 - dtn)
    assert [is_dtn(block.norm2) for block in model.blocks] == [True] * mlp + [False] * (12 - mlp)
    found = [block.attn.positions is not None for block in model.blocks]
    assert found == [True] * positions + [False] * (12 - positions)
    assert isinstance(model.norm, LayerNorm)
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, __: counts.append(inputs[0].shape[1]))
    assert model(images()).shape == (2, 5)
    assert counts == seen
    assert (model.blocks[0].attn.positions if positions else model.blocks[0].norm1).grid_size == (3, 4)
    assert not dtn or model.blocks[0].norm1.num_heads == model.vit_config.num_heads


@pytest.mark.parametrize(("depth", "blocks"), [(2, 1), (6, 5), (12, 10), (24, 20)])
def test_default_share_of_the_depth(depth, blocks):
    config = vm.DynamicTokenNorm().edit(vm.ViTConfig.from_name(f"mu{depth}/4", img_size=8))
    assert (config.first_blocks.count, config.prefix_from) == (blocks, blocks)


def test_forward_is_the_papers():
    """The way through the model as the paper's appendix has it."""
    model = build("dtn")
    x = model.patch_embed(images()) + model.pos_embed
    for block in model.blocks[:10]:
        x = block(x)
    x = torch.cat([model.cls_token.expand(len(x), -1, -1), x], dim=1)
    for block in model.blocks[10:]:
        x = block(x)
    torch.testing.assert_close(model(images()), model.head(model.norm(x)[:, 0]), atol=1e-5, rtol=0)


def test_tokens_take_their_positions_along():
    base = build(reg_tokens=2)
    model = vm.apply(base, vm.DynamicTokenNorm())
    assert torch.equal(model.pos_embed, base.pos_embed[:, 3:])
    assert torch.equal(model.cls_token, base.cls_token + base.pos_embed[:, :1])
    assert torch.equal(model.reg_token, base.reg_token + base.pos_embed[:, 1:3])


def test_trade_off_1_is_the_base_model_with_a_later_class_token():
    base = build(class_token=False, pool="avg")
    with torch.no_grad():
        model = vm.apply(base, vm.DynamicTokenNorm(trade_off=1.0, eps=1e-6))
        torch.testing.assert_close(model(images()), base(images()), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("name", "value"), [("band", 3), ("window", 3), ("offsets", "whole")])
def test_bands_windows_and_whole_offsets_are_settings(name, value):
    model = build(f"dtn({name}={value})", num_heads=4, embed_dim=32)
    assert getattr(model.blocks[0].norm1.mixing, name) == value
    assert model(images()).isfinite().all()


def test_norms_without_gain_keep_having_none():
    plain = vm.ViTConfig.from_name("mu12/4", img_size=(12, 16), num_classes=5)
    attn, mlp = (replace(branch, before=NormConfig(affine=False)) for branch in (plain.attn, plain.mlp))
    model = vm.apply(vm.vit(plain, attn=attn, mlp=mlp), vm.DynamicTokenNorm(norms="both"))
    assert is_dtn(model.blocks[0].norm1)
    assert model.blocks[0].norm1.weight is model.blocks[0].norm2.weight is None
    kept = vm.apply(vm.vit(plain, attn=attn), vm.DynamicTokenNorm(norms="both"))
    assert kept.blocks[0].norm1.weight is None
    assert kept.blocks[0].norm2.weight is not None


def test_counts():
    base = build()
    model = vm.apply(base, vm.DynamicTokenNorm())
    heads, dim, (rows, columns) = model.vit_config.num_heads, model.vit_config.embed_dim, model.vit_config.grid
    assert count_params(model) - count_params(base) == 10 * 5 * heads - dim  # the class token has no position
    plain = model.vit_config.with_(first_blocks=None)
    assert count_macs(model.vit_config) - count_macs(plain) == 10 * 2 * 12 * (rows + columns) * dim
    assert count_macs(model.vit_config, dense_norms=True) - count_macs(plain) == 10 * 2 * 12 * 12 * dim


@pytest.mark.parametrize("other", ["normformer", "subln", "norm(kind=rms,exact=false)", "layerscale", "dpn"])
def test_other_changes_reach_the_first_blocks_in_any_order(other):
    both = vm.parse_changes(f"dtn(norms=both)+{other}")
    first, last = vm.apply(build(depth=3), *both), vm.apply(build(depth=3), *reversed(both))
    assert first.vit_config == last.vit_config
    assert [type(m) for m in first.modules()] == [type(m) for m in last.modules()]
    assert first.vit_config.branches(0)[0].branch == first.vit_config.branches(2)[0].branch
    assert first.vit_config.branches(0)[1].inner == first.vit_config.branches(2)[1].inner


def test_rms_after_dtn_keeps_the_biases_of_dtn():
    base = build(depth=3)
    for name, value in base.named_parameters():
        if name.endswith("norm1.bias"):
            torch.nn.init.normal_(value)
    model = vm.apply(base, *vm.parse_changes("dtn+norm(kind=rms,exact=false)"))
    assert torch.equal(model.blocks[0].norm1.bias, base.blocks[0].norm1.bias)
    assert model.blocks[2].norm1.weight is not None
    assert not [n for n, _ in model.named_parameters() if n.endswith("bias") and n.startswith("blocks.2.norm")]


def test_a_closed_gate_is_the_base_model():
    base = build(class_token=False, pool="avg")
    with torch.no_grad():
        start, closed, near, open_ = (
            model(images()) for model in (base, *(vm.apply(base, vm.PositionalAttention(gate=g)) for g in (-30, -5, 1)))
        )
    torch.testing.assert_close(closed, start, atol=1e-5, rtol=0)
    assert 0 < float((near - start).abs().max()) < 0.1 * float((open_ - start).abs().max())


def test_with_dtn_in_any_order():
    """Tokens join after both, whatever their numbers of blocks."""
    dtn_first, other = build("dtn(blocks=4)+gpsa(blocks=7)"), build("gpsa(blocks=7)+dtn(blocks=4)")
    assert dtn_first.vit_config == other.vit_config
    assert dtn_first.vit_config.prefix_from == 7
    assert torch.equal(dtn_first.cls_token, other.cls_token)
    assert torch.equal(dtn_first.pos_embed, other.pos_embed)


def test_prefix_tokens_from_the_beginning():
    """A config may have positions where prefix tokens are present; the change does not ask for it."""
    config = vm.PositionalAttention().edit(build().vit_config)
    model = vm.ViT(config.with_(prefix_from=0, reg_tokens=1)).eval()
    assert {block.attn.positions.prefix_tokens for block in model.blocks[:10]} == {2}
    assert model(images()).shape == (2, 5)


def test_what_does_not_fit_the_first_blocks_is_refused():
    config = vm.PositionalAttention(blocks=12).edit(build(class_token=False, pool="avg").vit_config)
    with pytest.raises(UserError, match="first 12 blocks are more"):
        config.with_(depth=11)
    with pytest.raises(UserError, match="different norms"):  # half of the norms
        vm.apply(build("dtn"), vm.Placement(attn="post", mlp="post"))


@pytest.mark.parametrize("text", ["dtn(norms=both)", "gpsa"])
def test_multiply_adds_are_those_that_run(text):
    model = build(text)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.forward_head(model.forward_features(images()[:1]))
    assert counter.get_total_flops() == 2 * count_macs(model.vit_config)
