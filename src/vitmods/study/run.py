"""Running a study: check, train what is missing, measure costs, write the answer. It may be killed at any moment."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from vitmods.recipes.length import resolve_on
from vitmods.report import write_samples
from vitmods.study.arms import BASE, Arm
from vitmods.study.describe import describe_arm, describe_base, environment
from vitmods.study.edits import Function, base_function, functions_of
from vitmods.study.evaluation import check_images
from vitmods.study.executors import Executor, Inline, Processes, visible_gpus
from vitmods.study.models import activation_bytes
from vitmods.study.plan import Evaluation, Settings, Trial, Work
from vitmods.study.progress import Progress
from vitmods.study.result import StudyResult
from vitmods.study.results import assemble, describe_metric, write_results
from vitmods.study.selection import evaluations
from vitmods.study.store import StudyFolder, read_json
from vitmods.study.trial import TrialRunner, base_config, build_model
from vitmods.study.warnings import already_reported, study_warnings
from vitmods.train.device import make_fabric, resolve
from vitmods.train.optim import freeze
from vitmods.util.errors import UserError
from vitmods.util.files import write_json
from vitmods.util.registry import spelled

if TYPE_CHECKING:
    from vitmods.data import ImageDataset
    from vitmods.study.estimate import Estimate

W = TypeVar("W", Trial, Evaluation)
SAMPLES = 12  # images shown in the report
MOST_WORKERS = 8  # by default; beyond that a machine's memory bandwidth is the limit


@dataclasses.dataclass(frozen=True)
class Running:
    """How a study is run on this machine; `Study.run` explains each. Nothing here is part of the study."""

    workers: int | None = None
    device: str = "auto"
    data_workers: int = 0
    checkpoint_minutes: float = 5.0
    cost_seconds: float = 30.0
    progress: bool = True

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise UserError(f"workers must be at least 1, not {self.workers}.")
        for name in ("data_workers", "checkpoint_minutes", "cost_seconds"):
            if not getattr(self, name) >= 0:
                raise UserError(f"{name} must be at least 0, not {getattr(self, name)}.")
        if self.device not in ("auto", "cpu"):
            make_fabric(self.device, "32-true")  # a UserError where there is no such device, before any work

    @property
    def torch_device(self) -> torch.device:
        return resolve(self.device)


def run_study(settings: Settings, path: Path, how: Running, command: str) -> StudyResult:
    """What `Study.run` does."""
    folder = StudyFolder(path)
    with folder.lock() as lock:
        _refuse_other_study(folder, settings)
        runner, dataset = _open(folder, settings, how)
        check_images(runner.settings, dataset)
        models = _build_arms(runner.settings, dataset.num_classes)
        record = _caution(runner.settings, dataset, models)
        _write_facts(folder, runner.settings, dataset, models, how, command, record)
        split, base = dataset.eval_split, models[BASE]
        _work(runner, runner.settings.trials(), runner.settings.evaluated_on(split), base, how, lock)
        _work(runner, evaluations(folder, runner.settings, split), split, base, how, lock)
        _measure_costs(folder, runner.settings, models, dataset.num_classes, how)
        results = assemble(folder, runner.settings)
        write_results(folder, results)
    return StudyResult(results, folder.path)


def dry_run(settings: Settings, path: Path | None, how: Running) -> Estimate:
    """What `Study.dry_run` does."""
    from vitmods.study.estimate import estimate

    folder = StudyFolder(path or os.devnull)
    _refuse_other_study(folder, settings)
    runner, dataset = _open(folder, settings, how)
    check_images(runner.settings, dataset)
    models = _build_arms(runner.settings, dataset.num_classes)
    _caution(runner.settings, dataset, models)
    evaluated_on = runner.settings.evaluated_on(dataset.eval_split)
    missing = _missing(folder, runner.settings, runner.settings.trials(), evaluated_on)
    workers = _workers(how, models[BASE], runner.settings, len(missing))
    with already_reported():
        return estimate(runner, models, missing, workers, how.torch_device)


def _refuse_other_study(folder: StudyFolder, settings: Settings) -> None:
    """Before the images are read, which may take a while: all that can be known without them."""
    folder.refuse_trial()
    facts = folder.known()
    if facts is not None:
        folder.check_same_study({**settings.to_dict(), "images": facts["settings"]["images"]})


def _open(folder: StudyFolder, settings: Settings, how: Running) -> tuple[TrialRunner, ImageDataset]:
    """The images, and settings that name their content, so that a folder with other images is another study."""
    runner = TrialRunner(folder, settings, how.device, how.data_workers, how.checkpoint_minutes, how.progress)
    dataset = runner.dataset(settings.recipe)
    fixed = {**settings.fixed, "images": dataset.summary()["fingerprint"]}
    runner.settings = dataclasses.replace(settings, fixed=fixed)
    return runner, dataset


def _build_arms(settings: Settings, num_classes: int) -> dict[str, nn.Module]:
    """Every arm's model, base first: whatever is wrong with an arm shows before anything is trained."""
    config = base_config(settings, num_classes)
    models = {}
    for arm in (Arm(BASE), *settings.arms):
        try:
            recipe = settings.recipe_of(arm)
            models[arm.name] = build_model(config, arm, settings.seeds[0], settings.fixed.get("start"), recipe)
            freeze(models[arm.name], recipe)  # costs are of what is trained
        except UserError as error:
            raise type(error)(f"Arm {arm.name}: {error}") from error
    return models


