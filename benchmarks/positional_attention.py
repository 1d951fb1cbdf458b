"""Gated positional attention against plain attention and against its T x T form, paired and interleaved.

    python benchmarks/positional_attention.py --out benchmarks/results

A training step and inference of S/16 with positions in the attention of the first ten blocks; "content" is the model
without them, its class token joins after ten blocks too. "matrix" writes both weight matrices out and mixes them, as
the released code of ConViT does.
"""

import argparse
import copy
from pathlib import Path

import torch
from paired import one_thread, paired, report
from torch import nn

import vitmods as vm
from vitmods.layers import Attention

BASE, RUNS = "S/16", ((224, 8), (448, 2))
"""the model; pixels and images of a run"""


class Matrix(nn.Module):
    """An attention with positions, with its weights as a matrix."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.inner = attention

    def forward(self, x: torch.Tensor, queries: int | None = None, attn_mask: None = None) -> torch.Tensor:
        inner = self.inner
        v = inner.qkv(x).unflatten(-1, (3, inner.num_heads, inner.head_dim))[:, :, 2].transpose(1, 2)
        return inner.proj((inner.weights(x) @ v).transpose(1, 2).flatten(2))


def models(img_size: int) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    base = vm.vit(BASE, img_size=img_size, prefix_from=10, position_on_prefix=False)
    ours = vm.apply(base, vm.PositionalAttention(blocks=10))
    written = copy.deepcopy(ours)
    for block in written.blocks[:10]:
        block.attn = Matrix(block.attn)
    x = torch.randn(1, 3, img_size, img_size)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x), written.eval()(x), atol=1e-4, rtol=1e-4)
    return {"content": base, "positions": ours, "matrix": written}


def measure(img_size: int, batch: int, rounds: int) -> dict[str, dict]:
    found, images = models(img_size), torch.randn(batch, 3, img_size, img_size)

    def train(model: nn.Module) -> None:
        model.zero_grad(set_to_none=True)
        model(images).sum().backward()

    def infer(model: nn.Module) -> None:
        with torch.inference_mode():
            model(images)

    results = {}
    for mode, run in (("training", train), ("inference", infer)):
        calls = {name: (lambda model=model, run=run: run(model)) for name, model in found.items()}
        results[f"{BASE} {img_size} px batch {batch} {mode}"] = paired(calls, "content", rounds)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    one_thread()
    results = {}
    for img_size, batch in RUNS:
        results |= measure(img_size, batch, arguments.rounds)
    report("positional_attention", results, arguments.out)


if __name__ == "__main__":
    main()
