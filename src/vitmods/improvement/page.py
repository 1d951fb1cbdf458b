"""The page of an improvement: before and after, what it costs, what was tried, and how to use the model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from vitmods.report import text
from vitmods.report.figures import Inliner, forest
from vitmods.report.templates import templates
from vitmods.study.arms import make_arms
from vitmods.util.address import named
from vitmods.util.files import write_atomically
from vitmods.util.registry import plugin_options

if TYPE_CHECKING:
    from vitmods.improvement.improve import Improvement
    from vitmods.study.answer import Answer

PAGE = "report.html"


def write_page(found: Improvement) -> Path:
    """Write report.html in the folder of an improvement; returns its path."""
    answer = found.confirmed or found.screen
    confirmed = found.confirmed if found.effect else None
    cost, inline = confirmed.arms[0].cost if confirmed else None, Inliner()
    page = templates("vitmods.improvement").get_template("page.html").render(
        found=found, answer=answer, confirmed=confirmed, cost=cost, metric=answer.metric,
        confirmed_plot=_plots(confirmed, inline) if confirmed else (),
        screened_plot=_plots(found.screen, inline) if found.screen.complete else (),
        trials=sum(trial.ended for _, study in _studies(found) for trial in study.trials),
        pages=[(title, _beside(found, study)) for title, study in _studies(found)],
        tried=[(one, {arm.name for arm in make_arms([one.change])} <= found.chosen) for one in found.candidates],
        commands=_commands(found), command=found.screen.command,
    )  # fmt: skip
    path = found.path / PAGE
    write_atomically(path, lambda file: file.write(page.encode()))
    return path


def _plots(answer: Answer, inline: Inliner) -> list[str]:
    """For wide and for narrow screens."""
    effects = text.plotted_effects(answer)
    return [forest(effects, answer.margin, answer.metric, inline, narrow) for narrow in (False, True)]


def _studies(found: Improvement) -> list[tuple[str, Answer]]:
    screen = [("The screen: every candidate, judged on val", found.screen)]
    return screen + [("The confirmation: fresh seeds, judged on test", found.confirmed)] * bool(found.confirmed)  # type: ignore[list-item]


def _beside(found: Improvement, answer: Answer) -> str:
    return (answer.path / PAGE).relative_to(found.path).as_posix()


def _commands(found: Improvement) -> list[tuple[str, str]]:
    if found.model is None:
        return []
    folder, plugins = named(found.model), plugin_options()
    words = {
        "Name the classes of images": ["predict", folder, "path/to/images"],
        "Write it for other programs": ["export", folder, "--to", "onnx"],
        "Measure it on other images": ["evaluate", folder, "--data", "path/to/images"],
    }
    return [(title, shlex.join(["vitmods", *rest, *plugins])) for title, rest in words.items()]
