"""Run a study: check, train what is missing, measure costs, write the answer. It may be killed at any moment."""

from __future__ import annotations

import math
import os
import platform
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from vitmods.bench import device_name
from vitmods.data.splits import SPLIT_FILE, write_split
from vitmods.recipes import Recipe
from vitmods.recipes.schedule import resolve_on
from vitmods.study.answer import VIEWS, Answer, read_answer
from vitmods.study.arms import BASE, Arm
from vitmods.study.budget import ENDLESS, MOST_FOR_COSTS, MOST_OVER, Budget, seconds_after_trials, slowdown
from vitmods.study.cells import MOST_SEEDS, Trial
from vitmods.study.executors import Inline, StudyOptions
from vitmods.study.executors.clusters import RayCluster, Slurm
from vitmods.study.executors.processes import LocalProcesses, Template, get_template, import_all
from vitmods.study.executors.sharing import Sharing
from vitmods.study.prepare import (
    PreparedStudy,
    build_arms,
    open_study,
    parallel_trials,
    say,
    threads_for,
    user_functions,
    workers_for,
)
from vitmods.study.progress import LiveReport, Progress, StepTimes, earlier_paces, kind_of, last_row
from vitmods.study.results import costs_under, read_costs
from vitmods.study.reuse import Pool
from vitmods.study.schedule import TrialSchedule, check_weights_are_there
from vitmods.study.settings import Rung, Settings, StudySettings, make_measure, measure_of
from vitmods.study.state import StudyState, enter_shown, with_begun_seeds
from vitmods.study.store import Facts, SeedCount, StudyFolder, contents_by_image, read_object
from vitmods.study.trial import TrialRunner, already_reported, answer_splits, base_config, logged_run, task_of
from vitmods.tasks.base import DEFAULT, TASKS
from vitmods.train.device import device_name as recorded_device
from vitmods.train.device import resolve
from vitmods.train.loggers import Logs
from vitmods.train.loop import METRICS
from vitmods.util.address import address_of, named
from vitmods.util.errors import UserError
from vitmods.util.files import write_json
from vitmods.util.lease import Lease
from vitmods.util.registry import check_plugins, check_reachable, plugins, spelled
from vitmods.util.text import duration, listing, plural

if TYPE_CHECKING:
    from vitmods.study.estimate import Estimate


