"""Factorial studies: which runs are trained, what is recorded, looked at, answered and confirmed. And studies whose
seeds are tested on other parts of the images."""

import csv
import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from vitmods.data.splits import SPLIT_FILE
from vitmods.recipes import plain
from vitmods.report import render
from vitmods.report import write_report as write
from vitmods.report.advice import next_steps
from vitmods.report.text import common_claim, on_new_images
from vitmods.stats.decide import decide
from vitmods.study import Answer, Study
from vitmods.study.arms import Arm, make_arms
from vitmods.study.cells import Trial
from vitmods.study.checkpoints import Checkpoint
from vitmods.study.designs.factorial import FactorialDesign
from vitmods.study.settings import Settings
from vitmods.study.store import StudyFolder
from vitmods.study.trial import TrialRunner, load_images
from vitmods.train import RunOptions
from vitmods.util.errors import UserError

pytestmark = pytest.mark.usefixtures("short_clocks")

RECIPE = plain(epochs=1).with_(batch_size=64)
CHANGES = ("dpn", "rms", "qknorm")
HOW = {"workers": 1, "device": "cpu", "cost_seconds": 0, "progress": False}
FOLDS = 3


def factorial(arms=CHANGES, seeds=2, **options):
    return Study("mu/4", list(arms), "digits", RECIPE, seeds, **{"design": "factorial", "limit_train": 512, **options})


def folded(seeds=4, **options):
    recipe = RECIPE.with_(batch_size=128)
    return Study("mu/4", ["dpn", "rms"], "digits", recipe, seeds, **{"folds": FOLDS, **options})


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (factorial, {"seeds": 1}, "needs 2 seeds or more"),
        (factorial, {"seeds": 12, "until_decided": True}, "at most 2 to 8 seeds, not 12"),
        (factorial, {"sweep": {"lr": [1e-3, 1e-2]}}, "does not support --sweep"),
        (factorial, {"runs": 5}, "3 changes have designs of 8 runs, not of 5"),
        (factorial, {"design": None, "runs": 8}, "belongs to a factorial study"),
        (factorial, {"arms": ["dpn"]}, "two or more changes"),
        (folded, {"folds": 1}, "at least 2"),
        (folded, {"until_decided": True, "seeds": 8}, "set --seeds, not --until-decided"),
        (folded, {"sweep": {"limit_train": [100, 200]}}, "does not support --sweep: drop"),
        (folded, {"design": "factorial", "seeds": 3}, "does not support --design factorial: drop"),
        (folded, {"tune": {"lr": (1e-4, 1e-3)}}, "nothing can be tuned"),
        (folded, {"generalize": "seeds"}, "leave --generalize seeds out"),
        (folded, {"fold": (0, 3)}, "leave --fold out"),
    ],
)
def test_what_does_not_go_together_is_refused(make, options, message):
    with pytest.raises(UserError, match=message):
        make(**options)


# ---- factorial studies


def plan_of(arms):
    fixed = {"base": "mu3/2", "img_size": [8, 8], "in_chans": 1}
    return FactorialDesign.plan(SimpleNamespace(arms=tuple(arms), fixed=fixed, runs=None))


