"""Tables of `gpu_check.py`: training steps beside timm's, several trials at a time, reading, and waits for the device.

Run by itself it is one of several trials on a GPU: it says that it is ready, and after a line on its input makes steps
for some seconds and prints how many.
"""

import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities
from waits import trial_of

import vitmods as vm
from vitmods.bench import BLOCK_S, SIDE, Ratio, interleave, now, seconds_per_call
from vitmods.data import ImageDataset
from vitmods.data.batch import Batch, for_device
from vitmods.data.threads import cores
from vitmods.recipes import Recipe
from vitmods.study.bases import macs_of
from vitmods.study.cost import Steps
from vitmods.tasks import Classification
from vitmods.tasks.base import TASKS
from vitmods.train import RunOptions, TrialRun
from vitmods.train.device import tf32_products
from vitmods.train.interrupt import stop_on_signals
from vitmods.train.loggers import ProgressBar

PRECISIONS = ("bf16-mixed", "tf32", "32-true", "fp16-mixed")
CPU_PRECISIONS = ("bf16-mixed", "32-true")
ENOUGH_S = 60.0  # that must be left of the time for a row that is compiled
LOGGING = "train/loggers.py", "train/device.py"  # where a row is made: the losses, and how long images took
WAITS_INSIDE = {"detection", "instance_segmentation"}  # in torchvision
PRODUCT = "product"


@dataclass(frozen=True)
class Model:
    """A model of the tables: its name, the side of its images in pixels, and images a batch."""

    name: str
    side: int
    batch: int

    @property
    def config(self) -> vm.ViTConfig:
        return vm.ViTConfig.from_name(self.name, img_size=self.side, num_classes=100)

    def of_timm(self) -> nn.Module:
        config = self.config
        sizes = {"embed_dim": config.embed_dim, "depth": config.depth, "num_heads": config.num_heads}
        sizes |= {"img_size": config.img_size, "patch_size": config.patch_size, "num_classes": config.num_classes}
        return VisionTransformer(**sizes, mlp_ratio=config.mlp_dim / config.embed_dim)


def step_rows(
    models: Sequence[Model], device: torch.device, modes: Sequence[str], row_s: float, until: float
) -> Iterator[dict[str, Any]]:
    """Rows of both libraries, timed in the same rounds, those first that most trials use; those for which there is no
    time are named. Modes: "eager", "compiled", or one of torch.compile's.

    Fields: images_per_s; step_ms by the wall clock; host_ms until a step is queued; device_ms of its kernels, and their
    number `kernels` (None without a real GPU); bound: by "host" or "device"; share_of_peak: multiply-adds a second, by
    those of a large product of matrices in the same type; over_timm: time over that of timm's.
    """
    for precision, mode in product(PRECISIONS if device.type == "cuda" else CPU_PRECISIONS, modes):
        for model in models:
            name = {"model": model.name, "images": model.batch, "precision": precision, "mode": mode}
            if time.monotonic() > until - (0 if mode == "eager" else ENOUGH_S):
                yield {**name, "error": "no time was left"}
                continue
            try:
                yield from _rows(model, device, precision, mode, row_s, name)
            except Exception as error:
                yield {**name, "error": f"{type(error).__name__}: {error}"[:300]}


