"""Hugging Face's Vision Transformers as a vitmods ViT and back, exactly; also their saved files.

A family of them is a line of ``FAMILIES``: the defaults of its config. Names of tensors are those of one table.
"""

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.adapters import transfer
from vitmods.adapters.surgery import repeat
from vitmods.adapters.tensors import HEADS, STACKED, WITHOUT_KEYS, Coverage, Layout, Row, packed_gate, part_of, rows_of
from vitmods.adapters.weights import files_of_index
from vitmods.model.config import ViTConfig
from vitmods.model.slots import BranchConfig, NormConfig, StemConfig
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError, explaining, first_line, needs
from vitmods.util.limits import offline, read_bytes, read_json

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
_DINOV2 = {"layer_norm_eps": 1e-6, "layerscale_value": 1.0, "drop_path_shape": "constant", "pool": "token+avg"}
_BEIT = {"layer_scale_init_value": 0.1, "drop_path_rate": 0.1, "use_mean_pooling": True}
_SIGLIP = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "pool": "avg"}
_CLIP = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "patch_size": 32, "pool": "avg"}
FAMILIES: dict[str, dict[str, Any]] = {
    "vit": {},
    "deit": {},
    "vit_mae": {},
    "vit_msn": {"layer_norm_eps": 1e-6},
    "ijepa": {"pool": "avg"},
    "dinov2": {**_DINOV2, "patch_size": 14},
    "dinov2_with_registers": _DINOV2,
    "beit": _BEIT,
    "data2vec-vision": _BEIT,
    "siglip": _SIGLIP,
    "siglip_vision_model": _SIGLIP,
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
}
"""Model type -> defaults of its config where they are not ViT's; ``pool`` is what a classifier reads, where it is not
the class token, and ``drop_path_shape`` as in ViTConfig."""

_NAMES = {
    "cls_token": ("embeddings.cls_token", "embeddings.class_embedding"),
    "pos_embed": ("embeddings.position_embeddings", "embeddings.position_embedding.weight"),
    "reg_token": ("embeddings.register_tokens", "embeddings.distillation_token"),
    "patch_embed.proj": ("embeddings.patch_embeddings.projection", "embeddings.patch_embedding"),
    "norm_pre": ("pre_layrnorm",),
    "norm": ("layernorm", "post_layernorm"),
    "fc_norm": ("pooler.layernorm", "post_layernorm"),
    "pre_logits": ("pooler.dense",),
    "attn_pool.latent": ("head.probe",),
    "attn_pool.proj": ("head.attention.out_proj",),
    "attn_pool.norm": ("head.layernorm",),
    "attn_pool.mlp.fc1": ("head.mlp.fc1",),
    "attn_pool.mlp.fc2": ("head.mlp.fc2",),
}
"""Our tensor or module -> its names there; the first that a model has is taken."""
_IN_BLOCK = {
    "norm1": ("block.layernorm_before", "block.layer_norm1", "block.norm1"),
    "attn.proj": ("block.attention.output.dense", "block.attention.o_proj", "block.self_attn.out_proj"),
    "attn.rel_pos.table": tuple(
        f"block.{at}relative_position_bias.relative_position_bias_table" for at in ("", "attention.attention.")
    ),
    "ls1.gamma": ("block.lambda_1", "block.layer_scale1.lambda1"),
    "norm2": ("block.layernorm_after", "block.layer_norm2", "block.norm2"),
    "mlp.fc1": ("block.intermediate.dense", "block.mlp.fc1"),
    "mlp.fc1_g": ("block.mlp.gate_proj", "block.mlp.weights_in"),
    "mlp.fc1_x": ("block.mlp.up_proj", "block.mlp.weights_in"),
    "mlp.fc2": ("block.output.dense", "block.mlp.fc2", "block.mlp.down_proj", "block.mlp.weights_out"),
    "ls2.gamma": ("block.lambda_2", "block.layer_scale2.lambda1"),
}
_QUERIES = ("block.attention.attention.query", "block.attention.q_proj", "block.self_attn.q_proj")
_KINDS = {kind: (f".{kind}", STACKED) for kind in ("weight", "bias")}


