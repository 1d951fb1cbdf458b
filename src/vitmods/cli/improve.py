"""`vitmods improve`: a better model out of a folder of images."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from vitmods.cli.options import DataOptions, announce, note, parse, readable_folder, with_key
from vitmods.study.budget import make_budget
from vitmods.study.defaults import RecipeChoice
from vitmods.study.executors import StudyOptions
from vitmods.util.address import named
from vitmods.util.errors import UserError
from vitmods.util.registry import plugin_options

COMMON = "data budget from base candidates without with-recipe task img-size recipe epochs workers device out"
"""options that --help shows"""
FAILED = 1  # exit code


@dataclass(frozen=True)
class Improve:
    """Try what is promising for these images, confirm the best on fresh seeds, and train it on all images.

    Candidates are screened together on val; the best combination is compared with base on test, which nothing has
    seen; the better of the two is trained on all images and written. Re-running the command goes on where it ended.
    Exit code: 0; 1 if trials failed; 2 for an error; 130 if stopped.

    examples:
      vitmods improve path/to/images --budget 2h
      vitmods improve --data path/to/images --budget 30m --without hmlp --with-recipe
      vitmods improve path/to/images --budget 1h --from vit_small_patch16_224.augreg_in1k
      vitmods improve path/to/images --candidates levit "norm(kind=rms)" swiglu --base Ti/16
    """

    dataset: DataOptions
    training: RecipeChoice
    options: StudyOptions
    budget: str | None = None
    """how long it may take, as 2h or 30m; also chooses model, image size, length of training and seeds, as far as you
    do not set them. None: no limit"""
    base: str | None = None
    """the model without changes: Ti/16, S/16, timm:NAME; None: what fits the images"""
    start: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """trained weights to start from: a trial folder, a file or a timm model name; then ways to adapt them are tried"""
    key: str | None = None
    """of several models in the file of --from the one to start from, by its place in it or a part of that: teacher"""
    candidates: tuple[str, ...] | None = None
    """what to try instead of what is chosen: changes as `vitmods compare --arms` takes them"""
    without: tuple[str, ...] = ()
    """candidates not to try"""
    with_recipe: bool = False
    """also try fields of the recipe: twice the rate, mixup, an average of weights"""
    recipe: str | None = None
    """recipe with the defaults of training; `vitmods recipes` lists them. None: what fits the images, or finetune with
    --from"""
    out: Path | None = None
    """folder of everything; None: runs/DATA-improve"""
    quiet: bool = False
    """print no progress on the error stream"""

    def __post_init__(self) -> None:
        """Raise UserError for options that exclude each other."""
        if self.start is not None and self.base is not None:
            raise UserError("The checkpoint of --from says what base is: drop --base.")


def main(arguments: Sequence[str]) -> int:
    """Run `vitmods improve`; returns the exit code."""
    options = parse(Improve, arguments, "improve", COMMON)
    options = replace(options, start=with_key(options.start, options.key))
    budget, data = make_budget(options.budget), options.dataset.data
    out = options.out or readable_folder(data, "improve")
    if not options.quiet:
        base = options.start or options.base
        what = f"Looking for a better model than base{f' ({base})' if base else ''} on {data}"
        announce(what, str(out), *[f"This run takes at most {options.budget}."] * (options.budget is not None))
        if options.budget is None:
            note("Without --budget nothing limits the time, and model and training are those that suit the images.")
    from vitmods.improvement.improve import improve

    found = improve(
        data, out, budget=budget, base=options.base, start=options.start, candidates=options.candidates,
        without=options.without, with_recipe=options.with_recipe, recipe=options.training, task=options.dataset.task,
        images=options.dataset, command=shlex.join(["vitmods", "improve", *arguments, *plugin_options()]),
        options=replace(options.options, progress=not options.quiet),
    )  # fmt: skip
    print(found)
    print(f"Report: {named(found.report())}")
    failed = [*found.screen.failed, *(found.confirmed.failed if found.confirmed else ())]
    return FAILED if failed or (found.trained and not found.trained.finished) else 0
