"""`vitmods train` and `vitmods pretrain`: one trial."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitmods.cli.options import DataOptions, announce, expected_folder, parse, readable_folder
from vitmods.study.defaults import RecipeChoice
from vitmods.train.options import RunOptions, check_divides
from vitmods.util import registry
from vitmods.util.address import address_of, named, place
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.study.settings import Settings
    from vitmods.train.distributed import Processes


COMMON = "data base arm task img-size recipe epochs seed device out dry-run"
"""options that --help shows"""


@dataclass(frozen=True)
class Train:
    """Train one arm with one seed. Re-running the command resumes.

    model.safetensors, metrics.jsonl, tb/ (TensorBoard) and result.json are in the folder of --out.

    Several processes train one model together where torchrun starts them, or --devices asks for them: same weights as
    one process, each batch divided among them.

    examples:
      vitmods train
      vitmods train --data path/to/images --base S/16 --arm dpn+rms --epochs 50
    """

    dataset: DataOptions
    training: RecipeChoice
    options: RunOptions
    arm: str = "base"
    """changes, joined by +, or replace(rms) of any transformer; base: none. `vitmods changes` lists them"""
    base: str | None = None
    """the model that is changed: Ti/16, S/16, B/16, S36/16 (36 deep), or timm's name; any other model as timm:NAME,
    torchvision:NAME, hf:FOLDER, python:MODULE:FUNCTION (docs/any-model.md); None: what fits the images"""
    seed: int = 0
    """of the weights, the order and the augmentation of the images"""
    recipe: str | None = None
    """recipe with the defaults of training: plain, deit, augreg(level=light1), ...; `vitmods recipes` lists them. None:
    what fits the images"""
    out: Path | None = None
    """the trial's folder, or an address such as s3://bucket/folder (docs/clusters.md); None:
    runs/DATA-BASE-train-ARM-seedSEED"""
    devices: int = 1
    """processes that train together, each on its own GPU or on the CPU; torchrun does it on several machines"""
    quiet: bool = False
    """no progress on the error stream"""
    dry_run: bool = False
    """train nothing: show the model's size and the time of a step and of the trial, which needs one device"""


@dataclass(frozen=True)
class Pretrain(Train):
    """Train one arm with one seed by a task without labels: `vitmods train` with --task dino unless you name another.

    The weights in the folder of --out are where `vitmods finetune --from` and `vitmods compare --from` start.

    examples:
      vitmods pretrain --data path/to/images --base S/16 --out runs/dino
      vitmods finetune --from runs/dino --data path/to/labeled
    """

    dataset: DataOptions = field(default=DataOptions(task="dino"), kw_only=True)


def pretrain(arguments: Sequence[str]) -> int:
    """Run `vitmods pretrain`; returns the exit code."""
    return main(arguments, Pretrain, "pretrain")


def main(arguments: Sequence[str], kind: type[Train] = Train, command: str = "train") -> int:
    """Run the command; returns the exit code."""
    options = parse(kind, arguments, command, COMMON)
    if not options.quiet:
        data, parts = options.dataset.data, (options.base or "", command, options.arm, f"seed{options.seed}")
        what = f"Training {options.arm}{f' ({options.base})' if options.base else ''} on {data}, seed {options.seed}"
        time = ["Nothing is trained: a few steps are timed."] if options.dry_run else []
        announce(what, expected_folder(options.out, data, *parts), *time)
    machine = replace(options.options, progress=not options.quiet)
    machine.check_here()
    from vitmods.study.arms import BASE, arm_from_text
    from vitmods.study.fixed import fixed_settings
    from vitmods.study.prepare import say
    from vitmods.study.settings import Settings, make_seeds
    from vitmods.tasks.base import TASKS, WITHOUT_LABELS

    if kind is Pretrain and TASKS[options.dataset.task].target not in WITHOUT_LABELS:
        names = ", ".join(name for name, task in TASKS.items() if task.target in WITHOUT_LABELS)
        raise UserError(f"The task {options.dataset.task} reads labels: use `vitmods train`, or one of {names}.")
    if not options.arm.strip():
        raise UserError("--arm is empty: name an arm, or base.")
    arms, dataset = () if options.arm == BASE else (arm_from_text(options.arm),), options.dataset
    seeds = make_seeds([options.seed])
    fixed, _, recipe_note = fixed_settings(options.base, dataset.data, options.training, dataset, task=dataset.task)
    settings = Settings(fixed, arms, seeds)
    if recipe_note:
        say(machine, recipe_note)
    name = readable_folder(dataset.data, str(fixed["base"]), command, options.arm, f"seed{options.seed}")
    if options.dry_run:
        return _dry_run(settings, options)
    from vitmods.train.distributed import join, launched
    from vitmods.train.launch import end_with_launcher, launch

    if options.devices != 1 and not launched():
        _check_shared(settings, machine, options.devices)
        again = [f"--plugin={name}" for name in registry.asked_for]
        return launch("vitmods", [command, *arguments, *again], options.devices)
    end_with_launcher()
    processes = join(machine.device)
    processes.once(partial(_check_shared, settings, machine, processes.size))
    out = options.out or name
    result = run_trial(settings, machine, out, processes)
    return show(result, out) if processes.first else int(result["status"] == "diverged")


