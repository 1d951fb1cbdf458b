"""A task from outside the package, whole in one file: how far away the wall in an image is.

It brings its own part of the recipe, target, source, data view, recipe, loss and metric.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from vitmods.data import Batch
from vitmods.data.multilabel import TARGETS, Target
from vitmods.data.records import Records, Source
from vitmods.data.sources import Spec, data_source
from vitmods.recipes import TASK_PARTS, Recipe, TaskPart
from vitmods.recipes.registry import recipe
from vitmods.tasks import TASKS, Measured, Metric, Task, TaskModel
from vitmods.tasks.base import noise
from vitmods.util.errors import UserError


@TASK_PARTS.register("depth")
@dataclass(frozen=True)
class DepthPart(TaskPart):
    """Settings of the task depth."""

    meters: float = 255.0
    """the largest depth"""
    jitter: float = 0.0
    """largest change of an image's brightness, with that of its depth"""
    ranges: ClassVar = {"meters": (1.0, 1e4), "jitter": (0, 1)}


@recipe(data="walls", task="depth", expected="none")
def small_depth(epochs: int = 2) -> Recipe:
    """Walls in two epochs."""
    return Recipe().with_(epochs=epochs, batch_size=8, crop="none", flip=0.0, jitter=0.1)


@dataclass(frozen=True)
class Depth:
    meters: float

    @property
    def stamp(self) -> str:
        return str(self.meters)


def from_class(source: Source) -> Source:
    """The class of an image as its depth."""
    splits = {
        name: replace(part, annotations=tuple(Depth(float(label)) for label in part.labels))
        for name, part in source.splits.items()
    }
    return replace(source, splits=splits, target="depth")


TARGETS.add("depth", Target("a depth", "Train it with --task depth.", {"class": from_class}))


@data_source("walls", "walls:NUMBER", "gray walls, the darker the farther")
def walls(spec: Spec) -> Source:
    n = int(spec.rest)
    ids = tuple(f"{i:03d}" for i in range(n))
    depths = tuple(Depth(float(i)) for i in range(n))

    def fetch(i: int) -> np.ndarray:
        return np.full((8, 8), 255 - i, dtype=np.uint8)

    records = Records(ids, np.zeros(n, np.int64), ids, fetch, np.arange(n), annotations=depths)
    return Source("walls", ("wall",), {"train": records}, target="depth")


class DepthModel(TaskModel):
    def __init__(self, backbone):
        super().__init__(backbone)
        self.depth = nn.Linear(backbone.vit_config.num_classes, 1)

    def forward(self, images):
        return self.depth(self.backbone(images))[:, 0]


def views(stored, annotated):
    """Images as they are, and their depths, float32 (B,)."""
    images = torch.stack([torch.from_numpy(image.copy()) for image in stored])
    return images, torch.tensor(
        [0.0 if target.annotation is None else target.annotation.meters for target in annotated]
    )


def training_views(part, stored, annotated, draw):
    """The same, darker or brighter."""
    images, meters = views(stored, annotated)
    generator = torch.Generator().manual_seed(hash((draw.seed, draw.epoch, int(draw.views[0]))))
    change = 255 * part.jitter * (2 * torch.rand(len(meters), generator=generator) - 1).round()
    brighter = (images.float() + change[:, None, None, None]).clamp(0, 255).to(torch.uint8)
    return (brighter,), meters - change


@TASKS.register("depth")
@dataclass(frozen=True)
class DepthTask(Task):
    name = "depth"
    title = "how far away the wall is"
    target = "depth"
    metrics = (Metric("depth_error", "error of depth", "", higher_is_better=False, unit=""),)
    usual_recipe = "small_depth"
    recipe_part = DepthPart
    unread = ("loss", "label_smoothing")

    part: DepthPart = field(default_factory=DepthPart)

    @classmethod
    def from_recipe(cls, recipe):
        return cls(recipe.part(DepthPart))

    @property
    def joint(self):
        return partial(training_views, self.part)

    @property
    def joint_view(self):
        return lambda stored, annotated, img_size, augment: views(stored, annotated)

    def check_size(self, img_size):
        if img_size != (8, 8):
            raise UserError("Walls are 8 x 8.")

    def wrap(self, backbone, classes):
        return DepthModel(backbone)

    def loss(self, model, batch):
        return ((model(batch.inputs) - batch.targets / self.part.meters) ** 2).mean(), {}

    def evaluate(self, model, batches):
        errors = [(model(b.inputs) - b.targets / self.part.meters).abs().detach() for b in batches]
        per_image = torch.cat(errors)
        return Measured(
            {"depth_error": per_image.mean().item(), "loss": per_image.mean().item()},
            {"depth_error": per_image.numpy()},
        )

    def synthetic(self, count, shape, classes, recipe):
        return Batch(noise(count, shape), torch.zeros(count), torch.arange(count))
