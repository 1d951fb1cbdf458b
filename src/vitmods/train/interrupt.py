"""Ctrl-C, SIGTERM and SIGHUP as a request that the loop answers between two steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """Training was stopped by a signal; the state is saved and the message says how to go on.

    A KeyboardInterrupt, so that `except Exception` around a trial does not take it for a failure.
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that a signal stopped: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self.signum


class StopRequest:
    """The signal that asked to stop, if any."""

    signum: int | None = None

    def check(self) -> None:
        """Raise Interrupted if a signal has come."""
        if self.signum is not None:
            raise Interrupted(f"Stopped by {signal.Signals(self.signum).name}", self.signum)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """While inside, SIGINT, SIGTERM and SIGHUP (the terminal is gone) are noted in the request. A second Ctrl-C has its
    usual effect; a second SIGTERM has none: Slurm, systemd and a study that stops its workers send one each, and the
    first one is being answered. A SIGHUP or SIGINT that is ignored, as under nohup and in a script's background, stays
    so.

    A signal that nobody answered by the end (by raising Interrupted) has its usual effect then.

    Outside the main thread, where Python allows no handlers, signals keep their usual effect.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in numbers}
    ignored = [number for number in (signal.SIGINT, signal.SIGHUP) if before[number] is signal.SIG_IGN]
    before = {number: handler for number, handler in before.items() if number not in ignored}

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
