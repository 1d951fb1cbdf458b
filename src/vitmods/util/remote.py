"""Folders at an address that fsspec opens, such as s3://bucket/runs/x: work happens in a copy on this machine's disk.

The copy lies below the user's cache folder, at a path that says the address. A run brings what the address has, sends
each file when it is written (a trial's result and a checkpoint's index last, so that what is there is always whole),
and removes there what was removed here. Each folder of the copy notes in `.sent.json` which version of a file both
sides have; so work that could not be sent is sent by the next run, and what another machine has written comes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, TypeVar

from vitmods.util.address import AddressPlace, Unreachable, address_of, named, opened, place, tried
from vitmods.util.errors import UserError
from vitmods.util.files import LenientStream, disk_errors, write_atomically, write_json
from vitmods.util.lease import LEASE, Lease

T = TypeVar("T")
_IN_ONE_STEP = {"s3", "s3a", "gs", "gcs", "abfs", "az", "adl", "oss", "memory"}  # a file is there when all of it is
_SENT = ".sent.json"
_FIRST_SENT, _LAST_SENT = ("metrics.jsonl",), ("checkpoint.previous.pt", "checkpoint.pt", "index.json", "result.json")
_GROWING = ("metrics.jsonl",)  # sent with what is written beside them
SEND_EVERY_S = 5.0


def brought(path: str) -> str:
    """What lies at an address, on this disk; anything else as it is. UserError where there is nothing."""
    folder = place(path)
    mirror = mirror_of(folder)
    if mirror is None:
        return path
    mirror.fetch()
    if not folder.exists():
        raise UserError(f"There is nothing at {path}.")
    return str(folder)


def mirror_of(folder: Path) -> Mirror | None:
    """Of a folder that is a copy. UserError where its address cannot be opened."""
    address = address_of(folder)
    return None if address is None else Mirror(folder, address)


def publish(path: Path) -> None:
    """Send a file that was written into a copy, with what else is new in its folder; nothing for other files."""
    mirror = mirror_of(path.parent)
    if mirror is not None:
        mirror._send_folder(path.parent, final=True)


class _Sent(NamedTuple):
    """A file as both sides have it: size and time here, and what tells its version there."""

    size: int
    time_ns: int
    version: str


class Mirror:
    """A folder here and the address that it is a copy of."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address
        self._fs, self._root = opened(address)
        self._protocol = address.partition(":")[0]
        self._there: set[str] = set()  # what was brought or sent, and is removed there when it goes here
        self._lease: Lease | None = None

    def lease(self) -> AddressPlace:
        """Where a run's hold of the address is noted."""
        return AddressPlace(f"{self.address}/{LEASE}")

    @contextmanager
    def kept(self, lease: Lease) -> Iterator[None]:
        """Bring what is there; while inside, send what is written, and the rest at the end, unless the lease is lost.

        Raises:
            Unreachable: not all could be sent. It lies here, and the next run sends it.
        """
        self._lease = lease
        self.fetch()
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

    def fetch(self) -> None:
        """Bring what is new there, and remove what was removed there. Where both sides have changed the files of a
        folder, those of this side are set aside."""
        listed = self._listed()
        self._there = set(listed)
        if not listed:  # an empty address is no reason to remove anything here
            for folder in _folders(self.folder):
                (folder / _SENT).unlink(missing_ok=True)
        there: dict[str, dict[str, str]] = {}
        for name, version in listed.items():
            parent, _, base = name.rpartition("/")
            there.setdefault(parent, {})[base] = version
        here = {path.relative_to(self.folder).as_posix() for path in _folders(self.folder)}
        for parent in sorted({*there, *("" if one == "." else one for one in here)}):
            self._fetch_folder(parent, there.get(parent, {}))

    def send(self, final: bool = True) -> None:
        """Send what has changed here, folder by folder; unless it is `final`, without what still grows."""
        for folder in _folders(self.folder):
            if final or not _grows(folder.relative_to(self.folder)):
                self._send_folder(folder, final)
        for name in [one for one in sorted(self._there) if not (self.folder / one).exists()]:
            # Last of all: a new checkpoint is there before the old one goes.
            self._tried(partial(self._remove, name))
            self._there.discard(name)
            _note((self.folder / name).parent, {name.rpartition("/")[2]: None})

    def _send_until(self, ended: threading.Event) -> None:
        reported = False
        while not ended.wait(SEND_EVERY_S):
            try:
                self.send(final=False)
                reported = False
            except UserError as error:
                if not reported:
                    _say(f"{error} The work goes on.")
                reported = True
            except OSError:  # a file or folder that goes while it is looked at
                continue

    def _fetch_folder(self, parent: str, there: Mapping[str, str]) -> None:
        folder, sent = self.folder / parent, _sent(self.folder / parent)
        stamps = {name: _stamp(folder / name) for name in {*there, *sent}}
        changed = {name for name, stamp in stamps.items() if stamp and (name not in sent or stamp != sent[name][:2])}
        new = {name for name, version in there.items() if name not in sent or sent[name].version != version}
        clash = [name for name in changed & new if not self._tried(partial(self._equal, folder / name, there[name]))]
        if clash:
            aside = self.folder / ".aside" / time.strftime("%Y%m%d-%H%M%S") / parent
            _say(f"{named(folder)} was changed by another machine too; what this one has not sent is kept in {aside}.")
            with disk_errors(aside):
                aside.mkdir(parents=True, exist_ok=True)
                for path in [one for one in folder.iterdir() if one.is_file()]:
                    path.rename(aside / path.name)
            changed, new = set(), set(there)
        wanted = (new - changed) | {name for name in there if not (folder / name).exists()}
        for name in sorted(wanted, key=_order):
            self._bring(folder / name)
        _note(folder, {name: self._as_sent(folder / name, there[name]) for name in new | wanted})
        for name in sent.keys() - there.keys() - changed:
            (folder / name).unlink(missing_ok=True)
            _note(folder, {name: None})

    def _bring(self, path: Path) -> None:
        def write(file: IO[bytes]) -> None:
            def copy() -> None:
                file.seek(0)
                file.truncate()
                with self._fs.open(self._remote(path), "rb") as source:
                    shutil.copyfileobj(source, file, 1 << 20)

            self._tried(copy)

        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, write)

    def _equal(self, path: Path, version: str) -> bool:
        """Whether a file that nothing is noted of, as after a kill, is the one that is there."""
        if int(version.partition(" ")[0]) != path.stat().st_size:
            return False
        with path.open("rb") as ours, self._fs.open(self._remote(path), "rb") as theirs:
            while block := ours.read(1 << 20):
                if block != theirs.read(len(block)):
                    return False
        return True

    def _send_folder(self, folder: Path, final: bool) -> None:
        """Send what has changed in it."""
        sent = _sent(folder)
        names = sorted((one.name for one in folder.iterdir() if one.is_file() and _is_sent(one)), key=_order)
        if folder.parent.name == "checkpoint" and "index.json" not in names:  # it is being written
            return
        changed = [name for name in names if name not in sent or sent[name][:2] != _stamp(folder / name)]
        if not final and not set(changed) - set(_GROWING):
            changed = []
        with ExitStack() as stack:
            opened = {}
            for name in reversed(changed):  # the last one first: what it tells of the others is then there
                with suppress(FileNotFoundError):
                    opened[name] = stack.enter_context((folder / name).open("rb"))
            for name in changed:
                if name in opened:
                    self._send_file(folder / name, opened[name])

    def _send_file(self, path: Path, file: IO[bytes]) -> None:
        status, remote = os.fstat(file.fileno()), self._remote(path)
        whole = self._protocol in _IN_ONE_STEP
        target = remote if whole else f"{remote}.tmp"

        def copy() -> str:
            if self._lease is not None:
                self._lease.check()
            file.seek(0)
            if not whole:
                self._fs.makedirs(remote.rpartition("/")[0], exist_ok=True)
            with self._fs.open(target, "wb") as out:
                shutil.copyfileobj(_Limited(file, status.st_size), out, 1 << 20)
            if not whole:
                self._fs.mv(target, remote)
            self._fs.invalidate_cache()
            return _version(self._fs.info(remote))

        version = self._tried(copy)
        self._there.add(path.relative_to(self.folder).as_posix())
        _note(path.parent, {path.name: _Sent(status.st_size, status.st_mtime_ns, version)})

    def _listed(self) -> dict[str, str]:
        def find() -> dict[str, Any]:
            self._fs.invalidate_cache()
            found: dict[str, Any] = self._fs.find(self._root, detail=True)
            return found

        names = {path[len(self._root) :].lstrip("/"): _version(one) for path, one in self._tried(find).items()}
        return {
            name: version
            for name, version in names.items()
            if _is_sent(Path(name)) and ".." not in PurePosixPath(name).parts
        }

    def _as_sent(self, path: Path, version: str) -> _Sent:
        status = path.stat()
        return _Sent(status.st_size, status.st_mtime_ns, version)

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{name}")

    def _remote(self, path: Path) -> str:
        return f"{self._root}/{path.relative_to(self.folder).as_posix()}"

    def _tried(self, act: Callable[[], T]) -> T:
        here = f" What was done lies in {self.folder}; run the same command again to send it."
        return tried(act, f"{self.address} cannot be reached", here)


