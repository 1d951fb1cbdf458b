"""Running a study: check, train what is missing, measure costs, write the answer. It may be killed at any moment."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import nn

from vitmods.data.split_file import SPLIT_FILE, write_split
from vitmods.recipes import Recipe
from vitmods.recipes.length import resolve_on
from vitmods.stats.sequential import LOOKS
from vitmods.study.answer import Answer, costs_under, evaluated_of, model_name, read_answer
from vitmods.study.arms import BASE, Arm
from vitmods.study.bases import Base
from vitmods.study.describe import describe_model, environment
from vitmods.study.edits import Function, base_function, functions_of
from vitmods.study.evaluation import answer_splits, check_images
from vitmods.study.executors import Executor, Inline
from vitmods.study.executors.processes import Processes, visible_gpus
from vitmods.study.fits import planned_within, smaller, with_seeds
from vitmods.study.models import activation_bytes
from vitmods.study.plan import Evaluation, Settings, Work
from vitmods.study.progress import Progress, planned
from vitmods.study.schedule import ENDLESS, Budget, Schedule
from vitmods.study.state import Evaluated, StudyState
from vitmods.study.store import Facts, ModelFacts, Plan, StudyFolder, read_object
from vitmods.study.trial import TrialRunner, base_config, build_model, task_of, with_modules
from vitmods.study.tuning import AS_IS, Point
from vitmods.study.warnings import already_reported, few_images, study_warnings
from vitmods.study.weights import Keep, check_weights_are_there
from vitmods.train.device import make_fabric, resolve
from vitmods.train.optim import freeze
from vitmods.util.errors import UserError
from vitmods.util.files import LenientStream, write_json
from vitmods.util.registry import check_reachable, plugins, spelled
from vitmods.util.text import plural

if TYPE_CHECKING:
    from vitmods.data import ImageDataset
    from vitmods.study.estimate import ArmEstimate, Estimate

SAMPLES = 12  # images shown in the report
MOST_WORKERS = 8  # by default; beyond that a machine's memory bandwidth is the limit
MOST_ON_GPU = 4  # trials; beyond that they wait for each other
PILOT = 4  # trials of base


@dataclass(frozen=True)
class Running:
    """How a study is run on this machine; `Study.run` explains each. Nothing here is part of the study."""

    workers: int | None = None
    device: str = "auto"
    data_workers: int = 0
    checkpoint_minutes: float = 5.0
    cost_seconds: float = 30.0
    progress: bool = True
    cache_dir: str | Path | None = None
    recompute: bool = False
    checkpointing: bool = False
    keep_weights: Keep = "all"

    def __post_init__(self) -> None:
        if self.cache_dir is not None:
            object.__setattr__(self, "cache_dir", str(self.cache_dir))  # workers get it as JSON
        if self.workers is not None and self.workers < 1:
            raise UserError(f"workers must be at least 1, not {self.workers}.")
        for name in ("data_workers", "checkpoint_minutes", "cost_seconds"):
            if not getattr(self, name) >= 0:
                raise UserError(f"{name} must be at least 0, not {getattr(self, name)}.")
        if self.keep_weights not in get_args(Keep):
            raise UserError(f"keep_weights is {', '.join(get_args(Keep))}, not {self.keep_weights!r}.")
        if self.device not in ("auto", "cpu"):
            make_fabric(self.device, "32-true")  # a UserError where there is no such device, before any work

    @property
    def torch_device(self) -> torch.device:
        return resolve(self.device)

    def of_trials(self) -> dict[str, Any]:
        """How each trial runs, in a worker process too."""
        names = ("data_workers", "checkpoint_minutes", "cache_dir", "recompute", "checkpointing")
        return {name: getattr(self, name) for name in names}

    @property
    def _gpus(self) -> range | list[int]:
        return range(len(visible_gpus())) if self.device in ("auto", "cuda") else [self.torch_device.index or 0]

    @property
    def devices(self) -> int:
        """Trials at a time that do not slow each other down: one a GPU, and as many as there are on a CPU."""
        return max(1, len(self._gpus)) if self.torch_device.type == "cuda" else MOST_WORKERS

    def workers_for(self, trials: int, trial_bytes: int) -> int:
        """Trials at a time: as asked for, or as many as fit the GPUs, or as cores and memory allow."""
        if self.workers is not None:
            return max(1, min(self.workers, trials))
        if self.torch_device.type == "cuda":
            fitting = min(map(_free_gpu_bytes, self._gpus), default=0) // 2 // trial_bytes
            on_each = max(1, min(fitting, MOST_ON_GPU, torch.get_num_threads() // self.devices))
            return max(1, min(self.devices * on_each, trials))
        fitting = _memory_bytes() // 2 // trial_bytes
        return max(1, min(torch.get_num_threads(), MOST_WORKERS, fitting, trials))


def run_study(
    settings: Settings, path: Path, how: Running, command: str, budget: Budget = ENDLESS, seeds_given: bool = True
) -> Answer:
    """What `Study.run` does. Where no seeds were given, a study that is in the folder keeps its own, and of another one
    as many are planned as fit the budget."""
    folder = StudyFolder(path)
    with folder.lock():
        settings, is_planned = _as_recorded(folder, settings, seeds_given)
        _say_what_is_planned(folder, settings, how, is_planned or budget == ENDLESS)
        runner, dataset = _open(folder, settings, how)
        models, notices, trial_bytes = _survey(runner)
        if not is_planned and budget != ENDLESS:
            found = _estimated(runner, dataset, how, trial_bytes, budget, command)
            if found.refused:
                raise UserError("\n".join(filter(None, (str(found.refused), str(found.smaller or "")))))
            runner.settings = found.settings
            _say(how, found.decides())
        settings = runner.settings
        plan = plan_of(settings)
        facts = _write_facts(folder, settings, dataset, models, how, command, notices, plan, _folds(runner))
        state = StudyState(folder, settings, evaluated_of(folder, facts))
        check_weights_are_there(state)
        _work(runner, state, trial_bytes, how, budget)
        _measure_costs(folder, settings, dataset.num_classes, how)
        answer = read_answer(folder, facts, settings)
        answer.write()
    return answer


def dry_run(
    settings: Settings,
    path: Path | None,
    how: Running,
    command: str | None = None,
    budget: Budget = ENDLESS,
    seeds_given: bool = True,
) -> Estimate:
    """What `Study.dry_run` does."""
    folder = StudyFolder(path or os.devnull)
    settings, is_planned = _as_recorded(folder, settings, seeds_given)
    _say_what_is_planned(folder, settings, how, is_planned or budget == ENDLESS)
    runner, dataset = _open(folder, settings, how)
    _, _, trial_bytes = _survey(runner)
    return _estimated(runner, dataset, how, trial_bytes, budget, command, fixed=is_planned)


def dry_trial(settings: Settings, how: Running) -> ArmEstimate:
    """What `vitmods train --dry-run` shows: of the last arm of the settings."""
    from vitmods.study.estimate import Stopwatch

    runner = TrialRunner(StudyFolder(os.devnull), settings, how.device, **how.of_trials())
    *_, (arm, model, recipe) = _built(settings, AS_IS, runner.dataset(settings.recipe).num_classes)
    with already_reported():
        return Stopwatch(runner, how.torch_device, torch.get_num_threads()).time(arm, model, recipe, (), 0)


def run_pilot(
    settings: Settings,
    path: Path,
    how: Running,
    command: str,
    budget: Budget = ENDLESS,
    seeds_given: bool = True,
    shown: str | None = None,
) -> Estimate:
    """What `Study.pilot` does. The seeds stay unplanned, so that what it tells may decide on them."""
    folder = StudyFolder(path)
    with folder.lock():
        settings, is_planned = _as_recorded(folder, settings, seeds_given)
        seeds = settings.seeds if seeds_given or is_planned else tuple(range(PILOT))
        _say(how, f"Pilot: {plural(len(seeds[:PILOT]), 'trial')} of base, in {folder.path}")
        first = settings if is_planned else with_seeds(settings, seeds[:PILOT])
        runner, dataset = _open(folder, first, how)
        models, notices, trial_bytes = _survey(runner)
        plan = plan_of(settings) if is_planned else Plan()
        facts = _write_facts(folder, runner.settings, dataset, models, how, command, notices, plan, _folds(runner))
        alone = with_seeds(replace(runner.settings, arms=(), until_decided=False), seeds[:PILOT])
        _work(runner, StudyState(folder, alone, evaluated_of(folder, facts)), trial_bytes, how, ENDLESS)
        runner.settings = with_seeds(runner.settings, settings.seeds)
        return _estimated(runner, dataset, how, trial_bytes, budget, shown, fixed=is_planned)


def _as_recorded(folder: StudyFolder, settings: Settings, seeds_given: bool) -> tuple[Settings, bool]:
    """With the seeds of the study that the folder has, where the caller names none; and whether they are decided on."""
    facts = folder.facts()
    settings = settings.continuing(facts.settings) if facts else settings
    before = facts.plan if facts else Plan()
    if facts is None or seeds_given or not before.seeds or before.until_decided != settings.until_decided:
        return settings, seeds_given or bool(before.seeds)
    return with_seeds(settings, tuple(facts.settings["seeds"])), True


def _estimated(
    runner: TrialRunner,
    dataset: ImageDataset,
    how: Running,
    trial_bytes: int,
    budget: Budget,
    command: str | None,
    fixed: bool = False,
) -> Estimate:
    """The estimate of the study with the seeds that fit the budget, unless they are `fixed`; and what would take less
    where it does not fit, or takes long."""
    from vitmods.study.estimate import LONG_S, estimate

    settings = runner.settings
    state = StudyState(runner.folder, settings, Evaluated(answer_splits(settings, dataset), dataset.num_classes))
    workers = _workers(how, settings, len(state.missing), trial_bytes)
    with already_reported():
        points = settings.sweep.points
        built = ((point, *one) for point in points for one in _built(settings, point, dataset.num_classes))
        found = estimate(runner, built, state, workers, min(workers, how.devices), how.torch_device, partial(_say, how))
    found = replace(found, budget_s=budget.seconds, keep_weights=how.keep_weights)
    if not fixed and budget != ENDLESS:
        found = planned_within(budget, found)
    limit_s = LONG_S if budget.seconds is None else budget.seconds
    return replace(found, smaller=smaller(found, limit_s, command)) if found.total_s > limit_s else found


def _say(how: Running, line: str) -> None:
    if how.progress:
        print(line, file=LenientStream(sys.stderr), flush=True)


def _say_what_is_planned(folder: StudyFolder, settings: Settings, how: Running, is_planned: bool) -> None:
    """At once: reading the images may take a while."""
    done = len(list(folder.path.glob("trials/**/result.json")))
    count = planned(settings.planned, done, settings.until_decided, folder.path)
    _say(how, count if is_planned else f"As many seeds as fit the budget, in {folder.path}")


def _open(folder: StudyFolder, settings: Settings, how: Running) -> tuple[TrialRunner, ImageDataset]:
    """The images, and settings that name their content, so that a folder with other images is another study."""
    folder.refuse_trial()
    facts = folder.facts()
    if facts is not None:  # before the images are read, which may take a while: all that can be known without them
        folder.check_same_study({**settings.to_dict(), "images": facts.settings["images"]})
    runner = TrialRunner(folder, settings, how.device, progress=how.progress, **how.of_trials())
    dataset = runner.dataset(settings.recipe)
    fixed = {**settings.fixed, "images": dataset.summary()["fingerprint"]}
    if facts is not None and facts.settings["images"] != fixed["images"]:
        folder.check_same_images(dataset.splits)
    runner.settings = replace(settings, fixed=fixed)
    check_images(runner.settings, dataset)
    return runner, dataset


def _folds(runner: TrialRunner) -> list[ImageDataset]:
    """The images in each fold, where there are folds; UserError where one of them cannot be made."""
    return [runner.dataset(runner.settings.recipe, seed=fold) for fold in range(runner.settings.folds)]


def _built(settings: Settings, setting: Point, num_classes: int) -> Iterator[tuple[Arm, nn.Module, Recipe]]:
    """Every arm's model as it is trained under a setting, base first, and its recipe; one at a time."""
    settings = settings.at(setting)
    config = base_config(settings, num_classes)
    for arm in settings.every_arm:
        try:
            recipe = settings.recipe_of(arm)
            task, start = task_of(settings.fixed, recipe), settings.fixed.get("start")
            backbone = build_model(config, arm, settings.seeds[0], start, recipe, task.uses_head)
            model = with_modules(backbone, task, num_classes, settings.seeds[0])
            freeze(model, recipe)
        except UserError as error:
            place = f"{setting}, arm" if setting else "Arm"
            raise type(error)(f"{place} {arm.name}: {error}") from error
        yield arm, model, recipe
        del backbone, model  # before the next one is made


