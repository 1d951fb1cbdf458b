"""Every pair of what a study may combine: it runs and reports true numbers, or it is refused with a remedy."""

import csv
import itertools
import json
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from vitmods.cli import main
from vitmods.report.advice import next_steps
from vitmods.study import Answer

pytestmark = pytest.mark.usefixtures("short_clocks", "short_probes")

COMMON = "--data digits --batch-size 64 --lr 0.01 --dropout 0 --workers 1 --device cpu --cost-seconds 0 --arms dpn rms"
AXES = {
    "sweep": "--sweep limit_train=0.5,0.9",
    "bases": "--base mu1/4 mu2/4",
    "factorial": "--design factorial",
    "folds": "--folds 2",
    "tune": "--tune dropout=0,0.3",
    "until-decided": "--until-decided --max-seeds 4",
    "budget": "--budget 30m",
    "reuse": "--reuse {plain}",
    "start": "--from {plain}/trials/base/seed0",
    "pretrain": "--pretrain dino(steps=1,batch_size=16,prototypes=16,head_width=16,bottleneck=8,local_crops=0,"
    "teacher_temp=1,teacher_temp_start=1)",
    "retrain": "--retrain dpn",
    "reference": "--reference dpn",
}
USUAL = {"sweep": "--limit-train 0.5", "bases": "--base mu1/4", "steps": "--steps 8", "seeds": "--seeds 2"}
REFUSED = [
    (first, second)
    for first, others in {
        "sweep": "factorial folds until-decided pretrain retrain",
        "bases": "factorial folds until-decided start pretrain retrain",
        "factorial": "folds pretrain reference",
        "folds": "tune until-decided",
        "tune": "pretrain",
        "until-decided": "pretrain",
        "budget": "pretrain retrain",
        "start": "pretrain",
    }.items()
    for second in others.split()
]
ALLOWED = [pair for pair in itertools.combinations(AXES, 2) if pair not in REFUSED]
EACH_RUN = {  # each axis with one or two others
    *(("sweep", "reference"), ("bases", "tune"), ("factorial", "budget"), ("folds", "retrain")),
    *(("until-decided", "reuse"), ("reuse", "pretrain"), ("start", "reference")),
}
assert {*ALLOWED} >= EACH_RUN


@dataclass
class Run:
    """What the commands of a study printed and returned, and the folders of the trials that they trained."""

    out: Path
    command: list
    codes: list = field(default_factory=list)
    printed: str = ""
    trained: list = field(default_factory=list)
    last: str = ""

    @property
    def answer(self):
        return Answer.load(self.out)

    def trials(self, folder="trials"):
        return [path for path in self.trained if (self.out / folder) in path.parents]


@pytest.fixture(scope="session")
def command(tmp_path_factory):
    """command(axes, ...) -> the Run of the study that has them, once for each set of axes."""
    import vitmods.study.trial as trials

    root, runs, train = tmp_path_factory.mktemp("pairs"), {}, trials.train_trial

    def run(axes, *words, capture):
        after = {"retrain", "reference"}.intersection(axes)
        axes = tuple(axis for axis in axes if axis not in after)
        out, plain = root / "-".join([*axes, "study"]), root / "study"
        if (key := (axes, words)) not in runs:
            given = {"until-decided": "seeds", "budget": "seeds", "start": "bases"}
            given = {*axes, *(given[axis] for axis in axes if axis in given)}
            usual = [text for axis, text in USUAL.items() if axis not in given]
            usual[-1:] = usual[-1:] if axes else ["--seeds 3"]  # of the study whose trials are reused
            asked = [AXES[axis].format(plain=plain) for axis in axes]
            compare = ["compare", *" ".join([COMMON, *usual, *asked]).split(), "--out", str(out)]
            runs[key] = call(Run(out, compare), [*compare, *words], capture)
        run = runs[key]
        if "retrain" in after:
            run = call(run, [*run.command, "--retrain", "dpn"], capture)
        return call(run, ["report", str(out), "--reference", "dpn"], capture) if "reference" in after else run

    def call(before, words, capture):
        run = Run(before.out, before.command, [*before.codes], before.printed, [*before.trained])
        capture.readouterr()
        with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patched.setattr(
                trials, "train_trial", lambda *a, out, **o: run.trained.append(out) or train(*a, out=out, **o)
            )
            patched.setattr("vitmods.study.estimate.MOST_SEEDS", 3)  # as many as fit a budget
            patched.setattr("vitmods.study.run.MOST_SEEDS", 3)
            patched.setenv("VITMODS_REUSE", "0")
            run.codes.append(main(words))
        run.last = "".join(capture.readouterr())
        run.printed += run.last
        return run

    return run


