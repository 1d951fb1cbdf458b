"""Work ahead in threads, with the results in order."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice
from typing import Any, TypeVar

Item = TypeVar("Item")


def cores() -> int:
    """Cores this process may use; not every system can tell that."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(make: Callable[[int], Item], numbers: Iterable[int], workers: int) -> Iterator[Item]:
    """make(number) for each number, in order, by `workers` threads that stay one item more ahead; 0: in this thread.

    Threads suffice since the work is done by numpy and torch, which let others run meanwhile. Items that are ready when
    the consumer stops are dropped.
    """
    if workers <= 0:
        yield from map(make, numbers)
        return
    waiting = iter(numbers)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="images")
    try:
        ahead: deque[Future[Item]] = deque(pool.submit(make, n) for n in islice(waiting, workers + 1))
        while ahead:
            item = ahead.popleft().result()
            ahead.extend(pool.submit(make, n) for n in islice(waiting, 1))
            yield item
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def ahead(items: Iterator[Item], prepare: Callable[[Item], Item]) -> Iterator[Item]:
    """The items in their order, taken and prepared by a thread that stays two ahead of the consumer."""
    end: Any = object()

    def take(_: int) -> Item:
        item = next(items, end)
        return item if item is end else prepare(item)

    for item in in_order(take, count(), 1):
        if item is end:
            return
        yield item
