"""Who holds a folder, on machines that share nothing but its files."""

import json
import os
import signal
import threading
import time
from functools import partial

import pytest

from vitmods.train.interrupt import stop_on_signals
from vitmods.util import lease as module
from vitmods.util.errors import UserError
from vitmods.util.lease import Lease, LeaseFile, leased

STALE_S = 60.0  # longer than a busy machine lets a run's thread wait


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    times = {"BEAT_S": 0.05, "WATCH_S": 0.05, "SETTLE_S": 0.2, "STALE_S": STALE_S}
    for name, seconds in times.items():
        monkeypatch.setattr(module, name, seconds)


@pytest.fixture(params=["disk", "object store", "other address"])
def any_place(request, tmp_path):
    """Makes the file of the same lease, for each run its own."""
    if request.param == "disk":
        return lambda: LeaseFile(str(tmp_path / ".lease"))
    address = f"memory://{tmp_path.name}/.lease" if request.param == "object store" else f"file://{tmp_path}/x/.lease"
    return lambda: LeaseFile(address)


@pytest.fixture
def place(tmp_path):
    """On a disk, where what is tested does not depend on the kind of place."""
    return lambda: LeaseFile(str(tmp_path / ".lease"))


@pytest.fixture
def make(request, monkeypatch):
    place = request.getfixturevalue("any_place" if "any_place" in request.fixturenames else "place")

    def lease_of(host, local="study"):
        monkeypatch.setattr(module, "machine", lambda: f"{host} boot")
        monkeypatch.setattr("platform.node", lambda: host)
        return Lease(place(), "runs/x", local)

    return lease_of


def end_without_a_word(lease):
    lease._ended.set()
    lease._thread.join()


def test_a_run_on_another_machine_is_refused_while_the_first_is_at_work(make, any_place):
    first, second = make("one"), make("two")
    first.take()
    began = time.monotonic()
    with pytest.raises(UserError, match=r"Another run is at work in runs/x \(process \d+ on one\)\. Wait for it"):
        second.take()
    assert time.monotonic() - began < STALE_S  # at its first sign of life
    first.give_back()
    assert any_place().read() is None
    second.take()
    second.give_back()


def test_one_that_gives_no_sign_of_life_is_taken_over(make, any_place, monkeypatch, capsys):
    first, second, third = make("one"), make("two"), make("three")
    first.take()
    end_without_a_word(first)
    monkeypatch.setattr(module, "STALE_S", 0.6)
    began = time.monotonic()
    second.take()
    assert time.monotonic() - began > 0.6
    monkeypatch.setattr(module, "STALE_S", STALE_S)
    printed = capsys.readouterr().err
    assert "on one holds runs/x: waiting up to" in printed
    assert "on one is gone: this run takes runs/x over" in printed
    assert json.loads(any_place().read())["host"] == "two"
    with pytest.raises(UserError, match="on two"):
        third.take()
    second.give_back()


def test_a_killed_run_of_this_machine_is_taken_over_at_once(make, monkeypatch, capsys):
    first, again, elsewhere = make("one"), make("one"), make("one", "other copy")
    first.take()
    end_without_a_word(first)
    monkeypatch.setattr(module, "SETTLE_S", STALE_S)
    began = time.monotonic()
    again.take()
    assert time.monotonic() - began < STALE_S
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match="on one"):  # another copy on the same machine is held by nothing but this
        elsewhere.take()
    again.give_back()


