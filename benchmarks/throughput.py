"""A training step of our ViT against timm's: forward, backward and AdamW on one thread, paired and interleaved.

    python benchmarks/throughput.py --out benchmarks/results

Groups: class-token pooling, mean pooling, and the recompute option with the bytes that are kept for backward.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from paired import one_thread, paired, report, saved_bytes

import vitmods as vm
from vitmods import fast


def training_step(model: torch.nn.Module, images: torch.Tensor) -> Callable[[], None]:
    labels = torch.arange(len(images)) % 1000
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def inference(model: torch.nn.Module, images: torch.Tensor) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        with torch.inference_mode():
            return model(images)

    return step


def build(size: str, pool: str) -> dict[str, torch.nn.Module]:
    name = {"Ti/16": "vit_tiny_patch16_224", "S/16": "vit_small_patch16_224"}[size]
    theirs = timm.create_model(name, global_pool=pool)
    ours = vm.vit(size, pool=pool, norm_after_pool=pool == "avg")
    ours.load_state_dict(theirs.state_dict())
    recompute = vm.vit(ours.vit_config)
    recompute.load_state_dict(theirs.state_dict())
    fast.recompute(recompute)
    return {"timm": theirs, "vitmods": ours, "vitmods recompute": recompute}


def measure(size: str, pool: str, batch: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    images = torch.randn(batch, 3, 224, 224)
    models = build(size, pool)
    kept = {name: saved_bytes(m, lambda m=m: m(images).sum()) for name, m in models.items()}
    rows = paired({name: training_step(m, images) for name, m in models.items()}, "timm", rounds)
    for name, row in rows.items():
        row["throughput"] = 1 / row["ratio"]
        row["kept_mb"] = kept[name] / 1e6
        row["kept_ratio"] = kept[name] / kept["timm"]
    infer = paired(
        {name: inference(m.eval(), images) for name, m in models.items() if "recompute" not in name}, "timm", rounds
    )
    return {f"{size} {pool} train": rows, f"{size} {pool} inference": infer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["Ti/16", "S/16"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    options = parser.parse_args()
    one_thread()
    results: dict[str, Any] = {}
    for size in options.sizes:
        for pool in ("token", "avg"):
            results |= measure(size, pool, options.batch, options.rounds)
    report("throughput", results, options.out)


if __name__ == "__main__":
    main()
