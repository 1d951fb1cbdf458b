"""Studies and trials at an address that fsspec opens, such as s3://bucket/runs/x: work happens in a local copy.

A run downloads what is missing here or was changed there, and uploads what was finished or changed here. It deletes at
the address only what the program names: the checkpoints of a trial whose final result is at the address, TensorBoard
files that newer ones replace, and weights that --keep-weights leaves out (`LocalCopy.delete`). A file that is missing
here stays at the address. A trial's result and checkpoints are sent after its other files, so that every trial at the
address is complete.

A trial's `.sent.json` notes which version of each file both sides have. So the next run sends what could not be sent,
and a trial that two machines have changed is detected; neither version is lost then.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, TypeVar

from vitmods.util.address import IN_ONE_STEP, Unreachable, address_of, moved_onto, named, open_address, place, retry
from vitmods.util.errors import UserError
from vitmods.util.files import disk_errors, log, write_atomically, write_json
from vitmods.util.lease import LEASE, Lease
from vitmods.util.limits import read_bytes, read_json

T = TypeVar("T")
Stamp = tuple[int, int]
"""a file's size and time on this disk"""
CONFIG, RESULT = "config.json", "result.json"  # a folder with one of them is a trial
CHECKPOINTS = ("checkpoint.previous.pt", "checkpoint.pt")
NOTES, MARK = ".sent.json", ".copy"  # the mark identifies a copy, also among containers of one name and path
SEND_EVERY_S = 5.0
_LAST = (*CHECKPOINTS, RESULT, "results.csv", "results.json", "report.html")  # in this order


class Sent(NamedTuple):
    """A file that both sides have: its size and time here, and its version at the address."""

    size: int
    time_ns: int
    version: str


def download(path: str) -> str:
    """Download the folder at an address; returns its local copy, and any other path unchanged.

    Raises UserError if the address is empty.
    """
    folder = place(path)
    copy = copy_of(folder)
    if copy is None:
        return path
    copy.fetch()
    if not folder.exists():
        raise UserError(f"{path} does not exist or is empty.")
    return str(folder)


def copy_of(folder: Path) -> LocalCopy | None:
    """Return None for a folder that is not a local copy. Raises UserError if its address cannot be opened."""
    address = address_of(folder)
    return None if address is None else LocalCopy(folder, address)


def is_there(path: Path) -> bool:
    """Whether a file exists in a folder, or at the address that the folder is a copy of."""
    copy = None if path.exists() else copy_of(path.parent)
    return path.exists() or (copy is not None and copy.has(path.name))


def upload(path: Path) -> None:
    """Send a file of a local copy; nothing for other files."""
    if (copy := copy_of(path.parent)) is not None:
        with path.open("rb") as file:
            copy.send_file("", path.name, file)


def write_output(out: str | Path, content: bytes) -> Path:
    """Write a file at a path or an address, with the folders above it; returns its path on this disk.

    Raises UserError if it cannot be written.
    """
    path = place(out)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.write(content))
    upload(path)
    return path


