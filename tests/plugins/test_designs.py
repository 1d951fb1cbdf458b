"""A design is one file: a user's own plans its trials, refuses what does not go with it, and asks its question."""

import numpy as np
import pytest

from vitmods.cli import main
from vitmods.recipes import plain
from vitmods.study import Answer, Study
from vitmods.study.design import DESIGNS
from vitmods.util.errors import UserError

HOW = {"device": "cpu", "workers": 1, "cost_seconds": 0, "progress": False}
SQUARE = {"sweep": {"lr": [1e-3, 2e-3, 4e-3], "weight_decay": [0.0, 0.05, 0.1]}, "design": "latin-square"}


@pytest.fixture(autouse=True)
def _registered(load):
    load("latin_square")


def make(arms=("dpn", "rms"), **options):
    recipe = plain(epochs=1).with_(batch_size=64)
    return Study("mu1/4", list(arms), "digits", recipe, limit_train=256, **{**SQUARE, **options})


def test_a_latin_square_is_trained_and_answered(tmp_path):
    study = make()
    assert (study.settings.seeds, study.settings.planned) == ((0, 1), 18)
    places = [(str(setting), arm, seed) for setting, arm, seed in study.settings.places()]
    assert len({(setting, seed) for setting, _, seed in places}) == len(places) == 18, "one model for each setting"
    assert "18 trials to run" in str(study.dry_run(tmp_path / "out", **HOW))
    answer = study.run(tmp_path / "out", **HOW)
    assert answer.complete
    record = answer.to_dict()
    assert record["settings"]["design"] == {"kind": "latin-square"}
    assert record == Answer.load(tmp_path / "out").to_dict()
    # By least squares: score = mean + row + column + model + seed.
    rows = answer.trials_table()
    names, lrs, decays = ["base", "dpn", "rms"], *SQUARE["sweep"].values()
    x = [
        [1, row["seed"], *(row["arm"] == name for name in names[1:]), *(row["lr"] == v for v in lrs[1:]),
         *(row["weight_decay"] == v for v in decays[1:])]
        for row in rows
    ]  # fmt: skip
    solution, *_ = np.linalg.lstsq(np.array(x, float), np.array([row["top1"] for row in rows]), rcond=None)
    assert [answer[name].effect for name in names[1:]] == pytest.approx(100 * solution[2:4])
    assert answer["dpn"].n == 6
    assert "models in a Latin square" in answer.to_methods()
    assert "0 of 6 trials of an arm failed" in answer.report().read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sweep": ()}, "two fields of 3 values"),
        ({"arms": ["dpn"]}, "of 2 models needs"),
        ({"until_decided": True}, "fixed number of seeds"),
        ({"design": "latin"}, "Did you mean 'latin-square'"),
    ],
)
def test_it_refuses_what_it_cannot_be(options, message):
    with pytest.raises(UserError, match=message):
        make(**options)


def test_base_alone_is_no_pilot_of_it(tmp_path):
    with pytest.raises(UserError, match="leave the pilot out"):
        make().pilot(tmp_path / "out", **HOW)


def test_another_design_is_another_study(tmp_path, capsys):
    make(seeds=1).run(tmp_path / "out", **HOW)
    with pytest.raises(UserError, match="design: latin-square -> each arm against base"):
        make(seeds=1, design=None).run(tmp_path / "out", **HOW)
    assert "latin-square" in DESIGNS
    assert main(["report", str(tmp_path / "out")]) == 0


def test_a_design_that_study_json_would_not_name_is_refused():
    with pytest.raises(UserError, match="needs the class attributes name = 'forgetful' and is_implied = False"):
        DESIGNS.register("forgetful")(type("Forgetful", (DESIGNS["arms"],), {"__module__": "mine"}))
    assert "forgetful" not in DESIGNS
