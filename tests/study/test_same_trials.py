"""Finished trials stay usable: the folders and ids of the trials of every kind of study, and answers of stored studies.

An id is a hash of all that a trial's numbers depend on. If this test fails on purpose (a new field that changes
numbers), raise NUMERICS in `train/trial.py`, and write the file again by `python tests/study/test_same_trials.py`.
"""

import json
import math
import os
import sys
import tarfile
import warnings
from hashlib import blake2b
from pathlib import Path

import pytest

import vitmods as vm
from vitmods.changes import DualPatchNorm
from vitmods.study import Answer
from vitmods.study.arms import Arm
from vitmods.study.executors import StudyOptions
from vitmods.study.prepare import open_study
from vitmods.study.state import Evaluated, StudyState
from vitmods.study.store import StudyFolder
from vitmods.train.trial import decisive_settings

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "golden" / "same_trials.json"
THREE = ["dpn", "rms", "layerscale"]
KINDS = {
    "plain": {},
    "recipe of an arm": {"arms": [Arm("slow", (DualPatchNorm(),), {"lr": 5e-4}), "rms"]},
    "sweep over the recipe": {"sweep": {"epochs": [1, 2]}},
    "several bases": {"sweep": {"base": ["mu1/2", "mu1/4"]}},
    "sweep over images": {"sweep": {"limit_train": [0.5, 1.0]}},
    "sweep over bases and rates": {"sweep": {"base": ["mu1/2", "mu1/4"], "lr": [1e-3, 1e-4]}},
    "folds": {"folds": 3, "seeds": 3},
    "factorial": {"arms": THREE, "design": "factorial"},
    "tuned": {"tune": {"lr": [1e-3, 1e-4]}, "tuning_seeds": 2},
    "tuned model": {"tune": {"dropout": [0.0, 0.1]}},
    "tuned sweep": {"tune": {"lr": [1e-3, 1e-4]}, "sweep": {"epochs": [1, 2]}},
    "tuned factorial": {"arms": THREE, "design": "factorial", "tune": {"lr": [1e-3, 1e-4]}},
    "until decided": {"until_decided": True, "seeds": 5},
    "foreign": {"base": "timm:test_vit", "img_size": 160, "arms": ["replace(rms)"], "seeds": 1},
    "read": {"base": "timm:test_vit", "img_size": 160, "arms": ["dpn", "parallel"], "seeds": 1},
    "without labels": {"task": "dino", "recipe": None, "seeds": 1},
}


def digest(value):
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def trials_of(kind):
    settings = {"base": "mu1/2", "arms": ["dpn", "rms"], "data": "digits", "recipe": vm.recipes.plain(epochs=3)}
    settings |= {"seeds": 2, **KINDS[kind]}
    options = StudyOptions(device="cpu", workers=1, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = open_study(StudyFolder(os.devnull), vm.Study(**settings).settings, options)
        folder = StudyFolder("somewhere")
        state = StudyState(folder, study.settings, Evaluated(("test",)))
        ids = {}
        for trial in state.records:
            decisive = decisive_settings(study.config(trial))
            del decisive["environment"]  # of this machine
            ids[folder.trial(trial).relative_to(folder.path).as_posix()] = digest(decisive)
    return ids


def rounded(value):
    if isinstance(value, dict):
        kept = {name: item for name, item in value.items() if name not in ("vitmods", "reused")}
        return {name: rounded(item) for name, item in kept.items() if (name, item) != ("trained", None)}  # not counted
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.6g}") if abs(value) > 1e-9 else 0.0
    return value


def answer_of(name, folder):
    with tarfile.open(ROOT / "docs" / "gallery" / f"{name}.tar.xz") as archive:
        archive.extractall(folder / "study", filter="data")  # which has a ledger of its own
    return rounded(json.loads(json.dumps(Answer.load(folder / "study").to_dict())))


STORED = sorted(path.name.removesuffix(".tar.xz") for path in (ROOT / "docs" / "gallery").glob("*.tar.xz"))


@pytest.mark.parametrize("kind", KINDS)
def test_trials_keep_their_folders_and_ids(kind):
    assert trials_of(kind) == json.loads(FILE.read_text())["trials"][kind]


@pytest.mark.parametrize("name", STORED)
def test_answers_of_stored_studies_stay_the_same(name, tmp_path):
    content = answer_of(name, tmp_path)
    assert {key: digest(value) for key, value in content.items()} == json.loads(FILE.read_text())["answers"][name]


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    found = {"trials": {kind: trials_of(kind) for kind in KINDS}, "answers": {}}
    for name in STORED:
        with TemporaryDirectory() as folder:
            content = answer_of(name, Path(folder))
            if len(sys.argv) > 1:
                Path(sys.argv[1], f"{name}.json").write_text(json.dumps(content, indent=1, sort_keys=True))
            found["answers"][name] = {key: digest(value) for key, value in content.items()}
    FILE.write_text(json.dumps(found, indent=1) + "\n")
