"""State dicts of published ViTs, which lack a config, as a vitmods ViT; and DeiT files (.pth) from a ViT.

The names are timm's (those of DINO, iBOT, MAE and I-JEPA too), DeiT's or such that `_OTHER_NAMES` turns into timm's: of
DINOv2 and v3, BEiT, EVA-02, CLIP (OpenAI's and open_clip's) and torchvision. Sources: the public code of these, Touvron
et al., DeiT (2021) and DeiT III (2022), whose class calls the LayerScale vectors ``gamma_1`` and ``gamma_2``.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from vitmods.adapters.tensors import (
    DISTILLED,
    STACKED,
    WITHOUT_KEYS,
    Coverage,
    Layout,
    Row,
    Size,
    Table,
    count_blocks,
    heads_of_width,
    image_size,
    need,
    packed_gate,
    part_of,
    rows_of,
    write_tensors,
)
from vitmods.adapters.transfer import check_readable, fields, read_weights, refuse_slots
from vitmods.layers.position import RotaryPositions
from vitmods.layers.stems.hmlp import hmlp_layers
from vitmods.model.branch_names import sequential_name
from vitmods.model.config import ViTConfig
from vitmods.model.slots import BranchConfig, NormConfig, StemConfig
from vitmods.model.vit import ViT
from vitmods.ops.rotary import RopeConfig
from vitmods.util.errors import UserError

_BATCH = NormConfig("batch", eps=1e-5)
_SECOND = re.compile(r"blocks\.\d+\.(attn1|mlp1|norm11|norm21|gamma_\d_1)\b")
_IN_STEM = re.compile(r"patch_embed\.proj\.(\d+)\.(\w+)")
_OTHER_NAMES = {
    r"^(transformer\.resblocks\.|encoder\.layers\.encoder_layer_|blocks\.\d+\.(?=\d+\.))": "blocks.",
    r"^(conv1|conv_proj|patch_embed\.projection)\.": "patch_embed.proj.",
    r"^class_(embedding|token)$": "cls_token",
    r"^(positional_embedding|encoder\.pos_embedding)$": "pos_embed",
    r"^(register|storage)_tokens$": "reg_token",
    r"^ln_pre\.": "norm_pre.",
    r"^(ln_post|encoder\.ln)\.": "norm.",
    r"^heads\.(?=head\.|pre_logits\.)": "",
    r"^(blocks\.\d+\.)ln_(?=[12]\.)": r"\1norm",
    r"^(blocks\.\d+\.)ls_(?=[12]\.)": r"\1ls",
    r"^(blocks\.\d+\.)self_attention\.": r"\1attn.",
    r"^(blocks\.\d+\.attn\.)in_proj_": r"\1qkv.",
    r"^(blocks\.\d+\.attn\.)out_proj\.": r"\1proj.",
    r"^(blocks\.\d+\.attn\.)inner_attn_ln\.": r"\1norm.",
    r"^(blocks\.\d+\.attn\.)([qkv])_bias$": r"\1\2_proj.bias",
    r"^(blocks\.\d+\.mlp\.)(c_fc|0|linear_1|w12)\.": r"\1fc1.",
    r"^(blocks\.\d+\.mlp\.)(c_proj|3|linear_2|w3)\.": r"\1fc2.",
    r"^(blocks\.\d+\.mlp\.)w1\.": r"\1fc1_g.",
    r"^(blocks\.\d+\.mlp\.)w2\.": r"\1fc1_x.",
    r"^(blocks\.\d+\.mlp\.)ffn_ln\.": r"\1norm.",
}
"""Names of other releases -> timm's, one after the other."""