@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, id="+".join(pair), marks=[pytest.mark.long] * (pair not in EACH_RUN)) for pair in ALLOWED],
)
def test_a_pair_runs_and_its_numbers_are_those_of_its_trials(command, pair, capfd):
    command((), capture=capfd)
    run = command(pair, capture=capfd)
    assert set(run.codes) == {0}, run.printed
    studied = set(pair) - {"retrain", "reference"}
    answer, settings, trained = run.answer, run.answer.settings, run.trials()
    assert answer.complete

    # As many trials as were announced, counted and listed.
    reused = [trial for trial in answer.trials if trial.reused]
    records = [trial for trial in answer.trials if trial.ended]
    assert len(trained) == len(set(trained)) == len(records) - len(reused)
    first = re.search(r"^(At most )?(\d+) trials, in .*study$", run.printed, re.M)
    if "budget" in pair:
        assert "As many seeds as fit the budget" in run.printed or "until-decided" in pair
    elif "until-decided" in pair:
        assert first[1]
        assert int(first[2]) >= len(records)
    else:
        known_beside = max(0, settings.get("known", 0) - len(settings["seeds"]))  # trials of base that a study has left
        assert (first[1] is not None) == ("tune" in pair and "factorial" not in pair)  # base at points of arms as well
        assert int(first[2]) == len(records) - known_beside or first[1]
        assert int(first[2]) >= len(records) - known_beside
    counts = re.findall(r"^ *(\d+) of (\d+)  .*seed \d+: ", run.printed.split("The first stage is complete")[-1], re.M)
    assert len(counts) == len(trained)
    assert set(pair) == {"tune", "reuse"} or not counts or int(counts[-1][0]) == len(records)
    if not {"until-decided", "budget"} & set(pair):
        assert max(int(total) for _, total in counts or [(0, 0)]) <= len(records)
        assert "tune" in pair or {int(total) for _, total in counts} <= {len(records)}
    rows = list(csv.DictReader((run.out / "results.csv").open()))
    assert len(rows) == len(answer.trials)
    assert sum(row["status"] == "finished" for row in rows) == len(records)

    # The reports say what this study is.
    page, text, methods = (run.out / "report.html").read_text(), repr(answer), answer.to_methods()
    assert json.loads((run.out / "results.json").read_text()) == answer.to_dict()
    assert "nan" not in re.sub(r"<(script|style).*?</\1>|<svg.*?</svg>", "", page, flags=re.S).lower().split()
    for name in [setting.name for setting in answer.sweep]:
        assert name in text
        assert name.partition("=")[2].split("?")[0] in page
    if "tune" in pair:
        check_tuning(answer, run, rows, page, text, methods)
    if reused:
        assert f"{len(reused)} of {len(answer.trials)} trials were trained in " in text
    if set(pair) == {"tune", "reuse"}:  # a choice plans trials that are finished elsewhere
        assert {trial.seed for trial in reused} == {0, 1}
    if "folds" in pair:
        assert "divided into 2 folds" in methods
    if "factorial" in pair:
        assert set(answer.headline.effects) == {"dpn", "rms"}
    if "start" in pair:
        assert "All models started from the trained weights" in methods
    if "pretrain" in pair:
        assert len(run.trials("pretraining")) == len(records)
    if "retrain" in pair:
        assert run.trained[-1] == run.out / "retrained/dpn"
    if "reference" in pair:
        against = Answer.load(run.out, reference="dpn")
        assert list(against.headline.effects) == ["base", "rms"]
        assert (run.out / "report-dpn.html").exists()
    assert len(settings["seeds"]) == (4 if "until-decided" in pair else 3 if "budget" in pair or not studied else 2)


