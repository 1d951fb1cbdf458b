"""Before the first trial: the images are read, every arm's model is built once, and what looks wrong is reported."""

from __future__ import annotations

import copy
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vitmods.adapters.files import cached_checkpoints
from vitmods.adapters.running import tensors_of
from vitmods.adapters.transfer import evaluating
from vitmods.changes.controls import controls
from vitmods.changes.size import Size
from vitmods.data.threads import cores
from vitmods.finetune.adapters import has_adapters
from vitmods.finetune.blended import BlendedNorms, owners_of_new_norms
from vitmods.finetune.roles import ALL, TrainedPart
from vitmods.layers.norms import PowerNorm
from vitmods.layers.norms.contract import SMALL_BATCH, RunningNorm
from vitmods.model.config import ViTConfig
from vitmods.model.names import MODELS, parse_name
from vitmods.model.vit import ViT
from vitmods.recipes.recipe import ModelSettings
from vitmods.recipes.schedule import resolve_on
from vitmods.study.arms import BASE, Arm, Function, base_function, functions_of, is_foreign
from vitmods.study.bases import Base, activation_bytes, base_name, described, model_facts, record_of
from vitmods.study.budget import slowdown
from vitmods.study.cells import Cell, Trial
from vitmods.study.checkpoints import Checkpoint, checkpoint_of
from vitmods.study.defaults import SMALL_SET
from vitmods.study.executors import MOST_WORKERS, StudyOptions
from vitmods.study.executors.processes import free_memory, visible_gpus
from vitmods.study.frozen import frozen_scores, trained_lines
from vitmods.study.grid import AS_IS, Point
from vitmods.study.settings import VAL, Settings
from vitmods.study.store import ChangeFacts, ModelFacts, StudyFolder, StudyImages
from vitmods.study.trial import (
    TrialRunner,
    answer_splits,
    base_config,
    build_model,
    check_images,
    task_of,
    with_modules,
)
from vitmods.tasks.base import TASKS
from vitmods.train.device import resolve
from vitmods.train.optim import freeze, parameter_groups
from vitmods.train.options import RunOptions, check_divides
from vitmods.train.trial import fit_to_images
from vitmods.util.address import named
from vitmods.util.errors import UserError
from vitmods.util.files import log
from vitmods.util.text import first_of, listing, plural

if TYPE_CHECKING:
    from vitmods.data import ImageDataset
    from vitmods.recipes import Recipe

FIRST_IMAGES, VAL_IMAGES, KEPT = 32, 256, 1e-4  # of what an arm changes before its first step; a change below is none
MANY_TRIALS = 10**6  # above any number of workers
MOST_ON_CLUSTER = 32  # Slurm jobs; Ray reports its own capacity
MOST_ON_GPU = 4  # trials; more wait for each other
BUSY = 0.9  # of the cores
SLOWED = 1.1  # seconds of a CPU second
FEW_ARMS = 4  # to which controls are proposed
PHOTOGRAPH = 64
TRAINED = {
    "Ti": "vit_tiny_patch16_224", "S": "vit_small_patch16_224", "B": "vit_base_patch16_224",
    "L": "vit_large_patch16_224",
}  # fmt: skip
Place = tuple[Point, str, ModelSettings]
"""setting, arm, and what the arm's recipe sets of a model"""


