"""The same function with fewer operations: what is linear next to a linear map becomes part of it.

- A norm that a map V reads: ``V (g n + b) + c = (V g) n + (c + V b)``, g and b its gain and bias. V is the map of
  queries, keys and values, the first of the MLP, for norms inside the branches the last, and for Dual PatchNorm the
  patch projection. BatchNorm in evaluation is such a gain and bias altogether, and leaves its slot.
- BatchNorm behind a map, as in convolutional stems, goes into that map.
- Factors of heads go into the output projection.
- Parallel branches become one block with the heads and hidden layers of all (``merge_branches``).
- LayerScale behind a map: ``s (W h + c) = (s W) h + s c``; behind a norm on the branch it goes into that norm's gain.

The final norm stays, so that features are the same as well as logits. The arithmetic is in float64, rounded once.
"""

import dataclasses
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from vitmods.model.config import ViTConfig
from vitmods.model.rms_conversion import attention_readers, mlp_readers
from vitmods.model.slots import BranchConfig, NormConfig

if TYPE_CHECKING:
    from torch import Tensor

    Weights = dict[str, Tensor]

WHOLLY_AFFINE = ("batch", "scale_shift")
"""Norms that are a gain and a bias for each channel and nothing else, in evaluation."""


def fold(config: ViTConfig, weights: "Weights") -> "tuple[ViTConfig, Weights]":
    """Config and weights of a model with the same outputs in evaluation. The tensors given stay as they are."""
    new, readers, stem = dict(weights), mlp_readers(config), config.stem
    slots = [branch for i in range(config.depth) for branch in config.branches(i)]
    is_gated = config.gate != "none"  # then a norm of the heads stays: gates act between it and the projection
    stays = bool if is_gated else _keeps_slot
    # Each LayerScale follows a map, or a norm with a gain for each channel.
    on_branch = [branch.branch for branch in slots if branch.branch and _keeps_slot(branch.branch)]
    scales_fold = all(norm.affine and dict(norm.options).get("gain") != "scalar" for norm in on_branch)
    _fold_into_reader(new, stem.before, "patch_embed.norm_before", "patch_embed.proj")
    _fold_into_writer(new, stem.after, "patch_embed.norm", "patch_embed.proj")
    # The convolutions of a stem of several, before its last; each has its norm as the next layer.
    layers = [n.removesuffix(".weight") for n, w in new.items() if n.startswith("patch_embed.layers.") and w.ndim == 4]
    for layer in layers:
        prefix, _, number = layer.rpartition(".")
        _fold_into_writer(new, stem.inner, f"{prefix}.{int(number) + 1}", layer)
    for i in range(config.depth):
        attn, mlp = config.branches(i)
        for branch, n, first, part, last in (
            (attn, 1, attention_readers(config), "attn", "proj"),
            (mlp, 2, readers, "mlp", "fc2"),
        ):
            block, writer = f"blocks.{i}", f"blocks.{i}.{part}.{last}"
            maps = [f"{block}.{part}.{name}" for name in first]
            _fold_into_reader(new, branch.before, f"{block}.norm{n}", *maps, scale=config.norm_scale_at(i))
            if part == "mlp" or not is_gated:
                _fold_into_reader(new, branch.inner, f"{block}.{part}.norm", writer)
            _fold_into_writer(new, branch.branch, f"{block}.norm{n}_branch", writer)
            if scales_fold and f"{block}.ls{n}.gamma" in new:
                scaled = f"{block}.norm{n}_branch" if _keeps_slot(branch.branch) else writer
                scale(new, scaled, new.pop(f"{block}.ls{n}.gamma"))
        if config.head_scale and not stays(attn.inner):
            factors, matrix = new.pop(f"blocks.{i}.attn.head_scale").double(), new[f"blocks.{i}.attn.proj.weight"]
            columns = factors.repeat_interleave(matrix.shape[1] // len(factors))
            new[f"blocks.{i}.attn.proj.weight"] = (matrix.double() * columns).to(matrix)
    outputs = ("attn.proj", *(f"mlp.{reader}" for reader in readers), "mlp.fc2")
    with_bias = [f"blocks.{i}.{name}" for i in range(config.depth) for name in outputs]
    edited = config.with_slots(partial(_edit_branch, fold_inner=not is_gated), _edit_branch).with_(
        stem=replace(
            stem,
            before=_folded(stem.before),
            inner=stem.inner if _keeps_slot(stem.inner) else None,
            after=stem.after if _keeps_slot(stem.after) else None,
            bias=stem.bias or _shifts(stem.before) or any(n and not _keeps_slot(n) for n in (stem.inner, stem.after)),
        ),
        qkv_bias=config.qkv_bias or any(_shifts(b.before) for b in slots[::2]),
        proj_bias=config.proj_bias or any(f"{name}.bias" in new for name in with_bias),
        head_scale=config.head_scale and any(stays(b.inner) for b in slots[::2]),
        layer_scale=None if scales_fold else config.layer_scale,
    )
    biased = ["patch_embed.proj", *layers] if edited.stem.bias else []
    biased += [f"blocks.{i}.attn.qkv" for i in range(config.depth)] if edited.qkv_bias else []
    biased += with_bias if edited.proj_bias else []
    for name in biased:
        rows = new[f"{name}.weight"]
        new.setdefault(f"{name}.bias", rows.new_zeros(len(rows)))
    return edited, new


def merge_branches(config: ViTConfig, weights: "Weights", branches: int) -> "tuple[ViTConfig, Weights] | None":
    """Merge every ``branches`` blocks of a folded sequential model, the parallel branches of a model, into one
    block: their norms are alike without gains, so that their heads are those of one attention and their hidden layers
    one. None where something else is between (or may be: unknown settings)."""
    slots = [branch for i in range(config.depth) for branch in config.branches(i)]
    alone = all(branch.inner is branch.branch is branch.after is None for branch in slots)
    kinds = ("layer", "rms", "scale", "instance", "group")
    alike = all(n is None or (not n.affine and n.kind in kinds) for n in (branch.before for branch in slots))
    others = {f.name for f in dataclasses.fields(config)} - _WIDENED
    default = ViTConfig()
    if not (alone and alike) or config.pool == "map" or any(getattr(config, n) != getattr(default, n) for n in others):
        return None
    wide: Weights = {name: value for name, value in weights.items() if not name.startswith("blocks.")}
    for i in range(config.depth // branches):
        for name in [name for name in weights if name.startswith(f"blocks.{i * branches}.")]:
            part_name = name.split(".", 2)[2]
            parts = [weights[f"blocks.{i * branches + j}.{part_name}"] for j in range(branches)]
            if part_name in ("attn.qkv.weight", "attn.qkv.bias"):  # queries, keys and values of all heads side by side
                joined = torch.cat([part.view(3, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)
            elif part_name in ("attn.proj.bias", "mlp.fc2.bias"):
                joined = torch.stack([part.double() for part in parts]).sum(0).to(parts[0])
            else:
                joined = torch.cat(parts, 1 if part_name in ("attn.proj.weight", "mlp.fc2.weight") else 0)
            wide[f"blocks.{i}.{part_name}"] = joined
    heads, width = config.num_heads, config.head_dim or config.embed_dim // config.num_heads
    rolled = config.rolled(branches).with_(parallel=1, num_heads=branches * heads, head_dim=width)
    return rolled.with_(mlp_dim=branches * config.mlp_dim), wide


_WIDENED = {
    "img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "num_heads", "head_dim", "mlp_dim",
    "qkv_bias", "proj_bias", "activation", "stem", "position", "position_on_prefix", "position_norm",
    "position_norm_on_prefix", "class_token", "reg_tokens", "mask_token", "prefix_from", "attn", "mlp",
    "first_blocks", "final_norm", "pool", "pool_prefix", "norm_after_pool", "representation", "head_hidden",
    "head_bias", "pos_drop", "proj_drop", "attn_drop", "head_drop", "drop_path", "drop_path_shape", "dynamic_img_size",
    "crop_border", "init",
}  # fmt: skip
"""Settings that wide blocks may have."""


def plain(config: ViTConfig, weights: "Weights") -> "tuple[ViTConfig, Weights]":
    """The folded model in the form that other libraries have: gains and biases of norms are ones and zeros there (the
    fixed factor of a block's norms is a gain again), every map has a bias, and what only training uses is left out."""
    config = config.with_(**_UNUSED, proj_bias=True, stem=replace(config.stem, bias=True))
    folded, new = fold(config, {name: value for name, value in weights.items() if name != "mask_token"})
    read = [branch.before for i in range(folded.depth) for branch in folded.branches(i)]
    takes_scale = all(norm != _with_gain(norm) for norm in read)
    for i in range(folded.depth):
        for branch, n, writer in zip(folded.branches(i), (1, 2), ("attn.proj", "mlp.fc2"), strict=True):
            matrix = new[f"blocks.{i}.{writer}.weight"]
            before = (branch.before, f"norm{n}", matrix.shape[0], folded.norm_scale_at(i) if takes_scale else 1.0)
            inside = (branch.inner, f"{writer.partition('.')[0]}.norm", matrix.shape[1], 1.0)
            for norm, name, width, gain in (before, inside):
                if norm is not None and norm != _with_gain(norm):
                    new[f"blocks.{i}.{name}.weight"] = matrix.new_full((width,), gain)
                    new |= {f"blocks.{i}.{name}.bias": matrix.new_zeros(width)} if norm.kind == "layer" else {}
    is_dinov2 = config.pool == "token+avg"  # only its classes have this head, and they have LayerScale
    for name in [f"blocks.{i}.ls{n}.gamma" for i in range(folded.depth) for n in (1, 2)] if is_dinov2 else []:
        new[name] = new["cls_token"].new_ones(config.embed_dim)
    layer_scale, norm_scale = 1.0 if is_dinov2 else folded.layer_scale, folded.norm_scale and not takes_scale

    def edit(branch: BranchConfig) -> BranchConfig:
        return replace(branch, before=_with_gain(branch.before), inner=_with_gain(branch.inner))

    return folded.with_slots(edit, edit).with_(layer_scale=layer_scale, norm_scale=norm_scale), new


_UNUSED: dict[str, Any] = {
    **dict.fromkeys(("pos_drop", "proj_drop", "attn_drop", "key_drop", "patch_drop", "head_drop", "drop_path"), 0.0),
    **{"drop_path_shape": "linear", "key_drop_shape": "decreasing", "mask_token": False},
}
"""settings of a ViTConfig that outputs in evaluation do not depend on"""


def _with_gain(norm: NormConfig | None) -> NormConfig | None:
    return replace(norm, affine=True) if norm and norm.kind in ("layer", "rms") else norm


def _edit_branch(branch: BranchConfig, fold_inner: bool = True) -> BranchConfig:
    on_branch = None if not _keeps_slot(branch.branch) else branch.branch
    inner = _folded(branch.inner) if fold_inner else branch.inner
    return replace(branch, before=_folded(branch.before), inner=inner, branch=on_branch)


def _folded(norm: NormConfig | None) -> NormConfig | None:
    if norm is None or not _keeps_slot(norm):
        return None
    return replace(norm, affine=False) if _folds(norm) else norm


def _folds(norm: NormConfig) -> bool:
    """Whether the norm ends in a gain and bias that can be folded."""
    return norm.facts.folds or norm.kind in WHOLLY_AFFINE


def _keeps_slot(norm: NormConfig | None) -> bool:
    return norm is not None and norm.kind not in WHOLLY_AFFINE


def _shifts(norm: NormConfig | None) -> bool:
    """Whether folding the norm adds to the bias of the map that reads it."""
    return norm is not None and _folds(norm) and (norm.kind == "batch" or (norm.affine and norm.facts.biased))


def _fold_into_reader(
    weights: "Weights", norm: NormConfig | None, name: str, *readers: str, scale: float = 1.0
) -> None:
    """``V s (g n + b) + c``: gain and bias of the norm become part of V and c, for each V that reads it; s stays."""
    if norm is None or not _folds(norm):
        return
    gain, shift = _take_affine(weights, norm, name, weights[f"{readers[0]}.weight"][0].numel())
    for reader in readers:
        matrix = weights[f"{reader}.weight"]
        wide = matrix.double().flatten(1)
        weights[f"{reader}.weight"] = (wide * gain).view_as(matrix).to(matrix)
        if _shifts(norm):
            bias = weights.get(f"{reader}.bias")
            weights[f"{reader}.bias"] = (scale * (wide @ shift) + (0 if bias is None else bias.double())).to(matrix)


def _fold_into_writer(weights: "Weights", norm: NormConfig | None, name: str, writer: str) -> None:
    """``g (W h + c) + b``, where the norm on the branch is nothing else."""
    if norm is None or _keeps_slot(norm):
        return
    gain, shift = _take_affine(weights, norm, name, len(weights[f"{writer}.weight"]))
    scale(weights, writer, gain)
    bias = weights.get(f"{writer}.bias")
    weights[f"{writer}.bias"] = (shift + (0 if bias is None else bias.double())).to(weights[f"{writer}.weight"])


def scale(weights: "Weights", name: str, gain: "Tensor") -> None:
    """Multiply the rows of a map (or the channels of a norm) and of its bias by a factor each."""
    for key in (f"{name}.weight", f"{name}.bias"):
        if key in weights:
            old = weights[key]
            weights[key] = (old.double() * gain.double().view(-1, *[1] * (old.ndim - 1))).to(old)


def _take_affine(weights: "Weights", norm: NormConfig, name: str, dim: int) -> "tuple[Tensor, Tensor]":
    """Remove a norm's gain and bias from the weights; returns them, (dim,) each in float64."""

    def take(part: str, default: float) -> "Tensor":
        value = weights.pop(f"{name}.{part}", None)
        like = next(iter(weights.values()))
        return torch.full((dim,), default, dtype=torch.float64, device=like.device) if value is None else value.double()

    start = norm.facts.unit(dim)
    gain, shift = take("weight", start) / start, take("bias", 0.0)
    if norm.kind == "batch":
        gain = gain * (take("running_var", 1.0) + norm.eps).rsqrt()
        shift = shift - take("running_mean", 0.0) * gain
    return gain, shift
