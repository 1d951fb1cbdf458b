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
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=24, num_classes=5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval(), vm.apply(model, change, in_place=in_place).eval()


def read_by(model, module, images):
    values = []
    hook = module.register_forward_hook(lambda module, args, output: values.append((args[0], output)))
    model(images)
    hook.remove()
    return tuple(v.detach().double().flatten(0, -2).numpy() for v in values[0])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_queries_and_keys_are_fitted_by_least_squares(norm, in_place):
    old, new = models(vm.QKNorm(norm=norm, start="gentle"), in_place)
    images = torch.rand(6, 3, 32, 32)
    assert new_norms(new, "q_norm")[0].weight.eq(1).all()
    assert fit(new, images)
    block = old.blocks[0].attn
    x = old.blocks[0].norm1(old._pos_embed(old.patch_embed(images)))
    for i, name in enumerate(("q_norm", "k_norm")):
        target = block.qkv(x).unflatten(-1, (3, 3, 8))[:, :, i].detach().double().flatten(0, -2).numpy()
        fitted = new_norms(new, name)[0]
        weight, bias = fitted.weight.detach(), getattr(fitted, "bias", None)
        z = target - (target.mean(-1, keepdims=True) if norm == "layer" else 0)
        z = z / np.sqrt((z**2).mean(-1, keepdims=True))
        for channel in range(8):
            columns = [z[:, channel]] + [np.ones(len(z))] * (bias is not None)
            solution = np.linalg.lstsq(np.stack(columns, -1), target[:, channel], rcond=None)[0]
            found = [weight[channel], *([bias[channel].detach()] if bias is not None else [])]
            assert np.allclose(found, solution, atol=1e-4)


def new_norms(model, name):
    return [module for where, module in model.named_modules() if where.endswith(name)]


def fit(model, images):
    changes = model.changes if isinstance(model, vm.ViT) else model.vm_changes
    return changes[-1].fit(model, [images[:3], images[3:]])


@pytest.mark.parametrize("in_place", [False, True])
def test_a_gentle_stem_is_nearer_to_the_old_one(in_place):
    """What both norms put out is the least squares of the old stem's outputs on the normalized ones."""
    old, new = models(vm.DualPatchNorm(start="gentle"), in_place)
    images = torch.rand(6, 3, 32, 32) * torch.rand(6, 3, 1, 1)
    target = old.patch_embed(images).flatten(0, 1).detach().double().numpy()
    after = [m for name, m in new.named_modules() if name.endswith(("norm_after", "patch_embed.norm"))][0]
    far = np.abs(read_by(new, after, images)[1] - target).mean()
    assert fit(new, images)
    near = read_by(new, after, images)[1]
    assert np.abs(near - target).mean() < 0.8 * far
    residual = target - near  # not correlated with what the norm makes of the projection
    assert np.abs(residual.mean(0)).max() < 1e-4
    assert np.abs((residual * near).mean(0)).max() < 1e-3


def test_what_cannot_be_fitted_is_refused_or_left_alone():
    with pytest.raises(UserError, match="start=gentle"):
        vm.DualPatchNorm(norm="no_learnable", start="gentle")
    assert not vm.QKNorm().fit(torch.nn.Identity(), iter(()))
