"""State dicts with the names of DeiT and timm as files: inference of the config, DeiT III, safety, what is refused."""

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import ParallelThingsBlock, VisionTransformer

import vitmods as vm
from vitmods.adapters import coverage, from_timm, load, save
from vitmods.adapters.tensors import heads_of_width
from vitmods.model.slots import NormConfig
from vitmods.util.errors import UserError

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 2, "num_heads": 3, "num_classes": 5}


@pytest.fixture
def small(scatter):
    return lambda **options: scatter(VisionTransformer(**(SMALL | options)))


OPTIONS = [
    {},
    {"global_pool": "avg"},
    {"global_pool": "map"},
    {"class_token": False, "global_pool": "avg", "fc_norm": False},
    {"reg_tokens": 4, "no_embed_class": True},
    {"init_values": 0.1, "no_embed_class": True},
    {"block_fn": ParallelThingsBlock, "init_values": 0.1},
    {"qk_norm": True, "num_heads": 2},
    {"scale_attn_norm": True, "scale_mlp_norm": True},
    {"pre_norm": True},
    {"qkv_bias": False, "mlp_ratio": 2.5},
    {"norm_layer": timm.layers.RmsNorm},
    {"num_classes": 0, "in_chans": 1},
    {"proj_bias": False},
]


@pytest.mark.parametrize(("number", "options"), enumerate(OPTIONS), ids=str)
def test_every_option_that_tensors_tell(small, same_function, tmp_path, number, options):
    reference, path = small(**options), tmp_path / ("model.pth" if number % 2 else "model.safetensors")
    (torch.save if number % 2 else save_file)(reference.state_dict(), path)
    converted = load(path)
    assert converted.vit_config.with_(layer_scale=None) == from_timm(reference).vit_config.with_(layer_scale=None)
    same_function(reference, converted, (converted.vit_config.in_chans, 32, 32))


def config(**overrides):
    return vm.ViTConfig.from_name("Ti2/8", **({"img_size": 32, "num_classes": 5} | overrides))


def saved(converted, path):
    """Returns the tensors of the file."""
    save(converted, path)
    return torch.load(path, weights_only=True)["model"]


CONFIGS = [{}, {"position_on_prefix": False}, {"position_on_prefix": False, "layer_scale": 0.1}, {"num_classes": 0}]


@pytest.mark.parametrize("layer_scale", [None, 0.1])
def test_two_parallel_branches_have_deits_names(scatter, tmp_path, layer_scale):
    converted = scatter(vm.vit(config(parallel=2, position_on_prefix=False, layer_scale=layer_scale)))
    parts = {n.split(".")[2] for n in saved(converted, tmp_path / "deit.pth") if n.startswith("blocks.1.")}
    gammas = {f"gamma_{n}" for n in ("1", "1_1", "2", "2_1")} if layer_scale else set()
    assert parts == {"norm1", "norm11", "attn", "attn1", "norm2", "norm21", "mlp", "mlp1"} | gammas
    again = load(tmp_path / "deit.pth")
    assert again.vit_config.with_(layer_scale=layer_scale) == converted.vit_config
    assert all(torch.equal(value, converted.state_dict()[name]) for name, value in again.state_dict().items())
    with pytest.raises(UserError, match="DeiT does not have: parallel=3"):
        save(vm.vit(converted.vit_config, parallel=3), tmp_path / "b.pth")


@pytest.mark.parametrize(
    "overrides",
    [{}, {"position_on_prefix": False}, {"position_on_prefix": False, "layer_scale": 0.1}, {"num_classes": 0}],
    ids=str,
)
def test_there_and_back(scatter, same_function, tmp_path, overrides):
    converted = scatter(vm.vit(config(**overrides)))
    tensors = saved(converted, tmp_path / "deit.pth")
    assert ("blocks.1.gamma_2" in tensors) == ("layer_scale" in overrides)
    again = load(tmp_path / "deit.pth")
    assert again.vit_config.with_(layer_scale=None) == converted.vit_config.with_(layer_scale=None)
    same_function(converted, again)
    if "layer_scale" in overrides:  # timm reads DeiT III's names too
        reference = timm.create_model("deit3_small_patch16_224", **SMALL)
        reference.load_state_dict(timm.models.vision_transformer.checkpoint_filter_fn(tensors, reference, True))
        same_function(converted, reference.eval())


