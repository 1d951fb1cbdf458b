"""S/16 with each ingredient of later ViTs next to timm's own form of it: a training step, inference, and the bytes that
backward keeps. Value residual and LayerNorm scaling, which timm lacks, stand next to the same model without them.

    python benchmarks/recent.py --rounds 7 --out benchmarks/results
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from paired import one_thread, paired, report, saved_bytes
from timm.layers import AttentionRope
from timm.models.beit import Beit
from timm.models.eva import Eva
from torch import nn

import vitmods as vm

SIZE: dict[str, Any] = {"img_size": 224, "patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6}
BATCH = 2


def pairs() -> dict[str, tuple[nn.Module, nn.Module]]:
    """ingredient -> (ours, timm's)"""
    base = vm.vit(vm.ViTConfig(**SIZE, mlp_dim=4 * SIZE["embed_dim"]))
    plain = partial(timm.models.VisionTransformer, **SIZE, global_pool="token")
    eva = partial(Eva, **SIZE, qkv_fused=True, global_pool="token", use_rot_pos_emb=True, rope_temperature=100.0)
    gated = eva(attn_type="rope")
    for block in gated.blocks:
        block.attn = AttentionRope(SIZE["embed_dim"], SIZE["num_heads"], gated=True)
    references = {
        "rope": eva(),
        "rope(frequencies=mixed)": eva(rope_type="mixed"),
        "relpos": Beit(**SIZE, use_abs_pos_emb=True, use_rel_pos_bias=True, init_values=None, global_pool="token"),
        "registers": plain(reg_tokens=4, no_embed_class=True),
        "rope+gate": gated,
        "qknorm": plain(qk_norm=True),
        "nobias": plain(qkv_bias=False),
        "valueresidual": base,
        "layernormscaling": base,
    }
    return {text: (vm.apply(base, *vm.parse_changes(text)), other) for text, other in references.items()}


def train(model: nn.Module, images: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(images).sum().backward()


def infer(model: nn.Module, images: torch.Tensor) -> None:
    with torch.inference_mode():
        model(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--only", nargs="*", default=[], help="ingredients, or all")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    one_thread()
    torch.manual_seed(0)
    images = torch.randn(arguments.batch, 3, SIZE["img_size"], SIZE["img_size"])
    results: dict[str, Any] = {}
    chosen = {text: pair for text, pair in pairs().items() if text in arguments.only or not arguments.only}
    for text, (ours, other) in chosen.items():
        for mode, run in (("step", train), ("inference", infer)):
            for model in (ours, other):
                model.train(mode == "step")
            calls = {"timm": partial(run, other, images), "ours": partial(run, ours, images)}
            results[f"{text} {mode}"] = {"ours": paired(calls, "timm", arguments.rounds)["ours"]}
        kept = [saved_bytes(model, partial(train, model, images)) for model in (ours, other)]
        results[f"{text} step"]["ours"] |= {"bytes": kept[0], "bytes_ratio": kept[0] / kept[1]}
    report("recent", results, arguments.out)


if __name__ == "__main__":
    main()