def python_call(settings: Settings, out: str) -> str:
    """Return the Python code that runs this study, for the report of a study that was not started from the shell."""
    fixed, defaults = dict(settings.fixed), Recipe().settings()
    base, start, data = fixed.pop("base"), fixed.pop("start", None), fixed.pop("data")
    del fixed["recipe"]
    for name in ("in_place", "images"):  # they follow from the arms and the data
        fixed.pop(name, None)
    recipe = {name: value for name, value in settings.recipe.settings().items() if value != defaults.get(name)}
    if rates := recipe.get("rates"):
        recipe["rates"] = tuple(map(tuple, rates))
    arms = []
    for arm in settings.factors:
        overrides = f", {dict(arm.recipe)!r}" if arm.recipe else ""
        weights = f", start={arm.start!r}" if arm.start else ""
        arms.append(f"Arm({arm.name!r}, parse_edits({arm.short!r}){overrides}{weights})")
    of_base = repr(str(base)) if isinstance(base, str) else f"vm.ViTConfig.from_dict({base!r})"
    texts = {
        **({"start": repr(start["source"])} if start else {"base": of_base}),
        **({"positions": repr(start["positions"])} if start and start["positions"] != "bicubic" else {}),
        "arms": f"[{', '.join(arms)}]" if arms else "None",
        "data": repr(data),
        "recipe": f"vm.Recipe().with_({', '.join(f'{name}={value!r}' for name, value in recipe.items())})",
        "seeds": repr(list(settings.seeds)),
        **{name: repr(value) for name, value in fixed.items()},
    }
    resolved = {
        "metric": None if settings.measure == measure_of(fixed["task"]) else settings.measure.name,
        "design": settings.design.to_dict().get("kind"),
        "tune": settings.tune.to_dict() or (),
        "sweep": settings.sweep.to_dict() or (),
    }
    usual = StudySettings()
    for field in fields(StudySettings):
        value = resolved.get(field.name, getattr(settings, field.name))
        if value != getattr(usual, field.name):
            texts[field.name] = repr(value)
    if settings.measure != make_measure(settings.measure.name):
        texts["metric"] = f"vm.study.Measure.from_dict({settings.measure.to_dict()!r})"
    arguments = ", ".join(f"{name}={text}" for name, text in texts.items())
    return f"import vitmods as vm\nfrom vitmods.study import Arm, parse_edits\n\nvm.Study({arguments}).run({out!r})"


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions and machine, as far as a number may depend on them."""
    packages = {}
    for package in ("vitmods", "torch", "torchvision", "timm", "numpy"):
        with suppress(PackageNotFoundError):
            packages[package] = version(package)
    return {
        "python": platform.python_version(),
        "packages": packages,
        "system": platform.platform(),
        "device": device.type,
        "device_name": device_name(device),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


NOTED = "logged_verdicts.json"  # in the study's folder: logger -> arm -> what was sent last


def log_verdicts(names: Iterable[str], folder: StudyFolder, facts: Facts, settings: Settings, answer: Answer) -> None:
    """Send each verdict, with its interval, to the loggers that do not have it yet. One that fails is a warning, and
    gets it again from the next run. Local files are in the study's folder."""
    arms = {arm.name: arm for arm in (*settings.arms, *settings.factors)}
    path = folder.path / NOTED
    noted: dict[str, Any] = {}
    with suppress(UserError):  # a damaged file is written again
        noted = read_object(path)
    for name, effect in answer.headline.effects.items():
        low, high = effect.interval
        numbers = {"effect": effect.effect, "low": low, "high": high, "margin": effect.margin}
        numbers = {f"verdict/{key}": value for key, value in numbers.items() if math.isfinite(value)}
        seeds = len(settings.seeds)
        facts_of_arm = {
            "verdict": str(effect.verdict),
            "effect": repr(effect),
            "metric": answer.metric.name,
            "seeds": seeds,
        }
        message = {**facts_of_arm, **numbers}
        loggers = [logger for logger in names if noted.get(logger, {}).get(name) != message]
        if loggers:
            run = logged_run(folder, facts, arms.get(name, Arm(name)), f"verdict of {name}", facts_of_arm)
            for logger in Logs(loggers, replace(run, folder=folder.path)).close("finished", numbers):
                noted.setdefault(logger, {})[name] = message
            write_json(path, noted)


SAMPLES = 12  # images shown in the report


def write_facts(study: PreparedStudy, command: str) -> Facts:
    """Write study.json before the first trial: from then on the study can be read and resumed from its folder.

    Raises UserError if a fold cannot be made.
    """
    runner, dataset, settings = study.runner, study.dataset, study.settings
    plan = SeedCount(len(settings.seeds) if settings.is_settled else 0, settings.spare)
    folds = [runner.dataset(settings.cell(BASE), fold) for fold in range(settings.folds or 0)]
    folder = runner.folder
    folder.check_same_study(settings.to_dict())
    before, splits = folder.facts(), answer_splits(settings, dataset)
    # Of a new study, of one with a damaged file, or of one from before the training images were recorded.
    if "trained" not in (folder.images.read() or ()) or not (folder.path / SPLIT_FILE).exists():
        images, is_limited = contents_by_image(dataset.splits), settings.fixed.get("limit_train") is not None
        is_limited |= settings.fixed.get("limit_val") is not None  # then folds have other images
        of_folds = [contents_by_image(fold.splits) for fold in folds]
        shared = [fold.keys() & images.keys() if is_limited else fold.keys() | images.keys() for fold in of_folds]
        if any(fold.get(n) != images.get(n) for fold, names in zip(of_folds, shared, strict=True) for n in names):
            raise UserError("The images changed while they were read: run the same command again.")
        folder.images.write(dataset.splits)
        write_split(folder.path / SPLIT_FILE, dataset, folds)
    frozen = {"frozen": study.frozen} if study.frozen else {}
    same = before is not None and before.settings == settings.to_dict() and before.plan == plan
    if before is not None and same and before.data.get("frozen", {}) == study.frozen:
        return before
    enter_shown(folder)
    task = TASKS[settings.fixed.get("task", DEFAULT)]
    constant = task.constant_scores([dataset.splits[split] for split in splits], dataset.num_classes)
    facts = Facts(
        created=before.created if before else datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        splits=splits,
        settings=settings.to_dict(),
        models=study.models,
        data={**dataset.summary(), "constant": constant, "fingerprints": runner.fingerprints, **frozen},
        resolved=asdict(resolve_on(settings.recipe, dataset)),
        environment=environment(resolve(study.options.device)),
        warnings=study.notices,
        plan=plan,
        plugins=tuple(plugins()),
    )
    folder.write_samples(dataset.samples(SAMPLES))
    write_json(folder.settings_file, facts.to_dict())
    return facts


