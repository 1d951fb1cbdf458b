"""Factorial studies: which runs are trained, what is recorded, looked at, answered and confirmed."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from vitmods.recipes import plain
from vitmods.report import render
from vitmods.report import write_report as write
from vitmods.study import Answer, Study
from vitmods.study.arms import Arm, arm_from_text, make_arms
from vitmods.study.designs.factorial import FactorialDesign
from vitmods.study.settings import Settings
from vitmods.util.errors import UserError

RECIPE = plain(epochs=2).with_(batch_size=64)
CHANGES = ("dpn", "rms", "qknorm")
HOW = {"workers": 1, "device": "cpu", "cost_seconds": 0, "progress": False}
IMAGES = {"base": "mu3/2", "img_size": [8, 8], "in_chans": 1}


def make(arms=CHANGES, seeds=2, **options):
    return Study("mu/4", list(arms), "digits", RECIPE, seeds, **{"design": "factorial", "limit_train": 512, **options})


def plan_of(arms):
    return FactorialDesign.plan(SimpleNamespace(arms=tuple(arms), fixed=IMAGES, runs=None))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("factorial") / "out"
    return make().run(out, **HOW), out


def test_runs_are_arms_with_the_edits_and_overrides_of_their_changes_joined():
    slow = Arm("slow", (), {"lr": 0.01})
    plan = plan_of([*make_arms(["rms", "dpn"]), slow])
    assert [arm.name for arm in plan.arms()] == [
        "rms", "dpn", "rms+dpn", "slow", "rms+slow", "dpn+slow", "rms+dpn+slow",
    ]  # fmt: skip
    assert plan.arms()[-1].short == "rms+dpn"
    assert plan.arms()[-1].recipe == {"lr": 0.01}
    assert plan.combination(["slow", "dpn"]) == plan.arms()[5]


def test_a_change_that_only_goes_first_comes_first():
    names = [factor.name for factor in plan_of(make_arms(["dtn", "rms", "dpn"])).changes]
    assert names.index("rms") < names.index("dtn")


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


def test_an_arm_with_weights_of_its_own_is_left_out():
    arms = (*make_arms(["dpn", "rms"]), Arm("own", start="there"))
    plan = plan_of(arms)
    assert plan.runs.left_out == ("own",)
    assert [factor.name for factor in plan.changes] == ["dpn", "rms"]
    assert "own excludes most" in plan.runs.warnings[0]


def test_recorded_runs_stay_whatever_would_be_chosen_now():
    settings = make().settings
    record = json.loads(json.dumps(settings.to_dict()))
    record["design"]["runs"] = record["design"]["runs"][::-1]
    assert Settings.from_dict(record).to_dict() == record
    again = settings.continuing(record)
    assert [sorted(run) for run in again.design.runs.runs] == [sorted(run) for run in record["design"]["runs"]]
    assert [arm.name for arm in again.arms] == [arm.name for arm in reversed(settings.arms)]
    other = make(["dpn", "rms", "layerscale"]).settings
    assert other.continuing(record).design == other.design


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
    assert make().run(out, **HOW).complete
    assert {path: path.read_bytes() for path in out.rglob("result.json")} == before
    with pytest.raises(UserError, match=r"design: factorial of dpn, rms, qknorm in 8 runs -> factorial of"):
        make(["dpn", "rms"]).run(out, **HOW)
    with pytest.raises(UserError, match=r"in 8 runs -> each arm against base"):
        make(design=None).run(out, **HOW)


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
    confirmed = make().confirm(out, seeds=2, **HOW)
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


def test_effects_of_changes_that_exclude_each_other_are_named_as_what_they_are():
    for arms, meaning, scope in (
        (["dpn", "rms", "qknorm"], "means of the runs with a change minus those without", "on average over the other"),
        (["dpn", "levit", "qknorm"], "by least squares over the runs", "if changes add up"),
    ):
        effects = SimpleNamespace(
            effects={name: SimpleNamespace(n=2) for name in arms},
            look="",
            notes=(),
            best=(),
            prediction="",
            to_dict=dict,
        )
        question = plan_of(make_arms(arms))._of_changes(effects)
        assert meaning in question.meaning
        assert scope in question.scope


def test_only_a_finished_factorial_study_is_confirmed(tmp_path):
    make().run(tmp_path / "some", budget=1, **HOW)
    with pytest.raises(UserError, match="not finished"):
        make().confirm(tmp_path / "some", **HOW)
    with pytest.raises(UserError, match="factorial study"):
        make(design=None).confirm(tmp_path / "some", **HOW)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": 1}, "needs 2 seeds or more"),
        ({"seeds": 12, "until_decided": True}, "at most 2 to 8 seeds, not 12"),
        ({"sweep": {"lr": [1e-3, 1e-2]}}, "does not support --sweep"),
        ({"runs": 5}, "3 changes have designs of 8 runs, not of 5"),
        ({"design": None, "runs": 8}, "belongs to a factorial study"),
        ({"arms": ["dpn"]}, "two or more changes"),
    ],
)
def test_invalid_factorial_studies_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        make(**options)


def test_a_plan_is_read_back_as_it_was():
    plan = plan_of([arm_from_text(text) for text in ("dpn", "rms", "dtn")])
    assert FactorialDesign.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
