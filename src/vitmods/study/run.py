"""Running a study: check, train what is missing, measure costs, write the answer. It may be killed at any moment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vitmods.recipes.length import resolve_on
from vitmods.study.answer import Answer, evaluated_of, read_answer
from vitmods.study.arms import BASE
from vitmods.study.evaluation import answer_splits
from vitmods.study.executors import Executor, Inline
from vitmods.study.executors.processes import Processes
from vitmods.study.executors.ray import RayCluster
from vitmods.study.executors.slurm import Slurm
from vitmods.study.facts import Plan
from vitmods.study.fits import planned_within, smaller
from vitmods.study.outcome import costs_under, read_costs
from vitmods.study.plan import Evaluation, Settings, Work
from vitmods.study.progress import Progress, planned
from vitmods.study.ready import Ready, build_arms, open_study, plan_of, smallest_first, user_functions, write_facts
from vitmods.study.running import Running
from vitmods.study.schedule import ENDLESS, Budget, Schedule
from vitmods.study.state import Evaluated, StudyState
from vitmods.study.store import StudyFolder
from vitmods.study.trial import TrialRunner, base_config, task_of
from vitmods.study.tuning import AS_IS
from vitmods.study.verdict_logs import log_verdicts
from vitmods.study.warnings import already_reported
from vitmods.study.weights import check_weights_are_there
from vitmods.util.address import address_of, named
from vitmods.util.errors import UserError
from vitmods.util.files import LenientStream, write_json
from vitmods.util.lease import Lease
from vitmods.util.registry import check_reachable, plugins, spelled
from vitmods.util.text import plural

if TYPE_CHECKING:
    from vitmods.study.estimate import ArmEstimate, Estimate

PILOT = 4  # trials of base


def run_study(
    settings: Settings, path: Path, how: Running, command: str, budget: Budget = ENDLESS, seeds_given: bool = True
) -> Answer:
    """What `Study.run` does. Where no seeds were given, a study that is in the folder keeps its own, and of another one
    as many are planned as fit the budget."""
    folder = StudyFolder(path)
    folder.check_place(settings.fixed["data"])
    with folder.lock() as lease:
        settings, is_planned = _as_recorded(folder, settings, seeds_given)
        _say_what_is_planned(folder, settings, how, is_planned or budget == ENDLESS)
        ready = open_study(folder, settings, how)
        if not is_planned and budget != ENDLESS:
            found = _estimated(ready, budget, command)
            if found.refused:
                raise UserError("\n".join(filter(None, (str(found.refused), str(found.smaller or "")))))
            ready.runner.settings = found.settings
            _say(how, found.decides())
        facts = write_facts(ready, command, plan_of(ready.settings))
        state = StudyState(folder, ready.settings, evaluated_of(folder, facts))
        check_weights_are_there(state)
        _work(ready, state, budget, lease)
        lease.look()
        _measure_costs(ready)
        lease.look()
        answer = read_answer(folder, facts, ready.settings)
        answer.write()
        if how.log and answer.complete:
            log_verdicts(how.log, folder, facts, ready.settings, answer)
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
    folder.refresh()
    if path is not None:
        folder.check_place(settings.fixed["data"])
    settings, is_planned = _as_recorded(folder, settings, seeds_given)
    _say_what_is_planned(folder, settings, how, is_planned or budget == ENDLESS)
    return _estimated(open_study(folder, settings, how), budget, command, fixed=is_planned)


def dry_trial(settings: Settings, how: Running) -> ArmEstimate:
    """What `vitmods train --dry-run` shows: of the last arm of the settings."""
    from vitmods.study.stopwatch import Stopwatch

    runner = TrialRunner(StudyFolder(os.devnull), settings, how.device, **how.of_trials())
    *_, (arm, model, recipe) = build_arms(settings, AS_IS, runner.dataset(settings.recipe).num_classes)
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
    folder.check_place(settings.fixed["data"])
    with folder.lock() as lease:
        settings, is_planned = _as_recorded(folder, settings, seeds_given)
        seeds = settings.seeds if seeds_given or is_planned else tuple(range(PILOT))
        _say(how, f"Pilot: {plural(len(seeds[:PILOT]), 'trial')} of base, in {named(folder.path)}")
        first = settings if is_planned else settings.with_seeds(seeds[:PILOT])
        ready = open_study(folder, first, how)
        facts = write_facts(ready, command, plan_of(settings) if is_planned else Plan())
        alone = replace(ready.settings, arms=(), until_decided=False).with_seeds(seeds[:PILOT])
        _work(ready, StudyState(folder, alone, evaluated_of(folder, facts)), ENDLESS, lease)
        ready.runner.settings = ready.settings.with_seeds(settings.seeds)
        return _estimated(ready, budget, shown, fixed=is_planned)


def _as_recorded(folder: StudyFolder, settings: Settings, seeds_given: bool) -> tuple[Settings, bool]:
    """With the seeds of the study that the folder has, where the caller names none; and whether they are decided on."""
    facts = folder.facts()
    settings = settings.continuing(facts.settings) if facts else settings
    before = facts.plan if facts else Plan()
    if facts is None or seeds_given or not before.seeds or before.until_decided != settings.until_decided:
        return settings, seeds_given or bool(before.seeds)
    return settings.with_seeds(tuple(facts.settings["seeds"])), True


def _estimated(ready: Ready, budget: Budget, command: str | None, fixed: bool = False) -> Estimate:
    """The estimate of the study with the seeds that fit the budget, unless they are `fixed`; and what would take less
    where it does not fit, or takes long."""
    from vitmods.study.estimate import LONG_S
    from vitmods.study.stopwatch import estimate

    runner, dataset, how, settings = ready.runner, ready.dataset, ready.how, ready.settings
    state = StudyState(runner.folder, settings, Evaluated(answer_splits(settings, dataset)))
    workers = ready.workers(len(state.missing))
    with already_reported():
        build = partial(build_arms, settings, num_classes=dataset.num_classes)
        points = smallest_first(settings, dataset.num_classes)
        found = estimate(
            runner, points, build, state, workers, min(workers, how.devices), how.torch_device, partial(_say, how)
        )
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
    where = named(folder.path)
    count = planned(settings.planned, done, settings.until_decided, where)
    _say(how, count if is_planned else f"As many seeds as fit the budget, in {where}")


def _work(ready: Ready, state: StudyState, budget: Budget, lease: Lease) -> None:
    """Do what is missing, as far as the budget lasts; what went wrong is written where the result would be."""
    runner, how, workers = ready.runner, ready.how, ready.workers(len(state.missing))

    def folder_of(work: Work) -> Path:
        return runner.folder.trial(work.trial if isinstance(work, Evaluation) else work)

    progress = Progress(folder_of, _steps_of(runner), workers, quiet=not how.progress)
    try:
        schedule = Schedule(state, progress, budget, how.keep_weights, lease)
        if schedule.left:
            _executor(runner, how, workers).run(schedule)
    finally:
        progress.close()


def _executor(runner: TrialRunner, how: Running, workers: int) -> Executor:
    cluster = how.cluster
    if workers == 1 and cluster.executor == "here":
        return Inline(runner)
    if cluster.executor != "here" and (address := address_of(runner.folder.path)):
        raise UserError(
            f"The machines of a cluster work in one folder, which {address} is not: name one that they share by --out."
        )
    check_reachable()
    if here := [function.name for function in user_functions(runner.settings) if function.module is None]:
        raise UserError(
            f"{', '.join(here)}: a function that is defined in the script itself, or has no name of its own, cannot "
            "reach worker processes. Move it to a module that the script imports, or run with workers=1."
        )
    modules = {str(function.module) for function in user_functions(runner.settings)}
    processes = Processes(
        runner.folder,
        workers,
        threads=max(1, torch.get_num_threads() // workers),
        device=how.device,
        plugins=(*plugins(), *(spelled(sys.modules[name]) for name in sorted(modules))),
        options=how.of_trials(),
    )
    if cluster.executor == "ray":
        return RayCluster(processes, cluster, how.workers)
    return Slurm(processes, cluster, workers) if cluster.executor == "slurm" else processes


def _steps_of(runner: TrialRunner) -> Callable[[Work], int]:
    """The steps of a piece of work, found once for what differs in the seed alone: a bar asks for all, often."""
    known: dict[tuple[Any, ...], int] = {}

    def steps(work: Work) -> int:
        if isinstance(work, Evaluation):
            return 1
        kind = work.arm.name, work.point, work.setting, work.seed % (runner.settings.folds or 1)
        if kind not in known:
            recipe = runner.settings.at(work.setting).recipe_of(work.arm, work.point)
            known[kind] = resolve_on(recipe, runner.dataset(recipe, work.setting, work.seed)).steps
        return known[kind]

    return steps


def _measure_costs(ready: Ready) -> None:
    """costs.json: each arm once, of a sweep with each base. A later arm is measured beside base again, and base's own
    numbers stay."""
    settings, how, num_classes = ready.settings, ready.how, ready.dataset.num_classes
    costs_file = ready.runner.folder.costs_file
    kept = read_costs(ready.runner.folder, settings)
    for point in {point.to_dict().get("base"): point for point in reversed(settings.sweep.points)}.values():
        known = {"base": None, "arms": {}, **costs_under(kept, point)}
        names = {arm.name for arm in settings.arms} - set(known["arms"])
        if not names or how.cost_seconds <= 0:
            continue
        from vitmods.study.cost import measure

        here = settings.at(point)
        built = build_arms(settings, point, num_classes)
        models = ((arm.name, model) for arm, model, _ in built if arm.name in {BASE, *names})
        with already_reported():
            task = task_of(here.fixed, here.recipe)
            images = base_config(here, num_classes)
            costs = measure(models, task, here.recipe, how.torch_device, how.cost_seconds, images, len(names))
        costs["arms"] = {**known["arms"], **costs["arms"]}
        costs["base"] = known["base"] or costs["base"]
        base = point.to_dict().get("base")
        kept = costs if base is None else {**kept, base: costs}
        write_json(costs_file, kept)