PILOT = 4  # trials of base
TYPICAL_BYTES = 600 << 20  # of a trial's memory, before its model is known
LEAST_COSTS = 1 / 3  # of the time for costs is left where trials are slower than planned


@dataclass(frozen=True)
class Request:
    """A study as it is asked for.

    settings:    with defaults for what is open
    recipe_note: the recipe, and why it was chosen; empty: it was given whole
    rungs:       lists what a time budget is tried with
    """

    settings: Settings
    budget: Budget
    recipe_note: str
    rungs: Callable[[], Sequence[Rung]]

    def prepare(
        self, folder: StudyFolder, options: StudyOptions, command: str | None, pilot: bool = False
    ) -> tuple[PreparedStudy, Estimate | None]:
        """Open the study as its folder has it; a new one with the settings that fit a time budget.

        Also returns the estimate of settings that were chosen.
        """
        facts, settings = folder.facts(), self.settings
        if facts is not None:
            check_plugins(facts.plugins if "design" in facts.settings else (), named(folder.path))
            before = facts.study()
            settings = replace(settings.continuing(facts.settings), known=before.known)
            if before.is_settled and (self.budget.seeds_follow or not settings.is_settled):
                is_same_kind = before.until_decided == settings.until_decided
                settings = settings.with_seeds((before if is_same_kind else settings).seeds, before.spare)
        done, place = len(list(folder.path.glob("trials/**/result.json"))), named(folder.path)
        trials = (
            f"{'At most ' * (settings.until_decided or settings.matched_points > 0)}{plural(settings.planned, 'trial')}"
        )
        what = f"{trials}{f', {done} are done' if done else ''}"
        if pilot:
            what = f"Pilot: {plural(_base_alone(settings).planned, 'trial')} of base"
        elif not settings.is_settled and self.budget != ENDLESS:
            what = "As many seeds as fit the budget"
        say(options, f"{what}, in {place}")
        chooses = facts is None and self.budget.seconds is not None and (settings.arms or self.budget.seeds_follow)
        if chooses and not settings.open.isdisjoint({"base", "img_size", "epochs"}):
            from vitmods.study.choice import choose

            study, planned = choose(self.rungs(), folder, options, self.budget, command)
        else:
            if self.recipe_note and facts is None:
                say(options, self.recipe_note)
            study, planned = open_study(folder, settings, options), None
        study.warn()
        return study, planned


def run_study(request: Request, path: Path, options: StudyOptions, command: str | None) -> Answer:
    """Run what is missing in a study's folder and return the answer: see `Study.run`.

    Without given seeds, a study that is in the folder keeps its own, and as many as fit the budget are planned for
    another one.
    """
    folder, budget = StudyFolder(path), request.budget
    folder.check_place(request.settings.fixed["data"])
    with folder.lock() as lease:
        # A template would take time from the steps that are timed.
        is_timed = budget.seconds is not None and not request.settings.is_settled
        missing = request.settings.planned - len(list(folder.path.glob("trials/**/result.json")))
        with get_template(None if is_timed else template_threads(options, missing)) as template:
            study, planned = request.prepare(folder, options, command)
            pool = Pool(study)
            study = pool.with_known_base(study)
            if not study.settings.is_settled and budget != ENDLESS:
                from vitmods.study.estimate import estimate

                planned = planned or estimate(study, budget, command, pool=pool)
                planned.check_fits()
                study = pool.with_known_base(replace(study, settings=planned.settings))
                say(options, f"{planned.decides()} {budget.spent()}".strip())
            command = command or python_call(study.settings, str(path))
            if folder.facts() is None or not study.settings.is_settled:  # else its seeds were settled before
                study = replace(study, settings=settle_seeds(study.settings, budget))
            facts = write_facts(study, command)
            wanted = seeds_to_train(study.settings, folder, facts, budget)
            state = StudyState.of(folder, facts, wanted)
            slower = slowdown() if budget.seconds else 1.0
            cost_seconds = LEAST_COSTS * options.cost_seconds * len(study.settings.sweep.points)
            cost_seconds *= bool(study.settings.arms)  # else there is nothing to compare
            after_s = seconds_after_trials(budget, cost_seconds, slower)
            over_s = MOST_OVER * (budget.seconds or 0.0) if wanted.spare else 0.0
            limit = replace(budget, seconds=budget.seconds and budget.seconds - after_s, over_s=over_s)
            report = LiveReport(
                lambda running: VIEWS["html"](replace(read_answer(folder, facts, study.settings), running=running)),
                options.cost_seconds * len(study.settings.sweep.points),
            )
            expected_s = {arm.arm: arm.trial_s for arm in planned.arms} if planned and not study.settings.sweep else {}
            costs = _measure_costs(study, state, budget)
            try:
                if not _work(study, state, limit, lease, pool, template, report, expected_s, costs) and budget.seconds:
                    kept = f"{duration(after_s)} are kept for costs and the report."
                    say(options, f"No time was left for a trial. {budget.spent()} {kept}")
            except BaseException:
                costs.close()  # a suspended measurement keeps its number of threads and its filter of warnings
                raise
        if wanted.spare:
            study, facts = _with_seeds_that_ended(study, state, facts)
            state = StudyState.of(folder, facts, study.settings)
        lease.confirm()
        for _ in costs:
            pass
        lease.confirm()
        answer = read_answer(folder, facts, study.settings)
        answer.report() if report.is_running else answer.write()
        if options.log and answer.complete:
            log_verdicts(options.log, folder, facts, study.settings, answer)
    return answer


