"""What vitmods' training loop costs per step over a bare PyTorch loop that does the same training.

    python benchmarks/loop_overhead.py [--out FOLDER]

Both train the same micro ViT on the same batch in memory with AdamW, clipping and a learning rate per step. Ours also
logs rows and TensorBoard scalars, counts accuracy, looks for signals, checkpoints that are due, and losses that are not
finite. One thread, CPU clock, one step of each in turn: whenever our loop asks for its next batch, two bare loops make
a step first, whose difference to each other shows what the clock cannot resolve. Goal: below 300 us a step.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from paired import one_thread, report
from torch import nn

import vitmods as vm
from vitmods.data.dataset import Batch
from vitmods.recipes import Recipe
from vitmods.recipes.schedule import lr_at, resolve
from vitmods.tasks import Classification
from vitmods.train import RunOptions, TrialRun
from vitmods.train.interrupt import StopRequest
from vitmods.train.loggers import ProgressBar
from vitmods.train.optim import make_optimizer

STEPS, BLOCK = 3000, 60  # rows are logged twice a block
RECIPE = Recipe(epochs=1, batch_size=8)
BATCH = Batch(
    torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 10, torch.arange(8)
)


class TakingTurns:
    """Data whose batches cost nothing; between two steps of the loop that reads it, each bare loop makes one."""

    eval_split = val_split = "val"

    def __init__(self, others: dict[str, Callable[[int], None]]) -> None:
        self.others = others
        self.seconds: dict[str, list[float]] = {name: [] for name in (*others, "ours")}

    splits: ClassVar = {"train": range(STEPS * RECIPE.batch_size)}

    def steps_per_epoch(self, batch_size: int) -> int:
        return STEPS

    def train_batches(self, *, seed: int, epoch: int, batch_size: int, start: int = 0) -> Iterator[Batch]:
        for step in range(start, STEPS):
            names = list(self.others) if step % 2 else list(self.others)[::-1]
            for name in names:
                self._time(name, lambda name=name, step=step: self.others[name](step))
            before = time.process_time()
            yield BATCH
            self.seconds["ours"].append(time.process_time() - before)

    def eval_batches(self, split: str, batch_size: int) -> Iterator[Batch]:
        yield BATCH

    def summary(self) -> dict[str, Any]:
        return {}

    def _time(self, name: str, work: Callable[[], None]) -> None:
        before = time.process_time()
        work()
        self.seconds[name].append(time.process_time() - before)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return vm.vit("mu/4", img_size=8, in_chans=1, num_classes=10)


def bare_step() -> Callable[[int], None]:
    model = make_model().train()
    optimizer = make_optimizer(model, RECIPE)
    parameters = list(model.parameters())
    length = resolve(RECIPE, STEPS * RECIPE.batch_size)

    def work(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr_at(length, step)
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(BATCH.inputs), BATCH.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return work


def summary(seconds: list[float], bare: list[float]) -> dict[str, float]:
    """Microseconds a step, and what is added to bare, over blocks of steps: what happens now and then is counted."""
    blocks = range(BLOCK, STEPS - BLOCK, BLOCK)  # the first block warms up
    added = [sum(seconds[i : i + BLOCK]) - sum(bare[i : i + BLOCK]) for i in blocks]
    low, middle, high = (q / BLOCK * 1e6 for q in statistics.quantiles(added, n=4))
    step = statistics.median(seconds) * 1e6
    return {"us_per_step": step, "added_us": middle, "added_us_low": low, "added_us_high": high}


def measure(tensorboard: bool) -> dict[str, Any]:
    turns = TakingTurns({"bare": bare_step(), "bare again": bare_step()})
    with tempfile.TemporaryDirectory() as folder:
        options = {"folder": Path(folder), "options": RunOptions("cpu", tensorboard=tensorboard)}
        run = TrialRun(make_model(), Classification(), turns, RECIPE, **options)
        run.close("finished", run.run(StopRequest(), ProgressBar(False, "", STEPS, 0)))
    return {name: summary(seconds, turns.seconds["bare"]) for name, seconds in turns.seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    options = parser.parse_args()
    one_thread()
    results = {
        "without TensorBoard": measure(tensorboard=False),
        "with TensorBoard": measure(tensorboard=True),
    }
    report("loop_overhead", results, options.out)


if __name__ == "__main__":
    main()
