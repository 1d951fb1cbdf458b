"""What a study would take and find, before it is run: steps, seeds that fit a budget, the pilot. And what arms cost."""

import json
import math
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy.stats import binom

import vitmods as vm
from vitmods.adapters.apply import apply
from vitmods.bench import Ratio, finish, interleave, peak_bytes, seconds_per_call
from vitmods.changes import parse_changes
from vitmods.model.flops import count_macs, count_params
from vitmods.model.vit import vit
from vitmods.recipes import Recipe, plain
from vitmods.report.text import remarks_on_costs
from vitmods.stats.sample_size import detectable, resolution, sd_range
from vitmods.study import Answer, Study
from vitmods.study.bases import ForeignBase
from vitmods.study.budget import make_budget
from vitmods.study.cost import Steps, measuring
from vitmods.study.estimate import Estimate, Spread, fit_to_budget, spread_of, usual_spread
from vitmods.study.grid import AS_IS
from vitmods.study.results import ArmCost
from vitmods.study.state import Evaluated, StudyState, TrialRecord
from vitmods.study.stopwatch import ArmEstimate, Pace, Stopwatch
from vitmods.study.store import StudyFolder
from vitmods.tasks import Classification
from vitmods.util.errors import UserError

pytestmark = pytest.mark.usefixtures("short_clocks")

RECIPE = plain(epochs=1).with_(batch_size=128)
RUN = {"workers": 1, "device": "cpu", "progress": False}


def study(arms=("dpn",), seeds=None, **options):
    return Study("mu/4", list(arms), seeds=seeds, **{"recipe": RECIPE, "limit_train": 256, **options})


def made(k=3, trial_s=60.0, spread=None, finished=0, **options):
    """An estimate as if every trial took `trial_s`."""
    settings = Study("S/16", ["dpn", "rms", "layerscale"][:k], "digits", img_size=224, in_chans=3, **options).settings
    trials = len(settings.seeds) - finished
    arms = [ArmEstimate(arm.name, arm.short, 10, 10, 0.1, trial_s, trials) for arm in settings.every_arm]
    return Estimate(settings, tuple(arms), 1, 1, {"": 100}, {"train": 1000, "test": 400}, spread)


def test_a_step_is_what_a_trial_makes():
    """Clipping, optimizer and moving average included; the gradients are gone."""
    recipe = plain().with_(batch_size=8, ema=0.9, clip_norm=1.0)
    model = vit("mu/4", img_size=8, in_chans=1, num_classes=10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    steps = Steps(model, Classification(), recipe, torch.device("cpu"), model.vit_config)
    computed, part_s, update_s = steps.timed(4, parts=2, most_s=math.inf)
    assert (computed, steps.ema.updates) == (2, 1)
    assert part_s > 0 < update_s
    assert all(parameter.grad is None for parameter in model.parameters())
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert steps.peak(4) > 5 * sum(parameter.nbytes for parameter in model.parameters())  # with Adam's and the average
    assert (steps.fitting(steps.train, 8, 1e-9, least=2), steps.fitting(steps.train, 8, 1e9)) == (2, 8)


def test_the_plan_has_time_and_detectable_effect_for_every_number_of_seeds():
    estimate = made(spread=Spread(1.5, 3, "from 4 trials of base", 0.04, 400), seeds=5)
    text = str(estimate)
    low, high = sd_range(1.5, 3)
    assert f"sd of a trial: 1.5 points (80 % range {low:.2g} to {high:.2g}), from 4 trials of base." in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.split()[0:1] in (["3"], ["5"], ["16"])}
    assert rows["5"][1:3] == ["20", "min"]
    assert rows["5"][3] == f"{1.5 * detectable(3, 5).effect:.2g}"
    assert float(rows["5"][5]) > float(rows["5"][3])  # other images: 100 sqrt(0.04 / 400) = 1 point more
    assert "equivalent within 0.5 points: " in text
    assert "; not feasible (> 32 seeds)." in text
    assert "resolve about" not in text
    estimate = replace(estimate, test_images=840, grouped=True)
    text, half = " ".join(str(estimate).split()), estimate.findable(5, 100 * np.sqrt(0.04 / 6 / 840)).half
    assert f"840 groups of test images resolve about ±{half:.2g} points with 3 arms and 5 seeds. The margin" in text
    assert f"intervals are about ±{half:.2g} points." in estimate.decides(), "the same number"
    assert "or more seeds." in text
    unknown = replace(estimate, spread=usual_spread(840), grouped=False)
    text, half = " ".join(str(unknown).split()), unknown.decides().partition("±")[2].split()[0]
    assert f"resolve about ±{half} points with 3 arms and 5 seeds: ±" in text
    assert f"±{half} points" in resolution(840, k=3, n=5), "the number that `vitmods data` shows, with 4 arms"
    estimate = replace(estimate, test_images=0)
    assert f"find effects above about {1.5 * detectable(3, 5).effect:.2g} points" in estimate.decides()


