"""Trials have the numbers of this NUMERICS: otherwise finished trials of before would be reused wrongly."""

import json
from pathlib import Path

import pytest

from vitmods.recipes import RECIPES
from vitmods.study import Study
from vitmods.train.trial import NUMERICS

SHORT = {"steps": 4, "warmup_steps": 1, "warmup_epochs": None, "batch_size": 32}
CASES = {
    "plain": ("classification", "plain", {}),
    "augmented": ("classification", "deit", {"repeats": 1, "drop_path": 0.1, "crop": "random_resized"}),
    "small_data": ("classification", "small_data", {}),
    "dino": ("dino", "dino_small", {"local_crops": 1, "local_size": 4}),
    "beit": ("beit", "beit_small", {"codes": 8}),
}


def losses(case, folder):
    """The losses of base and of an arm after four steps."""
    task, recipe, fields = CASES[case]
    recipe = RECIPES[recipe](20).with_(**SHORT, **fields)
    study = Study("mu2/4", ["dpn+dtn"], "digits", task=task, recipe=recipe, seeds=1, limit_train=128)
    study.run(folder, workers=1, device="cpu", cost_seconds=0, progress=False)
    results = (json.loads((folder / f"trials/{arm}/seed0/result.json").read_text()) for arm in ("base", "dpn+dtn"))
    return [result["metrics"]["loss"] for result in results]


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_this_version(case, tmp_path):
    """If they differ on purpose, raise NUMERICS and write the new ones to numerics.json."""
    expected = json.loads(Path(__file__).with_name("numerics.json").read_text())
    assert expected["numerics"] == NUMERICS
    assert losses(case, tmp_path) == pytest.approx(expected["losses"][case], rel=1e-4)
