"""Parallel branches against the sequential model of the same size, paired and interleaved on one thread.

    python benchmarks/parallel.py --out benchmarks/results            # everything: batch 1 to 64, S and B
    python benchmarks/parallel.py --quick                             # a few minutes

Table 4 of Three Things at 224 px, inference and training: the sequential model, timm's parallel blocks, ours one branch
after another, ours fused wherever that is defined, and ours as it chooses by itself. All have the same weights. A few
blocks stand for all (``--pairs``): each block does the same, and so ratios stay. The rows "calls" are 36 blocks against
18 x 2 of width 8 on 4 tokens, where operator calls are all the time there is: the situation of a GPU at batch 1.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from paired import one_thread, paired, report
from timm.models.vision_transformer import ParallelThingsBlock
from torch import nn

from vitmods.layers import Block, ParallelBlock
from vitmods.model.branch_names import parallel_name

WIDTHS = {"S": (384, 6), "B": (768, 12)}
FORMS = {"one by one": False, "fused": True, "vitmods": None}


def build(width: int, heads: int, pairs: int) -> dict[str, nn.Module]:
    """Blocks without stem and head, which are the same for all. (B, N, width) in and out."""
    torch.manual_seed(0)
    sequential = nn.Sequential(*(Block(width, heads) for _ in range(2 * pairs)))
    weights = {
        parallel_name(f"blocks.{name}", 2).removeprefix("blocks."): value
        for name, value in sequential.state_dict().items()
    }
    theirs = partial(ParallelThingsBlock, width, heads, num_parallel=2, qkv_bias=True)
    models = {"sequential": sequential, "timm parallel": nn.Sequential(*(theirs() for _ in range(pairs)))}
    for name, fuse in FORMS.items():
        blocks = [ParallelBlock([Block(width, heads) for _ in range(2)]) for _ in range(pairs)]
        for block in blocks:
            block.fuse = fuse
        models[name] = nn.Sequential(*blocks)
    for model in models.values():
        if model is not sequential:
            model.load_state_dict(weights)
    return models


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
    results = {}
    for mode, make in (("inference", inference), ("train", training)):
        for model in models.values():
            model.train(mode == "train")
        rows = paired({n: make(m, x) for n, m in models.items()}, "sequential", rounds, repeats)
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
        calls = measure("calls", build(8, 2, 18), torch.randn(1, 4, 8), 3 * options.rounds, repeats=5)
        report("parallel_calls", calls, options.out)
    if options.only == "calls":
        return
    results: dict[str, Any] = {}
    for size in options.sizes:
        models = build(*WIDTHS[size], options.pairs)
        for batch in options.batches:
            x = torch.randn(batch, 197, WIDTHS[size][0])
            results |= measure(f"{size} batch {batch}", models, x, options.rounds, repeats=max(1, 4 // batch))
    report("parallel", results, options.out)


if __name__ == "__main__":
    main()
