"""What loggers get of a study: a run a trial, and a run an arm with its verdict."""

import json

import pytest

import vitmods as vm
from vitmods.study.run import NOTED
from vitmods.train.loggers import LOGGERS, LoggerKind

RUN = {"workers": 1, "device": "cpu", "cost_seconds": 0, "progress": False}


@pytest.fixture
def runs():
    rows_by_run: dict[str, list] = {}

    class Notebook:
        def __init__(self, run):
            self.rows = rows_by_run.setdefault(run.key, [run])

        def write(self, scalars, step):
            self.rows.append((step, scalars))

        def close(self, status, scalars):
            self.rows.append((status, scalars))

    LOGGERS.add("notebook", LoggerKind(Notebook))
    yield rows_by_run
    LOGGERS.remove("notebook")


def test_trials_and_verdicts_of_a_study(tmp_path, runs):
    recipe = vm.recipes.digits(epochs=1).with_(warmup_epochs=0)
    study = vm.Study("mu/4", {"patch": "dpn"}, recipe=recipe, seeds=3, limit_train=512)
    answer = study.run(tmp_path / "pets", log="notebook", **RUN)
    told = {rows[0].name: rows for rows in runs.values()}
    assert set(told) == {*(f"{arm}, seed {k}" for arm in ("base", "patch") for k in range(3)), "verdict of patch"}
    trial, *rows, last = told["patch, seed 1"]
    fields = {"study": "pets", "arm": "patch", "seed": 1, "changes": "dpn", "data": "digits", "base": "mu/4"}
    assert (trial.study, trial.kind, trial.fields) == ("pets", "trial", fields)
    assert trial.config["recipe"]["epochs"] == 1
    assert {name.partition("/")[0] for _, scalars in rows for name in scalars} == {"train", "val"}
    result = json.loads((tmp_path / "pets" / "trials" / "patch" / "seed1" / "result.json").read_text())
    assert last == ("finished", {f"test/{name}": value for name, value in result["metrics"].items()})
    verdict, (status, numbers) = told["verdict of patch"]
    effect = answer["patch"]
    assert (verdict.kind, verdict.group, verdict.fields["verdict"]) == ("verdict", "patch", str(effect.verdict))
    assert status == "finished"
    assert numbers["verdict/effect"] == effect.effect
    assert (numbers["verdict/low"], numbers["verdict/high"]) == effect.interval
    assert verdict.folder == tmp_path / "pets"
    before = {key: len(rows) for key, rows in runs.items()}
    study.run(tmp_path / "pets", log="notebook", **RUN)
    assert {key: len(rows) for key, rows in runs.items()} == before, "nothing is told twice"
    noted = tmp_path / "pets" / NOTED
    noted.write_text(noted.read_text().replace(str(effect.verdict), "another verdict"))
    study.run(tmp_path / "pets", log="notebook", **RUN)
    after = {key: len(rows) for key, rows in runs.items()}
    assert {key for key in after if after[key] != before[key]} == {verdict.key}


def test_no_verdict_before_the_study_is_complete(tmp_path, runs):
    recipe = vm.recipes.digits(epochs=1).with_(warmup_epochs=0)
    study = vm.Study("mu/4", ["dpn"], recipe=recipe, seeds=1, limit_train=128)
    study.run(tmp_path, log="notebook", budget=1, **RUN)
    assert [rows[0].kind for rows in runs.values()] == ["trial"]
