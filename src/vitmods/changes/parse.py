"""Changes as the shell writes them: ``dpn``, ``placement(attn=post,mlp=pre+post)``, joined by +; and line-ups."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitmods.changes.base import REGISTRY, Change
from vitmods.util.errors import UserError, nearest
from vitmods.util.shorthand import split_form, split_outside


@dataclass(frozen=True)
class LineUp:
    """The arms of one published comparison, in short forms. ``base`` is its row without changes."""

    name: str
    title: str
    paper: str
    url: str
    base: str
    note: str
    others: Mapping[str, str]
    """arms that are no kinds of norm"""

    @property
    def arms(self) -> dict[str, str]:
        """Name -> changes: the kinds of norm that say that they stand in it, with the parameters of the comparison,
        and the others. What is exact elsewhere (``rms``) begins here on the same weights as the rest."""
        from vitmods.layers.norms import NORMS  # layers import torch

        kinds = [kind for kind in NORMS.values() if kind.lineup == self.name]
        exact = {"rms": "norm(kind=rms,exact=false)"}
        return {kind.name: exact.get(kind.name, kind.shorts[0]) for kind in kinds} | dict(self.others)


# Norms get the base's eps, DTN its own; the parameters are those of the released code: a gain for each channel in
# ScaleNorm, a group for each head in GroupNorm and PowerNorm, PowerNorm's warm-up of 3000 batches, SwitchableNorm
# with its batch branch, DTN before attention in ten twelfths of the blocks. RMSNorm is not in that table.
NORMS = LineUp(
    name="norms",
    title="Kinds of norm",
    paper="Shao et al.: Dynamic Token Normalization Improves Vision Transformers. ICLR 2022, Table 3; and RMSNorm",
    url="https://arxiv.org/abs/2112.02624",
    base="LayerNorm",
    note="All norms of the blocks, with the parameters of that table; dtn before attention in the first blocks.",
    others={"dtn": "dtn"},
)

LINEUPS = {lineup.name: lineup for lineup in (NORMS,)}


def parse_changes(text: str) -> tuple[Change, ...]:
    """The changes that a short form names, in order; "" and "base" name none.

    Raises UserError on an unknown change, field or value, naming the nearest known one.
    """
    text = text.strip()
    if text in ("", "base"):
        return ()
    return tuple(_parse_one(part) for part in split_outside(text, "+"))


def _parse_one(text: str) -> Change:
    form = split_form(text)
    if form is None:
        raise UserError(f"'{text}' is not a change. Write its short name, as in 'dpn' or 'dpn(before=false)'.")
    name, inside = form[0].lower(), form[1]
    if name in REGISTRY:
        return REGISTRY[name].from_settings(inside)
    known: dict[str, tuple[type[Change], Mapping[str, Any]]] = {}
    for kind in REGISTRY.values():
        known |= {short: (kind, values) for short, values in kind.short_forms.items()}
        if name in known:
            return kind.from_settings(inside, **known[name][1])
    if name in LINEUPS:
        raise UserError(
            f"'{name}' is a line-up, several arms of a study: it stands for itself, as in `vitmods compare --arms "
            f"{name}`. Here one of its changes can stand: {', '.join(LINEUPS[name].arms.values())}."
        )
    hint = nearest(name, [*REGISTRY, *known, *LINEUPS], REGISTRY.words)
    raise UserError(f"There is no change '{name}'. {hint} {REGISTRY.advice}")