@dataclass(frozen=True)
class PreparedStudy:
    """A study before its first trial.

    settings:    with the fingerprint of the images
    models:      description of each model
    notices:     warnings about the arms
    trial_bytes: memory of one trial
    configs:     (setting, arm, what its recipe sets of a model) -> the config of its ViT, or how another model was made
    frozen:      setting -> what the trained weights that base starts from reach without training
    """

    settings: Settings
    runner: TrialRunner
    dataset: ImageDataset
    options: StudyOptions
    models: Mapping[str, ModelFacts]
    notices: tuple[str, ...]
    trial_bytes: int
    configs: dict[Place, Any]
    frozen: Mapping[str, Mapping[str, Any]]

    def workers(self, trials: int) -> int:
        """Count the trials to run at a time: one, by default, if an arm is a function that workers cannot import."""
        return 1 if self._runs_here else workers_for(self.options, trials, self.trial_bytes)

    @property
    def measures_sharing(self) -> bool:
        """Whether trials share GPUs as far as that is measured to be worth it: nothing else was asked for."""
        asked = self.options.workers, self.options.devices_per_trial
        is_here = self.options.cluster.executor == "here" and not self._runs_here
        return is_here and asked == (None, None) and resolve(self.options.device).type == "cuda"

    @property
    def threads(self) -> int:
        """The threads of each worker."""
        return torch.get_num_threads() if self._runs_here else threads_for(self.options, self.trial_bytes)

    @property
    def _runs_here(self) -> bool:
        is_local = any(function.module is None for function in user_functions(self.settings))
        return self.options.workers is None and self.options.processes == 1 and is_local

    def warn(self) -> None:
        """Issue the notices, and the warnings of images and design, which the answer has by itself."""
        for text in (*self.dataset.summary()["warnings"], *self.settings.design.warnings, *self.notices):
            warnings.warn(text, stacklevel=5)  # the caller of Study.run or Study.dry_run
        if text := crowded(self.options, self.threads):
            warnings.warn(text, stacklevel=5)

    def config(self, trial: Trial) -> dict[str, Any]:
        """Return config.json of a trial as this study would write it."""
        cell = trial.cell
        place = cell.setting, cell.arm.name, cell.recipe.model
        if place not in self.configs:  # what is tuned builds another model
            classes, seed = self.dataset.num_classes, self.settings.seeds[0]
            base = base_config(cell, classes)
            self.configs[place] = _made_as(build_cell(cell, base, seed, classes), cell, base, seed)
        return self.runner.config(trial, self.configs[place], self.threads)


def open_study(folder: StudyFolder, settings: Settings, options: StudyOptions) -> PreparedStudy:
    """Read the images, add their fingerprint to the settings, and build every arm once.

    Raises UserError if the folder holds a trial or another study, or if an arm cannot be built or trained.
    """
    check_devices(settings, options)
    facts = folder.facts()
    if facts is None and (folder.path / "config.json").exists():
        raise UserError(f"{named(folder.path)} holds a single trial. Choose another folder for a study with --out.")
    if facts is not None:  # compare what is known before the images are read, which may take a while
        folder.check_same_study({**settings.to_dict(), "images": facts.settings["images"]})
    runner = TrialRunner(folder, settings.measure, replace(options, progress=False))  # the study has a bar
    dataset = runner.dataset(settings.cell(BASE))
    settings = replace(settings, fixed={**settings.fixed, "images": dataset.summary()["fingerprint"]})
    check_images(settings, AS_IS, dataset)
    for source in _sources(settings):
        for seed in settings.seeds_of(BASE):
            checkpoint_of(source, seed)  # a UserError where the seed has none
    return PreparedStudy(settings, runner, dataset, options, *_survey(settings, runner, options))


def build_arms(
    settings: Settings, setting: Point, num_classes: int, classes: Sequence[str] | None = None
) -> Iterator[tuple[Cell, nn.Module]]:
    """Yield every arm's cell under a setting and its model, as it is trained: base first, one model at a time. With
    names of `classes` the heads show what changes do to trained weights (`Start.build`)."""
    cells, seed = settings.cells_at(setting), settings.seeds[0]
    config = base_config(cells[0], num_classes)
    for cell in cells:
        try:
            model = build_cell(cell, config, seed, num_classes, classes)
            for tuned in settings.tune.points:
                _check_training(model, cell, settings.cell(cell.arm.name, setting, tuned), config, seed)
            freeze(model, cell.recipe)
        except UserError as error:
            raise type(error)(" ".join([named_cell(cell, error), *_read(settings)])) from error
        yield cell, model
        del model  # before the next one is built


def named_cell(cell: Cell, error: UserError) -> str:
    """Return what is wrong with a cell, which the message names."""
    return f"{f'{cell.setting}, arm' if cell.setting else 'Arm'} {cell.arm.name}: {error}"


def build_cell(cell: Cell, base: Base, seed: int, num_classes: int, classes: Sequence[str] | None = None) -> nn.Module:
    """Build the model of a cell with a task's modules, as trials of this seed train it."""
    task = task_of(cell)
    model: nn.Module = build_model(base, cell.arm, seed, cell.start, cell.recipe, task.uses_head, classes)
    return with_modules(model, task, num_classes, seed)


