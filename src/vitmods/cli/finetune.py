"""`vitmods finetune`: trained weights adapted to other images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vitmods.cli.options import DataOptions, asked_for, defaults_from, parse, readable_folder
from vitmods.cli.train import run_trial, show
from vitmods.recipes import Recipe
from vitmods.study.arms import BASE
from vitmods.study.checkpoints import arms_in
from vitmods.train.options import RunOptions
from vitmods.util.address import named, place
from vitmods.util.errors import UserError
from vitmods.util.remote import upload

DELTA = "delta.safetensors"
COMMON = ("model", "data", "img-size", "train", "recipe", "epochs", "lr", "seed", "device", "out")
"""options that --help shows"""


@dataclass(frozen=True)
class Finetune:
    """Adapt trained weights to other images, all of them or a part. The same command goes on where it was stopped.

    Beside what `vitmods train` writes, delta.safetensors in the folder of --out holds only what was trained:
    `vitmods.load_delta(base, file)` gives the model, `vitmods.MultiTask` serves several of them.

    examples:
      vitmods finetune --model runs/digits-mu3-2-train-base-seed0 --data path/to/images
      vitmods finetune --model vit_small_patch16_224.augreg_in1k --data path/to/images --img-size 384
      vitmods finetune --model deit_small.pth --data path/to/images --train ffn --recipe finetune_sgd
    """

    model: str
    """a trial's folder, a file of weights (.pth, .safetensors, .npz), or a timm model with published weights"""
    dataset: DataOptions
    training: Recipe
    options: RunOptions
    positions: Literal["bicubic", "bilinear"] = "bicubic"
    """how position embeddings become those of --img-size: as timm, or with aligned corners as big_vision"""
    seed: int = 0
    """of the head, the order and the augmentation of the images"""
    recipe: str = "finetune"
    """where the training options start from: finetune, finetune_sgd, transfer, or one for new weights"""
    quiet: bool = False
    """no progress on the error stream"""
    out: Path | None = None
    """the trial's folder; None: runs/DATA-MODEL-finetune-TRAIN-seedSEED"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    asked = asked_for(arguments, "finetune", Finetune)
    model = asked.model
    if model is None and not asked.help:
        instead = " (--from is an option of `vitmods compare`)" if asked.start else ""
        raise UserError(
            f"Say what is adapted: --model with a trial's folder, a file of weights or a timm model's name{instead}."
        )
    if model and (found := arms_in(model)):
        raise UserError(
            f"{model} holds several checkpoints: {', '.join(found)}. Name one of them, or adapt all and compare them: "
            f"vitmods compare --from {model}."
        )
    _, dataset, name, recipe = defaults_from(asked, model)
    default = Finetune(model or "", dataset, recipe.with_(train="attention"), RunOptions(), recipe=name)
    options = parse(Finetune, arguments, "finetune", default, COMMON)
    words = (Path(options.model).name, "finetune", options.training.train, f"seed{options.seed}")
    out = place(options.out) if options.out else readable_folder(options.dataset.data, *words)
    code = show(_train(options, out), out)
    if code == 0:
        _save(options, out)
    return code


def _train(options: Finetune, out: Path) -> dict[str, Any]:
    from vitmods.study.study import fixed_settings

    given = asdict(options.dataset)
    fixed = fixed_settings(
        None, given.pop("data"), options.training, start=options.model, positions=options.positions, **given
    )
    machine = replace(options.options, progress=not options.quiet)
    machine.check_processes(1)
    machine.check_here()
    return run_trial(fixed, BASE, options.seed, machine, out)


def _save(options: Finetune, out: Path) -> None:
    from vitmods.adapters import open_checkpoint
    from vitmods.finetune import save_delta, train_only
    from vitmods.study.checkpoints import open_trial

    model = open_trial(out)
    delta = save_delta(model, open_checkpoint(options.model), out / DELTA)
    upload(out / DELTA)
    print(f"Of that, {options.model} has all but {delta.nbytes / 1e6:.3g} MB: {named(out / DELTA)}")
    print(train_only(model, options.training.train))
