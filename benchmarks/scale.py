"""What a study of many trials costs beside the training: the head's time, files, and calls to the file system.

    python benchmarks/scale.py [--out FOLDER] [--trials 1000] [--nodes 100] [--sleep 0.5]

A trial is a thread that sleeps, and then writes the files of a real trial, with other scores, by the functions that
write those. All else is real: `Study.run` checks, plans, hands out work, reads every result, and answers. `head` is the
CPU time of the thread that hands out work, while trials run; the trials' own writing is not in it. A real trial is run
under strace, where there is one, for its calls below its folder.
"""

import argparse
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from paired import one_thread, report

import vitmods as vm
from vitmods.study import Answer, run
from vitmods.study.store import read_json
from vitmods.train.trial import read_scores, write_scores
from vitmods.util.files import write_atomically, write_json

RUN: dict[str, Any] = {"workers": 1, "device": "cpu", "cost_seconds": 0, "progress": False}
ARMS = 20  # with base
WHOLE = ("model.safetensors", "metrics.jsonl")  # that are the same in every trial


def study(trials: int, arms: int = 0, **settings: Any) -> vm.Study:
    arms = arms or ARMS
    recipe = vm.recipes.digits(epochs=1).with_(warmup_epochs=0)
    names = {f"arm{k}": vm.LayerScale(k / arms) for k in range(1, arms)}
    return vm.Study("mu/4", names, recipe=recipe, seeds=trials // arms, limit_train=128, **settings)


@dataclass
class Sleepers:
    """An executor of threads, each a node with one trial at a time."""

    folder: Any
    template: Path
    nodes: int
    sleep: float
    head_s: float = 0.0
    slowest_s: float = 0.0
    contents: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("config.json", "result.json"):
            self.contents[name] = read_json(self.template / name)
        self.contents |= {name: (self.template / name).read_bytes() for name in WHOLE}
        self.contents |= {f"{split}.npz": read_scores(self.template / f"{split}.npz") for split in ("val", "test")}

    def run(self, source: Any) -> None:
        with ThreadPoolExecutor(self.nodes) as pool:
            at_work: dict[Any, Any] = {}
            while True:
                while len(at_work) < self.nodes and (work := self._timed(source.take)) is not None:
                    at_work[pool.submit(self.trial, work)] = work
                if not at_work:
                    return
                for done in wait(at_work, return_when=FIRST_COMPLETED).done:
                    done.result()
                    self._timed(source.ended, at_work.pop(done), None)

    def _timed(self, call: Any, *arguments: Any) -> Any:
        began = time.thread_time()
        found = call(*arguments)
        took = time.thread_time() - began
        self.head_s, self.slowest_s = self.head_s + took, max(self.slowest_s, took)
        return found

    def trial(self, work: Any) -> None:
        time.sleep(self.sleep)
        out = self.folder.trial(work)
        (out / "tb").mkdir(parents=True, exist_ok=True)
        identity = {"arm": work.arm.name, "seed": work.seed}
        write_json(out / "config.json", {**self.contents["config.json"], **identity})
        for name in WHOLE:
            content = self.contents[name]
            write_atomically(out / name, lambda file, content=content: file.write(content))
        for path in (self.template / "tb").iterdir():
            shutil.copy(path, out / "tb")
        rng = np.random.default_rng([work.seed, sum(map(ord, work.arm.name))])
        for split in ("val", "test"):
            scores = dict(self.contents[f"{split}.npz"])
            scores["top1"] = (rng.random(len(scores["ids"])) < 0.7).astype(scores["top1"].dtype)
            write_scores(out / f"{split}.npz", scores)
        metrics = {**self.contents["result.json"]["metrics"], "top1": float(scores["top1"].mean())}
        write_json(out / "result.json", {**self.contents["result.json"], **identity, "metrics": metrics, "weights": {}})


def measured(out: Path, template: Path, options: Any, trials: int, **settings: Any) -> dict[str, float]:
    """A whole study, and what the head took of it."""
    used: list[Sleepers] = []

    def executor(runner: Any, *_: Any) -> Sleepers:
        used.append(Sleepers(runner.folder, template, options.nodes, options.sleep))
        return used[-1]

    original, run.make_executor = run.make_executor, executor
    keep = settings.pop("keep_weights", "all")
    began, cpu = time.perf_counter(), time.process_time()
    try:
        answer = study(trials, **settings).run(out, keep_weights=keep, **RUN)
    finally:
        run.make_executor = original
    assert answer.complete
    (one,) = used
    ended = len(list(out.glob("trials/**/result.json")))
    return {
        "trials": ended,
        "head_s": one.head_s,
        "head_ms_a_trial": 1000 * one.head_s / ended,
        "head_ms_slowest": 1000 * one.slowest_s,
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu,
        "resident_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def cpu_of(call: Any) -> tuple[float, Any]:
    began = time.process_time()
    found = call()
    return time.process_time() - began, found


def reading(out: Path) -> dict[str, float]:
    """What reading the folder takes: an answer, a report, and the same command again."""
    load_s, answer = cpu_of(lambda: Answer.load(out))
    write_s, _ = cpu_of(answer.write)
    report_s, page = cpu_of(answer.report)
    return {
        "folder_to_answer_s": load_s,
        "results_files_s": write_s,
        "report_s": report_s,
        "results_json_mb": (out / "results.json").stat().st_size / 1e6,
        "report_mb": page.stat().st_size / 1e6,
    }


def files_of(folder: Path) -> dict[str, float]:
    found = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    folders = sum(path.is_dir() for path in folder.rglob("*")) + 1
    beside = sum(size for size in found) - (folder / "model.safetensors").stat().st_size
    return {"files": len(found), "folders": folders, "kb_without_weights": beside / 1000}


def calls_of_a_trial(folder: Path) -> dict[str, float]:
    """System calls of a real trial that name its folder or a file in it."""
    if shutil.which("strace") is None:
        return {}
    log = folder / "strace.txt"
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import scale; scale.one({str(folder)!r})"
    command = ["strace", "-f", "-qq", "-y", "-o", str(log), "-e", "trace=%file,%desc", sys.executable, "-c", script]
    subprocess.run(command, check=True)
    place, counts = str(folder / "out" / "trials" / "base" / "seed0"), Counter[str]()
    for line in log.read_text(errors="replace").splitlines():
        called = re.match(r"\d+ +(\w+)\(", line)
        if called and place in line:
            counts[called[1]] += 1
    return dict(counts.most_common())


def one(folder: str) -> None:
    """One trial of base, in a study of its own."""
    study(ARMS).run(Path(folder) / "out", budget=1, **RUN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--sleep", type=float, default=0.5)
    options = parser.parse_args()
    one_thread()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        one(str(root))
        template = root / "out" / "trials" / "base" / "seed0"
        results["a trial's folder"] = {"all": files_of(template)}
        (root / "traced").mkdir()
        if calls := calls_of_a_trial(root / "traced"):
            results["calls of a real trial below its folder"] = {"all": calls}
        n = options.trials
        runs: dict[str, dict[str, Any]] = {
            f"{n // 4} trials": {"trials": n // 4},
            f"{n // 2} trials": {"trials": n // 2},
            f"{n} trials": {"trials": n},
            f"{n} trials, best weights kept": {"trials": n, "keep_weights": "best"},
            f"{n} trials, until decided": {"trials": n, "arms": n // 16, "until_decided": True},
        }
        results["studies"] = {}
        for title, settings in runs.items():
            out = root / title.replace(" ", "-")
            results["studies"][title] = measured(out, template, options, **settings)
            if title == f"{n} trials":
                again = measured_again(out, settings["trials"])
                results["reading"] = {title: {**reading(out), "same_command_again_s": again}}
            shutil.rmtree(out)
            print(title, results["studies"][title], flush=True)
    report("scale", results, options.out)


def measured_again(out: Path, trials: int) -> float:
    """CPU seconds of the same command on the finished study."""
    return cpu_of(lambda: study(trials).run(out, **RUN))[0]


if __name__ == "__main__":
    main()
