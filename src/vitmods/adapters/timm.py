"""timm's VisionTransformer as a vitmods ViT and back, exactly; and vitmods models in timm's registry.

Importing this file registers ``vitmods_tiny_patch16_224`` and its sisters with ``timm.create_model``.
"""

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import timm.layers
import torch
from timm.models import register_model
from timm.models import vision_transformer as timm_vit
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

from vitmods.adapters.apply import apply
from vitmods.adapters.tensors import Coverage, Row
from vitmods.adapters.transfer import check_readable, export_model, fields, import_model, refuse, refuse_slots
from vitmods.changes import parse_changes
from vitmods.layers import Attention, Block, BlockConfig, BranchNorms, LayerNorm, Mlp
from vitmods.model.config import BranchConfig, NormConfig, StemConfig, ViTConfig
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError, nearest

_POOLS = {"token": "token", "avg": "avg", "map": "map", "": "none"}


def from_timm(model: Any) -> ViT:
    """A vitmods ViT with the config and weights of a timm VisionTransformer (DeiT's too), checked on random images.

    Raises UserError that lists every part of the model without a counterpart here.
    """
    return read(model)[0]


def read(model: Any) -> tuple[ViT, Coverage]:
    """As ``from_timm``, with the account of all tensors."""
    source = f"timm's {type(model).__name__}"
    if type(model) is VisionTransformerDistilled:
        raise UserError(f"{source} is not covered: there is no slot for its distillation token and second head.")
    if type(model) is not timm_vit.VisionTransformer:
        raise UserError(f"{source} is not covered; VisionTransformer is.")
    refuse(source, uncovered(model))
    config = _read_config(model)
    new, coverage = import_model(source, model, config, _rows(config), _look)
    new.set_grad_checkpointing(model.grad_checkpointing)
    new.pretrained_cfg = new.default_cfg = getattr(model, "pretrained_cfg", new.pretrained_cfg)
    return new, coverage


def to_timm(model: ViT) -> timm_vit.VisionTransformer:
    """A timm VisionTransformer with the function, weights, device, type and mode of a ViT, checked on random images.

    Raises UserError naming the slots for which timm has no counterpart.
    """
    target, config = "timm's VisionTransformer", model.vit_config
    refuse_slots(target, config, _counterpart(config))
    check_readable("The model", model)
    with torch.random.fork_rng(devices=[]):
        new = timm_vit.VisionTransformer(**_arguments(config))
    export_model(target, model, new, _rows(config), _look)
    new.set_grad_checkpointing(model.grad_checkpointing)
    new.pretrained_cfg = new.default_cfg = dict(model.pretrained_cfg)  # type: ignore[assignment]
    return new


