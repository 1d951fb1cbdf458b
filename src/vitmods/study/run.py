"""Run a study: check, train what is missing, measure costs, write the answer. It may be killed at any moment."""

from __future__ import annotations

import math
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vitmods.bench import device_name
from vitmods.data.splits import SPLIT_FILE, write_split
from vitmods.finetune.roles import ALL
from vitmods.model.config import ViTConfig
from vitmods.model.flops import count_macs
from vitmods.recipes import Recipe
from vitmods.recipes.schedule import resolve_on
from vitmods.stats.sequential import LOOKS
from vitmods.stats.verdict import Effect
from vitmods.study.answer import Answer, costs_under, evaluated_of, model_name, read_answer, read_costs
from vitmods.study.arms import BASE, Arm, Function, base_function, functions_of
from vitmods.study.bases import Base, activation_bytes, base_name, model_facts, take_images
from vitmods.study.estimate import fit_to_budget, suggest_smaller
from vitmods.study.executors import Executor, Inline, StudyOptions
from vitmods.study.executors.processes import Processes, visible_gpus
from vitmods.study.executors.ray import RayCluster
from vitmods.study.executors.slurm import Slurm
from vitmods.study.plan import AS_IS, VAL, Evaluation, Measure, Point, Settings, Work, make_measure, measure_of
from vitmods.study.progress import Progress, planned
from vitmods.study.schedule import ENDLESS, Budget, Schedule, check_weights_are_there
from vitmods.study.state import Evaluated, StudyState
from vitmods.study.store import ChangeFacts, Facts, ModelFacts, Plan, StudyFolder, read_object
from vitmods.study.trial import (
    TrialRunner,
    answer_splits,
    base_config,
    build_model,
    check_images,
    logged_run,
    task_of,
    with_modules,
)
from vitmods.study.warnings import already_reported, few_images, study_warnings
from vitmods.tasks.base import DEFAULT, TASKS
from vitmods.train.device import resolve
from vitmods.train.loggers import Logs
from vitmods.train.optim import freeze
from vitmods.train.options import RunOptions
from vitmods.util.address import address_of, named
from vitmods.util.errors import UserError
from vitmods.util.files import LenientStream, write_json
from vitmods.util.lease import Lease
from vitmods.util.registry import check_reachable, plugins, spelled
from vitmods.util.text import listing, plural

if TYPE_CHECKING:
    from vitmods.data import ImageDataset
    from vitmods.study.estimate import ArmEstimate, Estimate


PACKAGES = ("vitmods", "torch", "torchvision", "timm", "numpy")


def describe_model(settings: Settings, arm: Arm, model: nn.Module, images: Base) -> ModelFacts:
    """The arm's model and what its changes are, for a reader who does not know them."""
    changes = [ChangeFacts(str(change), **change.describe()) for change in arm.changes]
    if arm.start is not None:
        changes.append(
            ChangeFacts(
                f"from {arm.start}",
                "Starts from its own trained weights",
                f"Its weights are those of {arm.start}; base starts from its own.",
            )
        )
    if "train" in arm.recipe:
        changes.append(_describe_training(arm.recipe["train"]))
    base, start = settings.fixed["base"], settings.fixed.get("start")
    name = start["source"] if start else base_name(base)
    return ModelFacts(arm.start or name, model_facts(model, images), tuple(changes))


def _describe_training(what: str) -> ChangeFacts:
    """Describe the trained part as a change."""
    everything = what == ALL
    return ChangeFacts(
        f"train({what})",
        "All weights are trained" if everything else f"Trains only {' and '.join(what.split('+'))}",
        "Nothing is frozen."
        if everything
        else "The head is trained too, and with more than the head the positions; the other weights are frozen.",
        paper="Touvron et al., 2022, Three things everyone should know about Vision Transformers, section 4",
        url="https://arxiv.org/abs/2203.09795",
    )