def settle_seeds(settings: Settings, budget: Budget) -> Settings:
    """Settle the number of seeds; where a time budget has chosen it, or `seeds_follow` it, up to twice as many are
    spare, and the time that trials take decides."""
    if settings.is_settled and not budget.seeds_follow:
        return settings
    count, spare = len(settings.seeds), 0
    if budget.seconds is not None and not (settings.until_decided or settings.tune):
        spare = max(count, min(2 * count, MOST_SEEDS)) if settings.design.adds_seeds else count
    return settings.with_seeds(settings.seeds, spare)


def seeds_to_train(settings: Settings, folder: StudyFolder, facts: Facts, budget: Budget) -> Settings:
    """Return the settings with the seeds that a run may train: spare ones as far as its time decides, or else as far as
    an earlier run has begun them."""
    if settings.spare and settings.design.adds_seeds and budget.seconds is not None:
        return replace(settings, seeds=settings.most_seeds)
    return with_begun_seeds(folder, facts, settings)


def _with_seeds_that_ended(study: PreparedStudy, state: StudyState, facts: Facts) -> tuple[PreparedStudy, Facts]:
    """Record fewer or more seeds where trials were slower or faster than planned: the time alone decides, no score."""
    settings, folder = study.settings, study.runner.folder
    records = state.answered.items()
    late = {trial.seed for trial, record in records if not record.ended and record.status not in ("failed", "damaged")}
    done, planned = tuple(seed for seed in state.settings.seeds if seed not in late), len(settings.seeds)
    if len(done) < 2:
        return study, facts
    if done != settings.seeds:
        say(study.options, f"The budget lasted for {plural(len(done), 'seed')} instead of {planned}.")
    study = replace(study, settings=settings.with_seeds(done))
    facts = replace(facts, settings=study.settings.to_dict(), plan=SeedCount(len(done)))
    write_json(folder.settings_file, facts.to_dict())
    return study, facts


def dry_run(request: Request, path: Path, options: StudyOptions, command: str | None) -> Estimate:
    """Estimate the time, disk and findings of a study without writing a file: see `Study.dry_run`."""
    from vitmods.study.estimate import estimate

    folder = StudyFolder(path)
    folder.refresh()
    study, planned = request.prepare(folder, options, command)
    pool = Pool(study)
    study = pool.with_known_base(study)
    return planned or estimate(study, request.budget, command, pool=pool)


