"""big_vision's checkpoints as files: the goldens, timm's own reader as a second opinion, old names, what is refused."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import vitmods as vm
from vitmods.adapters import coverage, load, save
from vitmods.adapters.big_vision import read_big_vision
from vitmods.adapters.weights import find_model, read_tensors_of
from vitmods.model.slots import NormConfig
from vitmods.util.errors import UserError

GOLDEN = Path(__file__).parents[1] / "golden"
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_dim": 48, "num_classes": 5}
BIG_VISION = {"activation": "gelu_tanh", "position_on_prefix": False, "init": "big_vision"}
POOLS = {"token": {}, "gap": {"pool": "avg", "class_token": False}, "map": {"pool": "map", "class_token": False}}


def small(**overrides):
    return vm.vit(vm.ViTConfig(**(SMALL | BIG_VISION | overrides)))


def write(path, arrays):
    np.savez(path, **{name: np.asarray(value) for name, value in arrays.items()})
    return path


def arrays_of(path):
    with np.load(path) as archive:
        return {name: archive[name] for name in archive.files}


@pytest.fixture
def saved(scatter, tmp_path):
    """(model, its file) for overrides of the small config"""

    def make(**overrides):
        model = scatter(small(**overrides))
        path = tmp_path / "model.npz"
        save(model, path)
        return model, path

    return make


@pytest.mark.parametrize(
    ("name", "prefix"), [("bv_vit_tok_repsize", ""), ("bv_vit_gap_sincos", "params/"), ("bv_vit_dpn", "opt/target/")]
)
def test_goldens_through_the_file(tmp_path, name, prefix):
    """float64, with outputs and gradients of the images that big_vision gave."""
    g = arrays_of(GOLDEN / f"{name}.npz")
    path = write(tmp_path / "golden.npz", {prefix + n[6:]: v for n, v in g.items() if n.startswith("param.")})
    model = read_big_vision("", find_model("", read_tensors_of([path])).tensors, img_size=(12, 8))[0].eval()
    images = torch.from_numpy(g["in.image_nhwc"]).permute(0, 3, 1, 2).requires_grad_()
    out = model(images)
    gradient = torch.autograd.grad((out * torch.from_numpy(g["ct.logits"])).sum(), images)[0].permute(0, 2, 3, 1)
    tolerance = 1e-6 if "sincos" in name else 1e-8  # our fixed positions are made in float32
    torch.testing.assert_close(out.detach(), torch.from_numpy(g["out.logits"]), atol=tolerance, rtol=0)
    torch.testing.assert_close(gradient, torch.from_numpy(g["grad_in.image"]), atol=tolerance, rtol=0)


def of_timm(path, **options):
    """What timm's own reader makes of the file."""
    sizes = {k: v for k, v in SMALL.items() if k != "mlp_dim"}
    model = VisionTransformer(**sizes, mlp_ratio=1.5, act_layer=partial(nn.GELU, approximate="tanh"), **options)
    with torch.no_grad():
        model.load_pretrained(str(path))
    return model.eval()


