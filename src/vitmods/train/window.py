"""Statistics of the last steps, left on the device until a row is logged: reading a number waits for the device."""

import math
from operator import itemgetter

import torch
from torch import Tensor

_MUST_BE_FINITE = {"loss": "loss", "grad_norm": "gradient"}


class Diverged(Exception):
    """A loss or a gradient was not finite: an outcome of the trial, not a fault of the program."""


class Window:
    """0-d statistics by name, one dict a step."""

    def __init__(self) -> None:
        self._steps: list[dict[str, Tensor]] = []
        self.images = 0

    def add(self, statistics: dict[str, Tensor], images: int) -> None:
        self._steps.append(statistics)
        self.images += images

    def take(self, step: int) -> dict[str, float]:
        """Means over the steps, the last of which was number `step`; empties the window.

        Raises:
            Diverged: a loss or gradient norm among them is not finite; names the first such step.
        """
        columns, count = self._columns(), len(self._steps)
        self._steps, self.images = [], 0
        bad = [
            (i, words)
            for name, words in _MUST_BE_FINITE.items()
            for i, value in enumerate(columns.get(name, []))
            if not math.isfinite(value)
        ]
        if bad:
            first, words = min(bad, key=itemgetter(0))
            raise Diverged(f"the {words} was not finite at step {step - count + 1 + first}")
        return {name: math.fsum(values) / count for name, values in columns.items()}

    def state_dict(self) -> dict[str, list[float]]:
        return self._columns()

    def load_state_dict(self, columns: dict[str, list[float]], device: torch.device) -> None:
        rows = zip(*columns.values(), strict=True)
        self._steps = [
            {name: torch.tensor(value, device=device) for name, value in zip(columns, row, strict=True)} for row in rows
        ]

    def _columns(self) -> dict[str, list[float]]:
        if not self._steps:
            return {}
        names = list(self._steps[0])
        table = torch.stack([torch.stack([step[name].float() for name in names]) for step in self._steps])
        return dict(zip(names, table.T.tolist(), strict=True))
