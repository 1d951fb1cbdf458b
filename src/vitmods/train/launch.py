"""Starts one command several times on this machine, as torchrun does for those who do not have its options in mind."""

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

LIFELINE = "VITMODS_LIFELINE"  # environment: the end of a pipe that closes when the process that started this one ends
GRACE_S = 30.0  # that the others have to save and stop once one has ended
_POLL_S = 0.1


def import_path() -> str:
    """Where this process imports from, for PYTHONPATH of others: the script's own folder is on it, and of the
    command `vitmods` not the one that the user stands in."""
    return os.pathsep.join(entry for entry in sys.path if entry)


def launch(module: str, arguments: Sequence[str], processes: int) -> int:
    """Run `python -P -m MODULE ARGUMENTS` in so many processes that can `join`; their exit code.

    Where one fails, the others are asked to stop and its code is given back; one that was killed is named on stderr.
    Ctrl-C reaches all; SIGTERM and SIGHUP are passed on; those that call `end_with_launcher` end with this one. Threads
    are divided among them unless OMP_NUM_THREADS says how many there are.

    Raises:
        UserError: fewer than two processes.
    """
    if processes < 2:
        raise UserError(f"devices is a number from 1 on, not {processes}.")
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(processes)}
    shared |= {"LOCAL_WORLD_SIZE": str(processes)}
    # -P: what lies where the user stands is not imported.
    command = [sys.executable, "-P", "-m", module, *arguments]
    theirs, held = os.pipe()
    shared |= {LIFELINE: str(theirs)}
    with tempfile.TemporaryDirectory() as said_in, os.fdopen(theirs), os.fdopen(held, "w"):
        environment = {
            "OMP_NUM_THREADS": threads,
            **os.environ,
            **shared,
            SAID_IN: said_in,
            "PYTHONPATH": import_path(),
        }
        started = [
            subprocess.Popen(
                command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, pass_fds=(theirs,)
            )
            for rank in range(processes)
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
            print(
                f"A process of this trial ended with code {code} without a word. What was saved is there: the same "
                "command goes on.",
                file=sys.stderr,
            )
        return code


def end_with_launcher() -> None:
    """From now on this process ends at once where the `launch` that started it was killed: nobody would stop it."""
    if (lifeline := os.environ.pop(LIFELINE, None)) is not None:
        threading.Thread(target=_follow, args=(int(lifeline),), daemon=True).start()


def _follow(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing is ever written: it returns when the pipe is closed
    os._exit(128 + signal.SIGTERM)


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
    """The code of one that has ended badly; 0: none has. Names the signal that ended it, which it cannot do."""
    if not any(process.poll() for process in started):
        return 0
    # Asked again: what ended another one may have come after it was asked for the first time.
    codes = [process.poll() or 0 for process in started]
    rank, code = min(enumerate(codes), key=lambda one: one[1])  # a signal comes first: the others end because of it
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        guess = " (out of memory?)" if -code == signal.SIGKILL else ""
        print(
            f"Process {rank} of {len(started)} was killed by {name}{guess}; the others end. What was saved is there: "
            "the same command goes on.",
            file=sys.stderr,
        )
        return code
    return next(filter(None, codes), 0)


def _send(started: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in started:
        if process.poll() is None:
            process.send_signal(number)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