def run_pilot(request: Request, path: Path, options: StudyOptions, command: str | None) -> Estimate:
    """Train base on the first seeds and estimate the study: see `Study.pilot`. The seeds stay unplanned, so that the
    estimate may determine their number."""
    from vitmods.study.estimate import estimate

    request.settings.refuse("pilot")
    folder = StudyFolder(path)
    folder.check_place(request.settings.fixed["data"])
    with folder.lock() as lease:
        study, planned = request.prepare(folder, options, command, pilot=True)
        if planned:
            planned.check_fits()
        settings = study.settings
        begun = (
            study if settings.is_settled else replace(study, settings=replace(settings, seeds=_pilot_seeds(settings)))
        )
        pool = Pool(begun)
        begun = pool.with_known_base(begun)
        facts = write_facts(begun, command or python_call(settings, str(path)))
        state = StudyState.of(folder, facts, _base_alone(begun.settings))
        with get_template(template_threads(options, len(state.missing))) as template:
            _work(begun, state, ENDLESS, lease, pool, template)
        state.enter_look()
        study = replace(begun, settings=replace(begun.settings, seeds=settings.seeds))
        return estimate(study, request.budget, command, pool=pool)


def _pilot_seeds(settings: Settings) -> tuple[int, ...]:
    return (settings.seeds if settings.is_settled else tuple(range(PILOT)))[:PILOT]


def _base_alone(settings: Settings) -> Settings:
    return replace(settings, arms=(), until_decided=False, seeds=_pilot_seeds(settings))


def template_threads(options: StudyOptions, missing: int) -> int | None:
    """Return the threads of workers that are copies of a template: two or more, on Linux and a CPU. None: others."""
    if sys.platform != "linux" or options.cluster.executor != "here" or resolve(options.device).type != "cpu":
        return None
    workers = workers_for(options, missing, TYPICAL_BYTES)
    return threads_for(options, TYPICAL_BYTES) if workers * options.processes > 1 else None


def _work(
    study: PreparedStudy,
    state: StudyState,
    budget: Budget,
    lease: Lease,
    pool: Pool,
    template: Template | None = None,
    report: LiveReport | None = None,
    expected_s: Mapping[str, float] = MappingProxyType({}),
    costs: Iterator[None] | None = None,
) -> bool:
    """Copy the missing trials that are finished elsewhere, and run the others as far as the budget lasts; failures are
    written to the trials' folders. Returns False if the budget did not suffice for a single one.

    expected_s: arm -> seconds of a trial, as far as they were estimated
    costs: steps of their measurement, for cores that are idle beside the last trials
    """
    runner, options = study.runner, study.options
    pool.copy(state)
    for origin in {record.reused for record in state.records.values()} - {""}:
        enter_shown(StudyFolder(origin))
    workers = study.workers(len(state.missing))
    check_weights_are_there(state)

    def steps_of(trial: Trial) -> int:
        return runner.steps(trial.cell, trial.seed)

    paces = earlier_paces(state, steps_of, recorded_device(options.device))
    expected = (trial for trial in state.records if trial.arm.name in expected_s)
    paces += [(kind_of(trial), expected_s[trial.arm.name] / steps_of(trial)) for trial in expected]
    progress = Progress(
        runner.folder.trial,
        steps_of,
        workers,
        quiet=not options.progress,
        pace=StepTimes(paces),
        ended=sum(record.ended for record in state.records.values()),
        at_most=state.settings.until_decided,
        limit_s=lambda: budget.left_s + budget.over_s,
        report=report,
    )
    try:
        is_cpu = resolve(options.device).type == "cpu"  # a GPU works for the trials that remain
        schedule = TrialSchedule(
            state, progress, budget, options.keep_weights, lease, costs if is_cpu else None, len(study.settings.seeds),
            pool.copy,
        )  # fmt: skip
        if schedule.left:
            executor = make_executor(runner, study.settings, options, workers, study.threads, template)
            if isinstance(executor, LocalProcesses) and study.measures_sharing:
                executor.sharing = _sharing(study, progress, workers)
            needs_costs = costs is not None and options.cost_seconds > 0 and not runner.folder.costs_file.exists()
            if template is not None and needs_costs:
                threading.Thread(target=import_all).start()  # for the costs, while the template imports the same
            executor.run(schedule)
        schedule.clear()
    except BaseException:
        if report is not None:
            report.stop()
        raise
    finally:
        progress.close()
    return schedule.has_begun or not schedule.left


