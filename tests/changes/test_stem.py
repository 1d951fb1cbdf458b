"""Stems: which weights stay, where tokens start, and gentle starts, which fit new norms to the values they replace."""

import itertools

import numpy as np
import pytest
import timm
import torch

import vitmods as vm
from vitmods.changes.compose import edit
from vitmods.layers.stems import STEMS
from vitmods.util.errors import UserError

ROWS = ["hmlp", "hmlp-ln", "levit", "stem(kind=levit,norm=layer)", "local", "stem(kind=linear,norm=batch,gelu=true)"]


@pytest.fixture
def base():
    torch.manual_seed(0)
    return vm.vit("mu/16", img_size=32, num_classes=5)


def apply(model, *texts):
    for text in texts:
        model = vm.apply(model, *vm.parse_changes(text))
    return model


KINDS = ["linear", "hmlp", "levit", "local"]


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(KINDS, 2)))
def test_from_any_stem_to_any_other_all_else_is_kept(base, first, second):
    old = base if first == "linear" else apply(base, f"stem(kind={first})")
    new = apply(old, f"stem(kind={second})")
    assert type(new.patch_embed) is STEMS[second]
    before, after = ({n: v for n, v in m.state_dict().items() if not n.startswith("patch_embed.")} for m in (old, new))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in after)


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


SIDES = [("both", "layer"), ("both", "rms"), ("before", "layer"), ("after", "layer"), ("after", "rms")]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("sides", "norm"), SIDES)
def test_norms_of_the_stem_are_fitted_by_least_squares(sides, norm, in_place):
    """Of a timm ViT whose weights are far from their initialization."""
    change = vm.DualPatchNorm(before=sides != "after", after=sides != "before", norm=norm, start="gentle")
    torch.manual_seed(0)
    old = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, embed_dim=24, num_classes=5)
    for parameter in old.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    new = vm.apply(old.eval(), change, in_place=in_place).eval()
    images = torch.rand(6, 3, 32, 32) * torch.rand(6, 3, 1, 1)
    assert change.fit(new, [images[:2], images[2:]])
    x = images.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).reshape(-1, 192)
    weight, bias = old.patch_embed.proj.weight.flatten(1).T, old.patch_embed.proj.bias
    target = (x @ weight + bias).detach()
    x = (fitted(x, x, norm) if sides != "after" else x) @ weight + bias
    x = fitted(x, target, norm) if sides != "before" else x
    assert np.allclose(new.patch_embed(images).flatten(0, 1).detach(), x.detach(), atol=2e-4)


def fitted(x, target, norm):
    """The norm of x, and each channel of it fitted to the target."""
    x, target = x.detach().double().numpy(), target.double().numpy()
    z = x - (x.mean(-1, keepdims=True) if norm == "layer" else 0)
    z = z / np.sqrt((z**2).mean(-1, keepdims=True) + 1e-6)
    channels = []
    for column, wanted in zip(z.T, target.T, strict=True):
        design = np.stack([column] + [np.ones_like(column)] * (norm == "layer"), -1)
        channels.append(design @ np.linalg.lstsq(design, wanted, rcond=None)[0])
    return torch.tensor(np.stack(channels, -1)).float()


def test_what_cannot_be_fitted_is_refused_or_left_alone():
    with pytest.raises(UserError, match="start=gentle"):
        vm.DualPatchNorm(norm="no_learnable", start="gentle")
    assert not vm.QKNorm().fit(torch.nn.Identity(), iter(()))
