"""The evaluated images of a trial that can be looked at: PNG files in its folder, and what their colors mean."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitmods.data.read import Unreadable, decode
from vitmods.tasks.base import Example
from vitmods.util.files import make_folder, write_atomically, write_json
from vitmods.util.limits import read_bytes, read_json

FOLDER = "examples"
_COLOR = re.compile("#[0-9a-f]{6}")


@dataclass(frozen=True)
class Examples:
    """ids: of the images. panels: of each, pixels uint8 (H, W, 3) by name. legend: class -> its color, as #rrggbb."""

    ids: tuple[str, ...] = ()
    panels: tuple[Mapping[str, NDArray[np.uint8]], ...] = ()
    legend: Mapping[str, str] | None = None


def write_examples(trial: Path, examples: Sequence[Example], ids: Sequence[str], legend: Mapping[str, str]) -> None:
    """Write `examples/<i>-<panel>.png`, and examples.json; nothing where there are none. ids: of the split's images."""
    if not examples:
        return
    folder = make_folder(trial / FOLDER)
    for i, one in enumerate(examples):
        for name, pixels in one.panels.items():
            image = Image.fromarray(pixels)
            write_atomically(folder / f"{i}-{name}.png", lambda file, image=image: image.save(file, "PNG"))  # type: ignore[misc]
    named = [{"id": ids[one.index], "panels": list(one.panels)} for one in examples]
    write_json(folder / "examples.json", {"schema": 1, "images": named, "legend": dict(legend)})


def read_examples(trial: Path) -> Examples:
    """The inverse; empty where there are none, or where a file is missing or damaged."""
    folder = trial / FOLDER
    try:
        found = read_json(folder / "examples.json")
        panels = tuple(
            {name: _pixels(folder / f"{i}-{name}.png") for name in one["panels"]}
            for i, one in enumerate(found["images"])
        )
        legend = {str(name): color for name, color in found["legend"].items() if _COLOR.fullmatch(color)}
        return Examples(tuple(str(one["id"]) for one in found["images"]), panels, legend)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, Unreadable):
        return Examples()


def _pixels(path: Path) -> NDArray[np.uint8]:
    return np.ascontiguousarray(decode(read_bytes(path, "settings"), 3).transpose(1, 2, 0))
