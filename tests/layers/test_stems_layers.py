"""The stems of several layers: their shapes, what they refuse, and what they owe as modules."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import vitmods as vm
from vitmods import layers as vml
from vitmods.layers.norms import BatchNorm, Whitening
from vitmods.layers.stems import patchify
from vitmods.util.errors import UserError

KINDS = [vml.HMLPStem, vml.LeViTStem, vml.LocalTransformerStem]


def convolutions(stem):
    return [(m.kernel_size[0], m.out_channels) for m in stem.modules() if isinstance(m, nn.Conv2d)]


PLANS = [
    (vml.HMLPStem, 4, [(4, 64)]),
    (vml.HMLPStem, 8, [(4, 16), (2, 64)]),
    (vml.HMLPStem, 32, [(4, 16), (2, 16), (2, 16), (2, 64)]),
    (vml.LeViTStem, 2, [(3, 64)]),
    (vml.LeViTStem, 32, [(3, 4), (3, 8), (3, 16), (3, 32), (3, 64)]),
]


@pytest.mark.parametrize(("kind", "patch", "layers"), PLANS)
def test_hmlp_grows_from_4_pixels_and_levit_halves_the_image_and_doubles_the_width(kind, patch, layers):
    stem = kind(vml.StemSize((2 * patch, patch), patch, 3, 64))
    assert convolutions(stem) == layers
    if kind is vml.HMLPStem:
        assert math.prod(side for side, _ in layers) == patch
        assert sum(isinstance(m, nn.GELU) for m in stem.modules()) == len(layers) - 1
        assert sum(isinstance(m, BatchNorm) for m in stem.modules()) == len(layers)
    else:
        assert not [name for name, _ in stem.named_parameters() if name.startswith("proj.bias")]
    assert stem(torch.randn(8, 3, 2 * patch, patch)).shape == (8, 2, 64)


REFUSED = [
    (vml.HMLPStem, {"patch_size": 14}, r"4, 8, 16, 32, \.\.\., not 14. Use patch_size=8"),
    (vml.HMLPStem, {"patch_size": 2}, "not 2. Use patch_size=4"),
    (vml.HMLPStem, {"patch_size": 12}, "not 12. Use patch_size=8"),
    (vml.HMLPStem, {"patch_size": (8, 16)}, "square patches, got 8 x 16"),
    (vml.HMLPStem, {"patch_size": 8, "embed_dim": 30}, "multiple of 4, got 30"),
    (vml.LeViTStem, {"patch_size": 14}, "2, 4, 8, 16, .*, not 14"),
    (vml.LeViTStem, {"patch_size": 1}, "not 1"),
    (vml.LeViTStem, {"patch_size": (8, 16)}, "square patches"),
    (vml.LeViTStem, {"patch_size": 16, "embed_dim": 20}, "multiple of 8, got 20"),
    (vml.LocalTransformerStem, {"patch_size": (16, 14)}, "multiples of 4 pixels, not 16 x 14"),
]


@pytest.mark.parametrize(("kind", "sizes", "message"), REFUSED)
def test_patches_that_do_not_fit_are_errors(kind, sizes, message):
    with pytest.raises(UserError, match=message):
        kind(vml.StemSize(112, **sizes))
    stem = kind(vml.StemSize(16, 8, 3, 8))
    with pytest.raises(UserError, match=r"made for patches of \(8, 8\).*\(4, 4\)"):
        stem.set_input_size(patch_size=4)
    assert stem.patch_size == (8, 8)


def test_local_transformer_written_out():
    """Cells of a patch in row-major order are the tokens of pre-norm blocks; what these give side by side is
    projected."""
    torch.manual_seed(0)
    stem = vml.LocalTransformerStem(vml.StemSize((8, 24), (8, 12), 2, 24)).double()
    assert {type(m) for m in stem.blocks} == {vml.Block}
    assert (len(stem.blocks), stem.blocks[0].attn.num_heads, stem.embed.in_features) == (12, 4, 2 * 2 * 3)
    images = torch.randn(1, 2, 8, 24, dtype=torch.float64)
    for token in range(2):
        cells = patchify(images[..., 12 * token : 12 * token + 12], (2, 3))
        x = F.linear(cells, stem.embed.weight, stem.embed.bias) + stem.position
        for block in stem.blocks:
            x = block(x)
        expected = F.linear(stem.norm_cells(x).flatten(), stem.proj.weight, stem.proj.bias)
        torch.testing.assert_close(stem(images)[0, token], expected, atol=1e-12, rtol=0)
    for dim, width in ((768, 56), (384, 28), (192, 16), (32, 4), (1024, 76)):
        with torch.device("meta"):
            assert vml.LocalTransformerStem(vml.StemSize(16, 16, 3, dim)).embed.out_features == width


@pytest.mark.parametrize("kind", [vml.LinearStem, vml.DualPatchNormStem, *KINDS])
def test_gradients_of_each_image_by_torch_func(kind):
    stem = kind(vml.StemSize(16, 8, 2, 64)).eval()
    values, images = dict(stem.named_parameters()), torch.randn(3, 2, 16, 16)

    def loss(values, image):
        return torch.func.functional_call(stem, values, (image[None],)).pow(3).mean()

    per_image = torch.vmap(torch.func.grad(loss), (None, 0))(values, images)
    for i, image in enumerate(images):
        for name, expected in zip(values, torch.autograd.grad(loss(values, image), list(values.values()))):
            torch.testing.assert_close(per_image[name][i], expected, atol=1e-5, rtol=1e-4)


SIZE = vml.StemSize((8, 12), (4, 2), in_chans=2, embed_dim=6)


def randomized(stem):
    torch.manual_seed(0)
    for parameter in stem.parameters():
        torch.nn.init.normal_(parameter)
    return stem


def test_patches_are_row_major_and_channel_first():
    images = torch.arange(2 * 8 * 12).reshape(1, 2, 8, 12)
    patches = patchify(images, (4, 2))
    assert patches.shape == (1, 2 * 6, 2 * 4 * 2)
    for row in range(2):
        for column in range(6):
            patch = images[0, :, row * 4 : row * 4 + 4, column * 2 : column * 2 + 2]
            assert torch.equal(patches[0, row * 6 + column], patch.flatten())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "before", [vml.LayerNorm, vml.RMSNorm, vml.ScaleShift, partial(vml.LayerNorm, affine=False), None]
)
def test_dual_patchnorm_equation_and_gradients_in_training_and_inference(before, bias):
    stem = randomized(vml.DualPatchNormStem(SIZE, bias=bias, norm_before=before)).double()
    images = torch.randn(2, 2, 8, 12, dtype=torch.float64, requires_grad=True)
    patches = stem.norm_before(patchify(images, (4, 2)))
    slow = stem.norm(F.linear(patches, stem.proj.weight.flatten(1), stem.proj.bias))
    fast = stem(images)
    torch.testing.assert_close(fast, slow, atol=1e-12, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(stem.eval()(images), slow, atol=1e-12, rtol=0)
    leaves = [images, *stem.parameters()]
    for a, b in zip(torch.autograd.grad(fast.sin().sum(), leaves), torch.autograd.grad(slow.sin().sum(), leaves)):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


@pytest.mark.parametrize("before", [vml.LayerNorm, Whitening])
def test_normed_patches_are_projected_by_one_product_like_the_listing_of_the_paper(before):
    """A convolution of normed patches takes three times as long to differentiate."""
    stem = vml.DualPatchNormStem(SIZE, norm_before=before)
    images = torch.randn(2, 2, 8, 12)
    with profile(activities=[ProfilerActivity.CPU]) as called:
        stem(images).sum().backward()
        stem(images, torch.tensor([[4, 0], [1, 5]])).sum().backward()
    assert not [event.key for event in called.key_averages() if "conv" in event.key]


def test_a_larger_patch():
    """FlexiViT's rule: resizing patches up and projecting with the resized kernel is the old projection, exactly."""
    stem = randomized(vml.LinearStem(vml.StemSize(4, 4, 2, 6))).double()
    patch = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    old = stem(patch)
    stem.set_input_size(img_size=7, patch_size=7)
    enlarged = F.interpolate(patch, size=(7, 7), mode="bilinear", antialias=True)
    torch.testing.assert_close(stem(enlarged), old, atol=1e-9, rtol=0)
    stem = vml.DualPatchNormStem(SIZE).requires_grad_(False)
    stem.set_input_size(patch_size=(2, 2))
    assert not [name for name, p in stem.named_parameters() if p.requires_grad]


