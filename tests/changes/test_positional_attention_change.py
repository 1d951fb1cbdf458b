"""The gpsa change: where positions sit, where tokens join, how it meets dtn, and what it refuses."""

import pytest
import torch

import vitmods as vm
from vitmods.model.flops import count_macs
from vitmods.util.errors import UserError


def build(**overrides):
    torch.manual_seed(0)
    model = vm.vit("mu12/4", **({"img_size": (12, 16), "num_classes": 5} | overrides)).eval()
    for token in (model.cls_token, model.pos_embed):
        if token is not None:
            torch.nn.init.normal_(token, std=0.5)
    return model


def images(size=(12, 16)):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))


def with_positions(model):
    return [block.attn.positions is not None for block in model.blocks]


def test_ten_of_twelve_blocks_before_the_class_token():
    model, seen = vm.apply(build(), vm.PositionalAttention()), []
    assert with_positions(model) == [True] * 10 + [False] * 2
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[1]))
    model.forward_features(images())
    assert seen == [12] * 10 + [13] * 2
    assert model.blocks[0].attn.positions.grid_size == (3, 4)


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
    first, last = (vm.parse_changes(text) for text in ("dtn(blocks=4)+gpsa(blocks=7)", "gpsa(blocks=7)+dtn(blocks=4)"))
    dtn_first, other = vm.apply(build(), *first), vm.apply(build(), *last)
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


def test_another_image_size():
    model = vm.apply(build(), vm.PositionalAttention())
    model.set_input_size((20, 8))
    assert model.blocks[0].attn.positions.grid_size == (5, 2)
    fresh = vm.ViT(model.vit_config).eval()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(model(images((20, 8))), fresh(images((20, 8))))


def test_rms_stays_exact():
    """The kernel's rows sum to 1, so what is absorbed into the values' bias passes through."""
    base = vm.apply(build(depth=3), vm.PositionalAttention())
    for name, value in base.named_parameters():
        if name.endswith("norm1.bias"):
            torch.nn.init.normal_(value)
    with torch.no_grad():
        torch.testing.assert_close(vm.apply(base, vm.Norm("rms"))(images()), base(images()), atol=1e-4, rtol=1e-4)


def test_multiply_adds_are_those_that_run():
    from torch.utils.flop_counter import FlopCounterMode

    model = vm.apply(build(), vm.PositionalAttention())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.forward_head(model.forward_features(images()[:1]))
    assert counter.get_total_flops() == 2 * count_macs(model.vit_config)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("gpsa(blocks=0)", "at least 1"),
        ("gpsa(blocks=12)", "class token could join"),
        ("gpsa(blocks=13)", "class token could join"),
        ("gpsa(init=random)", "init"),
        ("gpsa(gate=nan)", "a number"),
    ],
)
def test_settings_that_do_not_fit(text, match):
    with pytest.raises(UserError, match=match):
        vm.apply(build(), *vm.parse_changes(text))


def test_more_blocks_than_there_are():
    config = vm.PositionalAttention(blocks=12).edit(build(class_token=False, pool="avg").vit_config)
    with pytest.raises(UserError, match="first 12 blocks are more"):
        config.with_(depth=11)


def test_export_refuses():
    model = vm.apply(build(), vm.PositionalAttention())
    with pytest.raises(UserError, match="positional"):
        vm.adapters.to_timm(model)