def test_runs_are_arms_with_the_edits_and_overrides_of_their_changes_joined():
    slow = Arm("slow", (), {"lr": 0.01})
    plan = plan_of([*make_arms(["rms", "dpn"]), slow])
    names = [arm.name for arm in plan.arms()]
    assert names == ["rms", "dpn", "rms+dpn", "slow", "rms+slow", "dpn+slow", "rms+dpn+slow"]
    assert plan.arms()[-1].short == "rms+dpn"
    assert plan.arms()[-1].recipe == {"lr": 0.01}
    assert plan.combination(["slow", "dpn"]) == plan.arms()[5]
    plan = plan_of(make_arms(["dtn", "rms", "dpn"]))
    names = [factor.name for factor in plan.changes]
    assert names.index("rms") < names.index("dtn"), "which only goes first"
    assert FactorialDesign.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    plan = plan_of((*make_arms(["dpn", "rms"]), Arm("own", start="there")))
    assert plan.runs.left_out == ("own",)
    assert [factor.name for factor in plan.changes] == ["dpn", "rms"]
    assert "own excludes most" in plan.runs.warnings[0], "an arm with weights of its own"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("dpn", "half=dpn(after=false)"),
        ("a=replace(rms,where=attn)", "b=replace(rms,where=mlp)"),
        (Arm("slow", (), {"lr": 0.1}), Arm("fast", (), {"lr": 1.0})),
    ],
)
def test_what_excludes_each_other_is_in_no_run_together(first, second):
    arms = make_arms([first, second, "layerscale", "qknorm"])
    plan = plan_of(arms)
    pair = {arms[0].name, arms[1].name}
    assert plan.runs.conflicts == (tuple(name for name in plan.runs.changes if name in pair),)
    assert not any(pair <= run for run in plan.runs.runs)


@pytest.mark.parametrize(
    ("arms", "meaning", "scope"),
    [
        (CHANGES, "means of the runs with a change minus those without", "on average over the other"),
        (("dpn", "levit", "qknorm"), "by least squares over the runs", "if changes add up"),  # two exclude each other
    ],
)
def test_effects_are_named_as_what_they_are(arms, meaning, scope):
    effects = {name: SimpleNamespace(n=2) for name in arms}
    answered = SimpleNamespace(effects=effects, look="", notes=(), best=(), prediction="", to_dict=dict)
    question = plan_of(make_arms(arms))._of_changes(answered)
    assert meaning in question.meaning
    assert scope in question.scope


