"""A lease: a small file in a folder that says which run holds it, on machines that do not see each other's locks.

Kernel locks end at the machine on many shared disks, and object stores have none. So the holder counts a number up in
the file, every `BEAT_S` seconds. Whoever wants the folder watches that file: one that changes has a holder, one that
does not for `STALE_S` seconds has none any more and is taken over. No clocks are compared.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from vitmods.util.errors import UserError
from vitmods.util.files import LenientStream, disk_errors
from vitmods.util.limits import parse_json, read_bytes
from vitmods.util.text import printable

LEASE = ".lease"
BEAT_S = 10.0
STALE_S = 60.0
WATCH_S = 1.0  # between two looks at a lease that another run may hold
LOOK_S = 5.0  # that `look` waits for a place that does not answer
_UNKNOWN = {"process": "?", "host": "another machine"}
SETTLE_S = 2.0  # more than a write takes: of several that write at a time, the last one's is found by all


class LeasePlace(Protocol):
    """Where the file is: `FilePlace`, or that of an address in `vitmods.util.address`."""

    def read(self) -> bytes | None:
        """The content; None where there is no file. UserError for what can be no lease."""

    def create(self, content: bytes) -> bool:
        """Write a new file; False where there is one."""

    def write(self, content: bytes) -> None:
        """In place of the one that is there, in one step."""

    def remove(self) -> None: ...


class FilePlace:
    """A file on a disk, which may be shared."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> bytes | None:
        try:
            return read_bytes(self._path, "lease")
        except FileNotFoundError:
            return None
        except (IsADirectoryError, ValueError) as error:
            raise no_lease(str(self._path), error) from error

    def create(self, content: bytes) -> bool:
        with disk_errors(self._path):
            try:
                with open(self._path, "xb") as file:
                    file.write(content)
            except FileExistsError:
                return False
            except OSError:  # what is half there would be waited for
                self._path.unlink(missing_ok=True)
                raise
        return True

    def write(self, content: bytes) -> None:
        temporary = self._path.with_name(f"{self._path.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            temporary.write_bytes(content)
            os.replace(temporary, self._path)
        finally:
            temporary.unlink(missing_ok=True)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def _uptime() -> float:
    """Seconds; they pass while the machine sleeps too, where the system tells that."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def machine() -> str:
    """What tells this machine from all others, since it was started."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        started = f"{uuid.getnode():x}"
    return f"{platform.node()} {started}"


class Lease:
    """One run's hold of a folder.

    Attributes:
        id: of this run.
        previous: the id of the run that it was taken over from; None: of none, or of one that gave it back.
        lost: why the run must stop: who has taken it over, or what is gone; None: it is held.
    """

    def __init__(self, place: LeasePlace, where: str, local: str) -> None:
        """where: named in messages. local: tells the folder on this machine, which the caller holds against others
        here."""
        self._place, self._where = place, where
        self.id, self.previous = uuid.uuid4().hex, None
        self._holder = {"id": self.id, "host": platform.node(), "process": os.getpid()}
        self._holder |= {"machine": machine(), "local": local}
        self._beat, self._held_at = 0, _uptime()
        self._ended, self._wake = threading.Event(), threading.Event()
        self._requests = self._served = 0  # calls of `look`, and how many of them know what there was after they asked
        self._silent, self._changed = False, threading.Condition()
        self._thread = threading.Thread(target=self._renew, daemon=True, name="lease")
        self.lost: str | None = None

    def take(self) -> None:
        """Take the lease and keep it. UserError where another run has it."""
        if not self._place.create(self._content()):
            self._take_over()
        self._held_at = _uptime()
        self._thread.start()

    def check(self) -> None:
        """UserError where another run has taken it over, or the file is gone."""
        if self.lost:
            raise UserError(self.lost)

    def lose(self, why: str, requests: int = 0) -> None:
        """Stop the run."""
        self.lost = why
        self._serve(requests)
        _interrupt_main()

    def look(self) -> None:
        """`check` by what is there now, where the hold was not renewed for so long that another run may have come: a
        run that was asleep stops at once. A place that does not answer tells nothing, and is waited for once."""
        if not (self.lost or self._ended.is_set()) and self._age() >= STALE_S / 2:
            with self._changed:
                self._requests += 1
                mine = self._requests
                self._wake.set()
                seconds = 0 if self._silent else LOOK_S
                self._silent = not self._changed.wait_for(lambda: self.lost or self._served >= mine, seconds)
        self.check()

    def _age(self) -> float:
        """Seconds since the hold was renewed."""
        return _uptime() - self._held_at

    def give_back(self) -> None:
        """Let others have it."""
        self._ended.set()
        self._wake.set()
        self._thread.join()
        with suppress(Exception):  # it goes stale by itself
            if self._is_mine(self._place.read()):
                self._place.remove()

    def _take_over(self) -> None:
        found = self._place.read()
        if found is not None and not self._was_here(found):
            self._say(f"{_who(found)} holds {self._where}: waiting up to {STALE_S:.0f} s to see whether it is at work.")
            end = time.monotonic() + STALE_S
            while found is not None and time.monotonic() < end:
                time.sleep(min(WATCH_S, STALE_S / 10))
                now = self._place.read()
                if now is not None and now != found:
                    raise self._refused(now)
                found = now
            if found is not None:
                self._say(f"{_who(found)} is gone: this run takes {self._where} over.")
        if found is None:  # given back in the meantime
            if not self._place.create(self._content()):
                raise self._refused(self._place.read())
            return
        if (now := self._place.read()) != found:
            raise self._refused(now)
        self._place.write(self._content())
        if not self._was_here(found):
            time.sleep(SETTLE_S)
        if not self._is_mine(now := self._place.read()):
            raise self._refused(now)
        self.previous = _read(found).get("id")

    def _renew(self) -> None:
        while True:
            self._wake.wait(BEAT_S)
            self._wake.clear()
            if self._ended.is_set():
                return
            requests = self._requests
            with suppress(Exception):  # a disk or a network that is away for a while; the next time
                found = self._place.read()
                if found is None and self._age() < STALE_S:  # nobody can have come: it was removed by hand
                    self._place.create(self._content())
                elif not self._is_mine(found):
                    self.lose(self._reason(found), requests)
                    return
                else:
                    self._beat += 1
                    self._place.write(self._content())
                self._held_at = _uptime()
            self._serve(requests)

    def _serve(self, requests: int) -> None:
        with self._changed:
            self._served, self._silent = requests, False
            self._changed.notify_all()

    def _reason(self, found: bytes | None) -> str:
        late = f"this run did not renew its hold for more than {STALE_S:.0f} s"
        if found is None:
            return (
                f"The lease of {self._where} is gone, and {late}: it was removed, or another run came and has ended. "
                "See what is there, then run the same command."
            )
        return f"{_who(found)} has taken {self._where} over, since {late}. Nothing is lost; leave the work to that run."

    def _content(self) -> bytes:
        return json.dumps({**self._holder, "beat": self._beat}).encode()

    def _is_mine(self, content: bytes | None) -> bool:
        return _read(content).get("id") == self._holder["id"]

    def _was_here(self, content: bytes) -> bool:
        """Whether it is of a run of this machine that used the folder as this one does: that one has ended, since the
        caller holds the folder here."""
        found = _read(content)
        return all(found.get(name) == self._holder[name] for name in ("machine", "local"))

    def _refused(self, content: bytes | None) -> UserError:
        return UserError(
            f"Another run is at work in {self._where} ({_who(content)}). Wait for it or end it, then run the same "
            "command."
        )

    @staticmethod
    def _say(line: str) -> None:
        print(line, file=LenientStream(sys.stderr), flush=True)


@contextmanager
def leased(place: LeasePlace, where: str, local: str) -> Iterator[Lease]:
    """Hold a lease. UserError where another run has it, or has taken it over in the meantime."""
    lease = Lease(place, where, local)
    lease.take()
    try:
        with _ended_by_sigterm(lease):
            yield lease
        lease.check()  # signals may be ignored
    except BaseException:  # also an error that followed from the loss
        lease.check()
        raise
    finally:
        lease.give_back()


def _ignores_ctrl_c() -> bool:
    """As in a script's background."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def _interrupt_main() -> None:
    """Send the main thread SIGINT, or SIGTERM if SIGINT is ignored. A real signal also wakes a thread that sleeps or
    waits for a pipe, which `_thread.interrupt_main` does not."""
    number = signal.SIGTERM if _ignores_ctrl_c() else signal.SIGINT
    if callable(signal.getsignal(number)):  # without a handler the signal would kill the process
        signal.pthread_kill(threading.main_thread().ident or 0, number)


@contextmanager
def _ended_by_sigterm(lease: Lease) -> Iterator[None]:
    """While inside, where Ctrl-C is ignored, SIGTERM is a KeyboardInterrupt once the lease is lost; before that it ends
    the process as ever. Other handlers of SIGTERM stay."""
    here = threading.current_thread() is threading.main_thread()
    if not (here and _ignores_ctrl_c() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL):
        yield
        return

    def answer(signum: int, frame: FrameType | None) -> None:
        if lease.lost:
            raise KeyboardInterrupt
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)

    signal.signal(signal.SIGTERM, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _read(content: bytes | None) -> dict[str, Any]:
    try:
        found = parse_json(content or b"")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _who(content: bytes | None) -> str:
    found = _read(content)
    process, host = (printable(str(found.get(name, other)))[:80] for name, other in _UNKNOWN.items())
    return f"process {process} on {host}"


def no_lease(where: str, error: Exception) -> UserError:
    """For what lies where a lease should, and was not written by a run."""
    return UserError(f"{printable(where)} is not what a run writes ({error}): remove it, and run the same command.")
