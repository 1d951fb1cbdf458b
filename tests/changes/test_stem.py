"""The change of stems: which weights stay, what does not fit, and patches that hold several layers."""

import pytest
import torch

import vitmods as vm
from vitmods.changes.compose import edit
from vitmods.layers import HMLPStem, LeViTStem, LinearStem, LocalTransformerStem

ROWS = ["hmlp", "hmlp-ln", "levit", "stem(kind=levit,norm=layer)", "local", "stem(kind=linear,norm=batch,gelu=true)"]


@pytest.fixture
def base():
    torch.manual_seed(0)
    return vm.vit("mu/16", img_size=32, num_classes=5)


def apply(model, *texts):
    for text in texts:
        model = vm.apply(model, *vm.parse_changes(text))
    return model


KINDS = {"linear": LinearStem, "hmlp": HMLPStem, "levit": LeViTStem, "local": LocalTransformerStem}


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_from_any_stem_to_any_other_all_else_is_kept(base, first, second):
    if first == second:
        return
    old = base if first == "linear" else apply(base, f"stem(kind={first})")
    new = apply(old, f"stem(kind={second})")
    assert type(new.patch_embed) is KINDS[second]
    before, after = old.state_dict(), new.state_dict()
    other_names = {name for name in after if not name.startswith("patch_embed.")}
    assert other_names == {name for name in before if not name.startswith("patch_embed.")}
    assert all(torch.equal(before[name], after[name]) for name in other_names)


def test_the_linear_stem_keeps_its_projection(base):
    for change in ("stem(kind=linear,norm=batch)", "stem(kind=linear,gelu=true)"):
        model = apply(base, change)
        assert torch.equal(model.patch_embed.proj.weight, base.patch_embed.proj.weight)
    again = apply(base, "dpn", "stem(kind=linear)")
    assert again.vit_config == base.vit_config
    assert torch.equal(again.patch_embed.proj.weight, base.patch_embed.proj.weight)


def test_another_norm_keeps_the_maps_between(base):
    batch = apply(base, "hmlp")
    with torch.no_grad():
        batch(torch.randn(8, 3, 32, 32))  # gathers statistics, which LayerNorm has no place for
    layer = apply(batch, "hmlp-ln")
    for name in ("layers.0", "layers.3", "proj"):
        old, new = (m.patch_embed.get_submodule(name) for m in (batch, layer))
        assert torch.equal(old.weight, new.weight)
        assert torch.equal(old.bias, new.bias)
    assert not list(layer.patch_embed.buffers())


@pytest.mark.parametrize("row", ROWS)
def test_timms_tools_find_the_layer_that_reads_pixels(base, row):
    model = apply(base, row)
    first = model.get_submodule(model.pretrained_cfg["first_conv"])
    assert first is next(m for m in model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear))


@pytest.mark.parametrize("init", ["timm", "big_vision"])
@pytest.mark.parametrize("row", ROWS)
def test_tokens_start_at_a_sound_size(row, init):
    torch.manual_seed(0)
    config = edit(vm.ViTConfig.from_name("Ti/16", img_size=64, init=init), vm.parse_changes(row))
    stem = vm.vit(config, depth=1).patch_embed
    tokens = stem(torch.randn(8, 3, 64, 64))
    assert 0.05 < float(tokens.std()) < 2


def test_exact_rms_goes_through_a_stem_that_ends_in_layer_norm(base):
    """center.py's algebra: the last norm of the stem writes no mean, and the last map of the local transformer can be
    centered."""
    images = torch.randn(2, 3, 32, 32)
    for change in ("hmlp-ln", "local"):
        model = apply(base, change).eval()
        torch.testing.assert_close(apply(model, "rms")(images), model(images), atol=1e-5, rtol=1e-5)
