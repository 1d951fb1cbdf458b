"""Settings, configs, data summaries and sample images in a form that the page can show."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitmods.study.store import Sample
from vitmods.train.trial import Examples, read_examples

SIDE = 96  # pixels of the longer side on the page's file, enough for a tile on a dense screen
MOST = 24  # images


def pairs(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Flat (dotted name, value) pairs of a nested mapping."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from pairs(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", plain(value)


def plain(value: Any) -> str:
    """A JSON value as a person would write it."""
    if value is None or value in ({}, [], ()):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(plain(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(item)}" for key, item in value.items())
    return str(value)


def differences(base: Mapping[str, Any], arm: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str, str]]:
    """(setting, base's value, the arm's) wherever two configs differ. A norm is one value. None where one of the two is
    no vitmods ViT and has modules instead, which a table of their own shows."""
    if "modules" in base or "modules" in arm:
        return []
    found = []
    for key in dict.fromkeys([*base, *arm]):
        old, new = base.get(key), arm.get(key)
        is_norm = key.endswith("_norm") or key in ("before", "inner", "branch", "after")
        if isinstance(new, Mapping) and isinstance(old, Mapping | None) and not is_norm:
            found += differences(old or {}, new, f"{prefix}{key}.")
        elif old != new:
            found.append((f"{prefix}{key}", _norm(old), _norm(new)))
    return found


def _norm(value: Any) -> str:
    if not (isinstance(value, Mapping) and "kind" in value):
        return plain(value)
    facts = {**value, **dict(value.get("options", ()))}
    rest = ", ".join(f"{key} {plain(item)}" for key, item in facts.items() if key not in ("kind", "options"))
    return f"{value['kind']} norm ({rest})" if rest else f"{value['kind']} norm"


def splits(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """name, count, and the smallest and largest class of each split."""
    rows = []
    for name, split in data["splits"].items():
        counts = list(split["per_class"].values())
        least, most = min(counts, default=0), max(counts, default=0)
        rows.append({"name": name, "count": split["count"], "least": least, "most": most})
    return rows


def sizes(data: Mapping[str, Any]) -> str:
    """The images' own sizes in a few words; empty where unknown."""
    native = data.get("native") or {}
    if not native:
        return ""
    smallest, largest = (f"{h} × {w}" for h, w in (native["smallest"], native["largest"]))
    return smallest if smallest == largest else f"{smallest} to {largest}"


def thumbnails(samples: Sequence[Sample]) -> list[dict[str, str | bool]]:
    """`uri`, `name` and whether the image is `small` (drawn with hard pixels) for each sample, at most 24; the page
    needs no other file."""
    return [{"name": name, "uri": _uri(image), "small": max(image.shape[:2]) <= SIDE} for name, image in samples[:MOST]]


@dataclass(frozen=True)
class ExampleTable:
    """columns: what each row shows, arms last; rows: an image's name, and a `uri` for each column, empty where there is
    none; legend: class -> its color."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    legend: Mapping[str, str]


def example_table(trials: Mapping[str, Sequence[Path]]) -> ExampleTable | None:
    """The examples of each arm's first trial that has any, base first; None where base has none.

    trials: arm -> the folders of its trials.
    """
    found = {}
    for arm, folders in trials.items():
        found[arm] = next((one for one in map(read_examples, folders) if one.ids), Examples())
    first = next(iter(found.values()))
    if not first.ids:
        return None
    shared = [name for name in first.panels[0] if name != "prediction"]
    rows = []
    for number, name in enumerate(first.ids):
        mine = [dict(zip(one.ids, one.panels, strict=True)).get(name, {}).get("prediction") for one in found.values()]
        cells = [*(first.panels[number][panel] for panel in shared), *mine]
        rows.append((name, tuple("" if cell is None else _uri(cell) for cell in cells)))
    return ExampleTable((*shared, *found), tuple(rows), first.legend or {})


def _uri(image: np.ndarray) -> str:
    from PIL import Image

    pixels = np.asarray(image, dtype=np.uint8)
    if pixels.ndim == 3 and pixels.shape[2] not in (3, 4):
        pixels = pixels[..., :3] if pixels.shape[2] > 3 else pixels[..., 0]
    img, buffer = Image.fromarray(pixels), io.BytesIO()
    small = max(img.size) <= SIDE
    # A small image is exact as PNG; a photograph is a tenth of that as JPEG.
    if small:
        img.save(buffer, "PNG", optimize=True)
    else:
        img.thumbnail((SIDE * 2, SIDE * 2))
        img.convert("RGB").save(buffer, "JPEG", quality=80)
    return f"data:image/{'png' if small else 'jpeg'};base64,{base64.b64encode(buffer.getvalue()).decode()}"
