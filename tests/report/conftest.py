"""A made-up study's answer, whose module is a fixture, since test folders are no packages; a finished study of each
design."""

import importlib.util
from functools import cache
from pathlib import Path

import pytest

DESIGNS = {
    "plain": {"seeds": 3},
    "sweep": {"sweep": {"epochs": [1, 2]}},
    "bases": {"sweep": {"base": ["mu/4", "mu/2"]}},
    "factorial": {"design": "factorial"},
    "tuned": {"tune": {"lr": [1e-3, 1e-2]}, "tuning_seeds": 1},
    "folds": {"folds": 2},
    "until decided": {"until_decided": True, "seeds": 4},
}


@pytest.fixture(scope="session")
def synthetic():
    spec = importlib.util.spec_from_file_location("synthetic_study", Path(__file__).with_name("synthetic.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Design -> the folder of a finished study of two changes; each is trained once, when it is asked for."""
    import vitmods as vm

    @cache
    def folder(design):
        out = tmp_path_factory.mktemp("home") / "secret" / design.replace(" ", "-")
        recipe = vm.recipes.digits(epochs=1).with_(warmup_epochs=0, mean=(0.25,), std=(0.75,))
        options = {"recipe": recipe, "seeds": 2, "limit_train": 128, **DESIGNS[design]}
        options.pop("limit_train") if "folds" in options else None
        study = vm.Study("mu/4", ["dpn", "rms"], "digits", **options)
        study.run(out, workers=1, device="cpu", cost_seconds=0.05, progress=False)
        return out

    return folder
