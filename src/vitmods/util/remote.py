"""Studies and trials at an address that fsspec opens, such as s3://bucket/runs/x: work happens in a local copy.

A run downloads what is missing here or was changed there, and uploads what was finished or changed here. It deletes at
the address only what the program names: the checkpoints of a trial whose final result is at the address, TensorBoard
files that newer ones replace, and weights that --keep-weights leaves out (`LocalCopy.delete`). A file that is only
missing here stays there. A trial's result and its checkpoints are sent after its other files, so that what is at the
address is always whole.

Beside the files of a trial `.sent.json` notes which version of each both sides have. So work that could not be sent is
sent by the next run, and a trial that two machines have changed is noticed; neither side's version is lost then.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, TypeVar

from vitmods.util.address import (
    IN_ONE_STEP,
    AddressPlace,
    Unreachable,
    address_of,
    moved_onto,
    named,
    open_address,
    place,
    tried,
)
from vitmods.util.errors import UserError
from vitmods.util.files import LenientStream, disk_errors, write_atomically, write_json
from vitmods.util.lease import LEASE, Lease
from vitmods.util.limits import read_bytes, read_json

T = TypeVar("T")
Stamp = tuple[int, int]
"""a file's size and time here"""
Replaced = Callable[[Collection[str], bool], Collection[str]]
"""(files of a trial, whether it is finished) -> those that newer ones replace"""
CONFIG, RESULT = "config.json", "result.json"  # a folder with one of them is a trial
NOTES, MARK = ".sent.json", ".copy"  # the mark: what tells a copy from others, and its last run that has fetched all
SEND_EVERY_S = 5.0
_LAST = ("checkpoint.previous.pt", "checkpoint.pt", RESULT, "results.csv", "results.json", "report.html")


class Sent(NamedTuple):
    """A file as both sides have it: size and time here, and its version there."""

    size: int
    time_ns: int
    version: str


def download(path: str) -> str:
    """Download the folder at an address; returns where it is on this disk, and any other path as it is.

    Raises UserError where there is nothing.
    """
    folder = place(path)
    copy = copy_of(folder)
    if copy is None:
        return path
    copy.fetch()
    if not folder.exists():
        raise UserError(f"There is nothing at {path}.")
    return str(folder)


def copy_of(folder: Path) -> LocalCopy | None:
    """None for a folder that is not a local copy. UserError where its address cannot be opened."""
    address = address_of(folder)
    return None if address is None else LocalCopy(folder, address)


def is_there(path: Path) -> bool:
    """Whether there is such a file, in a folder or at the address that the folder is a copy of."""
    if path.exists():
        return True
    copy = copy_of(path.parent)
    return copy is not None and copy.has(path.name)


def upload(path: Path) -> None:
    """Send one file that was written into a local copy; nothing for other files."""
    copy = copy_of(path.parent)
    if copy is not None:
        copy.send_file(path.name)


