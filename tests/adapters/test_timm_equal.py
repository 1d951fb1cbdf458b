"""Our ViT with timm's weights, there and back: outputs and gradients of published models, every option and config."""

import importlib
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelThingsBlock, ResPostBlock, VisionTransformer
from torch import nn

import vitmods as vm
from vitmods import adapters
from vitmods.adapters import from_timm, to_timm
from vitmods.adapters.timm import uncovered
from vitmods.adapters.timm_folder import timm_words
from vitmods.model.slots import BranchConfig, NormConfig, StemConfig
from vitmods.util.errors import UserError


def outputs_and_gradient(model, images):
    images = images.clone().requires_grad_()
    out = model(images)
    return out.detach(), torch.autograd.grad(out.square().sum(), images)[0]


@pytest.mark.parametrize(
    ("name", "ours", "depth"),
    [("vit_tiny_patch16_224", "Ti/16", 4), ("vit_small_patch16_224", "S/16", 1), ("vit_base_patch16_224", "B/16", 1)],
)
def test_published_models_at_full_size(name, ours, depth):
    """float32, one image; their first blocks alone."""
    reference, converted = timm.create_model(name, depth=depth).eval(), vm.vit(ours, depth=depth).eval()
    assert converted.vit_config == vm.ViTConfig.from_name(name, depth=depth)
    shapes = [{n: v.shape for n, v in model.state_dict().items()} for model in (converted, reference)]
    assert shapes[0] == shapes[1]
    converted.load_state_dict(reference.state_dict())
    images = torch.randn(1, 3, 224, 224)
    for a, b in zip(outputs_and_gradient(converted, images), outputs_and_gradient(reference, images)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
OPTIONS = [
    {},
    {"global_pool": "avg"},
    {"global_pool": "avg", "fc_norm": False},
    {"global_pool": "map"},
    {"global_pool": ""},
    {"class_token": False, "global_pool": "avg"},
    {"reg_tokens": 4},
    {"reg_tokens": 2, "no_embed_class": True, "global_pool": "avg"},
    {"init_values": 1e-2},
    {"block_fn": ParallelThingsBlock, "init_values": 1e-2},
    {"block_fn": partial(ParallelThingsBlock, num_parallel=3), "qk_norm": True},
    {"qk_norm": True},
    {"scale_attn_norm": True, "scale_mlp_norm": True},
    {"pre_norm": True},
    {"pos_embed": "none"},
    {"qkv_bias": False},
    {"mlp_ratio": 2.5},
    {"num_classes": 0},
    {"in_chans": 1},
    {"img_size": (32, 48)},
    {"norm_layer": timm.layers.RmsNorm},
    {"embed_norm_layer": nn.LayerNorm},
    {"act_layer": partial(nn.GELU, approximate="tanh")},
    {"act_layer": timm.layers.GELUTanh},
    {"act_layer": timm.layers.GELU},
    {"act_layer": "gelu_tanh", "global_pool": "map"},
    {"final_norm": False},
    {"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": nn.SiLU, "scale_mlp_norm": True},
    {"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": nn.SiLU, "block_fn": ParallelThingsBlock},
    {"act_layer": timm.layers.QuickGELU, "global_pool": "map"},
    {"proj_bias": False, "qkv_bias": False, "block_fn": ParallelThingsBlock},
    {"global_pool": "map", "reg_tokens": 1, "pool_include_prefix": True},
    {"global_pool": "avg", "pool_include_prefix": True},
    {"img_size": 35},
    {"block_fn": ResPostBlock, "init_values": 0.1},
    {"drop_path_rate": 0.3},
    {"drop_rate": 0.1, "pos_drop_rate": 0.2, "proj_drop_rate": 0.3, "attn_drop_rate": 0.4},
]


def small(**options):
    torch.manual_seed(0)
    model = VisionTransformer(**{**SMALL, **options}).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_is_read_exactly(options):
    reference = small(**options)
    converted = from_timm(reference)
    assert converted.training == reference.training
    images = torch.randn(2, reference.in_chans, *converted.vit_config.img_size, dtype=torch.float64)
    reference.eval()
    for a, b in zip(outputs_and_gradient(converted.eval(), images), outputs_and_gradient(reference, images)):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
    features = (model.forward_features(images) for model in (converted, reference))
    torch.testing.assert_close(*features, atol=1e-10, rtol=0)
    if options.get("mlp_layer") is not timm.layers.SwiGLUPacked and options.get("block_fn") is not ResPostBlock:
        assert vm.vit(converted.vit_config).state_dict().keys() == reference.state_dict().keys()
    rates = ("head_drop", 0.1), ("pos_drop", 0.2), ("proj_drop", 0.3), ("attn_drop", 0.4)
    if "attn_drop_rate" in options:
        assert [getattr(converted.vit_config, name) for name, _ in rates] == [rate for _, rate in rates]
    assert converted.vit_config.drop_path == pytest.approx(options.get("drop_path_rate", 0))


def test_distilled_models_give_the_mean_of_their_heads(scatter, same_function, tmp_path):
    theirs = scatter(timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=2, num_classes=5))
    converted = from_timm(theirs).eval()
    assert (converted.vit_config.pool, converted.head.in_features) == ("prefix", 2 * 192)
    same_function(theirs, converted, (3, 32, 32))
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    assert adapters.load(tmp_path / "theirs.pth").vit_config == converted.vit_config
    adapters.save(converted, tmp_path / "ours.pth")
    again = timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=2, num_classes=5).eval()
    again.load_state_dict(torch.load(tmp_path / "ours.pth")["model"])
    same_function(theirs, again, (3, 32, 32))


FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SAMPLE = (
    "aimv2_large_patch14_224", "deit_tiny_distilled_patch16_224", "test_vit3", "vit_base_patch16_rpn_224",
    "vit_base_patch32_clip_quickgelu_224", "vit_giant_patch14_dinov2", "vit_so400m_patch14_siglip_384",
    "vit_base_patch16_xp_224", "cait_xxs24_224",
)  # fmt: skip


def test_a_sample_of_the_models_that_are_counted_as_read(monkeypatch):
    """The table is made by benchmarks/readers.py, which compares all of them."""
    monkeypatch.syspath_prepend(str(FOLDER))
    readers = importlib.import_module("readers")
    monkeypatch.delitem(sys.modules, "readers")
    record = json.loads((FOLDER / "results" / "readers.json").read_text())
    assert (len(record["read"]), record["models"]) == (244, 320)
    for name in SAMPLE:
        model = readers.small(name)
        readers.scramble(model)
        assert (readers.outcome(model) == "read") == (name in record["read"]), name


EVA = (
    "beit_base_patch16_224", "eva_giant_patch14_224", "eva_giant_patch14_clip_224", "eva02_tiny_patch14_224",
    "eva02_base_patch14_448", "eva02_base_patch16_clip_224", "eva02_enormous_patch14_clip_224",
    "vit_small_patch16_dinov3", "vit_7b_patch16_dinov3", "vit_base_patch16_sapiens2", "vit_base_patch16_rope_ape_224",
    "vit_base_patch16_rope_mixed_224", "vit_base_patch16_rope_reg1_gap_256", "vit_pe_core_base_patch16_224",
    "vit_pe_lang_gigantic_patch14_448",
)  # fmt: skip
MORE = {"vit_base_patch16_sapiens2": {"num_kv_heads": 2}, "vit_pe_core_base_patch16_224": {"attn_pool_num_heads": 2}}


@pytest.mark.parametrize("name", EVA)
def test_eva_and_its_relatives_are_read_exactly(scatter, same_function, name):
    side = 4 * (14 if "patch14" in name else 16)
    sizes = {"img_size": side, "embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 5}
    theirs = scatter(timm.create_model(name, **sizes, **MORE.get(name, {})))
    converted = from_timm(theirs)
    same_function(theirs, converted, (3, side, side))
    if converted.vit_config.dynamic_img_size:
        same_function(theirs, converted, (3, 32, 64))
    assumed = adapters.coverage(theirs).assumed
    assert assumed == (("rescale_coords=None", "num_kv_heads=num_heads") if "sapiens2" in name else ())


@pytest.mark.parametrize("side", [96, (48, 80), 32])
def test_relative_positions_are_resampled_as_timm_does(scatter, same_function, side):
    sizes = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 5}
    reference = scatter(timm.create_model("beit_base_patch16_224", **sizes))
    converted = from_timm(reference)
    reference.set_input_size(img_size=side)
    converted.set_input_size(side)
    same_function(reference, converted, (3, *converted.vit_config.img_size))


@pytest.mark.parametrize("options", [{"global_pool": "map"}, {"block_fn": ParallelThingsBlock}], ids=str)
def test_training_losses_are_the_same_under_one_seed(options):
    """Stochastic depth draws the same numbers in the same order as timm's."""
    reference = small(drop_path_rate=0.5, **options)
    converted = from_timm(reference)
    images = torch.randn(8, 3, 32, 32, dtype=torch.float64)
    losses = []
    for model in (converted, reference):
        torch.manual_seed(1)
        losses.append(model(images).square().sum())
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: small(block_fn=timm.models.vision_transformer.ParallelScalingBlock), "ParallelScalingBlock"),
        (lambda: small(dynamic_img_size=True, dynamic_img_pad=True), "dynamic_img_pad"),
        (lambda: small(act_layer=nn.ReLU), "ReLU"),
        (lambda: small(global_pool="avgmax"), "avgmax"),
        (lambda: small(patch_drop_rate=0.5), "patch dropout"),
        (lambda: small(mlp_layer=timm.layers.SwiGLUPacked), "MLP GluMlp with GELU"),
        (lambda: small(mlp_layer=timm.layers.GluMlp, act_layer=nn.SiLU), "MLP GluMlp gated by its second half"),
        (lambda: small(norm_layer=nn.SyncBatchNorm), "SyncBatchNorm"),
        (lambda: timm.create_model("swin_tiny_patch4_window7_224"), "SwinTransformer"),
        (lambda: timm.create_model("cait_xxs24_224"), "Cait is not covered; VisionTransformer, Eva and Beit are"),
    ],
)
def test_what_cannot_be_read_is_listed(make, says):
    with torch.device("meta"):
        model = make()
    with pytest.raises(UserError, match=says):
        from_timm(model)


