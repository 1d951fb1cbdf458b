"""Who runs the trials (and the evaluations of finished ones): this process, or N worker processes on this machine.

Each takes trials that are not finished, tries each once and returns what went wrong, trial by trial. A trial that fails
never stops the others. Results travel through the study's folder, so an executor hands out names and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vitmods.study.plan import Work


class Listener(Protocol):
    """What an executor tells while it works."""

    def started(self, trial: Work) -> None: ...
    def ended(self, trial: Work, failure: str | None) -> None: ...
    def waiting(self) -> None:
        """Called about twice a second while nothing else happens."""


class Executor(Protocol):
    """Something that runs trials: one after the other, in processes, or on a cluster."""

    def run(self, trials: Sequence[Work], listener: Listener) -> dict[Work, str]:
        """Run each trial once. Returns trial -> reason for those that failed; KeyboardInterrupt passes through."""


@dataclass
class Inline:
    """One trial after the other in this process."""

    run_trial: Callable[[Work], Any]

    def run(self, trials: Sequence[Work], listener: Listener) -> dict[Work, str]:
        failures: dict[Work, str] = {}
        for trial in trials:
            listener.started(trial)
            try:
                self.run_trial(trial)
            except Exception as error:
                failures[trial] = describe(error)
            listener.ended(trial, failures.get(trial))
        return failures


def describe(error: BaseException) -> str:
    """One line for a failed trial: the message of an error made for users, type and message of any other."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"
