"""A study goes on whatever lies in the folder it is started from, and whether or not anybody reads what it says."""

import json
import os
import subprocess
import sys

import pytest

# As the installed script: without the working directory on sys.path, which `python -m` alone would put there.
VITMODS = [sys.executable, "-P", "-m", "vitmods"]
COMPARE = [*VITMODS, "compare", "--base", "mu/4", "--arms", "dpn", "--seeds", "1", "--epochs", "1"]
COMPARE += ["--limit-train", "128", "--device", "cpu", "--cost-seconds", "0"]


def finished(out):
    return json.loads((out / "results.json").read_text())["complete"] and (out / "report.html").exists()


@pytest.mark.slow
def test_modules_in_the_working_directory_are_not_imported(tmp_path):
    for name in ("queue", "random", "json", "threading", "numpy", "torch"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nraise ImportError('taken')\n")
    command = [*COMPARE, "--workers", "2", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert finished(tmp_path / "out")
    assert not (tmp_path / "mark").exists()


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.slow
@pytest.mark.parametrize(("streams", "workers"), [("stderr", 1), ("both", 2)])
def test_a_study_whose_reader_has_left_is_finished(tmp_path, streams, workers):
    pipe = closed_pipe()
    where = {name: pipe if streams in (name, "both") else subprocess.PIPE for name in ("stdout", "stderr")}
    done = subprocess.run([*COMPARE, "--workers", str(workers), "--out", str(tmp_path / "out")], **where, timeout=240)
    os.close(pipe)
    assert done.returncode == 0, done.stderr
    assert finished(tmp_path / "out")
    assert b"Error" not in (done.stderr or b"")


def test_the_exit_code_of_a_study_that_failed_is_told_without_a_reader(tmp_path):
    pipe = closed_pipe()
    trial = tmp_path / "out" / "trials" / "dpn" / "seed0"
    trial.mkdir(parents=True)
    (trial / "checkpoint.pt").write_text("damaged")
    command = [*COMPARE, "--workers", "1", "--out", str(tmp_path / "out")]
    codes = [
        subprocess.run(arguments, stdout=pipe, stderr=pipe, timeout=240).returncode
        for arguments in (command, [*command, "--lr", "-1"])
    ]
    os.close(pipe)
    assert codes == [1, 2]
    assert not finished(tmp_path / "out")


def test_a_pipe_to_head_leaves_the_whole_study(tmp_path):
    command = subprocess.list2cmdline([*COMPARE, "--workers", "1", "--out", str(tmp_path / "out")])
    pipe = f"{command} 2>&1 | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1
    assert finished(tmp_path / "out")


def test_started_without_any_streams(tmp_path):
    command = subprocess.list2cmdline([*COMPARE, "--workers", "1", "--out", str(tmp_path / "out")])
    assert subprocess.run(["bash", "-c", f"{command} <&- >&- 2>&-"], timeout=240).returncode == 0
    assert finished(tmp_path / "out")


@pytest.mark.parametrize("arguments", [["--help"], ["changes"], ["changes", "--help"], ["recipes"]])
def test_a_list_whose_reader_has_left_is_no_error(arguments):
    pipe = closed_pipe()
    done = subprocess.run([*VITMODS, *arguments], stdout=pipe, stderr=subprocess.PIPE, timeout=60)
    os.close(pipe)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_kept_is_an_error():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*VITMODS, "changes"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert "Cannot write the output: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
