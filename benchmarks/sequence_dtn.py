"""Dynamic token norms of sequences: blocks of rows with the columns that they see, against whole T x T kernels.

    python benchmarks/sequence_dtn.py --out benchmarks/results

The layer alone, 512 channels in 8 heads as in Long Range Arena, one sequence, kernels as they start: training is a
forward and a backward, and ``peak MB`` what it allocates at most. Then a training step of the whole encoder with the
norm before every branch but the last block's, at 1,000 tokens.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from paired import one_thread, paired, report
from torch import Tensor, nn

import vitmods as vm
from vitmods.bench import peak_bytes
from vitmods.layers.norms import DynamicTokenNorm, dynamic_token

WIDTH, HEADS = 512, 8
LENGTHS, OF_ENCODER = (500, 1000, 2000, 4000), 1000  # tokens


def whole(call: Callable[[], Any]) -> Callable[[], Any]:
    """The same with whole kernels at every length."""

    def run() -> Any:
        usual, dynamic_token.LONG = dynamic_token.LONG, 1 << 30
        try:
            return call()
        finally:
            dynamic_token.LONG = usual

    return run


def layer(length: int, rounds: int) -> dict[str, dict[str, Any]]:
    torch.manual_seed(0)
    norm, x = DynamicTokenNorm(WIDTH, HEADS), torch.randn(1, length, WIDTH, requires_grad=True)

    def train() -> Tensor:
        out: Tensor = norm(x)
        out.sum().backward()
        return out.detach()

    @torch.inference_mode()
    def infer() -> Tensor:
        out: Tensor = norm(x)
        return out

    torch.testing.assert_close(infer(), whole(infer)(), atol=1e-4, rtol=1e-4)
    found = {}
    for mode, call in (("training", train), ("inference", infer)):
        calls = {"window": call, "T x T": whole(call)}
        rows = paired(calls, "T x T", rounds)
        if mode == "training":
            for name, one in calls.items():
                rows[name]["peak MB"] = peak_bytes(one, [x, *norm.parameters()], torch.device("cpu")) / 2**20
        found[f"{length} tokens, {mode}"] = rows
    return found


def encoder(length: int, rounds: int) -> dict[str, dict[str, Any]]:
    torch.manual_seed(0)
    base = vm.vit("LRA-512", img_size=(1, length), in_chans=16, num_classes=10)
    ours = vm.apply(base, vm.DynamicTokenNorm(norms="both"))
    tokens = torch.randint(1, 16, (1, length))

    def step(model: nn.Module) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad(set_to_none=True)
            model(tokens).logsumexp(1).sum().backward()

        return run

    calls = {"LayerNorm": step(base), "window": step(ours), "T x T": whole(step(ours))}
    return {f"LRA-512, {length} tokens, training": paired(calls, "LayerNorm", rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    one_thread()
    results = {}
    for length in LENGTHS:
        results |= layer(length, arguments.rounds)
    results |= encoder(OF_ENCODER, arguments.rounds)
    report("sequence_dtn", results, arguments.out)


if __name__ == "__main__":
    main()
