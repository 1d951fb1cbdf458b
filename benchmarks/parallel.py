"""Parallel branches against the sequential model of the same size, paired and interleaved on one thread.

    python benchmarks/parallel.py --out benchmarks/results            # everything: batch 1 to 64, S and B
    python benchmarks/parallel.py --quick                             # a few minutes

Table 4 of Three Things at 224 px, inference and training: the sequential model, timm's parallel blocks, ours, and for
inference the sequential model and ours optimized, where branches are one wide block. All have the same weights. A few
blocks stand for all (``--pairs``): each block does the same, and so ratios stay. The rows "calls" are 36 blocks against
18 x 2 of width 8 on 4 tokens, where operator calls are all the time there is: the situation of a GPU at batch 1.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from paired import one_thread, paired, report
from timm.models.vision_transformer import ParallelThingsBlock, VisionTransformer
from torch import nn

import vitmods as vm

WIDTHS = {"S": (384, 6), "B": (768, 12)}


def build(width: int, heads: int, pairs: int, side: int = 224) -> dict[str, nn.Module]:
    """Whole models without head."""
    torch.manual_seed(0)
    size = {"embed_dim": width, "num_heads": heads, "mlp_dim": 4 * width, "num_classes": 0, "img_size": side}
    patch = 16 if side == 224 else 4
    sequential = vm.vit(f"mu{2 * pairs}/{patch}", **size)
    sequential.forms = None  # all blocks alike: no shortcut in the last
    parallel = vm.apply(sequential, vm.Parallel())
    theirs = VisionTransformer(
        img_size=side,
        patch_size=patch,
        embed_dim=width,
        depth=pairs,
        num_heads=heads,
        num_classes=0,
        block_fn=ParallelThingsBlock,
    )
    theirs.load_state_dict(parallel.state_dict())
    return {"sequential": sequential, "timm parallel": theirs, "vitmods parallel": parallel}


def training(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()

    return step


def inference(model: nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        with torch.inference_mode():
            return model(x)

    return step


def measure(title: str, models: dict[str, nn.Module], x: torch.Tensor, rounds: int, repeats: int) -> dict[str, Any]:
    optimized = {f"{n}, optimized": vm.optimize_for_inference(m) for n, m in models.items() if "timm" not in n}
    results = {}
    for mode, make in (("inference", inference), ("train", training)):
        for model in models.values():
            model.train(mode == "train")
        measured = models | optimized if mode == "inference" else models
        rows = paired({n: make(m, x) for n, m in measured.items()}, "sequential", rounds, repeats)
        for row in rows.values():
            row["throughput"] = 1 / row["ratio"]
        results[f"{title} {mode}"] = rows
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(WIDTHS), choices=list(WIDTHS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--pairs", type=int, default=2, help="parallel blocks; the sequential model has twice as many")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", choices=["calls", "sizes"], help="a part; the parts have a file each")
    parser.add_argument("--quick", action="store_true", help="S alone, batches 1 and 8, few rounds")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.batches, options.rounds = ["S"], [1, 8], 4
    one_thread()
    # A freed block of this size lets the allocator keep what it frees, as it does in a process that trains a model.
    torch.empty(30 << 20, dtype=torch.uint8)
    if options.only != "sizes":
        calls = measure("calls", build(8, 2, 18, side=8), torch.randn(1, 3, 8, 8), 3 * options.rounds, repeats=5)
        report("parallel_calls", calls, options.out)
    if options.only == "calls":
        return
    results: dict[str, Any] = {}
    for size in options.sizes:
        models = build(*WIDTHS[size], options.pairs)
        for batch in options.batches:
            x = torch.randn(batch, 3, 224, 224)
            results |= measure(f"{size} batch {batch}", models, x, options.rounds, repeats=max(1, 4 // batch))
    report("parallel", results, options.out)


if __name__ == "__main__":
    main()