def test_an_unknown_spread_and_arms_that_are_added_later_count():
    text = str(made())
    assert "sd of a trial: unknown. --pilot trains four trials of base, which then count." in text
    assert f"{detectable(3, 5).effect:.2g} sd of a trial" in text
    family = made(k=1, spread=Spread(1.5, 3, "", 0.04, 400), seeds=5, family=4)
    row = next(line.split() for line in str(family).splitlines() if line.split()[:1] == ["5"])
    assert row[3] == f"{1.5 * detectable(4, 5).effect:.2g}"
    assert f"5 seeds of 1 arm and base in about 10 min find effects above about {row[3]} points" in family.decides()


@pytest.mark.parametrize(
    ("budget", "options", "seeds"),
    [
        ("30m", {}, 7),
        ("30m", {"finished": 2}, 9),
        ("41 trials", {}, 10),
        ("70m", {"until_decided": True}, 16),
        ("40m", {"until_decided": True}, 8),
        ("22m", {"until_decided": True}, 5),
    ],
)
def test_as_many_seeds_as_fit(budget, options, seeds):
    estimate = fit_to_budget(make_budget(budget), made(**options))
    assert (estimate.refused, len(estimate.settings.seeds), estimate.seconds(0)) == (None, seeds, 0)
    assert estimate.total_s == 4 * (seeds - options.get("finished", 0)) * 60
    assert len(fit_to_budget(make_budget("30m"), replace(made(), workers=2, parallel=2)).settings.seeds) == 15


def test_tuned_trials_come_first():
    estimate = made(tune={"lr": (1e-4, 1e-3)}, seeds=5)
    # One for each value and 5 seeds; base has 5 more at the other value, if an arm chooses it.
    arms = tuple(replace(arm, trials=12 if arm.arm == "base" else 7) for arm in estimate.arms)
    estimate = replace(estimate, arms=arms)
    assert estimate.settings.planned == 33
    assert "At most 33 trials to run" in str(estimate)
    assert "Base is trained at the points that arms choose, too." in str(estimate)
    assert (sum(estimate.trials(0)), estimate.seconds(0), estimate.seconds(5)) == (8, 8 * 60, 33 * 60)
    assert len(fit_to_budget(make_budget("36m"), estimate).settings.seeds) == 5
    assert len(fit_to_budget(make_budget("33trials"), estimate).settings.seeds) == 5
    assert len(fit_to_budget(make_budget("32trials"), estimate).settings.seeds) == 4


def test_fewer_than_three_seeds_are_refused_with_the_arithmetic():
    sweep = made(k=1, sweep={"lr": [1e-4, 1e-3]})
    assert len(sweep.arms) == 2
    sweep = replace(sweep, arms=sweep.arms * 2)  # of both points: 4 minutes a seed
    for estimate, budget, words in (
        (made(), "10m", "3 arms and base x 3 seeds take 12 min, more than 10 min; 2 arms x 3 seeds fit"),
        (made(), "10trials", "3 arms and base x 3 seeds take 12 trials, more than 10 trials; 2 arms x 3 seeds fit"),
        (made(), "2m", "not even one arm x 3 seeds fits"),
        (sweep, "8m", "x 3 seeds take 12 min"),
    ):
        refused = str(fit_to_budget(make_budget(budget), estimate).refused)
        assert words in refused
        assert "--img-size" in refused
        assert "--epochs" in refused
    assert len(fit_to_budget(make_budget("13m"), sweep).settings.seeds) == 3


