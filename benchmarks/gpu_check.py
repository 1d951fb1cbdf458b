"""Ten minutes on a GPU: its tests, the table of goals, and tables of steps, in one file to send back and a page.

    make gpu-check
    python benchmarks/gpu_check.py --out runs/gpu-check

Each goal is a ratio of two models that are timed in turn, by the events of the device; a ratio is the median over
rounds, with their 95 % interval. `--device cpu --quick` rehearses the script where there is no GPU: its
numbers say nothing, and its file says so.
"""

import argparse
import contextlib
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from gpu_page import machine, page
from gpu_steps import WAITS_INSIDE as INSIDE
from gpu_steps import Model, reading, step_rows, together, waits
from PIL import Image
from stem import Listing
from torch import nn

import vitmods as vm
from vitmods import data
from vitmods.bench import BLOCK_S, Ratio, device_name, interleave, seconds_per_call
from vitmods.changes.compose import edit
from vitmods.recipes import Recipe
from vitmods.study.cost import Steps
from vitmods.tasks import Classification
from vitmods.train import RunOptions, TrialRun, train_trial
from vitmods.train.device import usual_workers
from vitmods.train.interrupt import Interrupted
from vitmods.train.optim import freeze

ROOT = Path(__file__).parents[1]
TEST_S = 300  # after which the tests are stopped
MINUTES = 10.0  # after which no further row of steps begins


@dataclass(frozen=True)
class Scale:
    """How large everything is: `FULL` on a GPU, `QUICK` to rehearse."""

    base: str
    deep: str
    img_size: int
    large: int
    batch: int
    images: int
    side: tuple[int, int]
    steps: int
    budget_s: float
    study_steps: int
    models: tuple[Model, ...]
    """of the tables; the last one trains several at a time"""
    row_s: float
    at_a_time: tuple[int, ...]


FULL = Scale("S/16", "S36/16", 224, 384, 64, 2048, (500, 375), 60, 8.0, 150,
             (Model("S/16", 224, 64), Model("mu6/8", 32, 64)), 2.0, (1, 2, 4))  # fmt: skip
QUICK = Scale("mu2/4", "mu4/4", 16, 24, 4, 24, (24, 18), 12, 0.2, 4, (Model("mu1/4", 8, 4),), 0.1, (1, 2))


@dataclass(frozen=True)
class Measured:
    """A number beside its goal."""

    name: str
    value: float
    low: float
    high: float
    goal: str
    met: bool | None
    """None: there is no goal, or this is a rehearsal"""


