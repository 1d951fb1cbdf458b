"""Made-up images and a model that is quick, with what the protocols read of them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from vitmods.data.batch import Batch
from vitmods.evals.options import Options
from vitmods.evals.outputs import ModelOutputs


class MadeUpImages:
    """Images of noise around a mean of their class, uint8 (1, 4, 4); `splits` name -> how many of each class."""

    name, in_chans, img_size, class_map, target = "made up", 1, (4, 4), None, "class"

    def __init__(self, splits, classes=3, seed=0, noise=60.0):
        rng = np.random.default_rng(seed)
        means = rng.uniform(60, 190, (classes, 16))
        self.classes = tuple(f"class {number}" for number in range(classes))
        self.splits, self.pixels = {}, {}
        for name, counts in splits.items():
            labels = rng.permutation(np.repeat(np.arange(classes), counts))
            self.pixels[name] = np.clip(means[labels] + rng.normal(0, noise, (len(labels), 16)), 0, 255).astype("uint8")
            self.splits[name] = SimpleNamespace(labels=labels, label_sets=None)
        self.passes = 0

    def summary(self):
        counts = {name: np.bincount(split.labels, minlength=len(self.classes)) for name, split in self.splits.items()}
        return {
            "splits": {
                name: {"count": int(count.sum()), "per_class": dict(zip(self.classes, count.tolist()))}
                for name, count in counts.items()
            }
        }

    @property
    def num_classes(self):
        return len(self.classes)

    def split(self, name):
        return self.splits[name]

    def in_random_crops(self):
        return self

    def steps_per_epoch(self, batch_size):
        return len(self.splits["train"].labels) // batch_size or 1

    def train_batches(self, *, seed, epoch, batch_size):
        passes = self.passes
        yield from self.eval_batches("train", batch_size)
        self.passes = passes

    def eval_batches(self, split, batch_size, change=None):
        self.passes += 1
        every = torch.from_numpy(self.splits[split].labels)
        for index in torch.arange(len(every)).split(batch_size):
            pixels = torch.from_numpy(self.pixels[split])[index].reshape(-1, 1, 4, 4)
            pixels = pixels if change is None else change(pixels, index)
            yield Batch(inputs=pixels / 255 - 0.5, targets=every[index], index=index)


class SmallModel(nn.Module):
    """Two linear maps; the second is the head."""

    def __init__(self, classes=3, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.head = nn.Linear(16, 8), nn.Linear(8, classes)

    def get_classifier(self):
        return self.head

    def forward(self, x):
        return self.head(self.body(x.flatten(1)).tanh())


@pytest.fixture(scope="session")
def made_up():
    """made_up(train=[40, 30, 20], test=20) -> images."""
    usual = {"train": 40, "val": 10, "test": 30}
    return lambda classes=3, seed=0, noise=60.0, **splits: MadeUpImages(splits or usual, classes, seed, noise)


@pytest.fixture(scope="session")
def small_model():
    return SmallModel


@pytest.fixture(scope="session")
def outputs_of():
    def make(model, dataset, split="test", batch_size=32, **options):
        return ModelOutputs(model.eval(), dataset, split, batch_size, torch.device("cpu"), Options(**options))

    return make
