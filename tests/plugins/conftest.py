"""Plugins of this folder and the example, forgotten when a test is done: others of this process do without."""

import sys
from pathlib import Path

import pytest

from vitmods.train import Interrupted, TrialRun
from vitmods.util import registry

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples/patch_statistics/patch_statistics.py"


def _forget():
    files = {path.stem for path in [*HERE.glob("*.py"), EXAMPLE]}
    for known in registry._registries:
        for name in [name for name, entry in known._entries.items() if entry.module in files]:
            known.remove(name)
    for name in files:
        sys.modules.pop(name, None)


@pytest.fixture
def forget():
    """Forgets what files of this folder have added, at once and when the test is done."""
    yield _forget
    _forget()


@pytest.fixture
def load(forget):
    """Loads files of this folder, or the example, by their names."""
    places = {path.stem: str(path) for path in [*HERE.glob("*.py"), EXAMPLE]}
    return lambda *names: registry.load_plugins([places[name] for name in names])


@pytest.fixture
def stopped_at(monkeypatch):
    """Calls a function that trains, and stops the training before a step."""

    def call(number, train, *arguments):
        def stop(run, batch):
            if run.step == number:
                raise Interrupted("stopped", 2)
            step(run, batch)

        step = TrialRun._train_step
        with monkeypatch.context() as patch:
            patch.setattr(TrialRun, "_train_step", stop)
            with pytest.raises(Interrupted):
                train(*arguments)

    return call
