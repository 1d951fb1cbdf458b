"""Which models of vit-pytorch and x-transformers, which nobody wrote for vitmods, take which change in place.

    pip install vit-pytorch x-transformers
    python benchmarks/strangers.py --out benchmarks/results

Small models, as they are when new and with random weights everywhere; no example is given.
"""

from __future__ import annotations

import argparse
import importlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import vitmods as vm
from vitmods.util.errors import NoEffect, Refused, UserError

CHANGES = ("layerscale(init=0.3)", "qknorm")
SIZE = {"image_size": 32, "patch_size": 8, "num_classes": 3, "dim": 32, "depth": 2, "heads": 4, "dim_head": 8}


def vit(module: str, name: str, without: tuple[str, ...] = (), **more: Any) -> Callable[[], nn.Module]:
    """A model of vit-pytorch."""

    def make() -> nn.Module:
        settings = {key: value for key, value in {**SIZE, "mlp_dim": 64}.items() if key not in without}
        model: nn.Module = getattr(importlib.import_module(f"vit_pytorch.{module}"), name)(**{**settings, **more})
        return model

    return make


def x(layers: str = "Encoder", around: str = "ViTransformerWrapper", **more: Any) -> Callable[[], nn.Module]:
    """A model of x-transformers."""

    def make() -> nn.Module:
        library = importlib.import_module("x_transformers")
        settings: dict[str, Any] = {"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8, **more}
        outside: dict[str, dict[str, Any]] = {
            "ViTransformerWrapper": {"image_size": 32, "patch_size": 8, "num_classes": 3},
            "TransformerWrapper": {"num_tokens": 50, "max_seq_len": 16},
            "ContinuousTransformerWrapper": {"dim_in": 32, "dim_out": 3, "max_seq_len": 16},
        }
        model: nn.Module = getattr(library, around)(attn_layers=getattr(library, layers)(**settings), **outside[around])
        return model

    return make


def cct() -> nn.Module:
    model: nn.Module = importlib.import_module("vit_pytorch.cct").CCT(
        img_size=32, embedding_dim=32, n_conv_layers=1, kernel_size=7, stride=2, padding=3, num_layers=2, num_heads=4,
        mlp_ratio=2.0, num_classes=3, positional_embedding="learnable",
    )  # fmt: skip
    return model


FRAMES = {"image_patch_size": 8, "frames": 4, "frame_patch_size": 2}
TEXT = "TransformerWrapper"
MODELS: dict[str, Callable[[], nn.Module]] = {
    "vit": vit("vit", "ViT"),
    "vit, mean": vit("vit", "ViT", pool="mean"),
    "simple_vit": vit("simple_vit", "SimpleViT"),
    "deepvit": vit("deepvit", "DeepViT"),
    "cait": vit("cait", "CaiT", cls_depth=1),
    "t2t": vit("t2t", "T2TViT", ("patch_size",), t2t_layers=((7, 4), (3, 2))),
    "parallel_vit": vit("parallel_vit", "ViT"),
    "simple_vit_with_register_tokens": vit("simple_vit_with_register_tokens", "SimpleViT"),
    "vit_with_patch_dropout": vit("vit_with_patch_dropout", "ViT", patch_dropout=0.0),
    "simple_vit_with_patch_dropout": vit("simple_vit_with_patch_dropout", "SimpleViT", patch_dropout=0.0),
    "vit_with_patch_merger": vit("vit_with_patch_merger", "ViT", patch_merge_layer=1),
    "vit_for_small_dataset": vit("vit_for_small_dataset", "ViT"),
    "learnable_memory_vit": vit("learnable_memory_vit", "ViT"),
    "rvt": vit("rvt", "RvT"),
    "simple_vit_with_qk_norm": vit("simple_vit_with_qk_norm", "SimpleViT"),
    "simple_flash_attn_vit": vit("simple_flash_attn_vit", "SimpleViT", use_flash=True),
    "simple_uvit": vit("simple_uvit", "SimpleUViT"),
    "simple_vit_with_fft": vit("simple_vit_with_fft", "SimpleViT", freq_patch_size=8),
    "simple_vit_with_value_residual": vit("simple_vit_with_value_residual", "SimpleViT"),
    "vit_with_decorr": vit("vit_with_decorr", "ViT"),
    "vit_5": vit("vit_5", "ViT"),
    "vit_detpool": vit("vit_detpool", "ViTDetPool"),
    "vit_with_keel_post_ln": vit("vit_with_keel_post_ln", "ViT"),
    "jumbo_vit": vit("jumbo_vit", "JumboViT", num_jumbo_cls=1, jumbo_cls_k=2, jumbo_ff_mult=2),
    "xcit": vit("xcit", "XCiT", cls_depth=1),
    "vit_nd": vit("vit_nd", "ViTND", ("image_size",), ndim=2, input_shape=32),
    "vit_1d": vit("vit_1d", "ViT", ("image_size",), seq_len=64),
    "vit_3d": vit("vit_3d", "ViT", ("patch_size",), **FRAMES),
    "simple_vit_1d": vit("simple_vit_1d", "SimpleViT", ("image_size",), seq_len=64),
    "simple_vit_3d": vit("simple_vit_3d", "SimpleViT", ("patch_size",), **FRAMES),
    "vivit": vit("vivit", "ViViT", ("patch_size", "depth"), spatial_depth=2, temporal_depth=2, **FRAMES),
    "pit": vit("pit", "PiT", depth=(1, 1)),
    "mp3": vit("mp3", "ViT"),
    "cct": cct,
    "x: vision": x(),
    "x: cosine attention": x(attn_qk_norm=True),
    "x: RMSNorm, SwiGLU": x(use_rmsnorm=True, ff_glu=True, ff_swish=True),
    "x: rotary positions": x(rotary_pos_emb=True),
    "x: fused attention": x(attn_flash=True),
    "x: norms around branches": x(sandwich_norm=True),
    "x: text decoder": x("Decoder", TEXT),
    "x: text encoder": x("Encoder", TEXT),
    "x: tokens": x("Encoder", "ContinuousTransformerWrapper"),
    "x: text decoder, two heads of keys": x("Decoder", TEXT, attn_kv_heads=2, rotary_pos_emb=True),
}


@torch.no_grad()
def scramble(model: nn.Module) -> nn.Module:
    """Random weights everywhere, and one factor in each LayerScale of the model's own, as it has before training."""
    for name, parameter in model.named_parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
        if name.endswith(".scale"):
            parameter.fill_(0.7)
    return model


def outcome(model: nn.Module, change: str) -> str:
    """`in place`, `has it` or the reason of the refusal."""
    try:
        vm.apply(model, *vm.parse_changes(change), in_place=True)
    except NoEffect:
        return "has it"
    except Refused as error:
        return error.reason
    except UserError as error:
        return str(error)
    return "in place"


def row(name: str) -> dict[str, str]:
    """What becomes of each change. Raises AssertionError where new and random weights differ."""
    found = []
    for is_new in (True, False):
        torch.manual_seed(0)
        model = MODELS[name]().eval()
        found.append({change: outcome(model if is_new else scramble(model), change) for change in CHANGES})
    assert found[0] == found[1], (name, found)
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = {name: row(name) for name in MODELS if options.only in name}
    for name, outcomes in rows.items():
        print(f"{name:40}", *(f"{outcome:16}" for outcome in outcomes.values()))
    if options.out:
        (options.out / "strangers.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