def _made_as(model: nn.Module, cell: Cell, base: Base, seed: int) -> Any:
    """Return the config of a cell's ViT, or the record of another library's model, which is without the task's."""
    if (config := described(model)) is not None:
        return config
    head = task_of(cell).uses_head
    is_whole = head and not has_adapters(model)
    backbone = model if is_whole else build_model(base, cell.arm, seed, cell.start, cell.recipe, head)
    return record_of(backbone, base, cell.arm.changes, head)


def _check_training(model: nn.Module, cell: Cell, tuned: Cell, config: Base, seed: int) -> None:
    """Raise UserError if the recipe of a tuned point does not suit the task or an arm's model."""
    recipe = tuned.recipe
    task_of(tuned)  # raises for a loss that the task does not have
    if (recipe.model, recipe.train) != (cell.recipe.model, cell.recipe.train):
        model = build_cell(tuned, config, seed, config.num_classes)
    elif TrainedPart.of(recipe.train).adapters is not None:  # which stay in the model
        model = copy.deepcopy(model)
    trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
    freeze(model, recipe)
    parameter_groups(model, 0.0, recipe.optimizer.layer_decay)
    for parameter, is_trained in trained.items():
        parameter.requires_grad_(is_trained)


def _survey(
    settings: Settings, runner: TrialRunner, options: StudyOptions
) -> tuple[dict[str, ModelFacts], tuple[str, ...], int, dict[Place, Any], dict[str, Mapping[str, Any]]]:
    """Build every arm under every setting, so that a wrong one is refused before training.

    Returns the description of each model, the warnings about arms, the bytes of the largest trial, the configs, and
    what trained weights reach before training.
    """
    models: dict[str, ModelFacts] = {}
    frozen: dict[str, Mapping[str, Any]] = {}
    configs: dict[Place, Any] = {}
    trial_bytes = 0
    sizes: dict[Any, Point] = {}
    points_by_notice: dict[str, list[str]] = {}
    for point in settings.sweep.points:
        base_cell = settings.cell(BASE, point)
        dataset = runner.dataset(base_cell)
        if point:
            check_images(settings, point, dataset)
        others = tuple(item for item in point.to_dict().items() if item[0] != "limit_train")
        count = len(dataset.splits["train"])
        if (other := sizes.setdefault((others, count), point)) is not point:
            raise UserError(f"{other} and {point} have the same {count:,} training images: leave one of them out.")
        base = base_config(base_cell, dataset.num_classes)
        arms_by_warning: dict[tuple[str, str], list[str]] = {}
        first_steps: dict[str, _FirstStep] = {}
        has_trained_head = base_cell.start is not None and (
            Checkpoint.open(checkpoint_of(base_cell.start["source"], settings.seeds[0])).classes == dataset.classes
        )
        for cell, model in build_arms(settings, point, dataset.num_classes, dataset.classes):
            arm, task, facts = cell.arm, task_of(cell), describe_model(cell, model, base)
            if cell.start and arm.name == BASE and task.uses_head and dataset.target == "class":
                frozen[str(point)] = _frozen(settings, runner, model, cell)
            if cell.start and not arm.start and task.uses_head and hasattr(dataset, "plain_images"):
                effect = _before_first_step(cell, model, runner.dataset(cell), has_trained_head, first_steps)
                if effect is not None:
                    say(options, f"{arm.name} before the first step: {effect.summary}")
                    facts = replace(facts, changes=(*facts.changes, effect))
            models[cell.name] = facts
            configs[point, arm.name, cell.recipe.model] = _made_as(model, cell, base, settings.seeds[0])
            trial_bytes = max(trial_bytes, _bytes_of_trial(cell, model, base, dataset.num_classes))
            of_arm = (*arm_warnings(model, cell.recipe, dataset), *(("", text) for text in task.warnings(model)))
            for warning in of_arm:
                arms_by_warning.setdefault(warning, []).append(arm.name)
            try:
                options.save_memory(model)
            except UserError as error:
                raise UserError(f"Arm {arm.name}: {error}") from error
            del model  # before the next one is built
        for notice in (
            *join_warnings(arms_by_warning),
            *few_images(base_cell, dataset),
            *_seen(settings, dataset),
            *_read(settings),
            *_without_controls(settings, base),
        ):
            points_by_notice.setdefault(notice, []).append(str(point))
    notices = tuple(
        text if len(points) == len(settings.sweep.points) else f"{'; '.join(points)}: {text}"
        for text, points in points_by_notice.items()
    )
    for line in trained_lines(settings, frozen):
        say(options, line)
    return models, notices, trial_bytes, configs, frozen