def test_what_is_assumed_is_listed_and_can_be_said(small, tmp_path):
    torch.save(small().state_dict(), tmp_path / "a.pth")
    assert coverage(tmp_path / "a.pth").assumed == (
        "activation=gelu", "eps of all norms 1e-06", "img_size=(32, 32)", "num_heads=3", "pool=token",
    )  # fmt: skip
    settings = {"num_heads": 6, "img_size": (16, 64), "eps": 1e-5, "activation": "gelu_tanh", "pool": "avg"}
    assert coverage(tmp_path / "a.pth", **settings).assumed == ("eps of all norms 1e-05",)
    model = load(tmp_path / "a.pth", **settings)
    assert (model.vit_config.num_heads, model.vit_config.grid, model.vit_config.pool) == (6, (2, 8), "avg")
    assert model.vit_config.final_norm == NormConfig("layer", 1e-5)


@pytest.mark.parametrize(
    ("width", "name"), [(192, "tiny"), (384, "small"), (768, "base"), (1024, "large"), (1280, "huge")]
)
def test_heads_of_published_widths(width, name):
    with torch.device("meta"):
        reference = timm.create_model(f"vit_{name}_patch{14 if width == 1280 else 16}_224", depth=1)
    assert heads_of_width("", width) == reference.blocks[0].attn.num_heads


def test_widths_and_positions_that_leave_a_choice(small, tmp_path):
    torch.save(small(embed_dim=64, num_heads=2).state_dict(), tmp_path / "a.pth")
    with pytest.raises(UserError, match="no published ViT is 64 wide: give num_heads"):
        load(tmp_path / "a.pth")
    assert load(tmp_path / "a.pth", num_heads=2).vit_config.num_heads == 2
    tensors = edited(small(reg_tokens=4).state_dict(), pos_embed=(1, 9, 192))
    torch.save(tensors, tmp_path / "a.pth")
    with pytest.raises(UserError, match="more than one square of patches with 5 tokens before them: give img_size"):
        load(tmp_path / "a.pth")
    assert load(tmp_path / "a.pth", img_size=16).vit_config.position_on_prefix
    assert not load(tmp_path / "a.pth", img_size=24).vit_config.position_on_prefix


def edited(tensors, **changes):
    return {**tensors, **{name.replace("__", "."): torch.ones(value) for name, value in changes.items()}}


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ({"dist_token": (1, 1, 192), "pos_embed": (1, 18, 192)}, r"missing: head_dist\.bias, head_dist\.weight"),
        ({"blocks__0__attn1__qkv__weight": (576, 192)}, r"missing: blocks\.\*\.attn1\.proj\.bias"),
        ({"blocks__1__attns__1__attn__qkv__weight": (1,)}, r"without a place here: blocks\.\*\.attns"),
        ({"patch_embed__proj__0__weight": (1,)}, "of stems of several convolutions only hMLP is"),
        ({"blocks__0__attn__relative": (1,)}, "without a place here: blocks.*.attn.relative"),
        ({"blocks__3__norm1__weight": (192,)}, r"blocks are numbered \[0, 1, 3\]"),
        ({"blocks__1__mlp__fc1__weight": (10, 192)}, r"blocks.1.mlp.fc1.weight is \(10, 192\), needed \(768, 192\)"),
        ({"pos_embed": (1, 18, 192)}, "18 positions, which is no square of patches with 1 tokens"),
    ],
)
def test_what_cannot_be_read_is_named(small, tmp_path, edit, says):
    torch.save(edited(small().state_dict(), **edit), tmp_path / "a.pth")
    with pytest.raises(UserError, match=says):
        load(tmp_path / "a.pth")


def test_the_hmlp_stem_has_deits_names(scatter, same_function, tmp_path):
    converted = scatter(vm.apply(vm.vit("Ti2/16", img_size=32, num_classes=5), vm.Stem("hmlp")))
    tensors = saved(converted, tmp_path / "deit.pth")
    assert {name.split(".")[2] for name in tensors if name.startswith("patch_embed.proj.")} == set("013467")
    assert not [name for name in tensors if name.startswith(("patch_embed.layers", "patch_embed.norm"))]
    again = load(tmp_path / "deit.pth")
    assert again.vit_config == converted.vit_config
    same_function(converted, again)
    with pytest.raises(UserError, match=r"stem\.inner=layer norm"):
        save(vm.apply(vm.vit("Ti2/16", img_size=32), vm.Stem("hmlp", norm="layer")), tmp_path / "b.pth")
    with pytest.raises(UserError, match="makes patches of 16 x 16 pixels"):
        save(vm.apply(vm.vit("Ti2/8", img_size=32), vm.Stem("hmlp")), tmp_path / "b.pth")
    tensors["patch_embed.proj.3.weight"] = torch.zeros(48, 48, 3, 3)
    torch.save(tensors, tmp_path / "other.pth")
    with pytest.raises(UserError, match="of stems of several convolutions only hMLP is"):
        load(tmp_path / "other.pth")
