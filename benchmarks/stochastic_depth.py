"""Stochastic depth that runs the surviving images alone: training steps against timm's and against our plain blocks.

    python benchmarks/stochastic_depth.py --out benchmarks/results

All have the same weights, rates and AdamW; one thread, the CPU's clock.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from paired import one_thread, paired, report, saved_bytes
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn import functional as F

import vitmods as vm
from vitmods.fast import Forms


def build(size: str, rate: float) -> dict[str, nn.Module]:
    ours, whole = (vm.vit(size, num_classes=10, drop_path=rate) for _ in range(2))
    whole.forms = Forms(surviving=False)
    config = ours.vit_config
    theirs = VisionTransformer(
        patch_size=config.patch_size[0],
        embed_dim=config.embed_dim,
        depth=config.depth,
        num_heads=config.num_heads,
        num_classes=10,
        drop_path_rate=rate,
    )
    for model in (ours, whole):
        model.load_state_dict(theirs.state_dict())
    return {"timm": theirs, "vitmods, all images": whole, "vitmods": ours}


def training_step(model: nn.Module, images: torch.Tensor) -> Callable[[], None]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    labels = torch.randint(0, 10, (len(images),))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def measure(size: str, rate: float, batch: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    models, images = build(size, rate), torch.randn(batch, 3, 224, 224)
    rows = paired({name: training_step(model, images) for name, model in models.items()}, "timm", rounds)
    for name, model in models.items():
        kept = [saved_bytes(model, lambda m=model: m(images)) for _ in range(5)]
        rows[name]["kept_mb"] = sum(kept) / len(kept) / 1e6
    return {f"{size}, rate {rate}, batch {batch}": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="Ti/16")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.4])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    options = parser.parse_args()
    one_thread()
    results: dict[str, Any] = {}
    for rate in options.rates:
        results |= measure(options.size, rate, options.batch, options.rounds)
    report("stochastic_depth", results, options.out)


if __name__ == "__main__":
    main()
