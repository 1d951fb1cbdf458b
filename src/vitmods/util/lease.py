"""A lease: a small file, in a folder or at an address, that names the run that holds it.

Kernel locks end at the machine on many shared disks, and object stores do not have locks. So the holder increments a
number in the file every `BEAT_S` seconds. Another run watches that file: if it changes, the holder is at work; if it
does not change for `STALE_S` seconds, the holder is gone and its lease is taken over. No clocks are compared.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from vitmods.util.address import EXCLUSIVE, IN_ONE_STEP, LOCAL, moved_onto, open_address, retry
from vitmods.util.errors import UserError
from vitmods.util.files import disk_errors, log
from vitmods.util.limits import check_bytes, open_file, parse_json
from vitmods.util.text import printable

LEASE = ".lease"
BEAT_S = 10.0
STALE_S = 60.0
CONFIRM_S = 5.0
WATCH_S = 1.0  # between two reads of a lease that another run may hold
SETTLE_S = 2.0  # longer than a write takes: of several runs that write at once, all then read what the last one wrote


class LeaseFile:
    """The file of a lease, in a folder or at an address."""

    def __init__(self, path: str) -> None:
        """path: an absolute path on a disk, which may be shared, or an address."""
        self._fs, self._path = open_address(path)
        protocol = path.partition("://")[0] if "://" in path else "file"
        self._local = protocol in LOCAL
        self._exclusive, self._in_one_step = self._local or protocol in EXCLUSIVE, protocol in IN_ONE_STEP
        self._makes_folder = "://" in path and not self._in_one_step  # the folder on a disk is made by the caller
        self._temporary = f"{self._path}.{uuid.uuid4().hex[:8]}.tmp"  # one per run: a failed renewal leaves at most one

    def read(self) -> bytes | None:
        """Return the content, None without a file. Raises UserError for what cannot be a lease."""
        self._fs.invalidate_cache()
        try:
            info = self._fs.info(self._path)
            if info["type"] != "file":
                raise ValueError("it is not a file")
            check_bytes(info["size"], "lease")
            content: bytes = self._fs.cat_file(self._path)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise not_a_lease(self._path, error) from error
        return content

    def create(self, content: bytes) -> bool:
        """Write a new file; False if there is one."""

        def attempt() -> bool:
            if self._makes_folder:
                self._fs.makedirs(self._path.rpartition("/")[0], exist_ok=True)
            if self._local:  # fsspec looks first and then writes; two runs may both see nothing
                try:
                    with open(self._path, "xb") as file:
                        file.write(content)
                except FileExistsError:
                    return False
                except OSError:  # other runs would wait for a half-written file
                    Path(self._path).unlink(missing_ok=True)
                    raise
                return True
            if self._exclusive:
                try:
                    self._fs.pipe_file(self._path, content, mode="create")
                    return True
                except FileExistsError:
                    return self.read() == content  # an earlier attempt succeeded, and its answer was lost
                except OSError as error:
                    if error.errno != errno.ENOSYS:
                        raise
                    self._exclusive = False  # some stores with S3's interface do not support If-None-Match
            if (present := self.read()) is not None:
                return present == content
            self._fs.pipe_file(self._path, content)
            return True

        with disk_errors(Path(self._path)) if self._local else nullcontext():
            is_created = attempt() if self._local else retry(attempt, f"{self._path} cannot be written")
        if is_created and not self._exclusive:
            time.sleep(SETTLE_S)
            return self.read() == content
        return is_created

    def write(self, content: bytes) -> None:
        """Replace the file, in one step if the file system can."""
        if not self._in_one_step:
            self._fs.pipe_file(self._temporary, content)
            if moved_onto(self._fs, self._temporary, self._path):
                return
            self._fs.rm_file(self._temporary)  # not the lease itself: another run would consider it given back
        self._fs.pipe_file(self._path, content)

    def remove(self) -> None:
        self._fs.rm_file(self._path)


def machine() -> str:
    """Identify this machine since its last start."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        started = f"{uuid.getnode():x}"
    return f"{platform.node()} {started}"


