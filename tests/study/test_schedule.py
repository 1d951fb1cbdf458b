"""Which trials a study runs, in which order, when arms stop, and how many share a GPU; the trainings are played."""

import dataclasses
import itertools
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from vitmods.recipes import Recipe
from vitmods.study.arms import Arm, make_arms
from vitmods.study.budget import Budget, make_budget
from vitmods.study.cells import Cell, Trial
from vitmods.study.designs.factorial import FactorialDesign
from vitmods.study.executors import Inline, sharing
from vitmods.study.executors.sharing import Sharing
from vitmods.study.progress import Progress
from vitmods.study.questions import looks
from vitmods.study.schedule import TrialSchedule
from vitmods.study.settings import Settings, make_seeds
from vitmods.study.state import Evaluated, StudyState
from vitmods.study.store import StudyFolder
from vitmods.study.tables import decision_against, decision_at
from vitmods.train.trial import write_scores
from vitmods.util.errors import UserError

FIXED = {"task": "classification", "data": "digits", "base": "mu/4", "recipe": Recipe().to_dict()}
IMAGES = 400


class Played:
    """A study whose trials end at once; accuracies by arm are `means` plus noise, None diverges."""

    def __init__(self, path, means, seeds=16, sd=0.01, until_decided=True, **options):
        arms = make_arms([arm for arm in means if arm != "base"])
        self.settings = Settings(FIXED, arms, make_seeds(seeds), until_decided=until_decided, **options)
        self.folder, self.means, self.sd, self.order, self.broken = StudyFolder(path), means, sd, [], set()

    def state(self):
        return StudyState(self.folder, self.settings, Evaluated(("test",)))

    def schedule(self, budget=None):
        self.progress = Progress(self.folder.trial, lambda work: 1, 1, quiet=True)
        return TrialSchedule(self.state(), self.progress, budget)

    def train(self, trial):
        name = trial.arm.name
        self.order.append((*((str(trial.setting),) if trial.setting else ()), name, trial.seed))
        if (name, trial.seed) in self.broken:
            raise MemoryError
        folder = self.folder.trial(trial)
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng([trial.seed, sum(map(ord, name))])
        mean = self.means[name]
        right = None if mean is None else rng.random(IMAGES) < mean + self.sd * rng.standard_normal()
        result = {"status": "diverged", "split": "test", "metrics": {}, "message": "nan", "wall_s": 0.5}
        if right is not None:
            result |= {"status": "finished", "metrics": {"top1": float(right.mean())}}
            write_scores(folder / "test.npz", {"ids": np.arange(IMAGES).astype(str), "top1": right})
        (folder / "result.json").write_text(json.dumps(result))

    def run(self, budget=None):
        self.order.clear()
        schedule = self.schedule(budget)
        Inline(self.train).run(schedule)
        return schedule

    def last(self):
        return looks(self.state())[-1]


def test_what_follows_the_trials_is_done_in_steps(tmp_path):
    played = Played(tmp_path, {"base": 0.5, "dpn": 0.5}, seeds=1, until_decided=False)
    played.progress = Progress(played.folder.trial, lambda work: 1, 1, quiet=True)
    schedule = TrialSchedule(played.state(), played.progress, meanwhile=iter([None, None]))
    assert [schedule.use_idle_core() for _ in range(3)] == [True, True, False]
    assert not played.schedule().use_idle_core()


def test_a_fixed_study_goes_seed_by_seed_base_first(tmp_path):
    played = Played(tmp_path, {"base": 0.5, "dpn": 0.5, "rms": 0.5}, seeds=2, until_decided=False)
    assert not played.run().left
    assert played.order == [("base", 0), ("dpn", 0), ("rms", 0), ("base", 1), ("dpn", 1), ("rms", 1)]
    played.run()
    assert played.order == []


def test_arms_that_are_decided_stop_and_base_goes_on(tmp_path):
    played = Played(tmp_path, {"base": 0.5, "dpn": 0.9, "rms": 0.52})
    played.run()
    assert looks(played.state())[0].stopped == ("dpn",)
    assert [seed for arm, seed in played.order if arm == "dpn"] == [0, 1, 2, 3]
    assert [seed for arm, seed in played.order if arm == "base"] == [seed for arm, seed in played.order if arm == "rms"]
    assert str(played.last().decision["dpn"].verdict) == "helps"
    assert played.last().decision["dpn"].n == 4
    seeds = max(seed for _, seed in played.order) + 1
    assert played.last().seeds == seeds > 4
    last = Played(tmp_path / "last", {"base": 0.5, "dpn": 0.9})
    assert not last.run().left
    assert max(seed for _, seed in last.order) == 3, "it ends where the last arm stops"


