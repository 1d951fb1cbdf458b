"""Hugging Face's ViTModel and ViTForImageClassification as a vitmods ViT and back, exactly; also their saved files."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.adapters import transfer
from vitmods.adapters.tensors import STACKED, Coverage, Row, read_tensors, rows_of
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
_MASK = {"embeddings.mask_token": "stands for masked patches, of which a plain forward pass has none"}


def from_huggingface(model: Any) -> ViT:
    """A vitmods ViT with the config and weights of a ViTModel or ViTForImageClassification, checked on random images.

    Its output are the logits; for a ViTModel the pooler's output, or without pooler the class token after the final
    norm. Raises UserError that lists every part of the model without a counterpart here.
    """
    return read(model)[0]


def read(model: Any) -> tuple[ViT, Coverage]:
    """Like ``from_huggingface``, with the account of all tensors."""
    source, config, tensors = f"Hugging Face's {type(model).__name__}", read_config(model), model.state_dict()
    new, coverage = transfer.import_model(source, model, config, _rows(config, tensors), _look, _left_out(tensors))
    new.set_grad_checkpointing(any(getattr(m, "gradient_checkpointing", False) for m in model.modules()))
    return new, coverage


def read_config(model: Any) -> ViTConfig:
    """The config of such a model, its weights aside. Raises UserError as ``from_huggingface``."""
    from transformers import ViTForImageClassification, ViTModel

    source = f"Hugging Face's {type(model).__name__}"
    if type(model) not in (ViTModel, ViTForImageClassification):
        reason = "there is no slot for its distillation token; " if type(model).__name__.startswith("DeiT") else ""
        raise UserError(
            f"{source} is not covered: {reason}ViTModel and ViTForImageClassification are. {transfer.OTHERWISE}"
        )
    tensors, values = model.state_dict(), model.config.to_dict()
    transfer.refuse(source, _uncovered(values, tensors))
    return _read_config(values, tensors)


def read_saved(source: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> tuple[ViT, Coverage]:
    """From what ``save_pretrained`` writes: the tensors and the values of config.json. Raises UserError."""
    transfer.check_numbers(source, values)
    try:
        transfer.refuse(source, _uncovered(values, tensors))
        config = _read_config(values, tensors)
        names = {str(key): str(name) for key, name in (values.get("id2label") or {}).items()}
    except UserError:
        raise
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise UserError(f"{source}: its config.json cannot be read; it may be damaged: {error}") from error
    if config.depth > len(tensors):
        raise UserError(f"{source} does not fit its own config, which has more blocks than the file has tensors.")
    weights, coverage = read_tensors(source, _rows(config, tensors), tensors, _left_out(tensors))
    model, keys = transfer.build(source, config, weights), [str(k) for k in range(config.num_classes)]
    if names.keys() == set(keys):
        model.pretrained_cfg["label_names"] = tuple(names[key] for key in keys)
    return model, coverage


def read_huggingface_config(source: str, folder: Path) -> Any:
    """The configuration in a folder that `save_pretrained` wrote.

    Raises UserError where there is none, where it is too large for a model, or where it names what Hugging Face would
    fetch: a model of timm that is not in timm, a trained backbone, attention from the Hub.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise UserError("Models of Hugging Face need transformers: pip install 'vitmods[hf]'.") from error
    if not (folder / "config.json").is_file():
        raise UserError(f"{source}: there is no {folder / 'config.json'}. Give a folder that save_pretrained wrote.")
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
    """A classifier with new weights. UserError for a config that describes none, or one of more bytes than the
    weights in the folder allow (without weights, `MOST_NEW_BYTES`)."""
    from transformers import AutoModelForImageClassification

    check_classifier(source, folder, config)
    with offline():
        model: nn.Module = AutoModelForImageClassification.from_config(config, trust_remote_code=False)
    return model


