"""A study by the real command line loses a worker, then its parent, then is stopped: it ends in the same numbers."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from vitmods.cli import main as shell
from vitmods.study.executors.processes import SAVE_GRACE_S
from vitmods.train import Interrupted, TrialRun, checkpoint

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")

COMMAND = [sys.executable, "-m", "vitmods", "compare", "--base", "mu2/2", "--arms", "dpn", "--seeds", "1"]
COMMAND += ["--epochs", "14", "--limit-train", "512", "--workers", "2", "--device", "cpu", "--cost-seconds", "0"]
COMMAND += ["--checkpoint-minutes", "0.002"]
STARTED = []


def start(out):
    with open(out.with_suffix(".log"), "ab") as log:
        command = [*COMMAND, "--out", str(out)]
        STARTED.append(subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "CI": "1"}))
    return STARTED[-1]


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Of a test that fails: a stopped worker does not see that its parent is gone."""
    yield
    for run in STARTED:
        for pid in (*children(run.pid), run.pid) if run.poll() is None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def children(pid):
    """With their own children."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    descendants, last = [], {pid}
    while last:
        last = {child for child, parent in parents.items() if parent in last}
        descendants += last
    return descendants


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, process, seconds=600):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < end
        time.sleep(0.02)


def open_files(pid):
    links = []
    with suppress(OSError):  # it has just ended
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # or closed it
                links.append(link.readlink())
    return links


def stopped_in_the_middle(out, run):
    """Workers whose trial has come to step 20, one after the other: none ends its trial while another one starts."""
    logs = [
        path
        for path in out.glob("trials/*/*/metrics.jsonl")
        if any(int(step) >= 20 for step in re.findall(r'"step": (\d+),', path.read_text()))
    ]
    workers = children(run.pid) if logs else []
    stopped = [pid for path in logs for pid in workers if path in open_files(pid)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    return stopped


def stamp(path):
    return path.stat().st_mtime_ns, path.stat().st_size


def files(out):
    return {path: stamp(path) for path in out.rglob("*") if path.is_file()}


def without_times(value):
    if isinstance(value, dict):
        unreported = ("wall_s", "images_per_s", "data_wait", "created", "command")
        return {key: without_times(inner) for key, inner in value.items() if key not in unreported}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


@pytest.fixture(autouse=True)
def one_thread():
    """As the workers of the command have."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def finish(out):
    """The same command to its end, with one worker, which is this process."""
    assert shell([*COMMAND[COMMAND.index("compare") :], "--workers", "1", "--quiet", "--out", str(out)]) == 0


