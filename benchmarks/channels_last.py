"""Training steps with weights and images in channels_last memory against the usual memory, paired and interleaved: the
whole model, and its stem alone.

    python benchmarks/channels_last.py

Images come in the usual memory, as from a loader, so that each step also copies them into the other order.
"""

import argparse
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from hmlp import model_step
from paired import one_thread, paired, report
from torch import nn

import vitmods as vm

RUNS = {"S/16": (224, 8), "mu3/4": (32, 64)}
"""pixels, images"""
STEMS = {"linear": (), "levit": ("stem(kind=levit)",), "hmlp": ("stem(kind=hmlp)",)}
"""arms"""


class ChannelsLast(nn.Module):
    """A copy of a module that computes in channels_last memory."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = deepcopy(module).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.module(images.contiguous(memory_format=torch.channels_last))
        return out


def stem_step(stem: nn.Module, images: torch.Tensor) -> Callable[[], None]:
    grad = torch.randn_like(stem(images))

    def step() -> None:
        stem.zero_grad(set_to_none=True)
        stem(images).backward(grad)

    return step


def measure(size: str, stem: str, batch: int, rounds: int) -> dict[str, Any]:
    pixels, _ = RUNS[size]
    images = torch.randn(batch, 3, pixels, pixels)
    model = vm.vit(size, img_size=pixels)
    for arm in STEMS[stem]:
        model = vm.apply(model, *vm.parse_changes(arm))
    found = {}
    parts: tuple[tuple[str, nn.Module, Any, int], ...]
    parts = ("model", model, model_step, rounds), ("stem alone", model.patch_embed, stem_step, 4 * rounds)
    for name, part, step, count in parts:
        steps = {"usual": step(part, images), "channels_last": step(ChannelsLast(part), images)}
        found[f"{size} {stem} batch {batch}, {name}"] = paired(steps, "usual", count)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--batch", type=int, help="images, instead of each size's own")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    one_thread()
    for size in options.sizes:
        for stem in STEMS:
            found = measure(size, stem, options.batch or RUNS[size][1], options.rounds)
            report("channels_last", found, None)


if __name__ == "__main__":
    main()
