import dataclasses
import json
from functools import partial

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import vitmods as vm
from vitmods import ViTConfig
from vitmods.layers import MLPS, NORMS
from vitmods.model.slots import BranchConfig, FirstBlocks, NormConfig, PositionalConfig, StemConfig
from vitmods.ops.rotary import RopeConfig
from vitmods.util.errors import UserError, nearest

options = st.sampled_from([(), (("variant", "released"), ("pool", 2), ("trade_off", None))])
bare = [name for name, kind in NORMS.items() if "affine" in kind.arguments]
norms = st.one_of(
    st.builds(NormConfig, st.sampled_from(sorted(NORMS)), st.floats(1e-12, 1.0)),
    st.builds(NormConfig, st.sampled_from(bare), st.floats(1e-12, 1.0), st.booleans()),
    st.builds(NormConfig, st.just("dynamic_token"), st.floats(1e-12, 1.0), st.booleans(), options),
)
maybe_norm = st.none() | norms
slots = st.builds(BranchConfig, maybe_norm, maybe_norm, maybe_norm, maybe_norm)
probability = st.floats(0, 0.99)
stems = st.one_of(
    st.builds(StemConfig, st.booleans(), maybe_norm, maybe_norm, gelu=st.booleans()),
    st.builds(StemConfig, st.booleans(), after=maybe_norm, kind=st.sampled_from(["local", "t2t"])),
    st.builds(StemConfig, st.booleans(), st.none(), maybe_norm, st.sampled_from(["hmlp", "levit"]), maybe_norm),
)
side = st.integers(1, 6)
ropes = st.builds(
    RopeConfig, st.sampled_from(["axial", "mixed"]), st.floats(1, 1e5), reference=st.none() | st.tuples(side, side)
)


CHOICES = {
    "activation": ["gelu", "gelu_tanh", "quick_gelu"],
    "position": ["learn", "sincos2d", "sincos2d_centered", "none"],
    "gate": ["none", "channel", "head"],
    "mlp_kind": sorted(MLPS),
    "key_drop_shape": ["decreasing", "constant"],
    "drop_path_shape": ["linear", "constant"],
    "init": ["timm", "big_vision", "beit"],
    **dict.fromkeys(("qkv_bias", "mask_token", "prompts_deep", "head_scale", "dynamic_img_size"), (False, True)),
    **dict.fromkeys(("crop_border", "proj_bias"), (False, True)),
}
POSITIONAL = st.builds(PositionalConfig, st.integers(1, 4), st.sampled_from(["local", "noise"]), st.floats(-9, 9))


@st.composite
def configs(draw):
    rows, columns, heads = draw(side), draw(side), draw(st.integers(1, 4))
    stem = draw(stems)
    patch = {"t2t": st.just((16, 16)), "linear": st.tuples(side, side)}.get(stem.kind, st.just((4, 4)))
    patch = draw(patch)
    pool = draw(st.sampled_from(["token", "avg", "map", "none"]))
    depth, representation = draw(st.integers(1, 4)), draw(st.booleans())
    prefix_from = draw(st.sampled_from([0, 0, *range(1, depth)]))
    mixing = "dynamic_token" in repr((stem, attn := draw(slots), mlp := draw(slots)))
    parallel = 1 if attn.after or mlp.after else draw(st.sampled_from([1, 1, 2, 3]))
    fields = {
        **{name: draw(st.sampled_from(values)) for name, values in CHOICES.items()},
        **{name: draw(probability) for name in ("pos_drop", "proj_drop", "attn_drop", "head_drop", "drop_path")},
        **{name: draw(maybe_norm) for name in ("qk_norm", "position_norm", "final_norm")},
        **dict.fromkeys(("rel_pos", "register_neurons"), False),
        "img_size": (rows * patch[0], columns * patch[1]),
        "patch_size": patch,
        "in_chans": draw(st.integers(1, 13)),
        "num_classes": draw(st.integers(0, 5)),
        "num_heads": heads,
        "embed_dim": heads * 4 * draw(st.integers(1, 3)),
        "depth": depth,
        "parallel": parallel,
        "mlp_dim": draw(st.integers(1, 40)),
        "stem": stem,
        "position_on_prefix": not prefix_from and draw(st.booleans()),
        "position_norm_on_prefix": not prefix_from and draw(st.booleans()),
        "class_token": pool == "token" or draw(st.booleans()),
        "reg_tokens": draw(st.integers(0, 3)),
        "prefix_from": prefix_from,
        "attn": attn,
        "mlp": mlp,
        "first_blocks": draw(st.none() | st.builds(FirstBlocks, st.integers(1, depth), slots, slots)),
        "positional": draw(st.none() | POSITIONAL),
        "prompts": 0,
        "value_mix": parallel == 1 and not prefix_from and draw(st.booleans()),
        "norm_scale": parallel == 1 and draw(st.booleans()),
        "rope": draw(st.none() | ropes),
        "residual_scale": parallel == 1 and draw(st.booleans()),
        "layer_scale": draw(st.none() | st.floats(1e-6, 1)),
        "pool": pool,
        "norm_after_pool": pool != "map" and draw(st.booleans()),
        "pool_norm": draw(maybe_norm) if pool == "map" else None,
        "pool_prefix": pool in ("avg", "map") and draw(st.booleans()),
        "pool_mlp_dim": None,
        "pool_heads": 1 if pool == "map" else None,
        "representation": representation,
        "head_bias": draw(st.floats(-10, 10)),
        "head_hidden": None if representation else draw(st.none() | st.integers(1, 8)),
        "head_dim": draw(st.none() | st.integers(1, 8)),
        "key_drop": draw(probability),
        "patch_drop": 0.0 if mixing else draw(st.just(0.0) | probability),
    }
    assert fields.keys() == {f.name for f in dataclasses.fields(ViTConfig)}  # a new field must be drawn here too
    try:
        return ViTConfig(**fields)
    except UserError:
        assume(False)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(configs())
