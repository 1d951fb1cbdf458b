"""What a time budget chooses: model, image size, recipe, epochs and seeds; and that a stored study keeps its own."""

import json
import math
import re
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import vitmods as vm
from vitmods.model.flops import count_macs
from vitmods.stats.sequential import INTERIM_LEVEL
from vitmods.study import Answer, Study, choice
from vitmods.study.budget import Budget, make_budget, slowdown
from vitmods.study.defaults import DIGITS, Defaults, RecipeChoice
from vitmods.study.executors import StudyOptions
from vitmods.study.schedule import TrialSchedule
from vitmods.study.settings import Rung
from vitmods.study.stopwatch import Pace, Stopwatch
from vitmods.tasks import Classification
from vitmods.util.errors import UserError
from vitmods.util.text import duration

pytestmark = pytest.mark.usefixtures("short_clocks")

FASTER = choice.faster_options
RUN = {"workers": 1, "device": "cpu", "progress": False, "cost_seconds": 0}
PHOTOS = Defaults("Ti/16", 224, images=1960, side=400)
LADDER = [("Ti/16", (224,)), ("Ti/16", (128,)), ("Ti/8", (64,)), ("mu6/8", (64,)), ("mu3/4", (32,))]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """240 photos of 60 to 90 px; the brightness tells the two classes apart."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("images") / "photos"
    for i in range(240):
        path = folder / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 156, (60 + i % 30, 90, 3)) + 100 * (i % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    return str(folder)


@pytest.mark.parametrize(
    ("defaults", "base", "img_size", "expected"),
    [
        (PHOTOS, None, None, LADDER),
        (Defaults("Ti/8", 96), None, None, [("Ti/8", (96,)), *LADDER[2:]]),
        (Defaults("Ti/4", 32), None, None, [("Ti/4", (32,)), ("mu6/4", (32,)), ("mu3/4", (32,))]),
        (PHOTOS, None, (96, 128), [("Ti/8", (96, 128)), ("mu6/8", (96, 128)), ("mu3/8", (96, 128))]),
        (PHOTOS, "S/16", None, [("S/16", (side,)) for side in (224, 128, 64)]),
        (PHOTOS, "timm:pvt_v2_b0", None, [("timm:pvt_v2_b0", (224,))]),
        (PHOTOS, "S/16", (64,), [("S/16", (64,))]),
        (DIGITS, None, None, [("mu3/2", (8,))]),
    ],
)
def test_models_and_sizes_go_down_and_what_is_given_stays(defaults, base, img_size, expected):
    assert defaults.rungs(base, img_size) == expected


@pytest.mark.parametrize(
    ("images", "side", "pixels", "overrides", "recipe", "epochs", "batch_size"),
    [
        (1960, 224, {}, {}, "small_data", 30, 32),
        (210, 32, {}, {}, "small_data", 100, 32),  # 600 steps of 6 an epoch
        (210, 32, {}, {"epochs": 8}, "small_data", 8, 32),
        (20_000, 32, {}, {}, "small_images", 30, 64),
        (20_000, 224, {}, {}, "default", 30, 64),
        (300, 224, {"mean": (0.5,) * 3}, {}, "finetune", 67, 32),
        (20_000, 224, {"mean": (0.5,) * 3}, {}, "finetune", 20, 64),
    ],
)
def test_the_recipe_follows_what_is_trained(images, side, pixels, overrides, recipe, epochs, batch_size):
    defaults = replace(PHOTOS, images=images)
    made, note = RecipeChoice(None, overrides).resolve(Classification, defaults, side, "Ti/16", pixels)
    assert note.startswith(f"Recipe {recipe}")
    assert (made.epochs, made.batch_size) == (epochs, batch_size)
    heavy = images > 10_000 and side > 128
    assert (made.augment.randaugment is not None, made.augment.mixup > 0) == (heavy, heavy)
    given, note = RecipeChoice("default").resolve(Classification, defaults, side, "Ti/16", {})
    assert (given, note) == (vm.recipes.default(), "")


class Clock:
    """In place of timed steps: a training of `images` views by base and each arm takes `image_s` seconds a view."""

    def __init__(self, monkeypatch, image_s):
        def pace(stopwatch, steps, largest, place):
            config = steps.model.vit_config
            return Pace(image_s[config.embed_dim > 100, max(config.img_size)], 0.0, 0.0)

        def time_steps(rung, trials, options, stopwatch):
            rows = rung.settings.fixed["img_size"][0]
            seconds = image_s[rung.settings.fixed["base"].startswith("Ti"), rows]
            self.tried.append((rung.settings.fixed["base"], rows))
            return trials * rung.settings.recipe.batch_size * seconds

        self.tried = []
        monkeypatch.setattr(Budget, "left_s", property(lambda budget: budget.seconds or math.inf))  # none has passed
        monkeypatch.setattr(Stopwatch, "_measured", pace)
        monkeypatch.setattr(Stopwatch, "_read", lambda *_: (0.0, 0.0))
        monkeypatch.setattr(choice, "time_steps", time_steps)
        monkeypatch.setattr("vitmods.study.estimate.slowdown", lambda: 1.0)
        monkeypatch.setattr(choice, "faster_options", lambda *_: iter(()))


@pytest.mark.parametrize("machine", [1, 40])
def test_timing_takes_a_part_of_the_budget_on_a_busy_machine_too(monkeypatch, photos, capsys, machine):
    """The clock is played: a measurement takes half a second of a free machine. What is not timed follows from
    multiply-adds, and where the time went is said."""
    clock, timed = SimpleNamespace(now=0.0), []

    def measured(stopwatch, steps, largest, place):
        clock.now += 0.5 * machine
        timed.append(place)
        return Pace(1e-12 * machine * count_macs(steps.model.vit_config), 0.0, 0.0)

    monkeypatch.setattr("vitmods.study.budget.time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(Stopwatch, "_measured", measured)
    monkeypatch.setattr(Stopwatch, "_seconds_each", lambda *_: setattr(clock, "now", clock.now + 0.1 * machine) or 0.0)
    step = (1, 2)
    monkeypatch.setattr(choice, "time_step", lambda *_, **__: setattr(clock, "now", clock.now + 0.5 * machine) or step)
    monkeypatch.setattr("vitmods.study.estimate.slowdown", lambda: 1.0)
    budget = make_budget("4m")
    planned = Study(arms=["dpn", "rms", "layerscale"], data=photos, budget=budget).dry_run(**{**RUN, "progress": True})
    assert clock.now <= 0.15 * 240
    assert sum(budget.timings) == pytest.approx(clock.now)
    assert len(timed) == (1 if machine == 40 else 4), "nothing is timed twice"
    assert planned.refused is None
    assert planned.total_s > 60, "most of the time is left for trials"
    assert all(arm.trial_s > 1 for arm in planned.arms)
    assert budget.spent() == f"Of 4 min, timing took {duration(clock.now)}, and reading images and building models 0 s."
    assert planned.spent.startswith("Of 4 min, timing took ")


def short_study(arms=("rms",), steps=2, **options):
    recipe = vm.recipes.digits().with_(steps=steps, warmup_epochs=None, warmup_steps=0)
    return Study("mu1/4", arms, "digits", recipe, **options)


def test_a_budget_without_time_for_a_trial_says_where_it_went(monkeypatch, tmp_path, capsys):
    budget = Budget(60.0)
    object.__setattr__(budget, "began", budget.began - 58)
    budget.timings.append(50.0)
    answer = short_study(seeds=2).run(tmp_path, budget=budget, **{**RUN, "progress": True})
    assert not any(trial.ended for trial in answer.trials)
    text = capsys.readouterr().err
    expected = (
        r"No time was left for a trial. Of 60 s, timing took (\S+) s, and reading images and building models (\S+) s"
    )
    timed_s, other_s = map(float, re.search(expected, text).groups())
    assert timed_s >= 50
    assert other_s >= 7.9


# 168 training images: 5 steps of 32 an epoch, 120 epochs for 600 steps; 12 trials of 19,200 views
@pytest.mark.parametrize(
    ("budget", "seconds", "options", "base", "side", "epochs", "seeds"),
    [
        ("100h", {(True, 64): 0.01}, {}, "Ti/8", 64, range(120, 157), range(5, 1000)),
        ("30m", {(True, 64): 0.01}, {}, "Ti/8", 64, range(60, 110), [5]),
        (
            "73m",
            {(True, 64): 0.01},
            {"recipe": RecipeChoice("deit", {"batch_size": 32}), "seeds": 3},
            "Ti/8",
            64,
            range(150, 300),
            [3],
        ),
        ("10m", {(True, 64): 0.01, (False, 64): 0.002}, {}, "mu6/8", 64, range(105, 120), [5]),
        ("10m", {(True, 64): 0.1, (False, 64): 0.1, (False, 32): 0.01}, {}, "mu3/4", 32, range(20, 45), [5]),
        ("10m", {(True, 64): 0.001}, {"recipe": "plain"}, "Ti/8", 64, range(60, 200), range(5, 50)),
        ("10m", {(True, 32): 0.1, (False, 32): 0.001}, {"img_size": 32}, "mu6/4", 32, range(120, 157), range(4, 12)),
        ("10m", {(True, 64): 0.002}, {"base": "Ti/8"}, "Ti/8", 64, range(105, 120), [5]),
        ("10m", {(True, 64): 0.001}, {"seeds": [3, 7]}, "Ti/8", 64, range(120, 157), [2]),
        ("10m", {(True, 64): 0.001}, {"until_decided": True}, "Ti/8", 64, [120], [8, 9]),
    ],
)
def test_a_budget_takes_the_first_that_fits(
    monkeypatch, photos, capsys, budget, seconds, options, base, side, epochs, seeds
):
    clock = Clock(monkeypatch, seconds)
    study = Study(arms=["dpn", "rms"], data=photos, budget=budget, **options)
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        planned = study.dry_run(**{**RUN, "cost_seconds": 30, "progress": True})
    timed = [line.split(" a step")[0] for line in capsys.readouterr().err.splitlines() if line.startswith("  1 of 3")]
    assert timed
    assert len(timed) == len(set(timed)), "once for each base and size"
    texts = [str(warning.message) for warning in issued]
    assert len(texts) == len(set(texts)), "those of the study that is chosen"
    fixed = planned.settings.fixed
    assert (fixed["base"], fixed["img_size"]) == (base, [side, side]), clock.tried
    assert min(planned.steps.values()) // 5 in epochs
    assert len(planned.settings.seeds) in seeds
    if isinstance(options.get("seeds"), list):
        assert [*planned.settings.seeds] == options["seeds"]
    assert planned.refused is None
    assert planned.total_s <= planned.available_s < 0.97 * planned.budget_s
    safe = [planned.seconds(choice.CHOSEN_SEEDS), planned.total_s][planned.safe_seeds is None]
    assert safe <= planned.safe_s < 0.92 * planned.budget_s
    recipe = planned.settings.recipe
    assert min(planned.steps.values()) == (recipe.steps or recipe.epochs * (168 // recipe.batch_size))
    if not options:
        assert planned.total_s > 0.9 * planned.budget_s, "little time is left over"
    assert "±" in planned.decides()


def test_a_budget_adds_seeds_after_the_first_one_of_the_study(monkeypatch, photos):
    """Those of a confirmation are not 0, 1, ..., which chose what it confirms."""
    Clock(monkeypatch, {(True, 64): 0.001})
    study = Study(arms=["dpn"], data=photos, budget="20m")
    study.settings = replace(study.settings, seeds=tuple(range(5000, 5005)))
    seeds = study.dry_run(**RUN).settings.seeds
    assert seeds == tuple(range(5000, 5000 + len(seeds)))
    assert len(seeds) > 5


@pytest.mark.parametrize(
    ("options", "steps", "says"),
    [
        ({}, range(20, 80), "Chosen, as it fits 60 s: mu3/2 at 8 px, "),  # 19 steps of 0.064 s in an epoch
        ({"recipe": RecipeChoice(None, {"steps": 50}), "seeds": 30}, [50], "Nothing fits 60 s, not even mu3/2 at 8 px"),
        ({"sweep": {"epochs": [1, 40]}}, [19], "Nothing fits 60 s"),
    ],
)
@pytest.mark.filterwarnings("ignore:A trial has .. steps in this budget")
def test_a_set_that_is_counted_when_it_is_read_has_a_training_that_fits(monkeypatch, capsys, options, steps, says):
    Clock(monkeypatch, {(False, 8): 0.001})
    planned = Study(None, ["dpn"], "digits", **options).dry_run(budget="60s", **{**RUN, "progress": True})
    assert min(planned.steps.values()) in steps
    assert says in capsys.readouterr().err


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """A study of base alone with two trials, and a smaller one of another length."""
    folder = tmp_path_factory.mktemp("references")
    for name, seeds, steps in (("small", 1, 2), ("large", 2, 3)):
        short_study(None, steps, seeds=seeds).run(folder / name, **RUN)
    return folder


@pytest.mark.parametrize(
    ("options", "base", "says"),
    [
        ({}, "mu1/4", "Chosen, to reuse 2 trials of base, as in {}/large: mu1/4 at 8 px, 3 steps, 3 seeds. Set"),
        (
            {"recipe": RecipeChoice(None, {"steps": 2})},
            "mu3/2",
            ": mu3/2 at 8 px, 2 steps, 3 seeds. Recipe digits with",
        ),
        ({"base": "mu1/2"}, "mu1/2", ": mu1/2 at 8 px, 52 epochs, 3 seeds. Recipe digits:"),
        ({"folds": 3}, "mu3/2", ": mu3/2 at 8 px, 52 epochs, 3 seeds. Recipe digits:"),
        ({"seeds": 200, "budget": "5s"}, "mu3/2", "Not reused, 2 trials of base, as in {}/large: the arms do not fit"),
    ],
)
def test_a_budget_extends_a_reference_that_fits(monkeypatch, references, capsys, options, base, says):
    """Of two the one with more trials. What is given stays."""
    Clock(monkeypatch, {(False, 8): 0.01})
    given = {"base": None, "arms": ["rms"], "data": "digits", "seeds": 3, "budget": "100h", **options}
    planned = Study(**given, reuse=[references]).dry_run(references / "new", **{**RUN, "progress": True})
    assert planned.settings.fixed["base"] == base
    assert says.format(references) in capsys.readouterr().err
    assert sum(planned.reused.values()) == 2 * (base == "mu1/4")


def test_a_budget_chooses_nothing_of_base_alone_and_the_seeds_of_looks_of_a_factorial_study(monkeypatch):
    Clock(monkeypatch, {(False, 8): 0.001})
    alone = Study(None, None, "digits", seeds=16)
    planned = alone.dry_run(budget="60s", **RUN)
    assert planned.steps == alone.dry_run(**RUN).steps
    assert "16 seeds of base in about " in str(planned)
    study = Study("mu1/4", ["dpn", "rms"], "digits", design="factorial", until_decided=True)
    planned = study.dry_run(budget="100trials", **RUN)
    assert len(planned.settings.seeds) == 8
    assert planned.refused is None


def test_what_fits_nothing_is_said_with_the_arithmetic(monkeypatch, photos, tmp_path):
    Clock(monkeypatch, dict.fromkeys([(True, 64), (False, 64), (False, 32)], 10.0))
    planned = Study(None, ["dpn", "rms"], photos, budget="1m").dry_run(**RUN)
    assert "2 arms and base x 4 seeds take" in str(planned.refused)
    assert planned.settings.recipe.steps == choice.FEWEST_STEPS
    # 12 trials of 300 steps of 32 views at 10 s, or what the images allow
    enough = re.search(r'budget="(\d+)m" is enough', planned.suggestion)
    assert planned.total_s / 60 < int(enough[1]) < 1.5 * planned.total_s / 60
    for start in ("run", "pilot"):
        with pytest.raises(UserError, match=rf'budget="{enough[1]}m" is enough'):
            getattr(Study(None, ["dpn", "rms"], photos, budget="1m"), start)(tmp_path / start, **RUN)
    given = Study("Ti/8", ["dpn"], photos, "plain(epochs=9)", img_size=64).dry_run(budget="1m", **RUN)
    assert (given.settings.recipe.epochs, given.settings.fixed["base"]) == (9, "Ti/8")
    new = 'A new one with budget="2h" and without base, img_size and recipe takes values that fit'
    assert new in str(given).replace("\n", " ")


def test_a_real_budget_trains_a_study_that_is_resumed_as_it_is_stored(monkeypatch, photos, tmp_path, said, refused):
    """The second run, on a machine of another speed, chooses nothing; and one without a budget continues it too."""
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **how: None)  # which a long budget tries
    monkeypatch.chdir(tmp_path)
    limits = "--limit-train 64 --batch-size 8 --steps 3 --seeds 2 --device cpu --workers 1 --cost-seconds 0"
    command = f"compare --data {photos} --arms rms {limits}"
    text = said(f"{command} --img-size 16 --budget 100h").err
    assert ": Ti/4 at 16 px, 3 steps, 2 seeds. Recipe small_data with " in text
    assert "64 training images at 16 px are few. Set --base, --recipe and --seeds to choose otherwise." in text
    (folder,) = Path("runs").iterdir()
    stored = json.loads((folder / "study.json").read_text())
    assert stored["command"].endswith(f" --out {folder}"), "without the budget it would name another folder"
    command += f" --out {folder}"
    Clock(monkeypatch, {})  # a KeyError for every model that is timed
    for budget in ("--budget 100h", ""):
        said(f"{command} --img-size 16 {budget}")
        again = json.loads((folder / "study.json").read_text())
        assert again["settings"] == stored["settings"]
    assert "img_size" in refused(f"{command} --img-size 32")


@pytest.fixture
def three_seeds(monkeypatch):
    """... are planned by any budget."""
    monkeypatch.setattr("vitmods.study.estimate.fit_to_budget", lambda budget, planned, least: replace(
        planned, settings=replace(planned.settings, seeds=(0, 1, 2)), budget_s=budget.seconds
    ))  # fmt: skip


@pytest.mark.usefixtures("three_seeds")
@pytest.mark.parametrize(("affordable", "done"), [(2, 2), (3, 3), (9, 6)])
def test_seeds_follow_the_time_that_trials_take(monkeypatch, tmp_path, capsys, affordable, done):
    """As many are recorded as the budget lasts for, twice as many as planned at most. Trials of seeds that were not
    planned are counted from their start on."""
    affords = TrialSchedule._affordable
    monkeypatch.setattr(TrialSchedule, "_affordable", lambda self, work: work.seed < affordable and affords(self, work))
    answer = short_study().run(tmp_path / "study", budget="59m", **{**RUN, "progress": True})
    lines = capsys.readouterr().err
    says = f"The budget lasted for {done} seeds instead of 3."
    assert set(answer.headline.effects) == {"rms"}
    assert [line for line in lines.splitlines() if "budget lasted" in line] == [says] * (done != 3)
    stored = json.loads((tmp_path / "study" / "study.json").read_text())
    assert (stored["settings"]["seeds"], stored["plan"]["seeds"]) == ([*range(done)], done)
    counts = re.findall(r"(\d+) of (\d+)  (?:base|rms), seed", lines)
    assert counts[:2] == [("1", "6"), ("2", "6")]
    assert counts[-1][0] == str(2 * done)
    assert (tmp_path / "study" / "results.json").exists()


@pytest.mark.usefixtures("three_seeds")
def test_until_its_seeds_are_settled_a_budget_is_read_so_far(monkeypatch, tmp_path):
    """Also after Ctrl-C: all trials that ended are shown, as of a study that is read before it is complete."""
    study, taken = short_study(), TrialSchedule.take

    def interrupted(self):
        work = taken(self)
        if work is not None and work.seed == 4:
            raise KeyboardInterrupt
        return work

    with monkeypatch.context() as patched:
        patched.setattr(TrialSchedule, "take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            study.run(tmp_path / "study", budget="59m", **RUN)
    stopped = Answer.load(tmp_path / "study")
    assert list(stopped.base.scores) == [0, 1, 2, 3]
    assert [trial.status for trial in stopped.trials] == ["finished"] * 8
    assert stopped["rms"].provisional
    assert stopped.decision.alpha == INTERIM_LEVEL * (4 / 6) ** 2
    assert not stopped.complete
    settled = study.run(tmp_path / "study", **RUN)
    assert settled.complete
    assert (len(settled.base.scores), settled.decision.alpha, settled["rms"].provisional) == (4, 0.05, False)
    assert not any("shown before" in doubt for doubt in settled.doubts)
    assert Answer.load(tmp_path / "study").decision.alpha == 0.05


def test_a_machine_that_others_use_is_slower(monkeypatch):
    clock = SimpleNamespace(now=0.0, used=0.0)

    def process_time():
        clock.now, clock.used = clock.now + 0.04, clock.used + 0.01
        return clock.used

    monkeypatch.setattr("vitmods.study.budget.TRIED_S", 0.1)
    monkeypatch.setattr(time, "process_time", process_time)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    assert slowdown() == pytest.approx(4, rel=0.2)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.used)
    assert slowdown() == pytest.approx(1, rel=0.2)


@pytest.fixture(scope="module")
def planned(photos):
    with pytest.MonkeyPatch.context() as patched:
        Clock(patched, {(True, 64): 0.01, (False, 64): 0.002})
        return Study(arms=["dpn"], data=photos, budget="10m").dry_run(**RUN)


@pytest.mark.parametrize(
    ("bf16", "compiled", "options", "given", "offered"),
    [
        (0.6, 0.5, {}, (), "--precision bf16-mixed takes 0.60 of the time of a step."),
        (0.9, 0.7, {}, (), "--compile takes 0.70 of the time of a step, after about a minute for each arm."),
        (0.6, 0.7, {}, ("precision",), "--compile takes 0.70 of the time"),
        (0.9, 0.9, {}, (), ""),
        (0.9, 0.7, {"budget": "30m"}, (), ""),
        (0.9, 0.7, {"compile": True}, (), ""),
        (0.9, 0.7, {"recompute": True}, (), ""),
    ],
)
def test_faster_options_are_offered_where_they_pay(monkeypatch, planned, bf16, compiled, options, given, offered):
    def time_step(settings, options, num_classes, arm, part=0, way=choice.AS_NOW):
        assert part in (0, 16), "steps of other batches are compared"
        assert arm == "base"
        return compiled if way.compiled else bf16 if settings.recipe.precision == "bf16-mixed" else 1.0, 16

    monkeypatch.setattr(choice, "time_step", time_step)
    settings = replace(planned.settings, open=planned.settings.open - {*given})
    dataset, options = SimpleNamespace(num_classes=2), {"budget": "2h", **options}
    budget = make_budget(options.pop("budget"))
    study = SimpleNamespace(settings=settings, options=StudyOptions(device="cpu", **options), dataset=dataset)
    text = " ".join(FASTER(study, budget))
    assert text.startswith(offered)
    assert bool(text) == bool(offered)


@pytest.mark.parametrize(
    ("changed", "cached", "offers"),
    [
        ({}, ["w1", "w2", "w3", "w4"], "240 training images are few.*--from w1, w2, w3 and 1 more"),
        ({}, [], ""),
        ({"images": 20_000}, ["w1"], ""),
        ({"side": 32}, ["w1"], ""),
        ({"img_size": [64, 64]}, ["w1"], ""),  # the arms' warnings name weights of this size
        ({"in_chans": 1}, ["w1"], ""),
        ({"open": frozenset()}, ["w1"], ""),
    ],
)
def test_weights_on_this_machine_are_offered_to_few_photographs(monkeypatch, planned, changed, cached, offers):
    monkeypatch.setattr(choice, "cached_checkpoints", lambda: cached)
    fields = {name: changed[name] for name in ("base", "img_size", "in_chans") if name in changed}
    fields = {**planned.settings.fixed, "base": "mu3/4", "img_size": [32, 32], **fields}
    settings = replace(planned.settings, fixed=fields, open=changed.get("open", planned.settings.open | {"base"}))
    rung = Rung(settings, "", changed.get("images", 240), changed.get("side", 90))
    text = " ".join(choice.weights_here(rung))
    assert re.match(offers, text) if offers else not text


def test_a_training_that_is_too_short_is_reported_before_it_begins(planned):
    settings = replace(planned.settings, seeds=tuple(range(5)))
    arms = tuple(replace(arm, trials=5, trial_s=60.0) for arm in planned.arms)  # ten minutes for base and an arm
    short = replace(planned, settings=settings, steps={"": 100}, arms=arms, parallel=1, reserve_s=0.0)
    said = "A trial has 100 steps in this budget, .* fewer than 300: .*About 30 minutes, fewer arms"
    assert re.match(said, choice.too_short(short))
    assert choice.too_short(replace(short, steps={"": 299}))
    assert not choice.too_short(replace(short, steps={"": 300}))
    assert not choice.too_short(replace(short, settings=replace(settings, open=settings.open - {"epochs"})))


@pytest.mark.parametrize(
    ("recipe", "length", "warmup"),
    [
        ("swin", {"epochs": 40}, (10.0, None)),  # a quarter
        ("swin", {"steps": 80}, (None, 5)),  # of 300 epochs it is 20
        ("swin(warmup_epochs=3)", {"epochs": 40}, (3.0, None)),  # as given
        ("deit", {"epochs": 100}, (5.0, None)),  # the recipe's
    ],
)
def test_a_warm_up_that_was_not_given_fits_the_length_that_a_budget_chooses(recipe, length, warmup):
    study = Study("mu2/2", ["dpn"], "digits", recipe=recipe)
    chosen = choice.with_length(study.settings, length, 4096)
    schedule = chosen.recipe.schedule
    assert (schedule.warmup_epochs, schedule.warmup_steps) == warmup
    assert study.settings.continuing(chosen.to_dict()).recipe == chosen.recipe
    with_given = Study("mu2/2", ["dpn"], "digits", recipe=RecipeChoice("swin", {"epochs": 15})).settings
    assert with_given.continuing(chosen.to_dict()).recipe == with_given.recipe  # nothing of a stored length is mixed in
