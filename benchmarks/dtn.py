"""Dynamic Token Normalization against LayerNorm and against its T x T forms, paired and interleaved.

    python benchmarks/dtn.py --out benchmarks/results

The layer: S/16's width, forward + backward, T = 196 to 12544, with the bytes kept for backward over those of the input.
The model: a training step and inference with DTN in the first ten blocks; LayerNorm's model is built in the same way,
its class token joins after ten blocks too. "python" is the same norm without its native form. "released" has the
structure of the paper's code, "literal" is its Algorithm 1, "fused" the quickest T x T form found.
"""

import argparse
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dense_dtn
import torch
from paired import one_thread, paired, report, saved_bytes
from torch import nn

import vitmods as vm
from vitmods.layers import DynamicTokenNorm, LayerNorm
from vitmods.ops import native

DENSE = {name: getattr(dense_dtn, name) for name in ("fused", "literal", "released")}


class Dense(nn.Module):
    """The parameters of a DynamicTokenNorm in a T x T form."""

    takes, token_wise = ("grid_size",), False

    def __init__(self, norm: DynamicTokenNorm, form: str) -> None:
        super().__init__()
        self.norm, self.form, self.grid_size = norm, DENSE[form], norm.grid_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.norm
        return self.form(x, n.a, n.omega_mean, n.omega_var, n.weight, n.bias, self.grid_size, n.eps)


def without_native(step: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        library, native.library = native.library, lambda name: None
        try:
            return step()
        finally:
            native.library = library

    return run


def with_python_twins(steps: dict[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """Each step of a norm that has a native form once more without it."""
    return steps | {f"{name}, python": without_native(step) for name, step in steps.items() if name.startswith("dtn")}


def training(module: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        module(x).backward(grad)

    return step


def inference(module: nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        with torch.inference_mode():
            return module(x)

    return step


def layer(side: int, batch: int, rounds: int) -> dict[str, Any]:
    x = torch.randn(batch, side * side, 384, requires_grad=True)
    grad = torch.randn(batch, side * side, 384)
    dtn = DynamicTokenNorm(384, 6, (side, side))
    norms: dict[str, nn.Module] = {"layer norm": LayerNorm(384), "dtn": dtn}
    if side <= 56:  # T = 12544 would take 4 GB for each T x T tensor
        norms |= {form: Dense(dtn, form) for form in DENSE}
    results = {}
    for mode, make in (("training", lambda norm: training(norm, x, grad)), ("inference", lambda n: inference(n, x))):
        rows = paired(with_python_twins({name: make(norm) for name, norm in norms.items()}), "dtn", rounds)
        if mode == "training":
            for name, forward in with_python_twins({k: partial(norm, x) for k, norm in norms.items()}).items():
                norm = norms[name.removesuffix(", python")]
                rows[name]["kept_over_input"] = saved_bytes(norm, forward) / x.nbytes
        results[f"layer T={side * side} batch {batch} {mode}"] = rows
    return results


def models(size: str, img_size: int) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    base = vm.vit(size, img_size=img_size, prefix_from=10, position_on_prefix=False)
    found = {"layer norm": base, "dtn": vm.apply(base, vm.DynamicTokenNorm())}
    found["dtn, both norms"] = vm.apply(base, vm.DynamicTokenNorm(norms="both"))
    if img_size > 448:  # the literal form takes gigabytes there
        return found
    dense = copy.deepcopy(found["dtn, both norms"])
    for block in dense.blocks[:10]:
        block.norm1, block.norm2 = Dense(block.norm1, "literal"), Dense(block.norm2, "literal")
    return found | {"literal, both norms": dense}


def model(size: str, img_size: int, batch: int, rounds: int) -> dict[str, Any]:
    x, grad = torch.randn(batch, 3, img_size, img_size), torch.randn(batch, 1000)
    found = models(size, img_size)
    name = f"model {size} {img_size} px batch {batch}"
    train = {k: training(m.train(), x, grad) for k, m in found.items()}
    results = {f"{name} training": paired(with_python_twins(train), "layer norm", rounds)}
    infer = {k: inference(m.eval(), x) for k, m in found.items()}
    return results | {f"{name} inference": paired(with_python_twins(infer), "layer norm", 2 * rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", type=int, nargs="*", default=[14, 28, 56, 112], help="rows = columns of the layer")
    parser.add_argument("--models", nargs="*", default=["S/16@224", "Ti/16@224", "S/16@448", "S/16@896"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    options = parser.parse_args()
    one_thread()
    # A freed block of this size lets the allocator keep what it frees, as it does in a process that trains a model.
    torch.empty(30 << 20, dtype=torch.uint8)
    results: dict[str, Any] = {}
    for side in options.sides:
        batch = 8 if side == 14 else 1
        results |= layer(side, batch, max(3, options.rounds * 28 // side) if side < 56 else max(3, options.rounds // 2))
    for text in options.models:
        size, _, side = text.partition("@")
        batch = max(1, 8 * 224**2 // int(side) ** 2)
        results |= model(size, int(side), batch, options.rounds)
    report("dtn", results, options.out)


if __name__ == "__main__":
    main()
