"""Our own files: weights with the config that they belong to, in safetensors' metadata or a trial's config.json."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.adapters.tensors import Coverage, rows_of
from vitmods.adapters.transfer import read_weights
from vitmods.model.config import ViTConfig
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError, explaining
from vitmods.util.files import write_atomically
from vitmods.util.limits import parse_json, read_json

KEY, SEEN = "vitmods_config", "vitmods_pixels"
_SEEN = ("mean", "std", "crop_pct", "interpolation", "label_names", "task")


@dataclass(frozen=True)
class Description:
    """The description of a file of weights of our own."""

    config: Mapping[str, Any]
    seen: Mapping[str, Any]
    """what belongs in ``pretrained_cfg``, as far as it is known: how images were prepared (``mean``, ``std``,
    ``crop_pct``, ``interpolation``), what the outputs are called (``label_names``), and the ``task``"""


def own_description(weights: Path) -> Description | None:
    """Read the description of a file of weights; None for a file that is not ours."""
    metadata = _metadata(weights) if weights.suffix == ".safetensors" else {}
    beside = weights.with_name("config.json")
    kinds = (OSError, ValueError, TypeError, AttributeError, KeyError, OverflowError)
    where = weights if KEY in metadata else beside
    with explaining(lambda error: f"{where} cannot be read; it may be damaged: {error}", *kinds):
        if KEY in metadata:
            config, seen = parse_json(metadata[KEY]), parse_json(metadata.get(SEEN, "{}"))
        elif beside.is_file():  # a trial's
            record = read_json(beside)
            config, seen = record.get("model"), seen_by_trial(record)
        else:
            return None
        if isinstance(config, dict) and "base" in config and "edits" in config:
            base = config["base"] if isinstance(config["base"], str) else "a ViT"
            raise UserError(
                f"{weights.parent} is a trial of a model without a vitmods config, a {config['class']} ({base}, "
                f"changed by {config['edits'] or 'nothing'}): it cannot be a checkpoint to start from. "
                "vitmods.study.open_trial(folder) opens it, and `vitmods evaluate` evaluates it."
            )
        if not isinstance(config, dict) or "embed_dim" not in config:
            return None
        return Description(config, read_seen(seen))


def seen_by_trial(record: Mapping[str, Any]) -> dict[str, Any]:
    """How the images of a trial are prepared, and what its outputs are called, of its config.json."""
    augment = record.get("recipe", {}).get("augment", {})
    names = {"mean": "mean", "std": "std", "crop_pct": "eval_crop", "interpolation": "resample"}
    seen = {name: augment.get(field) for name, field in names.items()}
    return seen | {"label_names": record.get("data", {}).get("classes") or None, "task": record.get("task") or None}


def is_own(weights: Path) -> bool:
    """Whether a file of weights is ours by its own metadata, whatever files are next to it."""
    return weights.suffix == ".safetensors" and KEY in _metadata(weights)


def read_own(source: str, tensors: Mapping[str, Tensor], record: Description) -> tuple[ViT, Coverage]:
    """A ViT, and the account of its tensors. Raises UserError when they do not fit the config."""
    config = ViTConfig.from_dict(record.config)
    model, coverage = read_weights(source, config, lambda names: rows_of(names, {}), tensors)
    model.pretrained_cfg.update(record.seen)
    return model, coverage


def preparation(model: nn.Module, outputs: int) -> dict[str, Any]:
    """Return the part of ``pretrained_cfg`` that goes into files: how images are prepared, and names of the outputs."""
    known: Any = getattr(model, "pretrained_cfg", None) or {}
    settings = {name: known.get(name) for name in _SEEN}
    if len(settings["label_names"] or ()) != outputs:
        del settings["label_names"]
    return {name: value for name, value in settings.items() if value is not None}


def write_own(model: ViT, path: Path) -> None:
    """The weights as safetensors, with the config and ``preparation`` as metadata. Raises UserError for errors of the
    disk."""
    from safetensors.torch import save

    weights = {
        name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in model.state_dict().items()
    }
    seen = json.dumps(preparation(model, model.vit_config.num_classes))
    metadata = {"format": "pt", KEY: model.vit_config.to_json(), SEEN: seen}
    write_atomically(path, lambda file: file.write(save(weights, metadata)))


def read_seen(record: Mapping[str, Any]) -> dict[str, Any]:
    """How images are prepared and what outputs are called, of what a file says. Raises ValueError or TypeError."""

    def numbers(values: Any) -> tuple[float, ...]:
        return tuple(map(float, values))

    def words(values: Any) -> tuple[str, ...]:
        return tuple(map(str, values))

    kinds: dict[str, Callable[[Any], Any]] = {"mean": numbers, "std": numbers, "label_names": words, "crop_pct": float}
    return {name: kinds.get(name, str)(record[name]) for name in _SEEN if record.get(name) is not None}


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path.name} cannot be read; it may be damaged: {error}") from error
