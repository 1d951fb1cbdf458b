"""What a running study shows: the time left of simulated studies, lines and bar, and the report that follows."""

import heapq
import io
import json
import re
import sys

import pytest

from vitmods.recipes import Recipe
from vitmods.study import Study
from vitmods.study import progress as shown
from vitmods.study.arms import make_arms
from vitmods.study.progress import LiveReport, Progress, StepTimes, seconds_left
from vitmods.study.settings import Settings, make_seeds
from vitmods.study.state import Evaluated, StudyState
from vitmods.study.store import StudyFolder

FIXED = {"task": "classification", "data": "digits", "base": "mu/4", "recipe": Recipe().to_dict()}
STEPS, START_S = 100, 6.0  # of a trial; and seconds before its first step, in which a model is built


class Simulated:
    """A study on a clock that jumps from the end of one trial to the end of the next.

    steps_s:  arm -> seconds of a step; in a sweep, times those of `settings`
    resumed:  (arm, seed) -> the step that a trial resumes from
    diverged: (arm, seed) -> the step at which a trial ends early
    done:     trials that an earlier run has ended, at `earlier` times the pace
    stops:    number of ended trials -> an arm that then gets no more seeds
    planned:  whether trials of each arm were timed before
    known_from: trials after which the time left is checked: each arm is measured, or nearly as costly as the others
    """

    def __init__(self, path, monkeypatch, steps_s, seeds, workers=1, resumed=(), diverged=(), done=0, earlier=1.0,
                 stops=(), settings=(), drift=1.0, planned=False, known_from=3):  # fmt: skip
        sweep = {"base": tuple(settings)} if settings else ()
        arms = make_arms([arm for arm in steps_s if arm != "base"])
        self.settings = Settings(FIXED, arms, make_seeds(seeds), sweep=sweep)
        self.folder, self.workers, self.now = StudyFolder(path), workers, 0.0
        self.steps_s, self.of_setting, self.drift = steps_s, dict(settings), drift
        self.resumed, self.diverged, self.stops = dict(resumed), dict(diverged), dict(stops)
        monkeypatch.setattr(shown.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(shown, "_outcome", lambda *_: "")
        order = sorted(StudyState(self.folder, self.settings, Evaluated(("test",))).answered, key=lambda t: t.seed)
        paces = [(shown.kind_of(trial), earlier * self.pace(trial)) for trial in (order if planned else order[:done])]
        self.left, self.total = order[done:], len(order)
        self.progress = Progress(
            self.folder.trial, lambda work: STEPS, workers, quiet=True, pace=StepTimes(paces), ended=done
        )

    def pace(self, trial):
        at = self.of_setting.get(trial.setting.to_dict().get("base"), 1.0)
        return self.steps_s[trial.arm.name] * at * self.drift ** (self.now / 3600)

    def log(self, trial, step, wall_s):
        folder = self.folder.trial(trial)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": step, "wall_s": wall_s, "loss": 1.0}) + "\n{")

    def run(self):
        """Return [(trials ended, seconds left as shown, in truth)]."""
        running, estimates, ended = [], [], 0
        self.progress.remaining(self.left)
        while running or self.left:
            while self.left and len(running) < self.workers:
                trial = self.left.pop(0)
                key = trial.arm.name, trial.seed
                first, last = self.resumed.get(key, 0), self.diverged.get(key, STEPS)
                if first:
                    self.log(trial, first, first * self.pace(trial))
                self.progress.remaining(self.left)
                self.progress.started(trial)
                end = self.now + START_S + (last - first) * self.pace(trial)
                heapq.heappush(running, (end, id(trial), trial, self.now + START_S, first, last))
            self.now, _, trial, _, first, last = heapq.heappop(running)
            self.log(trial, last, last * self.pace(trial))
            for _, _, other, began, start, _ in running:
                step = start + 5 * int(max(0.0, self.now - began) / self.pace(other) / 5)
                if step > start:
                    self.log(other, step, step * self.pace(other))
            ended += 1
            if ended in self.stops:
                self.left = [trial for trial in self.left if trial.arm.name != self.stops[ended]]
                self.progress.remaining(self.left)
            self.progress.ended(trial, None, None)
            estimates.append((ended, self.progress.seconds_left()[0], self.now))
        return [(count, left, self.now - then) for count, left, then in estimates]


UNEQUAL = {"base": 1.0, "dpn": 1.1, "rms": 1.6, "dtn": 2.5}
STUDIES = {
    "one worker": {"steps_s": {"base": 1.0, "dpn": 1.1, "rms": 1.2}, "seeds": 5},
    "an arm is far slower": {"steps_s": UNEQUAL, "seeds": 5, "known_from": 4},
    "arms of a plan": {"steps_s": UNEQUAL, "seeds": 5, "planned": True, "earlier": 0.4},
    "two workers": {"steps_s": UNEQUAL, "seeds": 5, "workers": 2},
    "eight workers": {"steps_s": UNEQUAL, "seeds": 8, "workers": 8},
    "resumed": {"steps_s": UNEQUAL, "seeds": 5, "done": 9, "resumed": {("dpn", 2): 90}},
    "resumed where an earlier machine was slow": {"steps_s": UNEQUAL, "seeds": 5, "done": 9, "earlier": 3.0,
                                                  "resumed": {("dpn", 2): 50}},
    "resumed with two workers": {"steps_s": UNEQUAL, "seeds": 6, "workers": 2, "done": 5, "earlier": 0.5,
                                 "resumed": {("dpn", 1): 20, ("rms", 1): 80}},
    "diverged": {"steps_s": {"base": 1.0, "dpn": 1.1, "rms": 1.2}, "seeds": 6, "diverged": {("dpn", 0): 10}},
    "an arm stops": {"steps_s": UNEQUAL, "seeds": 8, "stops": {16: "dtn"}, "known_from": 16},
    "a sweep": {"steps_s": {"base": 1.0, "dpn": 1.5}, "seeds": 4, "settings": {"mu/4": 1.0, "Ti/4": 4.0}},
    "a machine that slows down": {"steps_s": {"base": 1.0, "dpn": 1.1}, "seeds": 8, "drift": 1.3},
}  # fmt: skip


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_the_time_left_is_right_within_a_fifth_from_the_third_trial_on(tmp_path, monkeypatch, study):
    """Also after resuming; an arm that stops is not foreseen, and a trial that ends early only when it has."""
    estimates = Simulated(tmp_path, monkeypatch, **study).run()
    checked = [each for each in estimates if each[0] >= study.get("known_from", 3) and each[-1] > 0]
    assert len(checked) >= 4
    wrong = [(count, left, truth) for count, left, truth in checked if abs(left - truth) > 0.2 * truth]
    assert not wrong


def test_a_pace_follows_from_the_nearest_kinds_that_are_measured():
    pace = StepTimes([(("base", "a"), 1.0), (("dpn", "a"), 1.5)])
    assert pace(("base", "a")) == 1.0, "of earlier runs, before this one knows anything"
    assert pace(("rms", "a")) == 1.25
    pace.add(("base", "a"), 200.0, 100)
    assert pace(("base", "a")) == 2.0
    assert pace(("dpn", "a")) == 3.0, "a ratio of earlier runs"
    pace.add(("base", "b"), 800.0, 100)
    assert pace(("dpn", "b")) == 12.0, "the same multiple of base under another setting"
    assert pace(("dpn", "b"), {("dpn", "b"): 9.0}) == 9.0, "of a trial that runs"
    for seconds in (10, 10, 10, 10, 10, 400):
        pace.add(("base", "b"), seconds, 100)
    assert pace(("base", "b")) == 0.1, "the median of the last ones"
    assert StepTimes()(("base", "a")) is None


@pytest.mark.parametrize(
    ("running", "waiting", "workers", "left"),
    [
        ((), (), 2, 0.0),
        ((), (3, 3, 3), 1, 9.0),
        ((1,), (3, 3), 2, 4.0),
        ((5,), (1, 1), 2, 5.0),
        ((2, 9), (4, 4), 2, 10.0),
    ],
)
def test_free_workers_take_the_next_trial(running, waiting, workers, left):
    assert seconds_left(running, waiting, workers) == left


def line_of(progress, width):
    console = shown.progress_console()
    console.size = (width, 25)
    with console.capture() as captured:
        console.print(progress.bar(width))
    return captured.get()


def made(tmp_path, monkeypatch, **options):
    """The progress of base, dpn and a long name on 2 seeds, and its trials."""
    study = Simulated(tmp_path, monkeypatch, {"base": 1.0, "placement(attn=post,mlp=post)": 1.0, "dpn": 1.0}, 2)
    progress = Progress(study.folder.trial, lambda work: 1500, 1, quiet=True, **options)
    return study, progress, study.left


@pytest.mark.parametrize("width", [80, 62, 120])
def test_the_bar_has_trials_step_and_time_on_one_line(tmp_path, monkeypatch, width):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    study, progress, trials = made(tmp_path, monkeypatch, ended=1100)
    progress.remaining(trials[1:])
    progress.started(trials[0])
    assert "measuring the time" in line_of(progress, width)
    study.now = 900.0
    study.log(trials[0], 1500, 900.0)
    progress.ended(trials[0], None, None)
    progress.remaining(trials[2:])
    progress.started(trials[1])
    study.log(trials[1], 750, 450.0)
    line = line_of(progress, width)
    assert line.count("\n") == 1
    assert len(line.rstrip("\n")) <= width
    assert "━" in line
    assert line.startswith("1101/1106 ")
    assert "step 750/1,500" in line
    assert "about 68 min left" in line
    assert ("placement(attn" in line) is (width >= 80)


def test_without_a_terminal_each_trial_has_one_line(tmp_path, monkeypatch, capsys):
    """... with count, arm, seed, score and time left; those of an earlier run count."""
    study, _, trials = made(tmp_path, monkeypatch)
    monkeypatch.setattr(shown, "_outcome", lambda _, failure, __: f"failed: {failure}" if failure else "top-1 80 %")
    progress = Progress(study.folder.trial, lambda work: 100, 1, quiet=False, ended=3, limit_s=lambda: 240.0)
    for number, (trial, failure, resumed) in enumerate(zip(trials, ("no memory", None, None, None), (0, 0, 60, 0))):
        progress.remaining(trials[number + 1 : 4])
        if resumed:
            study.log(trial, resumed, 1.0)
        progress.started(trial)
        study.now += 100.0
        study.log(trial, 100, 100.0)
        progress.ended(trial, failure, None)
    progress.close()
    names = list(map(str, trials))
    assert capsys.readouterr().err.splitlines() == [
        f"  4 of 7  {names[0]}: failed: no memory  (100 s)",
        f"  5 of 7  {names[1]}: top-1 80 %  (100 s, about 3 min left)",
        f"  6 of 7  {names[2]}: top-1 80 %  (100 s, about 2 min left)",
        f"  7 of 7  {names[3]}: top-1 80 %  (100 s)",
    ]


def test_a_long_first_trial_has_a_line_with_the_time_left(tmp_path, monkeypatch, capsys):
    study, _, trials = made(tmp_path, monkeypatch)
    monkeypatch.setattr(shown, "REFRESH_S", 0.01)
    progress = Progress(study.folder.trial, lambda work: 1500, 1, quiet=False, at_most=True)
    progress.remaining(trials[1:])
    progress.started(trials[0])
    study.log(trials[0], 300, 300.0)
    study.now = 300.0
    text = ""
    for _ in range(1000):
        if text := capsys.readouterr().err:
            break
        progress._closed.wait(0.02)
    progress.close()
    assert text == "base, seed 0, step 300/1,500; up to 2.4 h left for all trials\n"
    assert capsys.readouterr().err == "", "it is printed once"


def test_a_report_takes_at_most_a_fiftieth_of_the_time(monkeypatch):
    clock, written = [0.0], []
    monkeypatch.setattr(shown.time, "monotonic", lambda: clock[0])

    def write(running):
        clock[0] += 3.0
        written.append((clock[0], running))

    report = LiveReport(write)
    for _ in range(2000):
        clock[0] += 1.0
        report.update(6000.0, 1.0)
    assert len(written) > 10
    assert 3.0 * len(written) <= 1.1 * shown.REPORT_SHARE * clock[0]
    running = written[-1][1]
    assert running.left_s == 6000.0
    assert (running.due - running.written).total_seconds() > 2 * 150, "the next one waits for its part of the time"
    count, clock[0] = len(written), clock[0] + 1000.0
    report.update(140.0, 1.0)
    assert len(written) == count, "the final one comes sooner"
    report.stop()
    report.stop()
    assert written[-1][1] is None
    assert written[-2][1] is not None


def test_a_report_that_cannot_be_written_is_a_warning():
    def write(running):
        raise OSError("no space left")

    report = LiveReport(write)
    report._cost_s = -1.0
    with pytest.warns(UserWarning, match="no space left"):
        report.update(1.0, 1.0)
    report.stop()
    assert not report.is_running


@pytest.mark.usefixtures("short_clocks")
def test_the_report_says_that_the_study_runs_and_no_longer_when_it_was_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(shown, "REPORT_SHARE", 1e9)
    out, pages = tmp_path / "study", []

    def ended(self, *arguments):
        seconds = original(self, *arguments)
        pages.append((out / "report.html").read_text() if (out / "report.html").exists() else "")
        if len(pages) == stop_after:
            raise KeyboardInterrupt
        return seconds

    original, stop_after = Progress.ended, 2
    monkeypatch.setattr(Progress, "ended", ended)
    recipe = Recipe().with_(batch_size=64, epochs=1)
    study = Study("mu/4", ["dpn"], "digits", recipe, seeds=2, limit_train=128)
    options = {"workers": 1, "device": "cpu", "progress": False, "cost_seconds": 0}
    with pytest.raises(KeyboardInterrupt):
        study.run(out, **options)
    reload_tag = '<meta http-equiv="refresh"'
    assert [re.search(r"Running: (\d of \d trials)", page)[1] for page in pages] == ["1 of 4 trials", "2 of 4 trials"]
    assert all(reload_tag in page for page in pages)
    assert "the same command resumes it" in pages[0]
    stopped = (out / "report.html").read_text()
    assert "2 of 4 trials finished" in stopped
    assert "Running" not in stopped
    assert reload_tag not in stopped
    stop_after = None
    study.run(out, **options)
    assert "Running: 3 of 4 trials" in pages[2]
    final = (out / "report.html").read_text()
    assert "Running" not in final
    assert reload_tag not in final


def test_the_last_row_may_have_the_lambdas_of_many_heads(tmp_path):
    rows = [{"step": step, "wall_s": 0.5 * step} for step in range(3)]
    rows[2] |= {f"lambda/blocks.{block}.norm1/{head}": 0.123456 for block in range(120) for head in range(12)}
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert shown.last_row(tmp_path / "metrics.jsonl") == {"step": 2, "wall_s": 1.0}
