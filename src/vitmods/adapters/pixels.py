"""Mean and std of the pixels, as files that lie beside weights tell them."""

import json
from pathlib import Path
from typing import Any

from vitmods.util.errors import UserError


def pixels_beside(weights: Path) -> dict[str, tuple[float, ...]]:
    """``mean`` and ``std`` of pixels in [0, 1] from Hugging Face's preprocessor_config.json; empty where there is none.

    Raises UserError when that file cannot be read, or scales pixels otherwise.
    """
    path = weights.with_name("preprocessor_config.json")
    if not path.is_file():
        return {}
    try:
        record: dict[str, Any] = json.loads(path.read_text())
        if not record.get("do_normalize", True):
            return {"mean": (0.0,) * 3, "std": (1.0,) * 3}
        found = {
            name: tuple(map(float, record[f"image_{name}"])) for name in ("mean", "std") if f"image_{name}" in record
        }
        scale = float(record.get("rescale_factor", 1 / 255)) if record.get("do_rescale", True) else 1.0
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}). Repair it, or remove it and give --mean and --std."
        ) from error
    if abs(scale * 255 - 1) > 1e-3:
        raise UserError(
            f"{path} scales pixels by {scale:g}, and here they lie in [0, 1]: write mean and std for that, with "
            "rescale_factor 1/255."
        )
    return found
