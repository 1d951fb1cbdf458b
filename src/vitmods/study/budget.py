"""How much one run may take: a time, or a number of trials. Imports without torch."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from vitmods.util.errors import UserError
from vitmods.util.text import duration


@dataclass(frozen=True)
class Budget:
    """How much one run may take; None: no end. No trial begins that is expected to end later than `seconds + over_s`.

    over_s:  how much later the last seed may end, if the run would otherwise end even earlier
    seeds_follow: whether the time alone decides: a study ends with fewer or more seeds than were given, base alone has
        trainings as long as fit, and a study of which nothing fits is refused instead of begun
    began:   when the run did, on the monotonic clock
    timings: seconds that each measurement of steps took
    """

    seconds: float | None = None
    trials: int | None = None
    over_s: float = 0.0
    seeds_follow: bool = False
    began: float = field(default_factory=time.monotonic, compare=False)
    timings: list[float] = field(default_factory=list, compare=False)

    @property
    def left_s(self) -> float:
        """Seconds until the end."""
        return math.inf if self.seconds is None else self.began + self.seconds - time.monotonic()

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Book the time of a measurement."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.timings.append(time.monotonic() - began)

    @property
    def may_time(self) -> bool:
        """Whether another measurement fits the share of the time for them; the first one always does."""
        most_s = MOST_FOR_TIMING * (self.seconds or math.inf)
        return not self.timings or sum(self.timings) + max(self.timings) <= most_s

    def spent(self) -> str:
        """Say where the time of a budget went so far; empty without a limit of time."""
        if self.seconds is None:
            return ""
        timed_s, used_s = sum(self.timings), self.seconds - self.left_s
        other = f"reading images and building models {duration(max(0.0, used_s - timed_s))}"
        return f"Of {duration(self.seconds)}, timing took {duration(timed_s)}, and {other}."


class NotInTime(UserError):
    """No trial of a study fits its budget of time."""


ENDLESS = Budget()
MOST_FOR_TIMING = 0.15  # of a time budget
MOST_FOR_COSTS = 0.1  # of the time that the trials took: while one process measures costs, the others wait
REPORT_S = 5.0  # CPU seconds for what follows the costs: the answer and the report
MOST_OVER = 0.1  # of a time budget that sets the number of seeds: a seed may take a fifth of it
TRIED_S = 0.1


def seconds_after_trials(budget: Budget, cost_seconds: float, slower: float = 1.0) -> float:
    """Seconds of a time budget that the costs and the report take, where work takes so many times its CPU time."""
    limit_s = budget.seconds or 0.0
    return min(cost_seconds, MOST_FOR_COSTS * limit_s) + min(slower * REPORT_S, MOST_FOR_COSTS * limit_s)


def slowdown() -> float:
    """Time how many seconds a CPU second takes now: more than one where other processes use the cores."""
    began, began_cpu = time.perf_counter(), time.process_time()
    while (cpu_s := time.process_time() - began_cpu) < TRIED_S:
        pass
    return max(1.0, (time.perf_counter() - began) / cpu_s)


def make_budget(budget: str | int | Budget | None) -> Budget:
    """Read "2h", "30m", "90s", "40trials", or a number of trials; None is endless. UserError for others."""
    if budget is None or isinstance(budget, Budget):
        return budget or ENDLESS
    text = f"{budget}trials" if isinstance(budget, int) else budget
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(h|m|min|s|trials?)?\s*", text)
    number, unit = (float(match[1]), match[2]) if match else (0.0, "")
    if number <= 0 or (unit or "").startswith("trial") > number.is_integer():
        raise UserError(
            f"A budget is a time such as 2h, 30m or 90s, or a number of trials such as 40trials, not {budget!r}."
        )
    if unit is None:
        raise UserError(
            f"The budget {budget} does not have a unit: write {number:g}m for minutes, {number:g}h or {number:g}trials."
        )
    if unit.startswith("trial"):
        return Budget(trials=int(number))
    return Budget(seconds=number * {"h": 3600, "m": 60, "min": 60, "s": 1}[unit])
