"""Attention-only fine-tuning against full fine-tuning at 384 px: time of a step, bytes kept for backward, peak memory.

    python benchmarks/finetune.py --out benchmarks/results

A step is forward, backward and AdamW on one thread, paired and interleaved; ``kept`` counts what autograd keeps between
forward and backward, ``peak`` all tensors at the worst moment of a step: weights, gradients, optimizer state and the
rest. ``expected`` is the ratio of the multiply-adds that each form needs, were all as fast as one another.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from paired import one_thread, paired, report, saved_bytes

import vitmods as vm
from vitmods import fast
from vitmods.bench import peak_bytes

RECOMPUTE: dict[str, dict[str, int]] = {"recompute": {}}
VARIANTS: dict[str, tuple[str, dict[str, dict[str, int]]]] = {
    "full": ("all", {}),
    "full, recompute": ("all", RECOMPUTE),
    "attention": ("attention", {}),
    "attention, recompute": ("attention", RECOMPUTE),
    "attention, MLPs run again": ("attention", RECOMPUTE | {"recompute_frozen_mlps": {}}),
    "attention, MLPs run again, 3 kept": ("attention", RECOMPUTE | {"recompute_frozen_mlps": {"keep_last": 3}}),
    "ffn": ("ffn", {}),
    "head": ("head", {}),
}


def build(size: str, pixels: int, variant: str) -> vm.ViT:
    what, settings = VARIANTS[variant]
    torch.manual_seed(0)
    model = vm.vit(size, img_size=pixels)
    vm.train_only(model, what)
    for setting, options in settings.items():
        getattr(fast, setting)(model, **options)
    return model


def trained(model: vm.ViT) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def training_step(model: vm.ViT, images: torch.Tensor) -> tuple[Callable[[], None], torch.optim.Optimizer]:
    labels = torch.arange(len(images))
    optimizer = torch.optim.AdamW(trained(model), lr=1e-5, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step, optimizer


def alive(model: vm.ViT, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for p in model.parameters():
        yield p
        if p.grad is not None:
            yield p.grad
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def expected(variant: str, config: vm.ViTConfig) -> float:
    """Multiply-adds of a step over those of full training, from the blocks alone: a linear map costs one unit forward,
    one for the gradient of its input, one for that of its weight if it is trained; attention two backward."""
    width, tokens = config.embed_dim, config.num_patches + config.num_prefix_tokens
    attn, mlp, mixing = 4 * width**2, 2 * width * config.mlp_dim, 2 * tokens * width
    what, settings = VARIANTS[variant]
    if what == "head":
        return 1 / 3
    work = 3 * mixing + attn * (2 if what == "ffn" else 3) + mlp * (2 if what == "attention" else 3)
    if "recompute_frozen_mlps" in settings:
        kept = settings["recompute_frozen_mlps"].get("keep_last", 1)
        work += mlp / 2 * (config.depth - kept) / (config.depth - 1)  # the last block has one token to work on
    return work / (3 * (attn + mlp + mixing))


def measure(size: str, pixels: int, batch: int, rounds: int, variants: list[str]) -> dict[str, Any]:
    images = torch.randn(batch, 3, pixels, pixels)
    models = {name: build(size, pixels, name) for name in variants}
    kept = {name: saved_bytes(model, lambda m=model: m(images)) for name, model in models.items()}
    steps = {name: training_step(model, images) for name, model in models.items()}
    rows = paired({name: step for name, (step, _) in steps.items()}, "full", rounds)
    for name, row in rows.items():
        step, optimizer = steps[name]
        row["expected"] = expected(name, models[name].vit_config)
        row["kept_mb"], row["kept_ratio"] = kept[name] / 1e6, kept[name] / kept["full"]
        row["peak_mb"] = peak_bytes(step, alive(models[name], optimizer), torch.device("cpu")) / 1e6
    for row in rows.values():
        row["peak_ratio"] = row["peak_mb"] / rows["full"]["peak_mb"]
    return {f"{size} {pixels} px, batch {batch}": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["S/16", "B/16"])
    parser.add_argument("--pixels", type=int, default=384)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, help="full is among them")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    options = parser.parse_args()
    one_thread()
    results: dict[str, Any] = {}
    for size in options.sizes:
        results |= measure(size, options.pixels, options.batch, options.rounds, options.variants)
    report("finetune", results, options.out)


if __name__ == "__main__":
    main()