class LocalCopy:
    """A folder on this disk and the address that it is a copy of.

    Files are compared trial by trial: `trial` is the path of one within the folder, or "" for the files of no trial,
    and names are paths within the trial.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address
        self._fs, self._root = open_address(address)
        self._in_one_step = address.partition(":")[0] in IN_ONE_STEP
        self._lease: Lease | None = None
        self._replaced: Replaced = lambda names, is_finished: ()
        self._mark = b""
        self._is_resumed = (
            False  # no other machine has come since this copy was at work: what differs there it has sent
        )
        self._notes: dict[str, dict[str, Sent]] = {}
        self._finished: set[str] = set()  # trials whose result is at the address
        self._unwanted: set[str] = set()  # there

    def lease(self) -> AddressPlace:
        """Where a run's hold of the address is noted."""
        return AddressPlace(f"{self.address}/{LEASE}")

    def identity(self) -> str:
        """What tells this copy from those of others, also from those of containers that share the machine's name and
        paths."""
        try:
            self._mark = read_bytes(self.folder / MARK, "lease")
        except (OSError, ValueError):
            self._write_mark(uuid.uuid4().hex.encode())
        return f"{self.folder.resolve()} {self._mark.decode(errors='replace').partition(' ')[0]}"

    @contextmanager
    def kept(self, lease: Lease, replaced: Replaced) -> Iterator[None]:
        """Fetch; while inside, send what is written, and the rest at the end, unless the lease is lost: to another
        machine, or because the copy vanished.

        Raises:
            Unreachable: not all could be sent. It stays in the copy, and the next run sends it.
        """
        self._lease, self._replaced = lease, replaced
        name, _, run = self._mark.decode(errors="replace").partition(" ")
        self._is_resumed = run != "" and run == lease.previous
        self.fetch()
        self._write_mark(f"{name} {lease.id}".encode())
        ended = threading.Event()
        sender = threading.Thread(target=self._send_until, args=(ended,), daemon=True, name="sender")
        sender.start()
        try:
            yield
        except BaseException:
            ended.set()
            sender.join()
            try:
                self.send()
            except Unreachable as error:  # the error that ends the run is the one to raise
                _say(str(error))
            raise
        ended.set()
        sender.join()
        self.send()

    def delete(self, path: Path) -> None:
        """Delete a file at the address, after the files that are sent next."""
        self._unwanted.add(path.relative_to(self.folder).as_posix())

    def names(self) -> list[str]:
        """Name what is at the address itself, without what is in its folders. FileNotFoundError where nothing is."""
        return [str(path).rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)]

    def has(self, name: str) -> bool:
        """Whether there is a file of that name at the address."""
        return bool(self._tried(lambda: self._fs.exists(self._remote("", name))))

    def fetch(self, weights: bool = True) -> None:
        """Download what is missing here, and what was changed there alone. Of a trial that both sides have changed, the
        address's files count, and those of this side are set aside.

        weights: those of a study's trials and their checkpoints too, which is most of it; to read an answer nothing
            needs them.
        """
        there, here = _by_trial(self._list_there(), _list_here(self.folder))
        for trial in sorted(there):
            self._fetch_trial(trial, there[trial], here[trial], weights)

    def send(self, final: bool = True) -> None:
        """Send what has changed here, trial by trial; unless it is `final`, without what still grows."""
        (here,) = _by_trial(_list_here(self.folder))
        if self._lease is not None:  # after the listing, which may hold what was written after a removal
            self._check_copy(self._lease)
            for trial in sorted(self._finished):
                if not (self.folder / trial / RESULT).exists():
                    self._lose(
                        self._lease, f"The finished trial {self.folder / trial} was removed while the run worked in it"
                    )
        for trial, files in here.items():
            self._send_trial(trial, files, final)
        for name in sorted(self._unwanted):
            self._delete_there("", name)
            self._unwanted.discard(name)

    def send_file(self, name: str) -> None:
        """Send one file of the folder itself."""
        with (self.folder / name).open("rb") as file:
            self._note("", {**self._noted(""), name: self._send_open("", name, file)})

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
                    _say(f"{error} The work goes on.")
                is_reported = True
            except OSError:  # a file or folder that goes while it is read
                continue

    def _fetch_trial(self, trial: str, there: Mapping[str, str], here: Mapping[str, Stamp], weights: bool) -> None:
        folder, notes = self.folder / trial, {n: sent for n, sent in self._noted(trial).items() if n in there}
        changed_here = {name for name in here if name not in notes or notes[name][:2] != here[name]}
        wanted = {name for name in there if name not in here or name not in notes or notes[name].version != there[name]}
        if wanted & changed_here:
            if self._lease is None or self._is_resumed:
                wanted -= changed_here
            else:
                self._set_aside(trial, here)
                here, notes, wanted, changed_here = {}, {}, set(there), set()
        try:
            if RESULT in wanted:
                notes[RESULT] = self._download(trial, RESULT, there[RESULT])
            is_finished = _is_finished(folder)
            is_sent = is_finished and RESULT in there and RESULT not in changed_here
            for name in self._replaced({*there, *here}, is_finished):
                (folder / name).unlink(missing_ok=True)
                wanted.discard(name)
            for name in self._replaced(there, is_sent):  # until what replaces it is there, nothing else holds the work
                self._delete_there(trial, name)
                notes.pop(name, None)
            if not weights and trial.startswith("trials/"):
                wanted = {name for name in wanted if not name.endswith((".safetensors", ".pt"))}
            for name in sorted(wanted - {RESULT}, key=_order):
                notes[name] = self._download(trial, name, there[name])
        finally:
            self._note(trial, notes)
        if is_sent:
            self._finished.add(trial)

    def _set_aside(self, trial: str, names: Collection[str]) -> None:
        folder, aside = self.folder / trial, self.folder / ".aside" / time.strftime("%Y%m%d-%H%M%S") / trial
        _say(f"{named(folder)} was changed by another machine too; what this one has not sent is kept in {aside}.")
        with disk_errors(aside):
            for name in names:
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).rename(aside / name)

    def _send_trial(self, trial: str, files: Mapping[str, Stamp], final: bool) -> None:
        folder, notes, is_finished = self.folder / trial, dict(self._noted(trial)), _is_finished(self.folder / trial)

        def changed(files: Mapping[str, Stamp]) -> list[str]:
            left_out = self._replaced(files, is_finished)
            names = (name for name in files if name not in notes or notes[name][:2] != files[name])
            growing = () if final else ("logs/",)  # until a run ends
            return sorted((name for name in names if name not in left_out and not name.startswith(growing)), key=_order)

        names = changed(files)
        if not names or (CONFIG in files and not final and not any(map(_is_last, names))):  # its rows alone
            return
        if self._lease is not None:
            self._lease.look()
            if trial in self._finished and not is_finished:
                self._lose(self._lease, f"{folder} was damaged while the run worked in it: its trial was finished")
        with ExitStack() as stack:
            opened: dict[str, IO[bytes]] = {}
            for name in filter(_is_last, reversed(names)):
                with suppress(FileNotFoundError):
                    opened[name] = stack.enter_context((folder / name).open("rb"))
            if opened:  # by now the files are there that these tell of, but were perhaps not listed yet
                names = [name for name in changed(_by_trial(_list_here(folder))[0][""]) if not _is_last(name)]
            try:
                for name in (*names, *reversed(opened)):
                    with suppress(FileNotFoundError), opened.get(name) or (folder / name).open("rb") as file:
                        notes[name] = self._send_open(trial, name, file)
                for name in self._replaced(list(notes), is_finished and RESULT in notes):
                    self._delete_there(trial, name)
                    del notes[name]
            finally:
                self._note(trial, notes)
        if is_finished and RESULT in notes:
            self._finished.add(trial)

    def _send_open(self, trial: str, name: str, file: IO[bytes]) -> Sent:
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

        return Sent(*stamp, self._tried(copy))

    def _delete_there(self, trial: str, name: str) -> None:
        def delete() -> None:
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._remote(trial, name))

        if self._lease is not None:
            self._lease.look()
        self._tried(delete)

    def _download(self, trial: str, name: str, version: str) -> Sent:
        def write(file: IO[bytes]) -> None:
            def copy() -> None:
                file.seek(0)
                file.truncate()
                with self._fs.open(self._remote(trial, name), "rb") as source:
                    shutil.copyfileobj(source, file, 1 << 20)

            self._tried(copy)

        path = self.folder / trial / name
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, write)
        return Sent(*_stamp(path.stat()), version)

    def _list_there(self) -> dict[str, str]:
        """name -> version."""

        def find() -> dict[str, Any]:
            self._fs.invalidate_cache()
            files: dict[str, Any] = self._fs.find(self._root, detail=True)
            return files

        files = {path[len(self._root) :].lstrip("/"): info for path, info in self._tried(find).items()}
        # Consoles mark a folder with an object without content, whose name may end in a slash.
        folders = {str(folder) for name in files for folder in PurePosixPath(name).parents}
        marks = {name for name, info in files.items() if name.endswith("/") or (info["size"] == 0 and name in folders)}
        return {
            name: _version(info)
            for name, info in files.items()
            if name not in marks and info.get("type") != "directory" and _is_shared(name)
        }

    def _write_mark(self, mark: bytes) -> None:
        write_atomically(self.folder / MARK, lambda file: file.write(mark))
        self._mark = mark

    def _check_copy(self, lease: Lease) -> None:
        """The mark vanishes with the copy. What is missing then must not look as if it had never been."""
        try:
            is_there = read_bytes(self.folder / MARK, "lease") == self._mark
        except (OSError, ValueError):
            is_there = False
        if not is_there:
            self._lose(
                lease, f"{self.folder}, the local copy of {self.address}, was removed while the run worked in it"
            )

    def _lose(self, lease: Lease, what: str) -> None:
        lease.lose(f"{what}. What was sent is safe at the address: run the same command again to go on from there.")
        lease.check()

    def _noted(self, trial: str) -> dict[str, Sent]:
        if trial not in self._notes:
            try:
                noted = read_json(self.folder / trial / NOTES, "JSON")
                self._notes[trial] = {name: Sent(*values) for name, values in noted.items()}
            except (OSError, ValueError, TypeError, AttributeError):  # then all counts as changed
                self._notes[trial] = {}
        return self._notes[trial]

    def _note(self, trial: str, notes: dict[str, Sent]) -> None:
        if notes != self._notes.get(trial) and (self.folder / trial).is_dir():
            write_json(self.folder / trial / NOTES, {name: list(sent) for name, sent in notes.items()})
        self._notes[trial] = notes

    def _remote(self, trial: str, name: str) -> str:
        return "/".join(filter(None, (self._root, trial, name)))

    def _tried(self, act: Callable[[], T]) -> T:
        here = f" What was done is in {self.folder}; run the same command again to send it."
        return tried(act, f"{self.address} cannot be reached", here)


