"""Hugging Face's ViTModel and ViTForImageClassification as a vitmods ViT and back, exactly; also their saved files."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.adapters import transfer
from vitmods.adapters.tensors import STACKED, Coverage, Row, Table, rows_of
from vitmods.model.config import ViTConfig
from vitmods.model.slots import BranchConfig, NormConfig
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError
from vitmods.util.limits import offline, read_json

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
}
_IN_BLOCK = {
    "norm1": ("layernorm_before", "layernorm_before"),
    "attn.proj": ("attention.output.dense", "attention.o_proj"),
    "norm2": ("layernorm_after", "layernorm_after"),
    "mlp.fc1": ("intermediate.dense", "mlp.fc1"),
    "mlp.fc2": ("output.dense", "mlp.fc2"),
}
"""Names in version 4 and in all saved files, and in models of version 5."""
_KINDS = {kind: (f".{kind}", STACKED) for kind in ("weight", "bias")}


def from_huggingface(model: Any) -> ViT:
    """A vitmods ViT with the config and weights of a ViTModel or ViTForImageClassification, checked on random images.

    Its output are the logits; for a ViTModel the pooler's output, or without pooler the class token after the final
    norm. Raises UserError that lists every part of the model without a counterpart here.
    """
    return read(model)[0]


def read(model: Any) -> tuple[ViT, Coverage]:
    """Like ``from_huggingface``, with the account of all tensors."""
    source, config, tensors = f"Hugging Face's {type(model).__name__}", read_config(model), model.state_dict()
    pair, left_out = _rows_of(tensors)
    new, coverage = transfer.import_model(source, model, config, pair, _look, left_out)
    new.set_grad_checkpointing(any(getattr(m, "gradient_checkpointing", False) for m in model.modules()))
    return new, coverage


def read_config(model: Any) -> ViTConfig:
    """The config of such a model, its weights aside. Raises UserError as ``from_huggingface``."""
    from transformers import ViTForImageClassification, ViTModel

    source = f"Hugging Face's {type(model).__name__}"
    if type(model) not in (ViTModel, ViTForImageClassification):
        reason = "a distillation token needs a second head; " if type(model).__name__.startswith("DeiT") else ""
        raise UserError(
            f"{source} is not covered: {reason}ViTModel and ViTForImageClassification are. {transfer.OTHERWISE}"
        )
    return _read_config(source, model.config.to_dict(), model.state_dict())


def read_saved(source: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> tuple[ViT, Coverage]:
    """From what ``save_pretrained`` writes: the tensors and the values of config.json. Raises UserError."""
    transfer.check_numbers(source, values)
    try:
        config = _read_config(source, values, tensors)
        names = {str(key): str(name) for key, name in (values.get("id2label") or {}).items()}
    except UserError:
        raise
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise UserError(f"{source}: its config.json cannot be read; it may be damaged: {error}") from error
    pair, left_out = _rows_of(tensors)
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
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise UserError("Models of Hugging Face need transformers: pip install 'vitmods[hf]'.") from error
    if not (folder / "config.json").is_file():
        raise UserError(f"{source}: {folder / 'config.json'} does not exist. Give a folder that save_pretrained wrote.")
    try:
        values = read_json(folder / "config.json")
        check_values(source, values)
        with offline():
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # transformers raises what it likes
        raise UserError(f"{folder / 'config.json'} cannot be read: {str(error).partition(chr(10))[0]}") from error


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
    try:
        with offline(), transfer.outline(source, transfer.most_bytes(weights) if weights else transfer.MOST_NEW_BYTES):
            AutoModelForImageClassification.from_config(config, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # transformers raises what it likes
        raise UserError(f"{source} cannot be built: {str(error).partition(chr(10))[0]}") from error


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


def is_saved(tensors: Iterable[str]) -> bool:
    """Whether tensors have the names of a Hugging Face ViT."""
    return any(name.endswith("embeddings.patch_embeddings.projection.weight") for name in tensors)


def to_huggingface(model: ViT) -> nn.Module:
    """A ViTForImageClassification, or without classes a ViTModel, with the function, weights, device, type and mode of
    a ViT, checked on random images.

    Raises UserError naming the slots that Hugging Face does not have, and without transformers.
    """
    try:
        from transformers import ViTConfig as TheirConfig
        from transformers import ViTForImageClassification, ViTModel
    except ImportError:
        raise UserError('This needs the extra packages: pip install "vitmods[hf]"') from None
    config = model.vit_config

    def side_or_pair(size: tuple[int, int]) -> int | list[int]:
        return size[0] if size[0] == size[1] else list(size)

    values = TheirConfig(
        hidden_size=config.embed_dim,
        num_hidden_layers=config.depth,
        num_attention_heads=transfer.whole_heads(config),
        intermediate_size=config.mlp_dim,
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
        if config.num_classes:
            new = ViTForImageClassification(values)
        else:
            new = ViTModel(values, add_pooling_layer=config.representation)
    tensors = new.state_dict()
    transfer.refuse_slots("Hugging Face's ViT", config, _read_config("Hugging Face's ViT", values.to_dict(), tensors))
    pair, _ = _rows_of(tensors)
    transfer.export_model("Hugging Face's ViT", model, new, pair(model.state_dict()), _look)
    if model.grad_checkpointing:
        enable = getattr(new, "activation_checkpointing_enable", None)  # its name from version 5 on
        (enable or new.gradient_checkpointing_enable)()
    filled: nn.Module = new
    return filled


def _look(model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    body = getattr(model, "vit", model)
    outputs = body(images)
    tokens = outputs.last_hidden_state
    if body is not model:
        return tokens, model(images).logits
    return tokens, tokens[:, 0] if outputs.pooler_output is None else outputs.pooler_output


def _read_config(source: str, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ViTConfig:
    """A setting that config.json leaves out has Hugging Face's default. UserError lists what is not covered."""
    pooled, classifier = any("pooler.dense" in name for name in tensors), tensors.get("classifier.weight")
    missing = []
    if values.get("model_type", "vit") != "vit":
        missing.append(f"model_type {values['model_type']} (vit is)")
    if values.get("hidden_act", "gelu") not in _ACTIVATIONS:
        missing.append(f"hidden_act {values['hidden_act']} (forms of GELU are)")
    if values.get("hidden_dropout_prob", 0.0):
        missing.append(
            "hidden_dropout_prob above 0, which drops nothing after the MLP's activation as it would here (load the "
            "model with hidden_dropout_prob=0)"
        )
    if pooled and values.get("pooler_act", "tanh") != "tanh":
        missing.append(f"pooler_act {values['pooler_act']} (tanh is)")
    if pooled and any("classifier" in name for name in tensors):
        missing.append("a pooler and a classifier in one")
    transfer.refuse(source, missing)
    norm = NormConfig("layer", float(values.get("layer_norm_eps", 1e-12)))
    return ViTConfig(
        img_size=values.get("image_size", 224),
        patch_size=values.get("patch_size", 16),
        in_chans=values.get("num_channels", 3),
        num_classes=0 if classifier is None else len(classifier),
        embed_dim=values.get("hidden_size", 768),
        depth=values.get("num_hidden_layers", 12),
        num_heads=values.get("num_attention_heads", 12),
        mlp_dim=values.get("intermediate_size", 3072),
        qkv_bias=values.get("qkv_bias", True),
        activation=_ACTIVATIONS[values.get("hidden_act", "gelu")],  # type: ignore[arg-type]
        attn=BranchConfig(before=norm),
        mlp=BranchConfig(before=norm),
        final_norm=norm,
        representation=pooled,
        attn_drop=float(values.get("attention_probs_dropout_prob", 0.0)),
    )


