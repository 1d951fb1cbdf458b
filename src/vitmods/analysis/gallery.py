"""Figures of models as a page and as files: SVG, PDF, PNG, and their numbers as CSV."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from vitmods.analysis import FIGURES, Examined, FigureKind, NotHere
from vitmods.analysis.examine import arms_of
from vitmods.analysis.figure import Arrays, note_missing
from vitmods.report.figures import FORMATS, Inliner, save_figure
from vitmods.report.page import SECTIONS, Section
from vitmods.report.templates import templates
from vitmods.study.answer import Answer
from vitmods.util.remote import write_output
from vitmods.util.text import grouped

WIDEST = 400
"""Width in pixels above which figures scroll instead of shrinking on narrow screens."""
FEW = 6


@dataclass(frozen=True)
class Shown:
    """A figure on a page: its drawing, why models are missing, and its numbers as CSV."""

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
    """A written page, its figures, and (kind, reason) of the missing ones."""

    page: Path
    figures: tuple[Shown, ...]
    missing: tuple[tuple[FigureKind, str], ...]


def draw_figures(
    kinds: Iterable[FigureKind], models: Sequence[Examined], inline: Inliner
) -> tuple[list[Shown], list[Any]]:
    """Return the figures that these models allow, and (kind, reason) of the others."""
    figures: list[Shown] = []
    missing: list[tuple[FigureKind, str]] = []
    for kind in kinds:
        arrays, why = kind.of(*models)
        try:
            drawn = kind.draw(arrays) if arrays else None
        except NotHere as reason:
            drawn, why = None, {"": str(reason)}
        if drawn is None:
            reasons = grouped(why.items())
            words = (f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
            missing.append((kind, " ".join(reasons if len(reasons) == 1 else words)))
            continue
        note_missing(drawn, why)
        svg = str(inline(drawn, alternative(kind, arrays)))
        svg = svg.replace('class=""', f'style="width: {round(drawn.get_figwidth() * 72)}px"', 1)
        figures.append(Shown(kind, Markup(svg), why, kind.csv(arrays), drawn))
    return figures, missing


def alternative(kind: FigureKind, models: Mapping[str, Arrays]) -> str:
    """Describe a figure in words: the numbers of each model, or their range if there are many."""
    parts = []
    for name, arrays in models.items():
        values = {part: v.double().cpu().numpy() for part, v in arrays.items() if part not in kind.columns}
        if all(v.ndim == 0 for v in values.values()):
            text = ", ".join(f"{part} {float(v):.3g}" for part, v in values.items() if np.isfinite(v))
        else:
            ranges = {"": np.concatenate([v.ravel() for v in values.values()])} if len(values) > FEW else values
            text = ", ".join(f"{part} from {v.min():.3g} to {v.max():.3g}".strip() for part, v in ranges.items())
        parts.append(f"{name}: {text}")
    return f"{kind.title}, {kind.columns[-1]}. {'; '.join(parts)}."


def write_gallery(
    title: str, kinds: Sequence[FigureKind], models: Sequence[Examined], folder: Path, every: bool = False
) -> Gallery:
    """Draw the figures into a folder: index.html, and .svg, .pdf, .png and .csv of each under its name.

    `every`: no figure was asked for by name, so figures that compare scores are not reported as missing.

    Raises:
        UserError: the folder cannot be written.
    """
    figures, missing = draw_figures(kinds, models, Inliner())
    missing = [(kind, reason) for kind, reason in missing if not (every and kind.needs == "scores")]
    page = folder / "index.html"
    values = {"title": title, "shown": figures, "missing": missing, "models": models}
    write_output(page, templates("vitmods.analysis").get_template("gallery.html").render(values, files=True).encode())
    for figure in figures:
        write_output(folder / f"{figure.kind.name}.csv", figure.csv.encode())
        for kind in FORMATS:
            save_figure(figure.drawn, folder / f"{figure.kind.name}.{kind}")
    return Gallery(page, tuple(figures), tuple(missing))


def inside_the_models(answer: Answer, inline: Inliner) -> str:
    """Render figures of what trainings recorded and of weights; empty if there are neither."""

    def shows_weights(config: Mapping[str, Any]) -> bool:
        # Norms on patches, dynamic token norms and positions in attention; other models need not be read.
        stem = config.get("stem") or {}
        return bool(stem.get("before") or config.get("positional") or "'dynamic_token'" in str(config))

    kinds = [kind for kind in FIGURES.values() if kind.needs in ("record", "weights")]
    figures, _ = draw_figures(kinds, list(arms_of(answer, opens=shows_weights)), inline)
    return templates("vitmods.analysis").get_template("inside.html").render(figures=figures) if figures else ""


SECTIONS.add("inside", Section("models", inside_the_models))
