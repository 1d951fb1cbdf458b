"""One trial: the images, the model that an arm makes of base, the training of a seed, and its evaluation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import vitmods
from vitmods.data.batch import for_device
from vitmods.evals.base import PROTOCOLS, ProtocolResult
from vitmods.evals.outputs import Progress, silent
from vitmods.evals.protocols import check_protocols, run_protocols
from vitmods.finetune.delta import fingerprint_of
from vitmods.layers.norms.contract import SmallBatchWarning
from vitmods.layers.norms.whitening import NotFittedWarning
from vitmods.model.vit import vit
from vitmods.recipes import Recipe
from vitmods.recipes.schedule import resolve_on
from vitmods.stats.width import mean_over_images
from vitmods.study.arms import Arm
from vitmods.study.bases import Base, ForeignBase, edited, make_base, record_of
from vitmods.study.cells import Cell, Trial, image_settings, images_key
from vitmods.study.checkpoints import Checkpoint, Start, checkpoint_of, open_trial
from vitmods.study.dependencies import code_of
from vitmods.study.grid import Point
from vitmods.study.settings import VAL, Measure, Settings, make_measure
from vitmods.study.state import read_trial
from vitmods.study.store import WARNINGS, Facts, StudyFolder, read_warnings
from vitmods.tasks.base import DEFAULT, TASKS, Measured, Task, make_task
from vitmods.tasks.features import without_head
from vitmods.train import RunOptions, train_trial
from vitmods.train.device import place, usual_workers
from vitmods.train.distributed import ALONE, Processes
from vitmods.train.loggers import LoggedRun, key_of
from vitmods.train.loop import MeasureSplit
from vitmods.train.trial import RESULT, read_scores, trial_config, write_scores
from vitmods.util.address import named
from vitmods.util.errors import UserError
from vitmods.util.files import write_json

if TYPE_CHECKING:
    from vitmods.data import Batch, ImageDataset
    from vitmods.evals.options import Options


class EvaluatedOnVal:
    """Images for a trial that others may be preferred to: it is evaluated on val, and test is out of its reach.

    Raises UserError without a val split."""

    eval_split = val_split = VAL

    def __init__(self, dataset: ImageDataset):
        check_val(dataset)
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of a copy that is not filled in yet
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def as_uint8(self) -> EvaluatedOnVal:
        """For a GPU."""
        return EvaluatedOnVal(self._dataset.as_uint8())

    def for_process(self, rank: int, world_size: int) -> EvaluatedOnVal:
        """For one of several processes."""
        return EvaluatedOnVal(self._dataset.for_process(rank, world_size))

    def encoded(self, encode: Callable[[str], Any]) -> EvaluatedOnVal:
        """With tokens in place of captions."""
        pairs: Any = self._dataset
        return EvaluatedOnVal(pairs.encoded(encode))

    def eval_batches(self, split: str, batch_size: int) -> Iterator[Batch]:
        assert split != "test", "a trial must not see test before the choice"
        return self._dataset.eval_batches(split, batch_size)


def check_val(dataset: ImageDataset) -> None:
    """Raise UserError for images without a split to choose on."""
    if VAL not in dataset.splits:
        raise UserError(
            "Without a val split nothing can be chosen. Make one from train with a val_fraction above 0 "
            "(--val-fraction 0.2), or give a folder named val."
        )


def answer_splits(settings: Settings, dataset: ImageDataset) -> tuple[str, ...]:
    """The splits that the answer is about: test, or val without a test split. Where vitmods made both and nothing is
    chosen on val, all images that are held out; with folds test alone, so that each image counts once."""
    if split := settings.fixed.get("answer_on"):
        return (split,)
    made = dataset.summary()["split_origin"].startswith("made") and {VAL, "test"} <= set(dataset.splits)
    return (VAL, "test") if made and not (settings.tune or settings.folds) else (dataset.eval_split,)


def check_images(settings: Settings, setting: Point, dataset: ImageDataset) -> None:
    """UserError where the images of a setting lack a split that is needed, or do not allow a recipe or the metric's
    protocol."""
    splits, split = dataset.splits, dataset.eval_split
    if settings.tune:
        check_val(dataset)
    if settings.tune and split == VAL:
        raise UserError(
            "The test split is missing: what is chosen on val cannot be reported on val, where the chosen number is "
            "too good. Add a test split (a folder named test); a source with train alone is cut into all three."
        )
    cells = settings.cells_at(setting)
    for cell, point in product(cells, settings.tune.points):
        resolve_on(settings.cell(cell.arm.name, setting, point).recipe, dataset)
    measure, evaluated_on, task = settings.measure, {split, *([VAL] if settings.tune else [])}, task_of(cells[0])
    for evaluated in evaluated_on:
        if protocol := measure.metric.protocol:
            check_protocols(dataset, [protocol], split=evaluated, options=measure.options, task=task)
        else:
            task.check_metric(measure.name, splits[evaluated])
    constant = task.constant_scores([splits[name] for name in evaluated_on], dataset.num_classes)
    if constant.get(measure.name) == 1 and measure.metric.higher_is_better:
        raise UserError(f"Any prediction reaches 100 % in {measure.name} on these images: compare by another metric.")


def measure_model(
    model: nn.Module,
    task: Task,
    recipe: Recipe,
    dataset: ImageDataset,
    protocols: Sequence[str],
    split: str,
    batch_size: int,
    device: str,
    options: Options | None = None,
    progress: Progress = silent,
) -> dict[str, ProtocolResult]:
    """Run protocols on a trained model, or without any the task's own evaluation, whose result has the task's name."""
    placement = place(device, recipe.precision)
    model = model.to(placement.device)
    if protocols:
        return run_protocols(
            model, dataset, protocols, split=split, batch_size=batch_size, device=placement.device, options=options,
            task=task, autocast=placement.autocast, progress=progress,
        )  # fmt: skip
    with placement.autocast():
        batches = for_device(dataset, placement.device).eval_batches(split, batch_size)
        measured = task.evaluate(model.eval(), (batch.to(placement.device) for batch in batches))
    names = {metric.name for metric in task.metrics}
    means = {name: mean_over_images(scores) for name, scores in measured.per_image.items() if name in names}
    result = ProtocolResult(
        {name: value for name, value in measured.metrics.items() if name in names},
        {name: dict(zip(dataset.classes, values, strict=True)) for name, values in measured.detail.items()},
        {name: ends for name, ends in means.items() if ends is not None},
        measured.per_image,
    )
    return {task.name: result}


def trial_scores(folder: Path, split: str) -> dict[str, NDArray[Any]]:
    """Read the scores of each image of a split, (n,) arrays by name and `ids`, from the training's own evaluation and
    from protocols. Empty for tasks without scores of single images. Raises UserError for a damaged file."""
    return read_scores(folder / f"{split}.npz")


def load_images(
    settings: Mapping[str, Any], recipe: Recipe, workers: int = 0, cache_dir: Path | None = None
) -> ImageDataset:
    """Load the data set that image settings describe, prepared as the recipe says. UserError where it does not suit."""
    options = image_settings(settings)
    answer_on = options.pop("answer_on", None)
    kind = TASKS[options.pop("task", DEFAULT)]
    options |= {"augment": recipe.augment, "workers": workers, "cache_dir": cache_dir}
    dataset = kind.from_recipe(kind.fitted(recipe)).load_data(options.pop("data"), **options)
    if answer_on == "test":
        dataset.split("test")  # a UserError without one
    images: Any = EvaluatedOnVal(dataset) if answer_on == VAL else dataset
    return images


def base_config(cell: Cell, num_classes: int) -> Base:
    """The base model for these images: the named or given one with their size, channels and classes."""
    fixed = cell.fixed
    return make_base(fixed["base"], num_classes, fixed["img_size"], fixed["in_chans"], fixed.get("in_place", True))


def build_model(
    config: Base,
    arm: Arm,
    seed: int,
    start: Mapping[str, Any] | None = None,
    recipe: Recipe | None = None,
    head: bool = True,
    classes: Sequence[str] | None = None,
) -> nn.Module:
    """The arm's model at step 0, with what the arm's `recipe` sets of it (dropout, drop path, initialization).

    Base is initialized from the seed, or has the weights of `start` (the fields of a `Start`) and a head from the seed,
    and is then changed; so every arm starts from base's own weights wherever shapes allow, and parameters that a change
    adds are drawn from the same seed. An arm that starts from its own weights has those. head: whether the
    model's logits are used. classes: names, for a head that shows what a change does (`Start.build`).
    """
    torch.manual_seed(seed)
    if arm.start is not None:
        assert start is not None, "an arm starts from its own weights only where base does"
        return edited(Start(arm.start, None, start["positions"]).build(config, seed, recipe), (), config, head)
    if start:
        base = Start(**start).build(config, seed, recipe, classes)
    elif isinstance(config, ForeignBase):
        base = config.build(recipe.model if recipe else None)
    else:
        base = vit(config, **(recipe.model.to_config() if recipe else {}))
    torch.manual_seed(seed)
    return edited(base, arm.changes, config, head)


def task_of(cell: Cell) -> Task:
    """The task of a cell, with the recipe's loss. UserError where it does not suit the images' size."""
    task = make_task(cell.fixed.get("task", DEFAULT), cell.recipe)
    task.check_size(tuple(cell.fixed["img_size"]))
    return task


def with_modules(backbone: nn.Module, task: Task, classes: int, seed: int) -> Any:
    """The trained model: without its head if the task does not use it, and with the task's modules, drawn from the
    seed. UserError if patch dropout or drop key would have no effect in the task."""
    config: Any = getattr(backbone, "vit_config", None)
    if config is not None and config.patch_drop and "patch_drop" in task.unread:
        raise UserError(f"Patch dropout has no effect in the task {task.name}: leave patchdropout out.")
    if config is not None and task.needs_trained_backbone and (config.patch_drop or config.key_drop):
        raise UserError("The backbone is frozen, so that patchdropout and dropkey have no effect: leave them out.")
    torch.manual_seed(seed)
    return task.wrap(backbone if task.uses_head else without_head(backbone), classes)


class TrialRunner:
    """Runs trials of one study, one after the other; the images are read once."""

    def __init__(
        self,
        folder: StudyFolder,
        measure: Measure,
        options: RunOptions = RunOptions(),  # noqa: B008, frozen
        processes: Processes = ALONE,
    ):
        """measure: what trials are evaluated by. processes: those that train each trial together."""
        self.folder, self.measure, self.options, self._processes = folder, measure, options, processes
        workers = options.data_workers
        self.data_workers = usual_workers(options.device) if workers is None else workers
        self._datasets: dict[tuple[Any, ...], ImageDataset] = {}
        self._steps: dict[tuple[Cell, int], int] = {}
        facts = folder.facts()
        self.fingerprints = facts.fingerprints if facts else {}
        self._fingerprints: dict[str, str] = {}  # of the checkpoints that trials start from

    def dataset(self, cell: Cell, seed: int = 0) -> ImageDataset:
        """The images of a cell as its recipe prepares them, in the fold of the seed where there are folds; what is
        prepared alike is shared. Raises UserError if they are not those of the study: it has one version of the
        images, which each process compares before its first step."""
        images, recipe = cell.images(seed), cell.recipe
        key = recipe.augment, recipe.task_parts, (name := images_key(images))
        if key not in self._datasets:
            load = partial(load_images, images, recipe, self.data_workers, self.options.cache_dir)
            dataset = self._processes.in_turn(load)
            found = dataset.summary()["fingerprint"]
            if self.fingerprints.setdefault(name, found) != found:
                if name == next(iter(self.fingerprints)):  # the images that the folder lists
                    self.folder.images.check_same(dataset.splits)  # says how many
                raise UserError(
                    f"{named(self.folder.path)} is of other images: they have changed since it began. Put the old ones "
                    "back to resume it, or choose another folder with --out."
                )
            self._datasets[key] = dataset
        return self._datasets[key]

    def steps(self, cell: Cell, seed: int = 0) -> int:
        """Count the steps of a training; a bar asks for those of all trials, often."""
        kind = cell, seed % (cell.folds or 1)
        if kind not in self._steps:
            self._steps[kind] = resolve_on(cell.recipe, self.dataset(cell, seed)).steps
        return self._steps[kind]

    def __call__(self, trial: Trial) -> None:
        """Train or resume a trial and evaluate its weights, in the first of several processes; those of a trial on all
        images cannot be."""
        folder = self.folder.trial(trial)
        was_trained = (folder / RESULT).exists()
        self._train(trial)
        if not self._processes.first or trial.cell.is_on_all_images:
            return
        images = self._images(trial)
        split = images.eval_split
        if not read_trial(self.folder, trial, (split,), self.measure).ended:
            self._evaluate(trial, split)
        elif was_trained:  # its scores of images may be lost
            for name in {VAL, split} & {*images.splits}:
                if not (folder / f"{name}.npz").exists():
                    self._evaluate(trial, name)

    def config(self, trial: Trial, model: Any, threads: int) -> dict[str, Any]:
        """Return config.json of a trial as training with so many threads would write it.

        model: the config of the arm's ViT, or how another library's model was made (`record_of`).
        """
        metadata = self._describe(trial, model if isinstance(model, dict) else None)
        return trial_config(
            model, task_of(trial.cell), self._images(trial), trial.cell.recipe, trial.seed, self.options,
            self._processes, metadata, threads,
        )  # fmt: skip

    def _describe(self, trial: Trial, model: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return what config.json holds of a trial besides recipe, data and environment."""
        cell, arm = trial.cell, trial.arm
        images = cell.images(trial.seed)
        description: dict[str, Any] = {"arm": arm.name, "changes": arm.short, "images": images}
        if model is not None:
            description["model"] = model
        if start := cell.start:
            description["start"] = {**start, "arm": arm.start} if arm.start else start
            description["start_weights"] = None if arm.start else start["fingerprint"]
            if description["start_weights"] is None:
                description["start_weights"] = self.fingerprint(checkpoint_of(arm.start or start["source"], trial.seed))
        kind = TASKS[cell.fixed.get("task", DEFAULT)]
        if code := code_of(arm, cell.fixed["base"], kind, cell.recipe):
            description["code"] = code
        return description

    def fingerprint(self, checkpoint: str) -> str:
        """The fingerprint of a checkpoint's weights."""
        if checkpoint not in self._fingerprints:
            self._fingerprints[checkpoint] = fingerprint_of(Checkpoint.open(checkpoint).backbone.state_dict())
        return self._fingerprints[checkpoint]

    def _images(self, trial: Trial) -> Any:
        """The images as far as the trial may see them."""
        images = self.dataset(trial.cell, trial.seed)
        return EvaluatedOnVal(images) if trial.for_tuning else images

    def _evaluate(self, trial: Trial, split: str) -> None:
        """Run the measure's protocol, or the task's own evaluation without one, on a finished trial's weights.

        Writes the metrics to <split>.json, and those of each image to <split>.npz, in the trial's folder. Raises
        UserError if the images or the options do not allow the protocol.
        """
        recipe, dataset, measure = trial.cell.recipe, self._images(trial), self.measure
        folder = self.folder.trial(trial)
        protocols, model = [name] if (name := measure.metric.protocol) else [], open_trial(folder)
        results = measure_model(
            model, task_of(trial.cell), recipe, dataset, protocols, split, recipe.part_size, self.options.device,
            measure.options,
        )  # fmt: skip
        ((name, result),) = results.items()
        if measure.name not in result.metrics:
            raise UserError(
                f"The {name} evaluation does not give {measure.name} with these options; compare another metric."
            )
        if result.per_image:
            scores = {"ids": np.array(dataset.splits[split].ids, dtype=str), **result.per_image}
            write_scores(folder / f"{split}.npz", {**trial_scores(folder, split), **scores})
        evaluation = self.folder.evaluation(trial, split)
        record = {"options": measure.to_dict()["options"], **result.to_dict()}
        protocols_done = {**evaluation["protocols"], name: record}
        write_json(folder / f"{split}.json", {**evaluation, "protocols": protocols_done, "failed": None})

    def _train(self, trial: Trial) -> None:
        """Train or resume; warnings of vitmods are shown, and kept in the trial's folder for the report."""
        out = self.folder.trial(trial)
        caught: list[warnings.WarningMessage] = []
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("default")
                with already_reported():
                    self.train(trial, out)
        finally:  # outside of the block, where showing a warning no longer records it
            for warning in caught:
                warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
            package = Path(vitmods.__file__).parent
            texts = [str(warning.message) for warning in caught if package in Path(warning.filename).parents]
            if texts and self._processes.first:
                write_json(out / WARNINGS, [*read_warnings(out), *texts])

    def train(self, trial: Trial, out: Path) -> dict[str, Any]:
        """Train or resume a trial in any folder, with a bar if the options ask for progress; returns result.json."""
        cell, recipe, images, task = trial.cell, trial.cell.recipe, self._images(trial), task_of(trial.cell)
        config = base_config(cell, images.num_classes)
        backbone = build_model(config, trial.arm, trial.seed, cell.start, recipe, task.uses_head)
        model = with_modules(backbone, task, images.num_classes, trial.seed)
        metadata = self._describe(trial, record_of(backbone, config, trial.arm.changes, task.uses_head))
        logged = None  # a trial outside of studies describes itself by its folder
        if self.options.log and (facts := self.folder.facts()):
            fields = {"seed": trial.seed, **trial.point.to_dict(), **trial.setting.to_dict()}
            place_in_study = out.relative_to(self.folder.path).as_posix()
            logged = replace(logged_run(self.folder, facts, trial.arm, place_in_study, fields), name=str(trial))
        return train_trial(
            model,
            task,
            images,
            recipe,
            measure=self._measure_in_training(task, recipe, images),
            seed=trial.seed,
            out=out,
            options=self.options,
            processes=self._processes,
            metadata=metadata,
            logged=logged,
        )

    def _measure_in_training(self, task: Task, recipe: Recipe, images: Any) -> MeasureSplit | None:
        """Return the function that measures `task.compared_by` on a split, if the images allow it."""
        if task.compared_by is None:
            return None
        measured, device = make_measure(task.compared_by), self.options.device
        protocol = measured.metric.protocol
        if PROTOCOLS[protocol].target != images.target:
            return None

        def measure(model: nn.Module, split: str) -> Measured:
            result = measure_model(
                model, task, recipe, images, [protocol], split, recipe.part_size, device, measured.options
            )[protocol]
            return Measured(result.metrics, result.per_image)

        return measure


def logged_run(folder: StudyFolder, facts: Facts, arm: Arm, what: str, fields: Mapping[str, Any]) -> LoggedRun:
    """Describe a trial, or another part of a study, to loggers."""
    study, base = folder.path.resolve().name, facts.settings["base"]
    of_study = {"study": study, "arm": arm.name, "changes": arm.text, "data": facts.settings["data"]}
    of_study |= {"base": base} if isinstance(base, str) else {}
    return LoggedRun(study, what, key_of(study, facts.created, what), {**of_study, **fields})


@contextmanager
def already_reported() -> Iterator[None]:
    """Suppress warnings that the study gives once for all of its trials."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SmallBatchWarning)
        warnings.simplefilter("ignore", NotFittedWarning)  # trials compute it
        yield