def _look(model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    return model.forward_features(images), model(images)


def _rows(config: ViTConfig) -> list[Row]:
    """The names are the same; what a config has, timm has under that name."""
    with torch.device("meta"):
        return [Row(name, (name,)) for name in ViT(config).state_dict()]


def uncovered(model: Any) -> list[str]:
    """What of a timm VisionTransformer has no counterpart in a ViTConfig; empty when all of it can be read."""
    missing = []
    if type(model.patch_embed) is not timm.layers.PatchEmbed:
        missing.append(f"stem {type(model.patch_embed).__name__}")
    if model.dynamic_img_size:
        missing.append("dynamic_img_size (resize to one size and call set_input_size)")
    if model.global_pool not in _POOLS or model.pool_include_prefix:
        missing.append(f"pooling '{model.global_pool}' with pool_include_prefix={model.pool_include_prefix}")
    if not isinstance(model.patch_drop, nn.Identity):
        missing.append("patch dropout")
    missing += sorted({problem for block in model.blocks for problem in _block_problems(block)})
    first = model.blocks[0]
    if any(_parts(block) != _parts(first) for block in model.blocks):
        missing.append("blocks that differ from one another")
    if model.attn_pool is not None and _read_norm(model.attn_pool.norm) != (_read_norm(model.norm) or NormConfig()):
        missing.append("a norm in attn_pool that is not as the final norm")
    for name, module in model.named_modules():
        if name.rpartition(".")[2].startswith(("norm", "fc_norm", "q_norm", "k_norm")) and not _can_read_norm(module):
            missing.append(f"{name} {type(module).__name__}")
    return missing


def _first_branches(block: Any) -> Any:
    """A block's first attention and MLP branch under the names of a sequential block."""
    if type(block) is not timm_vit.ParallelThingsBlock:
        return block
    a: Any = block.attns[0]
    f: Any = block.ffns[0]
    return SimpleNamespace(norm1=a.norm, attn=a.attn, ls1=a.ls, drop_path1=a.drop_path, norm2=f.norm, mlp=f.mlp)


def _block_problems(block: Any) -> list[str]:
    if type(block) not in (timm_vit.Block, timm_vit.ParallelThingsBlock):
        return [f"block {type(block).__name__}"]
    block = _first_branches(block)
    problems = []
    attn: Any = block.attn
    mlp: Any = block.mlp
    if type(attn) is not timm.layers.Attention or getattr(attn, "gate", None) is not None:
        problems.append("an attention other than timm's plain one")
    if type(mlp) is not timm.layers.Mlp or not isinstance(mlp.act, nn.GELU):
        problems.append(f"MLP {type(mlp).__name__} with {type(getattr(mlp, 'act', None)).__name__}")
    elif attn.proj.bias is None or mlp.fc1.bias is None:
        problems.append("proj_bias=False")
    return problems


def _parts(block: Any) -> list[tuple[str, str]]:
    """What a block is made of, with shapes, eps and rates; drop path may differ from block to block."""
    leaves = ((name, module) for name, module in block.named_modules() if not list(module.children()))
    parts = [(name, repr(module)) for name, module in leaves if "drop_path" not in name]
    heads = [m.num_heads for m in block.modules() if hasattr(m, "num_heads")]
    return [*parts, ("heads", str(heads))]


def _can_read_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.Identity | nn.LayerNorm | timm.layers.RmsNorm)


def _read_norm(module: Any) -> NormConfig | None:
    if isinstance(module, nn.Identity):
        return None
    kind = "layer" if isinstance(module, nn.LayerNorm) else "rms"
    return NormConfig(kind, float(module.eps), module.weight is not None)


def _read_config(model: Any) -> ViTConfig:
    block: Any = _first_branches(model.blocks[0])
    stem: Any = model.patch_embed
    rates = [getattr(_first_branches(b).drop_path1, "drop_prob", 0.0) or 0.0 for b in model.blocks]
    after_pool = not isinstance(model.fc_norm, nn.Identity)
    return ViTConfig(
        img_size=tuple(stem.img_size),
        patch_size=tuple(stem.patch_size),
        in_chans=model.in_chans,
        num_classes=model.num_classes,
        embed_dim=model.embed_dim,
        depth=len(model.blocks),
        parallel=getattr(model.blocks[0], "num_parallel", 1),
        num_heads=block.attn.num_heads,
        mlp_dim=block.mlp.fc1.out_features,
        qkv_bias=block.attn.qkv.bias is not None,
        qk_norm=_read_norm(block.attn.q_norm),
        activation="gelu_tanh" if block.mlp.act.approximate == "tanh" else "gelu",
        stem=StemConfig(bias=stem.proj.bias is not None, after=_read_norm(stem.norm)),
        position="none" if model.pos_embed is None else "learn",
        position_on_prefix=not model.no_embed_class,
        position_norm=_read_norm(model.norm_pre),
        position_norm_on_prefix=not isinstance(model.norm_pre, nn.Identity),
        class_token=model.has_class_token,
        reg_tokens=model.num_reg_tokens,
        attn=BranchConfig(before=_read_norm(block.norm1), inner=_read_norm(block.attn.norm)),
        mlp=BranchConfig(before=_read_norm(block.norm2), inner=_read_norm(block.mlp.norm)),
        layer_scale=_read_layer_scale(model),
        final_norm=_read_norm(model.fc_norm if after_pool else model.norm),
        pool=_POOLS[model.global_pool],  # type: ignore[arg-type]
        norm_after_pool=after_pool,
        pos_drop=model.pos_drop.p,
        proj_drop=block.attn.proj_drop.p,
        attn_drop=block.attn.attn_drop.p,
        head_drop=model.head_drop.p,
        drop_path=rates[-1],
        drop_path_shape="constant" if len(rates) > 1 and rates[0] == rates[-1] > 0 else "linear",
    )


