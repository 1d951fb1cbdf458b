"""Tuned studies and studies of other metrics, on the digits; where the numbers matter the training is played."""

import csv
import json
import os
import signal
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import pytest

import vitmods.study.trial as evaluating
from vitmods.cli import main
from vitmods.data import ImageDataset
from vitmods.evals import PROTOCOLS, ProtocolResult, metrics
from vitmods.evals.options import Options
from vitmods.recipes import plain
from vitmods.report import render, write_report
from vitmods.study import Answer, Study
from vitmods.study.arms import Arm
from vitmods.study.cells import MOST_SEEDS
from vitmods.study.checkpoints import arms_in
from vitmods.study.settings import MARGINS, Measure, options_from
from vitmods.study.trial import TrialRunner
from vitmods.tasks import TASKS
from vitmods.train.loggers import MetricsFile
from vitmods.util.errors import UserError

pytestmark = pytest.mark.usefixtures("short_clocks")
RECIPE = plain(epochs=1).with_(batch_size=64)
GRID = {"tune": {"lr": (1e-3, 1e-2)}}
TWICE = {**GRID, "tuning_seeds": 2}


def make(arms=("dpn",), seeds=2, **options):
    return Study("mu2/4", list(arms), "digits", **{"recipe": RECIPE, "seeds": seeds, "limit_train": 128, **options})


def run(study, out, **options):
    return study.run(out, **{"workers": 1, "device": "cpu", "cost_seconds": 0, "progress": False, **options})


def without_times(value):
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in ("wall_s", "created", "command")}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


class Noted(dict):
    """In place of a trained model: what its trial noted."""

    def to(self, device):
        return self


@pytest.fixture
def played(monkeypatch):
    """Training and judging without either: scores by (split, arm, lr), and a record of what was asked for."""
    from vitmods.util.files import make_folder, write_json

    scores, asked = {}, []

    def value(split, record):
        found = scores.get((split, record["arm"], record["lr"]), scores.get((split, record["lr"]), 0.5))
        return found(record["seed"]) if callable(found) else found

    def train(model, task, dataset, recipe, *, seed, out, metadata, **options):
        noted = {"arm": metadata["arm"], "lr": recipe.optimizer.lr, "seed": seed}
        asked.append(("train", *noted.values()))
        make_folder(out)
        write_json(out / "config.json", noted)
        score = value(dataset.eval_split, noted)
        status = "finished" if score is not None else "diverged"
        metrics = {} if score is None else {"top1": score}
        outcome = {"status": status, "split": dataset.eval_split, "metrics": metrics, "message": "nan"}
        write_json(out / "result.json", outcome)

    def protocols(model, dataset, names, *, split, **options):
        asked.append((split, *model.values()))
        return {name: ProtocolResult(dict.fromkeys(("top1", "ece"), value(split, model))) for name in names}

    monkeypatch.setattr("vitmods.study.trial.train_trial", train)
    monkeypatch.setattr(
        "vitmods.study.trial.open_trial", lambda folder: Noted(json.loads((folder / "config.json").read_text()))
    )
    monkeypatch.setattr("vitmods.study.trial.run_protocols", protocols)
    return scores, asked


def test_nothing_is_evaluated_on_test_before_an_arm_s_last_trial(played, tmp_path, monkeypatch):
    _, asked = played
    real = TrialRunner.train

    def broken(self, trial, out, **options):
        if (trial.arm.name, trial.seed, str(trial.point)) == ("dpn", MOST_SEEDS + 1, "lr=0.01"):
            raise RuntimeError("out of luck")
        return real(self, trial, out, **options)

    with monkeypatch.context() as patched:
        patched.setattr(TrialRunner, "train", broken)
        result = run(make(**TWICE), tmp_path)
    assert {call[1] for call in asked if call[3] < MOST_SEEDS} == {"base"}
    assert result.failed == [f"dpn, lr=0.01, seed {MOST_SEEDS + 1}: RuntimeError: out of luck"]
    assert result.chosen == {"base": {"lr": 1e-3}, "dpn": None}
    assert not result.complete
    assert "9 of 10 trials finished" in result.report().read_text()
    assert run(make(**TWICE), tmp_path).complete