@pytest.mark.slow
def test_a_killed_study_ends_in_the_same_numbers(tmp_path):
    unbroken, broken = tmp_path / "whole", tmp_path / "broken"
    finish(unbroken)

    # A worker that is killed loses its trial alone.
    run = start(broken)
    wait_for(lambda: len(stopped_in_the_middle(broken, run)) == 2, run)
    workers = stopped_in_the_middle(broken, run)
    os.kill(workers[0], signal.SIGKILL)
    wait_for(lambda: "killed by SIGKILL" in broken.with_suffix(".log").read_text(), run)
    (failed,) = [json.loads(path.read_text()) for path in broken.glob("trials/*/*/result.json")]
    assert failed["status"] == "failed"
    assert "killed by SIGKILL" in failed["message"]

    # The command alone is killed: its worker must notice, and write nothing more.
    os.kill(workers[1], signal.SIGCONT)  # now: of a stopped orphan the kernel would make an end
    processes = children(run.pid)
    run.kill()
    run.wait()
    end = time.monotonic() + 60
    while any(map(alive, processes)):
        assert time.monotonic() < end, "a worker outlived its parent"
        time.sleep(0.02)
    assert len(list(broken.glob("trials/*/*/result.json"))) == 1, "a worker ended its trial without its parent"
    files_before = files(broken)
    time.sleep(0.5)
    assert files(broken) == files_before

    # All processes are told to end, as by systemd or Slurm: each trial is saved at its last step, before it
    # would be killed.
    logs = list(broken.glob("trials/*/*/metrics.jsonl"))
    run = start(broken)
    wait_for(lambda: all(stamp(path) != files_before[path] for path in logs), run)
    for pid in (run.pid, *children(run.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    begin = time.monotonic()
    assert run.wait() == 128 + signal.SIGTERM
    assert time.monotonic() - begin < SAVE_GRACE_S
    for path in broken.glob("trials/*/*/checkpoint.pt"):
        rows = (path.parent / "metrics.jsonl").read_text().splitlines()
        last = json.loads(rows[-1])["step"] if rows else 0  # stopped before its first row
        assert checkpoint.load(path.parent)["step"] >= last
    assert "to resume: vitmods compare" in broken.with_suffix(".log").read_text()
    assert not (broken / "results.json").exists()

    finish(broken)
    answers = [without_times(json.loads((out / "results.json").read_text())) for out in (unbroken, broken)]
    assert answers[0] == answers[1]
    assert answers[0]["complete"]
    for path in unbroken.glob("trials/*/*/model.safetensors"):
        assert path.read_bytes() == (broken / path.relative_to(unbroken)).read_bytes()
    for path in unbroken.glob("trials/*/*/metrics.jsonl"):
        texts = (path.read_text(), (broken / path.relative_to(unbroken)).read_text())
        rows = [[without_times(json.loads(line)) for line in text.splitlines()] for text in texts]
        assert rows[0] == rows[1]


RUNNER = """
import gc, os, sys
import matplotlib.backends.backend_svg, matplotlib.figure, torch
import vitmods.report.page, vitmods.study.run, vitmods.study.trial
from vitmods import cli
from vitmods.tasks import TASKS
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # the first optimizer imports the compiler
list(TASKS), gc.freeze()  # so that no copy imports them, and the collector copies no memory
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        os.dup2(2, 1)
        os._exit(cli.main(line.split()))
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
FEW = "--data digits --limit-train 128 --limit-val 60 --seeds 1 --device cpu --cost-seconds 0 --workers 1 --quiet"
FEW += " --checkpoint-minutes 0.002"
STAGES = {
    "dino": "--task dino --base mu2/2 --arms dpn --epochs 4 --batch-size 32 --prototypes 64 --teacher-temp 0.06",
    "beit": "--task beit --base mu2/2 --arms relpos(shared=true) --epochs 4 --codes 16",
}


def check_stages(folder, task, whole, broken):
    """Of pretraining and of a study that starts from it: `broken` ends in the bits of `whole`."""
    for stage, words in (("first", STAGES[task]), ("second", f"--from {folder}/first-whole --epochs 5")):
        outs = [folder / f"{stage}-{name}" for name in ("whole", "broken")]
        for run, out in zip((whole, broken), outs):
            run([*words.split(), *FEW.split(), "--out", str(out)])
        weights = [path.relative_to(outs[0]) for path in outs[0].glob("trials/*/*/*.safetensors")]
        assert len(weights) >= 2
        assert [path for path in weights if (outs[0] / path).read_bytes() != (outs[1] / path).read_bytes()] == []
        answers = [without_times(json.loads((out / "results.json").read_text())) for out in outs]
        assert answers[0] == answers[1]


@pytest.mark.slow
def test_pretraining_that_is_stopped_and_what_starts_from_it_end_in_the_same_bits(tmp_path, monkeypatch):
    def whole(words):
        assert shell(["compare", *words]) == 0

    def broken(words):
        step = TrialRun._train_step

        def stops(run, batch):
            if run.step == 7:
                raise Interrupted("stopped", 2)
            step(run, batch)

        with monkeypatch.context() as patch:
            patch.setattr(TrialRun, "_train_step", stops)
            assert shell(["compare", *words]) == 130
        whole(words)

    check_stages(tmp_path, "beit", whole, broken)


@pytest.mark.long
@pytest.mark.parametrize("task", STAGES)
def test_pretraining_that_is_killed_and_what_starts_from_it_end_in_the_same_bits(task, tmp_path):
    draw, log = random.Random(20), (tmp_path / "log").open("w")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUNNER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True, "env": environment}

    with subprocess.Popen(command, **pipes) as runner:

        def run(words, killed_after_s=None):
            print("compare", *words, file=runner.stdin, flush=True)
            pid = int(runner.stdout.readline())
            if killed_after_s is not None:
                time.sleep(killed_after_s)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return int(runner.stdout.readline())

        def whole(words):
            nonlocal whole_s
            began = time.monotonic()
            assert run(words) == 0, (tmp_path / "log").read_text()
            whole_s = time.monotonic() - began

        def broken(words):
            for _ in range(20):
                assert run(words, draw.uniform(0, whole_s)) in (0, -signal.SIGKILL)
            assert run(words) == 0, (tmp_path / "log").read_text()

        whole_s = 0.0
        check_stages(tmp_path, task, whole, broken)
        runner.stdin.close()
    log.close()
