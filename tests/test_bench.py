"""`bench`: what it measures of known models, and the errors before anything is timed."""

import json

import pytest
import timm
import torch
from torch import nn

import vitmods as vm
from vitmods.adapters import open_model
from vitmods.bench import bench, plot, table
from vitmods.cli import main
from vitmods.model.flops import count_macs
from vitmods.util.errors import UserError


@pytest.fixture(scope="module")
def found(seconds_by_counting):
    models = {"mu2/4": vm.vit("mu2/4", img_size=16), "four": vm.vit("mu8/4", img_size=16)}
    models["fast"] = vm.optimize_for_inference(models["mu2/4"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitmods.bench.seconds_per_call", seconds_by_counting)
        return bench(models, (16, 16), batches=(1, 4), budget_s=0.1)


def test_a_deeper_model_is_slower_and_larger(found):
    cells = {(c["model"], c["kind"], c["batch"]): c for c in found["cells"]}
    for kind in ("inference", "training"):
        deep, first = cells["four", kind, 4], cells["mu2/4", kind, 4]
        assert deep["throughput"]["ratio"] < 0.6
        assert first["throughput"]["ratio"] == 1
        assert deep["peak_memory_bytes"] > first["peak_memory_bytes"]
        assert 0 < deep["share_of_peak"] < 1.5
        assert deep["images_per_s"] == pytest.approx(4 / deep["seconds"])
    assert ("fast", "inference", 1) in cells
    assert ("fast", "training", 1) not in cells


def test_work_is_counted_for_any_module():
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3)
    macs = bench({"timm": theirs}, (32, 32), batches=(1,), kinds=("inference",), budget_s=0)["models"]["timm"]["macs"]
    ours = count_macs(vm.ViTConfig.from_name("Ti1/16", img_size=32, num_classes=3))
    assert macs == pytest.approx(ours, rel=0.02)


def test_table_and_plot(found, tmp_path):
    text = table(found, 100)
    assert "inference, batch 4" in text
    assert "1.00 [1.00, 1.00]" in text
    plot(found, tmp_path / "bench.svg")
    assert (tmp_path / "bench.svg").read_text().count("<svg") == 1
    json.dumps(found)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (vm.vit("mu2/4", img_size=12), "does not take"),
        (vm.vit("mu2/4", img_size=16, num_classes=0, pool="none"), "head"),
        (nn.Linear(3, 3), "does not read images"),
    ],
    ids=["size", "no head", "text"],
)
def test_unfit_models_are_one_error(model, words):
    with pytest.raises(UserError, match=words):
        bench({"it": model}, (16, 16))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "S/16", "S/16"], "twice"),
        (["--batch", "0"], "from 1 on"),
        (["--models", "timm:vit_smal_patch16_224"], "vit_small"),
        (["--models", "hf:nowhere"], "config.json"),
        (["--models", "torchvision:vit_z"], "vit_z"),
        (["--models", "missing.safetensors"], "missing.safetensors does not exist"),
        (["--models", "S/16+dnp"], "Unknown change 'dnp'"),
        (["--img-size", "1", "2", "3"], "rows and columns"),
        (["--device", "gpu7"], "gpu7"),
    ],
    ids=lambda v: v[-1] if isinstance(v, list) else "",
)
def test_bad_input_of_the_command(arguments, words, capsys):
    assert main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_command(tmp_path, capsys):
    small = ["bench", "--models", "mu2/4", "mu2/4+dpn", "fast:mu2/4", "--img-size", "16", "--batch", "2"]
    assert main([*small, "--seconds", "0", "--out", str(tmp_path / "b")]) == 0
    assert "fast:mu2/4" in capsys.readouterr().out
    assert {p.name for p in (tmp_path / "b").iterdir()} == {"bench.json", "bench.png"}
    assert len(json.loads((tmp_path / "b" / "bench.json").read_text())["cells"]) == 5


def test_export_command(tmp_path, capsys):
    model = vm.vit("mu2/4", img_size=16, num_classes=5)
    vm.export(model.eval(), tmp_path / "m.safetensors")
    out = tmp_path / "m.pt2"
    arguments = ["export", str(tmp_path / "m.safetensors"), "--to", "torch", "--out", str(out), "--img-size", "8"]
    assert main([*arguments, "--optimize"]) == 0
    assert "outputs differ by" in capsys.readouterr().out
    images = torch.randn(3, 3, 8, 8)
    resized = open_model(str(tmp_path / "m.safetensors"), 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.export.load(out).module()(images), resized(images), rtol=1e-4, atol=1e-5)
    assert main(["export", str(tmp_path / "none.safetensors")]) == 2
    assert main(["export", "mu2/4"]) == 2  # weights that nobody trained
    assert "There is no checkpoint 'mu2/4'" in capsys.readouterr().err