def test_an_evaluation_that_fails_is_reported_and_tried_again(played, tmp_path, monkeypatch):
    _, asked = played
    part = Arm("part", (), {"train": "attention"})  # an arm that trains a part is tuned too
    study = make([part], seeds=1, metric="ece", **GRID)
    with monkeypatch.context() as patched:
        patched.setattr("vitmods.study.trial.run_protocols", Mock(side_effect=RuntimeError("no textures")))
        result = run(study, tmp_path)
    assert not result.complete
    assert result.failed[0] == f"base, lr=0.001, seed {MOST_SEEDS}: RuntimeError: no textures"
    trained = [call for call in asked if call[0] == "train"]
    again = run(study, tmp_path)
    assert again.complete
    assert set(again.chosen) == {"base", "part"}
    assert [call[0] for call in asked[len(trained) :]] == ["train", "val"] * 4 + ["train", "test"] * 2


def test_seeds_and_values_may_be_added_and_the_choice_is_made_again(played, tmp_path):
    scores, asked = played
    scores |= {("val", 1e-3): 0.7, ("val", 1e-2): lambda seed: 0.6 if seed == MOST_SEEDS else 0.9, ("val", 1e-1): 0.76}
    first = run(make(**GRID), tmp_path)
    assert (first.chosen["base"], first.doubts) == ({"lr": 1e-3}, ())
    assert run(make(seeds=3, **GRID), tmp_path).chosen == first.chosen
    grown = run(make(seeds=3, **TWICE), tmp_path)
    assert grown.chosen["base"] == {"lr": 1e-2}
    warned = [w for w in grown.to_dict()["warnings"] if "is chosen now" in w]
    assert warned[0] == (
        "base: lr=0.01 is chosen now; for an earlier choice, with other seeds, values or metric, lr=0.001 has been "
        "evaluated on test too."
    )
    trained = len(asked)
    wider = run(make(seeds=3, **{**TWICE, "tune": {"lr": (1e-3, 1e-2, 1e-1)}}), tmp_path)
    assert wider.chosen["base"] == {"lr": 1e-1}
    assert [call[0] for call in asked[trained:]].count("train") == 2 * (2 + 3)
    with pytest.raises(UserError, match=r"tune lr: .* -> \[0.001\]"):
        run(make(seeds=3, **{**GRID, "tune": {"lr": 1e-3}}), tmp_path)


def test_an_older_study_that_reports_what_it_was_chosen_by_is_refused(played, tmp_path):
    run(make(**GRID), tmp_path)
    facts = json.loads((tmp_path / "study.json").read_text())
    for seeds, says in (([0, 1], "whose scores are too good"), (["x"], "study.json is damaged")):
        facts["settings"] |= {"tuning_seeds": seeds}
        (tmp_path / "study.json").write_text(json.dumps(facts))
        for read in (lambda: Answer.load(tmp_path), lambda: run(make(**GRID), tmp_path)):
            with pytest.raises(UserError, match=says):
                read()


def test_a_diverged_point_is_worst_and_only_a_chosen_one_is_a_warning(played, tmp_path):
    scores, _ = played
    scores |= {("val", 1e-3): lambda seed: 0.9 if seed > MOST_SEEDS else None, ("val", 1e-2): 0.2}
    result = run(make(**TWICE), tmp_path)
    assert result.chosen["dpn"] == {"lr": 1e-2}
    assert result["dpn"].failures == 0
    assert not [warning for warning in result.to_dict()["warnings"] if "diverged" in warning]
    assert "1 diverged" in result.report().read_text()


