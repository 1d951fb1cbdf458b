"""One trial: the images, the model that an arm makes of base, and the training that belongs to a seed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import vitmods
from vitmods import data
from vitmods.model.config import ViTConfig
from vitmods.model.vit import vit
from vitmods.recipes import Augment, Recipe
from vitmods.study.arms import Arm
from vitmods.study.evaluation import EvaluatedOnVal, evaluate_trial
from vitmods.study.models import Base, ForeignBase, edited, make_base, record_of
from vitmods.study.plan import Evaluation, Settings, Trial, Work
from vitmods.study.start import Start
from vitmods.study.store import WARNINGS, StudyFolder, read_json
from vitmods.study.warnings import already_reported
from vitmods.tasks import Classification
from vitmods.train import train_trial
from vitmods.util.files import write_json

if TYPE_CHECKING:
    from vitmods.data import ImageDataset


IMAGE_SETTINGS = (
    "data",
    "img_size",
    "in_chans",
    "split_seed",
    "val_fraction",
    "test_fraction",
    "limit_train",
    "limit_val",
    "unreadable",
)


def image_settings(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """What decides which images a trial sees; config.json keeps it, so that the trial can be evaluated again."""
    return {name: fixed[name] for name in IMAGE_SETTINGS if name in fixed}


def load_images(settings: Mapping[str, Any], augment: Augment, workers: int = 0) -> ImageDataset:
    """The data set that image settings describe, augmented so. UserError lists what cannot be read."""
    options = image_settings(settings)
    return data.load(options.pop("data"), augment=augment, workers=workers, **options)


def base_config(settings: Settings, num_classes: int) -> Base:
    """The base model for these images: the named or given one with their size, channels and classes."""
    fixed = settings.fixed
    return make_base(fixed["base"], num_classes, fixed["img_size"], fixed["in_chans"])


def build_model(
    config: Base,
    arm: Arm,
    seed: int,
    start: Mapping[str, Any] | None = None,
    recipe: Recipe | None = None,
) -> nn.Module:
    """The arm's model at step 0, with what the arm's `recipe` sets of it (dropout, drop path, initialization).

    Base is initialized from the seed, or has the weights of `start` (the fields of a `Start`) and a head from the seed,
    and is then changed; so every arm starts from base's own weights wherever shapes allow, and parameters that a change
    adds are drawn from the same seed. An arm with weights of its own has those, changed already.
    """
    settings = recipe.model.to_config() if recipe else {}
    torch.manual_seed(seed)
    if arm.start is not None:
        assert start is not None, "an arm has weights of its own only where base has"
        assert isinstance(config, ViTConfig), "a checkpoint says what base is"
        return Start(arm.start, None, start["positions"]).build(config, seed, settings)
    if isinstance(config, ForeignBase):
        base = config.build(recipe.model if recipe else None)
    else:
        base = Start(**start).build(config, seed, settings) if start else vit(config, **settings)
    torch.manual_seed(seed)
    return edited(base, arm.changes, config)


def task_of(recipe: Recipe) -> Classification:
    """The task that a recipe trains: classification with its loss."""
    return Classification.from_recipe(recipe)


class TrialRunner:
    """Runs trials of one study, one after the other; the images are read once.

    device, data_workers, checkpoint_minutes and progress decide how a trial is run, never what comes out.
    """

    def __init__(
        self,
        folder: StudyFolder,
        settings: Settings,
        device: str = "auto",
        data_workers: int = 0,
        checkpoint_minutes: float = 5.0,
        progress: bool = False,
    ):
        self.folder, self.settings = folder, settings
        self._data_workers = data_workers
        self._device, self._checkpoint_minutes, self._progress = device, checkpoint_minutes, progress
        self._datasets: dict[Augment, ImageDataset] = {}

    def dataset(self, recipe: Recipe) -> ImageDataset:
        """The images as a recipe prepares them; recipes of the same augmentation share them."""
        if recipe.augment not in self._datasets:
            self._datasets[recipe.augment] = load_images(self.settings.fixed, recipe.augment, self._data_workers)
        return self._datasets[recipe.augment]

    def __call__(self, work: Work) -> None:
        """Train, or go on training, and evaluate the weights; or evaluate a finished trial's on another split."""
        if isinstance(work, Evaluation):
            self._evaluate_trial(work.trial, work.split)
            return
        self._train(work)
        split = self.settings.evaluated_on(self.dataset(self.settings.recipe).eval_split)
        if not self.folder.is_done(work, split, self.settings.measure):
            self._evaluate_trial(work, split)

    def _evaluate_trial(self, trial: Trial, split: str) -> None:
        recipe = self.settings.recipe_of(trial.arm, trial.point)
        dataset, measure = self.dataset(recipe), self.settings.measure
        evaluate_trial(self.folder.trial(trial), dataset, recipe, measure, split, self._device)

    def _train(self, trial: Trial) -> None:
        """Train, or go on training, and keep what was warned of."""
        out = self.folder.trial(trial)
        caught: list[warnings.WarningMessage] = []
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("default")
                with already_reported():
                    self.train(trial, out)
        finally:  # outside of the block, where showing a warning no longer records it
            _keep_warnings(out, caught)

    def train(self, trial: Trial, out: Path) -> dict[str, Any]:
        """The same in any folder."""
        recipe = self.settings.recipe_of(trial.arm, trial.point)
        dataset = self.dataset(recipe)
        start = self.settings.fixed.get("start")
        config = base_config(self.settings, dataset.num_classes)
        model = build_model(config, trial.arm, trial.seed, start, recipe)
        record = {"arm": trial.arm.name, "changes": trial.arm.short, "images": image_settings(self.settings.fixed)}
        made = record_of(model, config, trial.arm.changes)
        record |= {"model": made} if made else {}
        record |= {"start": {**start, "arm": trial.arm.start} if trial.arm.start else start} if start else {}
        return train_trial(
            model,
            task_of(recipe),
            EvaluatedOnVal(dataset) if self.settings.grid else dataset,
            recipe,
            seed=trial.seed,
            out=out,
            device=self._device,
            checkpoint_every_minutes=self._checkpoint_minutes,
            progress=self._progress,
            extra_config=record,
        )


def _keep_warnings(out: Path, caught: list[warnings.WarningMessage]) -> None:
    """Show them, and leave ours in the trial's folder: what a worker prints nobody reads, the report is read."""
    for warning in caught:
        warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
    ours = [
        str(warning.message) for warning in caught if Path(vitmods.__file__).parent in Path(warning.filename).parents
    ]
    if ours:
        write_json(out / WARNINGS, [*(read_json(out / WARNINGS) or []), *ours])