def from_huggingface(model: Any) -> ViT:
    """A vitmods ViT with the config and weights of a Vision Transformer of Hugging Face, checked on random images.

    Its output are the logits; without classifier the pooler's output, or without pooler the class token after the final
    norm, or the mean of the tokens. Raises UserError that lists every part of the model without a counterpart here.
    """
    return read(model)[0]


def read(model: Any) -> tuple[ViT, Coverage]:
    """Like ``from_huggingface``, with the account of all tensors."""
    source, config, tensors = f"Hugging Face's {type(model).__name__}", read_config(model), model.state_dict()
    pair, left_out = _rows_of(tensors, config)
    new, coverage = transfer.import_model(source, model, config, pair, partial(_look, config), left_out)
    new.set_grad_checkpointing(any(getattr(m, "gradient_checkpointing", False) for m in model.modules()))
    return new, coverage


def read_config(model: Any) -> ViTConfig:
    """The config of such a model, its weights aside. Raises UserError as ``from_huggingface``."""
    kind, values = type(model), model.config.to_dict()
    source = f"Hugging Face's {kind.__name__}"
    is_theirs = kind.__module__.startswith("transformers.models.")
    is_kind = kind.__name__.endswith(("Model", "ForImageClassification", "ForImageClassificationWithTeacher"))
    if not (is_theirs and is_kind and values.get("model_type") in FAMILIES):
        listed = f"models and image classifiers of {', '.join(FAMILIES)} are"
        raise UserError(f"{source} is not covered; {listed}. {transfer.OTHERWISE}")
    return _read_config(source, values, model.state_dict())


