"""Our ViT as timm's VisionTransformer: every config that timm has, there and back; others name their slots."""

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

import vitmods as vm
from vitmods.adapters import from_timm, to_timm
from vitmods.model.slots import BranchConfig, NormConfig, StemConfig

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2, "mlp_dim": 64, "num_classes": 5}
RMS, COARSE = NormConfig("rms", 1e-5), NormConfig("layer", 1e-3)
INNER = BranchConfig(inner=NormConfig())
CONFIGS = [
    {},
    {"pool": "avg", "norm_after_pool": True},
    {"pool": "avg", "class_token": False},
    {"pool": "map"},
    {"pool": "avg", "reg_tokens": 2, "pool_prefix": True},
    {"pool": "none"},
    {"pool": "prefix", "reg_tokens": 1},
    {"activation": "quick_gelu"},
    {"proj_bias": False, "mlp_kind": "swiglu"},
    {"img_size": (35, 33), "crop_border": True},
    {"attn": BranchConfig(None, branch=NormConfig()), "mlp": BranchConfig(None, branch=NormConfig())},
    {"reg_tokens": 3, "position_on_prefix": False},
    {"layer_scale": 0.1},
    {"parallel": 2},
    {"parallel": 3, "layer_scale": 0.1, "qk_norm": NormConfig()},
    {"qk_norm": NormConfig(), "qkv_bias": False},
    {"attn": INNER, "mlp": INNER},
    {"position_norm": NormConfig(), "position_norm_on_prefix": True, "stem": StemConfig(bias=False)},
    {"stem": StemConfig(after=RMS)},
    {"position": "none"},
    {"activation": "gelu_tanh", "num_classes": 0, "in_chans": 1},
    {"img_size": (32, 48), "patch_size": (8, 16), "mlp_dim": 47},
    {"final_norm": RMS, "attn": BranchConfig(RMS), "mlp": BranchConfig(RMS)},
    {"final_norm": COARSE, "attn": BranchConfig(COARSE), "mlp": BranchConfig(COARSE)},
    {"final_norm": None},
    {"final_norm": None, "pool": "map"},
    {"pos_drop": 0.1, "proj_drop": 0.2, "attn_drop": 0.3, "head_drop": 0.4, "drop_path": 0.5},
]


@pytest.mark.parametrize("overrides", CONFIGS, ids=str)
def test_there_and_back(scatter, same_function, overrides):
    converted = scatter(vm.vit(vm.ViTConfig(**(SMALL | overrides))))
    reference = to_timm(converted)
    assert isinstance(reference, VisionTransformer)
    assert not reference.training
    same_function(converted, reference, (converted.vit_config.in_chans, *converted.vit_config.img_size))
    again = from_timm(reference)
    assert again.vit_config.with_(layer_scale=converted.vit_config.layer_scale) == converted.vit_config
    for name, value in again.state_dict().items():
        torch.testing.assert_close(value, converted.state_dict()[name], rtol=1e-6, atol=0)


def test_what_goes_along():
    converted = vm.vit("mu/8", img_size=32, num_classes=5).double().train()
    converted.set_grad_checkpointing()
    converted.blocks[0].attn.qkv.weight.requires_grad_(False)
    converted.blocks[0].mlp.eval()
    converted.pretrained_cfg = {**converted.pretrained_cfg, "mean": (0.1, 0.2, 0.3)}
    reference = to_timm(converted)
    assert reference.training
    assert converted.training
    assert not converted.blocks[0].mlp.training  # the comparison leaves every module's mode alone
    assert reference.grad_checkpointing
    assert {n for n, p in reference.named_parameters() if not p.requires_grad} == {"blocks.0.attn.qkv.weight"}
    assert {p.dtype for p in reference.parameters()} == {torch.float64}
    assert timm.data.resolve_model_data_config(reference)["mean"] == (0.1, 0.2, 0.3)
    assert from_timm(reference).grad_checkpointing


def test_deit_and_an_mlp_width_that_rounding_would_lose(scatter):
    small = {"img_size": 32, "depth": 1, "num_classes": 3}
    assert from_timm(timm.create_model("deit_tiny_patch16_224", **small)).vit_config.num_heads == 3
    assert not from_timm(timm.create_model("deit3_small_patch16_224", **small)).vit_config.position_on_prefix
    with torch.device("meta"):
        assert vm.vit("S1/16", embed_dim=752, num_heads=8, mlp_dim=3072).blocks[0].mlp.fc1.out_features == 3072