def test_the_chosen_point_is_reported_on_fresh_seeds(played, tmp_path):
    """Trials that points are chosen by see val alone; those that are reported begin anew, and see test, which would
    choose otherwise."""
    scores, asked = played
    scores |= {("val", 1e-3): 0.6, ("val", 1e-2): 0.8, ("test", 1e-2): 0.5, ("test", 1e-3): 0.95}
    scores |= {("val", "dpn", 1e-3): 0.7, ("val", "dpn", 1e-2): 0.65, ("test", "dpn", 1e-3): 0.4}
    result = run(make(**GRID), tmp_path)
    assert result.chosen == {"base": {"lr": 1e-2}, "dpn": {"lr": 1e-3}}
    assert [call[1:] for call in asked if call[0] == "train"] == [
        ("base", 1e-3, MOST_SEEDS),
        ("base", 1e-2, MOST_SEEDS),
        ("dpn", 1e-3, MOST_SEEDS),
        ("dpn", 1e-2, MOST_SEEDS),
        ("base", 1e-2, 0),
        ("base", 1e-3, 0),
        ("dpn", 1e-3, 0),
        ("base", 1e-2, 1),
        ("base", 1e-3, 1),
        ("dpn", 1e-3, 1),
    ]
    assert (result["dpn"].base_mean, result["dpn"].arm_mean) == (50, 40)
    assert not result.doubts
    points = result.to_dict()["arms"][0]["tuning"]["points"]
    assert [(point["values"], point["mean"]) for point in points] == [({"lr": 1e-3}, 0.7), ({"lr": 1e-2}, 0.65)]
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    table = Answer.load(tmp_path).trials_table()
    assert [(row["lr"], row["val_top1"], row["top1"]) for row in table] == [
        (float(row["lr"]), *(float(row[name]) if row[name] else None for name in ("val_top1", "top1"))) for row in rows
    ]
    assert [(r["arm"], r["lr"], r["seed"], r["val_top1"], r["top1"]) for r in rows if r["arm"] == "base"] == [
        ("base", "0.001", str(MOST_SEEDS), "0.6", ""),
        ("base", "0.01", str(MOST_SEEDS), "0.8", ""),
        ("base", "0.01", "0", "", "0.5"),
        ("base", "0.01", "1", "", "0.5"),
        ("base", "0.001", "0", "", "0.95"),
        ("base", "0.001", "1", "", "0.95"),
    ]
    trained = len(asked)
    assert run(make(**GRID), tmp_path).complete
    assert len(asked) == trained, "nothing is trained twice"


@pytest.mark.parametrize(
    ("at_its_point", "verdict", "low", "options"),
    [
        (0.50, "helps", None, {}),
        (0.65, "no worse", -0.3, {}),
        (0.80, "open", -15.0, {}),
        (0.65, "no worse", -0.3, {"until_decided": True}),
        (0.65, "no worse", -0.3, {"sweep": {"batch_size": (32, 64)}}),
    ],
)
def test_an_arm_helps_if_it_beats_base_at_both_points(at_its_point, verdict, low, options, played, tmp_path):
    """Base chose 0.01 and scores 50; the arm chose 0.001 and scores 65; base at 0.001 is as good, or better."""
    scores, asked = played
    spread = {seed: 0.001 * (seed % 3) for seed in range(MOST_SEEDS + 1)}
    scores |= {("val", 1e-2): 0.8, ("val", "dpn", 1e-3): 0.9, ("val", "rms", 1e-2): 0.9}
    scores |= {("test", "base", 1e-2): lambda seed: 0.5 + spread[seed], ("test", "rms", 1e-2): lambda seed: 0.5}
    scores |= {("test", "base", 1e-3): lambda seed: at_its_point + spread[(seed + 1) % 3]}
    scores |= {("test", "dpn", 1e-3): lambda seed: 0.65 + spread[(2 * seed) % 3]}
    study = make(["dpn", "rms"], **{**GRID, "seeds": 4, **options})
    answer = run(study, tmp_path)
    assert answer.complete
    effect = answer["dpn"]
    assert effect.verdict == verdict
    assert verdict == "helps" or effect.low == pytest.approx(low, abs=0.6)
    if verdict != "helps":
        assert effect.low < 0 < effect.effect
        assert "base" in (answer.decision.best or ["base"])
    where = "its points" if "sweep" in options else "lr=0.001"
    assert f"base at {where}: " in " ".join(render(answer, 200).split())
    assert f"base at {where}: " in answer.report().read_text()
    assert not any("base at" in note for note in answer["rms"].notes), "it chose base's point"
    trained = [call for call in asked if call[0] == "train"]
    assert len(trained) == sum(1 for _ in tmp_path.glob("trials/**/result.json")) <= study.settings.planned
    settings = 2 if "sweep" in options else 1
    assert len(trained) == settings * (3 * 2 + 3 * 4 + 4), "base with 4 seeds at the arm's point, once"
    if not options:
        assert "Base was also trained at the point of dpn: such an arm helps only if it beats both." in render(
            answer, 999
        )
        assert "point of dpn" in answer.to_methods()
    before = len(asked)
    assert repr(run(study, tmp_path)["dpn"]) == repr(effect)
    assert len(asked) == before, "nothing is trained twice"


