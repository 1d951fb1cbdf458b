"""What a time budget chooses: model, image size, recipe and length of a training, so that base learns and enough seeds
fit.

The largest model and images come first. Fewer pixels and shorter trainings are worse than fewer seeds, as long as
there are five seeds; a training of too few steps to learn is the last resort, and is reported before it begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vitmods.adapters.files import cached_checkpoints
from vitmods.bench import seconds_per_call
from vitmods.recipes import Recipe
from vitmods.recipes.recipe import Precision
from vitmods.recipes.schedule import WARMUPS, overridden
from vitmods.study.arms import BASE
from vitmods.study.budget import Budget, NotInTime
from vitmods.study.cost import Steps
from vitmods.study.defaults import SMALL_SET
from vitmods.study.estimate import Estimate, estimate
from vitmods.study.executors import StudyOptions
from vitmods.study.grid import AS_IS
from vitmods.study.prepare import (
    PHOTOGRAPH,
    PreparedStudy,
    build_arms,
    open_study,
    parallel_trials,
    say,
    threads_for,
    trained_weights,
    workers_for,
)
from vitmods.study.reuse import Pool, find_studies
from vitmods.study.settings import Rung, Settings, differences
from vitmods.study.stopwatch import CALL_S, Stopwatch, as_a_worker
from vitmods.study.store import StudyFolder
from vitmods.study.trial import TrialRunner, already_reported, base_config, task_of
from vitmods.tasks.base import TASKS
from vitmods.train.device import resolve as device_of
from vitmods.train.device import tf32_products
from vitmods.util.address import named
from vitmods.util.errors import UserError
from vitmods.util.text import about, duration, first_of, listing, plural

CHOSEN_SEEDS = 4  # at least
SAFE_SEEDS = 5  # one more, for trials that are slower than planned
FEWEST_STEPS = 20  # that are tried at all
LEARNING_STEPS = 300  # with fewer, small ViTs from scratch stay near the best constant prediction
MANY_EPOCHS = 10  # trainings of fewer are counted in steps, which are finer
SHORTER = 0.9  # at most, times a training that does not fit
MOST_LONGER = 1.3  # times the length of a training, if a budget leaves time
LEAST_BYTES = 600 * 2**20  # of a trial
USUAL_CLASSES = 10
WORTHWHILE = 0.85  # of the time of a step, with another precision or compiled
COMPILED_FROM_S = 3600.0  # a budget in which compiling, about a minute an arm, may pay
Length = Mapping[str, int]
"""epochs or steps of a training, as fields of a recipe"""


def choose(
    rungs: Sequence[Rung],
    folder: StudyFolder,
    options: StudyOptions,
    budget: Budget,
    command: str | None,
) -> tuple[PreparedStudy, Estimate]:
    """Open the study that extends a reference, or else the first one of the rungs that fits a time budget, with its
    whole training or half of it, and estimate it.

    Of the last rung the training is as long as fits. If nothing fits, the estimate has the reason.

    rungs: from the largest to the smallest.
    """
    if (extended := extend_reference(rungs[0].settings, folder, options, budget, command)) is not None:
        return extended
    if not rungs[-1].images:  # nobody knows before they are read; the last images are the smallest
        settings = rungs[-1].settings
        dataset = TrialRunner(folder, settings.measure, options).dataset(settings.cell(BASE))
        rungs = [rung._replace(images=len(dataset.splits["train"])) for rung in rungs]
    rungs, precision = with_fast_precision(rungs, options, budget)
    stopwatch = Stopwatch(TrialRunner(folder, rungs[0].settings.measure, options), device_of(options.device), budget)
    stopwatch.processes = options.processes
    for rung in rungs:
        settings, is_last = rung.settings, rung is rungs[-1]
        seeds = len(settings.seeds) if settings.is_settled else CHOSEN_SEEDS
        step_s = time_steps(rung, seeds * len(settings.every_arm), options, stopwatch)
        longest = whole_length(rung)
        most_steps = steps = steps_of(with_length(settings, longest, rung.images).recipe, rung.images)
        length: Length | None = longest
        longer: Estimate | None = None
        is_printed = False
        while length is not None:
            shorter = halve(length, rung) if length and not is_last and steps == most_steps else None
            if is_last or step_s * steps <= budget.left_s:  # else the images need not be read at this size
                study = open_study(folder, with_length(settings, length, rung.images), options)
                planned = estimate(study, budget, command, CHOSEN_SEEDS, stopwatch=stopwatch, quiet=is_printed)
                is_printed = True
                fits = planned.refused is None and planned.in_time(len(planned.settings.seeds))
                if is_last and length and not fits:
                    shorter, longer = shorten(planned, seeds, longer), planned
                if fits or (is_last and shorter is None):
                    if fits and length and not settings.until_decided:
                        planned = use_whole_budget(planned, length, most_steps / max(steps, 1), rung.images)
                    if text := too_short(planned) if fits else "":
                        study = replace(study, notices=(*study.notices, text))
                    study = replace(study, settings=planned.settings)
                    reason = f"as it fits {duration(planned.budget_s or 0)}" if fits else ""
                    choice = describe_choice(planned, reason, rung.recipe_note, command is not None)
                    if not fits and budget.seeds_follow:
                        raise NotInTime(f"{choice} Give a longer budget (--budget).")
                    lines = [*weights_here(rung), choice, precision, *faster_options(study, budget)]
                    say(options, " ".join(filter(None, lines)))
                    return study, planned
            length = shorter
            steps = steps_of(with_length(settings, length, rung.images).recipe, rung.images) if length else 0
    raise AssertionError("a study without rungs")


def extend_reference(
    settings: Settings,
    folder: StudyFolder,
    options: StudyOptions,
    budget: Budget,
    command: str | None,
) -> tuple[PreparedStudy, Estimate] | None:
    """Open the study that takes its open settings from a reference (`vitmods base`) and reuses its trials; None if
    there is none, or if it does not fit the budget. Of several references the one with the most trials counts."""
    references: list[tuple[int, str, Settings]] = []
    for other, _ in find_studies(folder, settings.reuse, settings.no_reuse or bool(options.record)):
        with suppress(UserError, LookupError):  # damaged, or of another version
            recorded = other.known_facts().settings
            extended = settings.continuing(recorded)
            as_recorded = {**recorded, "seeds": []}  # the study need not have as many
            is_same = not differences(as_recorded, {**extended.to_dict(), "images": recorded["images"]})
            if is_same and not recorded["arms"]:
                references.append((len(recorded["seeds"]), named(other.path), extended))
    for _, place, extended in sorted(references, key=lambda reference: -reference[0]):
        study = open_study(folder, extended, options)
        pool = Pool(study)
        study = pool.with_known_base(study)
        if not study.settings.known:
            continue
        planned = estimate(study, budget, command, CHOSEN_SEEDS, pool)
        trials = f"{plural(study.settings.known, 'trial')} of base, as in {place}"
        if planned.refused is None and planned.in_time(len(planned.settings.seeds)):
            study = replace(study, settings=planned.settings)
            say(options, describe_choice(planned, f"to reuse {trials}", "", command is not None))
            return study, planned
        say(options, f"Not reused, {trials}: the arms do not fit {duration(budget.seconds or 0)} with its settings.")
        break
    return None


def with_length(settings: Settings, length: Length, images: int) -> Settings:
    """Return the study with another length of training on so many images. A warm-up that was not given fits it."""
    if not length:
        return settings
    warmup = {name: getattr(settings.recipe.schedule, name) for name in WARMUPS if name not in settings.open}
    return settings.with_recipe(**overridden(settings.recipe, {**length, **warmup}, images).settings())


def whole_length(rung: Rung) -> Length:
    """Return the epochs of the recipe, or more if these are too few steps to learn; empty: the length was given, or a
    grid of the study sets it."""
    settings, recipe = rung.settings, rung.settings.recipe
    in_grids = {*settings.sweep.to_dict(), *settings.tune.to_dict()}
    if "epochs" not in settings.open or recipe.steps is not None or in_grids & {"epochs", "steps"}:
        return {}
    enough = math.ceil(LEARNING_STEPS / max(1, rung.images // recipe.batch_size)) if rung.images else 0
    return {"epochs": max(recipe.epochs, enough)}


def halve(length: Length, rung: Rung) -> Length | None:
    """Return half of the epochs; None if these are too few steps to learn."""
    half = {"epochs": length["epochs"] // 2}
    recipe = with_length(rung.settings, half, rung.images).recipe if half["epochs"] else None
    return half if recipe is not None and steps_of(recipe, rung.images) >= LEARNING_STEPS else None


def shorten(planned: Estimate, seeds: int, longer: Estimate | None = None) -> Length | None:
    """Return about the training with which so many seeds fit, or SAFE_SEEDS if none are given, in epochs or, for a few
    epochs, in steps; None if it was the shortest already.

    longer: the estimate of a longer training. With it, what does not become shorter (models, files, a last evaluation)
    is known.
    """
    per_epoch = max(1, planned.dataset["train"] // planned.settings.recipe.batch_size)
    steps = min(planned.steps.values())
    if steps <= FEWEST_STEPS:
        return None
    seeds, available_s = (seeds, planned.safe_s) if planned.settings.is_settled else (SAFE_SEEDS, planned.available_s)
    needed_s = training_s = max(planned.seconds(seeds), 1e-9)
    if longer is not None and (saved := min(longer.steps.values()) - steps) > 0:
        training_s = max(longer.seconds(seeds) - needed_s, 1e-9) * steps / saved
    times = min(1 - (needed_s - available_s) / training_s, SHORTER)
    shorter = max(int(times * steps), FEWEST_STEPS)
    return {"epochs": shorter // per_epoch} if shorter >= MANY_EPOCHS * per_epoch else {"steps": shorter}


def steps_of(recipe: Recipe, images: int) -> int:
    """Count the steps of a training on so many images; 0 if it is unknown."""
    return recipe.steps or recipe.epochs * (images // recipe.batch_size)


def time_steps(rung: Rung, trials: int, options: StudyOptions, stopwatch: Stopwatch) -> float:
    """Time steps of base on noise: seconds of a step of so many trials, without reading; 0 if unknown."""
    settings = rung.settings
    if settings.sweep or rung.images < settings.recipe.batch_size:
        return 0.0
    parallel = min(workers_for(options, trials, LEAST_BYTES), parallel_trials(options))
    cell, model = next(build_arms(settings, AS_IS, USUAL_CLASSES))
    beside = parallel * options.processes if stopwatch.budget.may_time else 1
    with as_a_worker(stopwatch.device, beside, threads_for(options, LEAST_BYTES)), already_reported():
        pace = stopwatch.pace(cell, model, USUAL_CLASSES)
    return trials / parallel * cell.recipe.batch_size / options.processes * pace.image_s


def use_whole_budget(planned: Estimate, length: Length, most_times: float, images: int) -> Estimate:
    """Scale the length of trainings so that they fill the budget.

    A fifth seed makes four certain if trials are late, and costs a sixth of the length at most. Of trainings that were
    shortened, more than SAFE_SEEDS seeds give their time to longer trainings.

    most_times: the whole training, in lengths of this one. images: of training.
    """
    settings, steps, ((name, count),) = planned.settings, min(planned.steps.values()), length.items()
    seeds, most_longer, available_s = len(settings.seeds), MOST_LONGER, planned.safe_s
    if not settings.is_settled:
        with_spare = planned.available_s / max(planned.seconds(SAFE_SEEDS), 1e-9)
        if seeds > SAFE_SEEDS and most_times > 1:
            seeds, most_longer = SAFE_SEEDS, most_times
        elif seeds < SAFE_SEEDS and not with_spare * steps < LEARNING_STEPS <= steps:
            seeds = SAFE_SEEDS
        available_s = planned.available_s if seeds >= SAFE_SEEDS else planned.safe_s
    times = min(available_s / max(planned.seconds(seeds), 1e-9), most_longer)
    if name == "epochs" and count * times < MANY_EPOCHS:
        name, count = "steps", steps
    longer = max(1, int(count * times))
    times = longer / count
    arms = [
        replace(arm, trial_s=times * arm.trial_s, alone_s=times * arm.alone_s, trials=trials)
        for arm, trials in zip(planned.arms, planned.trials(seeds), strict=True)
    ]
    steps_now = {setting: int(times * steps_there) for setting, steps_there in planned.steps.items()}
    settings = settings if settings.is_settled else replace(settings, seeds=settings.first_seeds(seeds))
    settings = with_length(settings, {name: longer}, images)
    return replace(planned, settings=settings, arms=tuple(arms), steps=steps_now)


def too_short(planned: Estimate) -> str:
    """Report before training that new weights are unlikely to learn, and what would change that; empty if the training
    is long enough, or its length was given."""
    settings, steps = planned.settings, min(planned.steps.values())
    if steps >= LEARNING_STEPS or "start" in settings.fixed or "epochs" not in settings.open:
        return ""
    needed_s = planned.reserve_s + planned.total_s * LEARNING_STEPS / steps
    minutes = plural(about(math.ceil(needed_s / 60)), "minute")
    return (
        f"A trial has {plural(steps, 'step')} in this budget, and base seldom learns in fewer than {LEARNING_STEPS}: "
        f"there may be no verdict. About {minutes}, fewer arms or trained weights (--from) help."
    )


def faster_options(study: PreparedStudy, budget: Budget) -> Iterator[str]:
    """Yield options with which a step takes less time, as far as they were not given: on a CPU bfloat16 for base; TF32
    on a GPU; and compiling where the budget is long enough to pay for it."""
    settings, options, device = study.settings, study.options, device_of(study.options.device)
    if settings.sweep or settings.recipe.precision != "32-true" or not budget.may_time:
        return
    ways: list[Way] = []
    if device.type == "cuda" and not options.tf32 and torch.cuda.get_device_capability(device) >= (8, 0):
        ways.append(Way("--tf32", tf32=True))
    if device.type == "cpu" and "precision" in settings.open:
        ways.append(Way("--precision bf16-mixed", "bf16-mixed"))
    if not (options.compile or options.recompute) and budget.seconds and budget.seconds >= COMPILED_FROM_S:
        ways.append(Way("--compile", compiled=True))
    if device.type not in ("cpu", "cuda"):
        return
    for way, ratio in ratios(settings, options, study.dataset.num_classes, budget, ways):
        if ratio < WORTHWHILE:
            after = ", after about a minute for each arm" if way.compiled else ""
            yield f"{way.option} takes {ratio:.2f} of the time of a step{after}."
            return


def with_fast_precision(rungs: Sequence[Rung], options: StudyOptions, budget: Budget) -> tuple[Sequence[Rung], str]:
    """Rungs in half precision where a step on this GPU takes less time then, and a sentence that says so. Precisions
    that were given, by a named recipe too, stay."""
    settings, device = rungs[0].settings, device_of(options.device)
    is_open = "precision" in settings.open and settings.recipe.precision == "32-true"
    if device.type != "cuda" or settings.sweep or not is_open or not budget.may_time:
        return rungs, ""
    is_new = torch.cuda.get_device_capability(device) >= (8, 0)
    half: Precision = "bf16-mixed" if is_new else "fp16-mixed"
    ways = [Way(f"--precision {half}", half), *([Way("--tf32", tf32=True)] if is_new and not options.tf32 else [])]
    timed = list(ratios(settings, options, USUAL_CLASSES, budget, ways))
    text = f"A step takes, of its time in float32, {listing([f'{r:.2f} with {way.option}' for way, r in timed])}."
    fastest, ratio = min(timed, key=lambda pair: pair[1])
    if ratio >= WORTHWHILE or not fastest.precision:
        return rungs, text
    rungs = [rung._replace(settings=rung.settings.with_recipe(precision=half)) for rung in rungs]
    return rungs, f"{text} Taken: {half}; --precision 32-true trains in float32."


class Way(NamedTuple):
    """An option with which a step may take less time."""

    option: str
    precision: Precision | None = None
    tf32: bool = False
    compiled: bool = False


AS_NOW = Way("")


def ratios(
    settings: Settings, options: StudyOptions, num_classes: int, budget: Budget, ways: Sequence[Way]
) -> Iterator[tuple[Way, float]]:
    """Time steps with each way: their time of that without. On a GPU of base or of the arm with the most operations,
    where it helps less."""
    usual: dict[str, tuple[float, int]] = {}
    for way in ways:
        changed = settings.with_recipe(precision=way.precision) if way.precision else settings
        if not usual:
            on_gpu = device_of(options.device).type == "cuda"
            arms = dict.fromkeys([BASE, busiest_arm(settings, num_classes) if on_gpu else BASE])
            with budget.timing():
                usual = {arm: time_step(settings, options, num_classes, arm) for arm in arms}
        with budget.timing():
            now = {arm: time_step(changed, options, num_classes, arm, part, way) for arm, (_, part) in usual.items()}
        yield way, max(now[arm][0] / seconds for arm, (seconds, _) in usual.items())


def busiest_arm(settings: Settings, num_classes: int) -> str:
    """Return the arm whose model makes the most operations: how long a GPU takes for a small one depends on those."""
    counts: dict[str, int] = {}
    for cell, model in build_arms(settings, AS_IS, num_classes):
        steps = Steps(model, task_of(cell), cell.recipe, torch.device("cpu"), base_config(cell, num_classes))
        infer = steps.infer(1)
        with already_reported(), _Operations() as operations:
            infer()
        counts[cell.arm.name] = operations.count
    return max(counts, key=lambda arm: counts[arm])


class _Operations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return operation(*args, **(kwargs or {}))


def time_step(
    settings: Settings, options: StudyOptions, num_classes: int, arm: str, part: int = 0, way: Way = AS_NOW
) -> tuple[float, int]:
    """Time a training step of an arm with one thread: seconds for one image (on a CPU those of its own clock), of how
    many at once. Steps of as many images are compared."""
    device = device_of(options.device)
    cell, model = next(built for built in build_arms(settings, AS_IS, num_classes) if built[0].arm.name == arm)
    images, recipe = base_config(cell, num_classes), cell.recipe
    with as_a_worker(device, 1, 1), already_reported(), tf32_products(options.tf32 or way.tf32):
        steps = Steps(model, task_of(cell), recipe, device, images)
        steps = steps.compiled() if way.compiled else steps
        part = part or steps.fitting(steps.train, recipe.part_size, CALL_S, least=2)
        step = steps.train(part)
        step()  # kernels are chosen or compiled
        return min(seconds_per_call(step, 1, device) for _ in range(3)) / part, part


def describe_choice(planned: Estimate, reason: str, recipe_note: str, is_shell: bool) -> str:
    """Name what was chosen for a budget, or that nothing fits it (no `reason`), and the options that override it."""
    settings, fixed = planned.settings, planned.settings.fixed
    base = fixed["base"] if isinstance(fixed["base"], str) else "the given model"
    rows, columns = fixed["img_size"]
    pixels = f"{rows} px" if rows == columns else f"{rows} x {columns} px"
    names: list[str] = [name for name in ("base", "img_size", "epochs") if name in settings.open]
    names += ["recipe"] if "lr" in settings.open else []
    options = listing([f"--{name.replace('_', '-')}" if is_shell else f"{name}=" for name in [*names, "seeds"]])
    recipe = settings.recipe
    length = plural(recipe.epochs, "epoch") if recipe.steps is None else plural(recipe.steps, "step")
    choice = f"Chosen, {reason}: {base} at {pixels}, {length}, {plural(len(settings.seeds), 'seed')}."
    if not reason:
        choice = f"Nothing fits {duration(planned.budget_s or 0)}, not even {base} at {pixels} with {length}."
    return " ".join(filter(None, (choice, recipe_note, f"Set {options} to choose otherwise.")))


def weights_here(rung: Rung) -> Iterator[str]:
    """Offer trained weights that are on this machine, if few photographs are trained on from scratch and the warnings
    of the arms do not do so already, as for models that are too small to have any."""
    fixed = rung.settings.fixed
    is_photograph = fixed["in_chans"] == 3 and rung.side >= PHOTOGRAPH and TASKS[fixed["task"]].uses_head
    if not (is_photograph and 0 < rung.images < SMALL_SET and "base" in rung.settings.open) or trained_weights(fixed):
        return
    if cached := cached_checkpoints():
        yield (
            f"{rung.images:,} training images are few. Trained weights on this machine are likely to be better than "
            f"training from scratch: --from {first_of(cached, 3)}."
        )