def _read_layer_scale(model: Any) -> float | None:
    scale = _first_branches(model.blocks[0]).ls1
    return None if isinstance(scale, nn.Identity) else float(scale.gamma.detach().float().mean()) or 1e-5


_COPIED = (
    "img_size patch_size in_chans num_classes embed_dim depth parallel num_heads mlp_dim qkv_bias activation "
    "position_on_prefix class_token reg_tokens layer_scale pool norm_after_pool pos_drop proj_drop attn_drop head_drop "
    "drop_path init head_bias"
)


def _norm_of(config: ViTConfig) -> NormConfig:
    """timm has one norm for all places but the stem."""
    norm = config.attn.before or NormConfig()
    return NormConfig(norm.kind if norm.kind in ("layer", "rms") else "layer", norm.eps, norm.affine)


def _counterpart(config: ViTConfig) -> ViTConfig:
    """The nearest config that timm's VisionTransformer can express."""
    norm, stem = _norm_of(config), config.stem.after
    if stem is not None:
        stem = NormConfig(stem.kind if stem.kind in ("layer", "rms") else "layer", stem.eps, stem.affine)
    return ViTConfig(
        **fields(config, _COPIED),
        qk_norm=norm if config.qk_norm else None,
        stem=StemConfig(bias=config.position_norm is None, after=stem),
        position="none" if config.position == "none" else "learn",
        position_norm=norm if config.position_norm else None,
        position_norm_on_prefix=config.position_norm_on_prefix or config.position_norm is not None,
        attn=BranchConfig(before=norm, inner=norm if config.attn.inner else None),
        mlp=BranchConfig(before=norm, inner=norm if config.mlp.inner else None),
        final_norm=norm if config.final_norm or (config.pool == "map" and norm != NormConfig()) else None,
    )


def _norm_layer(norm: NormConfig) -> Callable[[int], nn.Module]:
    kind = timm.layers.LayerNorm if norm.kind == "layer" else timm.layers.RmsNorm
    return partial(kind, eps=norm.eps, affine=norm.affine)


