"""Predictions of a trained model, from a checkpoint or an exported graph, for images or files that a task reads."""

from __future__ import annotations

import glob
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from vitmods.data.augment import normalize, per_channel
from vitmods.data.batch import Batch
from vitmods.data.dataset import Annotated
from vitmods.data.geometry import Geometry, middle
from vitmods.data.loading import geometry_of, parse_size
from vitmods.data.read import Unreadable, decode, reading
from vitmods.data.records import printable
from vitmods.data.sources.files import images_below
from vitmods.data.threads import in_order
from vitmods.study.checkpoints import GRAPHS, Checkpoint, Graph
from vitmods.tasks.base import DEFAULT, TASKS, Predicted, Task
from vitmods.train.device import DeviceAndPrecision, place
from vitmods.util.errors import UserError
from vitmods.util.files import expand_user, make_folder, similar_folder, write_atomically
from vitmods.util.limits import read_bytes

T = TypeVar("T")


def predict(
    checkpoint: str | Path,
    images: str | Path | Sequence[str | Path],
    *,
    top: int = 5,
    unreadable: Literal["stop", "skip"] = "stop",
    batch_size: int = 64,
    device: str = "auto",
    workers: int = 0,
    draw: str | Path | None = None,
    annotations: str | Path | None = None,
    trust: bool = False,
) -> list[dict[str, Any]]:
    """Predict for images, which are prepared as the model's evaluation prepares them.

    Args:
        checkpoint: a trial's folder; what `vitmods.adapters.open_checkpoint` opens; or a file that `vitmods.export`
            wrote, .onnx (needs the extra `onnx`) and .pt2 too, which run on the CPU.
        images: files, folders (with all below them) and patterns as `photos/**/*.jpg`; of sequences text files,
            with one a line.
        top: number of the likeliest classes to name.
        unreadable: "stop" at an image that cannot be read, or "skip" it with a warning.
        batch_size: images at a time.
        device: where; see `vitmods.train.train_trial`.
        workers: threads that prepare images ahead.
        draw: a folder for the images with the predictions drawn in, as PNG; None: they are not drawn.
        annotations: a folder, or a file, for the predictions in a format of annotations: PNG masks of class numbers
            for segmentation, COCO's JSON for detection; None: they are not written.
        trust: whether a checkpoint that can run code, a program of torch.export (.pt2), may do so.

    Returns:
        One mapping per image with the keys `image` (its path), `predicted` (the class, or all labels of probability
        1/2 or more), `probabilities` (name -> probability of the `top` likeliest in falling order) and `drawn` (the
        path of the drawing). Classes without names are numbers from 0. Other tasks return what their `predictions`
        return.

    Raises:
        UserError: the checkpoint or an image does not exist or cannot be read, or the task does not draw.
    """
    if top < 1 or batch_size < 1:
        raise UserError(f"top and batch_size are numbers from 1 on, not {top} and {batch_size}.")
    if unreadable not in ("stop", "skip"):
        raise UserError(f'unreadable must be "stop" or "skip", not "{unreadable}".')
    paths = _files([images] if isinstance(images, str | Path) else images)
    source = str(checkpoint)
    if Path(source).suffix in GRAPHS and device not in ("auto", "cpu"):
        raise UserError(f"{source} runs on the CPU here: leave --device out, or give the weights.")
    trained = Checkpoint.open(source, trust).as_seen()
    shape, task_name = getattr(trained.model, "vit_config", None), trained.settings.get("task", DEFAULT)
    if shape is not None and not shape.num_classes and TASKS[task_name].uses_head:
        raise UserError(
            f"{source} has no head: it gives features, not classes. Train one with `vitmods finetune --from {source}`, "
            f"or measure the features: `vitmods evaluate {source} --data path/to/images --protocol knn probe`."
        )
    settings, names = trained.settings, trained.classes
    kind = TASKS[task_name]
    if kind.inputs == "images" and settings["in_chans"] not in (1, 3):
        raise UserError(f"{source} takes {settings['in_chans']} channels, and images have 3 (RGB) or 1 (gray).")
    task = kind.from_recipe(trained.recipe)
    if draw is not None and kind.draw is Task.draw:
        raise UserError(f"The task {kind.name} does not draw predictions: leave the folder for drawings out.")
    if annotations is not None and kind.annotate is Task.annotate:
        raise UserError(f"The task {kind.name} does not write annotations: leave them out (--annotations).")
    placement = place("cpu" if isinstance(trained.model, Graph) else device, trained.recipe.precision)
    predictor = _Predictor(trained, trained.model.to(placement.device), task, placement, names, top)
    if kind.inputs != "images":
        if unreadable == "skip":
            raise UserError("All inputs are read, or an error names the one that cannot be: leave unreadable=skip out.")
        inputs = task.read_files(paths, trained.data, int(settings["img_size"][-1]))
        return [row for keys in batched(inputs, batch_size) for row in predictor.of_sequences(keys, inputs)]
    predictions, skipped, annotated = list[dict[str, Any]](), list[str](), list[Predicted]()
    folder = None if draw is None else make_folder(expand_user(draw))
    file_names = _file_names(paths)
    for part in batched(_read(trained, kind.target, paths, workers), batch_size):
        images_read = [(path, image) for path, image in part if isinstance(image, _Stored)]
        skipped += [f"{printable(str(path))}: {image}" for path, image in part if not isinstance(image, _Stored)]
        if skipped and unreadable == "stop":
            raise UserError(f"{skipped[0]}. Repair or remove it, or leave it out with --unreadable skip.")
        rows = predictor.of_images([image for _, image in images_read]) if images_read else []
        for (path, image), row in zip(images_read, rows, strict=True):
            prediction = {"image": printable(str(path)), **row}
            if folder is not None:
                drawn = folder / f"{file_names[path]}.png"
                prediction["drawn"] = str(drawn)
                _draw(task, path, row, predictor.classes or (), drawn)
            if annotations is not None:
                annotated.append(Predicted(file_names[path], path, image.native, row))
            predictions.append(prediction)
    if skipped:
        warnings.warn(f"{len(skipped)} of {len(paths)} images were left out: {'; '.join(skipped[:5])}", stacklevel=2)
    if not predictions:
        raise UserError(f"None of the {len(paths)} images can be read.")
    if annotations is not None:
        task.annotate(expand_user(annotations), annotated, predictor.classes or ())
    return predictions


