"""What all adapters share: which models and files are refused and why; slots without counterpart are named."""

import zipfile
from functools import partial

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import vitmods as vm
from vitmods.adapters import coverage, from_timm, load, save, to_huggingface, to_timm, to_torchvision
from vitmods.cli import main
from vitmods.model.slots import BranchConfig, NormConfig
from vitmods.util.errors import UserError

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


def small():
    return VisionTransformer(**SMALL)


WRAPPED = "wraps the model: give the model inside, "
UNREADABLE = {"mlp_layer": timm.layers.SwiGLU, "patch_drop_rate": 0.5}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(2, 2), "A Linear cannot be read: give a vitmods ViT .* timm's or torchvision's"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), f"{WRAPPED}.*model.module"),
        (type("OptimizedModule", (nn.Module,), {}), f"{WRAPPED}.*_orig_mod"),
        (
            lambda: VisionTransformer(**SMALL, **UNREADABLE),
            r"patch dropout; MLP SwiGLU with GELU.*timm:NAME.*vm.apply.model, ..., in_place=True.$",
        ),
    ],
)
def test_models_that_cannot_be_changed(make, message):
    """A refusal names every reason and what can be done."""
    with pytest.raises(UserError, match=message):
        vm.apply(make(), vm.DualPatchNorm(), in_place=False)


@pytest.mark.parametrize("make", [small, lambda: vm.vit("mu/4", img_size=8)])
def test_no_weights_and_half_precision(make):
    convert = from_timm if make is small else to_timm
    with torch.device("meta"):
        empty = make()
    with pytest.raises(UserError, match="on the meta device and has no weights: load them first"):
        convert(empty)
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(UserError, match=f"in {str(dtype)[6:]}, .*in float32 \\(model.float\\(\\)\\)"):
            convert(make().to(dtype))
    mixed = make()
    mixed.head.bfloat16()
    with pytest.raises(UserError, match="in bfloat16, float32"):
        convert(mixed)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda model: setattr(model.blocks[1], "mlp", model.blocks[0].mlp), "uses one parameter in two places"),
        (lambda model: model.head.bias.data.fill_(float("nan")), "outputs are not finite"),
        (lambda model: model.head.register_forward_hook(lambda module, args, out: out + 1), "outputs differ"),
        (lambda model: model.blocks[1].norm1.register_forward_hook(lambda m, i, out: out * 2), "tokens differ"),
    ],
)
def test_models_whose_outputs_cannot_be_kept(spoil, message):
    model = small()
    spoil(model)
    with pytest.raises(UserError, match=message):
        from_timm(model)


def test_the_comparison_leaves_modes_and_random_state_alone():
    model = small().train()
    model.blocks[1].eval()
    state = torch.random.get_rng_state()
    from_timm(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.training
    assert model.blocks[0].mlp.training
    assert not model.blocks[1].mlp.training


def test_the_account_of_a_model_and_other_endings_of_files(tmp_path):
    account = coverage(small())
    assert [row.theirs for row in account.rows] == [(name,) for name in small().state_dict()]
    with pytest.raises(UserError, match="leave num_heads out"):
        coverage(small(), num_heads=2)
    with pytest.raises(UserError, match="to_timm, to_torchvision, to_huggingface"):
        save(vm.vit("mu/4", img_size=8), tmp_path / "model.bin")


@pytest.mark.parametrize("name", ["a.npz", "a.pth", "a.safetensors"])
def test_damaged_and_empty_files(tmp_path, name):
    path = tmp_path / name
    save(vm.vit("mu/8", img_size=32, num_classes=5, activation="gelu_tanh" if name == "a.npz" else "gelu"), path)
    for damaged in (path.read_bytes()[:-200], b""):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=name):
            load(path)


def with_names(*names):
    return partial(save_file, {name: torch.ones(2) for name in names})


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("a.pth", lambda path: None, "does not exist"),
        ("a.zip", lambda path: path.write_bytes(b""), r"files that can be read end in \.npz"),
        ("", lambda path: None, r"contains neither model\.safetensors"),
        ("a.safetensors", with_names("fc.weight"), r"does not contain a ViT .* its first are fc\.weight"),
        ("a.safetensors", with_names("conv_proj.weight"), r"its first are conv_proj\.weight"),
        ("a.pth", partial(torch.save, [torch.ones(1)]), r"a\.pth"),
        ("a.pth", partial(torch.save, {"epoch": 3}), r"a\.pth"),
        ("a.pth", partial(torch.save, {}), r"a\.pth"),
        ("a.npz", lambda path: zipfile.ZipFile(path, "w").close(), "not a set of named tensors"),
    ],
)
def test_other_files(tmp_path, name, write, message):
    write(tmp_path / name)
    with pytest.raises(UserError, match=message):
        load(tmp_path / name)


