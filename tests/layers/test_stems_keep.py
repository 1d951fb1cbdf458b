"""Patch-wise stems: a token depends on its own patch alone, and only the visible patches are computed."""

from functools import partial

import peft
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vitmods import layers as vml
from vitmods.layers.norms import BatchNorm
from vitmods.layers.stems import patchify
from vitmods.layers.stems.base import unpatchify
from vitmods.testing import STEM_CHECKS, StemCase
from vitmods.util.errors import UserError

SIZE = vml.StemSize((16, 24), 8, in_chans=2, embed_dim=8)
KINDS = {
    "linear": partial(vml.LinearStem, SIZE),
    "linear, BN, GELU": partial(vml.LinearStem, SIZE, norm_layer=BatchNorm, gelu=True),
    "linear, LN": partial(vml.LinearStem, SIZE, norm_layer=vml.LayerNorm),
    "dpn": partial(vml.DualPatchNormStem, SIZE),
    "dpn, after": partial(vml.DualPatchNormStem, SIZE, norm_before=None),
    "hmlp, BN": partial(vml.HMLPStem, SIZE),
    "hmlp, LN": partial(vml.HMLPStem, SIZE, norm_layer=vml.LayerNorm, inner_norm=vml.LayerNorm),
    "hmlp, no norm": partial(vml.HMLPStem, SIZE, norm_layer=None, inner_norm=None),
    "local": partial(vml.LocalTransformerStem, SIZE),
}
OVERLAPPING = {
    "levit": partial(vml.LeViTStem, SIZE),
    "levit, LN": partial(vml.LeViTStem, SIZE, norm_layer=vml.LayerNorm, inner_norm=vml.LayerNorm),
    "t2t": partial(vml.TokensToTokenStem, vml.StemSize((32, 48), 16, 3, 32)),
}


def make(kind):
    """A stem of two layers with random parameters and running statistics, in float64."""
    torch.manual_seed(0)
    stem = KINDS[kind]().double()
    for parameter in stem.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    for name, buffer in stem.named_buffers():
        if "running" in name:
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    return stem


def random_images(count):
    return torch.randn(count, 2, 16, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def select(tokens, keep):
    return tokens.gather(1, keep[..., None].expand(-1, -1, tokens.shape[2]))


def same(a, b, atol=1e-10):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


@pytest.mark.parametrize("kind", [*KINDS, *OVERLAPPING])
@pytest.mark.parametrize("promise", STEM_CHECKS)
def test_it_keeps_its_promises(promise, kind, monkeypatch):
    monkeypatch.setattr("vitmods.layers.stems.local.LOCAL_DEPTH", 1)
    if promise == "it is one graph" and "," in kind:
        pytest.skip("slow, and the kinds without options are enough")
    make, size = (KINDS | OVERLAPPING)[kind].func, (KINDS | OVERLAPPING)[kind].args[0]
    STEM_CHECKS[promise](StemCase(make, size, (KINDS | OVERLAPPING)[kind].keywords))


def test_keep_may_have_32_bits_and_images_any_layout():
    stem, keep, images = make("hmlp, LN").train(), torch.tensor([[4, 0], [1, 5]]), random_images(2)
    same(stem(images, keep.int()), stem(images, keep))
    same(stem(images.contiguous(memory_format=torch.channels_last), keep), stem(images, keep))


@pytest.mark.parametrize("kind", ["hmlp, BN", "hmlp, LN"])
def test_batch_statistics_of_training_are_those_of_the_visible_patches(kind):
    stem, alone = make(kind).train(), make(kind).train()
    keep = torch.tensor([[4, 0, 1], [1, 5, 2]])
    images = random_images(2)
    seen = patchify(images, (8, 8)).gather(1, keep[..., None].expand(-1, -1, 128))
    alone.strict_img_size = False
    as_images = seen.view(6, 2, 8, 8)  # each visible patch an image of its own
    same(stem(images, keep).flatten(0, 1), alone(as_images).flatten(0, 1))
    for a, b in zip(stem.buffers(), alone.buffers(), strict=True):
        same(a.double(), b.double(), atol=1e-6)
    differs = (stem(images, keep) - select(stem(images), keep)).abs().max() > 1e-3
    assert bool(differs) == (kind == "hmlp, BN")


@pytest.mark.parametrize("kind", KINDS)
def test_work_is_proportional_to_what_is_visible(kind):
    stem, images = make(kind), random_images(2)

    def count(*keep):
        with FlopCounterMode(display=False) as counter:
            stem(images, *keep).sum().backward()
        return counter.get_total_flops()

    third = count(torch.tensor([[0, 3], [5, 1]]))
    assert third * 3 == count(torch.arange(6).expand(2, 6))
    assert third * 3 == count()


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (torch.zeros(2, 0, dtype=torch.long), "keep is empty"),
        (torch.tensor([[0, 1], [2, 2]]), "repeats a patch of image 1"),
        (torch.tensor([[0, 6], [1, 2]]), r"names the patches \[6\]; an image has 6"),
        (torch.tensor([[0, -1], [1, 2]]), r"names the patches \[-1\]"),
        (torch.tensor([[0, 1]]), "rows for 1 images, and there are 2"),
        (torch.tensor([0, 1]), r"tensor \(B, K\) of whole numbers"),
        (torch.tensor([[0.0], [1.0]]), r"tensor \(B, K\) of whole numbers"),
        (torch.ones(2, 6, dtype=torch.bool), r"tensor \(B, K\) of whole numbers"),
        ([[0], [1]], r"tensor \(B, K\) of whole numbers"),
    ],
    ids=str,
)
def test_lists_that_make_no_sense_are_errors(keep, message):
    with pytest.raises(UserError, match=message):
        make("hmlp, LN")(random_images(2), keep)