class _Limited:
    """The first bytes of a file that may grow meanwhile."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._left = file, size

    def read(self, size: int = 1 << 20) -> bytes:
        found = self._file.read(min(size, self._left))
        self._left -= len(found)
        return found


def _version(info: Mapping[str, Any]) -> str:
    """Size and what tells a file from another one of that size."""
    tells = next((info[name] for name in ("ETag", "etag", "md5Hash", "content_md5") if info.get(name)), None)
    when = next(
        (info[name] for name in ("mtime", "LastModified", "last_modified", "updated", "created") if name in info), ""
    )
    return f"{info['size']} {tells or when}"


def _folders(root: Path) -> list[Path]:
    """A folder and those below it, but for what is set aside or damaged."""
    if not root.is_dir():
        return []
    return [root, *(path for path in sorted(root.rglob("*")) if path.is_dir() and not _stays(path))]


def _stays(path: Path) -> bool:
    return any(part == ".aside" or part.endswith(".damaged") for part in path.parts)


def _is_sent(path: Path) -> bool:
    """Locks, unfinished files and notes of this side stay here; the lease is a matter of its own."""
    return (
        path.name not in ("", LEASE, _SENT)
        and path.suffix not in (".tmp", ".lock")
        and path.name != ".lock"
        and not _stays(path)
    )


def _grows(folder: Path) -> bool:
    """Folders that are sent when a run ends."""
    return folder.name == "tb" or folder.parts[:1] == ("logs",)


def _order(name: str) -> tuple[int, str]:
    if name in _FIRST_SENT:
        return -1, name
    return (_LAST_SENT.index(name) + 1 if name in _LAST_SENT else 0), name


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns


def _sent(folder: Path) -> dict[str, _Sent]:
    try:
        noted = json.loads((folder / _SENT).read_text(encoding="utf-8"))
        return {name: _Sent(*one) for name, one in noted.items()}
    except (OSError, ValueError, TypeError, AttributeError):  # then files are compared
        return {}


def _note(folder: Path, changes: Mapping[str, _Sent | None]) -> None:
    if not changes or not folder.is_dir():
        return
    noted = {**_sent(folder), **changes}
    try:
        write_json(folder / _SENT, {name: list(one) for name, one in noted.items() if one is not None})
    except UserError:
        if folder.is_dir():  # and was not removed meanwhile
            raise


def _say(line: str) -> None:
    print(line, file=LenientStream(sys.stderr), flush=True)
