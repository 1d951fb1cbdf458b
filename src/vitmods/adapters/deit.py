"""State dicts with the names of DeiT and timm (DeiT's .pth files) as a vitmods ViT, and DeiT files from a ViT.

Sources: Touvron et al., DeiT (2021) and DeiT III (2022), whose class calls the LayerScale vectors ``gamma_1`` and
``gamma_2``.
"""

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from vitmods.adapters.tensors import (
    DISTILLED,
    Coverage,
    Row,
    Size,
    count_blocks,
    heads_of_width,
    image_size,
    need,
    rows_of,
    write_tensors,
)
from vitmods.adapters.transfer import check_readable, fields, read_weights, refuse_slots
from vitmods.layers.stems.hmlp import hmlp_layers
from vitmods.model.branch_names import sequential_name
from vitmods.model.config import ViTConfig
from vitmods.model.slots import BranchConfig, NormConfig, StemConfig
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError

_BATCH = NormConfig("batch", eps=1e-5)
_SECOND = re.compile(r"blocks\.\d+\.(attn1|mlp1|norm11|norm21|gamma_\d_1)\b")
_IN_STEM = re.compile(r"patch_embed\.proj\.(\d+)\.(\w+)")


def is_deit(tensors: Iterable[str]) -> bool:
    """Whether tensors have the names of DeiT or timm."""
    return any(name.startswith("patch_embed.proj.") for name in tensors)


def read_deit(
    source: str,
    tensors: Mapping[str, Tensor],
    num_heads: int | None = None,
    img_size: Size = None,
    eps: float = 1e-6,
    **settings: Any,
) -> tuple[ViT, Coverage]:
    """A ViT from a state dict with DeiT's or timm's names, and the account of its tensors.

    Settings that the tensors leave open are assumed, and listed so in the account: the published number of heads for
    the width, square images, exact GELU, norms with this eps, and with a class token that the head reads it.
    ``settings`` are fields of ViTConfig that are known to be otherwise.

    Raises UserError for stems other than one convolution or hMLP, and when something is missing,
    left over or cannot be reported.
    """
    config, assumed = _read_config(source, tensors, num_heads, img_size, eps)
    config = config.with_(**settings)
    assumed = [setting for setting in assumed if setting.partition("=")[0] not in settings]
    counters = {name: "norms here do not count batches" for name in tensors if name.endswith(".num_batches_tracked")}
    has_gammas = any(".gamma_1" in name for name in tensors)
    has_seconds = any(_SECOND.match(name) for name in tensors)
    pair = partial(_rows, config=config, has_gammas=has_gammas, has_seconds=has_seconds)
    return read_weights(source, config, pair, tensors, counters, assumed)


def to_deit(model: ViT) -> dict[str, Tensor]:
    """The state dict that DeiT's classes load: DeiT's own, or DeiT III's when positions are on patches alone, those of
    two parallel branches and of the hMLP stem included.

    Raises UserError naming the slots that these classes do not have.
    """
    config, weights = model.vit_config, model.state_dict()
    is_hmlp, is_first = config.stem.kind == "hmlp", config.position_on_prefix
    if is_hmlp and config.patch_size != (16, 16):
        raise UserError(f"DeiT's hMLP stem makes patches of 16 x 16 pixels, not {config.patch_size}.")
    distilled: dict[str, Any] = {"pool": "prefix", "reg_tokens": 1} if is_first and config.pool == "prefix" else {}
    nearest = ViTConfig(  # a state dict does not contain dropout
        **fields(config, "img_size patch_size in_chans num_classes embed_dim depth num_heads mlp_dim"),
        **fields(config, "position_on_prefix pos_drop proj_drop attn_drop head_drop drop_path drop_path_shape"),
        layer_scale=None if is_first else config.layer_scale,
        parallel=1 if is_first or config.parallel != 2 else 2,
        stem=StemConfig(kind="hmlp", inner=_BATCH, after=_BATCH) if is_hmlp else StemConfig(),
        **distilled,
    )
    refuse_slots("DeiT", config, nearest)
    check_readable("The model", model)
    rows = _rows(weights, config, bool(config.layer_scale), config.parallel == 2)
    return {n: t.detach().cpu().clone() for n, t in write_tensors(rows, weights).items()}


def _rows(names: Iterable[str], config: ViTConfig, has_gammas: bool, has_seconds: bool) -> list[Row]:
    """The names are timm's, except for DeiT III's LayerScale (``has_gammas``) and parallel branches (``has_seconds``),
    and the hMLP stem, one sequence whose convolutions are 0, 3, 6 and so on."""
    stem = {}
    if config.stem.kind == "hmlp":
        last = 3 * (len(hmlp_layers(config.embed_dim, config.patch_size)) - 1)
        stem = {"proj": str(last), "norm": str(last + 1)}
    rows = []
    for name in names:
        if config.pool == "prefix" and name.startswith(("reg_token", "head.")):
            rows += rows_of([name], DISTILLED)
            continue
        new = _second_branch(name) if has_seconds else name
        if has_gammas:
            new = re.sub(r"ls(\d)(_1)?\.gamma$", r"gamma_\1\2", new)
        if stem and (match := re.fullmatch(r"patch_embed\.(proj|norm|layers\.\d+)\.(\w+)", name)):
            number = stem.get(match[1], match[1].removeprefix("layers."))
            new = f"patch_embed.proj.{number}.{match[2]}"
        rows.append(Row(name, (new,)))
    return rows


