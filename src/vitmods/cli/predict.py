"""`vitmods predict`: predictions of a trained model for images."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vitmods.cli.options import parse
from vitmods.util.errors import UserError
from vitmods.util.remote import download


@dataclass(frozen=True)
class Predict:
    """Predict the classes of images with probabilities; images are prepared as in the evaluation of the model.

    Prints a table on a terminal and CSV elsewhere: image,rank,class,probability,predicted. Tasks that label pixels give
    the fraction of pixels in place of the probability.

    examples:
      vitmods predict runs/digits-mu3-2/trials/dpn/seed0 photo.png
      vitmods predict runs/pets/trials/dpn/seed0 path/to/photos "more/**/*.jpg" --top 3
      vitmods predict runs/streets/trials/dpn/seed0 path/to/photos --draw drawn --format json
      vitmods predict model.onnx path/to/photos --format csv --out predictions.csv
    """

    checkpoint: Annotated[str, tyro.conf.Positional]
    """a trial's folder or address, a file of weights, a timm model with published weights, or what `vitmods export`
    wrote"""
    images: Annotated[tuple[str, ...], tyro.conf.Positional]
    """files, folders with all below them, or patterns in quotes"""
    top: int = 5
    """number of the likeliest classes of an image"""
    format: Literal["table", "csv", "json"] | None = None
    """None: table on a terminal, csv elsewhere"""
    out: Path | None = None
    """write to this file, as its ending or the format says; None: print"""
    unreadable: Literal["stop", "skip"] = "stop"
    """images that cannot be read stop the command, or are left out with a warning"""
    batch_size: int = 64
    """images at a time"""
    draw: Path | None = None
    """write the images with the predictions drawn in to this folder; for tasks that can be drawn"""
    annotations: Path | None = None
    """write what was found as annotations: PNG files of class numbers to this folder, or objects to this file in COCO's
    JSON; for tasks that find something"""
    trust: bool = False
    """open a program of torch.export (.pt2) too, which can run code that its author put there"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps"""
    data_workers: int = 0
    """threads that prepare images ahead"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(Predict, arguments, "predict")
    from vitmods.report.tables import print_predictions, shares
    from vitmods.study.predict import predict
    from vitmods.util.files import make_folder, write_atomically
    from vitmods.util.text import no_formula

    ending = options.out.suffix.lower().lstrip(".") if options.out is not None else ""
    if options.format is None and ending not in ("", "csv", "txt", "json"):
        raise UserError(f"{options.out}: predictions are written as .csv or .json; for another ending name the format.")
    if options.format == "table" and options.out is not None:
        raise UserError("--format table is for the terminal: a file is csv or json.")
    if options.out is not None:
        make_folder(options.out.parent)
    predictions = predict(
        download(options.checkpoint), options.images, top=options.top, unreadable=options.unreadable,
        batch_size=options.batch_size, device=options.device, workers=options.data_workers, draw=options.draw,
        annotations=options.annotations, trust=options.trust,
    )  # fmt: skip
    # arrays of pixels are not text
    predictions = [{key: value for key, value in row.items() if not hasattr(value, "dtype")} for row in predictions]
    usual = "table" if options.out is None and sys.stdout.isatty() else "csv"
    kind = options.format or ("json" if ending == "json" else usual)
    if kind == "table" and options.out is None:
        print_predictions(predictions)
        return 0
    if kind == "json":
        text = json.dumps(predictions, indent=1, ensure_ascii=False) + "\n"
    else:
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        fraction = "fraction" if "pixels" in predictions[0] else "probability"
        writer.writerow(["image", "rank", "class", fraction, "predicted"])
        for row in predictions:
            for rank, (name, p) in enumerate(shares(row).items(), start=1):
                is_predicted = int(name in row["predicted"])
                writer.writerow([no_formula(row["image"]), rank, no_formula(name), f"{p:.6g}", is_predicted])
        text = table.getvalue()
    if options.out is None:
        print(text, end="")
    else:
        write_atomically(options.out, lambda file: file.write(text.encode()))
    return 0
