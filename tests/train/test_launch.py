"""Processes that are started together: one's end is that of all, and what they say is said once."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from vitmods.train.distributed import PeerEnded
from vitmods.train.launch import _failed, launch
from vitmods.util.errors import UserError

FAILS = """
import os, sys, types
from pathlib import Path
from vitmods import cli
from vitmods.util.errors import UserError

class Repeated(UserError):
    repeats = True

def main(arguments):
    rank = int(os.environ["RANK"])
    if rank < 2:
        held = rank == 0 and os.open(Path(__file__).with_name("peer"), os.O_RDWR)
        raise UserError("the disk is full")
    Path(__file__).with_name("peer").read_bytes()  # until rank 0 has ended
    raise Repeated("another one has ended")

sys.modules["vitmods.cli.train"] = types.SimpleNamespace(main=main)
sys.exit(cli.main(["train"]))
"""
ENDS = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), int(sys.argv[1])) if int(sys.argv[1]) else sys.exit(7)
time.sleep(600)
"""
LEFT = """
import os, signal, sys, time, types
from pathlib import Path
from vitmods import cli
from vitmods.util.errors import UserError

class PeerEnded(UserError):
    repeats = True

def main(arguments):
    if os.environ["RANK"] == "1":
        held = open(Path(__file__).with_name("peer"), "wb")  # once the other reads
        os.kill(os.getpid(), signal.SIGKILL) if arguments else os._exit(7)
    Path(__file__).with_name("peer").read_bytes()  # until rank 1 has ended
    time.sleep(0.5 if arguments else 60)  # of two codes it is not known which was first; a signal was
    raise PeerEnded("another one has ended without a word")

sys.modules["vitmods.cli.train"] = types.SimpleNamespace(main=main)
sys.exit(cli.main(["train", *sys.argv[1:]]))
"""
STAYS = """
import os, sys, time
from vitmods.train.launch import end_with_launcher, launch
if "RANK" not in os.environ:
    sys.exit(launch("stays", [], 2))
end_with_launcher()
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    for name, source in {"fails": FAILS, "ends": ENDS, "left": LEFT, "stays": STAYS}.items():
        (tmp_path / f"{name}.py").write_text(source)
    os.mkfifo(tmp_path / "peer")
    monkeypatch.syspath_prepend(tmp_path)  # what is on sys.path here is on that of those that are started
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # and for torchrun
    return tmp_path


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, 137), (signal.SIGSEGV, 139), (0, 7)])
def test_one_that_ends_badly_ends_all(modules, capfd, monkeypatch, number, code):
    monkeypatch.setattr("vitmods.train.launch.GRACE_S", 600.0)
    began = time.monotonic()
    assert launch("ends", [str(int(number))], 3) == code
    assert time.monotonic() - began < 60
    printed = capfd.readouterr().err
    assert printed.count("Process 1 of 3 was killed by") == (1 if number else 0)
    assert ("SIGKILL (out of memory?)" in printed) == (number == signal.SIGKILL)


def test_what_several_say_is_said_once(modules, capfd):
    assert launch("fails", [], 3) == 2
    assert capfd.readouterr().err == "vitmods train: the disk is full\n"


@pytest.mark.parametrize(("arguments", "word"), [(["kill"], "was killed by SIGKILL"), ([], "without a message")])
def test_the_end_of_one_is_said_once(modules, capfd, arguments, word):
    assert launch("left", arguments, 2) == (137 if arguments else 7)
    (line,) = capfd.readouterr().err.splitlines()
    assert word in line
    assert PeerEnded.repeats, "as the one above"


def test_one_that_is_killed_while_it_is_asked_is_the_first(capsys):
    """... though the other, which ends because of it, is seen before it."""
    asked = {0: [None, -signal.SIGKILL], 1: [2, 2]}
    started = [SimpleNamespace(poll=lambda codes=codes: codes.pop(0)) for codes in asked.values()]
    assert _failed(started) == -signal.SIGKILL
    assert "Process 0 of 2 was killed by SIGKILL" in capsys.readouterr().err


def test_those_whose_launcher_is_killed_end_too(modules):
    command = [sys.executable, "-m", "stays"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as launcher:
        ranks = {int(launcher.stdout.readline()) for _ in range(2)}
        launcher.kill()
        ended = threading.Thread(target=launcher.stdout.read, daemon=True)  # its end: no rank holds the pipe any more
        ended.start()
        ended.join(60)
        outlives = ended.is_alive()
        for rank in ranks if outlives else ():
            os.kill(rank, signal.SIGKILL)
    assert not outlives


def test_fewer_than_two_are_refused():
    with pytest.raises(UserError, match="devices must be at least 1"):
        launch("ends", [], 0)
