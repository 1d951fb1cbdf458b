"""Ctrl-C, SIGTERM and SIGHUP as a request that the loop answers between two steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """Training was stopped by a signal; the state is saved and the message names how to resume.

    A KeyboardInterrupt, so that `except Exception` around a trial does not take it for a failure.
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """The exit code of a process stopped by a signal: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self.signum


class StopRequest:
    """The signal that asked to stop, if any."""

    signum: int | None = None

    def check(self) -> None:
        """Raise Interrupted if a signal has come."""
        stop_by(self.signum)


def stop_by(signum: int | None) -> None:
    """Raise Interrupted for a signal."""
    if signum is not None:
        raise Interrupted(f"Stopped by {signal.Signals(signum).name}", signum)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Note SIGINT, SIGTERM and SIGHUP in a request. A second Ctrl-C has its usual effect. A second SIGTERM is ignored:
    Slurm, systemd and a study that stops its workers send one each. An ignored SIGHUP or SIGINT, as under nohup and in
    a script's background, stays ignored.

    A signal without an answer by the end (by raising Interrupted) has its usual effect then. Outside the main thread,
    where Python does not allow handlers, signals keep their usual effect.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in numbers}
    before = {n: handler for n, handler in before.items() if n == signal.SIGTERM or handler is not signal.SIG_IGN}

    def note(signum: int, frame: FrameType | None) -> None:
        request.signum = signum
        if signal.SIGINT in before:
            signal.signal(signal.SIGINT, before[signal.SIGINT])

    for number in before:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if request.signum is not None:
        signal.raise_signal(request.signum)
