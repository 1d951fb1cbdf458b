"""bfloat16 training on a CPU against float32 and timm: whole steps, and attention alone in three forms, on one thread.

    python benchmarks/bf16.py --out benchmarks/results

Steps run under autocast with AdamW. Attention is PyTorch's fused kernel in float32 (the reference) and bfloat16, and,
for backward, what ``vitmods.ops.attention`` may take instead: plain products in bfloat16, or float32 and back.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from paired import one_thread, paired, report
from torch import nn
from torch.nn import functional as F

import vitmods as vm

SIZES = {"mu3/2": (32, 32), "Ti/4": (32, 32), "S/16": (224, 8)}
"""Image side and batch."""
HEADS = {"17 tokens, 16 channels": (64, 2, 17, 16), "65, 64": (32, 3, 65, 64), "197, 64": (8, 6, 197, 64)}
"""Batch, heads, tokens, channels."""


def training_step(model: nn.Module, images: torch.Tensor, half: bool) -> Callable[[], None]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    labels = torch.randint(0, 10, (len(images),))

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = model(images)
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()

    return step


def steps(size: str, rounds: int) -> dict[str, Any]:
    side, batch = SIZES[size]
    images = torch.randn(batch, 3, side, side)
    ours = vm.vit(size, img_size=side, num_classes=10)
    config = ours.vit_config
    theirs = timm.models.vision_transformer.VisionTransformer(
        img_size=side,
        patch_size=config.patch_size[0],
        embed_dim=config.embed_dim,
        depth=config.depth,
        num_heads=config.num_heads,
        num_classes=10,
    )
    models = {"timm": theirs, "vitmods": ours}
    variants = {
        f"{name}, {kind}": training_step(model, images, kind == "bfloat16")
        for name, model in models.items()
        for kind in ("float32", "bfloat16")
    }
    return paired(variants, "timm, bfloat16", rounds, repeats=max(1, 4 if side < 64 else 1))


def attention(shape: tuple[int, ...], rounds: int) -> dict[str, Any]:
    b, h, n, d = shape
    full = [torch.randn(b, n, 3 * h * d).unflatten(-1, (3, h, d))[:, :, i].transpose(1, 2) for i in range(3)]
    half = [t.bfloat16() for t in full]

    def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ((q * d**-0.5) @ k.mT).softmax(-1) @ v

    def widened(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float()).to(q.dtype)

    def step(form: Callable[..., torch.Tensor], values: list[torch.Tensor]) -> Callable[[], None]:
        leaves = [t.detach().requires_grad_() for t in values]
        grad = torch.randn_like(values[0])
        return lambda: torch.autograd.backward(form(*leaves), grad, inputs=leaves)

    variants = {
        "fused, float32": step(fused, full),
        "fused, bfloat16": step(fused, half),
        "products, bfloat16": step(products, half),
        "float32 and back": step(widened, half),
    }
    return paired(variants, "fused, float32", rounds, repeats=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    options = parser.parse_args()
    one_thread()
    results = {f"attention, {name}": attention(shape, options.rounds) for name, shape in HEADS.items()}
    results |= {f"step, {size}": steps(size, options.rounds) for size in options.sizes}
    report("bf16", results, options.out)


if __name__ == "__main__":
    main()
