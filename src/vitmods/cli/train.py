"""`vitmods train`: one trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vitmods.cli.options import DataOptions, MachineOptions, defaults_from, parse, readable_folder
from vitmods.recipes import Recipe


@dataclass(frozen=True)
class Train:
    """Train one arm with one seed. The same command goes on where it was stopped.

    model.safetensors, metrics.jsonl, tb/ (TensorBoard) and result.json lie in the folder of --out.

    examples:
      vitmods train
      vitmods train --data path/to/pictures --base S/16 --arm dpn+rms --epochs 50
    """

    pictures: DataOptions
    training: Recipe
    machine: MachineOptions
    arm: str = "base"
    """changes, joined by +; base: none. `vitmods changes` lists them"""
    base: str = "mu3/2"
    """the model that is changed: Ti/16, S/16, B/16, S36/16 (36 deep), or timm's name"""
    seed: int = 0
    """of the weights, the order and the augmentation of the pictures"""
    recipe: str = "digits"
    """where the training options start from: default, small_pictures, digits, plain"""
    out: Path | None = None
    """the trial's folder; None: runs/DATA-BASE-train-ARM-seedSEED"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    suits, pictures, recipe_name, recipe = defaults_from(arguments)
    default = Train(pictures, recipe, MachineOptions(), base=suits.base, recipe=recipe_name)
    options = parse(Train, arguments, "train", default)
    name = readable_folder(options.pictures.data, options.base, "train", options.arm, f"seed{options.seed}")
    result = _train(options, options.out or name)
    if result["status"] == "diverged":
        print(f"diverged: {result['message']}")
        return 1
    metrics = ", ".join(f"{metric} {value:.4f}" for metric, value in result["metrics"].items())
    print(f"{result['split']}: {metrics}\nWeights: {options.out or name}/model.safetensors")
    return 0


def _train(options: Train, out: Path) -> dict:
    from vitmods.study.plan import BASE, Arm, Settings, Trial, arm_from_text, make_seeds
    from vitmods.study.store import StudyFolder
    from vitmods.study.study import fixed_settings
    from vitmods.study.trial import TrialRunner

    pictures = asdict(options.pictures)
    fixed = fixed_settings(options.base, pictures.pop("data"), options.training, **pictures)
    arm = Arm(BASE) if options.arm == BASE else arm_from_text(options.arm)
    settings = Settings(fixed, arms=(), seeds=make_seeds([options.seed]))
    folder, machine = StudyFolder(out), options.machine
    folder.refuse_study()
    with folder.lock():
        runner = TrialRunner(
            folder,
            settings,
            machine.device,
            machine.data_workers,
            machine.checkpoint_minutes,
            progress=not machine.quiet,
        )
        return runner.train(Trial(arm, options.seed), out)