def _dry_run(settings: Settings, options: Train) -> int:
    from vitmods.study.estimate import estimate_trial
    from vitmods.util.text import duration

    _check_shared(settings, options.options, options.devices)
    if options.devices > 1:
        part = settings.cells[-1].recipe.batch_size // options.devices
        print(f"{options.devices} devices train {part} images each in a step. A dry run of one device times it.")
        return 0
    timed = estimate_trial(settings.cells[-1], settings.measure, options.options)
    macs = "" if timed.macs is None else f", {timed.macs / 1e9:.3g} GMACs an image"
    print(
        f"{timed.arm}: {timed.params:,} parameters{macs}. A step takes {duration(timed.step_s)}, the trial about "
        f"{duration(timed.trial_s)}."
    )
    return 0


def _check_shared(settings: Settings, options: RunOptions, size: int) -> None:
    """Raise UserError, before anything is started or written, if so many processes cannot train the model together."""
    options.check_processes(size)
    check_divides(settings.cells[-1].recipe.batch_size, size)


def run_trial(settings: Settings, options: RunOptions, out: Path, processes: Processes | None = None) -> dict[str, Any]:
    """Train the last arm of the settings with their only seed in its own folder, or resume; returns result.json."""
    from vitmods.data.splits import SPLIT_FILE, write_split
    from vitmods.study.cells import Trial
    from vitmods.study.store import StudyFolder, read_object
    from vitmods.study.trial import TrialRunner
    from vitmods.train.distributed import ALONE

    folder, together, cell = StudyFolder(out), processes or ALONE, settings.cells[-1]
    out = folder.path
    if (address := address_of(out)) and together.size > int(os.environ.get("LOCAL_WORLD_SIZE", together.size)):
        raise UserError(f"Processes on several machines share a folder, which {address} is not: name one with --out.")
    together.once(partial(folder.check_place, settings.fixed["data"]))
    with folder.lock() if together.first else nullcontext():
        together.once(folder.refuse_study)
        runner = TrialRunner(folder, settings.measure, options, together)
        dataset = runner.dataset(cell)
        for warning in dataset.summary()["warnings"] if together.first else ():
            print(f"Warning: {warning}", file=sys.stderr)

        def keep_images() -> None:
            """Note which images the trial sees; raise UserError if it started with others by the same settings."""
            images = json.loads(json.dumps(cell.images()))
            if read_object(folder.path / "config.json").get("images") == images:
                folder.images.check_same(dataset.splits)
            folder.images.write(dataset.splits)
            write_split(folder.path / SPLIT_FILE, dataset)

        together.once(keep_images)
        return runner.train(Trial(cell, settings.seeds[0]), out)


def show(result: dict[str, Any], out: Path) -> int:
    """Print how a trial ended; returns the exit code."""
    if result["status"] == "diverged":
        print(f"diverged: {result['message']}")
        return 1
    metrics = ", ".join(f"{metric} {value:.4f}" for metric, value in result["metrics"].items())
    print(f"{result['split']}: {metrics}\nWeights: {named(place(out))}/model.safetensors")
    return 0