@pytest.fixture(scope="module")
def pilot(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "first"
    return out, study(["dpn", "rms"]).pilot(out, **RUN)


def test_a_pilot_trains_base_alone_and_knows_the_spread(pilot):
    out, estimate = pilot
    assert sorted(str(path.parent.relative_to(out / "trials")) for path in out.rglob("result.json")) == [
        f"base/seed{seed}" for seed in range(4)
    ]
    assert estimate.spread.df == 3
    assert estimate.spread.images == 538  # val and test, which vitmods made both
    assert 0 < estimate.spread.disagree < 1
    assert "from 4 trials of base" in str(estimate)
    assert (estimate.finished, [arm.trials for arm in estimate.arms]) == (4, [1, 5, 5])
    assert StudyFolder(out).known_facts().plan.seeds == 0
    assert estimate.instead == ""
    three = study(["dpn", "rms", "layerscale"], seeds=3).dry_run(**RUN)
    assert "a factorial design (--design factorial) of 8 runs x 2 seeds, 16 trials" in " ".join(str(three).split())


def test_a_pilot_counts_and_a_budget_plans_the_rest(pilot, capsys):
    """12 trials, 4 of which are there; and without a budget the recorded plan goes on."""
    out, _ = pilot
    with pytest.raises(UserError, match="3 arms and base x 3 seeds take 12 trials, more than 5 trials"):
        study(["dpn", "rms", "layerscale"]).run(out, budget="5trials", **RUN)
    chosen = study(["dpn", "rms"], margin=1.0)  # base alone says nothing of the arms, so the margin is still free
    result = chosen.run(out, budget="9trials", cost_seconds=0, **{**RUN, "progress": True})
    assert "4 seeds of 2 arms and base in about" in capsys.readouterr().err
    assert result.complete
    assert [len(arm.scores) for arm in result.every_arm] == [4, 4, 4]
    plan = StudyFolder(out).known_facts().plan
    assert plan.seeds == 4
    doubts = " ".join(Answer.load(out).doubts)
    assert "Extended" not in doubts
    assert "margin was changed" not in doubts
    again = study(["dpn", "rms"]).run(out, budget="100trials", cost_seconds=0, **RUN)
    assert [len(arm.scores) for arm in again.every_arm] == [4, 4, 4]
    assert study(["dpn", "rms"]).dry_run(out, **RUN).finished == 12


@pytest.mark.parametrize(
    ("constant", "chance", "sd"), [((), None, 5.9), ((2,), None, 0.14), ((), 0.1, 0.14), ((1, 2), None, None)]
)
def test_failed_trials_of_base_are_no_spread(constant, chance, sd, tmp_path):
    settings = study(["dpn"], seeds=3).settings
    state = StudyState(
        StudyFolder(tmp_path), settings, Evaluated(("test",), {} if chance is None else {"top1": chance})
    )
    for seed, score in enumerate((0.245, 0.247, 0.143)):
        record = TrialRecord("base", seed, "finished", "", metrics={"top1": score}, constant=seed in constant)
        state.answered[state.trial(AS_IS, "base", seed)] = record
    spread = spread_of(state)
    assert (spread and spread.sd) == (sd and pytest.approx(sd, rel=0.05))


def test_earlier_studies_beside_the_folder_tell_the_spread(pilot):
    out, _ = pilot
    spread = study(["dpn"]).dry_run(out.parent / "second", **RUN).spread
    assert str(out) in spread.source
    copy = shutil.copytree(out, out.with_name("copy"))  # does not count twice
    again = study(["dpn"]).dry_run(out.parent / "second", **RUN).spread
    shutil.rmtree(copy)
    assert (again.df, again.sd) == (spread.df, spread.sd)
    longer = study(["dpn"], recipe=RECIPE.with_(epochs=2)).dry_run(out.parent / "second", **RUN)
    other = study(["dpn"], metric="nll").dry_run(out.parent / "second", **RUN)
    assert (longer.spread.source, other.spread) == ("usual for 538 test images; --pilot measures it", None)


def test_a_dry_run_says_at_once_what_it_does_and_names_every_arm(tmp_path, said):
    few = "--base mu/4 --epochs 1 --limit-train 128 --device cpu --dry-run"
    printed = said(f"compare {few} --arms dpn --budget 8trials --out {tmp_path}/a")
    lines = printed.err.splitlines()
    assert lines[0] == "Comparing dpn with base (mu/4) on digits, 5 seeds each."
    assert lines[1] == f"Results: {tmp_path / 'a'}. Nothing is trained: a few steps of each arm are timed."
    assert [line.split(":")[0].split()[-1] for line in lines if " of 2  " in line] == ["base", "dpn"]
    assert "8 trials to run" in printed.out
    printed = said(f"train {few} --arm dpn").out
    assert printed.startswith("dpn: ")
    assert "the trial about" in printed
    assert not (tmp_path / "a").exists()


@pytest.fixture
def measured(monkeypatch):
    """The depth and class of the stem of each model that a dry run times; its paces follow from these."""
    depths_and_stems = []

    def pace(self, steps, largest, place):
        depths_and_stems.append((len(steps.model.blocks), type(steps.model.patch_embed).__name__))
        slower = 1.5 if "Dual" in depths_and_stems[-1][1] else 1.0
        return Pace(slower * depths_and_stems[-1][0], 1e-9, 1e-9)

    monkeypatch.setattr(Stopwatch, "_measured", pace)
    return depths_and_stems


def test_arms_on_a_larger_base_follow_from_the_smallest_one(measured):
    estimate = study(("dpn", "layerscale"), sweep={"base": ["mu3/4", "mu2/4"]}).dry_run(**RUN)
    assert [depth for depth, _ in measured] == [2, 2, 2, 3], "arms on a second base are not timed"
    assert [arm.arm for arm in estimate.arms] == [
        f"base={base}, {arm}" for base in ("mu3/4", "mu2/4") for arm in ("base", "dpn", "layerscale")
    ]
    assert [arm.step_s / 128 for arm in estimate.arms] == pytest.approx([3.0, 4.5, 3.0, 2.0, 3.0, 2.0], abs=0.1)
    for arm, changes in zip(estimate.arms[:3], ("", "dpn", "layerscale"), strict=True):
        model = vm.apply(vit("mu3/4", img_size=8, in_chans=1, num_classes=10), *vm.parse_changes(changes))
        assert (arm.params, arm.macs) == (count_params(model), count_macs(model.vit_config))


def test_settings_of_one_structure_are_timed_once_and_each_has_its_length(measured):
    estimate = study(sweep={"epochs": [1, 3]}).dry_run(**RUN)
    assert len(measured) == 2
    assert "A trial has 2 steps with epochs=1 and 6 steps with epochs=3." in str(estimate)
    assert [arm.trial_s // arm.step_s for arm in estimate.arms] == [2, 2, 6, 6]
    study(sweep={"batch_size": [64, 128]}).dry_run(**RUN)
    assert len(measured) == 2 + 3, "base again, whose batch is another"


def test_an_arm_that_a_larger_base_cannot_have_is_refused(measured):
    with pytest.raises(UserError, match=r"base=mu1/4, arm dtn: .*needs a second block"):
        study(("dtn",), sweep={"base": ["mu3/4", "mu1/4"]}).dry_run(**RUN)
    with pytest.raises(UserError, match=r"base=mu3/4, arm few: .*12"):
        study(("few=dtn(blocks=12)",), sweep={"base": ["mu3/4", "mu14/4"]}).dry_run(**RUN)
    assert measured == []


def test_slow_libraries_are_imported_when_they_are_needed():
    """The shell says something before them, and a study needs neither torchvision nor scipy.stats."""
    code = (
        "import sys, vitmods.cli.compare; print({'torch', 'scipy'} & set(sys.modules)); "
        "import vitmods.study.run, vitmods.study.trial, vitmods.study.answer, vitmods.tasks.base as base; "
        "assert 'detection' in base.TASKS; print({'torchvision', 'scipy.stats', 'timm'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == ["set()"] * 2


CPU = torch.device("cpu")


def measure(*args, **options):
    return finish(measuring(*args, **options))


def test_peak_counts_what_is_alive_at_once():
    here = torch.zeros(10)

    def work():
        a = torch.zeros(1000)
        b = a + 1
        del a
        view = b.view(10, 100)
        del b  # the view keeps the storage
        c = view * 2
        del view, c
        torch.zeros(10)

    assert peak_bytes(work, [here], CPU) == 4 * (10 + 2000)


def test_time_on_a_cpu_is_by_its_own_clock(monkeypatch):
    clocks = {"cpu": 0.0, "wall": 0.0}
    by = {"process_time": lambda: clocks["cpu"], "perf_counter": lambda: clocks["wall"]}
    monkeypatch.setattr("vitmods.bench.time", SimpleNamespace(**by))

    def call():
        clocks["cpu"] += 2
        clocks["wall"] += 5

    assert seconds_per_call(call, 3, CPU) == 2
    assert seconds_per_call(call, 3, CPU, wall=True) == 5


@pytest.mark.parametrize(("count", "left_out"), [(1, 0), (7, 0), (10, 0), (11, 1), (20, 4), (60, 20)])
def test_the_interval_of_a_ratio_lies_between_two_of_the_rounds(count, left_out):
    """At each end as many are left out as a sign test at 2 % allows."""
    ratios = list(np.random.default_rng(0).permutation(count) + 1.0)
    middle = (count + 1) / 2
    assert Ratio.of_rounds(ratios) == Ratio(middle, 1 + left_out, count - left_out)
    if count >= 7:
        assert 2 * binom.cdf(left_out, count, 0.5) <= 0.02 < 2 * binom.cdf(left_out + 1, count, 0.5)


def test_rounds_alternate_their_order_and_stop_when_they_are_precise_or_in_time(monkeypatch):
    monkeypatch.setattr("vitmods.bench.ROUNDS", (7, 60))
    calls, times = [], iter(range(1000))
    rounds = interleave({"k": None}, ["a", "b"], lambda kind, name: calls.append(name) or 1.0, budget_s=0)
    assert calls == ["a", "b", "b", "a"] * 3 + ["a", "b"]
    assert rounds == {"k": [{"a": 1.0, "b": 1.0}] * 7}
    seconds = {"steady": lambda: 1.0, "noisy": lambda: 1.0 + next(times) % 3}
    rounds = interleave(seconds, ["a", "b"], lambda timed, name: timed(), budget_s=60)
    assert {kind: len(measured) for kind, measured in rounds.items()} == {"steady": 7, "noisy": 60}


def test_arms_are_made_one_after_the_other():
    """An arm's model is gone before the next one is made."""
    made = []

    def models():
        for name in ("base", "a", "b", "c"):
            alive = sum(model() is not None for model in made)
            assert alive <= 1, name  # base alone
            model = vit("mu/4", img_size=8, in_chans=1, num_classes=10)
            made.append(weakref.ref(model))
            yield name, model
            del model

    measured = measure(models(), Classification(), plain().with_(batch_size=4), CPU, budget_s=0.0, arms=3)
    assert list(measured["arms"]) == ["a", "b", "c"]


@pytest.fixture(scope="module")
def costs(seconds_by_counting):
    sizes = {"base": "mu2/2", "same": "mu2/2", "deeper": "mu4/2"}
    models = {name: vit(size, img_size=16, in_chans=1, num_classes=10) for name, size in sizes.items()}
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("vitmods.study.cost.seconds_per_call", seconds_by_counting)
        costs = measure(models.items(), Classification(), plain().with_(batch_size=16), CPU, budget_s=1.0, arms=2)
    assert torch.get_num_threads() == threads
    return models, costs


def test_costs_are_ratios_to_base(costs):
    models, costs = costs
    base, same, deeper = costs["base"], costs["arms"]["same"], costs["arms"]["deeper"]
    assert same["params"] == same["flops"] == same["peak_memory"]["ratio"] == same["infer_memory"]["ratio"] == 1
    assert base["macs"] == count_macs(models["base"].vit_config)
    assert deeper["flops"] == count_macs(models["deeper"].vit_config) / base["macs"]
    for kind in ("train_step", "infer_1", "infer_n"):
        assert same[kind]["ratio"] == 1
        assert deeper[kind]["ratio"] == pytest.approx(deeper["flops"], rel=0.01)
        assert deeper[kind]["low"] == deeper[kind]["ratio"] == deeper[kind]["high"]
    assert deeper["peak_memory"]["ratio"] > 1.3
    assert base["train_batch"] == 16
    weights = [sum(4 * p.numel() for p in models[name].parameters()) for name in ("base", "deeper")]
    more = (deeper["infer_memory"]["ratio"] - 1) * base["infer_memory_bytes"]
    # deeper is its weights alone: activations are gone after each block
    assert more == pytest.approx(weights[1] - weights[0], rel=0.01)
    hidden = 4 * base["infer_batch"] * 65 * 128  # the MLP's, before GELU
    assert base["infer_memory_bytes"] > weights[0] + hidden


def test_large_models_are_timed_with_smaller_batches(monkeypatch):
    monkeypatch.setattr("vitmods.study.cost.CALL_S", 1e-9)
    base = vit("mu/2", img_size=8, in_chans=1, num_classes=10)
    models = [("base", base), ("dpn", apply(base, *parse_changes("dpn")))]
    measured = measure(models, Classification(), plain(), CPU, budget_s=0.0)
    assert (measured["base"]["train_batch"], measured["base"]["infer_batch"]) == (2, 1)
    assert measured["rounds"] == 2


def test_an_arm_that_another_library_builds_than_base_is_named(monkeypatch):
    monkeypatch.setattr("vitmods.study.cost.seconds_per_call", lambda call, times, device: 1.0)
    unknown, own_vit = ForeignBase("timm:resnet10t", 10, (32, 32), 3), vit("mu/4", img_size=32, num_classes=10)
    models = [("base", unknown.build()), ("same", unknown.build()), ("vit", own_vit)]
    measured = measure(models, Classification(), plain().with_(batch_size=4), CPU, 0.0, unknown, 2)["arms"]
    built = "base is built by timm and the arm by vitmods: the ratios hold that difference too"
    assert {name: arm["against"] for name, arm in measured.items()} == {"same": None, "vit": built}
    assert remarks_on_costs([(name, ArmCost.from_dict(arm)) for name, arm in measured.items()]) == [
        f"Costs of vit: {built}."
    ]
    assert measured["vit"]["train_step"]["ratio"] == 1


def test_compiled_steps_are_measured_where_trials_are_compiled(monkeypatch):
    """In turn with those that are not; here compiling does nothing."""
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, mode=None: compiled.append(module))
    monkeypatch.setattr("vitmods.study.cost.seconds_per_call", lambda call, times, device: 1.0)
    base = vit("mu1/4", img_size=8, in_chans=1, num_classes=10)
    models = [("base", base), *((name, apply(base, *parse_changes(name))) for name in ("dpn", "rms"))]
    measured = measure(models, Classification(), plain().with_(batch_size=4), CPU, 0.0, arms=2, compiled=True)
    assert len(set(map(id, compiled))) == 3
    assert measured["base"]["compiled_step_s"] == 1.0
    arms = {name: ArmCost.from_dict(arm) for name, arm in measured["arms"].items()}
    assert {arm.compiled_step.ratio for arm in arms.values()} == {1.0}
    text = "A training step compiled: 1.00× (dpn) and 1.00× (rms); above it is not."
    assert remarks_on_costs(arms.items()) == [text]
    bound = replace(arms["rms"], compiled_step=None, host_bound=True)
    (remark,) = remarks_on_costs([("rms", bound), ("none", None)])
    assert remark.startswith("Training steps of rms are bound by the host, which takes about as long to start")


def test_costs_take_at_most_a_tenth_of_the_training_time(tmp_path, monkeypatch):
    asked = []

    def measuring(*given, compiled):
        assert not compiled
        asked.append(given[4])
        yield
        return {"base": {}, "arms": {}}

    monkeypatch.setattr("vitmods.study.cost.measuring", measuring)
    monkeypatch.setattr("vitmods.study.run.read_answer", Mock())
    recipe = Recipe().with_(epochs=1, batch_size=64, crop="none", eval_crop=1.0)
    study = vm.Study("mu1/2", ["rms"], recipe=recipe, seeds=1, limit_train=128)
    for seconds in (1000.0, 1e-9):
        study.run(tmp_path, device="cpu", workers=1, progress=False, cost_seconds=seconds)
        (tmp_path / "costs.json").unlink()
    trained = sum(json.loads(path.read_text())["wall_s"] for path in tmp_path.glob("trials/*/*/result.json"))
    assert asked == pytest.approx([0.1 * trained, 0], abs=1e-6)