def _sharing(study: PreparedStudy, progress: Progress, workers: int) -> Sharing:
    """Return what tries how many trials may share a GPU, at first one."""

    def tell(limit: int, line: str = "") -> None:
        progress.workers = limit
        if line:
            say(study.options, line)

    def row(trial: Trial) -> Mapping[str, Any]:
        return last_row(study.runner.folder.trial(trial) / METRICS)

    gpus = parallel_trials(study.options)
    tell(min(gpus, workers))
    return Sharing(gpus, -(-workers // gpus), row, tell)


def make_executor(
    runner: TrialRunner,
    settings: Settings,
    options: StudyOptions,
    workers: int,
    threads: int,
    template: Template | None = None,
) -> Inline | LocalProcesses | RayCluster | Slurm:
    """Return what runs the trials: this process, so many teams of worker processes, or a cluster.

    threads: of each worker. Raises UserError if workers cannot import a function of the study, or a cluster would have
    to share an address.
    """
    cluster = options.cluster
    is_alone = workers == options.processes == 1 and threads == torch.get_num_threads()
    if is_alone and cluster.executor == "here":
        return Inline(runner)
    if cluster.executor != "here" and (address := address_of(runner.folder.path)):
        raise UserError(
            f"The machines of a cluster work in one folder, which {address} is not: name one that they share by --out."
        )
    check_reachable()
    functions = user_functions(settings)
    if local := [function.name for function in functions if function.module is None]:
        raise UserError(
            f"{', '.join(local)}: worker processes cannot import a function without a name, or one that is defined in "
            "the script itself. Move it to a module that the script imports, or run with workers=1 and one "
            "device per trial."
        )
    modules = sorted({str(function.module) for function in functions})
    processes = LocalProcesses(
        runner.folder,
        workers,
        threads,
        options=options,
        plugins=(*plugins(), *(spelled(sys.modules[name]) for name in modules)),
        template=template if template and template.threads == threads else None,
        team=options.processes,
    )
    if cluster.executor == "ray":
        return RayCluster(processes, options, options.workers)
    return Slurm(processes, options, workers) if cluster.executor == "slurm" else processes


def _measure_costs(study: PreparedStudy, state: StudyState, budget: Budget) -> Generator[None, None, None]:
    """Measure each arm once, in a sweep on each base, and write costs.json, step by step as `cost.measuring`.

    Arms that were added are measured against base again, and base's own numbers stay. A measurement that fails is a
    warning, since the effects do not depend on it.
    """
    settings, options, num_classes = study.settings, study.options, study.dataset.num_classes
    ended_s = [record.wall_s for record in state.records.values() if record.wall_s]
    workers = study.workers(len(state.records))
    count = min(len(ended_s) + workers - 1, len(state.records))  # also the trials at work beside the measurement
    trained_s = sum(ended_s) / max(1, len(ended_s)) * count / workers
    points = {point.to_dict().get("base"): point for point in reversed(settings.sweep.points)}
    seconds = min(options.cost_seconds, MOST_FOR_COSTS * trained_s / len(points))
    report_s = seconds_after_trials(budget, 0.0, slowdown() if budget.seconds else 1.0)
    least = LEAST_COSTS * options.cost_seconds
    if budget.seconds is not None:
        least = min(least, MOST_FOR_COSTS * budget.seconds / len(points))
    seconds = min(seconds, max(least, (budget.left_s - report_s) / len(points)))
    recorded, _ = read_costs(study.runner.folder, settings)
    for base, point in points.items():
        before = {"base": None, "arms": {}, **costs_under(recorded, point)}
        names = {arm.name for arm in settings.arms} - set(before["arms"])
        if not names or options.cost_seconds <= 0:
            continue
        import_all()  # or wait for the thread that does
        from vitmods.study.cost import measuring

        if seconds >= 1:
            say(options, f"Measuring the costs of {plural(len(names), 'arm')}, up to {duration(seconds)}.")
        of_base = settings.cell(BASE, point)
        try:
            built = build_arms(settings, point, num_classes)
            models = ((cell.arm.name, model) for cell, model in built if cell.arm.name in {BASE, *names})
            with already_reported():
                task, images, device = task_of(of_base), base_config(of_base, num_classes), resolve(options.device)
                costs = yield from measuring(
                    models, task, of_base.recipe, device, seconds, images, len(names),
                    compiled=options.compile and device.type == "cuda",
                )  # fmt: skip
        except Exception as error:  # models and devices raise what they like
            text = f"The costs of {listing(sorted(names))} could not be measured ({type(error).__name__}: {error})."
            warnings.warn(f"{text} The answer is written without them; the same command tries again.", stacklevel=2)
            continue
        costs["arms"] = {**before["arms"], **costs["arms"]}
        costs["base"] = before["base"] or costs["base"]
        recorded = costs if base is None else {**recorded, base: costs}
        write_json(study.runner.folder.costs_file, recorded)