def read_deit(
    source: str,
    tensors: Mapping[str, Tensor],
    num_heads: int | None = None,
    img_size: Size = None,
    eps: float | None = None,
    beside: Iterable[str] = (),
    **settings: Any,
) -> tuple[ViT, Coverage]:
    """A ViT from the state dict of a published one, and the account of its tensors.

    Settings that the tensors leave open are assumed, and listed so in the account: the published number of heads for
    the width, square images, exact GELU, the ``eps`` of all norms (1e-6, of CLIP and DINOv3 1e-5), and with a class
    token that the head reads it. ``settings`` are fields of ViTConfig that are known to be otherwise; ``beside`` names
    tensors of the file that are not the model's, by which OpenAI's CLIP is known.

    Raises UserError for stems other than one convolution or hMLP, and when something is missing, left over or cannot be
    reported.
    """
    theirs = {_timm_name(name): name for name in tensors}
    if len(theirs) < len(tensors):  # two names for one place
        theirs = {name: name for name in tensors}
    named = {name: tensors[old] for name, old in theirs.items()}
    for name in {"cls_token", "pos_embed"} & named.keys():  # CLIP's are (C,) and (N, C)
        named[name] = named[name].reshape(1, -1, named[name].shape[-1]) if named[name].ndim < 3 else named[name]
    is_clip = "class_embedding" in tensors
    eps = eps or (1e-5 if is_clip or "storage_tokens" in tensors else 1e-6)
    folds_token = bool({"register_tokens", "storage_tokens"} & tensors.keys())
    turns = (settings["rope"], 0, 16**2) if settings.get("rope") else _read_turns(source, named)
    activation = "quick_gelu" if is_clip and any(name.endswith("input_resolution") for name in beside) else "gelu"
    config, assumed = _read_config(source, named, num_heads, img_size, eps, activation, folds_token, turns)
    is_eva02 = "blocks.0.attn.q_proj.bias" in named and (
        config.mlp_kind == "swiglu" or "blocks.0.attn.q_proj.weight" in named
    )
    if is_eva02 and turns is None and "rope" not in settings:
        raise UserError(
            f"{source} has the names of EVA-02, and not its rotary positions: give rope=RopeConfig(base=10000, "
            "reference=(16, 16)) of vitmods.model.config, those of its release, or rope=None."
        )
    config = config.with_(**settings)
    assumed = [setting for setting in assumed if setting.partition("=")[0] not in settings]
    table = _table(named, config, folds_token)
    has_gammas = any(".gamma_1" in name for name in named)
    has_seconds = any(_SECOND.match(name) for name in named)

    def pair(ours: Iterable[str]) -> list[Row]:
        rows = zip(ours := list(ours), _rows(ours, config, has_gammas, has_seconds), rows_of(ours, table), strict=True)
        return [usual if special == Row(name, (name,)) else special for name, usual, special in rows]

    model, account = read_weights(source, config, pair, named, None, assumed)
    rows = tuple(Row(row.ours, tuple(theirs[name] for name in row.theirs), row.layout) for row in account.rows)
    return model, replace(account, rows=rows, left_out=tuple((theirs[name], why) for name, why in account.left_out))


def _timm_name(name: str) -> str:
    for other, timms in _OTHER_NAMES.items():
        name = re.sub(other, timms, name)
    return name


def _table(tensors: Mapping[str, Tensor], config: ViTConfig, folds_token: bool) -> Table:
    """Where our tensors are others' in another form."""
    attn, table = "blocks.*.attn", dict[str, Any]()
    q, k, v = (f"{attn}.{name}_proj" for name in "qkv")
    if f"{q}.weight".replace("*", "0") in tensors:
        table[f"{attn}.qkv.weight"] = ((q, k, v), {"weight": (".weight", STACKED)})
    if f"{q}.bias".replace("*", "0") in tensors:
        parts = ((q, k, v), STACKED) if f"{k}.bias".replace("*", "0") in tensors else ((q, v), WITHOUT_KEYS)
        table[f"{attn}.qkv.bias"] = (parts[0], {"bias": (".bias", parts[1])})
    if "blocks.0.attn.qkv.bias_mask" in tensors:
        queries_values = Layout(lambda x: WITHOUT_KEYS.read(*x.chunk(3)[::2]))
        table[f"{attn}.qkv.bias"] = ((f"{attn}.qkv",), {"bias": (".bias", queries_values)})
    if config.rel_pos:
        place = attn if config.rel_pos is True else "rel_pos_bias"
        table[f"{attn}.rel_pos.table"] = f"{place}.relative_position_bias_table"
    if config.mlp_kind == "swiglu" and "blocks.0.mlp.fc1.weight" in tensors:
        table |= packed_gate("blocks.*.mlp", "blocks.*.mlp.fc1")
    if folds_token and config.position == "learn":  # the class token alone has a position, which becomes a part of it
        folded = Layout(lambda token, x: token + x[:, :1])
        table["cls_token"] = (("cls_token", "pos_embed"), {"cls_token": ("", folded)})
        table["pos_embed"] = (("pos_embed",), {"pos_embed": ("", part_of(lambda x: x[:, 1:], dim=1))})
    if "proj" in tensors:  # to what images and texts have in common
        zeros = Layout(lambda x: x.new_zeros(x.shape[1]))
        table["head"] = (("proj",), {"weight": ("", Layout(lambda x: x.T)), "bias": ("", zeros)})
    return table


