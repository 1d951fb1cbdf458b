"""Checkpoints of a model that is divided among processes: each writes its part, and reads no more than it needs.

A step has a folder of its own, `checkpoint/<step>`:

rank<r>.safetensors  what process r holds of the divided tensors
state.pt             all else, written by the first process
index.json           shapes, the rows that each file has, checksums; written last: a folder without it never counts

Any number of processes can load them, one too. PyTorch's own distributed checkpoints keep their index as a pickle,
which runs code when it is loaded, and its safetensors form has no place for anything but tensors.
"""

from __future__ import annotations

import hashlib
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitmods.train import checkpoint
from vitmods.train.checkpoint import DIVIDED, NAME, PREVIOUS
from vitmods.train.distributed import PeerEnded, Processes, local
from vitmods.util.errors import UserError
from vitmods.util.files import checksum, disk_errors, make_folder, write_atomically, write_json
from vitmods.util.limits import check_zip, read_json

INDEX, REST = "index.json", "state.pt"
_PLACE = "divided tensor"  # in state.pt, where one belongs


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the files of a checkpoint, of which any rows can be read.

    rows: how many of them each file has, one after the other
    """

    folder: Path
    name: str
    shape: torch.Size
    rows: tuple[int, ...]

    def read(self, start: int, stop: int) -> Tensor:
        """Rows (stop - start, ...), on the CPU; of the files only what is asked for."""
        from safetensors import safe_open

        found: list[Tensor] = []
        first = 0
        for rank, count in enumerate(self.rows):
            low, high = max(start, first) - first, min(stop, first + count) - first
            if low < high or (count and not found and first + count == self.shape[0]):  # of none, the type at least
                with safe_open(self.folder / _file(rank), "pt") as file:
                    found.append(file.get_slice(self.name)[low : max(low, high)])
            first += count
        return torch.cat(found)


def save(folder: Path, state: Mapping[str, Any], processes: Processes) -> None:
    """Write what this process holds of the state after `state["step"]`; the newest two checkpoints stay, and
    undivided ones until there are two.

    Raises:
        UserError: the disk is full or may not be written, or the processes do not see the same folder. The checkpoints
            before are as they were.
    """
    place = folder / DIVIDED / str(state["step"])
    if processes.once(lambda: _begun(place)):  # the state after a step is one
        return
    divided: dict[str, Any] = {}
    rest = _set_aside(state, divided)
    mine = {name: local(tensor).detach().cpu().contiguous() for name, tensor in divided.items()}
    digest, failure = "", None
    try:
        digest = _write(place / _file(processes.rank), mine)
    except UserError as error:
        failure = error
    parts = processes.gathered((digest, {name: len(part) for name, part in mine.items()}, str(failure or "")))
    if failure is not None:
        raise failure
    if reasons := [reason for *_, reason in parts if reason]:
        raise PeerEnded(reasons[0])
    shapes = {name: list(tensor.shape) for name, tensor in divided.items()}
    processes.once(lambda: _finish(place, rest, shapes, [part[:2] for part in parts]))


def load(folder: Path, processes: Processes) -> dict[str, Any] | None:
    """The newest state that can be read, its divided tensors as `StoredTensor`; None if none was ever written.

    A damaged one is set aside under another name, with a warning. Each process checks some of the files.

    Raises:
        UserError: there are checkpoints, but all are damaged.
    """
    steps = processes.once(lambda: _steps(folder))
    for step in steps:
        place = folder / DIVIDED / str(step)
        found, wrong = _read(place, processes)
        wrong = next(filter(None, processes.gathered(wrong)), None)
        if wrong is None:
            return found
        processes.once(lambda place=place, wrong=wrong: _put_aside(place, wrong))  # type: ignore[misc]
    if steps:
        raise UserError(f"No checkpoint in {folder} can be read. Delete that folder to train again from the start.")
    return None


def load_newest(folder: Path, processes: Processes) -> dict[str, Any] | None:
    """The newest state that can be read, of a divided checkpoint or of another; None if none was ever written.

    Raises:
        UserError: there are checkpoints, but all are damaged.
    """
    wrong: list[str] = []

    def divided() -> dict[str, Any] | None:
        try:
            return load(folder, processes)
        except PeerEnded:
            raise
        except UserError as error:  # in all processes
            wrong.append(str(error))
            return None

    def undivided() -> dict[str, Any] | None:
        try:
            return checkpoint.load(folder)
        except UserError as error:  # in the first: it puts the damaged ones aside
            wrong.append(str(error))
            return None

    steps = processes.once(lambda: (checkpoint.newest_step(folder), newest_step(folder)))
    for kind in sorted((0, 1), key=lambda kind: -steps[kind]):
        found = divided() if kind else processes.in_turn(undivided)
        if found is not None:
            return found
    if reason := next(filter(None, processes.gathered("".join(wrong[:1]))), None):
        raise UserError(reason)
    return None


def newest_step(folder: Path) -> int:
    """That of the newest checkpoint; -1: there is none."""
    return max(_steps(folder), default=-1)


def _file(rank: int) -> str:
    return f"rank{rank}.safetensors"


def _begun(place: Path) -> bool:
    """Whether it is there already. Otherwise an empty folder is, without what a killed run may have left."""
    if (place / INDEX).exists():
        return True
    with disk_errors(place):
        shutil.rmtree(place, ignore_errors=True)
    make_folder(place)
    return False


def _set_aside(state: Any, divided: dict[str, Any], name: str = "") -> Any:
    """The state with the names of divided tensors in their places; they themselves go to `divided`."""
    if isinstance(state, Mapping):
        return {key: _set_aside(value, divided, f"{name}/{key}".lstrip("/")) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_set_aside(value, divided, f"{name}/{i}") for i, value in enumerate(state))
    if not hasattr(state, "placements"):
        return state
    if [(kind.is_shard(0), state.ndim > 0) for kind in state.placements] != [(True, True)]:
        raise ValueError(f"{name} is divided as {state.placements}, and not by its rows")
    divided[name] = state
    return {_PLACE: name}


def _put_back(state: Any, stored: Mapping[str, StoredTensor]) -> Any:
    """The inverse."""
    if isinstance(state, dict):
        if state.keys() == {_PLACE}:
            return stored[state[_PLACE]]
        return {key: _put_back(value, stored) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_put_back(value, stored) for value in state)
    return state


def _write(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """The checksum of what is written."""
    from safetensors.torch import save as packed

    content = packed({name: tensor for name, tensor in tensors.items() if len(tensor)})
    write_atomically(path, lambda file: file.write(content))
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _finish(
    place: Path, rest: Any, shapes: Mapping[str, Sequence[int]], parts: Sequence[tuple[str, Mapping[str, int]]]
) -> None:
    """In the first process, once all have written: the rest and the index; then all but the newest two go."""
    unseen = [_file(rank) for rank in range(len(parts)) if not (place / _file(rank)).exists()]
    if unseen:
        raise UserError(
            f"{', '.join(unseen)} of other processes cannot be seen in {place}: all machines have to share the folder "
            "of a divided model."
        )
    buffer = BytesIO()
    torch.save(rest, buffer)
    write_atomically(place / REST, lambda file: file.write(buffer.getbuffer()))
    index = {
        "schema": 1,
        "checksums": {_file(rank): digest for rank, (digest, _) in enumerate(parts)} | {REST: checksum(place / REST)},
        "tensors": {
            name: {"shape": list(shape), "rows": [rows[name] for _, rows in parts]} for name, shape in shapes.items()
        },
    }
    write_json(place / INDEX, index)
    folder = place.parent.parent
    for old in [folder / DIVIDED / str(step) for step in _steps(folder)[2:]]:
        (old / INDEX).unlink()  # half of a folder never counts
        shutil.rmtree(old, ignore_errors=True)
    if len(_steps(folder)) > 1:
        for name in (NAME, PREVIOUS):
            (folder / name).unlink(missing_ok=True)


def _steps(folder: Path) -> list[int]:
    """Those with a whole checkpoint, the newest first."""
    found = (path.parent.name for path in (folder / DIVIDED).glob(f"*/{INDEX}"))
    return sorted((int(name) for name in found if name.isdecimal()), reverse=True)


def _read(place: Path, processes: Processes) -> tuple[dict[str, Any] | None, str | None]:
    """The state, and what is wrong with it or with those of the files that this process checks."""
    try:
        index = read_json(place / INDEX, "JSON")
        files = sorted(index["checksums"].items())
        for name, expected in files[processes.rank :: processes.size]:
            if Path(name).name != name or checksum(place / name) != expected:
                return None, f"wrong checksum of {name}"
        stored = {
            name: StoredTensor(place, name, torch.Size(one["shape"]), tuple(one["rows"]))
            for name, one in index["tensors"].items()
        }
        check_zip(place / REST, small=0)
        rest = torch.load(place / REST, map_location="cpu", weights_only=True)
        return _put_back(rest, stored), None
    except Exception as error:  # whatever JSON, the disk, torch or a wrong type raise
        return None, " ".join(str(error).split()) or type(error).__name__


def _put_aside(place: Path, wrong: str) -> None:
    damaged = place.with_suffix(".damaged")
    warnings.warn(f"{place} is damaged ({wrong}); kept as {damaged.name}.", stacklevel=2)
    with disk_errors(damaged):
        shutil.rmtree(damaged, ignore_errors=True)
        place.rename(damaged)
