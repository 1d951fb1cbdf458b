"""A task from outside the package: how bright an image is, by a module beside the backbone, against a running mean."""

import torch
from torch import nn

from vitmods.data import Batch
from vitmods.tasks import TASKS, Measured, Metric, Task, TaskModel
from vitmods.tasks.base import noise


class Gauge(TaskModel):
    lr_scales = {"scale": 10.0}  # noqa: RUF012
    roles = {"scale": "other"}  # noqa: RUF012

    def __init__(self, backbone):
        super().__init__(backbone)
        self.scale = nn.Linear(backbone.vit_config.num_classes, 1)

    def forward(self, images):
        return self.scale(self.backbone(images))[:, 0]


def upside_down(stored, targets, draw):
    """Augments images and what belongs to them together: every second image is turned."""
    assert draw.augment.crop == "none"
    turned = [image[:, ::-1].copy() if i % 2 else image for i, image in zip(draw.index.tolist(), stored)]
    images = torch.stack([torch.from_numpy(image) for image in turned])
    return (images, images[:, :, ::2, ::2]), {"class": targets, "turned": torch.from_numpy(draw.index % 2)}


@TASKS.register("brightness")
class Brightness(Task):
    name, title = "brightness", "how bright an image is"
    metrics = (Metric("brightness_error", "error of brightness", "", higher_is_better=False, unit=""),)

    def wrap(self, backbone, classes):
        return Gauge(backbone)

    def begin(self, model):
        self.center = torch.zeros(())

    def after_step(self, model, step, steps):
        assert 0 < step <= steps
        self.center = 0.9 * self.center + 0.1 * self._last

    def state_dict(self):
        return {"center": self.center}

    def load_state_dict(self, state):
        self.center = state["center"]

    def loss(self, model, batch):
        error = model(batch.inputs) - batch.inputs.mean(dim=(1, 2, 3)) + self.center
        self._last = batch.inputs.mean()
        return (error**2).mean(), {"center": self.center}

    def evaluate(self, model, batches):
        errors = torch.cat([(model(b.inputs) - b.inputs.mean(dim=(1, 2, 3))).abs().detach() for b in batches])
        return Measured(
            {"brightness_error": errors.mean().item(), "loss": errors.mean().item()},
            {"brightness_error": errors.numpy()},
        )

    def synthetic(self, count, shape, classes, recipe):
        return Batch(noise(count, shape), torch.zeros(count), torch.arange(count))
