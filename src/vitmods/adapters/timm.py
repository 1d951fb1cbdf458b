"""timm's VisionTransformer as a vitmods ViT and back, exactly."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import timm
import timm.layers
import torch
from timm.models import vision_transformer as timm_vit
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

from vitmods.adapters import transfer
from vitmods.adapters.own import read_seen
from vitmods.adapters.tensors import Coverage, Layout, Row, read_tensors
from vitmods.model.config import ViTConfig
from vitmods.model.slots import BranchConfig, NormConfig, StemConfig
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError, nearest
from vitmods.util.limits import read_json
from vitmods.util.text import printable

timm_layers: Any = timm.layers
_GELUS = (nn.GELU, timm_layers.GELU, timm_layers.GELUTanh)
_MODULES = ("vision_transformer", "deit")  # of timm, where its VisionTransformers are
_PLAIN = inspect.signature(timm_vit.VisionTransformer).parameters.keys() - {
    *("embed_layer", "block_fn", "mlp_layer", "attn_layer", "device", "dtype")  # which are code
}
_BESIDE = ("num_classes", "label_names")  # also of config.json itself
_KNOWN = ("num_classes", "input_size", "fixed_input_size", "global_pool", "first_conv", "classifier", "pool_size")
_POOLS = {"token": "token", "avg": "avg", "map": "map", "": "none"}


def from_timm(model: Any) -> ViT:
    """A vitmods ViT with the config and weights of a timm VisionTransformer (DeiT's too), checked on random images.

    Raises UserError that lists every part of the model without a counterpart here.
    """
    return read(model)[0]


def read(model: Any) -> tuple[ViT, Coverage]:
    """Like ``from_timm``, with the account of all tensors."""
    source, config = f"timm's {type(model).__name__}", read_config(model)
    new, coverage = transfer.import_model(source, model, config, _rows(config, _is_packed(model)), _look)
    new.set_grad_checkpointing(model.grad_checkpointing)
    new.pretrained_cfg = new.default_cfg = getattr(model, "pretrained_cfg", new.pretrained_cfg)
    return new, coverage


def read_saved(weights: Path, tensors: Mapping[str, Tensor]) -> tuple[ViT, Coverage]:
    """A ViT from tensors and the config.json beside their file, as timm's `save_for_hf` writes it.

    What the architecture and its plain arguments mean, timm's model of them on the meta device says; timm is given no
    file and no address. Raises UserError.
    """
    source = str(weights.parent)
    try:
        record: dict[str, Any] = read_json(weights.with_name("config.json"))
        cfg = {**record.get("pretrained_cfg", record), **{n: record[n] for n in _BESIDE if n in record}}
        arguments = dict(record.get("model_args") or {})
        pretrained = {name: cfg[name] for name in _KNOWN if name in cfg} | read_seen(cfg)
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"{source}/config.json cannot be read; it may be damaged: {error}") from error
    architecture = record["architecture"]
    check_timm(source, architecture, arguments)
    if not timm.models.is_model_in_modules(architecture, _MODULES):
        raise UserError(f"{source}: timm's {printable(architecture)} is not covered; VisionTransformer is.")
    if unknown := sorted(arguments.keys() - _PLAIN):
        raise UserError(f"{source}: VisionTransformer takes no argument {printable(unknown[0])} from a file.")
    transfer.check_numbers(source, [arguments, pretrained])
    if isinstance(depth := arguments.get("depth", 0), int) and depth > len(tensors):
        raise UserError(f"{source} does not fit its own config, which has more blocks than the file has tensors.")
    try:
        with transfer.outline(source):
            model: Any = timm.create_model(architecture, pretrained_cfg=pretrained, **arguments)
            config = _config_of_outline(model, tensors)
            rows = _rows(config, _is_packed(model))
    except UserError:
        raise
    except Exception as error:  # whatever timm and torch raise for values that describe no model
        raise UserError(f"{source} does not describe a model that timm can make: {error}") from error
    weights_of, coverage = read_tensors(source, rows, tensors)
    new = transfer.build(source, config, weights_of)
    new.pretrained_cfg = new.default_cfg = model.pretrained_cfg
    return new, coverage


def _config_of_outline(model: Any, tensors: Mapping[str, Tensor]) -> ViTConfig:
    config, scale = read_config(model), tensors.get("blocks.0.ls1.gamma")
    return config if scale is None else config.with_(layer_scale=_scale_of(scale))


def check_timm(source: str, name: Any, arguments: Mapping[str, Any]) -> None:
    """Raise UserError unless timm itself has a model of this name, and the arguments name no file and no address."""
    if not isinstance(name, str) or not timm.is_model(name):
        hint = nearest(printable(str(name)), timm.list_models())
        raise UserError(f"{source}: timm has no model '{printable(str(name)[:80])}'. {hint}")
    if named := [
        argument
        for argument in arguments
        if argument.startswith("pretrained") or argument in ("checkpoint_path", "cache_dir")
    ]:
        raise UserError(
            f"{source}: leave {named[0]} out. Give trained weights as --from FILE, or ask for pretrained=1."
        )


def timm_counterpart(config: ViTConfig) -> dict[str, Any]:
    """The arguments of timm's VisionTransformer that make a model of this config. UserError naming the slots for which
    timm has no counterpart."""
    transfer.refuse_slots("timm's VisionTransformer", config, _counterpart(config))
    return _arguments(config)


def to_timm(model: ViT) -> timm_vit.VisionTransformer:
    """A timm VisionTransformer with the function, weights, device, type and mode of a ViT, checked on random images.

    Raises UserError naming the slots for which timm has no counterpart.
    """
    target, config = "timm's VisionTransformer", model.vit_config
    arguments = timm_counterpart(config)
    transfer.check_readable("The model", model)
    with torch.random.fork_rng(devices=[]):
        new = timm_vit.VisionTransformer(**arguments)
    transfer.export_model(target, model, new, _rows(config), _look)
    new.set_grad_checkpointing(model.grad_checkpointing)
    new.pretrained_cfg = new.default_cfg = dict(model.pretrained_cfg)  # type: ignore[assignment]
    return new


def _look(model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    return model.forward_features(images), model(images)


def _rows(config: ViTConfig, packed: bool = False) -> list[Row]:
    """Pair our tensors with timm's, which have the same names. In a packed SwiGLU the gate is the first half of fc1."""
    with torch.device("meta"):
        names = list(ViT(config).state_dict())
    if not packed:
        return [Row(name, (name,)) for name in names]
    halves = {".fc1_g.": Layout(lambda fc1: fc1.chunk(2)[0]), ".fc1_x.": Layout(lambda fc1: fc1.chunk(2)[1])}
    rows = []
    for name in names:
        part = next((part for part in halves if part in name), None)
        rows.append(Row(name, (name.replace(part, ".fc1."),), halves[part]) if part else Row(name, (name,)))
    return rows


def _is_packed(model: Any) -> bool:
    return type(_first_branches(model.blocks[0]).mlp) is timm_layers.GluMlp


def uncovered(model: Any) -> list[str]:
    """List the parts of a timm VisionTransformer without a counterpart in a ViTConfig."""
    missing = []
    if type(model.patch_embed) is not timm_layers.PatchEmbed:
        missing.append(f"stem {type(model.patch_embed).__name__}")
    if getattr(model.patch_embed, "dynamic_img_pad", False):
        missing.append("dynamic_img_pad")
    if model.global_pool not in _POOLS or model.pool_include_prefix:
        missing.append(f"pooling '{model.global_pool}' with pool_include_prefix={model.pool_include_prefix}")
    if not isinstance(model.patch_drop, nn.Identity):
        missing.append("patch dropout")
    missing += sorted({problem for block in model.blocks for problem in _block_problems(block)})
    first = model.blocks[0]
    if model.attn_pool is not None and _is_gated(getattr(_first_branches(first), "mlp", None)):
        missing.append("attn_pool beside MLP SwiGLU")
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
    if type(attn) is not timm_layers.Attention or getattr(attn, "gate", None) is not None:
        problems.append("an attention other than timm's plain one")
    activations = nn.SiLU if _is_gated(mlp) else _GELUS
    if not (_is_gated(mlp) or type(mlp) is timm_layers.Mlp) or not isinstance(mlp.act, activations):
        problems.append(f"MLP {type(mlp).__name__} with {type(getattr(mlp, 'act', None)).__name__}")
    elif getattr(mlp, "gate_last", False):
        problems.append(f"MLP {type(mlp).__name__} gated by its second half")
    if attn.proj.bias is None or getattr(mlp, "fc2", attn.proj).bias is None:
        problems.append("proj_bias=False")
    return problems


def _is_gated(mlp: Any) -> bool:
    return type(mlp) in (timm_layers.SwiGLU, timm_layers.GluMlp)


def _parts(block: Any) -> list[tuple[str, str]]:
    """List the parts of a block, with shapes, eps and rates; drop path may differ from block to block."""
    leaves = ((name, module) for name, module in block.named_modules() if not list(module.children()))
    parts = [(name, repr(module)) for name, module in leaves if "drop_path" not in name]
    heads = [m.num_heads for m in block.modules() if hasattr(m, "num_heads")]
    return [*parts, ("heads", str(heads))]


def _can_read_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.Identity | nn.LayerNorm | timm_layers.RmsNorm)


