"""Studies on a disk where the n-th call fails: `python tests/study/faults.py COUNT`; the suite runs a few.

A process with `fault.c` preloaded imports everything once, and forks a child for each fault.
"""

import ctypes
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).with_name("fault.c")
CODES = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "ESTALE": errno.ESTALE}
READ, WRITE, OPEN, RENAME = 1, 2, 4, 8
CALLS = {"ENOSPC": WRITE, "EIO": READ | WRITE | OPEN | RENAME, "ESTALE": READ | WRITE | OPEN | RENAME}
KINDS = ("reuse", "resume", "report")


def build(folder):
    """Compile the library; None without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return None
    library = folder / "fault.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return library


def run(library, cases, folder):
    """Run cases (kind, name of an error, fraction of the calls) in a process of their own; returns a list of problems
    and a count of outcomes."""
    command = [sys.executable, str(Path(__file__)), "--cases", json.dumps(cases), str(folder), str(library)]
    environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    environment.pop("VITMODS_REUSE", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main(cases, root, library):
    import numpy as np
    from PIL import Image

    from vitmods.recipes import plain
    from vitmods.study import Answer, Study
    from vitmods.util.errors import UserError

    warnings.simplefilter("ignore")
    fault, rng = ctypes.CDLL(str(library)), np.random.default_rng(0)
    os.environ["VITMODS_CACHE"] = str(root / "cache")
    for name, number in ((name, number) for name in ("cat", "dog") for number in range(12)):
        (root / "pets" / "train" / name).mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(root / "pets" / "train" / name / f"{number}.png")

    def study():
        return Study("mu/4", ["dpn"], root / "pets", recipe=plain(epochs=1).with_(batch_size=8), seeds=1)

    how = {"workers": 1, "device": "cpu", "cost_seconds": 0, "progress": False}
    before = root / "before"
    study().run(before / "neighbor", **how)
    expected = study().run(root / "whole" / "mine", **how, checkpoint_minutes=0)
    shutil.copytree(root / "whole" / "mine", before / "half")
    trial = before / "half" / "trials" / "dpn" / "seed0"
    for path in [*trial.iterdir(), before / "half" / "results.json"]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    trial.rmdir()

    def act(kind, place):
        if kind == "reuse":
            answer = study().run(place / "mine", **how)
        elif kind == "resume":
            answer = study().run(place / "half", **how, checkpoint_minutes=0)
        else:
            answer = Answer.load(place / "neighbor")
            answer.report()
        return answer

    def child(kind, code, fraction, place, calls):
        """Break one call; returns what came of it, and a problem."""
        target = place / {"reuse": "mine", "resume": "half", "report": "neighbor"}[kind]
        if fraction >= 0:
            fault.fault_set(os.fsencode(place), max(1, round(fraction * calls)), CODES[code], CALLS[code])
        else:
            fault.fault_set(os.fsencode(place), 0, 0, CALLS[code])
        outcome, problem = "completed", None
        try:
            answer = act(kind, place)
            if not answer.complete:
                outcome = "a trial failed"
                problem = next((text for text in answer.failed if "Error" in text.split(":")[1]), None)
        except UserError:
            outcome = "a clear error"
        except BaseException:
            problem = traceback.format_exc()[-1500:]
        count = fault.fault_count()
        fault.fault_set(b"", 0, 0, 0)
        if left := [str(path) for path in place.rglob("*.tmp")]:
            problem = problem or f"left behind: {left}"
        if fraction >= 0 and not problem:
            try:
                again = act(kind, place)
                if not again.complete or repr(again.effects) != repr(expected.effects):
                    problem = f"run again: {again.failed} {again.effects}"
            except BaseException:
                problem = f"run again: {traceback.format_exc()[-1500:]}"
        return outcome, problem, count, str(target)

    def forked(kind, code, fraction, calls=0):
        place = root / "at work"
        shutil.copytree(before, place)
        if kind == "reuse":
            shutil.rmtree(place / "half")
        read, write = os.pipe()
        if not (pid := os.fork()):
            text = json.dumps(child(kind, code, fraction, place, calls))
            os.write(write, text.encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as answers:
            content = answers.read()
        os.waitpid(pid, 0)
        shutil.rmtree(place)
        return json.loads(content)

    codes = {(kind, CALLS[code]): code for kind, code, _ in cases}
    counts = {(kind, calls): forked(kind, code, -1)[2] for (kind, calls), code in codes.items()}
    outcomes, problems = Counter(), []
    for kind, code, fraction in cases:
        outcome, problem, *_ = forked(kind, code, fraction, counts[kind, CALLS[code]])
        outcomes[f"{kind} {code}: {outcome}"] += 1
        if problem:
            problems.append([kind, code, fraction, problem])
            print(problems[-1], file=sys.stderr, flush=True)
    calls = {f"{kind} {codes[kind, calls]}": count for (kind, calls), count in counts.items()}
    print(json.dumps({"problems": problems, "outcomes": outcomes, "calls": calls}))


def spread(count, seed=0):
    """So many cases over all kinds and errors."""
    rng, pairs = random.Random(seed), [(kind, code) for kind in KINDS for code in CODES]
    return [(*pairs[number % len(pairs)], rng.random()) for number in range(count)]


if __name__ == "__main__":
    if sys.argv[1] == "--cases":
        main(json.loads(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            library = build(Path(folder))
            print(json.dumps(run(library, spread(int(sys.argv[1])), Path(folder) / "root"), indent=1))
