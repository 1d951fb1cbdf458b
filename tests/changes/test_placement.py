"""The nine placements and both readings of 'post' against their formulas, written out slowly."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import vitmods as vm
from vitmods.model.slots import NormConfig

PLACES = ("pre", "post", "pre+post")
PAIRS = list(itertools.product(PLACES, PLACES))


def layer_norm(x, weight, bias):
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight + bias


def slow_vit(weights, images, attn, mlp, reading, depth=2, heads=2):
    """Images -> all tokens, from a state dict and the formulas of Placement's docstring alone."""

    def norm(name, x):
        return layer_norm(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(name, x):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def attention(name, x):
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in linear(f"{name}.qkv", x).chunk(3, -1))
        scores = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1)
        return linear(f"{name}.proj", (scores @ v).transpose(1, 2).flatten(2))

    def branch(x, place, name, slot, function):
        h = function(name, norm(slot, x) if place.startswith("pre") else x)
        if "post" not in place:
            return x + h
        return norm(f"{slot}_after", x + h) if reading == "residual" else x + norm(f"{slot}_branch", h)

    x = F.conv2d(images, weights["patch_embed.proj.weight"], weights["patch_embed.proj.bias"], stride=4)
    x = x.flatten(2).transpose(1, 2)
    x = torch.cat([weights["cls_token"].expand(len(x), -1, -1), x], 1) + weights["pos_embed"]
    for i in range(depth):
        b = f"blocks.{i}"
        x = branch(x, attn, f"{b}.attn", f"{b}.norm1", attention)
        feed_forward = lambda name, h: linear(f"{name}.fc2", F.gelu(linear(f"{name}.fc1", h)))  # noqa: E731
        x = branch(x, mlp, f"{b}.mlp", f"{b}.norm2", feed_forward)
    ends_with_norm = reading == "residual" and "post" in mlp
    return x if ends_with_norm else norm("norm", x)


@pytest.fixture(scope="module")
def base():
    torch.manual_seed(0)
    model = vm.vit("mu2/4", img_size=8, num_classes=3).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize("reading", ["residual", "branch"])
@pytest.mark.parametrize(("attn", "mlp"), PAIRS)
def test_formula(base, attn, mlp, reading):
    model = base if (attn, mlp) == ("pre", "pre") else vm.apply(base, vm.Placement(attn, mlp, reading))
    for parameter in model.parameters():
        if not parameter.any() or (parameter == 1).all():  # norms that are new
            torch.nn.init.normal_(parameter)
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    expected = slow_vit(model.state_dict(), images, attn, mlp, reading)
    torch.testing.assert_close(model.forward_features(images), expected, atol=1e-9, rtol=0)
    torch.testing.assert_close(model(images), model.head(expected[:, 0]), atol=1e-9, rtol=0)


@pytest.mark.parametrize("reading", ["residual", "branch"])
def test_a_moved_norm_takes_its_weights_along(base, reading):
    model = vm.apply(base, vm.Placement("post", "pre+post", reading))
    moved = model.blocks[1].norm1_after if reading == "residual" else model.blocks[1].norm1_branch
    assert torch.equal(moved.weight, base.blocks[1].norm1.weight)
    assert torch.equal(model.blocks[1].norm2.weight, base.blocks[1].norm2.weight)
    fresh = model.blocks[1].norm2_after if reading == "residual" else model.blocks[1].norm2_branch
    assert (fresh.weight == 1).all()


def test_there_and_back_gives_the_final_norm_again_and_norms_keep_their_kind_and_eps(base):
    there = vm.apply(base, vm.Placement("post", "post"))
    back = vm.apply(there, vm.Placement("pre", "pre"))
    assert back.vit_config == base.vit_config
    assert all(torch.equal(a.norm1.weight, b.norm1.weight) for a, b in zip(back.blocks, base.blocks))
    model = vm.apply(base, vm.Norm("rms"), vm.Placement("post", "post"))
    assert model.vit_config.attn.after == NormConfig("rms", 1e-6)
    assert vm.apply(there, vm.Norm("rms", exact=False)).vit_config == model.vit_config
