"""A folder that timm wrote: model.safetensors and a config.json that names the architecture."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitmods.adapters.tensors import Coverage
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError


def is_saved(weights: Path) -> bool:
    """Whether the config.json beside weights is timm's, as ``timm.models.save_for_hf`` writes it."""
    path = weights.with_name("config.json")
    try:
        record = json.loads(path.read_text()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return False  # whoever needs the file says what is wrong with it
    return isinstance(record, dict) and isinstance(record.get("architecture"), str)


def read_saved(weights: Path, tensors: Mapping[str, Tensor]) -> tuple[ViT, Coverage]:
    """timm's own reading of the config, and of tensors that were read here: timm opens no file of weights, since some
    of its versions run the code that a pickle holds. Raises UserError."""
    import timm

    from vitmods.adapters.timm import read

    given = {"state_dict": dict(tensors), "source": "", "file": None}
    try:
        model: Any = timm.create_model(f"local-dir:{weights.parent}", pretrained=True, pretrained_cfg_overlay=given)
    except Exception as error:  # whatever timm and torch raise for a damaged config or an unknown model
        raise UserError(f"{weights.parent} cannot be read by timm: {error}") from error
    model.pretrained_cfg.pop("state_dict", None)
    return read(model)
