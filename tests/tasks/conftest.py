"""A cache of the tests' own, the examples as modules, and trials that are broken off."""

import importlib.util
import json
from pathlib import Path

import pytest

from vitmods.study.trial import trial_scores
from vitmods.train import RunOptions, train_trial
from vitmods.train.interrupt import Interrupted
from vitmods.train.loop import TrialRun

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def example():
    """example("detection") -> examples/detection/detection.py as a module"""

    def load(name):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / name / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def _train(model, task, dataset, recipe, out, stop_at=None, **options):
    """A trial that stops before step ``stop_at``."""
    step = TrialRun._train_step

    def stops(run, batch):
        if run.step == stop_at:
            raise Interrupted("stopped", 2)
        step(run, batch)

    run_options = RunOptions("cpu", tensorboard=False, progress=False, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrialRun, "_train_step", stops)
        return train_trial(model, task, dataset, recipe, out=out, options=run_options)


def _numbers(out, split):
    """Weights, metrics and scores of a trial, without its times."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timed = ("wall_s", "images_per_s", "data_wait")
    scores = {name: value.tolist() for name, value in trial_scores(out, split).items()}
    weights = [(out / name).read_bytes() for name in ("model.safetensors", "task.safetensors")]
    return weights, [{k: v for k, v in row.items() if k not in timed} for row in rows], scores


@pytest.fixture(scope="session")
def ends_in_the_same_bits():
    """Check that a trial which is resumed ends as one that was not stopped; ``make()`` -> (model, task, dataset)"""

    def check(make, recipe, folder, split, stop_at, **options):
        _train(*make(), recipe, folder / "whole", **options)
        with pytest.raises(Interrupted):
            _train(*make(), recipe, folder / "broken", stop_at, **options)
        _train(*make(), recipe, folder / "broken", **options)
        assert _numbers(folder / "broken", split) == _numbers(folder / "whole", split)

    return check