def timm_block(
    dim: int,
    num_heads: int,
    mlp_ratio: float = 4.0,
    qkv_bias: bool = True,
    qk_norm: bool = False,
    scale_attn_norm: bool = False,
    scale_mlp_norm: bool = False,
    proj_bias: bool = True,
    proj_drop: float = 0.0,
    attn_drop: float = 0.0,
    init_values: float | None = None,
    drop_path: float = 0.0,
    act_layer: Callable[[], nn.Module] = nn.GELU,
    norm_layer: Callable[[int], nn.Module] = LayerNorm,
    mlp_layer: Any = None,
    attn_layer: Any = None,
    depth: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Block:
    """Our block from the arguments of timm's: ``VisionTransformer(block_fn=timm_block)``.

    Raises UserError for a ``mlp_layer`` or ``attn_layer`` other than timm's ordinary ones.
    """
    for name, layer, standard in (("mlp_layer", mlp_layer, "Mlp"), ("attn_layer", attn_layer, "Attention")):
        if layer is not None and getattr(layer, "__name__", layer) not in (standard, ""):
            raise UserError(f"This block has its own attention and MLP: leave {name} at its default.")
    attn = partial(
        Attention,
        qkv_bias=qkv_bias,
        proj_bias=proj_bias,
        qk_norm=norm_layer if qk_norm else None,
        attn_drop=attn_drop,
        proj_drop=proj_drop,
    )
    config = BlockConfig(
        dim,
        num_heads,
        int(dim * mlp_ratio),
        attn=attn,
        mlp=partial(Mlp, act=act_layer(), bias=proj_bias, drop=proj_drop),
        attn_norms=BranchNorms(before=norm_layer, inner=norm_layer if scale_attn_norm else None),
        mlp_norms=BranchNorms(before=norm_layer, inner=norm_layer if scale_mlp_norm else None),
        layer_scale=init_values,
        drop_path=drop_path,
    )
    return Block(config).to(device=device, dtype=dtype)


def _arguments(config: ViTConfig) -> dict[str, Any]:
    """What makes timm's VisionTransformer from a config that it can express."""
    block = partial(timm_vit.ParallelThingsBlock, num_parallel=config.parallel)
    return {
        **fields(config, "img_size patch_size in_chans num_classes embed_dim depth num_heads qkv_bias reg_tokens"),
        "block_fn": timm_vit.Block if config.parallel == 1 else block,
        **{theirs: getattr(config, ours) for theirs, ours in _FROM_TIMM.items()},
        "global_pool": "" if config.pool == "none" else config.pool,
        "mlp_ratio": (config.mlp_dim + 0.5) / config.embed_dim,  # timm rounds the product down
        "qk_norm": config.qk_norm is not None,
        "scale_attn_norm": config.attn.inner is not None,
        "scale_mlp_norm": config.mlp.inner is not None,
        "class_token": config.class_token,
        "pos_embed": config.position,
        "no_embed_class": not config.position_on_prefix,
        "pre_norm": config.position_norm is not None,
        "final_norm": config.final_norm is not None,
        "norm_layer": _norm_layer(_norm_of(config)),
        "embed_norm_layer": _norm_layer(config.stem.after) if config.stem.after else None,
        "act_layer": partial(nn.GELU, approximate="tanh" if config.activation == "gelu_tanh" else "none"),
    }


_FROM_TIMM = {
    "drop_rate": "head_drop",
    "pos_drop_rate": "pos_drop",
    "proj_drop_rate": "proj_drop",
    "attn_drop_rate": "attn_drop",
    "drop_path_rate": "drop_path",
    "init_values": "layer_scale",
    "global_pool": "pool",
    "fc_norm": "norm_after_pool",
}
_SAME = (  # arguments that a ViTConfig has under the same name
    "num_classes", "in_chans", "img_size", "patch_size", "embed_dim", "depth", "num_heads", "qkv_bias", "reg_tokens",
    "class_token",
)  # fmt: skip


def create(name: str, changes: str = "", pretrained: bool = False, **kwargs: Any) -> ViT:
    """A vitmods model from the arguments that ``timm.create_model`` passes on; ``changes`` as in the shell ("dpn+rms").

    Raises UserError on pretrained weights (there are none) and on arguments that have no counterpart.
    """
    if pretrained:
        raise UserError(f"There are no pretrained weights for {name}: load a timm model and call vitmods.apply on it.")
    fields: dict[str, Any] = {}
    for key, value in kwargs.items():
        if key in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
            continue
        if key == "no_embed_class":
            fields["position_on_prefix"] = not value
        elif key in _FROM_TIMM or key in _SAME:
            fields[_FROM_TIMM.get(key, key)] = value
        else:
            known = [*_FROM_TIMM, *_SAME, "no_embed_class", "changes"]
            raise UserError(f"{name} has no argument '{key}'. {nearest(key, known)}")
    if "pool" in fields:
        fields["pool"] = _POOLS.get(fields["pool"], fields["pool"])
        fields.setdefault("norm_after_pool", fields["pool"] == "avg")
    if "embed_dim" in fields:
        fields["mlp_dim"] = 4 * fields["embed_dim"]  # timm gives the MLP's width as a ratio
    config = ViTConfig.from_name(name.replace("vitmods_", "vit_"), **fields)
    model = ViT(config)
    chosen = parse_changes(changes)
    return apply(model, *chosen) if chosen else model


def _register(name: str) -> None:
    def entry(pretrained: bool = False, **kwargs: Any) -> ViT:
        return create(name, pretrained=pretrained, **kwargs)

    entry.__name__ = entry.__qualname__ = name
    entry.__doc__ = f"{name.replace('vitmods_', 'vit_')} built by vitmods; ``changes`` as in the shell."
    registered: Callable[..., ViT] = register_model(entry)
    setattr(sys.modules[__name__], name, registered)


for _size, _patches in {"tiny": (16,), "small": (16, 32), "base": (16, 32), "large": (16, 32), "huge": (14,)}.items():
    for _patch in _patches:
        _register(f"vitmods_{_size}_patch{_patch}_224")
