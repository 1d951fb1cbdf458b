"""Which models of timm and Hugging Face take which change in place, at reduced size and with random weights.

    python benchmarks/in_place.py --out benchmarks/results

Models with equal structure at reduced size are tried once. Every refusal is counted by its reason.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import re
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from torch import nn

import vitmods as vm
from vitmods.util.errors import UserError

FAMILIES = (
    "vision_transformer", "deit", "eva", "beit", "vision_transformer_sam", "vision_transformer_relpos", "naflexvit",
    "vision_transformer_hybrid", "vitamin", "cait",
)  # fmt: skip
"""timm's modules of plain ViTs and their relatives"""
CHANGES = ("norm", "layerscale(init=1.0)", "qknorm", "dpn")
MOST_PARAMETERS = 200_000_000
VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
TEXT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def small(name: str) -> nn.Module:
    """A model of timm with two blocks and few channels, where its arguments allow it."""
    function = timm.models.model_entrypoint(name)
    source = inspect.getsource(function)
    arguments: dict[str, Any] = {}
    heads = int(match[1]) if (match := re.search(r"num_heads=(\d+)", source)) else 0
    if re.search(r"\bdepth=\d", source):
        arguments["depth"] = 2
    if re.search(r"embed_dim=\d", source) and heads:
        arguments |= {"embed_dim": 96, "num_heads": 4}
    if "sapiens2" in name:  # a list with an entry for each block
        arguments |= {"num_kv_heads": 2}
    patch = re.search(r"patch_size=(\d+)", source)
    side = 4 * int(patch[1]) if patch else 64
    for more in ({**arguments, "img_size": side}, {"img_size": side}, arguments, {}):
        try:
            torch.manual_seed(0)
            return timm.create_model(name, num_classes=3, **more).eval()
        except (TypeError, AssertionError, ValueError, RuntimeError, KeyError, AttributeError, NotImplementedError):
            continue
    return timm.create_model(name, num_classes=3).eval()


@torch.no_grad()
def scramble(model: nn.Module) -> None:
    """Random weights of a size at which every part of the model matters, as after training."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        scale = 0.1 if parameter.ndim == 1 else 0.05
        parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def outcome(model: nn.Module, change: str) -> str:
    """`ok`, or the reason of a refusal."""
    if change == "norm":
        kinds = {type(m).__name__.lower() for m in model.modules() if "norm" in type(m).__name__.lower()}
        change = "norm(kind=layer)" if any("rms" in kind for kind in kinds) else "norm(kind=rms,exact=false)"
    try:
        changed = vm.apply(model, *vm.parse_changes(change), in_place=True)
    except UserError as error:
        return re.sub(r"[\w.]*\d[\w.]*|'[^']*'", "...", str(error))[:110]
    assert type(changed) is type(model)
    return "ok"


def structure(model: nn.Module) -> str:
    """What tells models apart at reduced size: the classes of modules and the names of weights."""
    modules = [(re.sub(r"\d+", "#", name), type(module).__name__) for name, module in model.named_modules()]
    return repr(sorted(set(modules)))


def try_models(models: dict[str, Any], record: dict[str, Any]) -> None:
    seen: dict[str, dict[str, str]] = {}
    counts: dict[str, Counter[str]] = {change: Counter() for change in CHANGES}
    examples: dict[str, list[str]] = {}
    for name, make in models.items():
        with torch.device("meta"):
            outline = make()
            key = structure(outline)
        if key not in seen and sum(p.numel() for p in outline.parameters()) > MOST_PARAMETERS:
            seen[key] = dict.fromkeys(CHANGES, "too large, and its arguments do not make it smaller")
        if key not in seen:
            model = make()
            scramble(model)
            begin = time.process_time()
            seen[key] = {change: outcome(model, change) for change in CHANGES}
            print(f"{time.process_time() - begin:.1f}", name, seen[key], file=sys.stderr, flush=True)
            del model
            gc.collect()
        for change, result in seen[key].items():
            counts[change][result] += 1
            examples.setdefault(f"{change}: {result}", []).append(name)
    record["models"], record["structures"] = sum(counts["norm"].values()), len(seen)
    record["results"] = {change: dict(count.most_common()) for change, count in counts.items()}
    record["examples"] = {key: names[:6] for key, names in examples.items() if not key.endswith(": ok")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = [n for family in FAMILIES for n in timm.list_models(module=family) if options.only in n]
    record: dict[str, Any] = {"timm": {}, "versions": [timm.__version__, transformers.__version__, torch.__version__]}
    begin = time.process_time()
    try_models({name: lambda name=name: small(name) for name in names}, record["timm"])
    record["timm"]["CPU seconds"] = round(time.process_time() - begin)
    print(json.dumps(record, indent=1))
    if options.out:
        (options.out / "in_place.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
