"""Seconds from the start of a command to the end of the first training step, with an empty and with a full cache.

    python benchmarks/study_start.py --images 20000 --side 32 --workers 2

A folder of small PNG files is made (`--equal` of them are equal to others), and a study of it is started, stopped after
its first step in each worker, and started again in another folder; `vitmods data` is timed whole. CPU seconds are
of all processes, imports and stopping included: what others do on the machine moves them less than the clock.

    python benchmarks/study_start.py --images 200000 --side 8 --load

measures only how a process opens the images, imports excluded: its CPU seconds, and its memory beside the files that
all processes share.
"""

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

PLUGIN = """
import os, pathlib
from vitmods.data.dataset import ImageDataset
from vitmods.data.sources import data_source

data_source("first_step", "first_step", "none: what registers something is imported by workers too")(lambda spec: None)

whole = ImageDataset.train_batches

def train_batches(self, **how):
    for number, batch in enumerate(whole(self, **how)):
        if number == 1:
            pathlib.Path(os.environ["FIRST_STEP"], str(os.getpid())).touch()
        yield batch

ImageDataset.train_batches = train_batches
"""


def make_images(root: Path, count: int, side: int, equal: int) -> None:
    """PNG files of noise in 10 classes; the last `equal` are copies of the first."""
    rng = np.random.default_rng(0)
    for i in range(count):
        folder = root / f"class{i % 10}"
        folder.mkdir(parents=True, exist_ok=True)
        if i >= count - equal:
            i -= count - equal
            shutil.copy(root / f"class{i % 10}" / f"{i:06d}.png", folder / f"copy{i:06d}.png")
            continue
        small = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        small.resize((side, side), Image.Resampling.BICUBIC).save(folder / f"{i:06d}.png")


LOAD = """
import sys, time, torch
from vitmods.data.loading import load
from vitmods.recipes import Augment

def private():
    rows = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(row.split()[1]) for row in rows if row.startswith("Private_Dirty")) / 1000

memory, cpu = private(), time.process_time()
images = load(sys.argv[1], img_size=int(sys.argv[2]), augment=Augment())
print(f"CPU {time.process_time() - cpu:.1f} s, {private() - memory:.0f} MB for {len(images.train):,} training images")
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from vitmods.cli import main; main()", *arguments]


def cpu_seconds() -> float:
    """Of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(arguments: list[str], env: dict[str, str]) -> tuple[float, float]:
    begin, cpu = time.perf_counter(), cpu_seconds()
    subprocess.run(arguments, env=env, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin, cpu_seconds() - cpu


def to_first_step(arguments: list[str], env: dict[str, str], workers: int) -> tuple[float, float]:
    """Until every worker has made a step; the study is then stopped."""
    cpu = cpu_seconds()
    with tempfile.TemporaryDirectory() as marks:
        begin = time.perf_counter()
        process = subprocess.Popen(arguments, env={**env, "FIRST_STEP": marks}, stdout=subprocess.DEVNULL)
        while len(os.listdir(marks)) < workers:
            if process.poll() is not None:
                raise SystemExit(f"The study ended with code {process.returncode} before its first step.")
            time.sleep(0.02)
        seconds = time.perf_counter() - begin
        process.send_signal(signal.SIGINT)
        process.wait()
    return seconds, cpu_seconds() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--equal", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--load", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make_images(root / "images", options.images, options.side, options.equal)
        (root / "first_step.py").write_text(PLUGIN)
        env = {**os.environ, "XDG_CACHE_HOME": str(root / "cache")}
        if options.load:
            for what in ("first", "second", "third"):
                print(f"{what} start:", end=" ", flush=True)
                subprocess.run(
                    [sys.executable, "-c", LOAD, str(root / "images"), str(options.side)], env=env, check=True
                )
            return
        data = ["--data", str(root / "images"), "--img-size", str(options.side)]
        study = ["compare", "--plugin", str(root / "first_step.py"), *data, "--base", "mu3/4", "--arms", "rms"]
        study += [
            "--workers",
            str(options.workers),
            "--device",
            "cpu",
            "--epochs",
            "1",
            "--quiet",
            "--cost-seconds",
            "0",
        ]
        found = {
            "first start": to_first_step(command(*study, "--out", str(root / "a")), env, options.workers),
            "second start": to_first_step(command(*study, "--out", str(root / "b")), env, options.workers),
            "vitmods data": timed(command("data", str(root / "images")), env),
            "vitmods data again": timed(command("data", str(root / "images")), env),
        }
        for what, (seconds, cpu) in found.items():
            print(f"{what}: {seconds:.1f} s, CPU {cpu:.1f} s")
        stored = sum(path.stat().st_size for path in (root / "cache").rglob("*") if path.is_file())
        print(f"cache: {stored / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