def _by_trial(*listings: Mapping[str, Any]) -> list[dict[str, dict[str, Any]]]:
    """Each listing as trial -> name -> value, all with the same trials."""
    paths = {name: PurePosixPath(name) for listing in listings for name in listing}
    trials = {str(path.parent) for path in paths.values() if path.name in (CONFIG, RESULT)} - {"."}
    grouped = [{trial: dict[str, Any]() for trial in ("", *sorted(trials))} for _ in listings]
    for listing, group in zip(listings, grouped, strict=True):
        for name, value in listing.items():
            trial = next((folder for folder in map(str, paths[name].parents) if folder in trials), "")
            group[trial][name.removeprefix(trial).lstrip("/")] = value
    return grouped


def _list_here(root: Path) -> dict[str, Stamp]:
    """The files of a folder that are sent; links are not followed."""
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
    """Locks, unfinished and damaged files, and notes of this side stay here; the lease is a matter of its own."""
    path = PurePosixPath(name)
    stays = any(part in (".aside", "..") or part.endswith(".damaged") for part in path.parts)
    return not (stays or path.name in ("", LEASE, NOTES, MARK, ".lock") or path.suffix in (".tmp", ".lock"))


def _order(name: str) -> tuple[int, str]:
    """Rows first, then what tells of other files after these."""
    base = name.rpartition("/")[2]
    return _LAST.index(base) + 1 if base in _LAST else -(base == "metrics.jsonl"), name


def _is_last(name: str) -> bool:
    return _order(name)[0] > 0


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_size, status.st_mtime_ns


def _version(info: Mapping[str, Any]) -> str:
    """Size and what tells a file from another one of that size."""
    tells = next((info[name] for name in ("ETag", "etag", "md5Hash", "content_md5") if info.get(name)), None)
    when = next(
        (info[name] for name in ("mtime", "LastModified", "last_modified", "updated", "created") if name in info), ""
    )
    return f"{info['size']} {tells or when}"


def _is_finished(trial: Path) -> bool:
    """Whether the trial has a result that stands."""
    try:
        return read_json(trial / RESULT)["status"] in ("finished", "diverged")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _say(line: str) -> None:
    print(line, file=LenientStream(sys.stderr), flush=True)