def check_classifier(source: str, folder: Path, config: Any) -> None:
    """The errors of `build_classifier`, before memory is taken."""
    from transformers import AutoModelForImageClassification

    weights = [file.stat().st_size for file in folder.iterdir() if file.suffix in (".safetensors", ".bin")]
    try:
        with (
            offline(),
            transfer.outline(source, transfer.most_bytes(sum(weights)) if weights else transfer.MOST_NEW_BYTES),
        ):
            AutoModelForImageClassification.from_config(config, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # transformers raises what it likes
        raise UserError(f"{source} cannot be built: {str(error).partition(chr(10))[0]}") from error


def check_values(source: str, values: Any) -> None:
    """The same of its values, at any depth: parts of a model have configurations of their own."""
    if isinstance(values, list):
        for value in values:
            check_values(source, value)
    if not isinstance(values, Mapping):
        return
    transfer.check_numbers(source, values)
    if any(
        isinstance(count := values.get(name), int) and count > transfer.MOST_CLASSES
        for name in ("num_labels", "num_classes")
    ):
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

    Raises UserError naming the slots for which Hugging Face has no counterpart, and without transformers.
    """
    try:
        from transformers import ViTConfig as TheirConfig
        from transformers import ViTForImageClassification, ViTModel
    except ImportError:
        raise UserError('This needs the extra packages: pip install "vitmods[hf]"') from None
    target, config = "Hugging Face's ViT", model.vit_config
    transfer.refuse_slots(target, config, _counterpart(config))
    transfer.check_readable("The model", model)
    their_config = TheirConfig(
        hidden_size=config.embed_dim,
        num_hidden_layers=config.depth,
        num_attention_heads=config.num_heads,
        intermediate_size=config.mlp_dim,
        hidden_act="gelu" if config.activation == "gelu" else "gelu_pytorch_tanh",
        attention_probs_dropout_prob=config.attn_drop,
        layer_norm_eps=transfer.one_norm(config).eps,
        image_size=_side_or_pair(config.img_size),
        patch_size=_side_or_pair(config.patch_size),
        num_channels=config.in_chans,
        qkv_bias=config.qkv_bias,
        num_labels=config.num_classes or 2,
    )
    new: Any
    with torch.random.fork_rng(devices=[]):
        if config.num_classes:
            new = ViTForImageClassification(their_config)
        else:
            new = ViTModel(their_config, add_pooling_layer=config.representation)
    transfer.export_model(target, model, new, _rows(config, new.state_dict()), _look)
    if model.grad_checkpointing:
        enable = getattr(new, "activation_checkpointing_enable", None)  # its name from version 5 on
        (enable or new.gradient_checkpointing_enable)()
    made: nn.Module = new
    return made


def _side_or_pair(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)


def _look(model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    body = getattr(model, "vit", model)
    outputs = body(images)
    tokens = outputs.last_hidden_state
    if body is not model:
        return tokens, model(images).logits
    return tokens, tokens[:, 0] if outputs.pooler_output is None else outputs.pooler_output


def _uncovered(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
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
    pooled = any("pooler.dense" in name for name in tensors)
    if pooled and values.get("pooler_act", "tanh") != "tanh":
        missing.append(f"pooler_act {values['pooler_act']} (tanh is)")
    if pooled and any("classifier" in name for name in tensors):
        missing.append("a pooler and a classifier in one")
    return missing


def _read_config(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ViTConfig:
    """A setting that config.json leaves out has Hugging Face's default."""
    classifier = tensors.get("classifier.weight")
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
        representation=any("pooler.dense" in name for name in tensors),
        attn_drop=float(values.get("attention_probs_dropout_prob", 0.0)),
    )


def _counterpart(config: ViTConfig) -> ViTConfig:
    """The nearest config that Hugging Face's ViT can express."""
    norm = transfer.one_norm(config)
    return ViTConfig(
        **transfer.fields(
            config, "img_size patch_size in_chans num_classes embed_dim depth num_heads mlp_dim qkv_bias"
        ),
        **transfer.fields(config, "activation attn_drop init head_bias"),
        attn=BranchConfig(before=norm),
        mlp=BranchConfig(before=norm),
        final_norm=norm,
        representation=config.representation and not config.num_classes,
    )


def _prefix(tensors: Iterable[str]) -> str:
    return "vit." if any(name.startswith("vit.") for name in tensors) else ""


def _left_out(tensors: Iterable[str]) -> dict[str, str]:
    prefix = _prefix(tensors)
    return {prefix + name: reason for name, reason in _MASK.items() if prefix + name in tensors}


# Names inside a block: those of version 5, and those of version 4 and of all saved files.
_NEW = ("layers", "attention.{}_proj", "attention.o_proj", "mlp.fc1", "mlp.fc2", ("q", "k", "v"))
_OLD = (
    "encoder.layer", "attention.attention.{}", "attention.output.dense", "intermediate.dense", "output.dense",
    ("query", "key", "value"),
)  # fmt: skip


def _rows(config: ViTConfig, tensors: Iterable[str]) -> list[Row]:
    prefix = _prefix(tensors)
    old = any(name.startswith(f"{prefix}{_OLD[0]}.") for name in tensors)
    blocks, part, proj, fc1, fc2, parts = _OLD if old else _NEW
    rows = [
        Row("cls_token", (f"{prefix}embeddings.cls_token",)),
        Row("pos_embed", (f"{prefix}embeddings.position_embeddings",)),
        *rows_of("patch_embed.proj", f"{prefix}embeddings.patch_embeddings.projection"),
        *rows_of("norm", f"{prefix}layernorm"),
    ]
    for i in range(config.depth):
        ours, theirs = f"blocks.{i}", f"{prefix}{blocks}.{i}"
        qkv = [f"{theirs}.{part.format(name)}" for name in parts]
        rows += [
            *rows_of(f"{ours}.norm1", f"{theirs}.layernorm_before"),
            *rows_of(f"{ours}.attn.qkv", *qkv, layout=STACKED, bias=config.qkv_bias),
            *rows_of(f"{ours}.attn.proj", f"{theirs}.{proj}"),
            *rows_of(f"{ours}.norm2", f"{theirs}.layernorm_after"),
            *rows_of(f"{ours}.mlp.fc1", f"{theirs}.{fc1}"),
            *rows_of(f"{ours}.mlp.fc2", f"{theirs}.{fc2}"),
        ]
    if config.representation:
        rows += rows_of("pre_logits", f"{prefix}pooler.dense")
    if config.num_classes:
        rows += rows_of("head", "classifier")
    return rows