class Check:
    """The measurements on one device."""

    def __init__(self, device: torch.device, scale: Scale, until: float = float("inf")) -> None:
        self.device, self.scale, self.judges, self.until = device, scale, scale is FULL, until
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self.recipe = Recipe().with_(batch_size=scale.batch, precision="bf16-mixed")
        self.found: list[Measured] = []

    def config(self, changes: str = "", base: str | None = None, side: int | None = None) -> vm.ViTConfig:
        side = side or self.scale.img_size
        config = vm.ViTConfig.from_name(base or self.scale.base, img_size=side, num_classes=100)
        return edit(config, vm.parse_changes(changes)) if changes else config

    def steps(self, config: vm.ViTConfig, precision: str = "bf16-mixed", train: str = "all") -> Steps:
        recipe = self.recipe.with_(precision=precision, train=train)
        model = vm.ViT(config)
        freeze(model, recipe)
        return Steps(model, Classification.from_recipe(recipe), recipe, self.device, config)

    def parallel(self) -> None:
        deep = self.config(base=self.scale.deep)
        models = [deep, edit(deep, vm.parse_changes("parallel"))]
        calls = []
        for config in models:
            model = vm.optimize_for_inference(vm.ViT(config).to(self.device).eval())
            calls.append(_infers(model, torch.randn(1, 3, *config.img_size, device=self.device)))
        self.least("parallel x2 over sequential, throughput at batch 1", 1.8, *calls)

    def norms(self) -> None:
        for what, limit in (("train", 1.13), ("infer", 1.11)):
            calls = [getattr(self.steps(self.config(c)), what)(self.scale.batch) for c in ("", "dtn(norms=both)")]
            self.most(f"DTN (both norms) over LayerNorm, {what}", limit, *calls)

    def stem(self) -> None:
        config = self.config("dpn")
        images = torch.randn(self.scale.batch, 3, *config.img_size, device=self.device)
        stems = Listing(config.patch_size[0], config.embed_dim), vm.ViT(config).patch_embed
        calls = [_trains(stem.to(self.device), images) for stem in stems]
        self.most("dual patchnorm stem over the paper's listing, train", 1.05, *calls)

    def attention_alone(self) -> None:
        count, config = max(1, self.scale.batch // 4), self.config(side=self.scale.large)
        peaks = [self.steps(config, train=train).peak(count) for train in ("all", "attention")]
        share = peaks[1] / peaks[0]
        self._add("attention alone over all, memory of a step", share, share, share, "at most 0.71", share <= 0.71)
        calls = [self.steps(config, train=train).train(count) for train in ("all", "attention")]
        self.most(f"attention alone over all, train at {self.scale.large} px", 0.85, *calls)

    def eager_steps(self) -> None:
        """Beside timm's, in each precision."""
        self._steps("eager")
        for row in self.tables["steps"]:
            if row.get("library") == "vitmods":
                name, over = f"{row['model']} {row['precision']}, a step over timm's", row["over_timm"]
                self._add(name, *over.values(), "at most 1.02", over["ratio"] <= 1.02)
        if failed := [row for row in self.tables["steps"] if "error" in row]:
            raise RuntimeError(f"steps failed: {failed}")

    def compiled_steps(self) -> None:
        """As far as there is time."""
        self._steps("compiled", "reduce-overhead")

    def _steps(self, *modes: str) -> None:
        table = self.tables.setdefault("steps", [])
        for row in step_rows(self.scale.models, self.device, modes, self.scale.row_s, self.until):
            table.append(row)
            print(row, flush=True)

    def trials_together(self) -> None:
        rows = together(self.scale.models[-1], self.device, self.scale.at_a_time, self.scale.budget_s / 2)
        self.tables["together"] = rows
        name = f"{rows[-1]['trials']} trials of {rows[-1]['model']} at a time, images/s over 1"
        self._add(name, *3 * [rows[-1]["gain"]], "at least 2", rows[-1]["gain"] >= 2)

    def waits(self) -> None:
        """Of a trial of each task, apart from what it logs."""
        self.tables["waits"] = rows = list(waits(self.device))
        if failed := [f"{row['task']}: {row['error']}" for row in rows if "error" in row]:
            raise RuntimeError("; ".join(failed))
        most = float(max(row["waits"] for row in rows if row["task"] not in INSIDE))
        self._add("waits in the steps of any task that is ours", most, most, most, "at most 0", most == 0)

    def data(self) -> None:
        """A trial on JPEG files, whose log says how long the model waited for images."""
        scale = self.scale
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            _write_images(root / "images", scale.images, scale.side)
            recipe = self.recipe.with_(steps=scale.steps, crop="random_resized", warmup_steps=1, mixup=0.2)
            given: dict[str, Any] = {"img_size": scale.img_size, "augment": recipe.augment, "cache_dir": root / "cache"}
            images = data.load(str(root / "images"), workers=usual_workers(self.device.type), **given)
            config = self.config()
            model = vm.ViT(config.with_(num_classes=images.num_classes))
            how = RunOptions(self.device.type, progress=False, tensorboard=False)
            self.tables["reading"] = reading(images, self.device, scale.batch, scale.budget_s / 4)
            train_trial(model, Classification.from_recipe(recipe), images, recipe, out=root / "trial", options=how)
            rows = [json.loads(line) for line in (root / "trial/metrics.jsonl").read_text().splitlines()]
        waits = [row["data_wait"] for row in rows if row["split"] == "train"][1:]
        low, middle, high = statistics.quantiles(waits, n=4, method="inclusive") if len(waits) > 1 else 3 * waits
        self._add("time of a step that waits for images", middle, low, high, "at most 0.05", middle <= 0.05)

    def study(self) -> None:
        """A study from the images to the answer, compared by a protocol, broken off in its second trial and resumed."""
        step, steps = TrialRun._train_step, self.scale.study_steps
        recipe = Recipe().with_(
            steps=steps, batch_size=64, warmup_steps=1, precision="bf16-mixed", crop="none", flip=0.0
        )
        options: dict[str, Any] = {"device": self.device.type, "workers": 1, "cost_seconds": 0, "progress": False}
        study = vm.Study("mu3/2", ["rms"], "digits", recipe, 2, settings=vm.study.StudySettings(metric="knn"))

        def stops(run: TrialRun, batch: Any) -> None:
            if run.step == steps // 2 and run.folder.parent.name == "rms":
                raise Interrupted("broken off", signal.SIGINT)
            step(run, batch)

        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            with mock.patch.object(TrialRun, "_train_step", stops), contextlib.suppress(Interrupted):
                study.run(folder, **options)
            was_broken_off = bool(list(Path(folder).glob("trials/rms/*/checkpoint.pt")))
            answer = study.run(folder, **options)
            seconds = time.monotonic() - began
        done = was_broken_off and [trial.status for trial in answer.trials] == 4 * ["finished"]
        self._add("a study by k-NN, broken off and resumed, seconds", *3 * [seconds], "all 4 trials finish", done)

    def least(self, name: str, limit: float, base: Callable[[], Any], other: Callable[[], Any]) -> None:
        """How many times as fast `other` is."""
        found = self._ratio(other, base)
        self._add(name, found.ratio, found.low, found.high, f"at least {limit}", found.ratio >= limit)

    def most(self, name: str, limit: float, base: Callable[[], Any], other: Callable[[], Any]) -> None:
        """Its time over that of base."""
        found = self._ratio(base, other)
        self._add(name, found.ratio, found.low, found.high, f"at most {limit}", found.ratio <= limit)

    def _ratio(self, base: Callable[[], Any], other: Callable[[], Any]) -> Ratio:
        calls = {"base": base, "other": other}
        for call in calls.values():
            for _ in range(2):
                call()
        repeats = {name: max(1, round(BLOCK_S / max(self._seconds(call, 1), 1e-6))) for name, call in calls.items()}

        def seconds(_: None, name: str) -> float:
            return self._seconds(calls[name], repeats[name])

        rounds = interleave({"": None}, list(calls), seconds, self.scale.budget_s)[""]
        return Ratio.of_rounds([one["other"] / one["base"] for one in rounds])

    def _seconds(self, call: Callable[[], Any], repeats: int) -> float:
        if self.device.type != "cuda":
            return max(seconds_per_call(call, repeats, self.device), 1e-9)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / repeats

    def _add(self, name: str, value: float, low: float, high: float, goal: str, met: bool) -> None:
        judged = met if self.judges and goal else None
        self.found.append(Measured(name, round(value, 4), round(low, 4), round(high, 4), goal, judged))
        print(line(self.found[-1]), flush=True)


MEASUREMENTS = (
    Check.study, Check.eager_steps, Check.trials_together, Check.waits, Check.data, Check.norms, Check.parallel,
    Check.stem, Check.attention_alone, Check.compiled_steps,
)  # fmt: skip


def line(one: Measured) -> str:
    """A row of the table."""
    verdict = {True: "met", False: "MISSED", None: "not judged" if one.goal else ""}[one.met]
    return f"{one.name:<52} {one.value:8.3f} [{one.low:.3f}, {one.high:.3f}]  {one.goal:<14} {verdict}".rstrip()


def check(device: torch.device, scale: Scale, until: float) -> tuple[list[Measured | dict[str, str]], dict[str, Any]]:
    """All measurements, and their tables; one that fails says why, and the others go on."""
    run, failed = Check(device, scale, until), []
    for measure in MEASUREMENTS:
        try:
            measure(run)
        except Exception as error:
            failed.append({"name": measure.__name__, "error": f"{type(error).__name__}: {error}"})
            print(f"{measure.__name__}: {failed[-1]['error']}", flush=True)
    return [*run.found, *failed], run.tables


def run_tests() -> dict[str, Any]:
    """The tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", str(ROOT / "tests/gpu")]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TEST_S)
    except subprocess.TimeoutExpired:
        return {"passed": False, "summary": f"stopped after {TEST_S} s", "output": ""}
    lines = done.stdout.strip().splitlines() or [""]
    return {
        "passed": done.returncode == 0,
        "summary": lines[-1],
        "output": "\n".join(lines[-60:])[-20_000:] if done.returncode else "",
    }


def _infers(model: nn.Module, images: torch.Tensor) -> Callable[[], None]:
    def call() -> None:
        with torch.inference_mode():
            model(images)

    return call


def _trains(module: nn.Module, images: torch.Tensor) -> Callable[[], None]:
    grad = torch.randn_like(module(images).detach())

    def call() -> None:
        module.zero_grad(set_to_none=True)
        module(images).backward(grad)

    return call


def _write_images(folder: Path, count: int, side: tuple[int, int]) -> None:
    """Half of them for each of two classes: smooth noise, as costly to decode as photos."""
    random = np.random.default_rng(0)
    for i in range(count):
        place = folder / "ab"[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(random.integers(0, 256, (side[1] // 6, side[0] // 6, 3), dtype=np.uint8))
        coarse.resize(side, Image.Resampling.BICUBIC).save(place / f"{i}.jpg", quality=90)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny models: a rehearsal of the script itself")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"), help="folder for the JSON")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "There is no CUDA GPU here that PyTorch can use: nothing was checked. Run this on a machine with one; "
            "`--device cpu --quick` rehearses the script alone.",
            file=sys.stderr,
        )
        return 2
    if options.device == "cpu" and not options.quick:
        parser.error("a CPU can only rehearse: add --quick")
    until = time.monotonic() + 60 * MINUTES
    device, rehearsal = torch.device(options.device), options.device == "cpu" or options.quick
    if rehearsal:
        print("A rehearsal with tiny models: the numbers say nothing of a GPU.")
    tests = {"passed": None, "summary": "not run in a rehearsal"} if rehearsal else run_tests()
    print(f"tests: {tests['summary']}", flush=True)
    found, tables = check(device, QUICK if options.quick else FULL, until)
    rows = [asdict(one) if isinstance(one, Measured) else one for one in found]
    content = {"rehearsal": rehearsal, "machine": machine(device), "tests": tests, "measured": rows}
    content["tables"] = tables
    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"gpu_check-{'rehearsal-' if rehearsal else ''}{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    path.with_suffix(".md").write_text(page(content))
    print(f"wrote {path}" + ("" if rehearsal else ": please send it back") + f", and {path.with_suffix('.md').name}")
    failed = [row for row in rows if "error" in row]
    return int(tests["passed"] is False or bool(failed))


if __name__ == "__main__":
    sys.exit(main())
