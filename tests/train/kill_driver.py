"""Kills trials with SIGKILL at chosen points and at random times, resumes them, and compares the numbers.

Run as a script with a folder, and `all` for every case instead of a few; prints one JSON object a case: {"case",
"killed", "same"}. Everything is imported once and each trial runs in a forked child, so that a case takes a fraction of
a second.
"""

import contextlib
import importlib.util
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

torch.set_num_threads(1)  # before anything is computed: children are forked

import tensorboard.summary.writer.record_writer  # noqa: E402, F401

import vitmods as vm  # noqa: E402
from vitmods import data  # noqa: E402
from vitmods.tasks import Classification  # noqa: E402
from vitmods.train import TrialRun, checkpoint, loggers, loop, trial  # noqa: E402
from vitmods.util import files  # noqa: E402

spec = importlib.util.spec_from_file_location("bench", Path(__file__).with_name("conftest.py"))
bench_module = importlib.util.module_from_spec(spec)
sys.modules["bench"] = bench_module
spec.loader.exec_module(bench_module)

RECIPE = bench_module.RECIPE.with_(accumulate=2, ema=0.9, mixup=0.2, crop="pad")  # 12 steps
random_numbers = random.Random(0)


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def replace_at(owner, name, count, fatal):
    """At the count-th call of `owner.name`, call `fatal(original, ...)` and die."""
    original, calls = getattr(owner, name), []

    def counted(*args, **kwargs):
        calls.append(1)
        if len(calls) == count:
            fatal(original, *args, **kwargs)
            die()
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def before(owner, name, count):
    """Die when `owner.name` is called for the count-th time."""
    replace_at(owner, name, count, lambda *_, **__: None)


def after(owner, name, count):
    """Die when `owner.name` has returned for the count-th time."""
    replace_at(owner, name, count, lambda original, *args, **kwargs: original(*args, **kwargs))


