"""Line-ups: the arms of a study under one name, such as those of a published table (`paper:dpn-table6`).

Imports without torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vitmods.util.errors import UserError
from vitmods.util.registry import Registry


@dataclass(frozen=True)
class LineUp:
    """The arms of a study, and the settings that it has unless others are given.

    name: names the study's folder.
    title: what it compares, for people.
    arms: each as text, `NAME=CHANGES`.
    bases: models, with patches for images of 224 pixels.
    sweep: field -> values, besides the bases.
    start: the trained weights that it needs; empty: none.
    """

    name: str
    title: str
    arms: tuple[str, ...]
    bases: tuple[str, ...]
    task: str = "classification"
    metric: str | None = None
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    start: str = ""

    def scaled(self, patch: int = 16) -> list[str]:
        """The bases for smaller images, where the side of a patch is `patch` and not 16: S/32 becomes S/4 for 2. Models
        of other libraries stay as they are."""

        def smaller(side: re.Match[str]) -> str:
            return f"/{max(1, int(side[1]) * patch // 16)}"

        return [base if ":" in base else re.sub(r"/(\d+)$", smaller, base) for base in self.bases]

    def settings(self, patch: int = 16) -> dict[str, Any]:
        """Arguments of `vitmods.Study` besides data, recipe and seeds."""
        bases = self.scaled(patch)
        sweep = {"base": bases} if len(bases) > 1 else {}
        sweep |= {name: list(values) for name, values in self.sweep.items()}
        settings = {"arms": list(self.arms), "task": self.task, "sweep": sweep, "metric": self.metric}
        return settings | ({} if self.start else {"base": bases[0]})


LINE_UPS: Registry[Callable[[str], LineUp | None]] = Registry("kind of line-up", "vitmods.papers.table")
"""kind -> a function that finds the line-up of a text. It returns None for other texts, and raises UserError where the
text names none of this kind."""


_VIT5 = {
    "rms": "norm(kind=rms,exact=false)",
    "layerscale": "layerscale",
    "qknorm": "qknorm(norm=rms)",
    "nobias": "nobias",
    "registers": "registers",
    "rope": "rope(base=10000)",
    "registers-turn": "rope(base=10000,register_base=100)",
}


@LINE_UPS.register("vit5")
def _vit5(text: str) -> LineUp | None:
    """ViT-5 (Wang et al., 2026) whole, each of its parts alone, and each left out. Registers turn with the rotary
    positions, so that these, and registers, are alone and whole beside that part."""
    if text != "vit5":
        return None

    def join(*names: str) -> str:
        names = tuple(name for name in names if name != "rope" or "registers-turn" not in names)
        return "+".join(_VIT5[name] for name in names)

    arms = [f"vit5={join(*_VIT5)}"]
    for name in _VIT5:
        others = [other for other in _VIT5 if other != name]
        if name == "registers-turn":
            arms += [f"{name}={join('registers', name)}", f"without-{name}={join(*others)}"]
            continue
        if name in ("registers", "rope"):  # without one of the two nothing is left to turn
            others.remove("registers-turn")
        arms += [f"{name}={join(name)}", f"without-{name}={join(*others)}"]
    return LineUp("vit5", "ViT-5, each of its parts alone, and each left out", tuple(arms), ("S/16",))


def find_line_up(text: str) -> LineUp | None:
    """The line-up that a text names; None for anything else."""
    return next((line_up for find in LINE_UPS.values() if (line_up := find(text.strip()))), None)


def refuse_line_ups(text: str) -> None:
    """Raise UserError where one of several changes, joined by +, is a line-up."""
    for part in text.split("+"):
        if line_up := find_line_up(part):
            name = part.strip()
            raise UserError(
                f"'{name}' is a line-up, several arms of a study: use it alone, as in `vitmods compare --arms {name}`, "
                f"or choose one of its arms here: {', '.join(line_up.arms)}."
            )
