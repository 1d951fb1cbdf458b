"""Figures of models as a page and as files: SVG, PNG, and the numbers as CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from vitmods.analysis import FIGURES, Examined, FigureKind, NotHere
from vitmods.analysis.figure import Arrays
from vitmods.report.svg import Inliner, fixed_settings, standalone
from vitmods.report.templates import templates
from vitmods.study.answer import Answer
from vitmods.study.examine import arms_of
from vitmods.util.files import make_folder, write_atomically
from vitmods.util.text import grouped

WIDEST = 460
"""pixels; wider figures are scrolled where there is no room for them, others shrink"""
FEW = 6
_PIXELS_PER_INCH = 144


@dataclass(frozen=True)
class Shown:
    """A figure as a page has it: drawing, the reasons why it lacks models, and its numbers as CSV."""

    kind: FigureKind
    svg: Markup
    why_not: Mapping[str, str]
    csv: str
    drawn: Any

    @property
    def is_wide(self) -> bool:
        return bool(self.drawn.get_figwidth() * 72 > WIDEST)


@dataclass(frozen=True)
class Gallery:
    """What was written: the page, the figures on it, and why there are no others."""

    page: Path
    shown: tuple[Shown, ...]
    missing: tuple[tuple[FigureKind, str], ...]


def shown(kinds: Iterable[FigureKind], models: Sequence[Examined], inline: Inliner) -> tuple[list[Shown], list[Any]]:
    """The figures that can be made of the models, and (kind, why not) of the others."""
    found: list[Shown] = []
    missing: list[tuple[FigureKind, str]] = []
    for kind in kinds:
        arrays, why = kind.of(*models)
        try:
            drawn = kind.draw(arrays) if arrays else None
        except NotHere as reason:
            drawn, why = None, {"": str(reason)}
        if drawn is None:
            missing.append((kind, _reasons(why)))
            continue
        width = round(drawn.get_figwidth() * 72)
        svg = str(inline(drawn, alternative(kind, arrays)))
        svg = svg.replace('class=""', f'style="width: {width}px"', 1)
        found.append(Shown(kind, Markup(svg), why, kind.csv(arrays), drawn))
    return found, missing


def _reasons(why: Mapping[str, str]) -> str:
    """Each once, with the models that it is of where there are several reasons."""
    by_reason = grouped(why.items())
    if len(by_reason) == 1:
        return next(iter(by_reason))
    return " ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())


def alternative(kind: FigureKind, found: Mapping[str, Arrays]) -> str:
    """The figure in words: of each model its numbers, or where they are many their range, of each part if these are
    few."""
    parts = []
    for name, arrays in found.items():
        values = {part: v.double().cpu().numpy() for part, v in arrays.items() if part not in kind.columns}
        if all(v.ndim == 0 for v in values.values()):
            text = ", ".join(f"{part} {float(v):.3g}" for part, v in values.items() if np.isfinite(v))
        else:
            every = {"": np.concatenate([v.ravel() for v in values.values()])} if len(values) > FEW else values
            text = ", ".join(f"{part} from {v.min():.3g} to {v.max():.3g}".strip() for part, v in every.items())
        parts.append(f"{name}: {text}")
    return f"{kind.title}, {kind.columns[-1]}. {'; '.join(parts)}."


def write_gallery(
    title: str, kinds: Sequence[FigureKind], models: Sequence[Examined], folder: Path, every: bool = False
) -> Gallery:
    """Draw the figures into a folder: index.html, and .svg, .png and .csv of each under its name.

    `every`: none was asked for by its name, so those that compare scores are not missed in a study of other things.

    Raises:
        UserError: the folder cannot be written.
    """
    make_folder(folder)
    found, missing = shown(kinds, models, Inliner())
    missing = [one for one in missing if not (every and one[0].needs == "scores")]
    for one in found:
        write_atomically(folder / f"{one.kind.name}.csv", _bytes(one.csv))
        write_atomically(folder / f"{one.kind.name}.svg", _bytes(standalone(one.drawn)))
        with fixed_settings():
            write_atomically(folder / f"{one.kind.name}.png", _png(one.drawn))
    page = folder / "index.html"
    known = {"title": title, "shown": found, "missing": missing, "models": models}
    write_atomically(page, _bytes(templates().get_template("gallery.html").render(known, files=True)))
    return Gallery(page, tuple(found), tuple(missing))


def inside_the_models(answer: Answer, inline: Inliner) -> list[Shown]:
    """What the report of a study shows of its models: what their trainings recorded, and what their weights alone tell;
    nothing where there is neither."""
    kinds = [kind for kind in FIGURES.values() if kind.needs in ("record", "weights")]
    return shown(kinds, list(arms_of(answer, opens=_has_what_weights_tell)), inline)[0]


def _has_what_weights_tell(config: Mapping[str, Any]) -> bool:
    """Whether a model of this config has a norm on patches, dynamic token norms or positions in attention: others need
    not be read."""
    text = str(config)
    stem = config.get("stem") or {}
    return bool(stem.get("before") or config.get("positional") or "'dynamic_token'" in text)


def _bytes(text: str) -> Callable[[Any], Any]:
    return lambda file: file.write(text.encode())


def _png(drawn: Any) -> Callable[[Any], Any]:
    return lambda file: drawn.savefig(file, format="png", dpi=_PIXELS_PER_INCH, metadata={"Software": None})
