"""A folder that timm wrote: model.safetensors and a config.json that names the architecture."""

import json
from pathlib import Path

from vitmods.adapters.tensors import Coverage
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError


def is_saved(weights: Path) -> bool:
    """Whether the config.json beside weights is timm's, as ``timm.models.save_for_hf`` writes it."""
    path = weights.with_name("config.json")
    try:
        record = json.loads(path.read_text()) if path.is_file() else None
    except (OSError, ValueError):
        return False  # whoever needs the file says what is wrong with it
    return isinstance(record, dict) and isinstance(record.get("architecture"), str)


def read_saved(weights: Path) -> tuple[ViT, Coverage]:
    """timm's own reading of the folder (weights alone, no code), then ours. Raises UserError."""
    import timm

    from vitmods.adapters.timm import read

    try:
        model = timm.create_model(f"local-dir:{weights.parent}", pretrained=True)
    except Exception as error:  # whatever timm, torch and safetensors raise for a damaged or an unknown model
        raise UserError(f"{weights.parent} cannot be read by timm: {error}") from error
    return read(model)