def test_looks_do_not_depend_on_where_a_run_was_killed(tmp_path):
    means = {"base": 0.5, "dpn": 0.56, "rms": 0.5, "dtn": 0.45}
    whole, cut = Played(tmp_path / "whole", means), Played(tmp_path / "cut", means)
    whole.run()
    for _ in range(200):
        if not cut.run(Budget(trials=5)).left:
            break
    assert repr(looks(cut.state())) == repr(looks(whole.state()))
    assert not cut.schedule().left


def test_seeds_of_a_later_look_wait_for_no_one_but_count_in_no_earlier_one(tmp_path):
    """Workers that are free go on; what they find is not part of the look before."""
    played = Played(tmp_path, {"base": 0.5, "dpn": 0.56, "rms": 0.5}, seeds=8)
    schedule = played.schedule()
    taken = [schedule.take() for _ in range(14)]
    late = [trial for trial in taken if trial.seed == 4]
    assert late, "two workers more than a look has trials"
    for trial in late:
        played.train(trial)
        schedule.ended(trial, None)
    assert looks(schedule.state) == []
    for trial in taken:
        if trial not in late:
            played.train(trial)
            schedule.ended(trial, None)
    assert looks(schedule.state)[0].decision["dpn"].n == 4


def test_an_arm_that_cannot_be_trained_holds_up_no_other_and_no_seed_is_spent_on_it(tmp_path):
    played = Played(tmp_path, {"base": 0.5, "dpn": 0.9, "rms": 0.5})
    played.broken = {("rms", seed) for seed in range(16)}
    played.run()
    assert looks(played.state())[0].stopped == ("dpn",)
    assert "rms" not in looks(played.state())[0].decision.effects
    played.broken = set()
    played.run()
    assert ("rms", 0) in played.order, "the next run tries again"
    assert "rms" in looks(played.state())[0].decision.effects
    fails_once = Played(tmp_path / "once", {"base": 0.5, "dpn": 0.52, "rms": 0.5})
    fails_once.broken = {("rms", 1)}
    fails_once.run()
    assert [seed for arm, seed in fails_once.order if arm == "rms"] == [0, 1]
    assert max(seed for arm, seed in fails_once.order if arm == "dpn") > 4


def test_a_diverged_arm_is_an_outcome(tmp_path):
    played = Played(tmp_path, {"base": 0.5, "dpn": None})
    played.run()
    assert str(played.last().decision["dpn"].verdict) == "hurts"
    assert max(seed for _, seed in played.order) == 3


def test_a_budget_ends_a_run_and_the_next_goes_on(tmp_path):
    played = Played(tmp_path, {"base": 0.5, "dpn": 0.5}, seeds=4, until_decided=False)
    schedule = played.run(Budget(trials=3))
    assert (len(played.order), len(schedule.left)) == (3, 5)
    played.run(make_budget("3 trials"))
    assert len(played.order) == 3
    assert len(played.run(make_budget("0.4s")).left) == 2, "no time for a trial"
    played.run(make_budget("1h"))
    assert len(played.order) == 2


def test_a_seed_of_a_sweep_begins_if_it_fits_under_every_setting(tmp_path):
    means, options = {"base": 0.5, "dpn": 0.5}, {"until_decided": False, "sweep": {"lr": [1e-3, 2e-3]}}
    Played(tmp_path, means, seeds=1, **options).run()
    played = Played(tmp_path, means, seeds=2, **options)
    assert len(played.run(make_budget("1.5s")).left) == 4, "four trials of 0.5 s"
    assert not played.order
    assert not played.run(make_budget("1h")).left


