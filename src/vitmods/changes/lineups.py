"""Line-ups: what a paper compares with one another, as arms under one name."""

from collections.abc import Mapping
from dataclasses import dataclass

from vitmods.util.errors import UserError


@dataclass(frozen=True)
class LineUp:
    """The arms of one published comparison, in short forms. ``base`` is its row without changes."""

    name: str
    title: str
    paper: str
    url: str
    base: str
    arms: Mapping[str, str]
    note: str


# Norms get the base's eps, DTN its own; the parameters are those of the released code: a gain for each channel in
# ScaleNorm, a group for each head in GroupNorm and PowerNorm, PowerNorm's warm-up of 3000 batches, SwitchableNorm
# with its batch branch, DTN before attention in ten twelfths of the blocks. RMSNorm is not in that table. It is here as
# the others are, another norm on the same initial weights: the exact `rms` begins as the base's own function.
NORMS = LineUp(
    name="norms",
    title="Kinds of norm",
    paper="Shao et al.: Dynamic Token Normalization Improves Vision Transformers. ICLR 2022, Table 3; and RMSNorm",
    url="https://arxiv.org/abs/2112.02624",
    base="LayerNorm",
    arms={
        "rms": "norm(kind=rms,exact=false)",
        "scale": "scalenorm",
        "power": "powernorm",
        "batch": "batchnorm",
        "instance": "instancenorm",
        "group": "groupnorm",
        "switchable": "switchnorm",
        "dtn": "dtn",
    },
    note="All norms of the blocks, with the parameters of that table; dtn before attention in the first blocks.",
)

LINEUPS = {lineup.name: lineup for lineup in (NORMS,)}


def refuse_lineup(name: str) -> None:
    """Raises UserError where a line-up is named in the place of a change."""
    if name in LINEUPS:
        arms = ", ".join(LINEUPS[name].arms.values())
        raise UserError(
            f"'{name}' is a line-up, several arms of a study: it stands for itself, as in `vitmods compare --arms "
            f"{name}`. Here one of its changes can stand: {arms}."
        )
