"""`vitmods evaluate`: trained weights on images, by one or several protocols."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from vitmods.cli.options import note, parse
from vitmods.evals.options import Options
from vitmods.util.errors import UserError
from vitmods.util.files import tracked
from vitmods.util.remote import download
from vitmods.util.text import first_of, listing


@dataclass(frozen=True)
class Evaluate:
    """Evaluate trained weights on images: accuracy, calibration, transfer from few images, robustness.

    Prints a table on a terminal and its numbers as JSON elsewhere; for several checkpoints the mean and each. --json
    and --out return all results, including those of each class. fewshot, probe and knn learn from the features of the
    training images, and take images of any classes.

    examples:
      vitmods evaluate runs/digits-mu3-2/trials/dpn/seed0
      vitmods evaluate runs/digits-mu3-2/trials/dpn/seed0 --protocol top1 calibration fewshot --out val.json
      vitmods evaluate runs/digits-mu3-2/trials/dpn
      vitmods evaluate vit.safetensors --data path/to/images --protocol fewshot knn
      vitmods evaluate runs/pets/trials/dpn/seed0 --protocol corruptions --textures path/to/frost --figures figures
    """

    checkpoints: Annotated[tuple[str, ...], tyro.conf.Positional]
    """trials (folders or addresses), or folders of seed0, seed1, ...; or, with --data, files of weights, Hugging Face
    folders, timm's names"""
    protocol: tuple[str, ...] = ()
    """any of top1, calibration, confusion, fewshot, probe, knn, corruptions, average_precision; none: the one that
    compares trials of that task"""
    split: str | None = None
    """train, val or test; None: test, or val without a test split"""
    data: str | None = None
    """other images, as `vitmods data` takes them; None: the trial's own"""
    protocols: Options = field(default_factory=Options)
    batch_size: int = 64
    """images at a time"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps"""
    data_workers: int = 0
    """threads that prepare images ahead; useful for corruptions"""
    out: Path | None = None
    """write all results to this file as JSON, and the figures next to it"""
    figures: Path | None = None
    """draw into this folder, as SVG, PDF and PNG"""
    json: bool = False
    """print all results as JSON"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(Evaluate, arguments, "evaluate")
    from vitmods.report.evaluation import draw_evaluation
    from vitmods.report.tables import print_evaluation
    from vitmods.study.evaluate import evaluate, figure_names, over_seeds, summary
    from vitmods.util.files import make_folder, write_json

    if options.out is not None and options.out.suffix.lower() not in ("", ".json"):
        raise UserError(f"{options.out}: results are written as JSON: end the name with .json.")
    for folder in (options.figures, options.out and options.out.parent):
        if folder is not None:
            make_folder(folder)
    evaluations = evaluate(
        [download(checkpoint) for checkpoint in options.checkpoints], options.protocol or None, split=options.split,
        data=options.data, batch_size=options.batch_size, device=options.device, workers=options.data_workers,
        options=options.protocols, progress=tracked,
    )  # fmt: skip
    for evaluation in evaluations:
        if t := evaluation["protocols"].get("calibration", {}).get("temperature"):
            note(f"{evaluation['checkpoint']}: the logits are divided by {t:.3g}, fitted on val.")
    arms = list(dict.fromkeys(evaluation["name"].rpartition("-seed")[0] for evaluation in evaluations))
    if len(arms) > 1:
        note(f"the mean is over checkpoints of different names ({first_of(arms, 4)}).")
    result = evaluations[0] if len(evaluations) == 1 else over_seeds(evaluations)
    if options.out is not None:
        write_json(options.out, result)
    if options.json or not sys.stdout.isatty():
        print(json.dumps(result if options.json else summary(result), indent=1))
    else:
        print_evaluation(result)
    # Figures are in the folder of --figures, or next to the JSON with its name as a prefix.
    folder = options.figures or (options.out.parent if options.out else None)
    prefix = "" if options.figures or not options.out else f"{options.out.stem}-"
    names = figure_names(evaluations) if len(evaluations) > 1 else [""]
    drawn = [
        path
        for evaluation, name in zip(evaluations, names, strict=True)
        for path in (draw_evaluation(evaluation, folder, prefix + name) if folder else ())
    ]
    for path in drawn:
        note(f"drawn: {path}")
    if options.figures and not drawn:
        note(f"no figures: {listing([*evaluations[0]['protocols']])} has none. --protocol names others.")
    return 0
