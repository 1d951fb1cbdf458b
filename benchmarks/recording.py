"""What `--record gradients` adds to a training step: two trials side by side, step by step, their rows written.

python benchmarks/recording.py --out benchmarks/results
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from paired import one_thread, paired, report

import vitmods as vm
from vitmods.data.batch import Batch
from vitmods.recipes import Recipe
from vitmods.tasks import Classification
from vitmods.train import RunOptions
from vitmods.train.loop import TrialRun

MODELS = {
    "mu3/2 at 8 px, batch 64": ("mu3/2", 8, 64),
    "Ti/4 at 32 px, batch 32": ("Ti/4", 32, 32),
    "S/16 at 64 px, batch 16": ("S/16", 64, 16),
}
ROUNDS = 5


@dataclass
class OneBatch:
    """The same images at every step, none to evaluate on."""

    batch: Batch
    eval_split: str = "val"
    val_split: str = "val"
    splits: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.splits = {"train": range(len(self.batch) * 10_000)}

    def steps_per_epoch(self, batch_size: int) -> int:
        return 10_000

    def train_batches(self, **_: Any) -> Iterator[Batch]:
        while True:
            yield self.batch


def steps(model: str, size: int, count: int, record: tuple[str, ...], folder: Path) -> Callable[[], None]:
    """A step, and every tenth time the row that a trial writes then."""
    torch.manual_seed(0)
    images = torch.randn(count, 3, size, size)
    data = OneBatch(Batch(images, torch.arange(count) % 10, torch.arange(count)))
    recipe = Recipe().with_(epochs=1, batch_size=count)
    how = RunOptions("cpu", tensorboard=False, progress=False, record=record)
    net = vm.vit(model, img_size=size, num_classes=10)
    run = TrialRun(net, Classification.from_recipe(recipe), data, recipe, folder=folder, options=how)
    run.model.train()

    def step() -> None:
        run._train_step(data.batch)
        if run.step % 10 == 0:
            run._log()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    options = parser.parse_args()
    one_thread()
    results = {}
    for name, (model, size, count) in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            variants = {}
            for variant, record in (("plain", ()), ("plain again", ()), ("gradients", ("gradients",))):
                (Path(folder) / variant).mkdir()
                variants[variant] = steps(model, size, count, record, Path(folder) / variant)
            results[name] = paired(variants, "plain", ROUNDS, repeats=5 if size < 32 else 1)
    report("recording", results, options.out)


if __name__ == "__main__":
    main()