def test_blocks_that_differ_are_seen():
    for part, other in (("mlp.fc1", nn.Linear(32, 64)), ("norm1", nn.LayerNorm(32, eps=1e-7))):
        model = small()
        assert not uncovered(model)
        model.blocks[1].set_submodule(part, other)
        assert "blocks that differ from one another" in uncovered(model)
    model = small()
    model.blocks[1].attn.num_heads = 4
    assert "blocks that differ from one another" in uncovered(model)


def test_a_change_applies_to_a_timm_model_and_leaves_it_alone():
    reference = small(global_pool="avg").eval()
    reference.head.requires_grad_(False)
    reference.pretrained_cfg = {"mean": (0.1, 0.2, 0.3), "input_size": (3, 32, 32)}
    before = {n: v.clone() for n, v in reference.state_dict().items()}
    model = vm.apply(reference, vm.DualPatchNorm(), vm.LayerScale(1.0))
    assert all(torch.equal(v, before[n]) for n, v in reference.state_dict().items())
    state = model.state_dict()
    assert all(torch.equal(state[n], v) for n, v in before.items())
    assert not model.training
    assert not model.head.weight.requires_grad
    assert model.blocks[0].mlp.fc1.weight.requires_grad
    assert timm.data.resolve_model_data_config(model)["mean"] == (0.1, 0.2, 0.3)
    same = vm.apply(reference, vm.LayerScale(1.0))
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(same(images), reference(images), atol=1e-10, rtol=0)
    difference = vm.diff(reference, model)
    assert "patch_embed.norm_before" in difference.added


@pytest.mark.parametrize(
    "overrides", [{}, {"pool": "map"}, {"reg_tokens": 2, "pool": "avg", "norm_after_pool": True}], ids=str
)
def test_fresh_weights_have_timms_statistics(overrides):
    options = {{"pool": "global_pool", "norm_after_pool": "fc_norm"}.get(k, k): v for k, v in overrides.items()}
    reference = timm.create_model("vit_tiny_patch16_224", depth=2, **options)
    converted = vm.vit("Ti2/16", **overrides)
    for name, a in converted.state_dict().items():
        b, n = reference.state_dict()[name], a.numel()
        if float(b.std()) == 0 or n < 2:
            assert torch.equal(a, b), name
            continue
        assert float(a.std()) == pytest.approx(float(b.std()), rel=9 / n**0.5), name
        assert abs(float(a.mean() - b.mean())) < 9 * float(b.std()) / n**0.5, name
        assert float(a.abs().max()) == pytest.approx(float(b.abs().max()), rel=0.25), name


SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2, "mlp_dim": 64, "num_classes": 5}
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
    converted = scatter(vm.vit(vm.ViTConfig(**(SIZES | overrides))))
    reference = to_timm(converted)
    assert isinstance(reference, VisionTransformer)
    assert not reference.training
    same_function(converted, reference, (converted.vit_config.in_chans, *converted.vit_config.img_size))
    again = from_timm(reference)
    assert again.vit_config.with_(layer_scale=converted.vit_config.layer_scale) == converted.vit_config
    for name, value in again.state_dict().items():
        torch.testing.assert_close(value, converted.state_dict()[name], rtol=1e-6, atol=0)


def test_what_goes_along_to_timm():
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


def test_deit_an_mlp_width_that_rounding_would_lose_and_what_a_file_of_timm_can_say():
    assert timm_words(vm.ViTConfig(**SIZES)) is not None
    assert timm_words(vm.ViTConfig(**SIZES, mlp_kind="swiglu")) is None  # it would have to name a class
    small = {"img_size": 32, "depth": 1, "num_classes": 3}
    assert from_timm(timm.create_model("deit_tiny_patch16_224", **small)).vit_config.num_heads == 3
    assert not from_timm(timm.create_model("deit3_small_patch16_224", **small)).vit_config.position_on_prefix
    with torch.device("meta"):
        assert vm.vit("S1/16", embed_dim=752, num_heads=8, mlp_dim=3072).blocks[0].mlp.fc1.out_features == 3072
