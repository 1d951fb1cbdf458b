"""Everything that uses a GPU does so where there is none: on tensors that say they are on one, and have numbers.

An operation that mixes devices raises, a tensor of the device has no numpy array, and a step that waits is an error.
"""

import json
import os
import sys
from collections import Counter

import pytest
import torch

import vitmods as vm
from vitmods import bench
from vitmods.cli import main
from vitmods.evals import PROTOCOLS
from vitmods.improvement import improve as improving
from vitmods.recipes import RECIPES, Recipe
from vitmods.tasks.base import TASKS
from vitmods.train.interrupt import Interrupted
from vitmods.train.loop import TrialRun

IS_REAL = os.environ.get("VITMODS_REAL_GPU") == "1"
pretend = sys.modules["pretend"]  # by conftest.py
pytestmark = pytest.mark.usefixtures("own_cache", "short_clocks")
MACHINE = {"device": "auto", "workers": 1, "cost_seconds": 0, "tensorboard": False, "progress": False}
SMALL = {"steps": 2, "batch_size": 4, "warmup_steps": None, "warmup_epochs": 0.0, "drop_path": 0.0}
OF_TASK = {
    "classification": {"mixup": 0.2, "erasing": 0.5, "ema": 0.9, "precision": "bf16-mixed"},
    "dino": {"local_size": 8, "local_crops": 2, "prototypes": 16, "head_width": 16, "bottleneck": 8},
    "beit": {"codes": 4, "decoder_depth": 1, "decoder_width": 64},
    "lit": {"vocabulary": 300, "text_length": 12, "text_width": 16, "text_depth": 1, "text_heads": 2, "text_mlp": 16,
            "frozen_image": False},
    "detection": {"fpn_channels": 16},
    "instance_segmentation": {"fpn_channels": 16},
}  # fmt: skip
WAITS = {"detection", "instance_segmentation"}
"""tasks whose steps wait, inside torchvision"""


def data_of(task):
    return {"none": "class", "any": "class"}.get(task.target, "tokens" if task.inputs == "tokens" else task.target)


@pytest.fixture
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def study_of(name, sets, **more):
    task = TASKS[name]
    is_sequence = task.inputs == "tokens"
    fields = SMALL | OF_TASK.get(name, {}) | more
    usual = RECIPES[task.usual_recipe]() if task.usual_recipe else Recipe()
    recipe = task.fitted(usual).with_(**fields)
    size = {"img_size": (1, 29), "in_chans": 16} if is_sequence else {"img_size": 16, "in_chans": 3}
    base = "LRA-64" if is_sequence else "mu1/4"
    return vm.Study(
        base=base, arms={"dtn": "dtn"} if is_sequence else {"dpn": "dpn"}, data=sets[data_of(task)], task=name,
        recipe=recipe, seeds=1, **size,
    )  # fmt: skip


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_task_has_a_study_on_a_gpu_whose_steps_do_not_wait(name, sets, gpu, tmp_path, monkeypatch):
    """Its trials, one of them broken off after its first step and resumed, and its costs."""
    step, waits, broken = TrialRun._train_step, Counter(), []

    def counted(run, batch):
        if run.step == 1 and not broken:
            broken.append(run.folder)
            raise Interrupted("stopped", 2)
        assert run.placement.device.type == "cuda"
        with gpu.counting() as counts:
            step(run, batch)
        waits.update(counts)

    monkeypatch.setattr(TrialRun, "_train_step", counted)
    study = study_of(name, sets)
    with pytest.raises(Interrupted):
        study.run(tmp_path, **MACHINE)
    result = study.run(tmp_path, **MACHINE)
    assert broken
    assert {trial.status for trial in result.trials} == {"finished"}
    library = {place for _, place in waits if place == "a derivative" or place.startswith("torchvision/")}
    assert {place for _, place in waits} == (library if name in WAITS else set())