def _rows_of(tensors: Iterable[str]) -> tuple[Callable[[Iterable[str]], list[Row]], dict[str, str]]:
    """Pair our tensors with those of such a model or file; and which of its tensors take no part, with the reason."""
    tensors = set(tensors)
    prefix = "vit." if any(name.startswith("vit.") for name in tensors) else ""
    is_old = any(name.startswith(f"{prefix}encoder.layer.") for name in tensors)
    block = f"{prefix}encoder.layer.*" if is_old else f"{prefix}layers.*"
    query, kinds = ("attention.attention.{}", "query key value") if is_old else ("attention.{}_proj", "q k v")
    table: Table = {
        "cls_token": f"{prefix}embeddings.cls_token",
        "pos_embed": f"{prefix}embeddings.position_embeddings",
        "patch_embed.proj": f"{prefix}embeddings.patch_embeddings.projection",
        **{f"blocks.*.{part}": f"{block}.{names[0 if is_old else 1]}" for part, names in _IN_BLOCK.items()},
        "blocks.*.attn.qkv": (tuple(f"{block}.{query.format(kind)}" for kind in kinds.split()), _KINDS),
        "norm": f"{prefix}layernorm",
        "pre_logits": f"{prefix}pooler.dense",
        "head": "classifier",
    }
    mask = f"{prefix}embeddings.mask_token"
    left_out = {mask: "stands for masked patches, which a plain forward pass does not have"} if mask in tensors else {}
    return lambda names: rows_of(names, table), left_out