class LocalCopy:
    """A folder on this disk and the address that it is a copy of.

    Files are compared trial by trial: `trial` is its path within the folder, "" for files outside of trials, and names
    are paths within the trial.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address
        self._fs, self._root = open_address(address)
        self._in_one_step = address.partition(":")[0] in IN_ONE_STEP
        self._lease: Lease | None = None
        self._mark = b""
        self._notes: dict[str, dict[str, Sent]] = {}
        self._finished: set[str] = set()  # trials whose result is at the address
        self._unwanted: set[str] = set()  # names to delete at the address

    def identity(self) -> str:
        """Identify this copy, also among containers that share the machine's name and paths."""
        self._mark = self._read_mark() or uuid.uuid4().hex.encode()
        write_atomically(self.folder / MARK, lambda file: file.write(self._mark))
        return f"{self.folder.resolve()} {self._mark.decode(errors='replace')}"

    def _read_mark(self) -> bytes:
        try:
            return read_bytes(self.folder / MARK, "lease")
        except (OSError, ValueError):
            return b""

    @contextmanager
    def kept(self, lease: Lease) -> Iterator[None]:
        """Fetch on entry, send what is written while inside, and send everything at the end unless the lease is lost.

        Raises:
            Unreachable: not everything could be sent. It stays in the copy, and the next run sends it.
        """
        self._lease = lease
        self.fetch()
        ended = threading.Event()
        sender = threading.Thread(target=self._send_until, args=(ended,), daemon=True, name="sender")
        sender.start()
        failed = True
        try:
            yield
            failed = False
        finally:
            ended.set()
            sender.join()
            try:
                self.send()
            except Unreachable as error:
                if not failed:  # otherwise the error that ends the run is the one to raise
                    raise
                log(str(error))

    def delete(self, path: Path) -> None:
        """Delete a file at the address once the next files are sent."""
        self._unwanted.add(path.relative_to(self.folder).as_posix())

    def names(self) -> list[str]:
        """List the top level of the address. Raises FileNotFoundError if it is empty."""
        return [str(path).rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)]

    def has(self, name: str) -> bool:
        """Whether a file of that name is at the address."""
        return bool(self._retry(lambda: self._fs.exists(self._remote("", name))))

    def fetch(self, weights: bool = True) -> None:
        """Download what is missing here, and what was changed only at the address. If both sides have changed a trial,
        the address's files are used and those of this side are set aside.

        weights: download the weights and checkpoints of a study's trials too, which an answer does not need.
        """
        there, here = _by_trial(self._list_there(), _list_here(self.folder))
        for trial in sorted(there):
            self._fetch_trial(trial, there[trial], here[trial], weights)

    def send(self, final: bool = True) -> None:
        """Send what has changed here, trial by trial; unless it is `final`, without files that still grow."""
        (here,) = _by_trial(_list_here(self.folder))
        self._check_copy()  # after the listing, which may contain what was written after a removal
        for trial, files in here.items():
            self._send_trial(trial, files, final)
        if final:  # a removal may have begun before
            self._check_copy()
        for name in sorted(self._unwanted):
            self._delete_there("", name)
            self._unwanted.discard(name)

    def _check_copy(self) -> None:
        if self._lease is None:
            return
        if self._read_mark() != self._mark:  # it vanishes with the copy
            self._lose(f"{self.folder}, the local copy of {self.address}, was removed while the run worked in it")
        for trial in sorted(self._finished):
            if not _is_finished(self.folder / trial):
                self._lose(f"The finished trial {self.folder / trial} was removed while the run worked in it")

    def _send_until(self, ended: threading.Event) -> None:
        is_reported = False
        while not ended.wait(SEND_EVERY_S):
            try:
                self.send(final=False)
                is_reported = False
            except UserError as error:
                if self._lease is not None and self._lease.lost:  # the run stops by itself
                    return
                if not is_reported:
                    log(f"{error} The run continues.")
                is_reported = True
            except OSError:  # a file or folder was removed while it was read
                continue

    def _fetch_trial(self, trial: str, there: Mapping[str, str], here: Mapping[str, Stamp], weights: bool) -> None:
        folder, notes = self.folder / trial, {n: sent for n, sent in self._noted(trial).items() if n in there}
        changed_here = {name for name in here if name not in notes or notes[name][:2] != here[name]}
        wanted = {name for name in there if name not in here or name not in notes or notes[name].version != there[name]}
        if wanted & changed_here:
            if self._lease is None or self._lease.is_resumed:  # no other machine has run: this side is the newer one
                wanted -= changed_here
            else:
                aside = self.folder / ".aside" / time.strftime("%Y%m%d-%H%M%S") / trial
                log(
                    f"{named(folder)} was changed by another machine too; unsent files of this one are kept in {aside}."
                )
                with disk_errors(aside):
                    for name in here:
                        (aside / name).parent.mkdir(parents=True, exist_ok=True)
                        (folder / name).rename(aside / name)
                here, notes, wanted, changed_here = {}, {}, set(there), set()
        try:
            for name in sorted(wanted, key=_order):
                if weights or not (trial.startswith("trials/") and name.endswith((".safetensors", ".pt"))):
                    notes[name] = self._download(trial, name, there[name])
            is_finished = _is_finished(folder)
            is_sent = is_finished and RESULT in there and RESULT not in changed_here
            is_reader = self._lease is None  # who only reads deletes nothing, here or there
            for name in () if is_reader else _replaced({*there, *here}, is_finished):
                (folder / name).unlink(missing_ok=True)
            for name in (
                () if is_reader else _replaced(there, is_sent)
            ):  # not before the address has the file that replaces it
                self._delete_there(trial, name)
                notes.pop(name, None)
        finally:
            self._note(trial, notes)
        if is_sent:
            self._finished.add(trial)

    def _send_trial(self, trial: str, files: Mapping[str, Stamp], final: bool) -> None:
        folder, is_finished = self.folder / trial, _is_finished(self.folder / trial)

        def changed(files: Mapping[str, Stamp]) -> list[str]:
            notes, replaced = self._noted(trial), _replaced(files, is_finished)
            names = (name for name in files if name not in notes or notes[name][:2] != files[name])
            growing = () if final else ("logs/",)  # until a run ends
            return sorted((name for name in names if name not in replaced and not name.startswith(growing)), key=_order)

        names = changed(files)
        if not names or (CONFIG in files and not final and not any(map(_is_last, names))):  # only its rows
            return
        if self._lease is not None:
            self._lease.confirm()
        with ExitStack() as stack:
            opened: dict[str, IO[bytes]] = {}
            for name in filter(_is_last, reversed(names)):
                with suppress(FileNotFoundError):
                    opened[name] = stack.enter_context((folder / name).open("rb"))
            if opened:  # list again: the files that a result describes exist by now, and perhaps did not before
                files = _by_trial(_list_here(folder))[0][""]
                names = [name for name in changed(files) if not _is_last(name)]
            for name in names:
                with suppress(FileNotFoundError), (folder / name).open("rb") as file:
                    self.send_file(trial, name, file)
            if opened and self._lease is not None:  # a removal takes time: a result must not arrive without its files
                gone = files.keys() - _list_here(folder).keys() - set(CHECKPOINTS)
                if gone:
                    self._lose(f"{folder / min(gone)} was removed while the run worked in {self.folder}")
            for name in reversed(opened):
                self.send_file(trial, name, opened[name])
        is_sent = is_finished and RESULT in self._noted(trial)
        for name in _replaced(self._noted(trial), is_sent):
            self._delete_there(trial, name)
            self._note(trial, {n: sent for n, sent in self._noted(trial).items() if n != name})
        if is_sent:
            self._finished.add(trial)

    def send_file(self, trial: str, name: str, file: IO[bytes]) -> None:
        """Send an open file."""
        stamp, remote = _stamp(os.fstat(file.fileno())), self._remote(trial, name)
        target = remote if self._in_one_step else f"{remote}.tmp"

        def copy() -> str:
            if self._lease is not None:
                self._lease.check()
            file.seek(0)
            if not self._in_one_step:
                self._fs.makedirs(remote.rpartition("/")[0], exist_ok=True)
            with self._fs.open(target, "wb") as out:
                shutil.copyfileobj(file, out, 1 << 20)
            if not (self._in_one_step or moved_onto(self._fs, target, remote)):
                with suppress(FileNotFoundError):
                    self._fs.rm_file(remote)
                self._fs.mv(target, remote)
            self._fs.invalidate_cache()
            return _version(self._fs.info(remote))

        self._note(trial, {**self._noted(trial), name: Sent(*stamp, self._retry(copy))})

    def _delete_there(self, trial: str, name: str) -> None:
        def delete() -> None:
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._remote(trial, name))

        if self._lease is not None:
            self._lease.confirm()
        self._retry(delete)

    def _download(self, trial: str, name: str, version: str) -> Sent:
        path = self.folder / trial / name
        temporary = path.with_name(path.name + ".tmp")
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._retry(lambda: self._fs.get_file(self._remote(trial, name), str(temporary)))
                with open(temporary, "rb+") as file:
                    os.fsync(file.fileno())  # the note of the download must not outlive the file
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        return Sent(*_stamp(path.stat()), version)

    def _list_there(self) -> dict[str, str]:
        """Return name -> version."""
        self._fs.invalidate_cache()
        paths = self._retry(lambda: self._fs.find(self._root, detail=True))
        files = {path[len(self._root) :].lstrip("/"): info for path, info in paths.items()}
        # Consoles mark a folder with an empty object, whose name may end in a slash.
        folders = {str(folder) for name in files for folder in PurePosixPath(name).parents}
        marks = {name for name, info in files.items() if name.endswith("/") or (info["size"] == 0 and name in folders)}
        return {
            name: _version(info)
            for name, info in files.items()
            if name not in marks and info.get("type") != "directory" and _is_shared(name)
        }

    def _lose(self, problem: str) -> None:
        assert self._lease is not None
        self._lease.lose(f"{problem}. What was sent is safe at the address: run the same command again to resume.")
        self._lease.check()

    def _noted(self, trial: str) -> dict[str, Sent]:
        if trial not in self._notes:
            try:
                noted = read_json(self.folder / trial / NOTES, "JSON")
                self._notes[trial] = {name: Sent(*values) for name, values in noted.items()}
            except (OSError, ValueError, TypeError, AttributeError):  # then everything counts as changed
                self._notes[trial] = {}
        return self._notes[trial]

    def _note(self, trial: str, notes: dict[str, Sent]) -> None:
        if notes != self._notes.get(trial) and (self.folder / trial).is_dir():
            write_json(self.folder / trial / NOTES, {name: list(sent) for name, sent in notes.items()})
        self._notes[trial] = notes

    def _remote(self, trial: str, name: str) -> str:
        return "/".join(filter(None, (self._root, trial, name)))

    def _retry(self, act: Callable[[], T]) -> T:
        remedy = f" What was done is in {self.folder}; run the same command again to send it."
        return retry(act, f"{self.address} cannot be reached", remedy)


