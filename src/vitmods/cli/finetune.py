"""`vitmods finetune`: trained weights adapted to other images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vitmods.cli.options import DataOptions, announce, expected_folder, parse, readable_folder, with_key
from vitmods.cli.train import run_trial, show
from vitmods.study.defaults import RecipeChoice
from vitmods.train.options import RunOptions
from vitmods.util.address import named, place
from vitmods.util.errors import UserError
from vitmods.util.remote import upload

DELTA = "delta.safetensors"
COMMON = "from data img-size train recipe epochs lr seed device out"
"""options that --help shows"""


@dataclass(frozen=True)
class Finetune:
    """Adapt trained weights to other images, all of them or a part. Re-running the command resumes.

    Beside the files of `vitmods train`, delta.safetensors (of ViTs that vitmods reads) holds only what was trained:
    `vitmods.load_delta(base, file)` gives the model, `vitmods.MultiTask` serves several of them.

    examples:
      vitmods finetune --model runs/digits-mu3-2-train-base-seed0 --data path/to/images
      vitmods finetune --model vit_small_patch16_224.augreg_in1k --data path/to/images --img-size 384
      vitmods finetune --model deit_small.pth --data path/to/images --train ffn --recipe finetune_sgd
    """

    dataset: DataOptions
    training: RecipeChoice
    options: RunOptions
    model: Annotated[str | None, tyro.conf.arg(aliases=["--from"])] = None
    """a trial's folder, a file of weights (.pth, .safetensors, .npz), or a timm model with published weights"""
    key: str | None = None
    """of several models in that file the one to adapt, by its place in it or a part of that: teacher"""
    positions: Literal["bicubic", "bilinear"] = "bicubic"
    """how position embeddings become those of --img-size: as timm, or with aligned corners as big_vision"""
    seed: int = 0
    """of the head, the order and the augmentation of the images"""
    recipe: str = "finetune"
    """recipe with the defaults of training: finetune, finetune_sgd, transfer, or one for new weights; --train is
    attention unless you set it"""
    quiet: bool = False
    """no progress on the error stream"""
    out: Path | None = None
    """the trial's folder; None: runs/DATA-MODEL-finetune-TRAIN-seedSEED"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(Finetune, arguments, "finetune", COMMON)
    options = replace(options, model=with_key(options.model, options.key))
    if options.model is None:
        raise UserError(
            "Say what is adapted: --model (or --from) with a trial's folder, a file of weights or a timm model's name."
        )
    data, overrides = options.dataset, {"train": "attention", **options.training.overrides}
    recipe, trained = RecipeChoice(options.recipe, overrides), overrides["train"]
    words = (Path(options.model).name, "finetune", trained, f"seed{options.seed}")
    if not options.quiet:
        what = f"Adapting {trained} of {options.model} to {data.data}, seed {options.seed}"
        announce(what, expected_folder(options.out, data.data, *words))
    machine = replace(options.options, progress=not options.quiet)
    machine.check_processes(1)
    machine.check_here()
    from vitmods.adapters.apply import as_vit
    from vitmods.finetune import save_delta, train_only
    from vitmods.finetune.adapters import WEIGHTS
    from vitmods.study.checkpoints import Checkpoint, arms_in
    from vitmods.study.fixed import fixed_settings
    from vitmods.study.prepare import say
    from vitmods.study.settings import Settings, make_seeds
    from vitmods.train.trial import ADAPTERS

    if arms := arms_in(options.model):
        raise UserError(
            f"{options.model} holds several checkpoints: {', '.join(arms)}. Name one of them, or adapt all and compare "
            f"them: vitmods compare --from {options.model}."
        )
    seeds = make_seeds([options.seed])
    fixed, _, recipe_note = fixed_settings(
        None, data.data, recipe, data, task=data.task, start=options.model, positions=options.positions
    )
    if recipe_note:
        say(machine, recipe_note)
    try:
        base = as_vit(Checkpoint.open(options.model).backbone)
    except UserError:
        base = None
        say(machine, f"The folder holds all weights and no {DELTA}: {options.model} is no model that vitmods reads.")
    out = place(options.out) if options.out else readable_folder(data.data, *words)
    code = show(run_trial(Settings(fixed, (), seeds), machine, out), out)
    if code == 0:
        model = Checkpoint.open(str(out)).model
        if base is not None:
            delta = save_delta(model, base, out / DELTA)
            upload(out / DELTA)
            print(f"Of that, {options.model} has all but {delta.nbytes / 1e6:.3g} MB: {named(out / DELTA)}")
        if (out / ADAPTERS).is_dir():
            size_kb = (out / ADAPTERS / WEIGHTS).stat().st_size / 1e3
            print(f"The adapters, for vitmods.MultiTask or peft: {named(out / ADAPTERS)} ({size_kb:.3g} kB)")
        print(train_only(model, trained))
    return code