def _survey(runner: TrialRunner) -> tuple[dict[str, ModelFacts], list[str], int]:
    """Whatever is wrong with an arm shows here, before anything is trained, under every setting of a sweep.

    Returns what each arm's model is, what to know of the arms, which the caller of `Study.run` or `Study.dry_run` is
    warned of, and the bytes that a trial takes.
    """
    facts: dict[str, ModelFacts] = {}
    sizes: list[int] = []
    notices: dict[str, list[str]] = {}
    for point in runner.settings.sweep.points:
        settings = runner.settings.at(point)
        dataset = runner.dataset(settings.recipe, point)
        base = base_config(settings, dataset.num_classes)
        built = _built(runner.settings, point, dataset.num_classes)
        found = study_warnings(_described(built, settings, point, base, facts, sizes), dataset)
        for notice in (*found, *few_images(settings, dataset)):
            notices.setdefault(notice, []).append(str(point))
    every = len(runner.settings.sweep.points)
    texts = [text if len(where) == every else f"{'; '.join(where)}: {text}" for text, where in notices.items()]
    design = runner.settings.design.design.warnings if runner.settings.design else ()  # the answer says them itself
    for text in (*design, *texts):
        warnings.warn(text, stacklevel=4)
    return facts, texts, max(sizes)


def _described(
    built: Iterable[tuple[Arm, nn.Module, Recipe]],
    settings: Settings,
    setting: Point,
    base: Base,
    facts: dict[str, ModelFacts],
    sizes: list[int],
) -> Iterator[tuple[str, nn.Module, Recipe]]:
    """Name, model and recipe of each arm, once its facts and the bytes of a trial are noted."""
    for arm, model, recipe in built:
        facts[model_name(setting, arm.name)] = describe_model(settings, arm, model, base)
        sizes.append(_trial_bytes(model, recipe, base))
        yield arm.name, model, recipe