def test_a_tuned_study_waits_for_base_at_both_points(played, tmp_path):
    scores, _ = played
    scores |= {("val", 1e-2): 0.8, ("val", "dpn", 1e-3): 0.9, ("test", "dpn", 1e-3): lambda seed: 0.9 + seed / 1000}
    study = make(**{**GRID, "seeds": 4})
    answer = run(study, tmp_path, budget=4 + 12 - 1)
    assert not answer.complete
    assert study.settings.planned == 4 + 12


def test_the_table_and_the_report_tell_what_was_tried(played, tmp_path):
    scores, _ = played
    scores |= {("val", "dpn", 1e-2): 0.9}
    result = run(make(tuning_seeds=2, tune={"lr": (1e-3, 1e-2), "weight_decay": (0, 0.1)}), tmp_path)
    text = " ".join(render(result, 80).split())
    assert "Tuned on val: lr in 0.001, 0.01 and weight_decay in 0, 0.1, 8 trials of each arm, including base." in text
    assert "Chosen: lr 0.001, weight_decay 0: base; lr 0.01, weight_decay 0: dpn." in text
    assert max(len(line) for line in render(result, 80).splitlines() if "vm.Study(" not in line) <= 80
    page = result.report().read_text()
    assert "<strong>✓ 90.00</strong>" in page
    assert page.count("<td>8</td>") == 2
    assert "At an end of the grid: base: lr 0.001, weight_decay 0; dpn: lr 0.01, weight_decay 0." in page
    start = Path(arms_in(str(tmp_path))["dpn"].start)  # another study can begin with the chosen weights
    assert (start.parent, start.name.partition(",")[0]) == (tmp_path / "trials" / "dpn", "lr=0.01")


@pytest.mark.parametrize(
    ("splits", "says"),
    [
        (("train", "test"), "Without a val split.*--val-fraction"),
        (("train", "val"), "test split is missing: what is chosen on val cannot be reported on val"),
    ],
)
def test_both_splits_are_needed(splits, says, tmp_path, draw_images):
    images, recipe = draw_images(tmp_path / "images", splits), RECIPE.with_(batch_size=2)
    without_val = {"val_fraction": 0.0} if "val" not in splits else {}
    study = Study("mu2/4", ["dpn"], images, recipe, img_size=8, **without_val, **GRID)
    with pytest.raises(UserError, match=says):
        run(study, tmp_path / "out")


