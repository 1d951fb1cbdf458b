"""Our stems, norms and blocks as arguments of timm's own VisionTransformer."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from vitmods.adapters.timm_models import timm_block, timm_stem
from vitmods.layers import DualPatchNormStem, LayerNorm, LinearStem, RMSNorm

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
ARGUMENTS = [
    {"embed_layer": timm_stem(LinearStem)},
    {"embed_layer": timm_stem(DualPatchNormStem)},
    {"embed_layer": timm_stem(DualPatchNormStem), "dynamic_img_size": True},
    {"embed_layer": timm_stem(LinearStem), "embed_norm_layer": RMSNorm},
    {"embed_layer": timm_stem(LinearStem), "pre_norm": True},
    {"norm_layer": RMSNorm},
    {"norm_layer": LayerNorm, "global_pool": "avg"},
    {"block_fn": timm_block},
    {"block_fn": timm_block, "norm_layer": RMSNorm, "qk_norm": True, "init_values": 0.1, "drop_path_rate": 0.1},
    {"block_fn": timm_block, "scale_attn_norm": True, "scale_mlp_norm": True, "proj_bias": False, "qkv_bias": False},
    {"block_fn": timm_block, "embed_layer": timm_stem(DualPatchNormStem), "norm_layer": RMSNorm},
]


def name(value):
    return ",".join(f"{k}={getattr(v, '__name__', v)}" for k, v in value.items())


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=name)
def test_timm_builds_and_trains_with_our_parts(arguments):
    model = VisionTransformer(**SMALL, **arguments)
    kinds = {type(m) for m in model.modules()}
    assert {v for v in arguments.values() if isinstance(v, type)} <= kinds
    images = torch.randn(2, 3, 32, 32)
    model(images).square().sum().backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None]
    if "dynamic_img_size" in arguments:
        assert model(torch.randn(1, 3, 48, 16)).shape == (1, 5)
    model.set_grad_checkpointing()
    assert model.forward_intermediates(images)[1][0].shape == (2, 32, 4, 4)


@pytest.mark.parametrize(
    "part", [{"embed_layer": timm_stem(LinearStem)}, {"norm_layer": LayerNorm}, {"block_fn": timm_block}], ids=name
)
def test_plain_parts_are_timms_function(part):
    torch.manual_seed(0)
    reference, mixed = VisionTransformer(**SMALL), VisionTransformer(**SMALL, **part)
    mixed.load_state_dict(reference.state_dict())
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(mixed(images), reference(images), atol=1e-5, rtol=0)


def test_an_attention_mask_reaches_our_block():
    torch.manual_seed(0)
    reference, mixed = VisionTransformer(**SMALL), VisionTransformer(**SMALL, block_fn=timm_block)
    mixed.load_state_dict(reference.state_dict())
    images = torch.randn(2, 3, 32, 32)
    mask = torch.rand(17, 17) > 0.3
    mask.fill_diagonal_(True)
    a, b = (model.forward_features(images, attn_mask=mask) for model in (mixed, reference))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_meta_and_dtype_arguments():
    parts = {"block_fn": timm_block, "embed_layer": timm_stem(LinearStem), "norm_layer": RMSNorm}
    model = VisionTransformer(**SMALL, **parts, dtype=torch.bfloat16, device="meta")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in model.parameters()} == {"meta"}