def plan_of(settings: Settings) -> Plan:
    """What is recorded of them before any score is known."""
    return Plan(len(settings.seeds), settings.until_decided, settings.generalize, settings.measure.name)


def _check_extension(before: Plan, settings: Settings) -> None:
    """UserError where seeds were added after scores were seen, and no level is known for so many."""
    count = len(settings.seeds)
    plain = not (settings.folds or settings.sweep or settings.design)
    if plain and count > before.seeds > 1 and not LOOKS[0] <= count <= LOOKS[-1]:
        raise UserError(
            f"This study was planned with {before.seeds} seeds, and has scores. With more it is looked at a second "
            f"time, for which {LOOKS[0]} to {LOOKS[-1]} seeds are calibrated, not {count}. Ask for so many, or choose "
            "another folder with --out."
        )


def _write_facts(
    folder: StudyFolder,
    settings: Settings,
    dataset: ImageDataset,
    models: dict[str, ModelFacts],
    how: Running,
    command: str,
    notices: Sequence[str],
    plan: Plan,
    folds: Sequence[ImageDataset] = (),
) -> Facts:
    """study.json, before the first trial: from then on the study can be read, and continued, from its folder."""
    folder.check_same_study(settings.to_dict())
    before = folder.facts()
    images = Evaluated(answer_splits(settings, dataset), dataset.num_classes)
    records = StudyState(folder, settings, images).records.items()
    arms = [record for trial, record in records if trial.arm.name != BASE]  # base alone says nothing of arms
    seen = any(record.ended for record in arms)
    if before and before.plan.seeds and any(record.ended or record.wall_s is not None for record in arms):
        _check_extension(before.plan, settings)
        plan = before.plan
    if before is not None and before.settings == settings.to_dict() and before.plan == plan:
        return before
    margins = {**before.margins} if before else {}
    if not seen:
        margins[settings.measure.name] = settings.margin
    margins.setdefault(settings.measure.name, settings.margin)
    facts = Facts(
        created=before.created if before else datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        splits=answer_splits(settings, dataset),
        settings=settings.to_dict(),
        models=models,
        data=dataset.summary(),
        resolved=asdict(resolve_on(settings.recipe, dataset)),
        environment=environment(how.torch_device),
        warnings=tuple(notices),
        margins=margins,
        plan=plan,
        plugins=tuple(plugins()),
    )
    folder.write_samples(dataset.samples(SAMPLES))
    folder.write_images(dataset.splits)
    write_split(folder.path / SPLIT_FILE, dataset, folds)
    write_json(folder.settings_file, facts.to_dict())
    return facts


