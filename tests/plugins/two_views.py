"""A task from outside the package that learns without labels: two views of an image agree, against a slow teacher."""

import copy

import torch
from torch.nn import functional as F

from vitmods.data import Batch
from vitmods.tasks import TASKS, Measured, Metric, Task
from vitmods.tasks.base import noise


def two_views(stored, targets, draw):
    images = torch.stack([torch.from_numpy(image) for image in stored])
    return (images, images.flip(-1), images[:, :, ::2, ::2]), targets


@TASKS.register("two_views")
class TwoViews(Task):
    name, title = "two_views", "two views of an image agree"
    target = "any"
    metrics = (Metric("agreement", "agreement of two views", "", unit=""),)
    compared_by, protocol_epochs = "knn", 2
    joint = staticmethod(two_views)
    uses_head = False
    failure = None

    def begin(self, model):
        self.teacher = copy.deepcopy(model).requires_grad_(False).eval()

    def evaluated(self, model):
        return self.teacher

    def before_step(self, model, step, steps):
        model.patch_embed.proj.bias.grad = None  # it is not trained

    def after_step(self, model, step, steps):
        with torch.no_grad():
            for kept, trained in zip(self.teacher.parameters(), model.parameters()):
                kept.lerp_(trained, 0.1)

    def state_dict(self):
        return {"teacher": self.teacher.state_dict()}

    def load_state_dict(self, state):
        self.teacher.load_state_dict(state["teacher"])

    def loss(self, model, batch):
        target = F.normalize(self.teacher(batch.views[0]), dim=1)
        similarity = (F.normalize(model(batch.inputs), dim=1) * target).sum(1)
        return -similarity.mean(), {"agreement": similarity.mean()}

    @torch.no_grad()
    def evaluate(self, model, batches):
        values = []
        for batch in batches:
            first, second = (F.normalize(model(x), dim=1) for x in (batch.inputs, batch.inputs.flip(-1)))
            values.append((first * second).sum(1))
        mean = torch.cat(values).mean().item()
        return Measured({"agreement": mean, "loss": -mean}, failure=self.failure)

    def synthetic(self, count, shape, classes, recipe):
        images = noise(count, shape)
        return Batch(images, torch.zeros(count), torch.arange(count), (images, images[:, :, ::2, ::2]))


class Contrast(TwoViews):
    """The images of the whole batch, of all processes, are told apart."""

    whole_batch = True
    evaluated = Task.evaluated

    def loss(self, model, batch):
        first, second = (self.gather(F.normalize(model(x), dim=1)) for x in (batch.inputs, batch.views[0]))
        logits = 10 * first @ second.T - self.mean(first.mean())
        return F.cross_entropy(logits, torch.arange(len(first))), {}
