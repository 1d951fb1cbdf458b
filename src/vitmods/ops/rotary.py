"""The settings of rotary positions; a file without torch, since to describe a model needs none."""

from dataclasses import dataclass
from typing import Literal

from vitmods.util.errors import UserError
from vitmods.util.fields import check_types


@dataclass(frozen=True)
class RopeConfig:
    """The geometry of rotary positions.

    Args:
        frequencies: "axial" or "mixed".
        base: of the frequencies.
        pairs: "interleaved" for channels (2i, 2i + 1), "halved" for channels (i, i + D/2).
        coordinates: "index" counts tokens from ``offset`` on; "centered" has their centers, moved by ``offset`` tokens,
            between -2 pi and 2 pi (DINOv3).
        columns_first: x takes y's place and the reverse.
        reference: (rows, columns) to which the indexes of any grid are stretched; None leaves them as they are.
        register_base: with it, registers turn as a square grid of indexes; None: they do not turn.
    """

    frequencies: Literal["axial", "mixed"] = "axial"
    base: float = 100.0
    pairs: Literal["interleaved", "halved"] = "interleaved"
    coordinates: Literal["index", "centered"] = "index"
    offset: float = 0.0
    columns_first: bool = False
    reference: tuple[int, int] | None = None
    register_base: float | None = None

    def __post_init__(self) -> None:
        if self.reference is not None:
            object.__setattr__(self, "reference", tuple(self.reference))
        check_types(self)
        for name in ("base", "register_base"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise UserError(f"The {name} of rotary positions must be positive, got {getattr(self, name)}.")
        if self.frequencies == "mixed" and self.register_base is not None:
            raise UserError("Registers turn (register_base) only with axial frequencies: leave one of them out.")
