"""check: look at a set without training, for `vitmods data FOLDER`."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.cells import cell_len

from vitmods.data.build import build
from vitmods.data.dataset import Split
from vitmods.data.geometry import Geometry
from vitmods.data.sources import open_source
from vitmods.data.splits import make_splits
from vitmods.data.store import Store
from vitmods.data.summary import facts, problems, unreadable_text

_THUMB = Geometry((8, 8))


class Checked(NamedTuple):
    """summary: as ImageDataset.summary(), with "problems" that would stop a study; text: the same to read."""

    summary: dict[str, Any]
    text: str

    @property
    def fit(self) -> bool:
        """Whether a study could train on it as it is; an evaluation set is fit to be evaluated on."""
        return not self.summary["problems"] and not self.summary["unreadable"]


def check(spec: str | Path, *, split_seed: int = 0, val_fraction: float = 0.1, test_fraction: float = 0.1) -> Checked:
    """Read every image of a set and say what is there. Raises UserError only where nothing can be opened."""
    source = open_source(spec)
    records, origin = make_splits(source, split_seed, val_fraction, test_fraction)
    splits = {}
    for name, part in records.items():
        with open(os.devnull, "wb") as nowhere:
            index = build(part, _THUMB, 3, nowhere)
        kept = part.take(index.kept)
        store = Store(np.empty(0, np.uint8), index)
        splits[name] = Split(name, kept.ids, kept.labels, store, _THUMB, kept.label_sets)
    found = problems(source, splits) + (source.verify() if source.verify else [])
    summary = facts(source, records, splits, origin) | {"problems": found}
    return Checked(summary, describe(summary))


def describe(summary: dict[str, Any]) -> str:
    """A table of classes and splits, then sizes, warnings, unreadable images and problems."""
    splits = summary["splits"]
    head = ["class", *splits]
    rows = [[name, *(str(splits[s]["per_class"][name]) for s in splits)] for name in summary["classes"]]
    rows.append(["all", *(str(splits[s]["count"]) for s in splits)])
    widths = [max(cell_len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [f"{summary['name']}: {len(summary['classes'])} classes; splits {summary['split_origin']}", ""]
    lines += [_line(row, widths) for row in [head, ["-" * w for w in widths], *rows]]
    if summary["native"]:
        native = summary["native"]
        sizes = ", ".join(f"{key} {_size(native[key])}" for key in ("smallest", "median", "largest"))
        common = f"most common {_size(native['most_common'])} ({native['most_common_count']})"
        lines += ["", f"Height x width: {sizes}; {common}"]
    lines += [f"Warning: {text}" for text in summary["warnings"]]
    lines += [unreadable_text(summary["unreadable"])] if summary["unreadable"] else []
    lines += [f"Problem: {text}" for text in summary["problems"]]
    return "\n".join(lines)


def _line(cells: list[str], widths: list[int]) -> str:
    rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
    return "  ".join([cells[0] + " " * (widths[0] - cell_len(cells[0])), *rest])


def _size(size: list[int]) -> str:
    return f"{size[0]} x {size[1]}"