def _rows(
    model: Model, device: torch.device, precision: str, mode: str, row_s: float, name: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    recipe = Recipe().with_(batch_size=model.batch, precision="32-true" if precision == "tf32" else precision)
    half = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(precision, torch.float32)
    side = SIDE[device.type] if row_s > 1 else 64
    matrix = torch.randn(side, side, device=device, dtype=half)
    calls: dict[str, Callable[[], Any]] = {}
    for library, made in (("timm", model.of_timm()), ("vitmods", vm.ViT(model.config))):
        steps = Steps(made, Classification.from_recipe(recipe), recipe, device, model.config)
        if mode != "eager":
            steps = steps.compiled(None if mode == "compiled" else mode)
        calls[library] = steps.train(model.batch)
    macs = macs_of(vm.ViT(model.config), model.config) or 0
    calls[PRODUCT] = lambda: matrix @ matrix
    with tf32_products(True) if precision == "tf32" else nullcontext():
        for call in calls.values():
            for _ in range(3):  # kernels are chosen, graphs compiled and captured
                call()
        repeats = {n: max(1, round(BLOCK_S / max(seconds_per_call(c, 1, device), 1e-6))) for n, c in calls.items()}

        def seconds(_: None, library: str) -> float:
            return max(seconds_per_call(calls[library], repeats[library], device), 1e-9)

        rounds = interleave({"": None}, list(calls), seconds, row_s)[""]
        for library in ("vitmods", "timm"):
            taken = statistics.median(one[library] for one in rounds)
            peak = [3 * model.batch * macs * one[PRODUCT] / (side**3 * one[library]) for one in rounds]
            host_ms = 1e3 * host_seconds(calls[library], device)
            kernels, device_ms = kernels_of(calls[library], device)
            yield {
                **name,
                "library": library,
                "images_per_s": round(model.batch / taken, 1),
                "step_ms": round(1e3 * taken, 3),
                "host_ms": round(host_ms, 3),
                "device_ms": device_ms,
                "kernels": kernels,
                "bound": None if device_ms is None else "host" if host_ms > device_ms else "device",
                "share_of_peak": round(statistics.median(peak), 4),
                "over_timm": {
                    key: round(value, 4)
                    for key, value in asdict(Ratio.of_rounds([one[library] / one["timm"] for one in rounds])).items()
                },
            }  # fmt: skip


def host_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Until a call has queued its work: the median of five, each after the device has finished."""
    found = []
    for _ in range(5):
        begin = now(device)
        call()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def kernels_of(call: Callable[[], Any], device: torch.device) -> tuple[int | None, float | None]:
    """Kernels and copies of a call, and their milliseconds, as CUDA's profiler sees them."""
    if device.type != "cuda" or ProfilerActivity.CUDA not in supported_activities():
        return None, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            call()
            torch.cuda.synchronize(device)
    ran = [
        event.time_range.elapsed_us()
        for event in found.events() or ()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]
    return (len(ran), round(sum(ran) / 1e3, 3)) if ran else (None, None)


def together(model: Model, device: torch.device, counts: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Images a second of so many trials that train at a time, each a process."""
    rows: list[dict[str, Any]] = []
    for count in counts:
        command = [sys.executable, __file__, model.name, str(model.side), str(model.batch), device.type, str(seconds)]
        piped: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started = [subprocess.Popen(command, **piped) for _ in range(count)]
        try:
            for one in started:
                if (said := one.stdout.readline().strip()) != "ready":
                    raise RuntimeError(f"one of {count} trials ended before its first step: {said or 'no message'}")
            for one in started:
                one.stdin.write("\n")
                one.stdin.flush()
            steps_per_s = sum(float(one.stdout.readline()) for one in started)
        finally:
            for one in started:
                one.kill()
                one.communicate()
        images_per_s = round(steps_per_s * model.batch, 1)
        gain = round(images_per_s / rows[0]["images_per_s"], 3) if rows else 1.0
        rows.append({"model": model.name, "trials": count, "images_per_s": images_per_s, "gain": gain})
    return rows


def trial(name: str, side: str, batch: str, kind: str, seconds: str) -> None:
    """One of the trials of `together`: it prints its steps a second, until the device has made them."""
    device, model = torch.device(kind), Model(name, int(side), int(batch))
    precision = "bf16-mixed" if kind == "cuda" else "32-true"
    recipe = Recipe().with_(batch_size=model.batch, precision=precision)
    step = Steps(vm.ViT(model.config), Classification.from_recipe(recipe), recipe, device, model.config).train(
        model.batch
    )
    for _ in range(3):
        step()
    now(device)
    print("ready", flush=True)
    sys.stdin.readline()
    made, began = 0, time.monotonic()
    while time.monotonic() < began + float(seconds):
        step()
        made += 1
        if made % 10 == 0:
            now(device)
    now(device)
    print(made / (time.monotonic() - began), flush=True)


def reading(images: ImageDataset, device: torch.device, batch: int, seconds: float) -> list[dict[str, Any]]:
    """Images a second that reach the device, by threads, without training."""
    rows = []
    for threads in [0, *(count for count in (1, 2, 4, 8, 16, 32) if count <= cores())]:
        source, read, epoch = for_device(replace(images, workers=threads), device), 0, 0
        begin = now(device)
        while now(device) - begin < seconds:
            for made in source.train_batches(seed=0, epoch=epoch, batch_size=batch):
                made.to(device)
                read += len(made)
                if time.perf_counter() - begin > seconds:
                    break
            epoch += 1
        rows.append({"threads": threads, "images_per_s": round(read / (now(device) - begin), 1)})
    return rows


@dataclass
class Noise:
    """A set whose batches are all the same one, without images to evaluate on."""

    batch: Batch
    steps: int
    eval_split = val_split = "val"
    splits = MappingProxyType({"train": range(64)})
    encode: object = None

    def steps_per_epoch(self, batch_size: int) -> int:
        return self.steps

    def train_batches(self, *, seed: int, epoch: int, batch_size: int, start: int = 0) -> Iterator[Batch]:
        yield from [self.batch] * (self.steps - start)


def waits(device: torch.device, steps: int = 6) -> Iterator[dict[str, Any]]:
    """How often a trial of each task waits for the device: in all its steps, and when it writes a row of its log."""
    for task_name in sorted(TASKS):
        try:
            yield {"task": task_name, "steps": steps, **_waits_of(task_name, device, steps)}
        except Exception as error:
            yield {"task": task_name, "error": f"{type(error).__name__}: {error}"[:300]}


def _waits_of(title: str, device: torch.device, steps: int) -> dict[str, Any]:
    task, model, recipe, batch = trial_of(title, 4)
    options = RunOptions(device.type, progress=False, tensorboard=False)
    with TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught, stop_on_signals() as request:
        warnings.simplefilter("always")
        recipe = recipe.with_(steps=steps, warmup_steps=None, warmup_epochs=0.0)
        run = TrialRun(model, task, Noise(batch, steps), recipe, folder=Path(folder), options=options)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run.run(request, ProgressBar(False, title, steps, 0))
        finally:
            torch.cuda.set_sync_debug_mode("default")
            run.close("finished", {})
    places = [
        f"{'/'.join(Path(one.filename).parts[-2:])}:{one.lineno}"
        for one in caught
        if "synchronizing CUDA operation" in str(one.message)
    ]
    logged = [place for place in places if place.startswith(LOGGING)]
    others = sorted(set(places) - set(logged))
    return {"waits": len(places) - len(logged), "logging": len(logged), "places": others[:5]}


if __name__ == "__main__":
    trial(*sys.argv[1:])
