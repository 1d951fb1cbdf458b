"""What a trained model says of sequences, one a line of text files."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vitmods.data.batch import Batch
from vitmods.data.records import printable
from vitmods.data.sequences import encode, padded_together
from vitmods.study.opened import Opened
from vitmods.tasks.base import Task
from vitmods.util.errors import UserError
from vitmods.util.limits import read_text

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def predict_sequences(
    opened: Opened, paths: Sequence[Path], task: Task, fabric: Fabric, top: int, batch_size: int
) -> list[dict[str, Any]]:
    """Of each line of text files that is not empty, named FILE:NUMBER, what the model says."""
    longest, words, sequences = int(opened.settings["img_size"][-1]), opened.vocabulary or (), {}
    for path in paths:
        try:
            lines = read_text(path).splitlines()
        except (OSError, ValueError) as error:
            raise UserError(f"{printable(str(path))} is no text file, with a sequence a line: {error}") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                name = f"{printable(str(path))}:{number}"
                sequences[name] = encode(line, words, name)
    if long := [name for name, tokens in sequences.items() if len(tokens) > longest]:
        warnings.warn(f"{len(long)} sequences are cut to {longest} tokens: {', '.join(long[:5])}", stacklevel=3)
    if not sequences:
        raise UserError("There is no sequence: give text files with one a line.")
    model, found = fabric.to_device(opened.model), list[dict[str, Any]]()
    for start in range(0, len(sequences), batch_size):
        names = list(sequences)[start : start + batch_size]
        tokens = padded_together([sequences[name][:longest] for name in names])
        index = torch.arange(len(names))
        with torch.inference_mode(), fabric.autocast():
            outputs = task.outputs(model, Batch(tokens, index, index).to(fabric.device))
        rows = task.predictions(outputs.cpu(), opened.classes or (), top)
        found += [{"image": name, **row} for name, row in zip(names, rows, strict=True)]
    return found