CONFIGS = {
    **POOLS,
    "representation": {"representation": True},
    "sincos2d": {"position": "sincos2d", "pool": "avg", "class_token": False},
    "no head": {"num_classes": 0},
    "gray": {"in_chans": 1, "patch_size": (8, 16)},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back(saved, same_function, name):
    model, path = saved(**CONFIGS[name])
    again = load(path, img_size=(32, 32))
    assert again.vit_config == model.vit_config
    assert not again.training
    same_function(model, again, (model.vit_config.in_chans, 32, 32))


@pytest.mark.parametrize("in_chans", [1, 3])
def test_dual_patchnorm_there_and_back(scatter, same_function, tmp_path, in_chans):
    model = scatter(vm.apply(small(in_chans=in_chans), vm.DualPatchNorm()))
    model.patch_embed.norm_before.weight.data.normal_()
    save(model, tmp_path / "dpn.npz")
    same_function(model, load(tmp_path / "dpn.npz", in_chans=in_chans), (in_chans, 32, 32))
    if in_chans == 1:
        with pytest.raises(UserError, match="not a square patch with 3 channels: give in_chans"):
            load(tmp_path / "dpn.npz")


@pytest.mark.parametrize("pool", POOLS)
def test_timms_reader_agrees(saved, same_function, pool):
    """timm reads these files too, by code of its own."""
    model, path = saved(**POOLS[pool])
    pooled = {"class_token": pool == "token", "global_pool": {"gap": "avg"}.get(pool, pool)}
    reference = of_timm(path, no_embed_class=True, fc_norm=False, **pooled)
    same_function(model, reference)
    same_function(load(path), reference)
    model = load(path, eps=1e-3, activation="gelu", drop_path=0.1)
    assert model.vit_config.attn.before == NormConfig("layer", 1e-3)
    assert (model.vit_config.activation, model.vit_config.drop_path) == ("gelu", 0.1)
    assert model.blocks[0].norm1.eps == model.norm.eps == 1e-3


OLD = {
    "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1", "LayerNorm_1": "LayerNorm_2",
    "MlpBlock_0": "MlpBlock_3", "params/pos_embedding": "params/Transformer/posembed_input/pos_embedding",
}  # fmt: skip


def test_first_names_with_the_class_tokens_position_first(saved, same_function, tmp_path):
    """Against timm's reader, which knows these names as well; writing gives current names and the same function."""
    _, path = saved()
    arrays = {}
    for name, value in arrays_of(path).items():
        for new, first in OLD.items():
            name = name.replace(new, first)
        arrays[name.removeprefix("params/")] = value
    table = arrays["Transformer/posembed_input/pos_embedding"]
    arrays["Transformer/posembed_input/pos_embedding"] = np.concatenate([table[:, :1] - 1, table], axis=1)
    old = write(tmp_path / "old.npz", arrays)
    model = load(old)
    assert model.vit_config.position_on_prefix
    same_function(model, of_timm(old))
    save(model, tmp_path / "new.npz")
    current = load(tmp_path / "new.npz")
    assert not current.vit_config.position_on_prefix
    same_function(model, current)


def test_stacked_blocks(saved, same_function, tmp_path):
    model, path = saved()
    arrays = arrays_of(path)
    first = "params/Transformer/encoderblock_0/"
    for name in [n for n in arrays if n.startswith(first)]:
        blocks = [arrays.pop(name.replace("_0/", f"_{i}/", 1)) for i in range(2)]
        arrays[name.replace("encoderblock_0/", "encoderblock/")] = np.stack(blocks)
    same_function(model, load(write(tmp_path / "scan.npz", arrays)))


def test_bfloat16_and_the_tensors_of_another_tower(saved, tmp_path):
    model, path = saved(**POOLS["map"])
    model.bfloat16().float()
    arrays = {}
    for name, value in arrays_of(path).items():
        halved = torch.from_numpy(value).bfloat16().view(torch.int16).numpy()
        arrays[name.replace("params/", "params/img/")] = halved.view("V2")  # as numpy keeps bfloat16
    arrays |= {"params/t": np.ones(1), "params/txt/Embed_0/embedding": np.ones((3, 2))}
    path = write(tmp_path / "two.npz", arrays)
    again = load(path).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    account = coverage(path)
    assert account.left_out == tuple((n, "outside the model's params/img/") for n in list(arrays)[-2:])
    assert account.assumed == ("eps of all norms 1e-06", "activation=gelu_tanh", "img_size=(32, 32)")


def without(*parts):
    return lambda arrays: {n: v for n, v in arrays.items() if not any(part in n for part in parts)}


def reshaped(name, *shape):
    return lambda arrays: arrays | {f"params/{name}": np.ones(shape, np.float32)}


@pytest.mark.parametrize(
    ("fix", "settings", "says"),
    [
        (without("encoderblock_1/MlpBlock_0/Dense_0/bias"), {}, "Tensors missing: .*encoderblock_.*Dense_0/bias"),
        (without("query/kernel"), {}, "query/kernel is missing"),
        (without("encoderblock_0/"), {}, "is missing"),
        (reshaped("extra", 3), {}, "without a place here: extra"),
        (reshaped("head/kernel", 32, 4), {}, r"head.weight is \(4, 32\), needed \(5, 32\)"),
        (reshaped("embedding/kernel", 3, 32), {}, "expected 4 axes"),
        (reshaped("pos_embedding", 1, 15, 32), {}, "15 positions, which is no square"),
        (reshaped("MAPHead_0/probe", 1, 1, 32), {}, "without a place here: MAPHead_0/probe"),
        (without("pos_embedding"), {}, "learned positions.* give img_size"),
        (without(), {"img_size": 40}, r"16 positions, and img_size=\(40, 40\) needs 25 or 26"),
        (without(), {"img_size": (30, 32)}, r"needs 12 or 13"),
        (without(), {"num_heads": 2}, "says num_heads=4, not 2"),
        (without(), {"in_chans": 1}, "says in_chans=3, not 1"),
        (without(), {"num_head": 4}, "not have a setting 'num_head'. Did you mean 'num_heads'"),
        (without(), {"depth": 1}, "without a place here: .*encoderblock"),
    ],
)
def test_what_cannot_be_read_is_named(saved, tmp_path, fix, settings, says):
    _, path = saved()
    with pytest.raises(UserError, match=says):
        load(write(tmp_path / "bad.npz", fix(arrays_of(path))), **settings)
