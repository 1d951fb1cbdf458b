"""Our own files: weights with the config that they belong to, in safetensors' metadata or a trial's config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vitmods.adapters.tensors import Coverage, Row, read_tensors
from vitmods.adapters.transfer import build, shapes_of
from vitmods.model.config import ViTConfig
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError
from vitmods.util.files import write_atomically

KEY, PIXELS = "vitmods_config", "vitmods_pixels"


@dataclass(frozen=True)
class Description:
    """What goes with a file of weights of our own."""

    config: Mapping[str, Any]
    pixels: Mapping[str, tuple[float, ...]]
    """``mean`` and ``std`` that images were normalized with, as far as they are reported"""


def own_description(weights: Path) -> Description | None:
    """What goes with a file of weights, or None where it is none of ours."""
    metadata = _metadata(weights) if weights.suffix == ".safetensors" else {}
    beside = weights.with_name("config.json")
    try:
        if KEY in metadata:
            config, pixels = json.loads(metadata[KEY]), json.loads(metadata.get(PIXELS, "{}"))
        elif beside.is_file():  # a trial's
            record = json.loads(beside.read_text())
            config, pixels = record.get("model"), record.get("recipe", {}).get("augment", {})
        else:
            return None
        if isinstance(config, dict) and "base" in config and "edits" in config:
            base = config["base"] if isinstance(config["base"], str) else "a ViT"
            raise UserError(
                f"{weights.parent} is a trial of a model that vitmods has no config of, a {config['class']} ({base}, "
                f"changed by {config['edits'] or 'nothing'}): it is no checkpoint to begin with. "
                "vitmods.study.open_trial(folder) opens it, and `vitmods evaluate` evaluates it."
            )
        if not isinstance(config, dict) or "embed_dim" not in config:
            return None
        return Description(
            config, {name: tuple(map(float, pixels[name])) for name in ("mean", "std") if name in pixels}
        )
    except UserError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        where = weights if KEY in metadata else beside
        raise UserError(f"{where} cannot be read; it may be damaged: {error}") from error


def read_own(source: str, tensors: Mapping[str, Tensor], record: Description) -> tuple[ViT, Coverage]:
    """A ViT, and the account of its tensors. Raises UserError when they do not fit the config."""
    config = ViTConfig.from_dict(record.config)
    names = shapes_of(source, config, at_most=len(tensors))
    weights, coverage = read_tensors(source, [Row(name, (name,)) for name in names], tensors)
    model = build(source, config, weights)
    model.pretrained_cfg.update(record.pixels)
    return model, coverage


def write_own(model: ViT, path: Path) -> None:
    """The weights as safetensors, with the config and the images' mean and std as metadata. Raises UserError for
    errors of the disk."""
    from safetensors.torch import save

    weights = {name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()}
    pixels = {name: model.pretrained_cfg[name] for name in ("mean", "std") if name in model.pretrained_cfg}
    metadata = {"format": "pt", KEY: model.vit_config.to_json(), PIXELS: json.dumps(pixels)}
    write_atomically(path, lambda file: file.write(save(weights, metadata)))


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path.name} cannot be read; it may be damaged: {error}") from error