@pytest.mark.parametrize("before", [vml.LayerNorm, vml.RMSNorm, vml.ScaleShift])
def test_dual_patchnorm_follows_a_new_patch_size(before):
    stem = vml.DualPatchNormStem(vml.StemSize(8, 4, 2, 6), norm_before=before)
    gain = torch.randn(2)
    stem.norm_before.weight.data.copy_(gain.repeat_interleave(16))
    stem.set_input_size(patch_size=(8, 2))
    assert stem.grid_size == (1, 4)
    torch.testing.assert_close(stem.norm_before.weight.detach(), gain.repeat_interleave(16))  # flat images stay flat
    tokens = stem(torch.randn(2, 2, 8, 8))
    assert tokens.shape == (2, 4, 6)
    tokens.sum().backward()
    with torch.no_grad():
        assert stem(torch.randn(2, 2, 8, 8)).shape == (2, 4, 6)


@pytest.mark.parametrize("gelu", [False, True])
def test_linear_stem_is_a_linear_map_of_each_patch_then_the_norm_then_gelu(gelu):
    images = torch.randn(2, 2, 8, 12, dtype=torch.float64)
    stem = randomized(vml.LinearStem(SIZE, norm_layer=vml.LayerNorm, gelu=gelu)).double()
    expected = stem.norm(F.linear(patchify(images, (4, 2)), stem.proj.weight.flatten(1), stem.proj.bias))
    torch.testing.assert_close(stem(images), F.gelu(expected) if gelu else expected, atol=1e-12, rtol=0)