def _by_trial(*listings: Mapping[str, Any]) -> list[dict[str, dict[str, Any]]]:
    """Group each listing as trial -> name -> value, with the same trials in all."""
    paths = {name: PurePosixPath(name) for listing in listings for name in listing}
    trials = {str(path.parent) for path in paths.values() if path.name in (CONFIG, RESULT)} - {"."}
    grouped = [{trial: dict[str, Any]() for trial in ("", *sorted(trials))} for _ in listings]
    for listing, group in zip(listings, grouped, strict=True):
        for name, value in listing.items():
            trial = next((folder for folder in map(str, paths[name].parents) if folder in trials), "")
            group[trial][name.removeprefix(trial).lstrip("/")] = value
    return grouped


def _list_here(root: Path) -> dict[str, Stamp]:
    """List the files of a folder that would be uploaded; links are not followed."""
    files = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = filter(_is_shared, subfolders)
        for name in filter(_is_shared, names):
            with suppress(FileNotFoundError):
                status = os.lstat(os.path.join(folder, name))
                if stat.S_ISREG(status.st_mode):
                    files[Path(folder, name).relative_to(root).as_posix()] = _stamp(status)
    return files


def _is_shared(name: str) -> bool:
    """Whether a file is sent: not locks, unfinished or damaged files, nor this side's notes and the lease."""
    path = PurePosixPath(name)
    is_private = any(part in (".aside", "..") or part.endswith(".damaged") for part in path.parts)
    return not (is_private or path.name in ("", LEASE, NOTES, MARK, ".lock") or path.suffix in (".tmp", ".lock"))


