"""Work ahead in threads, with the results in order, and a time-out for reading."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count, islice
from queue import SimpleQueue
from typing import Any, TypeVar

from vitmods.util.errors import UserError

Item = TypeVar("Item")
PATIENCE_S = 1800.0  # for an image or a batch
PATIENCE_SETTING = "VITMODS_DATA_TIMEOUT"
AHEAD = 64  # images, where they are read for themselves and not in batches
END_S = 5.0  # that threads may take to finish what they are at
_reading: dict[int, tuple[str, float]] = {}  # thread -> what it reads, and since when


def cores() -> int:
    """Cores that this process may use, where the system reports them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def patience() -> float | None:
    """Seconds to wait for an image or a batch; None: for ever. UserError where the setting is not a number."""
    text = os.environ.get(PATIENCE_SETTING, "").strip()
    try:
        seconds = float(text) if text else PATIENCE_S
    except ValueError:
        raise UserError(f"{PATIENCE_SETTING} is a number of seconds, or 0 for no time-out, not {text!r}.") from None
    return seconds if seconds > 0 else None


@contextmanager
def busy_with(name: str) -> Iterator[None]:
    """Report `name` as what this thread reads, should there be a time-out inside."""
    thread = threading.get_ident()
    before = _reading.get(thread)
    _reading[thread] = name, time.monotonic()
    try:
        yield
    finally:
        if before is None:
            del _reading[thread]
        else:
            _reading[thread] = before


def in_order(
    make: Callable[[int], Item], numbers: Iterable[int], workers: int, ahead: int | None = None
) -> Iterator[Item]:
    """make(number) for each number, in order, by `workers` threads that stay `ahead` items ahead; 0: in this thread.

    Threads suffice since the work is done by numpy and torch, which let others run meanwhile. Items that are ready when
    the consumer stops are dropped. ahead: None: one more than there are workers.

    Raises:
        UserError: an item was not ready in time; names what its threads read. Without workers nothing times out.
    """
    if workers <= 0:
        yield from map(make, numbers)
        return
    limit, waiting = patience(), iter(numbers)
    tasks: SimpleQueue[tuple[Future[Item], int] | None] = SimpleQueue()

    def work() -> None:
        while (task := tasks.get()) is not None:
            future, number = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(make(number))
                except BaseException as error:
                    future.set_exception(error)

    # Daemons: one that hangs in the disk must not keep the process from ending.
    threads = [threading.Thread(target=work, name=f"images_{i}", daemon=True) for i in range(workers)]
    for thread in threads:
        thread.start()
    line: deque[Future[Item]] = deque()

    def add(count: int) -> None:
        for number in islice(waiting, count):
            line.append(Future())
            tasks.put((line[-1], number))

    end_s = END_S
    try:
        add(workers + 1 if ahead is None else ahead)
        while line:
            try:
                item = line[0].result(limit)
            except TimeoutError:
                if line[0].done():  # it is the item's own
                    raise
                end_s, now = 0.0, time.monotonic()
                busy = [(*_reading[t.ident], t.name) for t in threads if t.ident in _reading]
                reading = [
                    f"{thread} has been at {item} for {now - since:.0f} s"
                    for item, since, thread in sorted(busy, key=lambda entry: entry[1])[:3]
                ]
                raise UserError(
                    f"No images for {limit:g} s: {'; '.join(reading) or 'their threads do not finish'}. Check "
                    f"that the disk or the network answers; {PATIENCE_SETTING} sets how many seconds to wait, 0 for "
                    "ever."
                ) from None
            line.popleft()
            add(1)
            yield item
    finally:
        for future in line:
            future.cancel()
        for _ in threads:
            tasks.put(None)
        end = time.monotonic() + end_s
        for thread in threads:
            if thread is not threading.current_thread():  # which collects this generator as garbage
                thread.join(max(0.0, end - time.monotonic()))


def ahead(items: Iterator[Item], prepare: Callable[[Item], Item]) -> Iterator[Item]:
    """Yield the items in order, prepared by a thread that stays two ahead of the consumer."""
    end: Any = object()

    def take(_: int) -> Item:
        item = next(items, end)
        return item if item is end else prepare(item)

    for item in in_order(take, count(), 1):
        if item is end:
            return
        yield item