@pytest.mark.parametrize(
    ("seconds", "over_s", "slow", "trials"),
    [
        (5.75, 0.0, (), 10),
        (5.75, 0.32, (), 12),  # a sixth seed ends 0.25 s late, for which 0.32 s leave enough
        (5.75, 0.3, (), 10),
        (5.45, 0.9, (), 10),  # 0.55 s late, without it 0.45 s early
        (5.55, 0.9, (), 12),
        (5.05, 0.0, ("base", 4), 9),  # a seed that has begun and is late
        (5.05, 0.2, ("base", 4), 9),
        (5.05, 0.3, ("base", 4), 10),
    ],
)
def test_the_last_seed_ends_near_the_end_of_the_budget(monkeypatch, tmp_path, seconds, over_s, slow, trials):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    played = Played(tmp_path, {"base": 0.5, "dpn": 0.5}, until_decided=False)
    train = played.train

    def train_in_time(trial):
        clock.now += 0.8 if (trial.arm.name, trial.seed) == slow else 0.5
        train(trial)

    played.train = train_in_time
    played.run(Budget(seconds, over_s=over_s, began=clock.now))
    assert len(played.order) == trials


def test_a_budget_has_a_unit():
    for budget in ("2 weeks", "-3", "0", "h", "1.2.3h", 0):
        with pytest.raises(UserError, match="A budget is"):
            make_budget(budget)
    with pytest.raises(
        UserError, match=r"The budget 10 does not have a unit: write 10m for minutes, 10h or 10trials\."
    ):
        make_budget("10")  # of the shell
    assert make_budget(10) == make_budget("10trials") == Budget(trials=10)
    assert make_budget("1.5h") == Budget(seconds=5400)


def test_every_setting_of_a_sweep_has_its_own_base(tmp_path):
    sweep = {"base": ("mu/4", "Ti/4")}
    played = Played(tmp_path, {"base": 0.5, "dpn": 0.5}, seeds=1, until_decided=False, sweep=sweep)
    played.run()
    assert played.order == [
        ("base=mu/4", "base", 0), ("base=Ti/4", "base", 0), ("base=mu/4", "dpn", 0), ("base=Ti/4", "dpn", 0),
    ]  # fmt: skip
    assert len({Path(played.folder.trial(trial)) for trial in played.state().answered}) == 4


def test_trials_on_other_images_are_not_compared(tmp_path):
    played = Played(tmp_path, {"base": 0.5, "dpn": 0.5}, seeds=4)
    played.run()
    folder = played.folder.trial(played.state().trial(played.settings.sweep.points[0], "dpn", 0))
    write_scores(folder / "test.npz", {"ids": np.arange(1, IMAGES + 1).astype(str), "top1": np.ones(IMAGES, bool)})
    with pytest.raises(UserError, match="evaluated on different images"):
        looks(played.state())


class Factorial(Played):
    """Accuracies of runs are sums over their changes."""

    def __init__(self, path, gains, seeds, **options):
        fixed = {**FIXED, "img_size": [8, 8], "in_chans": 1}
        plan = FactorialDesign.plan(SimpleNamespace(arms=make_arms(list(gains)), fixed=fixed, runs=None))
        means = {arm.name: 0.5 + sum(gains[name] for name in arm.name.split("+")) for arm in plan.arms()}
        super().__init__(path, {"base": 0.5, **means}, seeds, **options)
        self.settings = dataclasses.replace(self.settings, arms=plan.arms(), design=plan)


def test_until_decided_it_is_looked_at_and_stops_as_a_whole(tmp_path):
    played = Factorial(tmp_path, {"dpn": 0.3, "rms": -0.2, "layerscale": 0.15}, 8, sd=0.005)
    assert played.settings.looks == (2, 3, 4, 6, 8)
    played.run()
    look = played.last()
    assert look.decision.is_decided
    assert set(look.stopped) == {arm.name for arm in played.settings.arms}
    assert len(played.order) == 8 * look.seeds < 8 * 8
    undecided = Factorial(tmp_path / "open", {"dpn": 0.3, "rms": 0.0}, 3, sd=0.05)
    undecided.run()
    assert len(undecided.order) == 4 * 3
    assert not undecided.last().stopped


