"""Which models of timm are read exactly as a vitmods ViT, at reduced size and with random weights.

    python benchmarks/readers.py --out benchmarks/results

Models with equal structure at reduced size are tried once. A model counts as read if its outputs agree to 1e-5 of the
largest in float32; every refusal is counted by its reason.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import timm
import torch
from in_place import FAMILIES, MOST_PARAMETERS, scramble, small
from torch import nn

from vitmods.adapters.apply import as_vit, config_of
from vitmods.util.errors import UserError


@torch.no_grad()
def outcome(model: nn.Module) -> str:
    """`read`, `differs`, or what a refusal lists."""
    try:
        converted = as_vit(model).eval()
    except UserError as error:
        reason = str(error).partition(" It can be")[0].partition("Not covered: ")
        return re.sub(r"\d+", "#", reason[2] or reason[0])[:110]
    images = converted.patch_embed.example(2, torch.Generator().manual_seed(1))
    expected, actual = model(images), converted(images)
    return "read" if float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max()) else "differs"


def structure(model: nn.Module) -> str:
    """What tells models apart at reduced size: their modules with settings, and how they pool."""
    modules = sorted({re.sub(r"\d+", "#", name) + type(module).__name__ for name, module in model.named_modules()})
    try:
        return f"{modules} {config_of(model).with_(num_classes=3)}"
    except UserError as error:
        return f"{modules} {error}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = [n for family in FAMILIES for n in timm.list_models(module=family) if options.only in n]
    seen: dict[str, str] = {}
    results: dict[str, str] = {}
    begin = time.process_time()
    for name in names:
        with torch.device("meta"):
            outline = small(name)
            key = structure(outline)
        if key not in seen:
            large = sum(p.numel() for p in outline.parameters()) > MOST_PARAMETERS
            model = outline if large else small(name)  # without weights it is refused or large
            if not large:
                scramble(model)
            seen[key] = outcome(model)
            print(name, seen[key], file=sys.stderr, flush=True)
            del model
            gc.collect()
        results[name] = seen[key]
    record = {
        "versions": [timm.__version__, torch.__version__],
        "models": len(results),
        "structures": len(seen),
        "results": dict(Counter(results.values()).most_common()),
        "read": sorted(name for name, result in results.items() if result == "read"),
        "CPU seconds": round(time.process_time() - begin),
    }
    print(json.dumps(record, indent=1))
    if options.out:
        (options.out / "readers.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
