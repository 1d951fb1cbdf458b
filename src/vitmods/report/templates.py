"""Templates of the pages, and how settings, configs, sample images and text become HTML."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from vitmods.report import text
from vitmods.stats.tables import signed
from vitmods.study.store import Sample
from vitmods.train.trial import Examples, read_examples
from vitmods.util.text import flatten, plural

SIDE = 96  # longest side of a small image in pixels, enough for a tile on a dense screen
MOST_SAMPLES = 24


@cache
def templates(package: str = "vitmods.report") -> Environment:
    """Open the templates of a package and those of reports: all text is escaped, and a missing value is an error."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name, ".") for name in dict.fromkeys((package, "vitmods.report"))]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(breakable=breakable, code=code, sentence=sentence)
    css = Markup((Path(__file__).parent / "style.css").read_text(encoding="utf-8"))
    environment.globals.update(
        css=css, text=text, plural=plural, signed=signed, link=link,
        flat=flat, split_sizes=split_sizes, image_sizes=image_sizes, thumbnails=thumbnails,
    )  # fmt: skip
    return environment


def breakable(name: str) -> Markup:
    """Let a narrow column break a name after its punctuation, not within a word."""
    return Markup("<wbr>").join(re.split(r"(?<=[,+._])|(?<=\w\()", name))


def code(words: str) -> Markup:
    """Escape text and mark `x` as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(words))))


def sentence(words: str) -> str:
    """Start text with a capital letter and keep the others, unlike `capitalize`."""
    return words[:1].upper() + words[1:]


def link(url: str) -> str | None:
    """Return the address of a citation if a browser may follow it."""
    return url if url.startswith(("https://", "http://")) else None


def flat(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, value) pairs of a nested mapping."""
    return ((name, _plain(value)) for name, value in (flatten(values) if values else {}).items())


def _plain(value: Any) -> str:
    """Write a JSON value for people."""
    if value is None or value in ({}, [], ()):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    return str(value)


def _norm(value: Any) -> str:
    if not (isinstance(value, Mapping) and "kind" in value):
        return _plain(value)
    options = {**value, **dict(value.get("options", ()))}
    words = ", ".join(f"{key} {_plain(item)}" for key, item in options.items() if key not in ("kind", "options"))
    return f"{value['kind']} norm ({words})" if words else f"{value['kind']} norm"


def differences(base: Mapping[str, Any], arm: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str, str]]:
    """Return (setting, base's value, the arm's) wherever two configs differ; a norm counts as one value.

    Empty if either is not a vitmods ViT: their modules are listed in a table instead.
    """
    if "modules" in base or "modules" in arm:
        return []
    rows = []
    for key in dict.fromkeys([*base, *arm]):
        old, new = base.get(key), arm.get(key)
        is_norm = key.endswith("_norm") or key in ("before", "inner", "branch", "after")
        if isinstance(new, Mapping) and isinstance(old, Mapping | None) and not is_norm:
            rows += differences(old or {}, new, f"{prefix}{key}.")
        elif old != new:
            rows.append((f"{prefix}{key}", _norm(old), _norm(new)))
    return rows


def split_sizes(data: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield the name of each split, and the images in it, in its smallest class, and in its largest class."""
    for name, split in data["splits"].items():
        counts = list(split["per_class"].values())
        yield name, (split["count"], min(counts, default=0), max(counts, default=0))


def image_sizes(data: Mapping[str, Any]) -> str:
    """`480 × 640`, or the smallest and the largest size; empty if unknown."""
    native = data.get("native") or {}
    return " to ".join(
        dict.fromkeys(f"{h} × {w}" for h, w in (native[key] for key in ("smallest", "largest") if native))
    )


def thumbnails(samples: Sequence[Sample]) -> list[dict[str, str | bool]]:
    """Return `uri`, `name` and `small` (show hard pixels) of the first samples."""
    return [
        {"name": name, "uri": _uri(image), "small": max(image.shape[:2]) <= SIDE}
        for name, image in samples[:MOST_SAMPLES]
    ]


class ExampleTable(NamedTuple):
    """columns: what each row shows, arms last; rows: an image's name, and a `uri` or nothing for each column;
    legend: class -> its color."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    legend: Mapping[str, str]


def example_table(trials: Mapping[str, Sequence[Path]]) -> ExampleTable | None:
    """Return the examples of each arm's first trial that saved any, base first; None if base saved none.

    trials: arm -> the folders of its trials.
    """
    examples = {
        arm: next((saved for saved in map(read_examples, folders) if saved.ids), Examples())
        for arm, folders in trials.items()
    }
    base = next(iter(examples.values()))
    if not base.ids:
        return None
    shared = [name for name in base.panels[0] if name != "prediction"]
    predictions = [dict(zip(saved.ids, saved.panels, strict=True)) for saved in examples.values()]
    rows = []
    for panels, name in zip(base.panels, base.ids, strict=True):
        cells = [
            *(panels[panel] for panel in shared),
            *(prediction.get(name, {}).get("prediction") for prediction in predictions),
        ]
        rows.append((name, tuple("" if cell is None else _uri(cell) for cell in cells)))
    return ExampleTable((*shared, *examples), tuple(rows), base.legend or {})


def _uri(image: np.ndarray) -> str:
    """Encode an image: a small one exactly as PNG, a photograph as JPEG, which takes a tenth of that."""
    from PIL import Image

    pixels = np.asarray(image, dtype=np.uint8)
    if pixels.ndim == 3 and pixels.shape[2] not in (3, 4):
        pixels = pixels[..., :3] if pixels.shape[2] > 3 else pixels[..., 0]
    img, buffer = Image.fromarray(pixels), io.BytesIO()
    small = max(img.size) <= SIDE
    if small:
        img.save(buffer, "PNG", optimize=True)
    else:
        img.thumbnail((SIDE * 2, SIDE * 2))
        img.convert("RGB").save(buffer, "JPEG", quality=80)
    return f"data:image/{'png' if small else 'jpeg'};base64,{base64.b64encode(buffer.getvalue()).decode()}"