def test_seeds_of_base_beyond_the_study_are_read_and_not_planned_for_arms(tmp_path):
    play = Played(tmp_path, {"base": 0.5, "dpn": 0.5}, seeds=2, until_decided=False, known=5)
    assert Settings.from_dict(play.settings.to_dict()) == play.settings
    assert play.settings.planned == 7
    for seed in range(5):
        play.train(Trial(play.settings.cell("base"), seed))
    play.run()
    assert play.order == [("dpn", 0), ("dpn", 1)]
    assert len(play.state().answered) == 7
    assert decision_at(play.state(), play.settings.seeds)["dpn"].n == 2
    (play.folder.trial(Trial(play.settings.cell("base"), 4)) / "result.json").unlink()
    play.run()
    assert play.order == [("base", 4)]


def test_an_arm_that_stopped_early_does_not_hold_up_comparisons_with_another_arm(tmp_path):
    play = Played(tmp_path, {"base": 0.5, "dpn": 0.5, "rms": 0.55, "dtn": 0.1}, seeds=6, known=16)
    for seed in range(16):
        play.train(Trial(play.settings.cell("base"), seed))
    play.run()
    stopped = {arm for look in looks(play.state()) for arm in look.stopped}
    assert math.isnan(decision_at(play.state(), play.settings.seeds, base="dpn")["rms"].low)
    decision = decision_against(play.state(), "dpn", stopped)
    assert {arm: math.isnan(effect.low) for arm, effect in decision.effects.items()} == {
        "base": False, "rms": False, "dtn": True
    }  # fmt: skip
    assert decision["dtn"].n < 4 <= decision["rms"].n
    assert math.isnan(decision_against(play.state(), "dpn", ())["rms"].low)  # it may still be trained


CELLS = [Cell(Arm(name), {}, Recipe()) for name in ("base", "slow")]


class Machine:
    """GPUs on which the second cell takes twice as long, and each look finds a row more; each 20 rows end a trial."""

    def __init__(self, gpus, most, speeds):
        self.speeds, self.told, self.running, self.steps = speeds, [], [], {}
        self.queue = (Trial(CELLS[number % 3 // 2], number) for number in itertools.count())
        self.sharing = Sharing(gpus, most, self.row, lambda limit, line: self.told.append((limit, line)))
        self.gpus = gpus

    def row(self, trial):
        step = self.steps[trial]
        if not step:
            return {}
        if step % 7 == 0:
            return {"step": step, "split": "val"}
        speed = self.speeds[-(-len(self.running) // self.gpus)] / (1 + CELLS.index(trial.cell))
        return {"step": step, "images_per_s": speed if step > 1 else 1.0}

    def run(self, looks=200):
        for _ in range(looks):
            self.running = [trial for trial in self.running if self.steps[trial] < 20]
            while len(self.running) < self.sharing.limit:
                self.running.append(next(self.queue))
                self.steps[self.running[-1]] = 0
            self.sharing.look(self.running)
            for trial in self.running:
                self.steps[trial] += 1
        return self.sharing.on_each


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(
    ("most", "speeds", "on_each", "gains"),
    [
        (4, {1: 100, 2: 90, 4: 80}, 4, ["1.8", "1.8"]),
        (4, {1: 100, 2: 60, 4: 28}, 2, ["1.2", "0.93"]),
        (4, {1: 100, 2: 52}, 1, ["1"]),
        (3, {1: 100, 2: 95, 3: 90}, 3, ["1.9", "1.4"]),
        (2, {1: 100, 2: 80}, 2, ["1.6"]),
        (1, {1: 100}, 1, []),
    ],
)
def test_as_many_trials_share_a_gpu_as_are_worth_it(monkeypatch, tmp_path, gpus, most, speeds, on_each, gains):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    machine = Machine(gpus, most, speeds)
    assert machine.run() == on_each
    lines = [line for _, line in machine.told if line]
    assert [line.split(" are ")[1].split()[0] for line in lines] == gains
    assert all("MPS, which lets them compute at the same time, does not run" in line for line in lines)
    assert not most > 1 or machine.told[-1][0] == on_each * gpus
    (tmp_path / "control").touch()
    assert sharing.mps_runs()


def test_nothing_is_concluded_before_all_are_at_work_nor_from_rows_that_began_before():
    machine = Machine(1, 4, {1: 100, 2: 90, 4: 80})
    assert machine.run(looks=3) == 1, "no row, the first, and one that may have begun before the others were at work"
    assert machine.run(looks=1) == 2
