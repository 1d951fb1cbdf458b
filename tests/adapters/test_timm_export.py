"""Our ViT as timm's VisionTransformer: every config that timm has, there and back; others name their slots."""

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

import vitmods as vm
from vitmods.adapters import from_timm, to_timm
from vitmods.model.slots import BranchConfig, NormConfig, StemConfig
from vitmods.util.errors import UserError

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2, "mlp_dim": 64, "num_classes": 5}
RMS, COARSE = NormConfig("rms", 1e-5), NormConfig("layer", 1e-3)
INNER = BranchConfig(inner=NormConfig())
CONFIGS = [
    {},
    {"pool": "avg", "norm_after_pool": True},
    {"pool": "avg", "class_token": False},
    {"pool": "map"},
    {"pool": "none"},
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
    ours = scatter(vm.vit(vm.ViTConfig(**(SMALL | overrides))))
    theirs = to_timm(ours)
    assert type(theirs) is VisionTransformer
    assert not theirs.training
    same_function(ours, theirs, (ours.vit_config.in_chans, *ours.vit_config.img_size))
    again = from_timm(theirs)
    assert again.vit_config.with_(layer_scale=ours.vit_config.layer_scale) == ours.vit_config
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in again.state_dict().items())


def test_what_goes_along():
    ours = vm.vit("mu/8", img_size=32, num_classes=5).double().train()
    ours.set_grad_checkpointing()
    ours.blocks[0].attn.qkv.weight.requires_grad_(False)
    ours.blocks[0].mlp.eval()
    ours.pretrained_cfg = {**ours.pretrained_cfg, "mean": (0.1, 0.2, 0.3)}
    theirs = to_timm(ours)
    assert theirs.training
    assert ours.training
    assert not ours.blocks[0].mlp.training  # the comparison leaves every module's mode alone
    assert theirs.grad_checkpointing
    assert {n for n, p in theirs.named_parameters() if not p.requires_grad} == {"blocks.0.attn.qkv.weight"}
    assert {p.dtype for p in theirs.parameters()} == {torch.float64}
    assert timm.data.resolve_model_data_config(theirs)["mean"] == (0.1, 0.2, 0.3)
    assert from_timm(theirs).grad_checkpointing


@pytest.mark.parametrize(
    ("change", "slot"),
    [
        ("dpn", r"stem.before=layer norm, eps 1e-06 \(there: None\); stem.after|stem.before"),
        ("postnorm", "attn.before=None"),
        ("subln+placement(mlp=pre+post)", "mlp.after="),
        ("normformer(head_scale=true,residual_scale=true)", "attn.branch=.*head_scale=True.*residual_scale=True"),
        ("dpn(before=false,after=false,after_position=true)", "position_norm_on_prefix|stem.bias"),
    ],
)
def test_slots_without_counterpart_are_named(change, slot):
    model = vm.apply(vm.vit("mu/4", img_size=8), *vm.parse_changes(change))
    with pytest.raises(UserError, match=f"timm's VisionTransformer does not have: .*{slot}"):
        to_timm(model)


@pytest.mark.parametrize(
    ("overrides", "slot"),
    [
        ({"representation": True}, "representation=True"),
        ({"position": "sincos2d", "position_on_prefix": False}, "position=sincos2d"),
        ({"drop_path": 0.1, "drop_path_shape": "constant"}, "drop_path_shape=constant"),
        ({"final_norm": COARSE}, "final_norm=layer norm, eps 0.001 "),
        (
            {"pool": "map", "final_norm": None, "attn": BranchConfig(COARSE), "mlp": BranchConfig(COARSE)},
            "final_norm=None",
        ),
        ({"mlp": BranchConfig(RMS)}, "mlp.before=rms norm, eps 1e-05 "),
    ],
)
def test_settings_without_counterpart_are_named(overrides, slot):
    with pytest.raises(UserError, match=slot):
        to_timm(vm.vit("mu/4", img_size=8, **overrides))


def test_deit_and_distilled_deit():
    small = {"img_size": 32, "depth": 1, "num_classes": 3}
    assert from_timm(timm.create_model("deit_tiny_patch16_224", **small)).vit_config.num_heads == 3
    assert not from_timm(timm.create_model("deit3_small_patch16_224", **small)).vit_config.position_on_prefix
    with pytest.raises(UserError, match="distillation token"):
        from_timm(timm.create_model("deit_tiny_distilled_patch16_224", **small))


def test_an_mlp_width_that_rounding_would_lose(scatter):
    """752 * (3072 / 752) is below 3072 in floating point."""
    with torch.device("meta"):
        assert vm.vit("S1/16", embed_dim=752, num_heads=8, mlp_dim=3072).blocks[0].mlp.fc1.out_features == 3072
