"""A ViT after its exact conversion to RMSNorm against itself before, at 224 px, paired and interleaved.

    python benchmarks/rms_conversion.py --out benchmarks/results

Both have the same function. Training is forward, loss and backward, without the optimizer. "twin" is the old model once
more: what it is off 1 is the noise of the measurement.
"""

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from paired import one_thread, paired, report, saved_bytes
from torch.nn import functional as F

import vitmods as vm


def training(model: vm.ViT, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        F.cross_entropy(model(images), labels).backward()

    return step


def inference(model: vm.ViT, images: torch.Tensor) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        with torch.inference_mode():
            return model(images)

    return step


def measure(size: str, batch: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
    old = vm.vit(size).train()
    models = {"LayerNorm": old, "twin": copy.deepcopy(old), "RMSNorm, exact": vm.apply(old, vm.Norm("rms"))}
    train = {name: training(model, images, labels) for name, model in models.items()}
    infer = {name: inference(copy.deepcopy(model).eval(), images) for name, model in models.items()}
    trained, used = f"{size} training, batch {batch}", f"{size} inference, batch {batch}"
    rows = {trained: paired(train, "LayerNorm", rounds), used: paired(infer, "LayerNorm", 2 * rounds)}
    for name, model in models.items():
        rows[trained][name]["saved_mb"] = saved_bytes(model, lambda model=model: model(images)) / 1e6
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["Ti/16", "S/16"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    one_thread()
    results: dict[str, Any] = {}
    for size in args.sizes:
        results |= measure(size, args.batch, args.rounds)
    report("rms_conversion", results, args.out)


if __name__ == "__main__":
    main()