def test_what_cannot_keep_says_why():
    keep = torch.tensor([[0]])
    with pytest.raises(UserError, match=r"overlapping windows.*patch-wise stem"):
        vml.LeViTStem(SIZE).double()(random_images(1), keep)
    with pytest.raises(UserError, match="overlapping windows"):
        vml.TokensToTokenStem(vml.StemSize(16, 16, 2, 8)).double()(random_images(1)[..., :16], keep)
    stem = make("linear")
    stem.output_fmt = "NHWC"
    with pytest.raises(UserError, match="do not form a grid"):
        stem(random_images(1), keep)
    with pytest.raises(ValueError, match=r"24x16 pixels.*set_input_size"):
        make("hmlp, LN")(random_images(1).mT, keep)


def adapted(kind, how):
    """A stem whose layers are not, or do not only do, what their weights say."""
    stem = make(kind)
    if how == "LoRA":
        layers = ["proj", "0"] if kind.startswith("hmlp") else ["proj"]
        stem = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=layers), stem)
        for name, parameter in stem.named_parameters():
            if "lora" in name:
                torch.nn.init.normal_(parameter, std=0.5)
        assert [name for name, _ in stem.named_parameters() if "proj.lora_B" in name]
    elif how == "hook":
        stem.proj.register_forward_hook(lambda module, args, out: out.sin())
    elif how == "parametrization":
        torch.nn.utils.parametrizations.weight_norm(stem.proj)
    else:
        stem = torch.ao.quantization.quantize_dynamic(stem.float())
    return stem.eval()


@pytest.mark.parametrize("how", ["LoRA", "hook", "parametrization", "quantize_dynamic"])
@pytest.mark.parametrize("kind", ["linear", "dpn", "hmlp, LN", "local"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
def test_what_is_put_onto_the_layers_acts_on_visible_patches_too(kind, how):
    stem, keep = adapted(kind, how), torch.tensor([[4, 0], [1, 5]])
    images = random_images(2).to(next(stem.norm.parameters(), next(stem.parameters())).dtype)
    # Dynamic quantization scales by the largest number of a batch, which is another where patches are left out.
    tolerance = {"quantize_dynamic": 0.2 if kind == "local" else 1e-5}.get(how, 1e-10)
    same(stem(images, keep), select(stem(images), keep), tolerance)


def replaced(stem):
    """Another convolution: with wider windows that give the same grid."""
    stem.proj = torch.nn.Conv2d(2, 8, 10, 8, padding=1).double()


def heard(stem):
    """What a hook for all modules is called with."""
    modules = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: modules.append(module))
    try:
        stem(random_images(2))
    finally:
        handle.remove()
    assert stem.proj in modules


def masked(stem):
    convolve = stem.proj.forward
    stem.proj.forward = lambda images: convolve(images) * 2


@pytest.mark.parametrize("how", ["LoRA", "hook", "parametrization", replaced, masked, heard])
def test_a_projection_that_is_not_a_plain_convolution_is_called_with_the_grid_of_patches(how):
    stem, images = adapted("dpn", how) if isinstance(how, str) else make("dpn"), random_images(2)
    if callable(how):
        how(stem)
    normed = unpatchify(stem.norm_before(patchify(images, (8, 8))), (8, 8), images.shape)
    same(stem(images), stem.norm(stem.proj(normed).flatten(2).mT))
