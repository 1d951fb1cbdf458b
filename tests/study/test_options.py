"""Options are declared once: of a run in RunOptions and StudyOptions, of a study in StudySettings and ImageOptions."""

import inspect
import json
from dataclasses import fields, replace

import pytest

import vitmods as vm
from vitmods.cli import main
from vitmods.study import StudyOptions
from vitmods.study.cells import ImageOptions
from vitmods.study.executors import ClusterOptions
from vitmods.study.executors.processes import LocalProcesses
from vitmods.study.settings import StudySettings
from vitmods.study.store import StudyFolder
from vitmods.train import RunOptions
from vitmods.util.errors import UserError

HIDDEN = {"progress", "checkpoint_every_steps", "eval_every_epochs", "tensorboard", "answer_on"}  # from the shell
OTHER = {"device": "cpu", "cache_dir": "/x", "log": ("wandb",), "record": ("lambdas",)}


def names(kind):
    return {field.name for field in fields(kind)}


def test_a_worker_gets_every_field(tmp_path):
    """Without compile, which excludes recompute, and shard, which studies refuse."""
    changed = dict(OTHER)
    for field in fields(RunOptions):
        if field.name not in (*OTHER, "compile", "shard"):
            changed[field.name] = not field.default if isinstance(field.default, bool) else (field.default or 0) + 1
    task = json.loads(json.dumps(LocalProcesses(StudyFolder(tmp_path), 1, 1, StudyOptions(**changed)).task(0)))
    received = RunOptions(**task["options"])
    assert received == RunOptions(**{**changed, "progress": False})  # a worker has no terminal
    assert all(getattr(received, name) != getattr(RunOptions(), name) for name in changed)


def test_the_shell_and_python_offer_every_option(capsys, tmp_path):
    assert main(["compare", "--help-all"]) == 0
    text = capsys.readouterr().out
    kinds = (StudyOptions, ClusterOptions, StudySettings, ImageOptions)
    offered = set().union(*map(names, kinds)) - {"cluster"}
    assert {name for name in offered if f"--{name.replace('_', '-')} " not in text} == HIDDEN
    for method in (vm.Study, vm.Study.run, vm.Study.dry_run, vm.Study.pilot, vm.Study.retrain):
        assert not offered & set(inspect.signature(method).parameters), "a new option is one field"
    study = vm.Study("mu1/2", ["rms"], seeds=1, **{field.name: field.default for field in fields(StudySettings)})
    with pytest.raises(TypeError, match=r"'metrik' is not an option of a study or its images\. Did you mean 'metric'"):
        vm.Study("mu1/2", ["rms"], seeds=1, metrik="ece")
    with pytest.raises(TypeError, match=r"'worker' is not an option of a run\. Did you mean 'workers'"):
        study.run(tmp_path, worker=2)
    with pytest.raises(UserError, match="workers must be at least 1"):
        study.dry_run(options=StudyOptions(device="cpu"), workers=0)
    assert replace(StudyOptions(log="wandb"), workers=2).log == ("wandb",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers must be at least 1"),
        ({"cost_seconds": -1}, "cost_seconds must be at least 0"),
        ({"checkpoint_minutes": float("nan")}, "checkpoint_minutes must be at least 0"),
        ({"data_workers": -1}, "data_workers must be at least 0"),
        ({"checkpoint_every_steps": 0}, "checkpoint_every_steps must be at least 1"),
        ({"keep_weights": "some"}, "keep_weights is all, best, none"),
        ({"record": "gradient"}, "'gradient' cannot be recorded. Did you mean 'gradients'"),
        ({"recompute": True, "compile": True}, "drop --recompute or --compile"),
        ({"shard": True, "compile": True}, "drop --shard or --compile"),
        ({"shard": True, "record": ["gradients"]}, "drop --shard, or record only lambdas"),
        ({"shard": True}, "use `vitmods train --devices N`"),
    ],
)
def test_values_that_cannot_be_used(options, message):
    with pytest.raises(UserError, match=message):
        StudyOptions(**options)