def test_json_gives_back_the_same_config(config):
    text = config.to_json()
    again = ViTConfig.from_json(text)
    assert again == config
    assert hash(again) == hash(config)
    assert again.to_json() == text


def test_old_and_frozen_configs():
    assert ViTConfig.from_dict({}) == ViTConfig()
    assert ViTConfig.from_dict({"depth": 3, "stem": {"bias": False}}) == ViTConfig(depth=3, stem=StemConfig(False))
    with pytest.raises(dataclasses.FrozenInstanceError):
        ViTConfig().depth = 3


NAMES = {  # width, depth, width of the MLP, heads, patch
    "mu/2": (32, 1, 128, 2, 2),
    "mu6/2": (32, 6, 128, 2, 2),
    "Ti/4": (192, 12, 768, 3, 4),
    "S/16": (384, 12, 1536, 6, 16),
    "S36/16": (384, 36, 1536, 6, 16),
    "B/32": (768, 12, 3072, 12, 32),
    "L/16": (1024, 24, 4096, 16, 16),
    "H/14": (1280, 32, 5120, 16, 14),
    "vit_tiny_patch16_224": (192, 12, 768, 3, 16),
    "vit_small_patch32_384": (384, 12, 1536, 6, 32),
    "vit_huge_patch14_224": (1280, 32, 5120, 16, 14),
    "vit_small_patch16_18x2_224": (384, 18, 1536, 6, 16),
    "S18x2/16": (384, 18, 1536, 6, 16),
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    config = ViTConfig.from_name(name)
    sizes = config.embed_dim, config.depth, config.mlp_dim, config.num_heads, config.patch_size[0]
    assert sizes == NAMES[name]
    assert config.parallel == (2 if "x2" in name else 1)


def test_names_and_grids():
    assert ViTConfig.from_name("vit_small_patch32_384").img_size == (384, 384)
    assert ViTConfig.from_name("vit_small_patch32_384", img_size=(64, 32)).img_size == (64, 32)
    assert ViTConfig.from_name("S/16", depth=5, num_classes=37).depth == 5
    config = ViTConfig(img_size=(32, 48), patch_size=(4, 16))
    assert config.grid == (8, 3)
    assert config.num_patches == 24
    assert ViTConfig(reg_tokens=4).num_prefix_tokens == 5
    assert nearest("dnp", ["dpn", "rms"]) == "Did you mean 'dpn'?"
    assert nearest("zzzz", ["rms", "dpn"]) == "Known: dpn, rms."


def read_json(**values):
    return ViTConfig.from_json(json.dumps(values))


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (vm.vit, "Tiny/16", "'Ti/16'"),
        (partial(vm.vit, "mu/2"), {"num_class": 3}, "'num_classes'"),
        (
            partial(ViTConfig.from_name, "Ti/128"),
            {"img_size": 64},
            "64 is not a multiple of .* 128; use 128 or more, or",
        ),
        (partial(ViTConfig.from_name, "Ti/16"), {"img_size": 50}, "use 48 or 64"),
        (partial(ViTConfig.from_name, "S/16"), {"num_class": 3}, "'num_classes'"),
        (ViTConfig.from_name, "s/16", "'S/16'"),
        (ViTConfig.from_name, "Tiny/16", "'Ti/16'"),
        (ViTConfig.from_name, "vit_smal_patch16_224", "'vit_small_patch16_224'"),
        (ViTConfig.from_name, "S", r"sizes: mu, Ti, S, B, L, H, T\*, S\*, B\*"),
        (ViTConfig.from_name, "S/16/2", "S/16"),
        (ViTConfig.from_name, "S-1/16", "S/16"),
        (ViTConfig.from_name, "", "S/16"),
        (ViTConfig.from_name, "S0/16", "depth"),
        (ViTConfig.from_name, "S/0", "patch_size"),
        (ViTConfig.from_name, "S18x0/16", "parallel must be at least 1"),
        (ViTConfig.from_name, "S18x/16", "'S18x/16' is not the name of a ViT"),
        (read_json, {"dept": 3}, "'depth'"),
        (read_json, {"stem": {"befor": None}}, "'before'"),
        (read_json, {"final_norm": {"kind": "layr"}}, "'layer'"),
        (read_json, {"attn": {"before": {"epsilon": 1e-6}}}, "'eps'"),
        (NormConfig, {"eps": "small"}, "eps of a NormConfig is a finite number"),
        (NormConfig, "layr", "'layer'"),
        (NormConfig, {"eps": 0.0}, "eps"),
        (BranchConfig, {"before": 3}, "before of a BranchConfig is NormConfig or None"),
    ],
)
def test_unknown_names_and_fields_are_errors_with_a_hint(make, arguments, message):
    with pytest.raises(UserError, match=message):
        make(**arguments) if isinstance(arguments, dict) else make(arguments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"img_size": 225}, "224 or 240"),
        ({"img_size": (224, 10)}, "width 10.*use 16 or more"),
        ({"img_size": (1, 2, 3)}, "img_size"),
        ({"img_size": 32.0}, "img_size"),
        ({"patch_size": -16}, "patch_size"),
        ({"depth": 0}, "depth"),
        ({"in_chans": 0}, "in_chans"),
        ({"num_classes": -1}, "num_classes"),
        ({"num_heads": 5}, "384.*5"),
        ({"drop_path": 1.0}, "drop_path"),
        ({"proj_drop": -0.1}, "proj_drop"),
        ({"pool": "mean"}, "pool"),
        ({"position": "sincos"}, "'sincos2d'"),
        ({"activation": "relu"}, "activation"),
        ({"init": "tim"}, "'timm'"),
        ({"class_token": False}, "pool='token' needs a class token"),
        ({"pool": "map", "norm_after_pool": True}, "norm_after_pool"),
        ({"position": "sincos2d"}, "position_on_prefix=False"),
        ({"pool_norm": NormConfig()}, "pool='map'"),
        ({"position": "sincos2d", "position_on_prefix": False, "embed_dim": 6}, "multiple of 4"),
        ({"layer_scale": 0.0}, "layer_scale"),
        ({"qk_norm": [1, 2]}, "qk_norm of a ViTConfig is NormConfig or None"),
        ({"in_chans": 10**30}, "in_chans of a ViTConfig is a whole number below 2,147,483,648"),
        ({"img_size": 10**30}, "img_size"),
        ({"depth": 2.5}, "depth of a ViTConfig is a whole number, not"),
        ({"depth": True}, "depth of a ViTConfig is a whole number, not"),
        ({"attn": {"before": 3}}, "attn of a ViTConfig is BranchConfig"),
        ({"layer_scale": float("inf")}, "layer_scale of a ViTConfig is a finite number"),
        ({"qkv_bias": "maybe"}, "qkv_bias of a ViTConfig is True or False"),
    ],
    ids=str,
)
def test_parts_that_do_not_fit_are_errors_that_say_what_to_do(fields, message):
    with pytest.raises(UserError, match=message):
        ViTConfig(**fields)