def _caution(settings: Settings, dataset: ImageDataset, models: dict[str, nn.Module]) -> list[str]:
    """Warn the caller of `Study.run` or `Study.dry_run`; returns what was said."""
    found = study_warnings(models, {name: settings.recipe_of(settings.arm(name)) for name in models}, dataset)
    for caution in found:
        warnings.warn(caution, stacklevel=4)
    return found


def _write_facts(
    folder: StudyFolder,
    settings: Settings,
    dataset: ImageDataset,
    models: dict[str, nn.Module],
    how: Running,
    command: str,
    record: list[str],
) -> None:
    """study.json, before the first trial: from then on the study can be read, and continued, from its folder."""
    folder.check_same_study(settings.to_dict())
    before = folder.known() or {}
    if before.get("settings") == settings.to_dict():
        return
    write_samples(folder.path, dataset.samples(SAMPLES))
    base = base_config(settings, dataset.num_classes)
    write_json(
        folder.settings_file,
        {
            "schema": 1,
            "created": before.get("created") or datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command,
            "settings": settings.to_dict(),
            "metric": {**describe_metric(settings.measure.metric), "split": dataset.eval_split},
            "base": describe_base(settings, models[BASE], base),
            "arms": {arm.name: describe_arm(arm, models[arm.name], base) for arm in settings.arms},
            "data": dataset.summary(),
            "resolved": dataclasses.asdict(resolve_on(settings.recipe, dataset)),
            "warnings": record,
            "environment": environment(how.torch_device),
        },
    )


def _missing(folder: StudyFolder, settings: Settings, planned: Sequence[W], split: str) -> list[W]:
    """What has no result on this split yet."""
    return [work for work in planned if not folder.is_done(work, split, settings.measure)]


def _work(runner: TrialRunner, planned: Sequence[W], split: str, base: nn.Module, how: Running, lock: int) -> None:
    """Do what is missing; what went wrong is written where the result would be."""
    folder, settings = runner.folder, runner.settings
    missing = _missing(folder, settings, planned, split)
    if not missing:
        return
    workers = _workers(how, base, settings, len(missing))
    steps: dict[Work, int] = {work: _steps(runner, work) for work in missing}
    done = len(planned) - len(missing)
    progress = Progress(folder, settings.measure, split, steps, done, quiet=not how.progress, bar=workers > 1)
    try:
        failures = _executor(runner, how, workers, lock).run(missing, progress)
    finally:
        progress.close()
    for work, reason in failures.items():
        folder.record_failure(work, split, reason)


