"""Which models of timm and Hugging Face take which change in place, at reduced size and with random weights.

    python benchmarks/in_place.py --out benchmarks/results

One row for each class of Hugging Face and each structure of timm: models with equal modules and names of weights at
reduced size are tried once, and counted by their number; as they are at the start of training and with random weights.
What is put in is compared with what the change defines, computed from what is known of the library (in_place_oracle).
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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import in_place_oracle
import timm
import torch
import transformers
from torch import Tensor, nn

import vitmods as vm
from vitmods.adapters.apply import config_of
from vitmods.adapters.inputs import find_inputs
from vitmods.adapters.surgery import width_of
from vitmods.util.errors import NoEffect, Refused, UserError

FAMILIES = (
    "vision_transformer", "deit", "eva", "beit", "vision_transformer_sam", "vision_transformer_relpos", "naflexvit",
    "vision_transformer_hybrid", "vitamin", "cait",
)  # fmt: skip
"""timm's modules of plain ViTs and their relatives"""
OTHER_NORM = "another norm"
CHANGES = (OTHER_NORM, "rms", "layerscale(init=1.0)", "qknorm", "dpn")
IN_PLACE, HAS_IT, WRONG = "in place", "has it", "WRONG"
MOST_PARAMETERS = 200_000_000
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4}
PLAIN = {**HEADS, "hidden_size": 32, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
STAGES = {
    "image_size": 32, "depths": [1, 1], "hidden_sizes": [16, 32], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2],
    "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2], "sr_ratios": [2, 1],
}  # fmt: skip
WINDOWS = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
VISION: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("ViT", "DeiT", "Beit", "Data2VecVision", "Dinov2", "Dinov2WithRegisters", "DINOv3ViT", "IJepa", "ViTMAE",
         "ViTMSN", "SiglipVision", "CLIPVision", "Aimv2Vision", "Pixio"), PLAIN,
    ),
    "Siglip2Vision": {**PLAIN, "num_patches": 16},
    "InternVLVision": {**PLAIN, "image_size": [32, 32], "patch_size": [8, 8]},
    "Yolos": {**PLAIN, "image_size": [32, 32], "num_detection_tokens": 4},
    "VideoMAE": {**PLAIN, "num_frames": 2},
    "Vivit": {**PLAIN, "num_frames": 2, "tubelet_size": [2, 8, 8]},
    "Timesformer": {**PLAIN, "num_frames": 2},
    "Swin": WINDOWS,
    "Swinv2": WINDOWS,
    "Pvt": {**STAGES, "patch_sizes": [4, 2], "sequence_reduction_ratios": [2, 1]},
    "PvtV2": STAGES,
    "Segformer": STAGES,
    "Cvt": {"embed_dim": [16, 32, 32], "depth": [1, 2, 3], "num_heads": [2, 4, 4]},
    "Hiera": {
        "embed_dim": 16, "image_size": [32, 32], "depths": [1, 1], "num_heads": [2, 4], "num_query_pool": 1,
        "masked_unit_size": [4, 4],
    },
    "Levit": {
        "image_size": 64, "hidden_sizes": [16, 32, 32], "num_attention_heads": [2, 4, 4], "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
    },
}  # fmt: skip
WORDS = {
    **HEADS, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "sep_token_id": 2, "cls_token_id": 1,
}  # fmt: skip
GROUPED = {**WORDS, "num_key_value_heads": 2, "head_dim": 8}
TEXT: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("Albert", "Bert", "Roberta", "GPT2", "OPT", "Phi", "ModernBert", "DistilBert", "Mamba"), WORDS),
    **dict.fromkeys(("Llama", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Mistral"), GROUPED),
    "T5Encoder": {**WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64},
}


def timm_names() -> list[str]:
    return [name for family in FAMILIES for name in timm.list_models(module=family)]


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
    shallow = {"img_size": side, **{key: arguments[key] for key in ("depth",) if key in arguments}}
    for more in ({**arguments, "img_size": side}, shallow, {"img_size": side}, arguments, {}):
        try:
            torch.manual_seed(0)
            return timm.create_model(name, num_classes=3, **more).eval()
        except (TypeError, AssertionError, ValueError, RuntimeError, KeyError, AttributeError, NotImplementedError):
            continue
    return timm.create_model(name, num_classes=3).eval()


def hugging_face(name: str) -> nn.Module:
    settings = {**VISION, **TEXT}[name]
    config = getattr(transformers, f"{name.removesuffix('Encoder')}Config")(**settings)
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{name}Model")(config).eval()
    return model


def example_of(name: str) -> dict[str, Tensor] | None:
    """What the model is called with, where vitmods does not know, or would take more pixels."""
    if name == "Cvt":
        return {"pixel_values": torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))}
    if name.startswith("naflexvit"):
        return {"x": torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))}
    if name != "Siglip2Vision":
        return None
    patches = torch.randn(2, 16, 8 * 8 * 3, generator=torch.Generator().manual_seed(0))
    mask, shapes = torch.ones(2, 16, dtype=torch.long), torch.full((2, 2), 4)
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}