def python_call(settings: Settings, out: str) -> str:
    """The lines of Python that run this study, for a report whose study was not started from the shell."""
    fixed = dict(settings.fixed)
    base, start, usual = fixed.pop("base"), fixed.pop("start", None), Recipe().settings()
    recipe = {name: value for name, value in settings.recipe.settings().items() if value != usual[name]}
    data, _ = fixed.pop("data"), fixed.pop("recipe")
    from_size = repr(str(base)) if isinstance(base, str) else f"vm.ViTConfig.from_dict({base!r})"
    fields = {
        **({"start": repr(start["source"])} if start else {"base": from_size}),
        "arms": f"[{', '.join(map(_arm_call, settings.factors))}]",
        "data": repr(data),
        "recipe": f"vm.Recipe().with_({', '.join(f'{name}={value!r}' for name, value in recipe.items())})",
        "seeds": repr(list(settings.seeds)),
        **{name: repr(value) for name, value in fixed.items()},
        **_measure_call(settings.measure, settings.fixed["task"]),
        "margin": repr(settings.margin),
        "generalize": repr(settings.generalize),
        **({"family": repr(settings.family)} if settings.family else {}),
        **({"until_decided": "True"} if settings.until_decided else {}),
        **({"design": "'factorial'", "runs": repr(len(settings.design.design.runs))} if settings.design else {}),
        **({"sweep": repr(settings.sweep.to_dict())} if settings.sweep else {}),
        **(_tuning_call(settings) if settings.grid else {}),
    }
    arguments = ", ".join(f"{name}={value}" for name, value in fields.items())
    return f"import vitmods as vm\nfrom vitmods.study import Arm, parse_edits\n\nvm.Study({arguments}).run({out!r})"


def _tuning_call(settings: Settings) -> dict[str, str]:
    seeds = {"same_seeds": "True"} if settings.same_seeds else {"tuning_seeds": repr(len(settings.tuning_seeds))}
    return {"tune": repr(settings.grid.to_dict()), "tune_on": repr(VAL), **seeds}


def _measure_call(measure: Measure, task: str) -> dict[str, str]:
    if measure == make_measure(measure.name):
        return {} if measure == measure_of(task) else {"metric": repr(measure.name)}
    return {"metric": f"vm.study.Measure.from_dict({measure.to_dict()!r})"}


def _arm_call(arm: Arm) -> str:
    overrides = f", {dict(arm.recipe)!r}" if arm.recipe else ""
    begins = f", start={arm.start!r}" if arm.start else ""
    return f"Arm({arm.name!r}, parse_edits({arm.short!r}){overrides}{begins})"


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and machine, as far as a number may depend on them."""
    return {
        "python": platform.python_version(),
        "packages": {package: installed for package in PACKAGES if (installed := _version(package))},
        "system": platform.platform(),
        "device": device.type,
        "device_name": device_name(device),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


NOTED = "logged_verdicts.json"  # of the study's folder: logger -> arm -> what it was sent last


def log_verdicts(names: Iterable[str], folder: StudyFolder, facts: Facts, settings: Settings, answer: Answer) -> None:
    """Write each verdict, with its interval in numbers, to those of the loggers that do not have it yet. One that fails
    is warned of, and sent again by the next run. Local files lie in the study's folder."""
    arms = {arm.name: arm for arm in (*settings.arms, *settings.factors)}
    path = folder.path / NOTED
    noted: dict[str, Any] = {}
    with suppress(UserError):  # a damaged one is written again
        noted = read_object(path)
    for name, effect in answer.headline.items():
        fields = {
            "verdict": str(effect.verdict),
            "effect": repr(effect),
            "metric": answer.metric.name,
            "seeds": len(settings.seeds),
        }
        sent = {**fields, **_numbers(effect)}
        lacking = [logger for logger in names if noted.get(logger, {}).get(name) != sent]
        if not lacking:
            continue
        run = logged_run(folder, facts, arms.get(name, Arm(name)), f"verdict of {name}", fields)
        for logger in Logs(lacking, replace(run, folder=folder.path)).close("finished", _numbers(effect)):
            noted.setdefault(logger, {})[name] = sent
        write_json(path, noted)


def _numbers(effect: Effect) -> dict[str, float]:
    low, high = effect.interval
    numbers = {"effect": effect.effect, "low": low, "high": high, "margin": effect.margin}
    return {f"verdict/{name}": value for name, value in numbers.items() if math.isfinite(value)}


MOST_WORKERS = 8  # by default; beyond that a machine's memory bandwidth is the limit
MOST_ON_CLUSTER = 32  # jobs of Slurm; Ray says itself what there is room for
MOST_ON_GPU = 4  # trials; beyond that they wait for each other


def parallel_trials(options: StudyOptions) -> int:
    """Count the trials that do not slow each other down: one per GPU, or MOST_WORKERS on a CPU."""
    return max(1, len(_gpus(options))) if resolve(options.device).type == "cuda" else MOST_WORKERS


