"""Several processes of one command on this machine, as torchrun starts them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from vitmods.util.errors import SAID_IN, UserError
from vitmods.util.files import log

PEER_ENDED = "Another process of this trial has ended"  # what those say that did not end first
LIFELINE = "VITMODS_LIFELINE"  # environment: the end of a pipe that closes when the process that started this one ends
HERE = "127.0.0.1"
GRACE_S = 30.0  # for the others to save and stop once one has ended
_POLL_S = 0.1
_RESUME = "The state is saved; run the same command again to resume."


def import_path() -> str:
    """Return this process's import path as PYTHONPATH of others: with the script's folder, without the working one."""
    return os.pathsep.join(entry for entry in sys.path if entry)


def free_port(address: str = "") -> int:
    """Return a port of this machine at an address, by default at all of its own, that nothing listens on."""
    with socket.socket() as free:
        free.bind((address, 0))
        return int(free.getsockname()[1])


def seats(processes: int) -> list[dict[str, str]]:
    """Return the environments in which so many processes of this machine can `join`, by rank; for one, none is set."""
    if processes == 1:
        return [{}]
    port, size = str(free_port(HERE)), str(processes)
    shared = {"MASTER_ADDR": HERE, "MASTER_PORT": port, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def launch(module: str, arguments: Sequence[str], processes: int) -> int:
    """Run `python -P -m MODULE ARGUMENTS` in several processes that can `join`. Returns their exit code.

    If one fails, the others are asked to stop and its code is returned; one that was killed is named on stderr. Ctrl-C
    reaches all; SIGTERM and SIGHUP are passed on; those that call `end_with_launcher` end with this one. Threads are
    divided among them unless OMP_NUM_THREADS is set.

    Raises:
        UserError: fewer than two processes.
    """
    if processes < 2:
        raise UserError(f"devices must be at least 1, not {processes}.")
    command = [sys.executable, "-P", "-m", module, *arguments]  # -P: nothing of the working folder is imported
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory() as said_in, os.fdopen(reader), os.fdopen(writer, "w"):
        environment = {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)),
            **os.environ,
            LIFELINE: str(reader),
            SAID_IN: said_in,
            "PYTHONPATH": import_path(),
        }
        started = [
            subprocess.Popen(command, env={**environment, **seat}, pass_fds=(reader,)) for seat in seats(processes)
        ]
        passed_on = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
        for number in passed_on:
            # The terminal sends SIGINT to all of them itself.
            signal.signal(number, lambda n, _: None if n == signal.SIGINT else _send(started, n))
        try:
            code = _wait(started)
        finally:
            for number, handler in passed_on.items():
                signal.signal(number, handler or signal.SIG_DFL)
        if 1 < code <= 128 and not any(Path(said_in).glob("said-*")):  # 1: a trial that diverged
            log(f"A process of this trial ended with code {code} without a message. {_RESUME}")
        return code


def end_with_launcher() -> None:
    """End this process at once if the `launch` that started it is killed, which could not stop it any more."""

    def follow(lifeline: int) -> None:
        os.read(lifeline, 1)  # nothing is ever written: it returns when the pipe is closed
        os._exit(128 + signal.SIGTERM)

    if (lifeline := os.environ.pop(LIFELINE, None)) is not None:
        threading.Thread(target=follow, args=(int(lifeline),), daemon=True).start()


def _wait(started: Sequence[subprocess.Popen[bytes]]) -> int:
    failed, deadline = 0, float("inf")
    while any(process.poll() is None for process in started):
        if not failed and (failed := _failed(started)):
            _send(started, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_S
        if time.monotonic() > deadline:
            _send(started, signal.SIGKILL)
        time.sleep(_POLL_S)
    failed = failed or _failed(started)
    return 128 - failed if failed < 0 else failed  # a shell's code for a signal


def _failed(started: Sequence[subprocess.Popen[bytes]]) -> int:
    """Return the code of a process that failed, 0 if none has. Prints the signal that killed it, which it cannot do."""
    if not any(process.poll() for process in started):
        return 0
    # Polled again: the one that ended another may have ended after its first poll.
    codes = [process.poll() or 0 for process in started]
    rank, code = min(enumerate(codes), key=lambda item: item[1])  # a signal comes first: the others end because of it
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        guess = " (out of memory?)" if -code == signal.SIGKILL else ""
        log(f"Process {rank} of {len(started)} was killed by {name}{guess}; the others end. {_RESUME}")
        return code
    return next(filter(None, codes), 0)


def _send(started: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in started:
        if process.poll() is None:
            process.send_signal(number)