def test_the_shell_tells_a_model_of_timm_by_its_prefix(capsys):
    assert main(["diff", "--base", "deit3_small_patch16_224", "--arm", "dpn"]) == 2
    assert "timm:deit3_small_patch16_224" in capsys.readouterr().err
    assert main(["diff", "--base", "timm:vit_tiny_patch16_224", "--arm", "dpn", "--img-size", "32"]) == 0
    assert "DualPatchNormStem" in capsys.readouterr().out


BIG_VISION = {"activation": "gelu_tanh", "position_on_prefix": False, "init": "big_vision"}
GAP = {"pool": "avg", "class_token": False}
COARSE, RMS = NormConfig("layer", 1e-3), NormConfig("rms", 1e-5)
OF_COARSE = BranchConfig(COARSE)
SLOTS = {
    "big_vision": [
        ({"activation": "gelu"}, r"activation=gelu \(there: gelu_tanh\)"),
        ({"pool": "avg"}, "class_token=True"),
        ({**GAP, "norm_after_pool": True}, "norm_after_pool=True"),
        ({"pool": "none"}, "pool=none"),
        ({"mlp": BranchConfig(NormConfig("layer", 1e-5))}, "mlp.before=layer norm, eps 1e-05"),
        ({"layer_scale": 0.1}, "layer_scale=0.1"),
        ({"position": "none"}, "position=none"),
    ],
    "DeiT": [
        ({"layer_scale": 0.1}, "layer_scale=0.1"),
        ({"activation": "gelu_tanh"}, "activation=gelu_tanh"),
        ({"pool": "avg"}, "pool=avg"),
        ({"reg_tokens": 1}, "reg_tokens=1"),
    ],
    "Hugging Face's ViT": [
        ({"pool": "avg"}, "pool=avg"),
        ({"reg_tokens": 2}, "reg_tokens=2"),
        ({"representation": True}, "representation=True"),
        ({"proj_drop": 0.1}, "proj_drop=0.1"),
        ({"mlp": BranchConfig(COARSE)}, "mlp.before=layer norm, eps 0.001"),
        ({"position_on_prefix": False}, "position_on_prefix=False"),
    ],
    "torchvision's VisionTransformer": [
        ({"img_size": (8, 16)}, r"img_size=\(8, 16\)"),
        ({"in_chans": 1}, "in_chans=1"),
        ({"pool": "avg"}, "pool=avg"),
        ({"layer_scale": 0.1}, "layer_scale=0.1"),
        ({"activation": "gelu_tanh"}, "activation=gelu_tanh"),
        ({"pos_drop": 0.1}, "pos_drop=0.1"),
    ],
    "timm's VisionTransformer": [
        ("dpn", r"stem.before=layer norm, eps 1e-06 \(there: None\); stem.after|stem.before"),
        ("gpsa", "positional"),
        ("stem(kind=hmlp)", "stem"),
        ("postnorm", "attn.before=None"),
        ("subln+placement(mlp=pre+post)", "mlp.after="),
        ("normformer(head_scale=true,residual_scale=true)", "attn.branch=.*head_scale=True.*residual_scale=True"),
        ("dpn(before=false,after=false,after_position=true)", "position_norm_on_prefix|stem.bias"),
        ({"mask_token": True}, "mask_token"),
        ({"representation": True}, "representation=True"),
        ({"position": "sincos2d", "position_on_prefix": False}, "position=sincos2d"),
        ({"drop_path": 0.1, "drop_path_shape": "constant"}, "drop_path_shape=constant"),
        ({"final_norm": COARSE}, "final_norm=layer norm, eps 0.001 "),
        ({"pool": "map", "final_norm": None, "attn": OF_COARSE, "mlp": OF_COARSE}, "pool_norm=None"),
        ({"mlp": BranchConfig(RMS)}, "mlp.before=rms norm, eps 1e-05 "),
    ],
}
WRITERS = {
    "big_vision": lambda model, folder: save(model, folder / "model.npz"),
    "DeiT": lambda model, folder: save(model, folder / "model.pth"),
    "Hugging Face's ViT": lambda model, _: to_huggingface(model),
    "torchvision's VisionTransformer": lambda model, _: to_torchvision(model),
    "timm's VisionTransformer": lambda model, _: to_timm(model),
}


@pytest.mark.parametrize(("library", "model", "slot"), [(name, *row) for name, rows in SLOTS.items() for row in rows])
def test_slots_without_counterpart_are_named(tmp_path, library, model, slot):
    base = BIG_VISION if library == "big_vision" else {}
    fields, changes = (model, "") if isinstance(model, dict) else ({}, model)
    vit = vm.vit("mu2/4", **{"img_size": 8, "num_classes": 5, **base, **fields})
    vit = vm.apply(vit, *vm.parse_changes(changes)) if changes else vit
    with pytest.raises(UserError, match=f"{library} does not have: .*({slot})"):
        WRITERS[library](vit, tmp_path)
    assert not list(tmp_path.iterdir())