@dataclass
class _Predictor:
    """A model on its device, and how its outputs become predictions. classes: None until they are counted."""

    trained: Checkpoint
    model: nn.Module
    task: Task
    placement: DeviceAndPrecision
    classes: tuple[str, ...] | None
    top: int

    def of_images(self, images: Sequence[_Stored]) -> list[dict[str, Any]]:
        outputs = self._outputs(_batch(self.trained, self.task, images))
        if self.classes is None:
            self.classes = tuple(map(str, range(outputs.shape[1])))
            text = f"{self.trained.source} does not name its classes: they are numbers from 0."
            warnings.warn(text, stacklevel=3)
        return self.task.predictions(outputs, self.classes, self.top)

    def of_sequences(self, keys: Sequence[str], inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
        index = torch.arange(len(keys))
        outputs = self._outputs(Batch(self.task.stack([inputs[key] for key in keys]), index, index))
        rows = self.task.predictions(outputs, self.classes or (), self.top)
        return [{"image": key, **row} for key, row in zip(keys, rows, strict=True)]

    def _outputs(self, batch: Batch) -> Any:
        with torch.inference_mode(), self.placement.autocast():
            outputs = self.task.outputs(self.model, batch.to(self.placement.device))
        return outputs.cpu() if isinstance(outputs, Tensor) else outputs


def _file_names(paths: Sequence[Path]) -> dict[Path, str]:
    """Name files after their images; where several share a name, after the folders above too."""
    below = os.path.commonpath([path.absolute().parent for path in paths])
    if len({path.stem for path in paths}) == len(paths):
        return {path: path.stem for path in paths}
    return {path: "-".join((*path.absolute().relative_to(below).parent.parts, path.name)) for path in paths}


def _draw(task: Task, path: Path, row: dict[str, Any], classes: tuple[str, ...], out: Path) -> None:
    """Write an image with its predictions as PNG."""
    pixels = middle(decode(read_bytes(path, "image"), 3)).transpose(1, 2, 0)
    drawing = task.draw(np.ascontiguousarray(pixels), row, classes)
    assert drawing is not None
    write_atomically(out, partial(Image.fromarray(drawing).save, format="PNG"))


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Split into lists of a size; the last may be shorter."""
    remaining = iter(items)
    while part := list(islice(remaining, size)):
        yield part


def _files(images: Sequence[str | Path]) -> list[Path]:
    """List the images in order, each once. Raises UserError if there are none, or a name does not exist."""
    files: dict[Path, None] = {}
    for name in images:
        path, label = expand_user(name), printable(str(name))
        if path.exists():
            matches = [path]
        elif glob.has_magic(str(path)):
            matches = list(map(Path, sorted(glob.glob(str(path), recursive=True))))
        else:
            hint = similar_folder(path) or "Give images, folders of them, or patterns as 'photos/**/*.jpg'."
            raise UserError(f"{label} does not exist. {hint}")
        below = [file for match in matches for file in (images_below(match) if match.is_dir() else [match])]
        if not below:
            raise UserError(f"{label} does not contain images, by the endings of their names.")
        files.update(dict.fromkeys(below))
    if not files:
        raise UserError("Name at least one image, or a folder of them.")
    return list(files)


class _Stored(NamedTuple):
    """An image as a data set keeps it, uint8 (C, H, W), how its view is made, and its size in the file."""

    pixels: NDArray[np.uint8]
    geometry: Geometry
    native: tuple[int, int]


def _read(
    trained: Checkpoint, target: str, paths: Sequence[Path], workers: int
) -> Iterator[tuple[Path, _Stored | str]]:
    """Prepare each image as evaluation stores it, or say why it cannot be read."""
    geometry = geometry_of("test", parse_size(trained.settings["img_size"]), trained.recipe.augment, target)

    def prepare(number: int) -> tuple[Path, _Stored | str]:
        try:
            with reading():
                raw = read_bytes(paths[number], "image")
            image = decode(raw, trained.settings["in_chans"])
        except Unreadable as error:
            return paths[number], str(error)
        return paths[number], _Stored(geometry.store(image), geometry, (image.shape[1], image.shape[2]))

    return in_order(prepare, range(len(paths)), workers)


def _batch(trained: Checkpoint, task: Task, images: Sequence[_Stored]) -> Batch:
    """Make the batch that evaluation would make, without targets."""
    augment, channels, targets = trained.recipe.augment, trained.settings["in_chans"], None
    if (joint_view := task.joint_view) is not None:
        unknown = [Annotated(None, image.native) for image in images]
        size = parse_size(trained.settings["img_size"])
        views, targets = joint_view([image.pixels for image in images], unknown, size, augment)
    else:
        views = torch.cat([image.geometry.view(torch.from_numpy(image.pixels.copy())[None]) for image in images])
    inputs = normalize(views, per_channel(augment.mean, channels), per_channel(augment.std, channels))
    return Batch(inputs, targets, torch.arange(len(images)))
