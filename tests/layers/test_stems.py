from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from vitmods.layers import DualPatchNormStem, LayerNorm, LinearStem, RMSNorm, ScaleShift, StemSize
from vitmods.layers.norms import Whitening
from vitmods.layers.stems import patchify

SIZE = StemSize((8, 12), (4, 2), in_chans=2, embed_dim=6)


def randomized(stem, seed=0):
    torch.manual_seed(seed)
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


def test_linear_stem_is_a_linear_map_of_each_patch():
    stem = randomized(LinearStem(SIZE, norm_layer=LayerNorm)).double()
    images = torch.randn(2, 2, 8, 12, dtype=torch.float64)
    expected = stem.norm(F.linear(patchify(images, (4, 2)), stem.proj.weight.flatten(1), stem.proj.bias))
    torch.testing.assert_close(stem(images), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("before", [LayerNorm, RMSNorm, ScaleShift, partial(LayerNorm, affine=False), None])
def test_dual_patchnorm_equation_and_gradients_in_training_and_inference(before, bias):
    stem = randomized(DualPatchNormStem(SIZE, bias=bias, norm_before=before)).double()
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


@pytest.mark.parametrize("before", [LayerNorm, Whitening])
def test_normed_patches_are_projected_by_one_product_like_the_listing_of_the_paper(before):
    """A convolution of normed patches takes three times as long to differentiate."""
    stem = DualPatchNormStem(SIZE, norm_before=before)
    images = torch.randn(2, 2, 8, 12)
    with profile(activities=[ProfilerActivity.CPU]) as called:
        stem(images).sum().backward()
        stem(images, torch.tensor([[4, 0], [1, 5]])).sum().backward()
    assert not [event.key for event in called.key_averages() if "conv" in event.key]


@pytest.mark.parametrize("kind", [LinearStem, DualPatchNormStem])
def test_wrong_images_are_errors_that_say_what_to_do(kind):
    stem = kind(SIZE)
    with pytest.raises(ValueError, match=r"12x8 pixels.*8x12.*set_input_size"):
        stem(torch.zeros(1, 2, 12, 8))
    stem.strict_img_size = False
    assert stem(torch.zeros(1, 2, 12, 8)).shape == (1, 3 * 4, 6)
    with pytest.raises(ValueError, match="10x8 pixels cannot be cut"):
        stem(torch.zeros(1, 2, 10, 8))


@pytest.mark.parametrize("kind", [LinearStem, DualPatchNormStem])
def test_nhwc_output_is_the_grid(kind):
    stem = randomized(kind(SIZE))
    images = torch.randn(1, 2, 8, 12)
    tokens = stem(images)
    stem.output_fmt = "NHWC"
    grid = stem(images)
    assert torch.equal(grid.flatten(1, 2), tokens)
    assert grid.shape == (1, 2, 6, 6)


def test_a_larger_patch_gives_on_enlarged_patches_what_the_old_one_gave():
    """FlexiViT's rule: resizing patches up and projecting with the resized kernel is the old projection, exactly."""
    stem = randomized(LinearStem(StemSize(4, 4, 2, 6))).double()
    patch = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    old = stem(patch)
    stem.set_input_size(img_size=7, patch_size=7)
    enlarged = F.interpolate(patch, size=(7, 7), mode="bilinear", antialias=True)
    torch.testing.assert_close(stem(enlarged), old, atol=1e-9, rtol=0)


@pytest.mark.parametrize("before", [LayerNorm, RMSNorm, ScaleShift])
def test_dual_patchnorm_follows_a_new_patch_size(before):
    stem = DualPatchNormStem(StemSize(8, 4, 2, 6), norm_before=before)
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


def test_a_new_patch_size_leaves_frozen_parameters_frozen():
    stem = DualPatchNormStem(SIZE).requires_grad_(False)
    stem.set_input_size(patch_size=(2, 2))
    assert not [name for name, p in stem.named_parameters() if p.requires_grad]
