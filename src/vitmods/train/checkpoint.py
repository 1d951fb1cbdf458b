"""Checkpoints: one file and the good one before it, verified when read."""

import errno
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from vitmods.train.device import is_out_of_memory
from vitmods.util.errors import UserError
from vitmods.util.files import disk_errors, write_atomically
from vitmods.util.limits import check_zip

NAME, PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"
NOT_NOW = (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM)  # errors that another attempt may not have


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write `folder/checkpoint.pt`; the one that was there becomes `checkpoint.previous.pt`.

    Raises:
        UserError: the disk is full or may not be written; the checkpoints on it are as they were.
    """
    write_atomically(folder / NAME, lambda file: torch.save(state, file), keep_previous=folder / PREVIOUS)


def exists(folder: Path) -> bool:
    """Whether `load` has something to read."""
    return any((folder / name).exists() for name in (NAME, PREVIOUS))


def load(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint of `folder` that can be read, on the CPU; None if none was ever written.

    A damaged one is set aside under another name, with a warning, so that it cannot push out a good one.

    Raises:
        UserError: there are checkpoints, but all are damaged; or the system cannot read one now.
    """
    paths = [path for path in (folder / NAME, folder / PREVIOUS) if path.exists()]
    for path in paths:
        try:
            return _read(path)
        except Exception as error:
            if is_out_of_memory(error) or getattr(error, "errno", 0) in NOT_NOW:  # the file may be whole
                raise UserError(f"{path} cannot be read now ({error}). Nothing is lost: try again.") from error
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


def _read(path: Path) -> dict[str, Any]:
    check_zip(path, small=0)  # torch.save does not compress
    # torch.load does not check the checksums that torch.save wrote: a flipped bit would go unseen.
    with zipfile.ZipFile(path) as archive:
        bad = archive.testzip()
    if bad is not None:
        raise ValueError(f"wrong checksum of {bad}")
    return torch.load(path, map_location="cpu", weights_only=True)
