"""Real images (scikit-learn's digits) and a model small enough to train in a fraction of a second."""

import dataclasses
import importlib
import json
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from torch import nn

import vitmods as vm
from vitmods import data
from vitmods.data.batch import Batch
from vitmods.recipes import Recipe
from vitmods.tasks import Classification, Task
from vitmods.train import RunOptions, checkpoint, train_trial
from vitmods.train.interrupt import Interrupted
from vitmods.train.loop import TrialRun

RECIPE = Recipe().with_(epochs=3, batch_size=40, lr=5e-3, crop="none", flip=0.0, eval_crop=1.0)
WALL = ("wall_s", "images_per_s", "data_wait")


@dataclass
class Bench:
    """Runs trials on 160 training digits: 4 steps of 40 an epoch."""

    dataset: object

    def recipe(self, **overrides):
        return RECIPE.with_(**overrides)

    def images_for(self, recipe):
        return dataclasses.replace(self.dataset, augment=recipe.augment)

    def model(self, **overrides):
        torch.manual_seed(7)
        return vm.vit("mu2/2", img_size=8, in_chans=1, num_classes=10, **overrides)

    def train(self, out, model=None, recipe=None, task=None, **options):
        recipe = recipe or self.recipe()
        task = task or Classification.from_recipe(recipe)
        arguments = {name: options.pop(name) for name in ("seed", "metadata", "logged", "processes") if name in options}
        run_options = RunOptions(**{"device": "cpu", "tensorboard": False, **options})
        return train_trial(
            model or self.model(), task, self.images_for(recipe), recipe, out=out, options=run_options, **arguments
        )

    def run(self, out, recipe, model=None, task=None):
        """A run before its first step."""
        task, options = task or Classification.from_recipe(recipe), RunOptions("cpu", tensorboard=False)
        return TrialRun(model or self.model(), task, self.images_for(recipe), recipe, folder=out, options=options)

    def stop(self, monkeypatch, out, at, **options):
        """Train until an interruption after so many steps."""
        step = TrialRun._train_step

        def stops(run, batch):
            if run.step == at:
                raise Interrupted("stopped", 2)
            step(run, batch)

        with monkeypatch.context() as patch:
            patch.setattr(TrialRun, "_train_step", stops)
            with pytest.raises(Interrupted):
                self.train(out, **options)

    @staticmethod
    def rows(out):
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    def numbers(self, out):
        """All that must be the same after any interruption: weights bit for bit, rows and result without wall times."""
        rows = [{k: v for k, v in row.items() if k not in WALL} for row in self.rows(out)]
        result = json.loads((out / "result.json").read_text())
        result = {k: v for k, v in result.items() if k not in WALL}
        return {"weights": (out / "model.safetensors").read_bytes(), "rows": rows, "result": result}


class GivenGradients(Task):
    """A task whose loss has the gradients that are given for each batch."""

    name, evaluate, synthetic = "given", None, None

    def __init__(self, gradients):
        self.gradients = gradients

    def loss(self, model, batch):
        model(batch.inputs)
        gradients = self.gradients[int(batch.index[0])]
        return sum((p * gradients[name]).sum() for name, p in model.named_parameters()), {}


class OneBatchAnEpoch:
    eval_split = val_split = "val"
    splits = MappingProxyType({"train": range(64)})

    def steps_per_epoch(self, batch_size):
        return 1

    def train_batches(self, *, seed, epoch, batch_size, start=0):
        yield Batch(inputs=torch.zeros(1, 1), targets=torch.zeros(1), index=torch.tensor([epoch]))


class Parameters(nn.Module):
    def __init__(self, values):
        super().__init__()
        for name, value in values.items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, x):
        return x


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models this small are slower on several threads, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def imported():
    """What processes that are forked need, once here and not in each of them."""
    for name in ("torch.distributed.fsdp", "torch._dynamo", "torchvision.transforms.v2", "scipy.ndimage", "timm.optim"):
        importlib.import_module(name)


@pytest.fixture(scope="session")
def bench():
    few = {"limit_train": 160, "limit_val": 40, "test_fraction": 0.05}
    return Bench(data.load("digits", img_size=(8, 8), in_chans=1, augment=RECIPE.augment, **few))


@pytest.fixture
def goes_on(bench, tmp_path, monkeypatch):
    """Check that a trial which is stopped after so many steps ends in the bits of one in tmp_path / "whole" that is
    not; returns its checkpoint. `make()` -> model"""

    def check(at=5, make=bench.model, **options):
        bench.train(tmp_path / "whole", make(), **options)
        bench.stop(monkeypatch, tmp_path / "parts", at, model=make(), **options)
        saved = checkpoint.load(tmp_path / "parts")
        bench.train(tmp_path / "parts", make(), **options)
        assert bench.numbers(tmp_path / "parts") == bench.numbers(tmp_path / "whole")
        return saved

    return check


@pytest.fixture
def given_gradients(tmp_path):
    """A run of parameters (name -> tensor) whose gradients at step k are those of the k-th dict; an epoch is a step."""

    def make(values, gradients, recipe):
        options = {"folder": tmp_path, "options": RunOptions("cpu", tensorboard=False)}
        return TrialRun(Parameters(values), GivenGradients(gradients), OneBatchAnEpoch(), recipe, **options)

    return make
