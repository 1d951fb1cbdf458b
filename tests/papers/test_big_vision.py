"""Whole ViTs against google-research/big_vision: outputs, what lies between, and all gradients, in float64."""

from functools import partial

import pytest
import torch

import vitmods as vm
from vitmods import fast
from vitmods.layers.position import resample, sincos2d

from . import support

close = partial(support.close, tolerance=1e-8)

SHAPE = {
    "img_size": (12, 8), "patch_size": 4, "embed_dim": 16, "depth": 2, "mlp_dim": 24, "num_heads": 2,
    "num_classes": 5,
}  # fmt: skip
BIG_VISION = {"activation": "gelu_tanh", "position_on_prefix": False}
MODELS = {
    "bv_vit_tok_repsize": {"representation": True},
    "bv_vit_dpn": {"representation": True},
    "bv_vit_gap_sincos": {"position": "sincos2d", "class_token": False, "pool": "avg"},
}


@pytest.fixture(params=MODELS)
def case(request, golden, flax_weights):
    """(golden, model with its weights, its images as (B, channels, height, width))"""
    g = golden(request.param)
    model = vm.vit(vm.ViTConfig(**SHAPE, **BIG_VISION, **MODELS[request.param]))
    if request.param == "bv_vit_dpn":
        model = vm.apply(model, vm.DualPatchNorm())
    model.double().load_state_dict(flax_weights(g.group("param")))
    if request.param == "bv_vit_gap_sincos":
        positions = golden("bv_posemb_sincos2d")["pe_3x2_w16"]
        close(model.pos_embed, positions, tolerance=1e-7)  # ours is made in float32
        model.pos_embed.copy_(positions)
    return g, model, g["in.image_nhwc"].permute(0, 3, 1, 2).clone().requires_grad_()


def test_outputs_equal_big_vision(case):
    g, model, images = case
    seen = {}
    model.patch_embed.register_forward_hook(lambda m, i, out: seen.update(stem=out))
    model.blocks[0].norm2.register_forward_hook(lambda m, i, out: seen.update(block00_plus_sa=i[0]))
    features = model.forward_features(images)
    close(seen["stem"], g["out.stem"].flatten(1, 2))
    close(seen["block00_plus_sa"], g["out.block00_plus_sa"])
    close(features, g["out.encoded"])
    close(model.forward_head(features, pre_logits=True), g["out.pre_logits"])
    close(model(images), g["out.logits"])
    with torch.no_grad():
        close(model.eval()(images), g["out.logits"])


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_equal_big_vision(case, flax_weights, recompute):
    g, model, images = case
    fast.recompute(model, recompute)
    (model(images) * g["ct.logits"]).sum().backward()
    close(images.grad, g["grad_in.image"].permute(0, 3, 1, 2))
    reference = flax_weights(g.group("grad_param"))
    actual = {name: p.grad for name, p in model.named_parameters() if not name.startswith("blocks.1.")}
    assert reference.keys() == actual.keys()  # the golden leaves out the second block's
    for name, gradient in actual.items():
        close(gradient, reference[name])


@pytest.mark.parametrize(("grid", "dim", "name"), [((3, 2), 16, "pe_3x2_w16"), ((14, 14), 32, "pe_14x14_w32")])
def test_sincos2d_equals_big_vision(golden, grid, dim, name):
    close(sincos2d(grid, dim).double(), golden("bv_posemb_sincos2d")[name], tolerance=1e-7)


@pytest.mark.parametrize(("new", "name"), [((12, 12), "out.new12"), ((4, 4), "out.new4")])
def test_aligned_resampling_equals_big_vision(golden, new, name):
    g = golden("bv_resample_posemb")
    close(resample(g["in.old"], (7, 7), new, aligned=True), g[name], tolerance=1e-10)


BLOCK = "Transformer/encoderblock_{}/"
ATTENTION, MLP = BLOCK.format(0) + "MultiHeadDotProductAttention_0/", BLOCK.format(1) + "MlpBlock_0/"
INITIALISED = {  # ours, and what part of our tensor -> name in big_vision
    "patch_embed.proj.weight": "embedding/kernel",
    "patch_embed.proj.bias": "embedding/bias",
    "pos_embed": "pos_embedding",
    "cls_token": "cls",
    "blocks.0.norm1.weight": BLOCK.format(0) + "LayerNorm_0/scale",
    **{f"blocks.0.attn.qkv.weight:{part}": f"{ATTENTION}{part}/kernel" for part in ("query", "key", "value")},
    "blocks.0.attn.qkv.bias": f"{ATTENTION}query/bias",
    "norm.bias": "Transformer/encoder_norm/bias",
    **{f"{ours}.{kind}": f"{theirs}/{'kernel' if kind == 'weight' else 'bias'}" for kind in ("weight", "bias")
       for ours, theirs in (("blocks.0.attn.proj", f"{ATTENTION}out"), ("blocks.1.mlp.fc1", f"{MLP}Dense_0"),
                            ("blocks.1.mlp.fc2", f"{MLP}Dense_1"), ("pre_logits", "pre_logits"), ("head", "head"))},
}  # fmt: skip


@pytest.fixture(scope="module")
def fresh_tiny():
    torch.manual_seed(0)
    config = vm.ViTConfig.from_name("Ti2/16", init="big_vision", position_on_prefix=False, representation=True)
    return vm.vit(config)


@pytest.mark.parametrize("ours", INITIALISED)
def test_initial_weights_have_big_visions_statistics(golden, fresh_tiny, ours):
    name, _, part = ours.partition(":")
    values = fresh_tiny.get_parameter(name).detach()
    if part:
        values = values.chunk(3)[("query", "key", "value").index(part)]
    mean, std, low, high = (float(x) for x in golden("bv_init_stats")[INITIALISED[ours]])
    if std == 0:
        assert (values == mean).all()
        return
    n = values.numel()
    assert abs(float(values.mean()) - mean) < 6 * std * (2 / n) ** 0.5
    assert float(values.std()) == pytest.approx(std, rel=6 / n**0.5)
    if high / std < 3:  # bounded: uniform or cut normal, whose bounds are met within little
        assert float(values.max()) == pytest.approx(high, rel=0.02)
        assert float(values.min()) == pytest.approx(low, rel=0.02)


def test_head_bias_starts_where_the_config_says():
    model = vm.vit("mu/2", img_size=4, num_classes=3, init="big_vision", head_bias=-6.9)
    assert (model.head.bias == -6.9).all()
    assert not model.head.weight.any()