def test_recorded_runs_stay_whatever_would_be_chosen_now():
    settings = factorial().settings
    record = json.loads(json.dumps(settings.to_dict()))
    record["design"]["runs"] = record["design"]["runs"][::-1]
    assert Settings.from_dict(record).to_dict() == record
    again = settings.continuing(record)
    assert [sorted(run) for run in again.design.runs.runs] == [sorted(run) for run in record["design"]["runs"]]
    assert [arm.name for arm in again.arms] == [arm.name for arm in reversed(settings.arms)]
    other = factorial(["dpn", "rms", "layerscale"]).settings
    assert other.continuing(record).design == other.design


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Once it was stopped after a trial."""
    out = tmp_path_factory.mktemp("factorial") / "out"
    factorial().run(out, budget=1, **HOW)
    with pytest.raises(UserError, match="not finished"):
        factorial().confirm(out, **HOW)
    with pytest.raises(UserError, match="factorial study"):
        factorial(design=None).confirm(out, **HOW)
    return factorial().run(out, **HOW), out


def test_the_answer_is_of_the_changes(finished):
    answer, out = finished
    assert answer.complete
    assert list(answer.headline.effects) == list(CHANGES)
    scores = {arm.name: np.mean(list(arm.scores.values())) for arm in answer.every_arm}
    on = [value for name, value in scores.items() if "rms" in name.split("+")]
    off = [value for name, value in scores.items() if "rms" not in name.split("+")]
    assert answer["rms"].effect == pytest.approx(100 * (np.mean(on) - np.mean(off)))
    assert set(answer.questions["pairs"].effects) == {"dpn x rms", "dpn x qknorm", "rms x qknorm"}
    record = json.loads((out / "results.json").read_text())
    assert record == answer.to_dict() == Answer.load(out).to_dict()
    assert record["questions"]["changes"]["effects"]["rms"]["effect"] == answer["rms"].effect
    assert record["settings"]["design"]["factors"]["dpn"]["changes"] == "dpn"
    with pytest.raises(UserError, match="have a change 'dpn\\+rms'"):
        answer["dpn+rms"]
    with pytest.raises(UserError, match="leave the reference out"):
        Answer.load(out, reference="dpn")


def test_it_goes_on_in_its_folder_and_refuses_another_design(finished):
    _, out = finished
    before = {path: path.read_bytes() for path in out.rglob("result.json")}
    assert factorial().run(out, **HOW).complete
    assert {path: path.read_bytes() for path in out.rglob("result.json")} == before
    with pytest.raises(UserError, match=r"design: factorial of dpn, rms, qknorm in 8 runs -> factorial of"):
        factorial(["dpn", "rms"]).run(out, **HOW)
    with pytest.raises(UserError, match=r"in 8 runs -> each arm against base"):
        factorial(design=None).run(out, **HOW)


def test_the_table_and_the_page_show_changes_and_pairs(finished, tmp_path):
    answer, _ = finished
    text = render(answer, 80)
    assert text.startswith(("On average over the other changes on and off, ", "Nothing is decided"))
    for name in (*CHANGES, "dpn x rms"):
        assert re.search(rf"^{name} +\S \w+.* {answer.headline.details['n']}$", text, re.MULTILINE), name
    assert "8 runs, 2 seeds each" in " ".join(text.split())
    assert "| qknorm |" in answer.to_markdown()
    assert "dpn+rms |" not in answer.to_markdown()
    page = write(answer, tmp_path / "report.html").read_text()
    assert "3 changes in 8 runs" in page
    assert "Every run against base" in page
    assert page.count('class="card" id="subject') == 3
    assert all(f'id="{anchor}"' in page for anchor in re.findall(r'href="#([^"]+)"', page))


def test_the_best_combination_is_confirmed_on_fresh_seeds(finished, tmp_path):
    answer, out = finished
    assert answer.headline.together, "these seeds predict a combination"
    assert any("confirm(" in line for line in render(answer).splitlines())
    name = "+".join(answer.headline.together)
    confirmed = factorial().confirm(out, seeds=2, **HOW)
    assert [arm.name for arm in confirmed.arms] == [name]
    assert list(confirmed.base.scores) == [5000, 5001]
    again = Answer.load(out)
    assert again.questions["confirmed"].effects[name].to_dict() == confirmed.effects[name].to_dict()
    assert f"On 2 fresh seeds {name} " in render(again).splitlines()[0] + render(again).splitlines()[1]
    assert "confirm(" not in render(again)
    chosen_on = "was chosen on the same images"
    assert chosen_on in " ".join(confirmed.to_methods().split())
    assert chosen_on in write(confirmed, tmp_path / "report.html").read_text()
    assert chosen_on not in answer.to_methods()


# ---- folds


@pytest.fixture(scope="module")
def of_folds(tmp_path_factory):
    out = tmp_path_factory.mktemp("folds") / "out"
    return folded().run(out, **HOW), out


def config(out, arm, seed):
    return json.loads((out / "trials" / arm / f"seed{seed}" / "config.json").read_text())


def images_of(out, seed):
    opened = Checkpoint.open(str(out / "trials/base" / f"seed{seed}"))
    dataset = load_images(opened.settings, opened.recipe)
    assert dataset.summary()["fingerprint"] == opened.fingerprint
    return dataset.splits


def test_each_image_is_tested_by_one_fold_and_arms_are_paired(of_folds):
    _, out = of_folds
    splits = {seed: images_of(out, seed) for seed in range(4)}
    tested = {seed: set(splits[seed]["test"].ids) for seed in splits}
    everything = [name for split in splits[0].values() for name in split.ids]
    assert sorted([*tested[0], *tested[1], *tested[2]]) == sorted(everything)
    assert tested[3] == tested[0]
    rows = list(csv.DictReader((out / SPLIT_FILE).open()))
    for seed in range(4):
        assert len({config(out, arm, seed)["data"]["fingerprint"] for arm in ("base", "dpn", "rms")}) == 1
        assert config(out, "rms", seed)["images"]["fold"] == [seed % FOLDS, FOLDS]
        assert tested[seed] == {row["image"] for row in rows if row["fold"] == str(seed % FOLDS)}


def test_the_answer_is_about_other_training_sets(of_folds):
    answer, out = of_folds
    counts = answer.data["splits"]
    sizes = counts["test"]["count"], counts["train"]["count"]
    scores = {arm.name: dict(arm.scores) for arm in answer.every_arm}
    constant = {arm.name: {trial.seed for trial in arm.trials if trial.constant} for arm in answer.every_arm}
    expected = decide(scores, resampled=sizes, constant=constant, chance=answer.data["constant"]["top1"])
    assert answer.splits == ("test",)
    assert answer.decision.overlap == sizes[0] / sizes[1]
    for arm in ("dpn", "rms"):
        assert [answer[arm].low, answer[arm].high] == pytest.approx([expected[arm].low, expected[arm].high])
        assert answer[arm].n == 4
    assert on_new_images(answer)
    assert "new trainings, other training sets and other images too" in common_claim(answer)
    assert Answer.load(out).to_dict() == answer.to_dict()
    assert "fold s mod 3" in answer.report().read_text()
    assert not any("until-decided" in step.command for step in next_steps(answer))


def test_worker_processes_use_the_same_folds(of_folds, tmp_path):
    """As such a process does: the study from its folder, a trial from its name."""
    copy = shutil.copytree(of_folds[1], tmp_path / "out")
    before = (copy / "trials/base/seed1/model.safetensors").read_bytes()
    shutil.rmtree(copy / "trials/base/seed1")
    folder = StudyFolder(copy)
    settings = Settings.from_dict(folder.known_facts().settings)
    TrialRunner(folder, settings.measure, RunOptions("cpu"))(settings.trial(Trial(settings.cell("base"), 1).to_dict()))
    assert (copy / "trials/base/seed1/model.safetensors").read_bytes() == before
    assert config(copy, "base", 1)["images"]["fold"] == [1, FOLDS]


def test_the_dry_run_counts_the_overlap(of_folds):
    estimate = folded().dry_run(of_folds[1], device="cpu")
    assert estimate.spread is not None
    whole = replace(estimate, settings=folded(folds=None).settings)

    def detectable(planned):
        return float(re.search(r"effects above about ([\d.]+)", planned.decides())[1])

    overlap = estimate.dataset["test"] / estimate.dataset["train"]
    assert detectable(estimate) / detectable(whole) == pytest.approx((1 + 4 * overlap) ** 0.5, rel=0.1)
    assert "on other images, at worst" not in str(estimate)
    assert [len(folded(seeds=None, folds=folds).settings.seeds) for folds in (8, 3)] == [8, 5], "as many seeds as folds"


def test_other_folds_and_images_with_splits_of_their_own_are_refused(of_folds, tmp_path, draw_images):
    with pytest.raises(UserError, match=r"folds: 3 -> 4"):
        folded(folds=4).run(of_folds[1], **HOW)
    images = draw_images(tmp_path / "set", ("train", "test"), count=8)
    study = Study("mu/4", ["dpn"], images, RECIPE, folds=2, img_size=8, in_chans=1)
    with pytest.raises(UserError, match="these images have given splits"):
        study.run(tmp_path / "out", **HOW)
    assert not (tmp_path / "out" / "study.json").exists()


def test_a_pilot_reads_the_spread_of_parts_of_different_sizes(tmp_path):
    recipe = plain().with_(steps=20, lr=0.01, batch_size=64, warmup_epochs=None)
    study = Study("mu1/4", ["dpn"], "digits", recipe, 2, folds=2, limit_train=0.2)  # parts of 898 and 899 images
    planned = study.pilot(tmp_path / "out", **HOW)
    assert planned.spread.source == "from 2 trials of base"
    assert planned.finished == 2