def half_a_checkpoint(count):
    """Die with half of the count-th checkpoint written."""

    def save(original, state, file):
        original(state, file)
        file.flush()
        os.ftruncate(file.fileno(), file.tell() // 2)

    replace_at(torch, "save", count, save)


def half_a_row(count):
    """Die with half of the count-th row of metrics.jsonl written."""

    def write(original, metrics, row):
        metrics._file.write(json.dumps(row).encode()[:20])
        metrics._file.flush()

    replace_at(loggers.MetricsFile, "write", count, write)


def pick(low, high):
    return random_numbers.randint(low, high)


class EvalBatches:
    """Somewhere to count the batches of all evaluations."""

    @staticmethod
    def next(batch):
        return batch


def evaluation_batch(count):
    original = data.ImageDataset.eval_batches

    def eval_batches(self, split, batch_size):
        return (EvalBatches.next(batch) for batch in original(self, split, batch_size))

    data.ImageDataset.eval_batches = eval_batches
    before(EvalBatches, "next", count)


POINTS = {
    "forward, late": lambda: before(Classification, "loss", pick(13, 24)),
    "row of metrics": lambda: half_a_row(pick(1, 6)),
    "checkpoint, first half": lambda: half_a_checkpoint(1),
    "checkpoint, half written": lambda: half_a_checkpoint(pick(2, 6)),
    "checkpoint, before the first rename": lambda: before(files.os, "replace", 4),
    "checkpoint, between two renames": lambda: before(files.os, "replace", 5),
    "checkpoint, after both renames": lambda: after(files.os, "replace", 5),
    "evaluation, on test": lambda: evaluation_batch(pick(7, 15)),
    "weights": lambda: before(trial, "_save_weights", 1),
    "result": lambda: after(trial, "_train", 1),
    "after the result": lambda: before(checkpoint, "remove", 1),
}
FEW = ("row of metrics", "checkpoint, half written", "checkpoint, between two renames", "result")


def train(bench, out):
    model = bench.model(drop_path=0.2)  # random numbers of torch are drawn at every step
    bench.train(out, model, RECIPE, checkpoint_every_steps=2, tensorboard=True)


def in_child(work):
    """Fork; the child's process number."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def wait_for(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def import_what(work, names):
    """Import here what `work` imports when it is needed, so that no child has to. It runs in a child itself: after a
    backward pass PyTorch does not fork."""

    def listed():
        work()
        names.write_text("\n".join(sorted(sys.modules)))

    assert wait_for(in_child(listed)) == 0
    for name in names.read_text().split():
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def report(case, bench, out, killed, expected):
    finished = wait_for(in_child(lambda: train(bench, out))) == 0
    same = finished and bench.numbers(out) == expected and boards_have_each_row_once(bench, out)
    print(json.dumps({"case": case, "killed": killed, "same": same}), flush=True)


def boards_have_each_row_once(bench, out):
    """TensorBoard's files, all of them together, hold the rows of metrics.jsonl and no others."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    seen = []
    for path in (out / "tb").iterdir():
        events = [event for event in EventFileLoader(str(path)).Load() if event.HasField("summary")]
        seen += [(event.step, value.tag) for event in events for value in event.summary.value]
    rows = bench.rows(out)
    names = [(row["step"], f"{row['split']}/{k}") for row in rows for k in row if k not in ("step", "epoch", "split")]
    return sorted(seen) == sorted(names)


def run_study(out):
    """Two trials of 12 steps, with a checkpoint after each."""
    loop.SAVE_FRACTION = 1.0
    recipe = vm.recipes.plain(epochs=12).with_(batch_size=64)
    few = {"limit_train": 64, "limit_val": 40, "test_fraction": 0.05}
    study = vm.Study("mu2/4", ["dpn"], data="digits", recipe=recipe, seeds=1, **few)
    study.run(out, workers=1, device="cpu", cost_seconds=0, progress=False, checkpoint_minutes=0)


def kill_study(folder, times):
    """A study that dies at random steps is, in the end, the one that nobody killed, in folder / "whole"."""
    kills = []
    for count in [pick(1, 5) for _ in range(times)]:

        def killed(count=count):
            before(TrialRun, "_train_step", count)
            run_study(folder / "broken")

        kills.append(wait_for(in_child(killed)) == -signal.SIGKILL)
    assert not (folder / "broken" / "results.json").exists()
    finished = wait_for(in_child(lambda: run_study(folder / "broken"))) == 0
    weights = [
        {path.relative_to(out): path.read_bytes() for path in out.rglob("model.safetensors")}
        for out in (folder / "whole", folder / "broken")
    ]
    print(json.dumps({"case": "a study", "killed": all(kills), "same": finished and weights[0] == weights[1]}))


def main(folder, points, repeats):
    few = {"limit_train": 160, "limit_val": 80, "test_fraction": 0.05}
    dataset = data.load("digits", img_size=(8, 8), in_chans=1, augment=RECIPE.augment, **few)
    bench = bench_module.Bench(dataset)
    import_what(lambda: (train(bench, folder / "unbroken"), run_study(folder / "whole")), folder / "modules.txt")
    expected = bench.numbers(folder / "unbroken")
    started = time.perf_counter()
    assert wait_for(in_child(lambda: train(bench, folder / "timed"))) == 0
    seconds = time.perf_counter() - started

    for number, (case, install) in enumerate(points.items()):
        out = folder / str(number)
        seed = random_numbers.random()

        def killed_at_point(install=install, out=out, seed=seed):
            random_numbers.seed(seed)
            install()
            train(bench, out)

        report(case, bench, out, wait_for(in_child(killed_at_point)) == -signal.SIGKILL, expected)

    for number in range(repeats):
        out, kills = folder / f"any-{number}", 0
        while kills < 3 and seconds > 0.01:
            child = in_child(lambda out=out: train(bench, out))
            time.sleep(random_numbers.uniform(0.1, 0.7) * seconds)
            os.kill(child, signal.SIGKILL)
            if wait_for(child) == -signal.SIGKILL:
                kills += 1
            elif kills:
                break
            else:  # the machine has become faster: the run was over before the kill
                shutil.rmtree(out)
                seconds /= 2
        report(f"any moment, {number}", bench, out, kills > 0, expected)
    kill_study(folder, 2 * repeats)


if __name__ == "__main__":
    every = sys.argv[2:] == ["all"]
    main(Path(sys.argv[1]), POINTS if every else {name: POINTS[name] for name in FEW}, 2 if every else 1)
