"""Every normalizer against LayerNorm, forward + backward in training mode and inference, paired and interleaved.

    python benchmarks/norms.py --out benchmarks/results

Shape [128, 65, 192] is Ti/4 on images of 32 px, batch 128. "torch RMSNorm" is PyTorch's own module; "plain" rows are
the usual compositions of PyTorch's operations. ``kept`` is what a norm keeps for backward as a multiple of its input.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from paired import one_thread, paired, report, saved_bytes
from torch import nn

from vitmods.layers import norms


class Transposed(nn.Module):
    """A norm of PyTorch that wants channels before tokens."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def modules(dim: int, heads: int) -> dict[str, nn.Module]:
    return {
        "layer": norms.LayerNorm(dim),
        "rms": norms.RMSNorm(dim),
        "scale": norms.ScaleNorm(dim),
        "scale, one gain": norms.ScaleNorm(dim, gain="scalar"),
        "batch": norms.BatchNorm(dim),
        "instance": norms.InstanceNorm(dim),
        "group": norms.GroupNorm(dim, num_heads=heads),
        "power": norms.PowerNorm(dim),
        "power, groups = heads": norms.PowerNorm(dim, num_heads=heads),
        "switchable": norms.SwitchableNorm(dim),
        "switchable, no batch": norms.SwitchableNorm(dim, batch=False),
        "torch RMSNorm": nn.RMSNorm(dim, eps=1e-6),
        "plain batch": Transposed(nn.BatchNorm1d(dim)),
        "plain instance": Transposed(nn.InstanceNorm1d(dim, affine=True)),
        "plain group": Transposed(nn.GroupNorm(heads, dim)),
    }


def training(norm: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        norm.zero_grad(set_to_none=True)
        x.grad = None
        norm(x).backward(grad)

    return step


def inference(norm: nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        with torch.inference_mode():
            return norm(x)

    return step


def measure(shape: tuple[int, int, int], heads: int, rounds: int) -> dict[str, Any]:
    x, grad = torch.randn(shape, requires_grad=True), torch.randn(shape)
    found = modules(shape[-1], heads)
    train = {name: training(norm.train(), x, grad) for name, norm in found.items()}
    rows = paired(train, "layer", rounds)
    for name, norm in found.items():
        own = x.untyped_storage().nbytes()
        rows[name]["kept"] = saved_bytes(norm, lambda norm=norm: norm(x)) / own
    infer = {name: inference(norm.eval(), x) for name, norm in found.items()}
    return {f"{list(shape)} train": rows, f"{list(shape)} inference": paired(infer, "layer", rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=3, default=[128, 65, 192])
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    options = parser.parse_args()
    one_thread()
    # A freed block of this size lets the allocator keep what it frees, as it does in a process that trains a model.
    torch.empty(30 << 20, dtype=torch.uint8)
    report("norms", measure(tuple(options.shape), options.heads, options.rounds), options.out)


if __name__ == "__main__":
    main()