def _bytes_of_trial(cell: Cell, model: nn.Module, base: Base, num_classes: int) -> int:
    """Estimate the memory of a trial: the interpreter, weights with gradients and Adam's state, a teacher, and
    activations of all views."""
    task, recipe = task_of(cell), cell.recipe
    weights = sum(parameter.numel() for parameter in model.parameters())
    image = task.synthetic(2, (base.in_chans, *base.img_size), num_classes, recipe)
    views = 1 + sum(view.numel() for view in image.views) / image.inputs.numel()
    activations = recipe.part_size * views * activation_bytes(model, base)
    return 600 * 2**20 + (16 + 4 * task.has_teacher()) * weights + int(activations)


def _frozen(settings: Settings, runner: TrialRunner, model: nn.Module, cell: Cell) -> Mapping[str, Any]:
    """What base reaches before training, as study.json has it for these images and weights, or measured now."""
    start, facts = settings.fixed["start"], runner.folder.facts()
    weights = start["fingerprint"] or runner.fingerprint(checkpoint_of(start["source"], settings.seeds[0]))
    key = {"images": settings.fixed["images"], "weights": weights}
    known: Mapping[str, Any] = facts.data.get("frozen", {}).get(str(cell.setting), {}) if facts else {}
    if all(known.get(name) == value for name, value in key.items()):
        return known
    fixed = {name: value for name, value in cell.fixed.items() if name != "recipe"}
    measured = json.dumps([key, fixed, settings.seeds if settings.folds else 0], default=str)
    if measured not in _MEASURED:
        _MEASURED[measured] = {**key, **frozen_scores(model, runner, settings, cell)}
    return _MEASURED[measured]


_MEASURED: dict[str, Mapping[str, Any]] = {}
"""weights and images -> what `_frozen` returned: a time budget opens a study with several lengths of training"""


@dataclass(frozen=True)
class _FirstStep:
    """A model before its first step: shapes of its tensors, outputs (B, K) on training images, and top-1 in percent on
    validation images if the head is trained for their classes."""

    shapes: Mapping[str, torch.Size]
    outputs: torch.Tensor
    top1: float | None

    @classmethod
    def of(cls, model: nn.Module, dataset: ImageDataset, has_trained_head: bool) -> _FirstStep:
        shapes = {name: value.shape for name, value in model.state_dict().items()}
        outputs = outputs_on(model, next(dataset.plain_images("train", FIRST_IMAGES, FIRST_IMAGES)))
        if not has_trained_head or VAL not in dataset.splits or dataset.train.labels.ndim > 1:
            return cls(shapes, outputs, None)
        batches = dataset.plain_batches(VAL, VAL_IMAGES, FIRST_IMAGES)
        hits = [outputs_on(model, pixels).argmax(1) == torch.as_tensor(targets) for pixels, targets in batches]
        return cls(shapes, outputs, 100 * float(torch.cat(hits).double().mean()))

    def compare(self, base: _FirstStep) -> ChangeFacts:
        """Say what an arm does to the trained weights of base before its first step."""
        spread = (base.outputs - base.outputs.mean(0)).norm().clamp_min(torch.finfo(torch.float64).tiny)
        difference = float((self.outputs - base.outputs).norm() / spread)
        new = [_pattern(name) for name, shape in self.shapes.items() if base.shapes.get(name) != shape]
        lost = [_pattern(name) for name, shape in base.shapes.items() if self.shapes.get(name) != shape]
        text = "The outputs stay as they are."
        if not difference < KEPT:
            text = f"The outputs on training images differ by {difference:.0%} of their spread."
            if self.top1 is not None:
                text += f" Top-1 is {self.top1:.1f} instead of {base.top1:.1f} on up to {VAL_IMAGES} validation images."
        if lost:
            text += f" Trained weights are replaced: {first_of([*dict.fromkeys(lost)], 3)}."
        if new:
            text += f" New weights: {first_of([*dict.fromkeys(new)], 3)}."
        return ChangeFacts("start", "Before the first step", text)