def read_saved(source: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> tuple[ViT, Coverage]:
    """From what ``save_pretrained`` writes: the tensors and the values of config.json. Raises UserError."""
    transfer.check_numbers(source, values)
    damaged = f"{source}: its config.json cannot be read; it may be damaged"
    kinds = (TypeError, ValueError, OverflowError, AttributeError, LookupError)
    with explaining(lambda error: f"{damaged}: {error}", *kinds):
        config = _read_config(source, values, tensors)
        names = {str(key): str(name) for key, name in (values.get("id2label") or {}).items()}
    pair, left_out = _rows_of(tensors, config)
    model, coverage = transfer.read_weights(source, config, pair, tensors, left_out)
    keys = [str(k) for k in range(config.num_classes)]
    if names.keys() == set(keys):
        model.pretrained_cfg["label_names"] = tuple(names[key] for key in keys)
    return model, coverage


def read_huggingface_config(source: str, folder: Path) -> Any:
    """The configuration in a folder that `save_pretrained` wrote.

    Raises UserError where it is missing or too large for a model, and where it names what Hugging Face would fetch: a
    model of timm that is not in timm, a trained backbone, attention from the Hub.
    """
    with needs("Models of Hugging Face need transformers", "hf"):
        from transformers import AutoConfig
    if not (folder / "config.json").is_file():
        raise UserError(f"{source}: {folder / 'config.json'} does not exist. Give a folder that save_pretrained wrote.")
    with explaining(lambda error: f"{folder / 'config.json'} cannot be read: {first_line(error)}"):
        values = read_json(folder / "config.json")
        check_values(source, values)
        with offline():
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def build_classifier(source: str, folder: Path, config: Any) -> nn.Module:
    """A classifier with new weights. UserError for a config without one, or with one of more bytes than the weights in
    the folder allow (without weights, `MOST_NEW_BYTES`)."""
    from transformers import AutoModelForImageClassification

    check_classifier(source, folder, config)
    with offline():
        model: nn.Module = AutoModelForImageClassification.from_config(config, trust_remote_code=False)
    return model


def check_classifier(source: str, folder: Path, config: Any) -> None:
    """The errors of `build_classifier`, before memory is taken."""
    from transformers import AutoModelForImageClassification

    weights = sum(file.stat().st_size for file in folder.iterdir() if file.suffix in (".safetensors", ".bin"))
    most, built = transfer.most_bytes(weights) if weights else transfer.MOST_NEW_BYTES, f"{source} cannot be built"
    with explaining(lambda error: f"{built}: {first_line(error)}"), offline(), transfer.outline(source, most):
        AutoModelForImageClassification.from_config(config, trust_remote_code=False)


def open_changed_huggingface(folder: Path) -> nn.Module:
    """A model that was changed in place and written by its `save_pretrained`: of the same class, with the insertions
    that config.json lists and the weights. Nothing is run, and transformers reads no file but config.json.

    Raises UserError if the files are damaged, do not fit each other, or say more than a changed model's.
    """
    import transformers
    from safetensors.torch import load

    source = str(folder)
    config = read_huggingface_config(source, folder)
    record, name = config.vitmods_changes, next(iter(config.architectures or ()), "")
    kind = getattr(transformers, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) and isinstance(record, list)):
        raise UserError(f"{folder / 'config.json'} does not name a class of transformers and its changes.")
    transfer.check_numbers(source, record)

    def make(self: Any, *arguments: Any, **keywords: Any) -> None:
        super(changed, self).__init__(*arguments, **keywords)
        vars(self).update(vars(repeat(self, record)))

    changed: Any = type(name, (kind,), {"__init__": make, "__module__": kind.__module__})
    if adapters := [file.name for file in sorted(folder.glob("adapter_*"))]:
        raise UserError(f"{folder} holds an adapter ({adapters[0]}): merge it into the weights, or remove that file.")
    if getattr(config, "quantization_config", None):
        raise UserError(f"{folder / 'config.json'} asks for quantization: leave quantization_config out.")
    with explaining(lambda error: f"{folder} cannot be read: {first_line(error)}"):
        whole, index = (folder / f"model.safetensors{ending}" for ending in ("", ".index.json"))
        files = [whole] if whole.exists() else files_of_index(index)
        with offline(), transfer.outline(source, transfer.most_bytes(sum(file.stat().st_size for file in files))):
            changed(config)
        tensors = {name: tensor for file in files for name, tensor in load(read_bytes(file, "weights")).items()}
        with offline():
            model, loading = changed.from_pretrained(None, config=config, state_dict=tensors, output_loading_info=True)
    if wrong := sorted(
        str(key) for names in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in loading[names]
    ):
        raise UserError(f"{folder}: the weights do not fit the changes in config.json: {', '.join(wrong[:5])}.")
    model.__class__ = kind
    return model


def check_values(source: str, values: Any) -> None:
    """Raise UserError for values of a config, at any depth, as ``read_huggingface_config`` does."""
    if isinstance(values, list):
        for value in values:
            check_values(source, value)
    if not isinstance(values, Mapping):
        return
    transfer.check_numbers(source, values)
    counts = [values.get("num_labels"), values.get("num_classes")]
    if any(isinstance(count, int) and count > transfer.MOST_CLASSES for count in counts):
        raise UserError(f"{source}: its config has more than {transfer.MOST_CLASSES:,} classes.")
    if values.get("model_type") == "timm_wrapper":
        from vitmods.adapters.timm import check_timm

        check_timm(source, values.get("architecture"), values.get("model_args") or {})
    if values.get("use_pretrained_backbone"):
        raise UserError(f"{source}: its config asks for a trained backbone: set use_pretrained_backbone to false.")
    for name, value in values.items():
        if name.endswith("implementation") and "/" in str(value):
            raise UserError(f"{source}: its config names code of others as {name}: set it to 'sdpa'.")
        check_values(source, value)


