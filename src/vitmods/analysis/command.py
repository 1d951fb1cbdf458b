"""`vitmods analyse`: the figures of the papers, of one's own models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from vitmods.cli.options import parse


@dataclass(frozen=True)
class Analyse:
    """Look inside models: draw what the papers plot, with the numbers as CSV and a page that shows all.

    Writes index.html, and NAME.svg, NAME.pdf, NAME.png and NAME.csv of each figure. What cannot be made of a model is
    listed with the reason.

    examples:
      vitmods analyse runs/pets     (a study: its arms in one figure)
      vitmods analyse runs/digits-mu3-2/trials/dtn/seed0 --figures kernels lambdas attention_distance
      vitmods analyse timm:vit_small_patch16_224.augreg_in1k --data path/to/images --out figures
      vitmods analyse new:S/16+dtn --figures kernels
    """

    target: Annotated[str, tyro.conf.Positional]
    """a study's folder, a trial's, a file of weights, a timm model with published weights, a Hugging Face folder; or
    with new: in front a size (new:S/16+dtn) or a library's model with new weights"""
    figures: tuple[str, ...] = ("all",)
    """names, or all: attention_distance, branches, first_norm, gradients, kernels, lambdas, partial_training,
    stem_gradient, stems, throughput, token_magnitude, token_pca, variation; with all, branches and stems are made where
    arms differ in these"""
    data: str | None = None
    """the images, as `vitmods data` takes them; None: the study's or the trial's own"""
    images: int = 16
    """number of images to analyze"""
    block: int = 1
    """block shown by figures of a single block (token_magnitude, token_pca)"""
    head: bool = False
    """include the head in gradients: its gradient is often much larger than those of the blocks"""
    seconds: float = 10.0
    """seconds to time throughput, and partial_training"""
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("figures")
    """folder for the page and the files"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps"""
    data_workers: int = 0
    """threads that prepare images"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code: 1 where no figure could be made."""
    options = parse(Analyse, arguments, "analyse")
    from vitmods.analysis import FIGURES
    from vitmods.analysis.examine import examine
    from vitmods.analysis.gallery import write_gallery

    every = "all" in options.figures
    kinds = [FIGURES[name] for name in (FIGURES if every else options.figures)]
    models = examine(
        options.target,
        data=options.data,
        images=options.images,
        block=options.block,
        head=options.head,
        seconds=options.seconds,
        device=options.device,
        workers=options.data_workers,
    )
    made = write_gallery(options.target, kinds, models, options.out, every)
    for kind, why in made.missing:
        print(f"not made: {kind.name}: {why}")
    print(f"{len(made.figures)} of {len(made.figures) + len(made.missing)} figures: {made.page}")
    return 0 if made.figures else 1