def t2t_stem(img_size=(32, 48), **overrides):
    torch.manual_seed(0)
    stem = vml.TokensToTokenStem(vml.StemSize(img_size, 16, 2, 24), **overrides).double()
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


def slow_stem(stem, t2t_images):
    x, grid = squares(t2t_images, 7, 4, 2)
    x, grid = squares(slow_layer(stem.first, x).mT.unflatten(2, grid), 3, 2, 1)
    x, grid = squares(slow_layer(stem.second, x).mT.unflatten(2, grid), 3, 2, 1)
    return x @ stem.proj.weight.flatten(1).T + stem.proj.bias, grid


def test_tokens_to_token_written_out():
    stem, t2t_images = t2t_stem(), random_images()
    expected, grid = slow_stem(stem, t2t_images)
    assert grid == stem.grid_size == (2, 3)
    torch.testing.assert_close(stem(t2t_images), expected, atol=1e-10, rtol=0)
    leaves = list(stem.parameters())
    slow_gradients = torch.autograd.grad(expected.sin().sum(), leaves)
    for a, b in zip(torch.autograd.grad(stem(t2t_images).sin().sum(), leaves), slow_gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
    stem.set_input_size((64, 16))  # which keeps the weights
    t2t_images = random_images(64, 16)
    torch.testing.assert_close(stem(t2t_images), slow_stem(stem, t2t_images)[0], atol=1e-10, rtol=0)
    with pytest.raises(ValueError, match="16 pixels"):
        vml.TokensToTokenStem(vml.StemSize(16, 8))
    with pytest.raises(ValueError, match="16 pixels"):
        stem.set_input_size(None, 8)


def t2t(changes=""):
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "num_heads": 2, "mlp_dim": 96, "depth": 3, "img_size": (64, 48), "num_classes": 5}
    return vm.apply(vm.vit("T2T-14", **sizes), *vm.parse_changes(changes))


@pytest.mark.parametrize(
    "changes", ["dtn(norms=both)+gpsa", "rms", "postnorm+layerscale", "normformer+norm(kind=batch)"]
)
def test_every_parameter_of_a_model_of_tokens_to_token_is_trained(changes):
    vit = t2t(changes)
    vit(random_images(64, 48, 3).float()).square().sum().backward()
    assert not [name for name, p in vit.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert vit.vit_config.grid == (4, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: t2t("dpn"), "is only for the linear stem"),
        (lambda: t2t().set_input_size(None, 8), "16 pixels"),
        (lambda: vm.ViTConfig.from_dict({"stem": {"kind": "t3t"}}), "Unknown stem 't3t'"),
        (lambda: vm.vit("T2T-15"), "T2T-14"),
    ],
)
def test_tokens_to_token_refuses(call, message):
    with pytest.raises(UserError, match=message):
        call()