def _read_turns(source: str, tensors: Mapping[str, Tensor]) -> tuple[RopeConfig, int, int] | None:
    """The rotary positions of which a file has the table (EVA-02) or the periods (DINOv3), the channels of a head, and
    how many patches its images had. Raises UserError where these are not what is computed here."""
    cos, sin = (
        next((t for n, t in tensors.items() if n.endswith(f"rope.freqs_{word}")), None) for word in ("cos", "sin")
    )
    if (periods := tensors.get("rope_embed.periods")) is not None:
        count, patches = len(periods), 16**2
        base = float(f"{float(periods[-1]) ** (count / max(count - 1, 1)):.2g}")
        rope, channels = RopeConfig(base=base, pairs="halved", coordinates="centered"), 4 * count
        is_known = torch.allclose(base ** (torch.arange(count) / count), periods, rtol=1e-2)
    elif cos is not None and sin is not None and isqrt(len(cos)) ** 2 == len(cos) > 1:
        patches, channels = cos.shape
        side, slowest = isqrt(patches), channels // 2 - 1  # the channel in which a row turns least
        step = float(torch.atan2(sin[side, slowest], cos[side, slowest])) * 10_000 ** (1 - 4 / channels)
        rope = RopeConfig(base=10_000.0, reference=(max(round(step * side), 1),) * 2)
        turn = RotaryPositions(channels, 1, (side, side), settings=rope).table
        is_known = torch.allclose(turn[0], cos, atol=1e-3) and torch.allclose(turn[1][:, 1::2], sin[:, 1::2], atol=1e-3)
    else:
        return None
    if not is_known:
        raise UserError(f"{source} has rotary positions other than those of EVA-02 and DINOv3, which are not covered.")
    return rope, channels, patches


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
    source: str,
    tensors: Mapping[str, Tensor],
    num_heads: int | None,
    img_size: Size,
    eps: float,
    activation: Any,
    folds_token: bool,
    turns: tuple[RopeConfig, int, int] | None,
) -> tuple[ViTConfig, list[str]]:
    depth = count_blocks(source, list(tensors), "blocks.")
    # timm's parallel blocks are numbered; DeiT III's have two branches.
    numbers = [int(m[1]) for name in tensors if (m := re.match(r"blocks\.0\.attns\.(\d+)\.", name))]
    parallel = max(numbers) + 1 if numbers else 2 if any(map(_SECOND.match, tensors)) else 1
    tensors = {sequential_name(name, parallel): value for name, value in tensors.items()}
    width, in_chans, patch_size, stem = _read_stem(source, tensors, eps)
    mlp_dim = need(source, tensors, "blocks.0.mlp.fc2.weight", 2).shape[1]
    fc1 = tensors.get("blocks.0.mlp.fc1.weight")
    is_packed = fc1 is not None and len(fc1) == 2 * mlp_dim
    is_gated = is_packed or "blocks.0.mlp.fc1_g.weight" in tensors
    is_distilled = "dist_token" in tensors
    registers = tensors["reg_token"].shape[1] if "reg_token" in tensors else int(is_distilled)
    prefix = registers + ("cls_token" in tensors)
    positions = need(source, tensors, "pos_embed", 3).shape[1] if "pos_embed" in tensors else None
    tables = {True: "blocks.0.attn.relative_position_bias_table", "shared": "rel_pos_bias.relative_position_bias_table"}
    rel_pos = next((kind for kind, name in tables.items() if name in tensors), False)
    rope, turned, patches = turns or (None, 0, None)
    if positions is not None:
        patches = positions - folds_token
    elif rel_pos:  # offsets from 1 - rows to rows - 1, and three of the class token
        patches = ((isqrt(len(tensors[tables[rel_pos]]) - 3) + 1) // 2) ** 2
    elif img_size is not None:
        patches = None
    with_positions = 0 if folds_token or positions is None else prefix
    size, on_prefix = image_size(source, patches, with_positions, patch_size, img_size)
    assumed = [*[f"activation={activation}"] * (not is_gated), f"eps of all norms {eps:g}"]
    if rope is None and "blocks.0.gamma_1" in tensors:  # DeiT III's names are also those of timm's rotary ViTs
        assumed.append("rope=None")
    if img_size is None:
        assumed.append(f"img_size={size}")
    if num_heads is None and "blocks.0.attn.q_norm.weight" in tensors:
        num_heads = width // tensors["blocks.0.attn.q_norm.weight"].shape[0]
    elif num_heads is None and turned:
        num_heads = width // turned
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
        num_classes=len(tensors["head.weight"])
        if "head.weight" in tensors
        else tensors["proj"].shape[1]
        if "proj" in tensors
        else 0,
        embed_dim=width,
        depth=depth,
        parallel=parallel,
        num_heads=num_heads,
        mlp_dim=mlp_dim,
        mlp_kind="swiglu" if is_gated else "mlp",
        activation=activation,
        qkv_bias=bool({"blocks.0.attn.qkv.bias", "blocks.0.attn.q_proj.bias"} & tensors.keys()),
        proj_bias="blocks.0.attn.proj.bias" in tensors,
        qk_norm=norm("blocks.0.attn.q_norm"),
        stem=stem,
        position="none" if positions is None else "learn",
        position_on_prefix=on_prefix if prefix else True,
        rope=rope,
        rel_pos=rel_pos,  # type: ignore[arg-type]
        representation="pre_logits.weight" in tensors,
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
