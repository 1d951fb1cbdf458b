"""Gentle starts: new norms of trained models are fitted to the values that they replace."""

import numpy as np
import pytest
import timm
import torch

import vitmods as vm
from vitmods.util.errors import UserError


def models(change, in_place):
    """A timm ViT whose weights are far from their initialization, and the same with the change."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, embed_dim=24, num_classes=5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval(), vm.apply(model, change, in_place=in_place).eval()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("sides", "norm"), [("both", "layer"), ("both", "rms"), ("before", "layer"), ("after", "layer"), ("after", "rms")]
)
def test_norms_of_the_stem_are_fitted_by_least_squares(sides, norm, in_place):
    change = vm.DualPatchNorm(before=sides != "after", after=sides != "before", norm=norm, start="gentle")
    old, new = models(change, in_place)
    images = torch.rand(6, 3, 32, 32) * torch.rand(6, 3, 1, 1)
    assert change.fit(new, [images[:2], images[2:]])
    x = images.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).reshape(-1, 192)
    target = (x @ old.patch_embed.proj.weight.flatten(1).T + old.patch_embed.proj.bias).detach()
    if sides != "after":
        x = fitted(x, x, norm)
    x = x @ old.patch_embed.proj.weight.flatten(1).T + old.patch_embed.proj.bias
    if sides != "before":
        x = fitted(x, target, norm)
    stem = new.patch_embed(images).flatten(0, 1)
    assert np.allclose(stem.detach(), x.detach(), atol=2e-4)


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
