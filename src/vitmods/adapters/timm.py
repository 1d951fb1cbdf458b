"""timm's VisionTransformer as a vitmods ViT and back, exactly."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import timm
import timm.layers
import torch
from timm.models import beit as timm_beit
from timm.models import eva as timm_eva
from timm.models import vision_transformer as timm_vit
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

from vitmods.adapters import transfer
from vitmods.adapters.own import read_seen
from vitmods.adapters.tensors import DISTILLED, STACKED, WITHOUT_KEYS, Coverage, Layout, Row, packed_gate, rows_of
from vitmods.model.config import ViTConfig
from vitmods.model.slots import BranchConfig, NormConfig, StemConfig
from vitmods.model.vit import ViT
from vitmods.ops.rotary import RopeConfig
from vitmods.util.errors import UserError, explaining, nearest
from vitmods.util.limits import read_json
from vitmods.util.text import printable

timm_layers: Any = timm.layers
_ACTIVATIONS = (nn.GELU, timm_layers.GELU, timm_layers.GELUTanh, timm_layers.QuickGELU)
_MODULES = ("vision_transformer", "deit", "eva", "beit")  # of timm, where the classes are
_CLASSES = (timm_vit.VisionTransformer, VisionTransformerDistilled, timm_eva.Eva, timm_beit.Beit)
_NAMED = "VisionTransformer, Eva and Beit"
_RES_POST = (timm_vit.ResPostBlock, timm_eva.EvaBlockPostNorm)
_BLOCKS = (timm_vit.Block, timm_vit.ParallelThingsBlock, timm_eva.EvaBlock, timm_beit.Block, *_RES_POST)
_ATTENTIONS = (timm_layers.Attention, timm_layers.AttentionRope, timm_eva.EvaAttention, timm_beit.Attention)
_PLAIN = {name for kind in _CLASSES for name in inspect.signature(kind).parameters} - {
    *("embed_layer", "block_fn", "mlp_layer", "attn_layer", "device", "dtype")  # which are code
}
_BESIDE = ("num_classes", "label_names")  # also of config.json itself
_KNOWN = ("num_classes", "input_size", "fixed_input_size", "global_pool", "first_conv", "classifier", "pool_size")
_ROPES: dict[str, dict[str, Any]] = {
    "RotaryEmbeddingCat": {},
    "RotaryEmbeddingMixed": {"frequencies": "mixed"},
    "RotaryEmbeddingDinoV3": {"coordinates": "centered"},
}
_MOVED = ("shift_coords", "jitter_coords", "rescale_coords")
_POOLS = {"token": "token", "avg": "avg", "map": "map", "": "none"}


def from_timm(model: Any) -> ViT:
    """A vitmods ViT with the config and weights of a timm VisionTransformer (DeiT's too), Eva or Beit, checked on
    random images.

    Raises UserError that lists every part of the model without a counterpart here.
    """
    return read(model)[0]


def read(model: Any) -> tuple[ViT, Coverage]:
    """Like ``from_timm``, with the account of all tensors."""
    source, config = f"timm's {type(model).__name__}", read_config(model)
    # Some positions are moved at random in training, and fewer keys than queries are read as equal ones.
    random = [name for name in _MOVED if getattr(getattr(model, "rope", None), name, None)]
    is_grouped = getattr(_first_branches(model.blocks[0]).attn, "num_kv_groups", 1) > 1
    assumed = [f"{name}=None" for name in random] + ["num_kv_heads=num_heads"] * is_grouped
    new, coverage = transfer.import_model(source, model, config, _rows_of(model), transfer.look_at_vit, assumed=assumed)
    new.set_grad_checkpointing(model.grad_checkpointing)
    new.pretrained_cfg = new.default_cfg = getattr(model, "pretrained_cfg", new.pretrained_cfg)
    return new, coverage


def read_saved(weights: Path, tensors: Mapping[str, Tensor]) -> tuple[ViT, Coverage]:
    """A ViT from tensors and the config.json next to their file, as timm's `save_for_hf` writes it.

    timm builds the architecture with its plain arguments on the meta device, to say what they mean; it is given no file
    and no address. Raises UserError.
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
        raise UserError(f"{source}: timm's {printable(architecture)} is not covered; {_NAMED} are.")
    if unknown := sorted(arguments.keys() - _PLAIN):
        raise UserError(f"{source}: the model takes no argument {printable(unknown[0])} from a file.")
    transfer.check_numbers(source, [arguments, pretrained])
    if isinstance(depth := arguments.get("depth", 0), int) and depth > len(tensors):
        raise UserError(f"{source} does not fit its own config, which has more blocks than the file has tensors.")
    unfit = f"{source} does not describe a model that timm can make"
    with explaining(lambda error: f"{unfit}: {error}"), transfer.outline(source):
        model: Any = timm.create_model(architecture, pretrained_cfg=pretrained, **arguments)
        config = read_config(model)
    gamma = tensors.get("blocks.0.ls1.gamma", tensors.get("blocks.0.gamma_1"))
    if gamma is not None and config.layer_scale:
        config = config.with_(layer_scale=_mean_scale(gamma))
    tensors = {name.removeprefix("timm_model."): value for name, value in tensors.items()}  # of a TimmWrapper
    new, coverage = transfer.read_weights(source, config, _rows_of(model), tensors)
    new.pretrained_cfg = new.default_cfg = model.pretrained_cfg
    return new, coverage


def check_timm(source: str, name: Any, arguments: Mapping[str, Any]) -> None:
    """Raise UserError unless timm itself has a model of this name, and its arguments name neither file nor address."""
    if not isinstance(name, str) or not timm.is_model(name):
        hint = nearest(printable(str(name)), timm.list_models())
        raise UserError(f"{source}: timm does not have a model '{printable(str(name)[:80])}'. {hint}")
    for argument in arguments:
        if argument.startswith("pretrained") or argument in ("checkpoint_path", "cache_dir"):
            raise UserError(
                f"{source}: leave {argument} out. Give trained weights as --from FILE, or ask for pretrained=1."
            )


def to_timm(model: ViT) -> timm_vit.VisionTransformer:
    """A timm VisionTransformer with the function, weights, device, type and mode of a ViT, checked on random images.

    Raises UserError naming the slots that timm does not have.
    """
    arguments = timm_arguments(model.vit_config)
    with torch.random.fork_rng(devices=[]):
        new = _class_of(model.vit_config)(**arguments)
    _fill(model, new)
    new.pretrained_cfg = new.default_cfg = dict(model.pretrained_cfg)  # type: ignore[assignment]
    return new


def fill_timm(model: ViT, foreign: Any) -> None:
    """Copy the weights of a ViT into a timm VisionTransformer. Raises UserError naming the slots that it does not
    have."""
    config = model.vit_config
    nearest = read_config(foreign).with_(**transfer.fields(config, "layer_scale drop_path drop_path_shape"))
    transfer.refuse_slots(f"this {type(foreign).__name__}", config, nearest)
    _fill(model, foreign)


def _fill(model: ViT, foreign: Any) -> None:
    rows = _rows_of(foreign)(model.state_dict())
    transfer.export_model("timm's VisionTransformer", model, foreign, rows, transfer.look_at_vit)
    foreign.set_grad_checkpointing(model.grad_checkpointing)


def _rows_of(model: Any) -> Callable[[Iterable[str]], list[Row]]:
    """Pair our tensors with timm's, most of which have the same names. In a packed SwiGLU the gate is the first half of
    fc1."""
    table: dict[str, Any] = dict(DISTILLED) if isinstance(model, VisionTransformerDistilled) else {}
    if isinstance(model.blocks[0], _RES_POST):
        table |= {f"blocks.*.norm{n}_branch": f"blocks.*.norm{n}" for n in (1, 2)}
    if type(_first_branches(model.blocks[0]).mlp) is timm_layers.GluMlp:
        for mlp in ("mlp", *(f"ffns.{k}.mlp" for k in range(getattr(model.blocks[0], "num_parallel", 0)))):
            table |= packed_gate(f"blocks.*.{mlp}", f"blocks.*.{mlp}.fc1")
    if isinstance(model, timm_eva.Eva | timm_beit.Beit):
        table |= _eva_table(model.blocks[0])
    return lambda names: [
        _frequencies(row) if row.ours.endswith("rope.freqs") else row for row in rows_of(names, table)
    ]


def _eva_table(block: Any) -> dict[str, Any]:
    """Queries, keys and values in one map or three; fewer keys and values than queries are repeated."""
    attn, inside = block.attn, "blocks.*.attn"
    table: dict[str, Any] = {f"blocks.*.ls{n}.gamma": f"blocks.*.gamma_{n}" for n in (1, 2)}
    table[f"{inside}.rel_pos.table"] = f"{inside}.relative_position_bias_table"
    if getattr(block, "gamma_2", None) is None:  # a scale of attention alone
        ones = Layout(torch.ones_like)
        table["blocks.*.ls2.gamma"] = (("blocks.*.norm2.weight",), {"gamma": ("", ones)})
    if attn.qkv is not None:
        if getattr(attn, "q_bias", None) is not None:
            table[f"{inside}.qkv.bias"] = ((f"{inside}.q_bias", f"{inside}.v_bias"), {"bias": ("", WITHOUT_KEYS)})
        return table

    head_dim = attn.head_dim

    def stack(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.unflatten(0, (-1, head_dim)).repeat_interleave(len(q) // len(x), 0).flatten(0, 1) for x in (k, v))
        return torch.cat([q, k, v])

    stacked = STACKED if getattr(attn, "num_kv_groups", 1) == 1 else Layout(stack)
    q, k, v = (f"{inside}.{name}_proj" for name in "qkv")
    table[f"{inside}.qkv"] = ((q, k, v), {kind: (f".{kind}", stacked) for kind in ("weight", "bias")})
    if attn.k_proj.bias is None:
        table[f"{inside}.qkv.bias"] = ((q, v), {"bias": (".bias", WITHOUT_KEYS)})
    return table


def _frequencies(row: Row) -> Row:
    """Learned rotary frequencies (2, H, D/2) of a block, which timm has in one tensor (2, depth, H, D/2)."""
    block = int(row.ours.split(".")[1])
    return Row(row.ours, ("rope.freqs",), Layout(lambda x: x[:, block], lambda x: (x[:, None],), 1))


def uncovered(model: Any) -> list[str]:
    """List the parts of a timm VisionTransformer without a counterpart in a ViTConfig."""
    missing = []
    if type(model.patch_embed) is not timm_layers.PatchEmbed:
        missing.append(f"stem {type(model.patch_embed).__name__}")
    if getattr(model.patch_embed, "dynamic_img_pad", False):
        missing.append("dynamic_img_pad")
    if model.global_pool not in _POOLS:
        missing.append(f"pooling '{model.global_pool}'")
    if not isinstance(getattr(model, "patch_drop", None), nn.Identity | None):
        missing.append("patch dropout")
    missing += sorted({problem for block in model.blocks for problem in _block_problems(block)})
    first = model.blocks[0]
    if getattr(model, "rel_pos_bias", None) is not None:
        missing.append("relative positions that all blocks share")
    pooling = getattr(model, "attn_pool", None)
    if pooling is not None and not isinstance(pooling.mlp.act, _ACTIVATIONS):
        missing.append(f"attn_pool with {type(pooling.mlp.act).__name__}")
    if any(_parts(block) != _parts(first) for block in model.blocks):
        missing.append("blocks that differ from one another")
    rope = getattr(model, "rope", None)
    settings = {"grid_type": "index", "normalize_coords": "separate", "min_period": None}
    if rope is not None and any(getattr(rope, name, value) != value for name, value in settings.items()):
        missing.append("rotary positions with grid_type, normalize_coords or min_period")
    if rope is not None and type(rope).__name__ not in _ROPES:
        missing.append(f"rotary positions {type(rope).__name__}")
    for name, module in model.named_modules():
        if name.rpartition(".")[2].startswith(("norm", "fc_norm", "q_norm", "k_norm")) and not isinstance(
            module, nn.Identity | nn.LayerNorm | timm_layers.RmsNorm
        ):
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
    if type(block) not in _BLOCKS:
        return [f"block {type(block).__name__}"]
    block = _first_branches(block)
    problems = []
    attn, mlp = block.attn, block.mlp
    if type(attn) not in _ATTENTIONS or getattr(attn, "gate", None) is not None:
        problems.append("an attention other than timm's plain one")
    activations = nn.SiLU if _is_gated(mlp) else _ACTIVATIONS
    if not (_is_gated(mlp) or type(mlp) is timm_layers.Mlp) or not isinstance(mlp.act, activations):
        problems.append(f"MLP {type(mlp).__name__} with {type(getattr(mlp, 'act', None)).__name__}")
    elif getattr(mlp, "gate_last", False):
        problems.append(f"MLP {type(mlp).__name__} gated by its second half")
    return problems


def _is_gated(mlp: Any) -> bool:
    return type(mlp) in (timm_layers.SwiGLU, timm_layers.GluMlp)


def _parts(block: Any) -> list[tuple[str, str]]:
    """List the parts of a block, with shapes, eps and rates; drop path may differ from block to block."""
    leaves = ((name, module) for name, module in block.named_modules() if not list(module.children()))
    aside = ("drop_path", "k_proj", "v_proj")  # the latter may be shared by different numbers of heads
    parts = [(name, repr(module)) for name, module in leaves if not any(part in name for part in aside)]
    heads = [m.num_heads for m in block.modules() if hasattr(m, "num_heads")]
    return [*parts, ("heads", str(heads))]


def _read_norm(module: Any) -> NormConfig | None:
    if isinstance(module, nn.Identity):
        return None
    kind = "layer" if isinstance(module, nn.LayerNorm) else "rms"
    return NormConfig(kind, float(module.eps), module.weight is not None)


def read_config(model: Any) -> ViTConfig:
    """The config of a timm VisionTransformer, its weights aside. Raises UserError as ``from_timm``."""
    source = f"timm's {type(model).__name__}"
    if type(model) not in _CLASSES:
        raise UserError(f"{source} is not covered; {_NAMED} are. {transfer.OTHERWISE}")
    transfer.refuse(source, uncovered(model))
    return _config_of(model)


def _config_of(model: Any) -> ViTConfig:
    block: Any = _first_branches(model.blocks[0])
    stem: Any = model.patch_embed
    rates = [getattr(_first_branches(b).drop_path1, "drop_prob", 0.0) or 0.0 for b in model.blocks]
    after_pool = not isinstance(model.fc_norm, nn.Identity)
    scale = getattr(getattr(block, "ls1", None), "gamma", getattr(block, "gamma_1", None))
    # Norms of a residual post-norm block are on its branches.
    place = "branch" if isinstance(model.blocks[0], _RES_POST) else "before"
    attn_norms: dict[str, Any] = {"before": None, place: _read_norm(block.norm1)}
    mlp_norms: dict[str, Any] = {"before": None, place: _read_norm(block.norm2)}
    is_distilled = isinstance(model, VisionTransformerDistilled)
    attn, pooling, none = block.attn, getattr(model, "attn_pool", None), nn.Identity()
    width = attn.proj.in_features
    queries = attn.qkv if attn.qkv is not None else attn.q_proj
    reads_prefix = getattr(model, "pool_include_prefix", pooling is not None and model.num_prefix_tokens)
    pool: dict[str, Any] = {}  # settings of map pooling that differ from those of the blocks
    if pooling is not None:
        norm, hidden, heads = _read_norm(pooling.norm), pooling.mlp.fc2.in_features, pooling.num_heads
        pool = {} if norm == (_read_norm(model.norm) or NormConfig()) else {"pool_norm": norm}
        pool |= {} if hidden == block.mlp.fc2.in_features else {"pool_mlp_dim": hidden}
        pool |= {} if heads == attn.num_heads else {"pool_heads": heads}
    if scale is not None:
        scale = getattr(block, "ls1", block).init_values if scale.is_meta else _mean_scale(scale)
    return ViTConfig(
        img_size=tuple(stem.img_size),
        patch_size=tuple(stem.patch_size),
        in_chans=model.in_chans,
        num_classes=model.num_classes,
        embed_dim=model.embed_dim,
        depth=len(model.blocks),
        parallel=getattr(model.blocks[0], "num_parallel", 1),
        num_heads=block.attn.num_heads,
        head_dim=None if width == model.embed_dim else width // attn.num_heads,
        mlp_dim=block.mlp.fc2.in_features,
        mlp_kind="swiglu" if _is_gated(block.mlp) else "mlp",
        qkv_bias=queries.bias is not None or getattr(attn, "q_bias", None) is not None,
        proj_bias=block.attn.proj.bias is not None,
        qk_norm=_read_norm(getattr(attn, "q_norm", none)),
        activation=_read_activation((block if pooling is None else pooling).mlp.act),
        stem=StemConfig(bias=stem.proj.bias is not None, after=_read_norm(stem.norm)),
        position="none" if model.pos_embed is None else "learn",
        position_on_prefix=not getattr(model, "no_embed_class", False),
        rel_pos=getattr(attn, "relative_position_bias_table", None) is not None,
        rope=_read_rope(getattr(model, "rope", None)),
        position_norm=_read_norm(getattr(model, "norm_pre", none)),
        position_norm_on_prefix=not isinstance(getattr(model, "norm_pre", none), nn.Identity),
        class_token=model.cls_token is not None,
        reg_tokens=model.num_prefix_tokens - (model.cls_token is not None),
        attn=BranchConfig(**attn_norms, inner=_read_norm(getattr(attn, "norm", none))),
        mlp=BranchConfig(**mlp_norms, inner=_read_norm(block.mlp.norm)),
        layer_scale=scale,
        final_norm=_read_norm(model.fc_norm if after_pool else model.norm),
        pool="prefix" if is_distilled else _POOLS[model.global_pool],  # type: ignore[arg-type]
        pool_prefix=bool(reads_prefix and model.global_pool in ("avg", "map")),
        **pool,
        norm_after_pool=after_pool,
        pos_drop=model.pos_drop.p,
        proj_drop=block.attn.proj_drop.p,
        attn_drop=block.attn.attn_drop.p,
        head_drop=model.head_drop.p,
        drop_path=round(rates[-1], 6),  # timm has it in float32
        dynamic_img_size=getattr(model, "dynamic_img_size", False),
        crop_border=any(side % patch for side, patch in zip(stem.img_size, stem.patch_size, strict=True)),
        drop_path_shape="constant" if len(rates) > 1 and rates[0] == rates[-1] > 0 else "linear",
    )


def _read_rope(rope: Any) -> RopeConfig | None:
    if rope is None:
        return None
    reference = getattr(rope, "ref_feat_shape", None)
    return RopeConfig(
        **_ROPES[type(rope).__name__],
        base=float(rope.temperature),
        pairs="halved" if getattr(rope, "rotate_half", False) else "interleaved",
        offset=float(getattr(rope, "grid_offset", 0.0)),
        columns_first=rope.grid_indexing == "xy",
        reference=None if reference is None else tuple(reference),
    )


def _read_activation(act: nn.Module) -> Any:
    if isinstance(act, timm_layers.QuickGELU):
        return "quick_gelu"
    return "gelu_tanh" if "tanh" in repr(act).lower() else "gelu"


def _class_of(config: ViTConfig) -> type[timm_vit.VisionTransformer]:
    return VisionTransformerDistilled if config.pool == "prefix" else timm_vit.VisionTransformer


def _mean_scale(gamma: Tensor) -> float:
    return float(gamma.detach().float().mean()) or 1e-5


def timm_arguments(config: ViTConfig) -> dict[str, Any]:
    """The arguments of timm's VisionTransformer that make a model of this config. UserError naming the slots that timm
    does not have."""
    norm = config.attn.before or config.attn.branch or NormConfig()  # timm has one for all places but the stem

    def norm_layer(norm: NormConfig) -> Callable[[int], nn.Module]:
        kind = timm_layers.RmsNorm if norm.kind == "rms" else timm_layers.LayerNorm
        return partial(kind, eps=norm.eps, affine=norm.affine)

    gelu = partial(nn.GELU, approximate="tanh" if config.activation == "gelu_tanh" else "none")
    act_layer = timm_layers.QuickGELU if config.activation == "quick_gelu" else gelu
    block_fn: Any = timm_vit.Block if config.attn.before or not config.attn.branch else timm_vit.ResPostBlock
    if config.parallel > 1:
        block_fn = partial(timm_vit.ParallelThingsBlock, num_parallel=config.parallel)
    # timm's map pooling takes the activation of the blocks' MLPs.
    gated = {"mlp_layer": timm_layers.SwiGLU} if config.mlp_kind == "swiglu" and config.pool != "map" else {}
    arguments = {
        **transfer.fields(config, "img_size patch_size in_chans num_classes embed_dim depth qkv_bias reg_tokens"),
        **transfer.fields(config, "class_token dynamic_img_size proj_bias"),
        "num_heads": transfer.whole_heads(config),
        "block_fn": block_fn,
        "global_pool": {"none": "", "prefix": "token", "token+avg": "avg"}.get(config.pool, config.pool),
        "pool_include_prefix": config.pool_prefix,
        "fc_norm": config.norm_after_pool,
        "init_values": config.layer_scale,
        "drop_rate": config.head_drop,
        "pos_drop_rate": config.pos_drop,
        "proj_drop_rate": config.proj_drop,
        "attn_drop_rate": config.attn_drop,
        "drop_path_rate": config.drop_path,
        "mlp_ratio": (config.mlp_dim + 0.5) / config.embed_dim,  # timm rounds the product down
        "qk_norm": config.qk_norm is not None,
        "scale_attn_norm": config.attn.inner is not None,
        "scale_mlp_norm": config.mlp.inner is not None,
        "pos_embed": "none" if config.position == "none" else "learn",
        "no_embed_class": not config.position_on_prefix,
        "pre_norm": config.position_norm is not None,
        "final_norm": config.final_norm is not None,
        "norm_layer": norm_layer(norm),
        "embed_norm_layer": norm_layer(config.stem.after) if config.stem.after else None,
        "act_layer": nn.SiLU if gated else act_layer,
        **gated,
    }
    if config.pool == "prefix":
        arguments["reg_tokens"] = max(config.reg_tokens - 1, 0)  # the class of distilled models adds one
    with torch.device("meta"):
        nearest_config = _config_of(_class_of(config)(**arguments))
    ignored = ["drop_path"]  # as given; and settings without effect
    ignored += [] if nearest_config.crop_border else ["crop_border"]
    ignored += (["activation"] if gated else []) + ([] if config.position_norm else ["position_norm_on_prefix"])
    nearest_config = nearest_config.with_(**transfer.fields(config, " ".join(ignored)))
    transfer.refuse_slots("timm's VisionTransformer", config, nearest_config)
    return arguments
