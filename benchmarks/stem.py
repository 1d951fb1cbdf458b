"""The Dual PatchNorm stem against the paper's listing: forward and backward, and inference, paired and interleaved.

    python benchmarks/stem.py --out benchmarks/results

The listing cuts patches and calls LayerNorm, Linear, LayerNorm. The plain stem, a strided convolution as timm's
PatchEmbed, stands beside them.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from paired import one_thread, paired, report
from timm.layers import PatchEmbed
from torch import nn

from vitmods.layers import DualPatchNormStem, LinearStem, StemSize
from vitmods.layers.stems import patchify

SIZES = {"mu6/4": (32, 4, 32, 64), "Ti/16": (224, 16, 192, 4), "S/16": (224, 16, 384, 4), "B/16": (224, 16, 768, 4)}
"""pixels of the image and of a patch, width, images"""


class Listing(nn.Module):
    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.side, values = (patch, patch), 3 * patch**2
        norms = nn.LayerNorm(values, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.layers = nn.Sequential(norms[0], nn.Linear(values, width), norms[1])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(patchify(images, self.side))


def training(stem: nn.Module, images: torch.Tensor, grad: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        stem.zero_grad(set_to_none=True)
        stem(images).backward(grad)

    return step


def inference(stem: nn.Module, images: torch.Tensor) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        with torch.inference_mode():
            return stem(images)

    return step


def measure(size: str, batch: int, rounds: int) -> dict[str, Any]:
    pixels, patch, width, _ = SIZES[size]
    images, patches = torch.randn(batch, 3, pixels, pixels), (pixels // patch) ** 2
    grad = torch.randn(batch, patches, width)
    built = StemSize(pixels, patch, 3, width)
    stems: dict[str, nn.Module] = {
        "listing": Listing(patch, width),
        "dual patchnorm": DualPatchNormStem(built),
        "plain": LinearStem(built),
        "timm PatchEmbed": PatchEmbed(pixels, patch, 3, width),
    }
    repeats = max(1, round(20_000_000 / (batch * patches * width * patch**2)))
    train = {name: training(stem, images, grad) for name, stem in stems.items()}
    infer = {name: inference(stem, images) for name, stem in stems.items()}
    return {
        f"{size} batch {batch} train": paired(train, "listing", rounds, repeats),
        f"{size} batch {batch} inference": paired(infer, "listing", rounds, 2 * repeats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--batches", type=int, nargs="+", help="images, instead of each size's own")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    options = parser.parse_args()
    one_thread()
    # A freed block of this size lets the allocator keep what it frees, as it does in a process that trains a model.
    torch.empty(30 << 20, dtype=torch.uint8)
    results: dict[str, Any] = {}
    for size in options.sizes:
        for batch in options.batches or SIZES[size][3:]:
            results |= measure(size, batch, options.rounds)
    report("stem", results, options.out)


if __name__ == "__main__":
    main()
