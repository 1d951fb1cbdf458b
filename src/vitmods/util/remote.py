"""Folders at an address that fsspec opens, such as s3://bucket/runs/x: work happens in a copy on this machine's disk.

The copy lies below the user's cache folder, at a path that says the address. A run brings what the address has, sends
each file when it is written (a trial's result and a checkpoint's index last, so that what is there is always whole),
and removes there what was removed here. Each folder of the copy notes in `.sent.json` which version of a file both
sides have; so work that could not be sent is sent by the next run, and what another machine has written comes.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar

from vitmods.util.address import (
    IN_ONE_STEP,
    AddressPlace,
    Unreachable,
    address_of,
    moved_onto,
    named,
    opened,
    place,
    tried,
)
from vitmods.util.copies import (
    NOTES,
    Sent,
    folders,
    grows,
    identity,
    is_large,
    is_sent,
    note,
    order,
    sent_of,
    stamp_of,
    version_of,
)
from vitmods.util.errors import UserError
from vitmods.util.files import LenientStream, disk_errors, write_atomically
from vitmods.util.lease import LEASE, Lease

T = TypeVar("T")
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


def is_there(path: Path) -> bool:
    """Whether there is such a file, in a folder or at the address that the folder is a copy of."""
    if path.exists():
        return True
    mirror = mirror_of(path.parent)
    return mirror is not None and mirror.has(path.name)


def publish(path: Path) -> None:
    """Send a file that was written into a copy, with what else is new in its folder; nothing for other files."""
    mirror = mirror_of(path.parent)
    if mirror is not None:
        mirror._send_folder(path.parent, final=True)


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

    def identity(self) -> str:
        """What tells this copy from those of others."""
        return f"{self.folder.resolve()} {identity(self.folder)}"

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

    def fetch(self, weights: bool = True) -> None:
        """Bring what is new there, and remove what was removed there. Where both sides have changed the files of a
        folder, those of this side are set aside.

        weights: those of a study's trials and their checkpoints too, which is most of it; to read an answer nothing
            needs them.
        """
        listed = self._listed()
        self._there = set(listed)
        if not listed:  # an empty address is no reason to remove anything here
            for folder in folders(self.folder):
                (folder / NOTES).unlink(missing_ok=True)
        there: dict[str, dict[str, str]] = {}
        for name, version in listed.items():
            parent, _, base = name.rpartition("/")
            there.setdefault(parent, {})[base] = version
        here = {path.relative_to(self.folder).as_posix() for path in folders(self.folder)}
        aside = self.folder / ".aside" / time.strftime("%Y%m%d-%H%M%S")
        for parent in sorted({*there, *("" if one == "." else one for one in here)}):
            self._fetch_folder(parent, there.get(parent, {}), weights, aside / parent)

    def has(self, name: str) -> bool:
        """Whether there is a file of that name at the address."""
        return bool(self._tried(partial(self._fs.exists, f"{self._root}/{name}")))

    def send(self, final: bool = True) -> None:
        """Send what has changed here, folder by folder; unless it is `final`, without what still grows."""
        for folder in folders(self.folder):
            if final or not grows(folder.relative_to(self.folder)):
                self._send_folder(folder, final)
        gone = [one for one in sorted(self._there) if not (self.folder / one).exists()]
        if gone:
            self._check_hold()
        for name in gone:
            # Last of all: a new checkpoint is there before the old one goes.
            self._tried(partial(self._remove, name))
            self._there.discard(name)
            note((self.folder / name).parent, {name.rpartition("/")[2]: None})

    def _send_until(self, ended: threading.Event) -> None:
        reported = False
        while not ended.wait(SEND_EVERY_S):
            try:
                self.send(final=False)
                reported = False
            except UserError as error:
                if self._lease is not None and self._lease.lost:  # the run stops by itself
                    return
                if not reported:
                    _say(f"{error} The work goes on.")
                reported = True
            except OSError:  # a file or folder that goes while it is looked at
                continue

    def _fetch_folder(self, parent: str, there: Mapping[str, str], weights: bool, aside: Path) -> None:
        folder, sent = self.folder / parent, sent_of(self.folder / parent)
        stamps = {name: stamp_of(folder / name) for name in {*there, *sent}}
        changed = {name for name, stamp in stamps.items() if stamp and (name not in sent or stamp != sent[name][:2])}
        new = {name for name, version in there.items() if name not in sent or sent[name].version != version}
        clash = [name for name in changed & new if not self._tried(partial(self._equal, folder / name, there[name]))]
        if clash:
            _say(f"{named(folder)} was changed by another machine too; what this one has not sent is kept in {aside}.")
            with disk_errors(aside):
                aside.mkdir(parents=True, exist_ok=True)
                for path in [one for one in folder.iterdir() if self._is_sent(one)]:
                    path.rename(aside / path.name)
            changed, new = set(), set(there)
        wanted = (new - changed) | {name for name in there if not (folder / name).exists()}
        wanted = {name for name in wanted if weights or not is_large(Path(parent, name))}
        for name in sorted(wanted, key=order):
            self._bring(folder / name)
        note(folder, {name: self._as_sent(folder / name, there[name]) for name in (new & changed) | wanted})
        for name in sent.keys() - there.keys() - changed:
            (folder / name).unlink(missing_ok=True)
            note(folder, {name: None})

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
        sent = sent_of(folder)
        names = sorted((one.name for one in folder.iterdir() if self._is_sent(one)), key=order)
        if folder.parent.name == "checkpoint" and "index.json" not in names:  # it is being written
            return
        changed = [name for name in names if name not in sent or sent[name][:2] != stamp_of(folder / name)]
        if not final and not set(changed) - set(_GROWING):
            changed = []
        if changed:
            self._check_hold()
        with ExitStack() as stack:
            opened = {}
            for name in reversed(changed):  # the last one first: what it tells of the others is then there
                with suppress(FileNotFoundError):
                    opened[name] = stack.enter_context((folder / name).open("rb"))
            for name in changed:
                if name in opened:
                    self._send_file(folder / name, opened[name])

    def _check_hold(self) -> None:
        if self._lease is not None:
            self._lease.look()

    def _is_sent(self, path: Path) -> bool:
        return is_sent(path.relative_to(self.folder)) and path.is_file() and not path.is_symlink()

    def _send_file(self, path: Path, file: IO[bytes]) -> None:
        status, remote = os.fstat(file.fileno()), self._remote(path)
        whole = self._protocol in IN_ONE_STEP
        target = remote if whole else f"{remote}.tmp"

        def copy() -> str:
            if self._lease is not None:
                self._lease.check()
            file.seek(0)
            if not whole:
                self._fs.makedirs(remote.rpartition("/")[0], exist_ok=True)
            with self._fs.open(target, "wb") as out:
                shutil.copyfileobj(_Limited(file, status.st_size), out, 1 << 20)
            if not (whole or moved_onto(self._fs, target, remote)):
                with suppress(FileNotFoundError):
                    self._fs.rm_file(remote)
                self._fs.mv(target, remote)
            self._fs.invalidate_cache()
            return version_of(self._fs.info(remote))

        version = self._tried(copy)
        self._there.add(path.relative_to(self.folder).as_posix())
        note(path.parent, {path.name: Sent(status.st_size, status.st_mtime_ns, version)})

    def _listed(self) -> dict[str, str]:
        def find() -> dict[str, Any]:
            self._fs.invalidate_cache()
            found: dict[str, Any] = self._fs.find(self._root, detail=True)
            return found

        found = {path[len(self._root) :].lstrip("/"): one for path, one in self._tried(find).items()}
        # Consoles mark a folder with an object without content, whose name may end in a slash.
        within = {str(folder) for name in found for folder in PurePosixPath(name).parents}
        return {
            name: version_of(one)
            for name, one in found.items()
            if is_sent(Path(name))
            and ".." not in PurePosixPath(name).parts
            and not (one.get("type") == "directory" or name.endswith("/") or (one["size"] == 0 and name in within))
        }

    def _as_sent(self, path: Path, version: str) -> Sent:
        status = path.stat()
        return Sent(status.st_size, status.st_mtime_ns, version)

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


def _say(line: str) -> None:
    print(line, file=LenientStream(sys.stderr), flush=True)