@torch.no_grad()
def scramble(model: nn.Module) -> None:
    """Random weights of a size at which every part of the model matters, as after training."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        scale = 0.1 if parameter.ndim == 1 else 0.05
        parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def outcome(model: nn.Module, change: str, example: Any, name: str = "") -> tuple[str, str]:
    """`in place`, `has it` or the reason of the refusal, with its message; with a name, `wrong` is possible too."""
    if change == OTHER_NORM:
        first = outcome(model, "norm(kind=rms,exact=false)", example, name)
        return outcome(model, "norm(kind=layer)", example, name) if first[0] == HAS_IT else first
    try:
        changed = vm.apply(model, *vm.parse_changes(change), in_place=True, example=example)
    except NoEffect as error:
        return HAS_IT, str(error)
    except Refused as error:
        return error.reason, str(error)
    assert type(changed) is type(model)
    if name:
        inputs = find_inputs(model, example, width_of(model))
        assert inputs is not None
        try:
            error = in_place_oracle.error(name, change, model, changed, lambda net: net(*inputs[0], **inputs[1]))
        except AssertionError as failed:
            return WRONG, str(failed)
        if not error < 1e-3:
            return WRONG, f"{name}: {error:.0e} from the definition"
    return IN_PLACE, ""


def is_read(model: nn.Module) -> bool:
    try:
        config_of(model)
    except UserError:
        return False
    return True


def structure(model: nn.Module) -> str:
    """What tells models apart at reduced size: the classes of modules and the names of weights."""
    modules = [(re.sub(r"\d+", "#", name), type(module).__name__) for name, module in model.named_modules()]
    return repr(sorted(set(modules)))


def try_models(names: Iterable[str], make: Any, changes: tuple[str, ...]) -> dict[str, Any]:
    """The rows of these models, how many of them take each change, and why the others do not."""
    begin = time.process_time()
    keys: dict[str, str] = {}
    rows: dict[str, dict[str, Any]] = {}
    messages: dict[str, list[str]] = {}
    differing: list[str] = []
    for name in names:
        with torch.device("meta"):
            outline = make(name)
        key = structure(outline) if make is small else name
        if key not in keys:
            keys[key] = name
            rows[name] = row = {"models": 0, "read": 0}
            if sum(p.numel() for p in outline.parameters()) > MOST_PARAMETERS:
                raise SystemExit(f"{name} is too large, and its arguments do not make it smaller")
            model = make(name)
            new = {change: outcome(model, change, example_of(name), name) for change in changes}
            scramble(model)
            for change in changes:
                row[change], message = outcome(model, change, example_of(name), name)
                if new[change][0] != row[change]:
                    differing.append(f"{name}, {change}: {new[change]} when new, then {row[change]}")
                if message:
                    message = re.sub(r"[\w.]*\d[\w.]*", "...", message.partition("\n")[0])
                    messages.setdefault(f"{row[change]}: {message}", []).append(name)
            print(f"{time.process_time() - begin:.1f} s {name} {row}", file=sys.stderr, flush=True)
            del model
            gc.collect()
        rows[keys[key]]["models"] += 1
        rows[keys[key]]["read"] += is_read(outline)
    counts: dict[str, Counter[str]] = {change: Counter() for change in changes}
    for row in rows.values():
        for change in changes:
            counts[change][row[change]] += row["models"]
    return {
        "models": sum(row["models"] for row in rows.values()),
        "read": sum(row["read"] for row in rows.values()),
        "counts": {change: dict(count.most_common()) for change, count in counts.items()},
        "rows": rows,
        "messages": messages,
        "other when new": differing,
        "CPU seconds": round(time.process_time() - begin),
    }


def print_table(record: dict[str, Any]) -> None:
    for part, result in record["results"].items():
        changes = list(result["counts"])
        print(f"\n{part}: {result['models']} models, {result['read']} read, {result['CPU seconds']} CPU seconds")
        print(f"{'':44}{'models':>7}{'read':>6}", *(f"  {change:26}" for change in changes))
        for name, row in result["rows"].items():
            print(f"{name:44}{row['models']:7}{row['read']:6}", *(f"  {row[change]:26}" for change in changes))
        for change, count in result["counts"].items():
            print(change, "  ".join(f"{outcome}: {number}" for outcome, number in count.items()))


def parse_options() -> argparse.Namespace:
    """The options of a benchmark of many models, which runs quietly in one thread."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    parts = {
        "timm": (timm_names(), small, CHANGES),
        "Hugging Face, vision": (VISION, hugging_face, CHANGES),
        "Hugging Face, text": (TEXT, hugging_face, tuple(change for change in CHANGES if change not in ("dpn",))),
    }
    versions = {module.__name__: module.__version__ for module in (timm, transformers, torch)}
    record: dict[str, Any] = {"versions": versions, "results": {}}
    for part, (names, make, changes) in parts.items():
        record["results"][part] = try_models([name for name in names if options.only in name], make, changes)
    print_table(record)
    if options.out:
        (options.out / "in_place.json").write_text(json.dumps(record, indent=1) + "\n")
        print("Now make docs/models.md of it: python benchmarks/models_page.py")


if __name__ == "__main__":
    main()