@pytest.fixture(scope="module")
def study(sets, tmp_path_factory):
    """A study from the shell, compared by k-NN in bfloat16, with its costs."""
    out = tmp_path_factory.mktemp("study") / "study"
    command = f"compare --data {sets['class']} --base mu2/4 --img-size 16 --arms dtn --seeds 2 --steps 2 --batch-size 8"
    command += f" --warmup-epochs 0 --metric knn --precision bf16-mixed --workers 1 --cost-seconds 0.1 --out {out}"
    with pytest.MonkeyPatch.context() as patch, pretend.gpu():
        patch.setenv("XDG_CACHE_HOME", str(out.parent / "cache"))
        patch.setattr("vitmods.study.cost.LARGE_BATCH", 4)
        assert main(command.split()) == 0
    return out


def test_costs_and_the_metric_of_a_protocol_are_measured(study):
    costs = json.loads((study / "costs.json").read_text())
    assert costs["device"] == "cuda"
    assert costs["arms"]["dtn"]["train_step"]["ratio"] > 0
    config = json.loads((study / "trials/dtn/seed0/config.json").read_text())
    assert config["environment"]["device"] == ("NVIDIA Pretend" if not IS_REAL else torch.cuda.get_device_name())
    assert "knn" in (study / "results.json").read_text()


OPTIONS = {
    "linear": ["--linear-epochs", "2"],
    "fewshot": ["--shots", "1", "5"],
    "corruptions": ["--corruptions", "gaussian_noise", "--severities", "1"],
}


@pytest.mark.parametrize("name", sorted(PROTOCOLS))
def test_every_protocol_evaluates(name, study, sets, gpu, tmp_path, capsys):
    folder = study / "trials/dtn/seed0"
    if PROTOCOLS[name].target == "labels":
        result = study_of("multilabel", sets).run(tmp_path, **MACHINE)
        folder = tmp_path / result.trials[0].folder
    assert main(["evaluate", str(folder), "--protocol", name, "--device", "cuda", *OPTIONS.get(name, [])]) == 0
    assert capsys.readouterr().out


def test_improve_screens_confirms_and_trains_on_a_gpu(sets, gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(improving, "SCREEN_SEEDS", 2)
    monkeypatch.setattr(improving, "CONFIRM_SEEDS", 2)
    monkeypatch.setattr(improving, "best_of", lambda answer, study: study.settings.factors[0])
    for name in ("has_learned", "is_decided"):  # of trials of two steps
        monkeypatch.setattr(improving.Improvement, name, True)
    recipe = Recipe().with_(**SMALL)
    found = vm.improve(
        sets["class"], tmp_path / "out", base="mu1/4", candidates=["dpn", "norm(kind=rms)"], recipe=recipe,
        images=vm.study.ImageOptions(img_size=16), **MACHINE,
    )  # fmt: skip
    assert found.complete
    trials = [path.with_name("config.json") for path in found.path.glob("**/result.json")]
    places = [json.loads(path.read_text())["environment"]["device"] for path in trials]
    assert len(places) == 4 * 2 + 2 * 2 + 1
    assert len(set(places)) == 1
    assert "cpu" not in places
    (row, *_) = vm.predict(found.model, sets["class"])
    assert row["predicted"] in (["cat"], ["dog"])


@pytest.mark.parametrize(
    "command",
    [
        "predict {trial} {images}/test/cat",
        "evaluate {trial}",
        "finetune --from {trial} --data {images} --steps 1 --batch-size 4 --warmup-epochs 0 --out {out}",
        "train --data {images} --base mu1/4 --img-size 16 --steps 1 --batch-size 4 --warmup-epochs 0 --out {out}",
        "analyse {study} --images 2 --figures attention_distance first_norm gradients kernels lambdas stem_gradient "
        "token_magnitude token_pca variation --out {out}",
        "bench --models mu1/4 mu1/4+dpn --img-size 16 --batch 2 --seconds 0.1 --bf16",
        "export {trial} --to hub --out {out}",
        "export {trial} --to safetensors --out {out}.safetensors",
    ],
    ids=lambda command: command.partition(" ")[0],
)
def test_every_command_that_uses_a_device(command, study, sets, gpu, tmp_path, monkeypatch):
    monkeypatch.setattr("vitmods.bench.BLOCK_S", 0.0)
    monkeypatch.setitem(bench.SIDE, "cuda", 64)
    places = {"study": study, "trial": study / "trials/base/seed0", "images": sets["class"], "out": tmp_path / "out"}
    assert main(command.format(**places).split()) == 0
