"""A model's training step and inference under two source trees, paired: two processes take turns.

    python benchmarks/trees.py path/to/before . --model Ti/16 --arms rms powernorm dpn

Ratios are the second tree's CPU time over the first one's, the median of the rounds and that of the minima.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

MODES = ("training", "inference")
CHILD = """
import sys, time, warnings
import torch
warnings.simplefilter("ignore")
torch.set_num_threads(1)
torch.empty(30 << 20, dtype=torch.uint8)
import vitmods as vm
size, arm, mode, side, batch = sys.argv[1:]
torch.manual_seed(0)
model = vm.apply(vm.vit(size, img_size=int(side)), *vm.parse_changes(arm)).train(mode == "training")
x, grad = torch.randn(int(batch), 3, int(side), int(side)), torch.randn(int(batch), 1000)
def training():
    model.zero_grad(set_to_none=True)
    model(x).backward(grad)
def inference():
    with torch.inference_mode():
        model(x)
step = training if mode == "training" else inference
step()
for _ in sys.stdin:
    start = time.process_time()
    step()
    print(time.process_time() - start, flush=True)
"""


def start(tree: Path, *arguments: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, *arguments]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def turn(process: "subprocess.Popen[str]") -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def compare(trees: list[Path], rounds: int, *arguments: str) -> tuple[float, float]:
    processes = [start(tree, *arguments) for tree in trees]
    times: list[list[float]] = [[], []]
    for i in range(rounds):
        for which in (0, 1) if i % 2 else (1, 0):
            times[which].append(turn(processes[which]))
    for process in processes:
        process.communicate()
    before, after = times
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    return statistics.median(ratios), min(after) / min(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", type=Path, nargs=2)
    parser.add_argument("--model", default="Ti/16")
    parser.add_argument("--img-size", default="224")
    parser.add_argument("--batch", default="8")
    parser.add_argument("--arms", nargs="+", default=[""])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    for arm in options.arms:
        for mode in MODES:
            found = compare(options.trees, options.rounds, options.model, arm, mode, options.img_size, options.batch)
            print(
                f"{options.model} {arm or 'base':<24} {mode:<10} {found[0]:.3f}  of minima {found[1]:.3f}", flush=True
            )


if __name__ == "__main__":
    main()