# What follows trains.


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tuned study, and the splits that were evaluated on the way, in order."""
    out, seen = tmp_path_factory.mktemp("tuned") / "out", []
    real = ImageDataset.eval_batches

    def spy(self, split, *arguments, **options):
        seen.append(split)
        return real(self, split, *arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ImageDataset, "eval_batches", spy)
        return run(make(metric="ece", **GRID), out), out, seen


def test_a_real_one_evaluates_test_by_chosen_trials_alone(trained):
    result, out, seen = trained
    assert result.complete
    reported = len(list(out.glob("trials/*/*/*/test.json")))
    assert seen == ["val"] * 4 * 2 + ["val", "test", "test"] * reported, "in training, and for the metric"
    record = result.to_dict()
    assert record == Answer.load(out).to_dict() == json.loads((out / "results.json").read_text())
    assert result["dpn"].n == 2


def test_what_is_evaluated_is_what_the_training_would_have_found(trained):
    """The same trial in a study without tuning, evaluated by the loop itself."""
    result, out, _ = trained
    chosen = result.chosen["base"]["lr"]
    run(make(seeds=1, recipe=RECIPE.with_(lr=chosen)), out.parent / "plain")
    result_alone = json.loads((out.parent / "plain/trials/base/seed0/result.json").read_text())
    assert result_alone["metrics"]["top1"] == result.base.other_metrics["top1"][0]
    weights = [out / f"trials/base/lr={chosen}/seed0", out.parent / "plain/trials/base/seed0"]
    assert len({(folder / "model.safetensors").read_bytes() for folder in weights}) == 1


def killing_after(count, real):
    """The function, which ends its process when it has been called so often."""

    def call(*arguments, **options):
        nonlocal count
        real(*arguments, **options)
        count -= 1
        if count == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return call


@pytest.mark.forks
def test_killed_at_training_and_at_evaluating_it_ends_in_the_same_results(request, tmp_path):
    words = "compare --base mu2/4 --arms dpn --recipe plain --epochs 1 --batch-size 64 --seeds 2 --limit-train 128"
    words += (
        " --tune lr=1e-3,1e-2 --metric ece --workers 1 --device cpu --cost-seconds 0 --checkpoint-minutes 0 --quiet"
    )
    for owner, name, count in ((MetricsFile, "write", 7), (evaluating, "write_json", 2)):
        child = os.fork()
        if child == 0:
            setattr(owner, name, killing_after(count, getattr(owner, name)))
            os._exit(main([*words.split(), "--out", str(tmp_path / "out")]))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not (tmp_path / "out" / "results.json").exists()
    assert len(list((tmp_path / "out").glob("trials/*/*/*/test.json"))) == 1
    answer = run(make(metric="ece", **GRID), tmp_path / "out").to_dict()
    result, _, _ = request.getfixturevalue("trained")  # which starts threads
    assert without_times(answer) == without_times(result.to_dict())


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


FOG = Options(shots=(1, 5), corruptions=("fog",), severities=(2,), textures=Path("frost"))


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("accuracy", "Did you mean 'top1'"),
        ("briar", "Did you mean 'brier'"),
        (Measure("fewshot5", Options(shots=(1,))), r"fewshot5 does not depend on shots=\(1,\): leave --shots out"),
        (Measure("ece", Options(severities=(1,))), r"ece does not depend on severities"),
        (Measure("mce", Options(severities=(1,))), ""),
        ("fewshot25", "25 shots need as many training images"),
    ],
)
def test_metrics_that_cannot_be_measured_are_refused_before_anything_is_trained(metric, message, tmp_path):
    with pytest.raises(UserError, match=message):
        run(make(metric=metric, limit_train=100), tmp_path)
    assert not (tmp_path / "trials").exists()


def test_every_metric_can_be_asked_for():
    """What the protocols do with images is their own tests' matter."""
    assert make(metric="fewshot3").settings.measure.options.shots == (3,)
    assert make(metric=Measure("mean_corruption_error", Options(severities=(1,), textures=Path("frost"))))
    assert options_from(json.loads(json.dumps(Measure("fewshot5", FOG).to_dict()["options"]))) == FOG
    assert {metric.unit for metric in metrics().values()} <= set(MARGINS)
    for name, metric in metrics().items():
        if not metric.protocol and name not in {own.name for own in TASKS["classification"].metrics}:
            with pytest.raises(UserError, match=f"does not measure {name}, which"):
                make(metric=name)
            continue
        study = make(metric=name)
        assert study.settings.measure.metric == metric
        assert study.settings.margin == MARGINS[metric.unit]
        assert metric.protocol in ("", *PROTOCOLS)
