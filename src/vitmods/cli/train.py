"""`vitmods train`: one trial."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitmods.cli.options import DataOptions, asked_for, defaults_from, parse, readable_folder
from vitmods.recipes import Recipe
from vitmods.train.options import RunOptions, check_divides
from vitmods.util import registry
from vitmods.util.address import address_of, named, place
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.data import ImageDataset
    from vitmods.study.plan import Settings
    from vitmods.study.store import StudyFolder
    from vitmods.train.distributed import Processes


COMMON = ("data", "base", "arm", "task", "img-size", "recipe", "epochs", "seed", "device", "out", "dry-run")
"""options that --help shows"""


@dataclass(frozen=True)
class Train:
    """Train one arm with one seed. The same command goes on where it was stopped.

    model.safetensors, metrics.jsonl, tb/ (TensorBoard) and result.json lie in the folder of --out.

    Several processes train one model together where torchrun starts them, or --devices asks for them: same weights as
    one process, each batch divided among them.

    examples:
      vitmods train
      vitmods train --data path/to/images --base S/16 --arm dpn+rms --epochs 50
    """

    dataset: DataOptions
    training: Recipe
    options: RunOptions
    arm: str = "base"
    """changes, joined by +, or replace(rms) of any transformer; base: none. `vitmods changes` lists them"""
    base: str = "mu3/2"
    """the model that is changed: Ti/16, S/16, B/16, S36/16 (36 deep), or timm's name; any other model as timm:NAME,
    torchvision:NAME, hf:FOLDER, python:MODULE:FUNCTION (docs/any-model.md)"""
    seed: int = 0
    """of the weights, the order and the augmentation of the images"""
    recipe: str = "digits"
    """where the training options start from: plain, deit, augreg(level=light1), ...; `vitmods recipes` lists them"""
    out: Path | None = None
    """the trial's folder, or an address as s3://bucket/folder (docs/clusters.md); None:
    runs/DATA-BASE-train-ARM-seedSEED"""
    devices: int = 1
    """processes that train together, each on a GPU of its own or on the CPU; torchrun does it on several machines"""
    quiet: bool = False
    """no progress on the error stream"""
    dry_run: bool = False
    """train nothing: show the model's size and the time of a step and of the trial; with several devices, the memory
    that each of them needs, which takes none of it"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    defaults, dataset, recipe_name, recipe = defaults_from(asked_for(arguments, "train", Train))
    default = Train(dataset, recipe, RunOptions(), base=str(defaults.base), recipe=recipe_name)
    options = parse(Train, arguments, "train", default, COMMON)
    name = readable_folder(options.dataset.data, options.base, "train", options.arm, f"seed{options.seed}")
    out = options.out or name
    fixed = _fixed(options.base, options.dataset, options.training)
    machine = replace(options.options, progress=not options.quiet)
    machine.check_here()
    if options.dry_run:
        return _dry_run(fixed, options)
    from vitmods.train.distributed import join, launched
    from vitmods.train.launch import end_with_launcher, launch

    if options.devices != 1 and not launched():
        _check_shared(fixed, options, options.devices)
        again = [f"--plugin={name}" for name in registry.asked_for]
        return launch("vitmods", ["train", *arguments, *again], options.devices)
    end_with_launcher()
    processes = join()
    processes.once(partial(_check_shared, fixed, options, processes.size))
    result = run_trial(fixed, options.arm, options.seed, machine, out, processes)
    return show(result, out) if processes.first else int(result["status"] == "diverged")


def _dry_run(fixed: dict[str, Any], options: Train) -> int:
    from vitmods.study.estimate import estimate_trial
    from vitmods.util.text import duration, plural

    machine, settings = options.options, _settings(fixed, options.arm)
    if options.devices > 1 or machine.shard:
        from vitmods.study.memory import trial_memory

        for name, memory in trial_memory(settings, machine, options.devices).items():
            print(f"On each of {plural(options.devices, 'device')}, {name}: {memory}.")
        return 0
    found = estimate_trial(settings, machine)
    macs = "" if found.macs is None else f", {found.macs / 1e9:.3g} GMACs an image"
    print(
        f"{found.arm}: {found.params:,} parameters{macs}. A step takes {duration(found.step_s)}, the trial about "
        f"{duration(found.trial_s)}."
    )
    return 0


