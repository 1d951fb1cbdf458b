"""Inference of a timm ViT with LayerScale, as it is and optimized, in float32 and bfloat16, on one thread.

    python benchmarks/inference.py --out benchmarks/results

The reference is timm's own model in float32; `onnxruntime` runs what `vitmods export` writes of the optimized model.
"""

import argparse
import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import timm
import torch
from paired import one_thread, paired, report

import vitmods as vm

NAMES = {"Ti/16": "vit_tiny_patch16_224", "S/16": "vit_small_patch16_224", "B/16": "vit_base_patch16_224"}


def call(model: torch.nn.Module, images: torch.Tensor) -> Callable[[], Any]:
    def step() -> None:
        with torch.inference_mode():
            model(images)

    return step


def session_of(model: torch.nn.Module, batch: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        vm.export(model, path, batch=batch)
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def measure(size: str, batch: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    theirs = timm.create_model(NAMES[size], init_values=0.1).eval()
    plain, fast = vm.adapters.from_timm(theirs).eval(), vm.optimize_for_inference(theirs)
    images = torch.randn(batch, 3, 224, 224)
    session = session_of(fast, batch)
    variants = {
        "timm": call(theirs, images),
        "vitmods": call(plain, images),
        "vitmods, optimized": call(fast, images),
        "onnxruntime": lambda: session.run(None, {"images": images.numpy()}),
        "timm, bfloat16": call(copy.deepcopy(theirs).bfloat16(), images.bfloat16()),
        "vitmods, optimized, bfloat16": call(
            vm.optimize_for_inference(theirs, dtype=torch.bfloat16), images.bfloat16()
        ),
    }
    rows = paired(variants, "timm", rounds)
    for row in rows.values():
        row["throughput"] = 1 / row["ratio"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["Ti/16", "S/16", "B/16"], choices=NAMES)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    one_thread()
    results = {f"{s}, batch {b}": measure(s, b, options.rounds) for s in options.sizes for b in options.batch}
    report("inference", results, options.out)


if __name__ == "__main__":
    main()
