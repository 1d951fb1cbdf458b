"""Our own files: weights with the config that they belong to, in safetensors' metadata or a trial's config.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..config import ViTConfig
from ..errors import UserError
from ..files import write_atomically
from ..vit import ViT
from .tensors import Coverage, Row, read_tensors
from .transfer import build

KEY = "vitmods_config"


def own_config(weights: Path) -> dict[str, Any] | None:
    """The config that goes with a file of weights, or None where it is none of ours."""
    text = _metadata(weights).get(KEY) if weights.suffix == ".safetensors" else None
    beside = weights.with_name("config.json")
    try:
        if text is not None:
            found: Any = json.loads(text)
        else:
            found = json.loads(beside.read_text()).get("model") if beside.is_file() else None
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{beside if text is None else weights} cannot be read; it may be damaged: {error}") from error
    return found if isinstance(found, dict) and "embed_dim" in found else None


def read_own(source: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[ViT, Coverage]:
    """A ViT, and the account of its tensors. Raises UserError when they do not fit the config."""
    described = ViTConfig.from_dict(config)
    names = ViT(described).state_dict()
    weights, coverage = read_tensors(source, [Row(name, (name,)) for name in names], tensors)
    return build(source, described, weights), coverage


def write_own(model: ViT, path: Path) -> None:
    """The weights as safetensors, with the config as metadata. Raises UserError for errors of the disk."""
    from safetensors.torch import save

    weights = {name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()}
    metadata = {"format": "pt", KEY: model.config.to_json()}
    write_atomically(path, lambda file: file.write(save(weights, metadata)))


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path.name} cannot be read; it may be damaged: {error}") from error
