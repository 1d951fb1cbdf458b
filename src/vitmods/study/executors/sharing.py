"""How many trials share a GPU: as many as its memory holds, if that was measured to be worth it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from vitmods.study.cells import Cell, Trial

WORTHWHILE = 1.1  # times the images of half as many trials in the same time
WHOLE_ROWS = 2  # of metrics.jsonl: the first one may have begun before the others were at work


def mps_runs() -> bool:
    """Whether NVIDIA's Multi-Process Service runs here: processes that CUDA then connects to it compute at once."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists()


@dataclass
class Sharing:
    """Tries one trial on each GPU, then two, then four, and goes back where more take more time in all.

    Nothing is run for this: the speed of trials is in their metrics.jsonl. A trial is compared with those of its own
    cell, so a slow arm does not count as a slow GPU. Trials that are at work stay.

    gpus, most: how many there are, and the trials that fit each
    row: the last row of a trial's metrics.jsonl
    tell: is told how many trials may run, and a line for people where something was measured
    """

    gpus: int
    most: int
    row: Callable[[Trial], Mapping[str, Any]]
    tell: Callable[[int, str], None]
    on_each: int = 1
    _before: int = 0
    _is_settled: bool = False
    _rows: dict[Trial, tuple[int, int]] = field(default_factory=dict)  # step of the last row, new rows
    _speeds: dict[tuple[Cell, int], float] = field(default_factory=dict)  # cell, trials on a GPU -> images per second

    @property
    def limit(self) -> int:
        """Trials at a time, on all GPUs."""
        return self.gpus * self.on_each

    def look(self, running: Collection[Trial]) -> None:
        """Read how fast the trials are; go on or back once that is known."""
        if self._is_settled or self.on_each == self.most == 1:
            return
        rows = {trial: self.row(trial) for trial in running}
        if len(rows) < self.limit or not all(rows.values()):
            self._rows.clear()  # they are not all at work
            return
        for trial, row in rows.items():
            step, new = self._rows.get(trial, (row["step"], 0))
            if row["step"] > step and "images_per_s" in row:
                step, new = row["step"], new + 1
                if new >= WHOLE_ROWS:
                    self._speeds[trial.cell, self.on_each] = row["images_per_s"]
            self._rows[trial] = step, new
        cells = {cell for cell, on_each in self._speeds if on_each == self.on_each}
        ratios = [
            self._speeds[cell, self.on_each] / self._speeds[cell, self._before]
            for cell in cells
            if (cell, self._before) in self._speeds
        ]
        if not (ratios if self._before else cells):
            return
        gain = self.on_each / self._before * fmean(ratios) if ratios else WORTHWHILE
        line = ""
        if ratios:
            line = f"{self.on_each} trials on a GPU are {gain:.2g} times as fast as {self._before}."
            if not mps_runs():
                line += " NVIDIA's MPS, which lets them compute at the same time, does not run (docs/clusters.md)."
        if gain < WORTHWHILE:
            self.on_each, self._is_settled = self._before, True
        elif self.on_each == self.most:
            self._is_settled = True
        else:
            self._before, self.on_each = self.on_each, min(2 * self.on_each, self.most)
        self._rows.clear()
        self.tell(self.limit, line)