def _read_norm(module: Any) -> NormConfig | None:
    if isinstance(module, nn.Identity):
        return None
    kind = "layer" if isinstance(module, nn.LayerNorm) else "rms"
    return NormConfig(kind, float(module.eps), module.weight is not None)


def read_config(model: Any) -> ViTConfig:
    """The config of a timm VisionTransformer, its weights aside. Raises UserError as ``from_timm``."""
    source = f"timm's {type(model).__name__}"
    if type(model) is VisionTransformerDistilled:
        raise UserError(
            f"{source} is not covered: there is no slot for its distillation token and second head. "
            f"{transfer.OTHERWISE}"
        )
    if type(model) is not timm_vit.VisionTransformer:
        raise UserError(f"{source} is not covered; VisionTransformer is. {transfer.OTHERWISE}")
    transfer.refuse(source, uncovered(model))
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
        mlp_dim=block.mlp.fc2.in_features,
        mlp_kind="swiglu" if _is_gated(block.mlp) else "mlp",
        qkv_bias=block.attn.qkv.bias is not None,
        qk_norm=_read_norm(block.attn.q_norm),
        activation=_activation(block.mlp.act),
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
        drop_path=round(rates[-1], 6),  # timm has it in float32
        dynamic_img_size=model.dynamic_img_size,
        drop_path_shape="constant" if len(rates) > 1 and rates[0] == rates[-1] > 0 else "linear",
    )


