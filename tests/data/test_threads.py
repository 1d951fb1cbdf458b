"""Prefetching keeps the order, runs ahead by a bounded number, passes errors on and ends its threads."""

import gc
import threading
import time

import pytest

from vitmods.data import threads
from vitmods.data.threads import PATIENCE_SETTING, ahead, busy_with, in_order
from vitmods.util.errors import UserError


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_items_come_in_order(workers):
    assert list(in_order(lambda n: time.sleep(0.002 * (n % 3)) or n * n, range(20), workers)) == [
        n * n for n in range(20)
    ]


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_it_stays_a_bounded_number_ahead_and_threads_end_with_the_consumer():
    made, before = [], set(threading.enumerate())
    items = in_order(lambda n: made.append(n) or n, range(100), 2)
    assert next(items) == 0
    wait_until(lambda: len(made) >= 4)
    time.sleep(0.05)
    assert len(made) == 4
    own = set(threading.enumerate()) - before
    assert len(own) == 2
    items.close()
    wait_until(lambda: not any(thread.is_alive() for thread in own))


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_thread_of_its_own_may_collect_it_as_garbage():
    abandoned, collected = threading.Event(), threading.Event()

    def make(number):
        if number == 1:
            assert abandoned.wait(60)
            gc.collect()
            collected.set()
        return number

    before = set(threading.enumerate())
    cycle = [in_order(make, range(100), 2)]
    cycle.append(cycle)
    assert next(cycle[0]) == 0
    own = set(threading.enumerate()) - before
    gc.disable()
    try:
        del cycle
        abandoned.set()
        assert collected.wait(60)
    finally:
        gc.enable()
    wait_until(lambda: not any(thread.is_alive() for thread in own))


def test_a_thread_takes_and_prepares_items_ahead_in_their_order():
    taken, release = [], threading.Event()

    def items():
        for number in range(6):
            taken.append((number, threading.current_thread().name))
            if number == 3:
                release.set()
            yield number

    results = ahead(items(), lambda number: 10 * number)
    assert [next(results), next(results)] == [0, 10]
    assert release.wait(60)  # two more are taken while the consumer holds the second
    assert list(results) == [20, 30, 40, 50]
    assert {name for _, name in taken} != {threading.current_thread().name}
    assert [number for number, _ in taken] == list(range(6))


@pytest.mark.parametrize("read", [
    lambda items, make: ahead(items, make),
    *(lambda items, make, workers=workers: in_order(make, items, workers) for workers in (0, 2)),
])  # fmt: skip
def test_errors_reach_the_consumer(read):
    def make(n):
        if n == 3:
            raise OSError("disk gone")
        return n

    items = read(iter(range(9)), make)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="disk gone"):
        next(items)


def test_a_thread_that_hangs_is_an_error_that_names_what_it_reads(monkeypatch):
    monkeypatch.setenv(PATIENCE_SETTING, "0.2")
    monkeypatch.setattr(threads, "END_S", 60.0)
    hangs, answered = threading.Event(), threading.Event()

    def make(n):
        with busy_with(f"train/{n}.png"):
            if n == 2:
                hangs.set()
                answered.wait()
            return n

    class Awaited(threads.Future[int]):
        def result(self, timeout=None):
            assert hangs.wait(60)  # what comes before took no time
            return super().result(timeout)

    monkeypatch.setattr(threads, "Future", Awaited)
    items = in_order(make, range(9), 1, 3)
    assert [next(items) for _ in range(2)] == [0, 1]
    started = time.monotonic()
    with pytest.raises(UserError, match=r"No images for 0\.2 s: images_\d has been at train/2\.png for .* 0 for ever"):
        next(items)
    assert time.monotonic() - started < 30, "the consumer waits for the thread that hangs"
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("images"))
    answered.set()


@pytest.mark.parametrize(("setting", "waits"), [("0", True), ("", True), ("0.05", False)])
def test_a_slow_item_is_waited_for_as_long_as_the_setting_says(setting, waits, monkeypatch):
    monkeypatch.setenv(PATIENCE_SETTING, setting)
    read = threading.Event()
    items = in_order(lambda n: read.wait(0.3 if waits else 60) or n, range(1), 1)
    if waits:
        assert list(items) == [0]
        return
    with pytest.raises(UserError, match="their threads do not finish"):
        next(items)
    read.set()


def test_settings_and_errors_that_are_passed_on(monkeypatch):
    def make(n):
        raise TimeoutError("of the network")

    with pytest.raises(TimeoutError, match="of the network"):
        next(in_order(make, range(1), 1))
    monkeypatch.setenv(PATIENCE_SETTING, "soon")
    with pytest.raises(UserError, match="VITMODS_DATA_TIMEOUT is a number of seconds"):
        next(in_order(lambda n: n, range(1), 1))
