"""A cache of the tests' own, the examples as modules, and trials that are broken off."""

import importlib
import importlib.util
import json
from pathlib import Path

import pytest

from vitmods.study.trial import trial_scores
from vitmods.train.interrupt import Interrupted
from vitmods.train.loop import TrialRun

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def imported():
    """What processes that are forked need, once here and not in each of them."""
    for name in ("torch.distributed.fsdp", "torch._dynamo", "torchvision.transforms.v2"):
        importlib.import_module(name)


@pytest.fixture(scope="session")
def example():
    """example("detection") -> examples/detection/detection.py as a module"""

    def load(name):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / name / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def _numbers(out, split):
    """Weights, metrics and scores of a trial, without its times."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timed = ("wall_s", "images_per_s", "data_wait")
    scores = {name: value.tolist() for name, value in trial_scores(out, split).items()}
    weights = {path.name: path.read_bytes() for path in out.glob("*.safetensors")}
    return weights, [{k: v for k, v in row.items() if k not in timed} for row in rows], scores


@pytest.fixture(scope="session")
def ends_in_the_same_bits():
    """Check that a trial which stops before step ``stop_at`` and is resumed ends as one that was not; ``train(out)``"""

    def check(train, folder, split, stop_at):
        step = TrialRun._train_step

        def stops(run, batch):
            if run.step == stop_at:
                raise Interrupted("stopped", 2)
            step(run, batch)

        train(folder / "whole")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TrialRun, "_train_step", stops)
            with pytest.raises(Interrupted):
                train(folder / "broken")
        train(folder / "broken")
        assert _numbers(folder / "broken", split) == _numbers(folder / "whole", split)

    return check
