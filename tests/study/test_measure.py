"""Studies that compare another metric than top-1, on the digits."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from vitmods.evals import PROTOCOLS, metrics
from vitmods.evals.options import Options
from vitmods.recipes import plain
from vitmods.report import write_report
from vitmods.study import Study
from vitmods.study.plan import MARGINS, Measure, options_from
from vitmods.study.run import python_call
from vitmods.util.errors import UserError

RECIPE = plain(epochs=1).with_(batch_size=64)
GRID = {"tune": {"lr": (1e-3, 1e-2)}, "tune_on": "val"}


def make(arms=("dpn",), seeds=2, **options):
    return Study("mu/4", list(arms), "digits", **{"recipe": RECIPE, "seeds": seeds, "limit_train": 128, **options})


def run(study, out, **options):
    return study.run(out, **{"workers": 1, "device": "cpu", "cost_seconds": 0, "progress": False, **options})


@pytest.fixture(scope="module")
def untuned(tmp_path_factory):
    out = tmp_path_factory.mktemp("metric") / "out"
    return run(make(seeds=2), out), out


def test_another_metric_reads_the_same_weights(untuned, monkeypatch):
    _, out = untuned
    before = {path: path.read_bytes() for path in out.glob("trials/*/*/result.json")}
    monkeypatch.setattr("vitmods.train.trial.TrialRun", None)  # whatever trains now fails
    result = run(make(seeds=2, metric="nll"), out)
    record, effect = result.to_dict(), result["dpn"]
    assert record["metric"] == asdict(metrics()["nll"])
    assert record["splits"] == ["val", "test"]
    assert effect.margin == record["margin"] == 0.01
    base, dpn = record["base"]["scores"], record["arms"][0]["scores"]
    assert effect.effect == pytest.approx(sum(dpn[s] - base[s] for s in base) / 2)
    assert {"top1", "ece", "brier"} <= set(record["other_metrics"])
    page = write_report(result).read_text()
    assert "nats of negative log-likelihood" in page
    assert "lower is better" in page
    assert "Validation top-1 in %" in page
    assert {path: path.read_bytes() for path in before} == before
    few = run(make(seeds=2, metric="fewshot5"), out).to_dict()
    assert few["settings"]["metric"]["options"]["shots"] == [5]
    assert run(make(seeds=2), out).to_dict()["metric"]["name"] == "top1"


def test_metrics_are_checked_before_anything_is_trained(tmp_path):
    with pytest.raises(UserError, match="Did you mean 'top1'"):
        make(metric="accuracy")
    with pytest.raises(UserError, match="Did you mean 'brier'"):
        make(metric="briar")
    assert make(metric="fewshot3").settings.measure.options.shots == (3,)
    with pytest.raises(UserError, match=r"fewshot5 does not depend on shots=\(1,\): leave --shots out"):
        make(metric=Measure("fewshot5", Options(shots=(1,))))
    with pytest.raises(UserError, match=r"ece does not depend on severities"):
        make(metric=Measure("ece", Options(severities=(1,))))
    with pytest.raises(UserError):
        make(metric=Measure("mce", Options(severities=(1,))))
    assert make(metric=Measure("mean_corruption_error", Options(severities=(1,), textures=Path("frost"))))
    with pytest.raises(UserError, match="25 shots need as many training images"):
        run(make(metric="fewshot25", limit_train=100), tmp_path)
    assert not (tmp_path / "trials").exists()


def test_options_survive_json():
    options = Options(shots=(1, 5), corruptions=("fog",), severities=(2,), textures=Path("frost"))
    record = Measure("fewshot5", options).to_dict()
    assert options_from(json.loads(json.dumps(record["options"]))) == options


@pytest.mark.parametrize("metric", ["top1", "ece"])
def test_the_call_in_the_report_is_the_same_study(metric):
    study = make(metric=metric, **GRID)
    call = python_call(study.settings, "out")
    names = {}
    exec(call.replace("vm.Study(", "study = vm.Study(").removesuffix(".run('out')"), names)
    assert names["study"].settings.to_dict() == study.settings.to_dict()
    other = make(metric=Measure("mean_corruption_error", Options(corruptions=("fog",), severities=(1, 2))))
    exec(python_call(other.settings, "o").replace("vm.Study(", "study = vm.Study(").removesuffix(".run('o')"), names)
    assert names["study"].settings == other.settings


def test_every_metric_can_be_asked_for():
    """What the protocols do with images is their own tests' matter."""
    assert {metric.unit for metric in metrics().values()} <= set(MARGINS)
    for name, metric in metrics().items():
        study = make(metric=name)
        assert study.settings.measure.metric == metric
        assert study.settings.margin == MARGINS[metric.unit]
        assert metric.protocol in ("", *PROTOCOLS)
