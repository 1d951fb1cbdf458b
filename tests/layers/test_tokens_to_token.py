"""The tokens-to-token stem against a reference written token by token, and as the stem of a whole model."""

import pytest
import torch
from torch.nn import functional as F

import vitmods as vm
from vitmods.layers import StemSize, TokensToTokenStem
from vitmods.util.errors import UserError


def build(img_size=(32, 48), **overrides):
    torch.manual_seed(0)
    stem = TokensToTokenStem(StemSize(img_size, 16, 2, 24), **overrides).double()
    for parameter in stem.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return stem


def random_images(height=32, width=48, channels=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, channels, height, width, generator=generator, dtype=torch.float64)


def squares(x, side, stride, padding):
    """(B, channels, rows, columns) -> the values of each overlapping square, channel first, row by row."""
    x = F.pad(x, (padding,) * 4)
    rows = range(0, x.shape[2] - side + 1, stride)
    columns = range(0, x.shape[3] - side + 1, stride)
    cut = [x[:, :, r : r + side, c : c + side].flatten(1) for r in rows for c in columns]
    return torch.stack(cut, dim=1), (len(rows), len(columns))


def slow_layer(layer, x):
    q, k, v = layer.qkv(layer.norm1(x)).split(64, dim=-1)
    x = v + layer.proj(torch.softmax(q @ k.mT / 8, dim=-1) @ v)
    return x + layer.mlp.fc2(F.gelu(layer.mlp.fc1(layer.norm2(x))))


def slow_stem(stem, images):
    x, grid = squares(images, 7, 4, 2)
    x, grid = squares(slow_layer(stem.first, x).mT.unflatten(2, grid), 3, 2, 1)
    x, grid = squares(slow_layer(stem.second, x).mT.unflatten(2, grid), 3, 2, 1)
    return x @ stem.proj.weight.flatten(1).T + stem.proj.bias, grid


def test_definition():
    stem, images = build(), random_images()
    expected, grid = slow_stem(stem, images)
    assert grid == stem.grid_size == (2, 3)
    torch.testing.assert_close(stem(images), expected, atol=1e-10, rtol=0)
    leaves = list(stem.parameters())
    slow_gradients = torch.autograd.grad(expected.sin().sum(), leaves)
    for a, b in zip(torch.autograd.grad(stem(images).sin().sum(), leaves), slow_gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def test_another_image_size_keeps_the_weights():
    stem = build()
    stem.set_input_size((64, 16))
    torch.testing.assert_close(
        stem(random_images(64, 16)), slow_stem(stem, random_images(64, 16))[0], atol=1e-10, rtol=0
    )


@pytest.mark.parametrize("call", [lambda: TokensToTokenStem(StemSize(16, 8)), lambda: build().set_input_size(None, 8)])
def test_another_patch_side_is_refused(call):
    with pytest.raises(ValueError, match="16 pixels"):
        call()


def model(changes="", **overrides):
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "num_heads": 2, "mlp_dim": 96, "depth": 3, "img_size": (64, 48), "num_classes": 5}
    vit = vm.vit("T2T-14", **(sizes | overrides))
    return vm.apply(vit, *vm.parse_changes(changes)) if changes else vit


def images():
    return random_images(64, 48, 3).float()


@pytest.mark.parametrize(
    "changes",
    ["", "dtn", "dtn(norms=both)", "gpsa", "rms", "postnorm", "subln", "normformer", "layerscale", "norm(kind=batch)"],
)
def test_every_parameter_of_a_model_is_trained(changes):
    vit = model(changes)
    vit(images()).square().sum().backward()
    assert not [name for name, p in vit.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert vit.vit_config.grid == (4, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: model("dpn"), "is only for the linear stem"),
        (lambda: model().set_input_size(None, 8), "16 pixels"),
        (lambda: vm.ViTConfig.from_dict({"stem": {"kind": "t3t"}}), "Unknown stem 't3t'"),
        (lambda: vm.vit("T2T-15"), "T2T-14"),
    ],
)
def test_what_does_not_fit(call, message):
    with pytest.raises(UserError, match=message):
        call()
