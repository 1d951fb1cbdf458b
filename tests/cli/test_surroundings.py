"""A study goes on whatever lies in the folder it is started from, and whether or not anybody reads what it says."""

import json
import os
import subprocess
import sys
from threading import Thread

import pytest

from vitmods.cli import main

# As the installed script: without the working directory on sys.path, which `python -m` alone would put there.
VITMODS = [sys.executable, "-P", "-m", "vitmods"]
COMPARE = ["compare", "--base", "mu/4", "--arms", "dpn", "--seeds", "1", "--epochs", "1"]
COMPARE += ["--limit-train", "128", "--device", "cpu", "--cost-seconds", "0"]


@pytest.mark.slow
def test_without_streams_nothing_is_imported_from_the_working_directory(tmp_path):
    """Neither by the command nor by the worker that it starts."""
    for name in ("queue", "random", "json", "threading", "numpy", "torch"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nraise ImportError('taken')\n")
    command = subprocess.list2cmdline([*VITMODS, *COMPARE, "--workers", "2", "--budget", "1trials", "--out", "out"])
    done = subprocess.run(["bash", "-c", f"{command} <&- >&- 2>&-"], cwd=tmp_path, timeout=1200)
    assert not (tmp_path / "mark").exists()
    assert done.returncode == 0
    assert [path.parent.parent.name for path in tmp_path.rglob("result.json")] == ["base"]
    assert (tmp_path / "out" / "logs" / "worker0.txt").exists()
    assert (tmp_path / "out" / "report.html").exists()


def pipe(lines=0):
    """The end to write to, of a pipe whose reader leaves after so many lines."""
    reader, writer = os.pipe()

    def read():
        with open(reader) as stream:
            for _ in range(lines):
                stream.readline()

    thread = Thread(target=read)
    thread.start()
    if not lines:
        thread.join()
    return open(writer, "w")


@pytest.mark.parametrize(
    ("streams", "lines", "damaged"),
    [(["stderr"], 0, False), (["stdout", "stderr"], 1, False), (["stdout", "stderr"], 0, True)],
)
def test_a_study_whose_reader_has_left_is_finished(tmp_path, monkeypatch, streams, lines, damaged):
    if damaged:
        (tmp_path / "trials/dpn/seed0").mkdir(parents=True)
        (tmp_path / "trials/dpn/seed0/checkpoint.pt").write_text("damaged")
    with pipe(lines) as broken_pipe:
        for name in streams:
            monkeypatch.setattr(sys, name, broken_pipe)
        assert main([*COMPARE, "--workers", "1", "--out", str(tmp_path)]) == damaged
        monkeypatch.undo()
    assert json.loads((tmp_path / "results.json").read_text())["complete"] == (not damaged)
    assert damaged or (tmp_path / "report.html").exists()


def test_output_that_nobody_reads_is_no_error_and_output_that_cannot_be_kept_is_one():
    command = [*VITMODS, "--help"]
    with pipe() as broken_pipe:
        done = subprocess.run(command, stdout=broken_pipe, stderr=subprocess.PIPE, timeout=1200)
    assert (done.returncode, done.stderr) == (0, b"")
    if not os.path.exists("/dev/full"):
        return
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=1200)
    assert done.returncode == 2
    assert "Cannot write the output: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
