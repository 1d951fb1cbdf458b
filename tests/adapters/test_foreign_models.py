"""What all adapters share: which models and files are refused, and why."""

import zipfile
from functools import partial

import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import vitmods as vm
from vitmods.adapters import coverage, from_timm, load, save, to_timm
from vitmods.adapters.apply import as_vit
from vitmods.adapters.timm_folder import timm_words
from vitmods.cli import main
from vitmods.util.errors import UserError

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


def small():
    return VisionTransformer(**SMALL)


WRAPPED = "wraps the model: give the model inside, "


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(2, 2), "A Linear cannot be read: give a vitmods ViT .* timm's or torchvision's"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), f"{WRAPPED}.*model.module"),
        (type("OptimizedModule", (nn.Module,), {}), f"{WRAPPED}.*_orig_mod"),
        (
            lambda: VisionTransformer(**SMALL, mlp_layer=timm.layers.SwiGLU, patch_drop_rate=0.5),
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
    model = vm.vit("mu/8", img_size=32, num_classes=5, activation="gelu_tanh" if name == "a.npz" else "gelu")
    save_file(model.state_dict(), path) if name == "a.safetensors" else save(model, path)
    for damaged in (path.read_bytes()[:-200], b""):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=name):
            load(path)


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("a.pth", lambda path: None, "does not exist"),
        ("a.zip", lambda path: path.write_bytes(b""), r"files that can be read end in \.npz"),
        ("", lambda path: None, r"contains neither model\.safetensors"),
        (
            "a.safetensors",
            partial(save_file, {"fc.weight": torch.ones(2)}),
            r"does not contain a ViT .* its first are fc\.weight",
        ),
        ("a.safetensors", partial(save_file, {"conv_proj.weight": torch.ones(2)}), "torchvision's names"),
        ("a.pth", partial(torch.save, [torch.ones(1)]), r"a\.pth"),
        ("a.pth", partial(torch.save, {"epoch": 3}), r"a\.pth"),
        ("a.pth", partial(torch.save, {}), r"a\.pth"),
        ("a.npz", lambda path: zipfile.ZipFile(path, "w").close(), "empty"),
    ],
)
def test_other_files(tmp_path, name, write, message):
    write(tmp_path / name)
    with pytest.raises(UserError, match=message):
        load(tmp_path / name)


@pytest.mark.parametrize(
    "fields", [{"global_pool": "avg", "norm_layer": timm.layers.RmsNorm}, {"scale_mlp_norm": True}]
)
def test_swiglu_of_timm_is_ours_both_ways(fields):
    old = VisionTransformer(**SMALL, mlp_layer=timm.layers.SwiGLU, act_layer=nn.SiLU, **fields).eval()
    for parameter in old.parameters():
        nn.init.normal_(parameter, std=0.2)
    read, images = from_timm(old), torch.randn(2, 3, *old.patch_embed.img_size)
    assert read.vit_config.mlp_kind == "swiglu"
    torch.testing.assert_close(read.eval()(images), old(images), rtol=1e-4, atol=1e-4)
    changed = vm.apply(VisionTransformer(**SMALL, **fields), vm.SwiGLU()).eval()
    written = to_timm(changed).eval()
    assert type(written.blocks[0].mlp) is timm.layers.SwiGLU
    assert timm_words(changed.vit_config) is None  # a file would have to name a class
    torch.testing.assert_close(written(images), changed(images), rtol=1e-4, atol=1e-4)


def test_a_wrapped_model_of_timm_is_read():
    sizes = {"img_size": 32, "depth": 1, "embed_dim": 16, "num_heads": 2}
    config = transformers.TimmWrapperConfig(architecture="vit_tiny_patch16_224", num_labels=3, model_args=sizes)
    model = transformers.TimmWrapperForImageClassification(config).eval()
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(as_vit(model).eval()(images), model(images).logits)
    assert type(vm.apply(model, vm.DualPatchNorm()).patch_embed).__name__ == "DualPatchNormStem"


def test_the_shell_tells_a_model_of_timm_by_its_prefix(capsys):
    assert main(["diff", "--base", "deit3_small_patch16_224", "--arm", "dpn"]) == 2
    assert "timm:deit3_small_patch16_224" in capsys.readouterr().err
    assert main(["diff", "--base", "timm:vit_tiny_patch16_224", "--arm", "dpn", "--img-size", "32"]) == 0
    assert "DualPatchNormStem" in capsys.readouterr().out
