"""Names of ViTs: a size such as ``S/16``, ``Ti/4``, ``S36/16``, ``S18x2/16``, ``S*/16``, or timm's; with options behind
a question mark if any, ``B/16?activation=gelu_tanh&representation=true``."""

import ast
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl, quote

from vitmods.util.errors import UserError, nearest

# name: width, depth, width of the MLP, heads; the last three are Dynamic Token Normalization's
SIZES = {
    "mu": (32, 1, 128, 2),
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "B": (768, 12, 3072, 12),
    "L": (1024, 24, 4096, 16),
    "H": (1280, 32, 5120, 16),
    "T*": (192, 12, 768, 4),
    "S*": (432, 12, 1728, 9),
    "B*": (768, 12, 3072, 16),
}
# Whole models with a name of their own: fields of their config.
MODELS = {
    "T2T-14": {  # T2T-ViT_t-14 of Yuan et al., 2021, with fixed two-dimensional positions
        "stem": {"kind": "t2t"},
        "embed_dim": 384,
        "depth": 14,
        "num_heads": 6,
        "mlp_dim": 1152,
        "qkv_bias": False,
        "position": "sincos2d",
        "position_on_prefix": False,
    },
    **{
        f"LRA-{width}": {  # the encoder of Long Range Arena (Tay et al., 2021), as wide as published or less
            "stem": {"kind": "tokens", "bias": False},
            "patch_size": 1,
            "embed_dim": width,
            "depth": depth,
            "num_heads": heads,
            "mlp_dim": 2 * width,
            "qkv_bias": False,
            "activation": "gelu_tanh",
            "position": "sincos1d",
            "position_on_prefix": False,
            "attn_drop": 0.1 if width == 512 else 0.0,
            "head_hidden": 2 * width,
            "init": "big_vision",
        }
        for width, depth, heads in ((512, 6, 8), (64, 2, 4))
    },
}
_RMS = {"kind": "rms"}
VIT5 = {  # of ViT-5-S, B and L (Wang et al., 2026), besides width, depth and heads
    "qkv_bias": False,
    "qk_norm": _RMS,
    "position_on_prefix": False,
    "reg_tokens": 4,
    "rope": {"base": 10_000.0, "register_base": 100.0},
    "attn": {"before": _RMS},
    "mlp": {"before": _RMS},
    "layer_scale": 1e-4,
    "final_norm": _RMS,
}
_TIMM_SIZES = {"tiny": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H"}


def split_options(name: str) -> tuple[str, dict[str, Any]]:
    """The name of a model, and the options behind its question mark: numbers, true, false, none, or words."""
    plain, _, written = name.partition("?")
    pairs = parse_qsl(written, keep_blank_values=True)
    options: dict[str, Any] = dict(pairs)
    if len(options) < len(pairs):
        raise UserError(f"{name} sets an option twice: leave one of them out.")
    for key, text in options.items():
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # it stays a word
            is_constant = text.lower() in ("true", "false", "none")
            options[key] = ast.literal_eval(text.capitalize() if is_constant else text)
    return plain, options


def with_options(name: str, options: Mapping[str, Any]) -> str:
    """The inverse of ``split_options``."""
    shown = {
        key: str(value).lower() if isinstance(value, bool | None) else str(value) for key, value in options.items()
    }
    return f"{name}?{'&'.join(f'{key}={quote(text)}' for key, text in shown.items())}" if shown else name


def parse_name(name: str) -> tuple[str, int | None, int, int, int | None]:
    """(size, depth if given, parallel branches, patch side, image side if given); options of the name are not read."""
    name = name.partition("?")[0]
    if match := re.fullmatch(r"vit_([a-z]+)_patch(\d+)_(?:(\d+)x(\d+)_)?(\d+)", name):
        size, patch, depth, parallel, side = match.groups()
        if size in _TIMM_SIZES:
            return _TIMM_SIZES[size], int(depth) if depth else None, int(parallel or 1), int(patch), int(side)
    elif match := re.fullmatch(r"([A-Za-z]+?\*?)(?:(\d+)(?:x(\d+))?)?/(\d+)", name):
        size, depth, parallel, patch = match.groups()
        if size in SIZES:
            return size, int(depth) if depth else None, int(parallel or 1), int(patch), None
    examples = [*MODELS] + [f"{size}/16" for size in SIZES] + [f"vit_{size}_patch16_224" for size in _TIMM_SIZES]
    raise UserError(
        f"'{name}' is not the name of a ViT. Give a size and a patch side as in 'S/16' (sizes: {', '.join(SIZES)}), "
        "with a depth as in 'S36/16', with parallel branches as in 'S18x2/16', timm's name as in "
        f"'vit_small_patch16_224', or {', '.join(MODELS)}. Any other model of timm is named with its prefix, as in "
        "'timm:deit3_small_patch16_224'. "
        f"{nearest(name, examples)}"
    )