def _replaced(names: Collection[str], is_finished: bool) -> set[str]:
    """Name the files of a trial that newer ones replace: the checkpoints of a finished trial, and TensorBoard's files,
    which each start writes anew."""
    boards = sorted(name for name in names if name.startswith("tb/events."))
    return set(boards[:-1]) | (set(CHECKPOINTS).intersection(names) if is_finished else set())


def _order(name: str) -> tuple[int, str]:
    """Sort rows first, and files that describe others after these."""
    base = name.rpartition("/")[2]
    return _LAST.index(base) + 1 if base in _LAST else -(base == "metrics.jsonl"), name


def _is_last(name: str) -> bool:
    return _order(name)[0] > 0


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_size, status.st_mtime_ns


def _version(info: Mapping[str, Any]) -> str:
    """Return the size, and the hash or else the time that the file system reports."""
    digest = next((info[name] for name in ("ETag", "etag", "md5Hash", "content_md5") if info.get(name)), None)
    times = ("mtime", "LastModified", "last_modified", "updated", "created")
    return f"{info['size']} {digest or next((info[name] for name in times if name in info), '')}"


def _is_finished(trial: Path) -> bool:
    """Whether the trial has its final result."""
    try:
        return read_json(trial / RESULT)["status"] in ("finished", "diverged")
    except (OSError, ValueError, KeyError, TypeError):
        return False
