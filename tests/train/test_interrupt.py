import signal
import threading

import pytest

from vitmods.train.interrupt import Interrupted, StopRequest, stop_on_signals


def work(*numbers, answer):
    """What a loop does: signals come, then it looks."""
    with stop_on_signals() as request:
        request.check()
        for number in numbers:
            signal.raise_signal(number)
        if answer:
            request.check()
        work.reached_the_end = True


def not_ignored(request, number):
    """As in a shell: a test run under nohup ignores SIGHUP, and what is ignored stays so."""
    before = signal.getsignal(number)
    if before is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        request.addfinalizer(lambda: signal.signal(number, before))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_is_noted_and_answered_at_the_next_check(number, code, request):
    not_ignored(request, number)
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=number.name) as caught:
        work(number, answer=True)
    assert caught.value.exit_code == code
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_nohup_stays_in_force(number):
    """Nor does the Ctrl-C of a terminal reach what a script has started in the background."""
    before = signal.signal(number, signal.SIG_IGN)
    work.reached_the_end = False
    try:
        work(number, answer=True)
        assert work.reached_the_end
        with pytest.raises(Interrupted, match="SIGTERM"):
            work(signal.SIGTERM, answer=True)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_second_ctrl_c_is_not_held_back():
    assert not issubclass(Interrupted, Exception), "a handler of failures does not swallow it"
    with pytest.raises(KeyboardInterrupt) as caught:
        work(signal.SIGINT, signal.SIGINT, answer=True)
    assert not isinstance(caught.value, Interrupted)
    work.reached_the_end = False
    with pytest.raises(KeyboardInterrupt):  # that nobody answered: its usual effect at the end
        work(signal.SIGINT, answer=False)
    assert work.reached_the_end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_of_a_process_manager_does_not_cut_off_the_answer_to_the_first(number, request):
    """Slurm and systemd signal every process, and a study signals its workers."""
    not_ignored(request, number)
    with pytest.raises(Interrupted, match=number.name):
        work(signal.SIGTERM, number, number, answer=True)


def test_threads_leave_the_handlers_alone():
    before, seen = signal.getsignal(signal.SIGINT), []

    def in_thread():
        with stop_on_signals() as request:
            seen.append((signal.getsignal(signal.SIGINT), type(request)))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert seen == [(before, StopRequest)]