def _executor(runner: TrialRunner, how: Running, workers: int, lock: int) -> Executor:
    if workers == 1:
        return Inline(runner)
    return Processes(
        runner.folder,
        workers,
        threads=max(1, torch.get_num_threads() // workers),
        device=how.device,
        lock_descriptor=lock,
        imports=_foreign_modules(runner.settings.arms, runner.settings.fixed["base"]),
        options={"data_workers": how.data_workers, "checkpoint_minutes": how.checkpoint_minutes},
    )


def _foreign_modules(arms: Sequence[Arm], base: Any = None) -> tuple[str, ...]:
    """Where changes and functions that are not ours are defined: a worker must import them to know them."""
    if here := _known_here_alone(arms, base):
        raise UserError(
            f"{', '.join(here)}: a change or function that is defined in the script itself (or has no name of its own) "
            "cannot reach worker processes. Move it to a module that the script imports, or run with workers=1."
        )
    modules = {type(edit).__module__ for arm in arms for edit in arm.changes}
    modules |= {str(function.module) for function in _functions(arms, base)}
    modules = {name for name in modules if not name.startswith("vitmods.")}
    return tuple(spelled(sys.modules[name]) if name in sys.modules else name for name in sorted(modules))


def _functions(arms: Sequence[Arm], base: Any) -> list[Function]:
    of_base = base_function(base)
    return [*([of_base] if of_base else []), *(f for arm in arms for f in functions_of(arm.changes))]


def _known_here_alone(arms: Sequence[Arm], base: Any) -> list[str]:
    """Changes and functions that no other process could import."""
    here = [arm.name for arm in arms if any(type(edit).__module__ == "__main__" for edit in arm.changes)]
    return here + [function.name for function in _functions(arms, base) if function.module is None]


def _steps(runner: TrialRunner, work: Work) -> int:
    if isinstance(work, Evaluation):
        return 1
    recipe = runner.settings.recipe_of(work.arm, work.point)
    return resolve_on(recipe, runner.dataset(recipe)).steps


def _workers(how: Running, base: nn.Module, settings: Settings, trials: int) -> int:
    if how.workers is not None:
        return max(1, min(how.workers, trials))
    if _known_here_alone(settings.arms, settings.fixed["base"]):
        return 1
    if how.torch_device.type == "cuda":
        gpus = len(visible_gpus()) if how.device in ("auto", "cuda") else 1  # "cuda:1" names one
        return max(1, min(gpus, trials))
    fitting = _memory_bytes() // 2 // _trial_bytes(base, settings)
    return max(1, min(torch.get_num_threads(), MOST_WORKERS, fitting, trials))


def _trial_bytes(base: nn.Module, settings: Settings) -> int:
    """Roughly the memory of one trial: the interpreter, weights with gradients and Adam's state, and activations."""
    activations = settings.recipe.part_size * activation_bytes(base, base_config(settings, num_classes=2))
    return 600 * 2**20 + 16 * sum(parameter.numel() for parameter in base.parameters()) + activations


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _measure_costs(
    folder: StudyFolder, settings: Settings, models: dict[str, nn.Module], classes: int, how: Running
) -> None:
    """costs.json: each arm once. A later arm is measured beside base again, and base's own numbers stay."""
    known: dict[str, Any] = read_json(folder.costs_file) or {"base": None, "arms": {}}
    missing = {name: model for name, model in models.items() if name != BASE and name not in known["arms"]}
    if not missing or how.cost_seconds <= 0:
        return
    from vitmods.study.cost import measure

    with already_reported():
        chosen = {BASE: models[BASE], **missing}
        costs = measure(chosen, settings.recipe, how.torch_device, how.cost_seconds, base_config(settings, classes))
    costs["arms"] = {**known["arms"], **costs["arms"]}
    costs["base"] = known["base"] or costs["base"]
    write_json(folder.costs_file, costs)
