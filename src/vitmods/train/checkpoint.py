"""Checkpoints: one file and the good one before it, verified when read."""

import math
import os
import shutil
import warnings
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from vitmods.util.errors import UserError
from vitmods.util.files import disk_errors, write_atomically
from vitmods.util.limits import check_zip

NAME, PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"
DIVIDED = "checkpoint"  # the folder of those that several processes write together (`vitmods.train.sharded`)


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write `folder/checkpoint.pt`; the one that was there becomes `checkpoint.previous.pt`. Divided ones go once there
    are two of these.

    Raises:
        UserError: the disk is full or may not be written; the checkpoints on it are as they were.
    """
    write_atomically(folder / NAME, lambda file: torch.save(state, file), keep_previous=folder / PREVIOUS)
    if (folder / PREVIOUS).exists():
        shutil.rmtree(folder / DIVIDED, ignore_errors=True)


def newest_step(folder: Path) -> float:
    """The step of `folder/checkpoint.pt`, of which no tensor is read; -1 where there is none, and infinite where it is
    damaged: `load` has to put it aside before anything else is written."""
    if not (folder / NAME).exists():
        return -1
    try:
        return int(torch.load(folder / NAME, map_location="cpu", weights_only=True, mmap=True)["step"])
    except Exception:  # whatever torch, the disk or a wrong type raise
        return math.inf


def load(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint of `folder` that can be read, on the CPU; None if none was ever written.

    A damaged one is set aside under another name, with a warning, so that it cannot push out a good one.

    Raises:
        UserError: there are checkpoints, but all are damaged.
    """
    paths = [path for path in (folder / NAME, folder / PREVIOUS) if path.exists()]
    for path in paths:
        try:
            return _read(path)
        except Exception as error:
            damaged = path.with_suffix(".damaged")
            warnings.warn(f"{path} is damaged ({error}); kept as {damaged.name}.", stacklevel=2)
            with disk_errors(damaged):
                os.replace(path, damaged)
    if paths:
        raise UserError(f"No checkpoint in {folder} can be read. Delete that folder to train again from the start.")
    return None


def remove(folder: Path) -> None:
    """Delete the checkpoints of a finished trial: its final weights are in `model.safetensors`."""
    for name in (NAME, PREVIOUS, NAME + ".tmp"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / DIVIDED, ignore_errors=True)


def replaced(names: Collection[str], is_finished: bool) -> set[str]:
    """Name the files of a trial, by their paths in its folder, that newer ones replace: all checkpoints of a finished
    trial; of divided ones those older than the newest two; and TensorBoard's files, which each start writes anew."""
    divided = [name.split("/") for name in names if name.startswith(f"{DIVIDED}/")]
    steps = sorted(int(parts[1]) for parts in divided if parts[1].isdecimal() and parts[2:] == ["index.json"])
    oldest = float("inf") if is_finished else steps[-2] if len(steps) > 1 else 0
    old = {"/".join(parts) for parts in divided if parts[1].isdecimal() and int(parts[1]) < oldest}
    boards = sorted(name for name in names if name.startswith("tb/events."))
    return old | set(boards[:-1]) | ({NAME, PREVIOUS}.intersection(names) if is_finished else set())


def _read(path: Path) -> dict[str, Any]:
    check_zip(path, small=0)  # torch.save does not compress
    # torch.load does not check the checksums that torch.save wrote: a flipped bit would go unseen.
    with zipfile.ZipFile(path) as archive:
        bad = archive.testzip()
    if bad is not None:
        raise ValueError(f"wrong checksum of {bad}")
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return found
