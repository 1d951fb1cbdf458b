"""Rotary positions equal timm's in all forms, and the published ViT-5."""

import pytest
import timm.layers.pos_embed_sincos as sincos
import torch

import vitmods as vm
from vitmods.layers import RotaryPositions
from vitmods.model.config import BranchConfig, NormConfig, RopeConfig

EMBEDDINGS = {
    "axial": (
        {"base": 50.0, "offset": 1.0, "columns_first": True, "reference": (7, 7)},
        lambda: sincos.RotaryEmbeddingCat(
            16, in_pixels=False, temperature=50.0, grid_offset=1.0, grid_indexing="xy", ref_feat_shape=[7, 7]
        ),
    ),
    "halved": (
        {"pairs": "halved", "base": 50.0},
        lambda: sincos.RotaryEmbeddingCat(16, in_pixels=False, temperature=50.0, rotate_half=True),
    ),
    "dinov3": (
        {"pairs": "halved", "coordinates": "centered", "offset": 0.25},
        lambda: sincos.RotaryEmbeddingDinoV3(16, grid_offset=0.25),
    ),
    "mixed": (
        {"frequencies": "mixed", "base": 10.0, "columns_first": True},
        lambda: sincos.RotaryEmbeddingMixed(48, depth=1, num_heads=3),
    ),
}


@pytest.mark.parametrize("grid", [(4, 6), (5, 5)], ids=str)
@pytest.mark.parametrize("form", EMBEDDINGS)
def test_timms_embeddings(form, grid):
    settings, make = EMBEDDINGS[form]
    reference = make()
    rope = RotaryPositions(16, 3, (4, 6), 2, settings=RopeConfig(**settings))
    embedding = reference.get_embed(grid)
    if form == "mixed":
        rope.freqs.data = reference.freqs[:, 0].detach()
        embedding = embedding[0]
    rope.grid_size = grid  # as for images of another size
    q, k = torch.randn(2, 2, 3, 2 + grid[0] * grid[1], 16)
    half = settings.get("pairs") == "halved"
    for x, turned in zip((q, k), rope(q, k), strict=True):
        expected = sincos.apply_rot_embed_cat(x[:, :, 2:], embedding, half=half)
        torch.testing.assert_close(turned, torch.cat([x[:, :, :2], expected], 2), atol=1e-5, rtol=0)
    first, _ = rope(q[:, :, :1], k)
    torch.testing.assert_close(first, q[:, :, :1])
    rope.set_grid(grid)
    torch.testing.assert_close(rope(q, k)[1], turned, atol=0, rtol=0)


@pytest.mark.parametrize("frequencies", ["axial", "mixed"])
def test_products_depend_on_the_offset_alone(frequencies):
    rope = RotaryPositions(8, 2, (5, 5), settings=RopeConfig(frequencies)).double()
    q, k = torch.randn(2, 1, 2, 1, 8, dtype=torch.float64).expand(-1, -1, -1, 25, -1)
    turned_q, turned_k = rope(q, k)
    products = (turned_q @ turned_k.mT).view(2, 5, 5, 5, 5)
    torch.testing.assert_close(products[:, 0, 1, 2, 3], products[:, 2, 0, 4, 2], atol=1e-12, rtol=0)
    assert (products[:, 0, 1, 2, 3] - products[:, 0, 1, 3, 2]).abs().min() > 1e-6
    assert torch.equal(
        RotaryPositions(8, 2, (5, 5)).double().table, RotaryPositions(8, 2, (5, 5), dtype=torch.double).table
    )


def test_the_mixed_start_is_the_axial_one_turned():
    rope = RotaryPositions(16, 3, (4, 4), settings=RopeConfig("mixed", 10.0))
    torch.manual_seed(0)
    rope.reset_parameters()
    torch.manual_seed(0)
    expected = sincos.init_random_2d_freqs(16, 1, 3, temperature=10.0)[:, 0]
    torch.testing.assert_close(rope.freqs.detach(), expected, atol=1e-6, rtol=0)


def test_another_number_of_tokens_is_refused():
    with pytest.raises(ValueError, match="grid of 4 x 6: set grid_size"):
        RotaryPositions(8, 2, (4, 6))(torch.zeros(1, 2, 24, 8), torch.zeros(1, 2, 25, 8))


def our_name(name):
    return name.replace("gamma_1", "ls1.gamma").replace("gamma_2", "ls2.gamma")


def test_the_published_vit_5(golden):
    """Registers come before the patches here and after them there: attention treats both alike."""
    golden = golden("vit5_tiny")
    rms = NormConfig("rms")
    branch = BranchConfig(rms)
    model = vm.vit(
        "mu2/4", img_size=12, num_classes=5, qkv_bias=False, qk_norm=rms, position_on_prefix=False, reg_tokens=4,
        attn=branch, mlp=branch, final_norm=rms, layer_scale=1e-4,
        rope=RopeConfig(base=10000.0, register_base=100.0, reference=(3, 3)),
    ).double().eval()  # fmt: skip
    model.load_state_dict({our_name(name): value for name, value in golden.group("param").items()})
    images = golden["in.x"].requires_grad_()
    logits = model(images)
    torch.testing.assert_close(logits, golden["out.y"], atol=1e-9, rtol=0)
    torch.testing.assert_close(model.forward_features(images)[:, 0], golden["out.class_token"], atol=1e-9, rtol=0)
    (logits * golden["ct.y"]).sum().backward()
    torch.testing.assert_close(images.grad, golden["grad_in.x"], atol=1e-9, rtol=0)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, expected in golden.group("grad_param").items():
        torch.testing.assert_close(
            gradients[our_name(name)], expected.view_as(gradients[our_name(name)]), atol=1e-9, rtol=0
        )
