"""What the report reads beside results.json: the learning curves and the sample images of a study folder."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitmods.stats.effects import scale_of
from vitmods.tasks.metrics import Metric
from vitmods.util.errors import UserError
from vitmods.util.files import write_atomically


@dataclass(frozen=True)
class Curve:
    """The validation scores of one trial, in points; all arrays have the same length."""

    seed: int
    status: str
    step: np.ndarray
    wall: np.ndarray  #: seconds since the trial began
    score: np.ndarray

    @property
    def finished(self) -> bool:
        return self.status == "finished"


def read_results(study: Path) -> dict[str, Any]:
    """results.json of a study folder. `UserError` where there is none or it is no JSON."""
    path = study / "results.json"
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no study in {study} (no results.json). Name the folder given as --out.") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is damaged ({error}). Run the study's command again; it rebuilds the file.") from error
    if results.get("schema") != 1:
        raise UserError(f"{path} has schema {results.get('schema')}; this version of vitmods reads schema 1.")
    return dict(results)


def read_curves(study: Path, trials: list[Mapping[str, Any]], metric: Metric) -> list[Curve]:
    """The curves of an arm's trials; a trial that has not been evaluated yet has none."""
    curves = []
    for trial in trials:
        points = np.array(list(_points(study, str(trial["folder"]), metric)), dtype=float)
        if len(points):
            curves.append(Curve(int(trial["seed"]), str(trial["status"]), *points.T))
    return curves


def _points(study: Path, folder: str, metric: Metric) -> Iterator[tuple[float, float, float]]:
    path = (study / folder / "metrics.jsonl").resolve()
    if not path.is_relative_to(study.resolve()) or not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a trial that is being written, or was killed
        score = row.get(metric.name)
        if row.get("split") == "val" and score is not None and math.isfinite(score):
            yield row["step"], row.get("wall_s", math.nan), scale_of(metric.unit) * score


def read_samples(study: Path) -> list[tuple[str, np.ndarray]]:
    """(name, H W C uint8) pairs of samples.npz; none where there is no such file, or a damaged one.

    The file holds `names` and either `images` (n, H, W[, C]) or, for images of several sizes, `image0`, `image1`, ...
    A damaged one is warned of.
    """
    path = study / "samples.npz"
    if not path.is_file():
        return []
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = [str(name) for name in arrays["names"]]
            images = list(arrays["images"]) if "images" in arrays else [arrays[f"image{i}"] for i in range(len(names))]
        if not all(image.dtype == np.uint8 and image.ndim in (2, 3) and image.size for image in images):
            raise ValueError("a part of it is no image")
    except Exception as error:  # decoration: whatever numpy, zipfile and zlib raise, the report does without
        warnings.warn(f"{path} is damaged ({error}); the report has no images. Remove that file.", stacklevel=2)
        return []
    return list(zip(names, images, strict=False))


def write_samples(study: Path, samples: list[tuple[str, np.ndarray]]) -> Path:
    """The inverse of `read_samples`."""
    path = study / "samples.npz"
    arrays = {f"image{i}": image for i, (_, image) in enumerate(samples)}
    names = np.array([name for name, _ in samples], dtype=str)
    write_atomically(path, lambda file: np.savez_compressed(file, names=names, **arrays))  # type: ignore[arg-type]
    return path
