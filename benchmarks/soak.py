"""A long study: memory and descriptors stay flat over 200 trials, and 20 kills of all its processes change no bit.

    OMP_NUM_THREADS=1 python benchmarks/soak.py --out benchmarks/results        (make soak)

First an ordinary study of tiny trials by two worker processes. After every ten trials the resident memory and the
open descriptors of the study's process and of each worker are noted. Flat means, over all but the first quarter of the
trials (caches fill, libraries are imported): by the Theil-Sen slope the memory of each process grows by less than 5 %
over these trials, and none ends with more than two descriptors more than it had.

Then twelve trials, half of them without labels and the others from their weights, by one command that is killed with
SIGKILL, its workers too, at random moments; the same command goes on each time, and at the end all weights are those of
a run that nobody killed. Exit code 1 where either does not hold.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from paired import write
from scipy.stats import theilslopes

import vitmods as vm
from vitmods.cli import main as shell

ARMS = ("dpn", "rms", "layerscale", "qknorm", "swiglu", "dyt", "normformer", "subln", "dtn")
EVERY = 10  # trials between two samples
WARM_UP = 0.25  # of the trials
GROWTH, MORE_DESCRIPTORS = 0.05, 2
KILLED = ["compare", "--base", "mu2/2", "--arms", "dpn", "--seeds", "3", "--epochs", "10", "--workers", "2"]
KILLED += ["--pretrain", "beit(epochs=10,codes=64)"]
KILLED += ["--device", "cpu", "--cost-seconds", "0", "--checkpoint-minutes", "0.002", "--quiet"]


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
        if parent == pid:
            found += [int(stat.parent.name), *children(int(stat.parent.name))]
    return found


def sample(pid: int) -> tuple[int, int] | None:
    """Resident KiB and open descriptors of a process; None where it has ended."""
    try:
        resident = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        return (int(resident[1]), len(os.listdir(f"/proc/{pid}/fd"))) if resident else None
    except OSError:
        return None


def ended(out: Path) -> int:
    return len(list(out.glob("trials/*/*/result.json")))


class Watch(threading.Thread):
    """Notes (trials that have ended, KiB, descriptors) of this process and its workers after every ten trials."""

    def __init__(self, out: Path) -> None:
        super().__init__(daemon=True)
        self.out, self.over = out, threading.Event()
        self.samples: dict[str, list[tuple[int, int, int]]] = {}

    def run(self) -> None:
        due = EVERY
        while not self.over.wait(0.1):
            if (count := ended(self.out)) >= due:
                due = count // EVERY * EVERY + EVERY
                for pid in (os.getpid(), *children(os.getpid())):
                    if (found := sample(pid)) is not None:
                        name = "study" if pid == os.getpid() else f"worker {pid}"
                        self.samples.setdefault(name, []).append((count, *found))


def flat(samples: list[tuple[int, int, int]], trials: int) -> dict[str, Any]:
    """What one process did after the warm-up."""
    kept = [one for one in samples if one[0] > WARM_UP * trials]
    counts, resident, descriptors = zip(*kept)
    slope = float(theilslopes(resident, counts).slope)
    growth = slope * (counts[-1] - counts[0]) / resident[0]
    return {
        "resident_mib": [round(one / 1024, 1) for one in resident],
        "kib_per_trial": round(slope, 2),
        "growth": round(growth, 4),
        "descriptors": [descriptors[0], descriptors[-1], max(descriptors)],
        "flat": growth < GROWTH and descriptors[-1] <= descriptors[0] + MORE_DESCRIPTORS,
    }


def many_trials(folder: Path, trials: int) -> dict[str, Any]:
    seeds = trials // (len(ARMS) + 1)
    recipe = vm.recipes.plain(epochs=1).with_(batch_size=32)
    study = vm.Study("mu2/4", list(ARMS), data="digits", recipe=recipe, limit_train=64, seeds=seeds)
    watch, begin = Watch(folder), time.perf_counter()
    watch.start()
    answer = study.run(folder, workers=2, device="cpu", cost_seconds=0, progress=False)
    watch.over.set()
    watch.join()
    processes = {name: flat(found, trials) for name, found in watch.samples.items()}
    for name, found in processes.items():
        print(f"{name}: {found}", flush=True)
    whole = answer.complete and len(answer.trials) == seeds * (len(ARMS) + 1) and len(processes) == 3
    return {
        "trials": len(answer.trials),
        "minutes": round((time.perf_counter() - begin) / 60, 1),
        "processes": processes,
        "holds": whole and all(found["flat"] for found in processes.values()),
    }


def weights(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("model.safetensors"))}


def kills(folder: Path, count: int) -> dict[str, Any]:
    draw, begin, steps, in_second = random.Random(0), time.perf_counter(), [], 0
    whole, broken = folder / "whole", folder / "broken"
    assert shell([*KILLED, "--workers", "1", "--out", str(whole)]) == 0
    command = [sys.executable, "-P", "-m", "vitmods", *KILLED, "--out", str(broken)]
    while len(steps) < count:
        run = subprocess.Popen(command, env={**os.environ, "CI": "1"})
        before, target = size(broken), draw.randint(1, max(1, 2 * size(whole) // (count + 1)))  # in both stages
        while run.poll() is None and size(broken) < before + target:  # so many rows later
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.2))
        if run.poll() is not None:  # it has ended before it could be killed
            break
        for pid in (run.pid, *children(run.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.wait()
        steps.append(size(broken))
        in_second += (broken / "study.json").exists()
        print(f"kill {len(steps)}, at {steps[-1]} rows", flush=True)
    code = subprocess.run(command, env={**os.environ, "CI": "1"}).returncode
    same = code == 0 and weights(broken) == weights(whole)
    minutes = round((time.perf_counter() - begin) / 60, 1)
    print(f"{len(steps)} kills, {'the same weights' if same else 'OTHER WEIGHTS'}", flush=True)
    return {
        "kills": len(steps),
        "in_second_stage": in_second,
        "rows_when_killed": steps,
        "minutes": minutes,
        "holds": same and len(steps) == count,
    }


def size(out: Path) -> int:
    """Rows that all trials have logged."""
    return sum(path.read_bytes().count(b"\n") for path in out.rglob("metrics.jsonl"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = {"many trials": many_trials(Path(folder) / "many", options.trials)}
        results["kills of all processes"] = kills(Path(folder), options.kills)
    write("soak", results, options.out)
    return 0 if all(found["holds"] for found in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