def _check_shared(fixed: dict[str, Any], options: Train, size: int) -> None:
    """UserError, before anything is started or written, where so many processes cannot train the model together."""
    from vitmods.study.store import StudyFolder
    from vitmods.study.trial import TrialRunner

    settings = _settings(fixed, options.arm)
    options.options.check_processes(size)
    recipe = settings.recipe_of(settings.every_arm[-1])
    if size > 1 and recipe.batch_size % size:  # unless there are fewer images than that
        images = TrialRunner(StudyFolder(os.devnull), settings, options.options).dataset(recipe)
        check_divides(min(recipe.batch_size, len(images.splits["train"])), size)


def _settings(fixed: dict[str, Any], arm: str) -> Settings:
    from vitmods.study.arms import BASE, arm_from_text
    from vitmods.study.plan import Settings

    return Settings(fixed, arms=() if arm == BASE else (arm_from_text(arm),), seeds=(0,))


def _fixed(base: str, dataset: DataOptions, training: Recipe) -> dict[str, Any]:
    from vitmods.study.study import fixed_settings

    given = asdict(dataset)
    return fixed_settings(base, given.pop("data"), training, **given)


def run_trial(
    fixed: dict[str, Any],
    arm: str,
    seed: int,
    options: RunOptions,
    out: Path,
    processes: Processes | None = None,
) -> dict[str, Any]:
    """Train one arm in a folder of its own, or go on; what result.json holds."""
    from vitmods.study.arms import BASE, Arm, arm_from_text
    from vitmods.study.plan import Settings, Trial, image_settings, make_seeds
    from vitmods.study.store import StudyFolder
    from vitmods.study.trial import TrialRunner
    from vitmods.train.distributed import ALONE

    settings = Settings(fixed, arms=(), seeds=make_seeds([seed]))
    folder = StudyFolder(out)
    together = processes or ALONE
    out = folder.path
    if (address := address_of(out)) and together.size > int(os.environ.get("LOCAL_WORLD_SIZE", together.size)):
        raise UserError(f"Processes on several machines share a folder, which {address} is not: name one with --out.")
    together.once(partial(folder.check_place, fixed["data"]))
    with folder.lock() if together.first else nullcontext():
        together.once(folder.refuse_study)
        runner = TrialRunner(folder, settings, options, together)
        trial = Trial(Arm(BASE) if arm == BASE else arm_from_text(arm), seed)
        dataset = runner.dataset(settings.recipe_of(trial.arm, trial.point))
        for warning in dataset.summary()["warnings"] if together.first else ():
            print(f"Warning: {warning}", file=sys.stderr)
        together.once(partial(_keep_images, folder, dataset, image_settings(fixed)))
        return runner.train(trial, out)


def _keep_images(folder: StudyFolder, dataset: ImageDataset, settings: dict[str, Any]) -> None:
    """Note which images the trial is of. UserError, with what has changed, where it began with others by the same
    settings."""
    from vitmods.data.splits import SPLIT_FILE, write_split
    from vitmods.study.store import read_object

    if read_object(folder.path / "config.json").get("images") == json.loads(json.dumps(settings)):
        folder.images.check_same(dataset.splits)
    folder.images.write(dataset.splits)
    write_split(folder.path / SPLIT_FILE, dataset)


def show(result: dict[str, Any], out: Path) -> int:
    """Print how a trial ended; returns the exit code."""
    if result["status"] == "diverged":
        print(f"diverged: {result['message']}")
        return 1
    metrics = ", ".join(f"{metric} {value:.4f}" for metric, value in result["metrics"].items())
    print(f"{result['split']}: {metrics}\nWeights: {named(place(out))}/model.safetensors")
    return 0
