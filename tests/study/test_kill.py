"""A study through the real command line, killed three times and restarted, ends in the numbers of an unbroken one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")

COMMAND = [
    sys.executable,
    "-m",
    "vitmods",
    "compare",
    "--base",
    "mu2/2",
    "--arms",
    "dpn",
    "--seeds",
    "1",
    "--epochs",
    "10",
]
COMMAND += ["--workers", "2", "--device", "cpu", "--cost-seconds", "0", "--checkpoint-minutes", "0.002"]


def start(out):
    with open(out.with_suffix(".log"), "ab") as log:
        return subprocess.Popen([*COMMAND, "--out", str(out)], stdout=log, stderr=log, env={**os.environ, "CI": "1"})


def children(pid):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
        if parent == pid:
            child = int(stat.parent.name)
            found += [child, *children(child)]
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, process, seconds=240):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < end
        time.sleep(0.02)


def steps(out):
    """The last logged step of every trial that is under way."""
    trials = [path for path in out.glob("trials/*/*/metrics.jsonl") if not (path.parent / "result.json").exists()]
    return [json.loads(line)["step"] for path in trials for line in path.read_text().splitlines()[-1:]]


def files(out):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in out.rglob("*") if path.is_file()}


def without_times(value):
    if isinstance(value, dict):
        unreported = ("wall_s", "images_per_s", "data_wait", "created", "command")
        return {key: without_times(inner) for key, inner in value.items() if key not in unreported}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.slow
def test_a_killed_study_ends_in_the_same_numbers(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert start(whole).wait() == 0, whole.with_suffix(".log").read_text()

    # The command alone is killed: its workers must notice, and write nothing more.
    run = start(broken)
    wait_for(lambda: any(step >= 20 for step in steps(broken)), run)
    workers = children(run.pid)
    assert len(workers) == 2
    run.kill()
    run.wait()
    end = time.monotonic() + 5
    while any(map(alive, workers)):
        assert time.monotonic() < end, "a worker outlived its parent"
        time.sleep(0.02)
    left = files(broken)
    time.sleep(0.5)
    assert files(broken) == left

    # The whole tree is killed at once, later.
    run = start(broken)
    wait_for(lambda: any(step >= 60 for step in steps(broken)), run)
    for pid in [run.pid, *children(run.pid)]:
        os.kill(pid, signal.SIGKILL)
    run.wait()
    assert not (broken / "results.json").exists()

    # A worker that is killed loses its trial alone, which is reported.
    run = start(broken)
    wait_for(lambda: any(step >= 100 for step in steps(broken)), run)
    os.kill(children(run.pid)[0], signal.SIGKILL)
    assert run.wait() == 1
    record = json.loads((broken / "results.json").read_text())
    trials = [*record["base"]["trials"], *record["arms"][0]["trials"]]
    assert sorted(trial["status"] for trial in trials) == ["failed", "finished"]
    assert "killed by SIGKILL" in broken.with_suffix(".log").read_text()

    assert start(broken).wait() == 0, broken.with_suffix(".log").read_text()
    answers = [without_times(json.loads((out / "results.json").read_text())) for out in (whole, broken)]
    assert answers[0] == answers[1]
    assert answers[0]["complete"]
    for path in whole.glob("trials/*/*/model.safetensors"):
        assert path.read_bytes() == (broken / path.relative_to(whole)).read_bytes()
    for path in whole.glob("trials/*/*/metrics.jsonl"):
        texts = (path.read_text(), (broken / path.relative_to(whole)).read_text())
        rows = [[without_times(json.loads(line)) for line in text.splitlines()] for text in texts]
        assert rows[0] == rows[1]