def _before_first_step(
    cell: Cell, model: nn.Module, dataset: ImageDataset, has_trained_head: bool, first_steps: dict[str, _FirstStep]
) -> ChangeFacts | None:
    """Describe what an arm's changes do to trained weights before the first step; None without changes. first_steps:
    has that of base, the first arm, from its own call on."""
    fit_to_images(model, dataset, cell.recipe)
    blended = BlendedNorms(*([model] if cell.recipe.norm_blend else []))
    step = _FirstStep.of(model, dataset, has_trained_head)
    blended.remove()
    base = first_steps.setdefault(BASE, step)
    if not cell.arm.changes:
        return None
    effect = step.compare(base)
    if blended.norms:
        over = f"Its norms are blended in over the first {cell.recipe.norm_blend:.0%} of the steps."
        effect = replace(effect, summary=f"{effect.summary} {over}")
    return effect


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def outputs_on(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """A model's outputs (B, K) in evaluation mode."""
    with torch.no_grad(), evaluating(model):
        outputs = model(images)
    return next(tensors_of(outputs)).flatten(1).cpu().double()


def describe_model(cell: Cell, model: nn.Module, base: Base) -> ModelFacts:
    """Describe a cell's model and its changes for a reader who does not know them."""
    arm = cell.arm
    changes = [ChangeFacts(str(change), **change.describe()) for change in arm.changes]
    if arm.start is not None:
        summary = f"Its weights are those of {arm.start}; base starts from its own."
        changes.append(ChangeFacts(f"from {arm.start}", "Starts from its own trained weights", summary))
    if (trained := arm.recipe.get("train")) == ALL:
        changes.append(ChangeFacts(f"train({ALL})", "All weights are trained", "Nothing is frozen."))
    elif trained is not None and all(trained != getattr(change, "trains", "") for change in arm.changes):
        changes.append(ChangeFacts(f"train({trained})", **TrainedPart.of(trained).way._asdict()))
    if others := {name: value for name, value in arm.recipe.items() if name != "train"}:
        names = listing([name.replace("_", " ") for name in others])
        summary = f"Sets {names} of the recipe; the other settings are those of base."
        changes.append(ChangeFacts(Arm("", (), others).text, "Another recipe", summary))
    name = cell.start["source"] if cell.start else base_name(cell.fixed["base"])
    return ModelFacts(arm.start or name, model_facts(model, base), tuple(changes))


def _sources(settings: Settings) -> list[str]:
    """List the trained weights that base and arms start from."""
    if not (start := settings.fixed.get("start")):
        return []
    return list(dict.fromkeys([start["source"], *(arm.start or start["source"] for arm in settings.arms)]))


def _seen(settings: Settings, dataset: ImageDataset) -> Iterator[str]:
    """Warn of evaluated images that trained weights were trained on, if their study is on this disk."""
    splits, studies = answer_splits(settings, dataset), dict[Path, tuple[StudyImages, str]]()
    for source in _sources(settings):
        if images := StudyImages.of_weights(source):
            studies.setdefault(images.folder, (images, source))
    for images, source in studies.values():
        if count := sum(images.trained_on(dataset.splits[split]) for split in splits):
            yield (
                f"{count:,} images of {' and '.join(splits)} were training images of the weights in {source}: scores "
                "on them are optimistic. Use the same splits for both trainings."
            )


def user_functions(settings: Settings) -> list[Function]:
    """Return the functions that make base or alter models, which workers must be able to import."""
    changes = (change for arm in settings.arms for change in arm.changes)
    return [*filter(None, [base_function(settings.fixed["base"])]), *functions_of(changes)]


def workers_for(options: StudyOptions, trials: int, trial_bytes: int) -> int:
    """Count the trials to run at a time: as asked for, or as many as fit the GPUs, or cores and memory."""
    if options.workers is not None:
        return max(1, min(options.workers, trials))
    if options.cluster.executor != "here":
        return max(1, min(MOST_ON_CLUSTER, trials))
    if resolve(options.device).type == "cuda":
        gpus, on_each = _gpus(options), options.trials_per_device
        devices = max(1, len(gpus))
        if on_each is None:
            fitting = min(map(free_memory, gpus), default=0) // 2 // trial_bytes
            on_each = max(1, min(fitting, MOST_ON_GPU, torch.get_num_threads() // devices))
        return max(1, min(devices * on_each // options.processes, trials))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    processes = min(torch.get_num_threads(), MOST_WORKERS, memory // 2 // trial_bytes)
    return max(1, min(processes // options.processes, trials))


def threads_for(options: StudyOptions, trial_bytes: int) -> int:
    """Count the threads of each worker. They change the last digits of a trial's numbers, so they do not depend on how
    many trials a study has, or are missing."""
    if options.cluster.executor != "here":
        return options.cluster.cpus_per_trial
    if options.workers is None and resolve(options.device).type == "cpu":
        options = replace(options, devices_per_trial=None, shard=False)  # nor on the processes of a trial
    return max(1, torch.get_num_threads() // (workers_for(options, MANY_TRIALS, trial_bytes) * options.processes))


def crowded(options: StudyOptions, threads: int) -> str:
    """Return what to do where a worker's threads would wait for each other, since the cores of this machine are at work
    already; empty where they are not."""
    if threads == 1 or options.cluster.executor != "here" or resolve(options.device).type != "cpu":
        return ""
    load, there = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, cores()
    if load < BUSY * there or slowdown() < SLOWED:  # the load is also that of this run a minute ago, and of a host
        return ""
    return (
        f"This machine is at work already (a load of {load:.1f} on {plural(there, 'core')}), so the {threads} threads "
        "of a worker are likely to wait for each other most of the time: OMP_NUM_THREADS=1 before the command is "
        "faster."
    )


def parallel_trials(options: StudyOptions) -> int:
    """Count the trials that do not slow each other down: a process per GPU, or MOST_WORKERS of them on a CPU."""
    devices = len(_gpus(options)) if resolve(options.device).type == "cuda" else MOST_WORKERS
    return max(1, devices // options.processes)


def _gpus(options: StudyOptions) -> range | list[int]:
    every = options.device in ("auto", "cuda")
    return range(len(visible_gpus())) if every else [resolve(options.device).index or 0]


def check_devices(settings: Settings, options: StudyOptions) -> None:
    """Raise UserError, before images are read, where the devices of a trial are not there or do not suit the study."""
    count, on_each = options.processes, options.trials_per_device or 1
    if options.cluster.executor == "here":
        kind = resolve(options.device).type
        if on_each > 1 and kind != "cuda":
            raise UserError(f"Trials share a GPU, and this is a {kind.upper()}: {on_each} at a time are --workers.")
        there = {"cuda": len(_gpus(options)), "cpu": os.cpu_count() or 1}.get(kind, 1)
        what = plural(there, "core" if kind == "cpu" else "GPU")
        if count > 1 and count > there:
            raise UserError(
                f"{count} devices per trial are more than the {what} of this machine or --device: at most {there}, or "
                "several machines (--executor ray or slurm)."
            )
        if count > 1 and kind == "cuda" and (options.workers or 1) * count > there:
            most = plural(there // count, "trial")
            raise UserError(f"{what} are enough for {most} at a time, each on {count}: --workers {there // count}.")
    elif options.cluster.executor == "ray" and on_each > 1 and not options.gpus:
        raise UserError(f"With Ray {on_each} trials share a GPU: drop --device cpu, or --devices-per-trial.")
    for cell in settings.cells if count > 1 else ():
        for point in settings.tune.points:
            tuned = settings.cell(cell.arm.name, cell.setting, point)
            check_divides(tuned.recipe.batch_size, count)
            options.check_task(task_of(tuned), tuned.recipe)


def say(options: RunOptions, line: str) -> None:
    """Print a line on the progress of a study, unless the options ask for silence."""
    if options.progress:
        log(line)


def few_images(cell: Cell, dataset: ImageDataset) -> list[str]:
    """Advise to start from trained weights if photographs are few and the model is trained from scratch."""
    images, weights = len(dataset.splits["train"]), trained_weights(cell.fixed)
    if not weights or images >= SMALL_SET:
        return []
    text = (
        f"{images:,} training images are few to train {cell.fixed['base']} from scratch. Start from trained "
        f"weights (--from {weights}, docs/finetune.md): accuracy is far higher, and changes may rank differently."
    )
    if cached := cached_checkpoints():
        text += f" These are on this machine already: --from {first_of(cached, 3)}."
    return [text]


def _read(settings: Settings) -> list[str]:
    """Say that all models are read where a change cannot be put into the library's own."""
    if settings.fixed.get("in_place", True):
        return []
    reasons = (getattr(edit, "needs_reading", "") for arm in settings.arms for edit in arm.changes)
    reason = next(filter(None, reasons), "an earlier arm needs it.")
    return [f"Base and all arms are built as vitmods ViTs, so that costs compare the changes alone: {reason}"]


def _without_controls(settings: Settings, base: Base) -> Iterator[str]:
    """Propose the controls that a study of few arms lacks (`vitmods.changes.controls`)."""
    if not isinstance(base, ViTConfig) or len(settings.arms) > FEW_ARMS:
        return
    there = {edit for arm in settings.arms for edit in arm.changes if len(arm.changes) == 1}
    missing: dict[str, list[str]] = {}
    for arm in settings.arms:
        for brings, name, change in controls(arm.changes, base) if arm.changes else ():
            starts_anew = "start" in settings.fixed and isinstance(change, Size)  # its MLPs, beside trained weights
            if change not in there and not starts_anew:
                missing.setdefault(f"{brings}, which the arm {name}={change} tells apart", []).append(arm.name)
    for text, names in missing.items():
        verb = "brings" if len(names) == 1 else "bring"
        yield f"{listing(names)} also {verb} {text}. Without it a verdict is on both together (docs/controls.md)."


def trained_weights(settings: Mapping[str, Any]) -> str:
    """Return timm's name of weights that suit a study's base and images; empty without any, or if it has weights."""
    base, sides = settings["base"], settings["img_size"]
    photographs = settings["in_chans"] == 3 and min(sides) >= PHOTOGRAPH
    if (
        "start" in settings
        or not photographs
        or not isinstance(base, str)
        or is_foreign(base)
        or "?" in base
        or base in MODELS
        or base.startswith("ViT5-")
    ):
        return ""
    size, *shape, _ = parse_name(base)
    if size == "mu" and TASKS[settings["task"]].uses_head:
        size, shape = "Ti", [None, 1, 16]  # another base, which classifies photographs better than any mu from scratch
    suits = shape == [None, 1, 16] and not any(side % 16 for side in sides)
    return TRAINED.get(size, "") if suits else ""


def join_warnings(arms_by_warning: Mapping[tuple[str, str], Sequence[str]]) -> Iterator[str]:
    """Yield a sentence for each warning of `arm_warnings`, with the names of its arms."""
    for (change, text), names in arms_by_warning.items():
        subject = f"{'Arm' if len(names) == 1 else 'Arms'} {', '.join(names)}"
        yield f"{subject}{f' (for {change})' if change and [*names] != [change] else ''}: {text}"


def arm_warnings(model: nn.Module, recipe: Recipe, dataset: ImageDataset) -> Iterator[tuple[str, str]]:
    """Yield the change that each warning is about, if it is one, and the warning."""
    # A norm that reads the whole batch in training keeps running statistics for the evaluation.
    running = [module for module in model.modules() if isinstance(module, RunningNorm)]
    if recipe.part_size < SMALL_BATCH and any([*norm.buffers(recurse=False)] for norm in running):
        text = (
            f"the norms take statistics from batches of {recipe.part_size}, and below {SMALL_BATCH} images these are "
            "noisy. Use a larger batch, or a norm that does without."
        )
        yield "", text
    warmup = max((norm.warmup for norm in model.modules() if isinstance(norm, PowerNorm)), default=0)
    batches = resolve_on(recipe, dataset).steps * recipe.accumulate
    if warmup >= batches:
        text = (
            f"PowerNorm warms up for {warmup:,} batches, and a trial has {batches:,}. So it normalizes by the batch "
            "throughout; the running statistics serve the evaluation alone. norm(kind=power,warmup=...) sets another "
            "warm-up."
        )
        yield "", text
    if recipe.norm_blend and not owners_of_new_norms(model):
        yield "", "norm_blend has no effect: base has norms at the places of this arm's."
    for change in model.changes if isinstance(model, ViT) else ():
        if advice := change.advice(model.vit_config):
            yield str(change), advice
