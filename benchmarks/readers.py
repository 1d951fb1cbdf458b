"""Which models of timm are read exactly as a vitmods ViT, at reduced size and with random weights.

    python benchmarks/readers.py --out benchmarks/results

Models with equal structure at reduced size are tried once. A model counts as read if its outputs agree to 1e-5 of the
largest in float32; every refusal is counted by its reason.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import time
from collections import Counter

import timm
import torch
from in_place import MOST_PARAMETERS, parse_options, scramble, small, timm_names
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
    options = parse_options()
    names = [name for name in timm_names() if options.only in name]
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