def check_tuning(answer, run, rows, page, text, methods):
    """The chosen values of every arm under every setting are in the answer, the table, the page and the CSV."""
    settings = [f"{setting.name}, " for setting in answer.sweep] or [""]
    names = [arm.name for arm in answer.every_arm]
    assert set(answer.chosen) == {f"{setting}{name}" for setting in settings for name in names}
    config = {}
    for arm in answer.every_arm:
        for trial in arm.counted:
            where = ",".join(f"{name}={value}" for name, value in trial.setting.items())
            chosen = next(v for key, v in answer.chosen.items() if key in (arm.name, f"{where}, {arm.name}"))
            config = json.loads((run.out / trial.folder / "config.json").read_text())
            assert trial.point == chosen
            assert config["recipe"]["model"]["dropout"] == chosen["dropout"]
            assert config["model"]["pos_drop"] == chosen["dropout"]
    assert {row["dropout"] for row in rows} == {"0", "0.3"}
    on_val = [row for row in rows if row["val_top1"]]
    assert len(on_val) == 2 * len(settings) * len(names)
    assert all(bool(row["top1"]) != bool(row["val_top1"]) for row in rows)
    tried = f"Tuned on val: dropout in 0, 0.3, {2 * len(settings)} trials of each arm, including base. Chosen"
    for shown in (" ".join(text.split()), page, methods):
        assert tried in shown
    assert page.count('scope="col">trials</th>') == len(settings)
    assert "dropout 0.0 " not in methods.partition("Tuned on val")[0], "a value that was tuned is none of the recipe"


@pytest.mark.parametrize("pair", REFUSED, ids="+".join)
def test_a_refused_pair_names_both_and_a_remedy(command, pair, capfd):
    command((), capture=capfd)
    run = command(pair, capture=capfd)
    text = " ".join(run.last.replace("│", " ").split())
    assert run.codes[-1] == 2
    for axis in pair:
        assert re.search({"factorial": "factorial|--design", "start": "--from"}.get(axis, axis), text), text
    assert re.search(r"\b(drop|leave|Leave|run|set) ", text), text


@pytest.mark.parametrize("axis", ["sweep", "bases", "folds", "tune", "start"])
def test_a_pilot_trains_as_many_trials_of_base_as_it_says(command, axis, capfd):
    out = command((), capture=capfd).out.with_name(f"pilot-{axis}")
    run = command((axis,), "--pilot", "--out", str(out), capture=capfd)
    trained = [path for path in run.trained if f"pilot-{axis}" in str(path)]
    assert run.codes == [0]
    assert f"Pilot: {len(trained)} trials of base, in" in run.last
    assert {"base" in path.parts for path in trained} == {True}
    assert axis != "sweep" or "from 4 trials of base" in run.last


DIVERGING = {"": "--seeds 2", "sweep": "--seeds 2", "factorial": "--seeds 2", "tune": "--seeds 2", "until-decided": ""}


@pytest.mark.parametrize("axis", DIVERGING)
def test_a_study_whose_trials_all_diverge_has_no_verdict_and_fails(axis, capfd, tmp_path):
    words = f"{COMMON} --base mu1/4 --steps 5 --lr 1e8 {DIVERGING[axis]} {AXES.get(axis, '--limit-train 0.2')}".split()
    assert main(["compare", *words, "--quiet", "--out", str(tmp_path / "out")]) == 1
    shown, answer = " ".join(capfd.readouterr().out.split()), Answer.load(tmp_path / "out")
    assert answer.complete
    assert {str(effect.verdict) for effect in answer.headline.effects.values()} == {"no verdict"}
    assert shown.startswith("All trials diverged: there are no verdicts.")
    first = next_steps(answer)[0].text
    assert first.startswith("All trials diverged, so arms cannot be compared. Try a lower learning rate (--lr), ")
    assert first in shown
    for text in (shown, answer.report().read_text()):
        assert "keep it" not in text
        assert "is open" not in text


def test_the_setting_is_named_where_base_has_not_learned(capfd, tmp_path):
    """What is true of one setting of a sweep is not said of all."""
    words = f"{COMMON} --base mu1/4 --steps 20 --seeds 2 --limit-train 0.2 --sweep lr=0.01,1e8 --quiet".split()
    assert main(["compare", *words, "--out", str(tmp_path)]) == 0
    assert capfd.readouterr().out.startswith("base has not learned under lr=100000000: there are no verdicts.")