@pytest.mark.parametrize("stale", [False, True])
def test_of_several_that_begin_at_once_one_begins(make, any_place, stale, monkeypatch):
    if stale:
        gone = make("gone")
        gone.take()
        end_without_a_word(gone)
        monkeypatch.setattr(module, "STALE_S", 0.6)
    runs = [make(f"host{i}") for i in range(4)]
    outcome, quiet, wait, all_begin = {}, set(), time.sleep, threading.Barrier(len(runs))

    def sleep(seconds):
        """A write takes less than SETTLE_S, on any machine: that lasts until nobody is about to write."""
        settles = seconds == module.SETTLE_S
        if settles or not stale:  # who watches one that is at work writes nothing
            quiet.add(threading.get_ident())
        end = time.monotonic() + 60
        while settles and len(quiet) < len(runs) and time.monotonic() < end:
            wait(0.01)
        if not settles:
            wait(seconds)

    def write(run, content, real):
        if run not in begun:
            begun.add(run)
            all_begin.wait(60)  # all have seen that the other is gone
        real(content)

    begun = set() if stale else set(runs)
    for run in runs:
        monkeypatch.setattr(run._file, "write", partial(write, run, real=run._file.write))

    def begin(run):
        try:
            run.take()
            outcome[run] = "holds"
        except UserError:
            outcome[run] = "refused"
        quiet.add(threading.get_ident())

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("signal.pthread_kill", lambda *_: None)
    threads = [threading.Thread(target=begin, args=[run]) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    host = json.loads(any_place().read())["host"]
    holders = [run for run in runs if outcome[run] == "holds"]
    for run in holders:
        run.give_back()
    assert sorted(outcome.values()) == ["holds", "refused", "refused", "refused"]
    assert [run._holder["host"] for run in holders] == [host]


def refuses(fs, source, target, **how):
    raise FileExistsError(target)


@pytest.mark.parametrize("move", [refuses, lambda *_, **__: None])
def test_where_nothing_moves_onto_a_file_it_is_written_in_place(tmp_path, monkeypatch, move):
    place = LeaseFile(f"file://{tmp_path}/.lease")
    assert place.create(b"one")
    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.mv", move)
    place.write(b"another")
    assert place.read() == b"another"
    assert [path.name for path in tmp_path.iterdir()] == [".lease"]


def test_who_reads_while_it_is_written_finds_a_whole_one(any_place):
    contents, seen = [b"x" * 1000, b"y" * 2000], set()
    assert any_place().create(contents[0])

    def write():
        writer = any_place()
        for content in contents * 100:
            writer.write(content)

    thread = threading.Thread(target=write)
    thread.start()
    reader = any_place()
    while thread.is_alive():
        seen.add(reader.read())
    thread.join()
    seen.add(reader.read())
    assert seen <= set(contents)
    assert any_place().read() == contents[-1]


OTHER = json.dumps({"id": "another", "host": "two", "process": 7}).encode()


def take_over(place):
    """Once more where the holder was just renewing its hold: nobody is that near in time to one that was asleep."""
    if place().read() != OTHER:
        place().write(OTHER)


@pytest.mark.slow
@pytest.mark.parametrize("interrupts", [True, False])
def test_one_that_was_taken_over_stops_and_leaves_the_other_alone(interrupts, place, monkeypatch):
    def work():
        with leased(place(), "runs/x", "study") as lease:
            end = time.monotonic() + 60
            while time.monotonic() < end and (interrupts or not lease.lost):  # until interrupted
                take_over(place)
                time.sleep(0.01)

    if not interrupts:  # as where SIGINT is ignored
        monkeypatch.setattr("signal.pthread_kill", lambda *_: None)
    with pytest.raises(UserError, match="process 7 on two has taken runs/x over"):
        work()
    assert place().read() == OTHER


@pytest.mark.parametrize("sleeps", [lambda: time.sleep(60), lambda: os.read(os.pipe()[0], 1), threading.Event().wait])
def test_a_run_that_waits_is_woken_within_a_second(sleeps, place):
    """In a wait for nothing: an object store that does not answer, a worker that computes."""
    lost = []

    def lose(lease):
        lost.append(time.monotonic())
        lease.lose("its copy was removed")

    def work():
        with leased(place(), "runs/x", "study") as lease:
            threading.Timer(0.1, lose, [lease]).start()
            sleeps()

    with pytest.raises(UserError, match="its copy was removed"):
        work()
    assert time.monotonic() - lost[0] < 1


@pytest.mark.parametrize("answers", [True, False])
def test_a_trial_that_ctrl_c_does_not_reach_stops_too(place, answers):
    """One that is past its last step, and answers no signal any more, tells the same."""
    terminate = signal.getsignal(signal.SIGTERM)  # a library that an earlier test has used may handle it
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a script's background

    def train():
        with leased(place(), "runs/x", "study"), stop_on_signals() as request:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                take_over(place)
                if answers:
                    request.check()
                elif request.signum:
                    return
                time.sleep(0.01)
            raise AssertionError("it was not stopped")

    try:
        with pytest.raises(UserError, match="process 7 on two has taken runs/x over"):
            train()
    finally:
        signal.signal(signal.SIGINT, before)
    assert signal.getsignal(signal.SIGTERM) is terminate


@pytest.mark.parametrize("gave_back", [False, True])
def test_one_that_looks_is_told_at_once(gave_back, make, place, monkeypatch):
    monkeypatch.setattr(module, "BEAT_S", 60.0)
    run = make("one")
    run.take()
    run.confirm()
    place().remove() if gave_back else place().write(json.dumps({"id": "x", "host": "two", "process": 7}).encode())
    run.confirm()  # renewed a moment ago: nobody can have come
    monkeypatch.setattr(module, "STALE_S", 0.0)  # asleep in the meantime
    run.check()  # by what it knew
    why = "The lease of runs/x is gone, and this run" if gave_back else "process 7 on two has taken runs/x over"
    with pytest.raises(UserError, match=why):
        run.confirm()
    run.give_back()
    assert (place().read() is None) == gave_back


def test_a_lease_that_is_removed_by_hand_or_says_nothing_is_written_again(make, place, monkeypatch):
    monkeypatch.setattr(module, "STALE_S", 0.6)
    assert place().create(b"")
    assert not place().create(b"x")
    run = make("one")
    run.take()
    place().remove()
    end = time.monotonic() + 60
    while place().read() is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    run.confirm()
    run.give_back()