class Lease:
    """One run's hold of a folder.

    Attributes:
        lost: why the run must stop: another run has taken the folder over, or the folder is gone; None while it is
            held.
    """

    def __init__(self, file: LeaseFile, where: str, local: str) -> None:
        """where: the name in messages. local: identifies the folder on this machine, where the caller holds a lock."""
        self._file, self._where = file, where
        self._holder = {"id": uuid.uuid4().hex, "host": platform.node(), "process": os.getpid()}
        self._holder |= {"machine": machine(), "local": local}
        self._beat, self._held_at = 0, _uptime()
        self._ended, self._renewal = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._keep, daemon=True, name="lease")
        self.lost: str | None = None
        self.stops_main = False
        self.is_resumed = False
        """whether this machine's last run in this folder held the lease last: no other run has come in between"""

    def take(self) -> None:
        """Take the lease and keep it. Raises UserError if another run has it."""
        if not self._file.create(self._content()):
            self._take_over()
        self._held_at = _uptime()
        self._thread.start()

    def check(self) -> None:
        """Raise UserError if the lease is lost."""
        if self.lost:
            raise UserError(self.lost)

    def lose(self, why: str) -> None:
        """Mark the lease as lost, and stop the run."""
        self.lost = why
        # A real signal also wakes a thread that sleeps or waits for a pipe, which `_thread.interrupt_main` does not.
        if self.stops_main:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def confirm(self) -> None:
        """Renew the lease now if it is so old that another run may have taken it, as after a sleep; then `check`."""
        if _uptime() - self._held_at >= STALE_S / 2:
            renewal = threading.Thread(target=self._renew, daemon=True)
            renewal.start()
            renewal.join(CONFIRM_S)  # a disk or network that hangs must not stop the run
        self.check()

    def give_back(self) -> None:
        """End the lease, so that other runs can take it."""
        self._ended.set()
        self._thread.join()
        with self._renewal, suppress(Exception):  # a file that stays becomes stale
            if self._is_mine(self._file.read()):
                self._file.remove()

    def _take_over(self) -> None:
        content = self._file.read()
        # The caller holds the lock of the local folder, so a run of this machine that had the same folder has ended.
        holder = _parse(content)
        was_here = all(holder.get(name) == self._holder[name] for name in ("machine", "local"))
        if content is not None and not was_here:
            log(f"{_who(content)} holds {self._where}: waiting up to {STALE_S:.0f} s to see whether it is at work.")
            end = time.monotonic() + STALE_S
            while content is not None and time.monotonic() < end:
                time.sleep(min(WATCH_S, STALE_S / 10))
                now = self._file.read()
                if now is not None and now != content:
                    raise self._refused(now)
                content = now
            if content is not None:
                log(f"{_who(content)} is gone: this run takes {self._where} over.")
        if content is None:  # it was given back
            if not self._file.create(self._content()):
                raise self._refused(self._file.read())
            return
        if (now := self._file.read()) != content:
            raise self._refused(now)
        self._file.write(self._content())
        self.is_resumed = was_here
        if not was_here:
            time.sleep(SETTLE_S)
        if not self._is_mine(now := self._file.read()):
            raise self._refused(now)

    def _keep(self) -> None:
        while not (self._ended.wait(BEAT_S) or self.lost):
            self._renew()

    def _renew(self) -> None:
        with self._renewal, suppress(Exception):  # a disk or network that fails for a while is tried again
            if self._ended.is_set() or self.lost:
                return
            content, is_late = self._file.read(), _uptime() - self._held_at >= STALE_S
            if self._is_mine(content):
                self._beat += 1
                self._file.write(self._content())
            elif content is None and not is_late:  # removed by hand: no other run can have taken it
                self._file.create(self._content())
            else:
                late = f"this run did not renew its hold for more than {STALE_S:.0f} s"
                self.lose(
                    f"The lease of {self._where} is gone, and {late}: it was removed, or another run came and has "
                    "ended. See what is there, then run the same command."
                    if content is None
                    else f"{_who(content)} has taken {self._where} over, since {late}. Nothing is lost; leave the work "
                    "to that run."
                )
                return
            self._held_at = _uptime()

    def _content(self) -> bytes:
        return json.dumps({**self._holder, "beat": self._beat}).encode()

    def _is_mine(self, content: bytes | None) -> bool:
        return _parse(content).get("id") == self._holder["id"]

    def _refused(self, content: bytes | None) -> UserError:
        return UserError(
            f"Another run is at work in {self._where} ({_who(content)}). Wait for it or end it, then run the same "
            "command."
        )


@contextmanager
def leased(file: LeaseFile, where: str, local: str) -> Iterator[Lease]:
    """Hold a lease. Raises UserError if another run has it, or has taken it over in the meantime."""
    lease = Lease(file, where, local)
    is_main = threading.current_thread() is threading.main_thread()
    lease.take()
    before: Any = None

    def stop(signum: int, frame: FrameType | None) -> None:
        if lease.lost:
            raise KeyboardInterrupt
        if callable(before):  # another sender's, as a cluster's notice
            before(signum, frame)

    if is_main:
        before = signal.signal(signal.SIGUSR1, stop)
        lease.stops_main = True
    try:
        yield lease
        lease.check()  # a lease without the main thread's signal handler
    except BaseException:  # also an error that followed from the loss
        lease.check()
        raise
    finally:
        lease.give_back()
        if is_main:
            lease.stops_main = False
            signal.signal(signal.SIGUSR1, before or signal.SIG_DFL)


def is_held(file: LeaseFile, lock: Path) -> bool:
    """Whether a run holds the lease of a folder, whose kernel lock on this machine is `lock`.

    A lease that a killed run of this machine has left is not held; one of another machine may be.
    """
    content = file.read()
    if content is None or _parse(content).get("machine") != machine():
        return content is not None
    try:
        with open_file(lock, "lease") as opened:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def not_a_lease(where: str, error: Exception) -> UserError:
    """Make the error for a file in the lease's place that no run has written."""
    return UserError(f"{printable(where)} is not what a run writes ({error}): remove it, and run the same command.")


def _uptime() -> float:
    """Return seconds since the start of the machine, including sleep if the system counts it."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def _parse(content: bytes | None) -> dict[str, Any]:
    try:
        holder = parse_json(content or b"")
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _who(content: bytes | None) -> str:
    holder = {"process": "?", "host": "another machine", **_parse(content)}
    process, host = (printable(str(holder[name]))[:80] for name in ("process", "host"))
    return f"process {process} on {host}"