def _activation(act: nn.Module) -> Literal["gelu", "gelu_tanh"]:
    tanh = isinstance(act, timm_layers.GELUTanh) or getattr(act, "approximate", "none") == "tanh"
    return "gelu_tanh" if tanh else "gelu"


def _read_layer_scale(model: Any) -> float | None:
    scale = _first_branches(model.blocks[0]).ls1
    if isinstance(scale, nn.Identity):
        return None
    return scale.init_values if scale.gamma.is_meta else _scale_of(scale.gamma)


def _scale_of(gamma: Tensor) -> float:
    return float(gamma.detach().float().mean()) or 1e-5


_COPIED = (
    "img_size patch_size in_chans num_classes embed_dim depth parallel num_heads mlp_dim qkv_bias activation "
    "position_on_prefix class_token reg_tokens layer_scale pool norm_after_pool pos_drop proj_drop attn_drop head_drop "
    "drop_path dynamic_img_size init head_bias"
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
        **transfer.fields(config, _COPIED),
        qk_norm=norm if config.qk_norm else None,
        mlp_kind="swiglu" if _is_swiglu(config) else "mlp",
        stem=StemConfig(bias=config.position_norm is None, after=stem),
        position="none" if config.position == "none" else "learn",
        position_norm=norm if config.position_norm else None,
        position_norm_on_prefix=config.position_norm_on_prefix or config.position_norm is not None,
        attn=BranchConfig(before=norm, inner=norm if config.attn.inner else None),
        mlp=BranchConfig(before=norm, inner=norm if config.mlp.inner else None),
        final_norm=norm if config.final_norm or (config.pool == "map" and norm != NormConfig()) else None,
    )


def _is_swiglu(config: ViTConfig) -> bool:
    """Whether the MLPs are timm's SwiGLU. Its map pooling would take their activation."""
    return config.mlp_kind == "swiglu" and config.pool != "map"


def _norm_layer(norm: NormConfig) -> Callable[[int], nn.Module]:
    kind = timm_layers.LayerNorm if norm.kind == "layer" else timm_layers.RmsNorm
    return partial(kind, eps=norm.eps, affine=norm.affine)


def _arguments(config: ViTConfig) -> dict[str, Any]:
    """Return the arguments of timm's VisionTransformer for a config that it can express."""
    block = partial(timm_vit.ParallelThingsBlock, num_parallel=config.parallel)
    gelu = partial(nn.GELU, approximate="tanh" if config.activation == "gelu_tanh" else "none")
    gated = {"mlp_layer": timm_layers.SwiGLU} if _is_swiglu(config) else {}
    return {
        **transfer.fields(
            config, "img_size patch_size in_chans num_classes embed_dim depth num_heads qkv_bias reg_tokens"
        ),
        "block_fn": timm_vit.Block if config.parallel == 1 else block,
        "global_pool": "" if config.pool == "none" else config.pool,
        "fc_norm": config.norm_after_pool,
        "init_values": config.layer_scale,
        "drop_rate": config.head_drop,
        "pos_drop_rate": config.pos_drop,
        "proj_drop_rate": config.proj_drop,
        "attn_drop_rate": config.attn_drop,
        "drop_path_rate": config.drop_path,
        "dynamic_img_size": config.dynamic_img_size,
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
        "act_layer": nn.SiLU if gated else gelu,
        **gated,
    }
