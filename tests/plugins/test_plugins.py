"""What a user adds from outside the package, in one file each: found by name, in the shell, in worker processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vitmods as vm
from vitmods import data
from vitmods.changes import REGISTRY
from vitmods.data.sources import open_source
from vitmods.layers.norms import NORMS
from vitmods.recipes import plain
from vitmods.study.answer import Answer
from vitmods.study.retrain import export_line
from vitmods.util.errors import UserError
from vitmods.util.registry import plugins

HERE = Path(__file__).parent
NORM, CHANGE, SOURCE = (HERE / f"{name}.py" for name in ("my_norm", "my_training_change", "my_source"))


@pytest.fixture
def loaded(load):
    load(NORM.stem, CHANGE.stem)


def test_a_norm_takes_part_everywhere(loaded):
    torch.manual_seed(0)
    base = vm.vit("mu2/4", img_size=8, num_classes=5)
    torch.nn.init.normal_(base.blocks[0].norm1.weight)
    images = torch.randn(2, 3, 8, 8)
    model = vm.apply(base, *vm.parse_changes("peaknorm(power=0.5)")).eval()
    assert type(model.blocks[0].norm1) is NORMS["peak"].module is type(model.norm)
    assert model.blocks[0].norm1.power == 0.5
    assert torch.equal(model.blocks[0].norm1.weight, base.blocks[0].norm1.weight)
    assert str(model.changes[0]) == "norm(kind=peak,power=0.5)"
    assert vm.ViTConfig.from_json(model.vit_config.to_json()) == model.vit_config
    assert "Peak norm" in model.changes[0].describe()["title"]
    fast = vm.optimize_for_inference(model)
    torch.testing.assert_close(fast(images), model(images), atol=1e-5, rtol=1e-5)
    assert "peak" not in " ".join(vm.papers.line_up("norms").study.every_arm)  # a published comparison stays as it is
    replaced = vm.replace_norms(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True), vm.Norm("peak"))
    assert "PeakNorm" in str(replaced)
    with pytest.raises(ValueError, match="Did you mean 'peak'"):
        vm.Norm("paek")


def test_the_example_tells_tokens_the_mean_and_the_deviation_of_their_patches(load):
    load("patch_statistics")
    torch.manual_seed(0)
    base = vm.vit("mu2/4", img_size=8, num_classes=5)
    torch.nn.init.normal_(base.head.weight)
    model = vm.apply(base, *vm.parse_changes("patch_statistics"))
    told = torch.nn.init.normal_(model.patch_embed.statistics)  # (2, C)
    images = torch.randn(2, 3, 8, 8) * torch.rand(2, 3, 1, 1)
    images[0, :, :4, :4] = 0.5  # a patch without contrast
    expected = base.patch_embed(images)
    for b in range(2):
        for patch, (row, column) in enumerate(((0, 0), (0, 4), (4, 0), (4, 4))):
            values = images[b, :, row : row + 4, column : column + 4]
            contrast = (values.var(correction=0) + 1e-4).log() / 2
            expected[b, patch] += values.mean() * told[0] + contrast * told[1]
    torch.testing.assert_close(model.patch_embed(images), expected)
    seen = torch.tensor([[3, 1], [0, 2]])
    visible = expected.gather(1, seen[..., None].expand(-1, -1, expected.shape[-1]))
    torch.testing.assert_close(model.patch_embed(images, seen), visible)
    changed, width = vm.diff(base, model, images), expected.shape[-1]
    assert changed.params[1] - changed.params[0] == 2 * width
    assert changed.macs[1] - changed.macs[0] == 4 * 2 * width
    assert changed.preserves == "function"


def test_a_change_that_acts_in_training_alone(loaded):
    torch.manual_seed(0)
    base = vm.vit("mu2/4", img_size=8, num_classes=5)
    torch.nn.init.normal_(base.head.weight)
    model, images = vm.apply(base, *vm.parse_changes("stochastic")), torch.randn(4, 3, 8, 8)
    assert torch.equal(model.eval()(images), base.eval()(images))
    assert not torch.equal(model.train()(images), base.train()(images))
    assert vm.changes.Stochastic is REGISTRY["stochastic"]
    assert "drop_path: 0 -> 0.5 in training" in str(vm.diff(base, model))
    assert {str(NORM), str(CHANGE)} <= set(plugins()), "other processes load both"


@pytest.mark.slow
def test_the_shell_knows_them_and_a_study_takes_them_along(tmp_path, said, refused, forget):
    """... into a worker, which has them all; its folder is not opened without them, nor are they loaded because it
    names them."""
    study = tmp_path / "study"
    plugins = f"--plugin {NORM} --plugin={CHANGE} --plugin {SOURCE}"
    command = f"{plugins} compare --data stripes:60 --base mu2/4 --img-size 8 --in-chans 1"
    command += " --arms peaknorm+stochastic --seeds 2 --batch-size 32 --steps 2 --cost-seconds 0 --quiet --device cpu"
    command += f" --budget 1trials --out {study}"
    assert "Unknown change 'peaknorm'" in refused("compare --arms peaknorm --out", study)
    said(command, "--workers", 1)
    said(command, "--workers", 2)  # for which one worker is started
    assert (study / "trials" / "peaknorm+stochastic" / "seed0" / "result.json").exists()
    assert (study / "logs" / "worker0.txt").exists()
    assert json.loads((study / "study.json").read_text())["plugins"] == [str(NORM), str(CHANGE), str(SOURCE)]
    needed = f"--plugin {NORM} --plugin {CHANGE} --plugin {SOURCE}"
    assert Answer.load(study).command.endswith(needed)
    assert export_line(study / "trials" / "base" / "seed0").endswith(f"--to onnx {needed}")
    assert "stochastic" in [change["name"] for change in json.loads(said(f"{plugins} changes --json").out)]
    said(f"{plugins} report", study)
    forget()
    assert f"made with plugins: add {needed}" in refused("report", study)


def test_an_installed_package_joins_by_an_entry_point(tmp_path):
    (tmp_path / "their_norm.py").write_text(NORM.read_text())
    info = tmp_path / "their_norm-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-norm\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vitmods]\nnorm = their_norm\nbroken = nowhere_at_all\n")
    code = "import vitmods as vm; from vitmods.util.registry import plugins; "
    command = [sys.executable, "-c", f"{code}print(vm.parse_changes('peaknorm')[0], plugins())"]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables)
    assert done.stdout == "peaknorm []\n", done.stderr
    assert "The plugin broken (nowhere_at_all) is left out: No module named 'nowhere_at_all'" in done.stderr


def test_without_the_plugin_there_is_no_such_source():
    with pytest.raises(UserError, match=r"Neither a folder .stripes:40. nor a set|folder stripes:40 does not exist"):
        open_source("stripes:40")


def test_a_source_from_outside_is_one_file(load):
    load(SOURCE.stem)
    assert str(SOURCE) in plugins()
    source = open_source("stripes:40?gray=150")
    assert (source.classes, len(source.splits["train"]), source.spec) == (("down", "across"), 40, "stripes:40?gray=150")
    with pytest.raises(UserError, match=r"unknown option .grey. of stripes\. Did you mean .gray."):
        open_source("stripes:40?grey=1")
    with pytest.raises(UserError, match="Did you mean 'stripes'"):
        open_source("stripe:40")


def test_images_may_have_targets_of_a_source_s_own(load):
    load("my_depth")
    options = {"img_size": 8, "in_chans": 1, "augment": plain().augment}
    dataset = data.load("walls:40", target="depth", **options)
    assert dataset.summary()["warnings"] == []
    batch = next(dataset.train_batches(seed=0, epoch=0, batch_size=8))
    assert [255 - one.annotation.meters for one in batch.targets] == pytest.approx(
        ((batch.inputs[:, 0, 0, 0] * 0.5 + 0.5) * 255).tolist(), abs=0.01
    )
    for target, reason in (("class", "not a class"), ("labels", "not labels")):
        with pytest.raises(UserError, match=f"gives a depth of each image, {reason}"):
            data.load("walls:40", target=target, **options)
