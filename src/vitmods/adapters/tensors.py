"""Which tensor of a foreign model became which of ours: nothing is missing, and nothing is left over unseen."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vitmods.util.errors import UserError

_BLOCK = re.compile(r"((?:blocks|layers?|encoder_layer|encoderblock)[._])\d+")


@dataclass(frozen=True)
class Layout:
    """How one of our tensors is kept elsewhere: ``read`` makes it from theirs, ``write`` is the inverse."""

    read: Callable[..., Tensor]
    write: Callable[[Tensor], tuple[Tensor, ...]]


SAME = Layout(lambda x: x, lambda x: (x,))
TRANSPOSED = Layout(lambda x: x.T, lambda x: (x.T,))
STACKED = Layout(lambda q, k, v: torch.cat([q, k, v]), lambda x: x.chunk(3))
"""Query, key and value are tensors of their own there; ours is one with the three below each other."""


@dataclass(frozen=True)
class Row:
    """One of our tensors, by name, and the foreign tensors that it is made of."""

    ours: str
    theirs: tuple[str, ...]
    layout: Layout = SAME


def rows_of(ours: str, *theirs: str, layout: Layout = SAME, bias: bool = True) -> list[Row]:
    """The rows of a module with a weight and, unless reported otherwise, a bias."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return [Row(f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs), layout) for kind in kinds]


def group_blocks(lines: Iterable[str]) -> list[str]:
    """Lines that differ in the number of a block alone become one."""
    counts = Counter(_BLOCK.sub(r"\1*", line) for line in lines)
    return [f"{line}  ({count}x)" if count > 1 else line for line, count in counts.items()]


@dataclass(frozen=True)
class Coverage:
    """What became of every tensor of a foreign model; prints as a table."""

    source: str
    rows: tuple[Row, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    """(foreign tensor, why it takes no part)"""
    assumed: tuple[str, ...] = ()
    """settings that the source does not tell"""

    def __str__(self) -> str:
        went = group_blocks([f"{' + '.join(row.theirs)} -> {row.ours}" for row in self.rows])
        left = group_blocks([f"left out: {name} ({reason})" for name, reason in self.left_out])
        count = sum(len(row.theirs) for row in self.rows)
        head = f"{self.source}: {count} tensors read, {len(self.left_out)} left out, none missing"
        return "\n".join([head, *went, *left, *(f"assumed: {setting}" for setting in self.assumed)])


def read_tensors(
    source: str,
    rows: Iterable[Row],
    theirs: Mapping[str, Tensor],
    left_out: Mapping[str, str] | None = None,
    assumed: Iterable[str] = (),
) -> tuple[dict[str, Tensor], Coverage]:
    """Our tensors from the foreign ones, and the account of all of them.

    ``left_out`` names foreign tensors that take no part, with the reason. Raises UserError that lists what is missing
    and what has no place here.
    """
    rows, left_out = tuple(rows), left_out or {}
    wanted = {name for row in rows for name in row.theirs}
    missing = sorted(wanted - theirs.keys())
    surplus = sorted(theirs.keys() - wanted - left_out.keys())
    problems = [
        f"{what}: {', '.join(group_blocks(names))}"
        for what, names in (("missing", missing), ("without a place here", surplus))
        if names
    ]
    if problems:
        raise UserError(f"{source} cannot be read exactly. Tensors {'; tensors '.join(problems)}.")
    weights = {row.ours: row.layout.read(*(theirs[name] for name in row.theirs)) for row in rows}
    return weights, Coverage(source, rows, tuple(left_out.items()), tuple(assumed))


def write_tensors(rows: Iterable[Row], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The foreign tensors from ours, contiguous; the inverse of ``read_tensors``."""
    return {
        name: part.contiguous()
        for row in rows
        for name, part in zip(row.theirs, row.layout.write(ours[row.ours]), strict=True)
    }