def to_huggingface(model: ViT, like: nn.Module | None = None) -> nn.Module:
    """A model of Hugging Face with the function, weights, device, type and mode of a ViT, checked on random images.

    ``like`` is a model of the class and the settings that the result has, such as the one that was read; it stays as it
    is. Without it the result is a ViTForImageClassification, or without classes a ViTModel; a Dinov2 where the head
    reads the class token and the mean.

    Raises UserError naming the slots that Hugging Face does not have, and without transformers.
    """
    try:
        import transformers
    except ImportError:
        raise UserError('This needs the extra packages: pip install "vitmods[hf]"') from None
    config = model.vit_config

    def side_or_pair(size: tuple[int, int]) -> int | list[int]:
        return size[0] if size[0] == size[1] else list(size)

    is_dino = config.pool == "token+avg"
    if is_dino and not config.num_classes:
        raise UserError("transformers' Dinov2 pools so only before a head: give the model classes, or pool=token.")
    family = "Dinov2" if is_dino else "ViT"
    values = getattr(transformers, f"{family}Config")(
        hidden_size=config.embed_dim,
        num_hidden_layers=config.depth,
        num_attention_heads=transfer.whole_heads(config),
        **({"mlp_ratio": config.mlp_dim // config.embed_dim} if is_dino else {"intermediate_size": config.mlp_dim}),
        hidden_act="gelu" if config.activation == "gelu" else "gelu_pytorch_tanh",
        attention_probs_dropout_prob=config.attn_drop,
        layer_norm_eps=transfer.one_norm(config).eps,
        image_size=side_or_pair(config.img_size),
        patch_size=side_or_pair(config.patch_size),
        num_channels=config.in_chans,
        qkv_bias=config.qkv_bias,
        num_labels=config.num_classes or 2,
    )
    new: Any
    with torch.random.fork_rng(devices=[]):
        if like is not None:
            new = copy.deepcopy(like)
        elif config.num_classes:
            new = getattr(transformers, f"{family}ForImageClassification")(values)
        else:
            new = transformers.ViTModel(values, add_pooling_layer=config.representation)
    if isinstance(inside := getattr(new, "timm_model", None), nn.Module):  # a TimmWrapper
        from vitmods.adapters.timm import fill_timm

        fill_timm(model, inside)
    else:
        nearest, target = (
            read_config(new),
            f"Hugging Face's {type(new).__name__.removesuffix('ForImageClassification')}",
        )
        if nearest.layer_scale and config.layer_scale:
            nearest = nearest.with_(layer_scale=config.layer_scale)
        transfer.refuse_slots(target, config, nearest)
        pair, _ = _rows_of(new.state_dict(), config)
        transfer.export_model(target, model, new, pair(model.state_dict()), partial(_look, config))
    if model.grad_checkpointing:
        enable = getattr(new, "activation_checkpointing_enable", None)  # its name from version 5 on
        (enable or new.gradient_checkpointing_enable)()
    return new


def _look(config: ViTConfig, model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """All tokens and the output; the encoder of a masked autoencoder sees all patches, in their order."""
    body, options = next(m for m in model.modules() if hasattr(m, "embeddings")), {}
    masked = getattr(body.config, "mask_ratio", None)
    if masked is not None:
        options["noise"] = torch.arange(config.num_patches, device=images.device).expand(len(images), -1)
        body.config.mask_ratio = 0.0
    try:
        outputs = body(images, **options)
    finally:
        if masked is not None:
            body.config.mask_ratio = masked
    tokens = outputs.last_hidden_state
    if body is not model:
        return tokens, model(images).logits
    if getattr(outputs, "pooler_output", None) is not None:
        return tokens, outputs.pooler_output
    return tokens, tokens[:, 0] if config.pool == "token" else tokens.mean(1)


def _read_config(source: str, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ViTConfig:
    """A setting that config.json leaves out has Hugging Face's default. UserError lists what is not covered."""
    kind, names = values.get("model_type", "vit"), _local_names(tensors)
    if not isinstance(kind, str) or kind not in FAMILIES:
        transfer.refuse(source, [f"model_type {kind} ({', '.join(FAMILIES)} are)"])
    values = {**FAMILIES[kind], **values, **(values.get("vision_config") or {})}
    pooled, has_class_token = "pooler.dense" in names, bool(names.keys() & set(_NAMES["cls_token"]))
    has_head = bool(names.keys() & {"classifier", "cls_classifier"})
    missing = []
    if values.get("hidden_act", "gelu") not in _ACTIVATIONS:
        missing.append(f"hidden_act {values['hidden_act']} (forms of GELU are)")
    if values.get("hidden_dropout_prob", 0.0):
        missing.append(
            "hidden_dropout_prob above 0, which drops nothing after the MLP's activation as it would here (load the "
            "model with hidden_dropout_prob=0)"
        )
    if pooled and values.get("pooler_act", "tanh") != "tanh":
        missing.append(f"pooler_act {values['pooler_act']} (tanh is)")
    if pooled and has_head:
        missing.append("a pooler and a classifier in one")
    if any(not name.startswith("block") and "position_bias" in name for name in names):
        missing.append("relative positions that all blocks share")
    if "text_model" in names:
        missing.append("a text model")
    transfer.refuse(source, missing)
    norm, is_clip = NormConfig("layer", float(values.get("layer_norm_eps", 1e-12))), kind.startswith("clip")
    after_pool = "pooler.layernorm" in names
    pool = "avg" if after_pool or not has_class_token else "token"
    if has_head:
        pool = "prefix" if "distillation_classifier" in names else values.get("pool", pool)
    elif "head.probe" in names:
        pool = "map"
    head = tensors.get(_choose(names, ("classifier", "cls_classifier")) + ".weight", ())
    fc2 = tensors.get(_choose(names, _IN_BLOCK["mlp.fc2"]).replace("*", "0") + ".weight")
    scale = values.get("layerscale_value", values.get("layer_scale_init_value", 1.0))
    has_norm = bool(names.keys() & {*_NAMES["norm"], *_NAMES["fc_norm"]}) and not (is_clip and has_head)
    return ViTConfig(
        img_size=values.get("image_size", 224),
        patch_size=values.get("patch_size", 16),
        in_chans=values.get("num_channels", 3),
        num_classes=len(head),
        embed_dim=values.get("hidden_size", 768),
        depth=values.get("num_hidden_layers", 12),
        num_heads=values.get("num_attention_heads", 12),
        mlp_dim=values.get("intermediate_size", 3072) if fc2 is None else fc2.shape[-1],
        mlp_kind="swiglu" if values.get("use_swiglu_ffn") else "mlp",
        qkv_bias=values.get("qkv_bias", True),
        activation=_ACTIVATIONS[values.get("hidden_act", "gelu")],  # type: ignore[arg-type]
        stem=StemConfig(bias=not is_clip),
        position="learn" if names.keys() & set(_NAMES["pos_embed"]) else "none",
        position_on_prefix="embeddings.register_tokens" not in names,
        rel_pos=bool(names.keys() & set(_IN_BLOCK["attn.rel_pos.table"])),
        position_norm=norm if "pre_layrnorm" in names else None,
        position_norm_on_prefix="pre_layrnorm" in names,
        class_token=has_class_token,
        reg_tokens=values.get("num_register_tokens", int("embeddings.distillation_token" in names)),
        attn=BranchConfig(before=norm),
        mlp=BranchConfig(before=norm),
        layer_scale=(float(scale) or 1e-5) if names.keys() & set(_IN_BLOCK["ls1.gamma"]) else None,
        final_norm=norm if has_norm else None,
        pool=pool,  # type: ignore[arg-type]
        norm_after_pool=has_norm and (after_pool or is_clip),
        representation=pooled,
        attn_drop=float(values.get("attention_probs_dropout_prob", values.get("attention_dropout", 0.0))),
        drop_path=float(values.get("drop_path_rate", 0.0)),
        drop_path_shape=values.get("drop_path_shape", "linear"),
    )


def _local_names(tensors: Iterable[str]) -> dict[str, str]:
    """The names of modules and tensors inside the transformer, ``block`` for a block -> their whole names, ``*`` for
    its number."""
    tensors = list(tensors)
    stem = next((name for name in tensors if "embeddings.patch_embedding" in name), "")
    prefix, names = stem.partition("embeddings.patch_embedding")[0], {}
    # Saved files of some classes have the prefix on everything but the blocks.
    in_block = re.compile(rf"((?:{re.escape(prefix)})?(?:encoder\.)?layers?)\.\d+\.(.+)")
    for name in tensors:
        if block := in_block.fullmatch(name):
            local, full_name = f"block.{block[2]}", f"{block[1]}.*.{block[2]}"
        else:
            local, full_name = name.removeprefix(prefix), name
        while local and local not in names:
            names[local] = full_name
            local, full_name = local.rpartition(".")[0], full_name.rpartition(".")[0]
    return names


def _choose(names: Mapping[str, str], choices: Sequence[str]) -> str:
    """The full name of the first of these that the model has; otherwise of the last."""
    return next((names[choice] for choice in choices if choice in names), choices[-1])


def _rows_of(tensors: Iterable[str], config: ViTConfig) -> tuple[Callable[[Iterable[str]], list[Row]], dict[str, str]]:
    """Pair our tensors with those of such a model or file; and which of its tensors take no part, with the reason."""
    names = _local_names(tensors := list(tensors))
    table: dict[str, Any] = {target: _choose(names, choices) for target, choices in _NAMES.items()}
    table |= {f"blocks.*.{target}": _choose(names, choices) for target, choices in _IN_BLOCK.items()}
    query = _choose(names, _QUERIES)
    words = ("key", "value") if query.endswith("query") else ("k_proj", "v_proj")
    key, value = (re.sub(r"\w+$", word, query) for word in words)
    table["blocks.*.attn.qkv"] = ((query, key, value), _KINDS)
    if f"{key}.bias" not in names.values():
        table["blocks.*.attn.qkv.bias"] = ((query, value), {"bias": (".bias", WITHOUT_KEYS)})
    if (packed := table["blocks.*.mlp.fc1_g"]).endswith("weights_in"):
        table |= packed_gate("blocks.*.mlp", packed)
    pooling = _choose(names, ("head.attention",))
    for kind in ("weight", "bias"):
        for target, part in (("q", lambda x: x[: len(x) // 3]), ("kv", lambda x: x[len(x) // 3 :])):
            table[f"attn_pool.{target}.{kind}"] = ((f"{pooling}.in_proj_{kind}",), {kind: ("", part_of(part))})
    token, positions = table["cls_token"], table["pos_embed"]
    if positions.endswith("weight"):  # (N, C), and the class token (C,)
        table["pos_embed"] = ((positions,), {"pos_embed": ("", Layout(lambda x: x[None], lambda x: (x[0],)))})
    if token.endswith("class_embedding"):
        table["cls_token"] = ((token,), {"cls_token": ("", Layout(lambda x: x[None, None], lambda x: (x[0, 0],)))})
    if "embeddings.register_tokens" in names and config.position == "learn":
        # Registers have no positions there; the position of the class token becomes a part of it.
        folded = Layout(lambda token, x: token + x[:, :1], lambda x: (x, torch.zeros_like(x)))
        table["cls_token"] = ((token, positions), {"cls_token": ("", folded)})
        table["pos_embed"] = ((positions,), {"pos_embed": ("", part_of(lambda x: x[:, 1:], dim=1))})
    table["head"] = "classifier" if "classifier" in names else (("cls_classifier", "distillation_classifier"), HEADS)
    unused = {}
    if "classifier" in names:
        unused[r"head\."] = "pools the tokens, of which the classifier reads the mean"
    if config.final_norm is None:
        unused["post_layernorm"] = "is a norm that the classifier does not read"
    left_out = {name: why for name in tensors for part, why in unused.items() if re.search(rf"(^|\.){part}", name)}
    return lambda names: rows_of(names, table), left_out