def _gpus(options: StudyOptions) -> range | list[int]:
    every = options.device in ("auto", "cuda")
    return range(len(visible_gpus())) if every else [resolve(options.device).index or 0]


def workers_for(options: StudyOptions, trials: int, trial_bytes: int) -> int:
    """Count the trials to run at a time: as asked for, or as many as fit the GPUs, or as cores and memory allow."""
    if options.workers is not None:
        return max(1, min(options.workers, trials))
    if options.cluster.executor != "here":
        return max(1, min(MOST_ON_CLUSTER, trials))
    if resolve(options.device).type == "cuda":
        devices = parallel_trials(options)
        fitting = min(map(_free_gpu_bytes, _gpus(options)), default=0) // 2 // trial_bytes
        on_each = max(1, min(fitting, MOST_ON_GPU, torch.get_num_threads() // devices))
        return max(1, min(devices * on_each, trials))
    fitting = _memory_bytes() // 2 // trial_bytes
    return max(1, min(torch.get_num_threads(), MOST_WORKERS, fitting, trials))


def _free_gpu_bytes(index: int) -> int:
    return torch.cuda.mem_get_info(index)[0]


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


SAMPLES = 12  # images shown in the report


@dataclass(frozen=True)
class PreparedStudy:
    """A study before its first trial: its images are read, and every arm's model was made once.

    models:      description of each model
    notices:     warnings about the arms
    trial_bytes: memory of one trial
    """

    runner: TrialRunner
    dataset: ImageDataset
    options: StudyOptions
    models: dict[str, ModelFacts]
    notices: list[str]
    trial_bytes: int

    @property
    def settings(self) -> Settings:
        """With the content of the images."""
        return self.runner.settings

    def workers(self, trials: int) -> int:
        """Trials at a time. Functions that this process alone knows are called here, if nothing else is asked for."""
        here_alone = any(function.module is None for function in user_functions(self.settings))
        return 1 if self.options.workers is None and here_alone else workers_for(self.options, trials, self.trial_bytes)


def open_study(folder: StudyFolder, settings: Settings, options: StudyOptions) -> PreparedStudy:
    """Read the images, and make settings that name their content, so that a folder with other images is another study;
    then look through the arms."""
    folder.refuse_trial()
    facts = folder.facts()
    if facts is not None:  # before the images are read, which may take a while: all that can be known without them
        folder.check_same_study({**settings.to_dict(), "images": facts.settings["images"]})
    runner = TrialRunner(folder, settings, options)
    dataset = runner.dataset(settings.recipe)
    fixed = {**settings.fixed, "images": dataset.summary()["fingerprint"]}
    if facts is not None and facts.settings["images"] != fixed["images"]:
        folder.images.check_same(dataset.splits)
    runner.settings = replace(settings, fixed=fixed)
    check_images(runner.settings, dataset)
    return PreparedStudy(runner, dataset, options, *_survey(runner))


def build_arms(
    settings: Settings,
    setting: Point,
    num_classes: int,
    outlined: Callable[[Arm], bool] = lambda arm: False,
    tried: Callable[[nn.Module, Base], None] = lambda model, images: None,
) -> Iterator[tuple[Arm, nn.Module, Recipe]]:
    """Every arm's model as it is trained under a setting, base first, and its recipe; one at a time.

    outlined: of which arms shapes are enough: their models are on the meta device, where they can be.
    tried: called with each of these; where it fails, the model is built with numbers.
    """
    settings = settings.at(setting)
    config = base_config(settings, num_classes)
    for arm in settings.every_arm:
        try:
            recipe = settings.recipe_of(arm)
            build = partial(_built, settings, config, arm, recipe, num_classes)
            model = _outline(build, tried, settings, config, arm) if outlined(arm) else None
            model = build() if model is None else model
        except UserError as error:
            place = f"{setting}, arm" if setting else "Arm"
            raise type(error)(f"{place} {arm.name}: {error}") from error
        yield arm, model, recipe
        del model  # before the next one is made


def _built(settings: Settings, config: Base, arm: Arm, recipe: Recipe, num_classes: int) -> nn.Module:
    task, start = task_of(settings.fixed, recipe), settings.fixed.get("start")
    backbone = build_model(config, arm, settings.seeds[0], start, recipe, task.uses_head)
    model: nn.Module = with_modules(backbone, task, num_classes, settings.seeds[0])
    freeze(model, recipe)
    return model


def _outline(
    build: Callable[[], nn.Module],
    tried: Callable[[nn.Module, Base], None],
    settings: Settings,
    config: Base,
    arm: Arm,
) -> nn.Module | None:
    """The model on the meta device; None where only numbers tell: of other libraries' models, functions, trained
    weights, and whatever fails here."""
    if not isinstance(config, ViTConfig) or settings.fixed.get("start") or functions_of(arm.changes):
        return None
    try:
        with torch.device("meta"):
            model = build()
            tried(model, config)
    except Exception:  # of any kind: the same with numbers says what is wrong, or works
        return None
    return model


def smallest_first(settings: Settings, num_classes: int) -> list[Point]:
    """The settings of a sweep by the multiply-adds of their base; models of other libraries, which are not known, keep
    their place."""

    def macs(point: Point) -> int:
        config = base_config(settings.at(point), num_classes)
        return count_macs(config) if isinstance(config, ViTConfig) else 0

    return sorted(settings.sweep.points, key=macs)


def _survey(runner: TrialRunner) -> tuple[dict[str, ModelFacts], list[str], int]:
    """Whatever is wrong with an arm shows here, before anything is trained, under every setting of a sweep.

    Returns what each arm's model is, what to know of the arms, which the caller of `Study.run` or `Study.dry_run` is
    warned of, and the bytes that a trial takes.
    """
    facts: dict[str, ModelFacts] = {}
    sizes: list[int] = []
    notices: dict[str, list[str]] = {}
    whole, *_ = smallest_first(runner.settings, runner.dataset(runner.settings.recipe).num_classes)
    for point in runner.settings.sweep.points:
        settings = runner.settings.at(point)
        dataset = runner.dataset(settings.recipe, point)
        base = base_config(settings, dataset.num_classes)
        built = build_arms(runner.settings, point, dataset.num_classes, lambda arm: point != whole, take_images)  # noqa: B023
        found = study_warnings(_described(built, settings, point, base, facts, sizes), dataset)
        for notice in (*found, *few_images(settings, dataset)):
            notices.setdefault(notice, []).append(str(point))
    every = len(runner.settings.sweep.points)
    texts = [text if len(where) == every else f"{'; '.join(where)}: {text}" for text, where in notices.items()]
    design = runner.settings.design.design.warnings if runner.settings.design else ()  # the answer says them itself
    data = runner.dataset(runner.settings.recipe).summary()["warnings"]  # a part of the answer by itself
    for text in (*data, *design, *texts):
        warnings.warn(text, stacklevel=5)
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
    family = max(settings.family, len(settings.arms))
    return Plan(len(settings.seeds), settings.until_decided, settings.generalize, settings.measure.name, family)


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


def write_facts(ready: PreparedStudy, command: str, plan: Plan) -> Facts:
    """study.json, before the first trial: from then on the study can be read, and continued, from its folder. UserError
    where a fold cannot be made, too."""
    runner, dataset, settings = ready.runner, ready.dataset, ready.settings
    folds = [runner.dataset(settings.recipe, seed=fold) for fold in range(settings.folds)]
    folder = runner.folder
    folder.check_same_study(settings.to_dict())
    before = folder.facts()
    splits = answer_splits(settings, dataset)
    records = StudyState(folder, settings, Evaluated(splits)).records.items()
    arms = [record for trial, record in records if trial.arm.name != BASE]  # base alone says nothing of arms
    seen = any(record.ended for record in arms)
    if before and before.plan.seeds and any(record.ended or record.wall_s is not None for record in arms):
        _check_extension(before.plan, settings)
        plan = before.plan
    # Of a new study, or of one with a damaged file.
    if folder.images.read() is None or not (folder.path / SPLIT_FILE).exists():
        folder.images.write(dataset.splits)
        write_split(folder.path / SPLIT_FILE, dataset, folds)
    if before is not None and before.settings == settings.to_dict() and before.plan == plan:
        return before
    margins = {**before.margins} if before else {}
    if not seen:
        margins[settings.measure.name] = settings.margin
    margins.setdefault(settings.measure.name, settings.margin)
    task = TASKS[settings.fixed.get("task", DEFAULT)]
    constant = task.constant_scores([dataset.splits[split] for split in splits], dataset.num_classes)
    facts = Facts(
        created=before.created if before else datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        splits=splits,
        settings=settings.to_dict(),
        models=ready.models,
        data={**dataset.summary(), "constant": constant},
        resolved=asdict(resolve_on(settings.recipe, dataset)),
        environment=environment(resolve(ready.options.device)),
        warnings=tuple(ready.notices),
        margins=margins,
        plan=plan,
        plugins=tuple(plugins()),
    )
    folder.write_samples(dataset.samples(SAMPLES))
    write_json(folder.settings_file, facts.to_dict())
    return facts


def user_functions(settings: Settings) -> list[Function]:
    """The functions that make base and alter models in arms, which workers must be able to import."""
    base = base_function(settings.fixed["base"])
    return [*([base] if base else []), *(one for arm in settings.arms for one in functions_of(arm.changes))]


def _trial_bytes(model: nn.Module, recipe: Recipe, images: Base) -> int:
    """Roughly the memory of one trial: the interpreter, weights with gradients and Adam's state, and activations."""
    activations = recipe.part_size * activation_bytes(model, images)
    return 600 * 2**20 + 16 * sum(parameter.numel() for parameter in model.parameters()) + activations


PILOT = 4  # trials of base
MOST_FOR_COSTS = 0.1  # of the time that the trials took: while one process measures, the others wait


def run_study(
    settings: Settings,
    path: Path,
    options: StudyOptions,
    command: str,
    budget: Budget = ENDLESS,
    seeds_given: bool = True,
) -> Answer:
    """What `Study.run` does. Where no seeds were given, a study that is in the folder keeps its own, and of another one
    as many are planned as fit the budget."""
    folder = StudyFolder(path)
    folder.check_place(settings.fixed["data"])
    with folder.lock() as lease:
        settings, is_planned = _as_recorded(folder, settings, seeds_given)
        _say_what_is_planned(folder, settings, options, is_planned or budget == ENDLESS)
        ready = open_study(folder, settings, options)
        if not is_planned and budget != ENDLESS:
            found = _estimated(ready, budget, command)
            if found.refused:
                raise UserError("\n".join(filter(None, (str(found.refused), str(found.suggestion or "")))))
            ready.runner.settings = found.settings
            _say(options, found.decides())
        facts = write_facts(ready, command, plan_of(ready.settings))
        state = StudyState(folder, ready.settings, evaluated_of(folder, facts))
        check_weights_are_there(state)
        _work(ready, state, budget, lease)
        lease.look()
        _measure_costs(ready, state)
        lease.look()
        answer = read_answer(folder, facts, ready.settings)
        answer.write()
        if options.log and answer.complete:
            log_verdicts(options.log, folder, facts, ready.settings, answer)
    return answer


def dry_run(
    settings: Settings,
    path: Path | None,
    options: StudyOptions,
    command: str | None = None,
    budget: Budget = ENDLESS,
    seeds_given: bool = True,
) -> Estimate:
    """What `Study.dry_run` does."""
    folder = StudyFolder(path or os.devnull)
    folder.refresh()
    settings, is_planned = _as_recorded(folder, settings, seeds_given)
    _say_what_is_planned(folder, settings, options, is_planned or budget == ENDLESS)
    return _estimated(open_study(folder, settings, options), budget, command, fixed=is_planned)


def dry_trial(settings: Settings, options: RunOptions) -> ArmEstimate:
    """What `vitmods train --dry-run` shows: of the last arm of the settings."""
    from vitmods.study.estimate import Stopwatch

    runner = TrialRunner(StudyFolder(os.devnull), settings, options)
    *_, (arm, model, recipe) = build_arms(settings, AS_IS, runner.dataset(settings.recipe).num_classes)
    with already_reported():
        return Stopwatch(runner, resolve(options.device), torch.get_num_threads()).time(arm, model, recipe, (), 0)


def run_pilot(
    settings: Settings,
    path: Path,
    options: StudyOptions,
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
        _say(options, f"Pilot: {plural(len(seeds[:PILOT]), 'trial')} of base, in {named(folder.path)}")
        first = settings if is_planned else settings.with_seeds(seeds[:PILOT])
        ready = open_study(folder, first, options)
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


def _estimated(ready: PreparedStudy, budget: Budget, command: str | None, fixed: bool = False) -> Estimate:
    """The estimate of the study with the seeds that fit the budget, unless they are `fixed`; and what would take less
    where it does not fit, or takes long."""
    from vitmods.study.estimate import LONG_S, estimate

    runner, dataset, options, settings = ready.runner, ready.dataset, ready.options, ready.settings
    facts = runner.folder.facts()
    constant = facts.data.get("constant", {}) if facts else {}
    state = StudyState(runner.folder, settings, Evaluated(answer_splits(settings, dataset), constant))
    workers = ready.workers(len(state.missing))
    with already_reported():
        build = partial(build_arms, settings, num_classes=dataset.num_classes)
        points = smallest_first(settings, dataset.num_classes)
        found = estimate(
            runner,
            points,
            build,
            state,
            workers,
            min(workers, parallel_trials(options)),
            resolve(options.device),
            partial(_say, options),
        )
    found = replace(found, budget_s=budget.seconds, keep_weights=options.keep_weights)
    if not fixed and budget != ENDLESS:
        found = fit_to_budget(budget, found)
    limit_s = LONG_S if budget.seconds is None else budget.seconds
    return replace(found, suggestion=suggest_smaller(found, limit_s, command)) if found.total_s > limit_s else found


def _say(options: StudyOptions, line: str) -> None:
    if options.progress:
        print(line, file=LenientStream(sys.stderr), flush=True)


def _say_what_is_planned(folder: StudyFolder, settings: Settings, options: StudyOptions, is_planned: bool) -> None:
    """At once: reading the images may take a while."""
    done = len(list(folder.path.glob("trials/**/result.json")))
    where = named(folder.path)
    count = planned(settings.planned, done, settings.until_decided, where)
    _say(options, count if is_planned else f"As many seeds as fit the budget, in {where}")


def _work(ready: PreparedStudy, state: StudyState, budget: Budget, lease: Lease) -> None:
    """Do what is missing, as far as the budget lasts; what went wrong is written where the result would be."""
    runner, options, workers = ready.runner, ready.options, ready.workers(len(state.missing))

    def folder_of(work: Work) -> Path:
        return runner.folder.trial(work.trial if isinstance(work, Evaluation) else work)

    progress = Progress(folder_of, _steps_of(runner), workers, quiet=not options.progress)
    try:
        schedule = Schedule(state, progress, budget, options.keep_weights, lease)
        if schedule.left:
            _executor(runner, options, workers).run(schedule)
    finally:
        progress.close()


def _executor(runner: TrialRunner, options: StudyOptions, workers: int) -> Executor:
    cluster = options.cluster
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
        options=options,
        plugins=(*plugins(), *(spelled(sys.modules[name]) for name in sorted(modules))),
    )
    if cluster.executor == "ray":
        return RayCluster(processes, cluster, options.workers)
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


def _measure_costs(ready: PreparedStudy, state: StudyState) -> None:
    """costs.json: each arm once, of a sweep with each base. A later arm is measured beside base again, and base's own
    numbers stay. A measurement that fails is a warning: the effects do not depend on it."""
    settings, options, num_classes = ready.settings, ready.options, ready.dataset.num_classes
    trained_s = sum(record.wall_s or 0.0 for record in state.records.values()) / ready.workers(len(state.records))
    bases = {point.to_dict().get("base") for point in settings.sweep.points}
    seconds = min(options.cost_seconds, MOST_FOR_COSTS * trained_s / len(bases))
    costs_file = ready.runner.folder.costs_file
    kept = read_costs(ready.runner.folder, settings)
    for point in {point.to_dict().get("base"): point for point in reversed(settings.sweep.points)}.values():
        known = {"base": None, "arms": {}, **costs_under(kept, point)}
        names = {arm.name for arm in settings.arms} - set(known["arms"])
        if not names or options.cost_seconds <= 0:
            continue
        from vitmods.study.cost import measure

        here = settings.at(point)
        try:
            built = build_arms(settings, point, num_classes)
            models = ((arm.name, model) for arm, model, _ in built if arm.name in {BASE, *names})
            with already_reported():
                task = task_of(here.fixed, here.recipe)
                images = base_config(here, num_classes)
                costs = measure(models, task, here.recipe, resolve(options.device), seconds, images, len(names))
        except Exception as error:  # models and devices raise what they like
            text = f"The costs of {listing(sorted(names))} could not be measured ({type(error).__name__}: {error})."
            warnings.warn(f"{text} The answer is written without them; the same command tries again.", stacklevel=2)
            continue
        costs["arms"] = {**known["arms"], **costs["arms"]}
        costs["base"] = known["base"] or costs["base"]
        base = point.to_dict().get("base")
        kept = costs if base is None else {**kept, base: costs}
        write_json(costs_file, kept)