def _second_branch(name: str) -> str:
    """DeiT III's name of a weight in a block of two branches, which differs in the second branch's modules alone."""
    match = re.fullmatch(r"(blocks\.\d+)\.(attns|ffns)\.([01])\.(\w+)\.(.+)", name)
    if match is None:
        return name
    block, kind, branch, module, weight = match.groups()
    number = 1 if kind == "attns" else 2
    module = {"norm": f"norm{number}", "ls": f"ls{number}"}.get(module, module)
    second = "" if branch == "0" else "_1" if module.startswith("ls") else "1"
    return f"{block}.{module}{second}.{weight}"


def _read_stem(source: str, tensors: Mapping[str, Tensor], eps: float) -> tuple[int, int, tuple[int, int], StemConfig]:
    """Width, channels of the images, patch and stem: one convolution, or hMLP's, of 4 x 4 pixels and then 2 x 2."""
    sides = {int(m[1]): tuple(t.shape[2:]) for n, t in tensors.items() if t.ndim == 4 and (m := _IN_STEM.fullmatch(n))}
    if not any(map(_IN_STEM.match, tensors)):
        width, in_chans, *patch = need(source, tensors, "patch_embed.proj.weight", 4).shape
        after = _norm(tensors, "patch_embed.norm", eps)
        return width, in_chans, (patch[0], patch[1]), StemConfig("patch_embed.proj.bias" in tensors, after=after)
    if not sides or sides != {3 * i: (2, 2) if i else (4, 4) for i in range(len(sides))}:
        raise UserError(f"{source} is not covered: of stems of several convolutions only hMLP is.")
    last, side = max(sides), 4 << (len(sides) - 1)
    inner, after = (_norm(tensors, f"patch_embed.proj.{number}", eps) for number in (1, last + 1))
    stem = StemConfig("patch_embed.proj.0.bias" in tensors, kind="hmlp", inner=inner if last else after, after=after)
    in_chans = tensors["patch_embed.proj.0.weight"].shape[1]
    return len(tensors[f"patch_embed.proj.{last}.weight"]), in_chans, (side, side), stem


def _norm(tensors: Mapping[str, Tensor], name: str, eps: float) -> NormConfig | None:
    if f"{name}.weight" not in tensors:
        return None
    if f"{name}.running_mean" in tensors:
        return _BATCH
    return NormConfig("layer" if f"{name}.bias" in tensors else "rms", eps)


def _read_config(
    source: str, tensors: Mapping[str, Tensor], num_heads: int | None, img_size: Size, eps: float
) -> tuple[ViTConfig, list[str]]:
    depth = count_blocks(source, list(tensors), "blocks.")
    # timm's parallel blocks are numbered; DeiT III's have two branches.
    numbers = [int(m[1]) for name in tensors if (m := re.match(r"blocks\.0\.attns\.(\d+)\.", name))]
    parallel = max(numbers) + 1 if numbers else 2 if any(map(_SECOND.match, tensors)) else 1
    tensors = {sequential_name(name, parallel): value for name, value in tensors.items()}
    width, in_chans, patch_size, stem = _read_stem(source, tensors, eps)
    fc1 = need(source, tensors, "blocks.0.mlp.fc1.weight", 2)
    is_distilled = "dist_token" in tensors
    registers = tensors["reg_token"].shape[1] if "reg_token" in tensors else int(is_distilled)
    prefix = registers + ("cls_token" in tensors)
    positions = need(source, tensors, "pos_embed", 3).shape[1] if "pos_embed" in tensors else None
    size, on_prefix = image_size(source, positions, prefix, patch_size, img_size)
    assumed = ["activation=gelu", f"eps of all norms {eps:g}"]
    if img_size is None:
        assumed.append(f"img_size={size}")
    if num_heads is None and "blocks.0.attn.q_norm.weight" in tensors:
        num_heads = width // tensors["blocks.0.attn.q_norm.weight"].shape[0]
    elif num_heads is None:
        num_heads = heads_of_width(source, width)
        assumed.append(f"num_heads={num_heads}")
    after_pool = "fc_norm.weight" in tensors
    pool = "map" if "attn_pool.latent" in tensors else "avg" if after_pool or "cls_token" not in tensors else "token"
    pool = "prefix" if is_distilled else pool
    assumed += [] if is_distilled else [f"pool={pool}"]
    scale = next((t for n, t in tensors.items() if re.match(r"blocks\.0\.(ls1\.gamma|gamma_1)$", n)), None)
    norm = partial(_norm, tensors, eps=eps)
    config = ViTConfig(
        img_size=size,
        patch_size=patch_size,
        in_chans=in_chans,
        num_classes=tensors["head.weight"].shape[0] if "head.weight" in tensors else 0,
        embed_dim=width,
        depth=depth,
        parallel=parallel,
        num_heads=num_heads,
        mlp_dim=fc1.shape[0],
        qkv_bias="blocks.0.attn.qkv.bias" in tensors,
        proj_bias="blocks.0.attn.proj.bias" in tensors,
        qk_norm=norm("blocks.0.attn.q_norm"),
        stem=stem,
        position="none" if positions is None else "learn",
        position_on_prefix=on_prefix if prefix else True,
        position_norm=norm("norm_pre"),
        position_norm_on_prefix="norm_pre.weight" in tensors,
        class_token="cls_token" in tensors,
        reg_tokens=registers,
        attn=BranchConfig(before=norm("blocks.0.norm1"), inner=norm("blocks.0.attn.norm")),
        mlp=BranchConfig(before=norm("blocks.0.norm2"), inner=norm("blocks.0.mlp.norm")),
        layer_scale=None if scale is None else float(scale.float().mean()) or 1e-5,
        final_norm=norm("fc_norm" if after_pool else "norm"),
        pool=pool,  # type: ignore[arg-type]
        norm_after_pool=after_pool,
    )
    return config, assumed