def _work(runner: TrialRunner, state: StudyState, trial_bytes: int, how: Running, budget: Budget) -> None:
    """Do what is missing, as far as the budget lasts; what went wrong is written where the result would be."""
    workers = _workers(how, runner.settings, len(state.missing), trial_bytes)
    trial_of = {True: lambda work: work.trial, False: lambda work: work}
    progress = Progress(
        lambda work: runner.folder.trial(trial_of[isinstance(work, Evaluation)](work)),
        partial(_steps, runner),
        workers,
        quiet=not how.progress,
    )
    try:
        schedule = Schedule(state, progress, budget, how.keep_weights)
        if schedule.left:
            _executor(runner, how, workers).run(schedule)
    finally:
        progress.close()


def _executor(runner: TrialRunner, how: Running, workers: int) -> Executor:
    if workers == 1:
        return Inline(runner)
    check_reachable()
    if here := [function.name for function in _functions(runner.settings) if function.module is None]:
        raise UserError(
            f"{', '.join(here)}: a function that is defined in the script itself, or has no name of its own, cannot "
            "reach worker processes. Move it to a module that the script imports, or run with workers=1."
        )
    modules = {str(function.module) for function in _functions(runner.settings)}
    return Processes(
        runner.folder,
        workers,
        threads=max(1, torch.get_num_threads() // workers),
        device=how.device,
        plugins=(*plugins(), *(spelled(sys.modules[name]) for name in sorted(modules))),
        options=how.of_trials(),
    )


def _workers(how: Running, settings: Settings, trials: int, trial_bytes: int) -> int:
    """Functions that this process alone knows are called here, if nothing else is asked for."""
    here_alone = any(function.module is None for function in _functions(settings))
    return 1 if how.workers is None and here_alone else how.workers_for(trials, trial_bytes)


def _functions(settings: Settings) -> list[Function]:
    base = base_function(settings.fixed["base"])
    return [*([base] if base else []), *(one for arm in settings.arms for one in functions_of(arm.changes))]


def _steps(runner: TrialRunner, work: Work) -> int:
    if isinstance(work, Evaluation):
        return 1
    recipe = runner.settings.at(work.setting).recipe_of(work.arm, work.point)
    return resolve_on(recipe, runner.dataset(recipe, work.setting, work.seed)).steps


def _trial_bytes(model: nn.Module, recipe: Recipe, images: Base) -> int:
    """Roughly the memory of one trial: the interpreter, weights with gradients and Adam's state, and activations."""
    activations = recipe.part_size * activation_bytes(model, images)
    return 600 * 2**20 + 16 * sum(parameter.numel() for parameter in model.parameters()) + activations


def _free_gpu_bytes(index: int) -> int:
    return torch.cuda.mem_get_info(index)[0]


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _measure_costs(folder: StudyFolder, settings: Settings, num_classes: int, how: Running) -> None:
    """costs.json: each arm once, of a sweep with each base. A later arm is measured beside base again, and base's own
    numbers stay."""
    kept = read_object(folder.costs_file)
    for point in {point.to_dict().get("base"): point for point in reversed(settings.sweep.points)}.values():
        known = {"base": None, "arms": {}, **costs_under(kept, point)}
        names = {arm.name for arm in settings.arms} - set(known["arms"])
        if not names or how.cost_seconds <= 0:
            continue
        from vitmods.study.cost import measure

        here = settings.at(point)
        built = _built(settings, point, num_classes)
        models = ((arm.name, model) for arm, model, _ in built if arm.name in {BASE, *names})
        with already_reported():
            task = task_of(here.fixed, here.recipe)
            images = base_config(here, num_classes)
            costs = measure(models, task, here.recipe, how.torch_device, how.cost_seconds, images, len(names))
        costs["arms"] = {**known["arms"], **costs["arms"]}
        costs["base"] = known["base"] or costs["base"]
        base = point.to_dict().get("base")
        kept = costs if base is None else {**kept, base: costs}
        write_json(folder.costs_file, kept)
