"""What a trained model says of images: class names and probabilities, by a checkpoint or an exported graph."""

from __future__ import annotations

import glob
import json
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from vitmods.data.augment import normalize, per_channel
from vitmods.data.batch import Batch
from vitmods.data.geometry import Geometry
from vitmods.data.read import Unreadable, decode, reading
from vitmods.data.records import printable
from vitmods.data.sequences import encode, padded_together
from vitmods.data.sources.folder import images_below
from vitmods.data.threads import in_order
from vitmods.fast.export import EXTRA
from vitmods.study.checkpoints import seeds_in
from vitmods.study.opened import Opened, open_trained, prepared_by
from vitmods.tasks.base import DEFAULT, TASKS, Task
from vitmods.train.device import make_fabric
from vitmods.train.trial import WEIGHTS
from vitmods.util.errors import UserError
from vitmods.util.files import expand_user

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def predict(
    checkpoint: str | Path,
    images: str | Path | Sequence[str | Path],
    *,
    top: int = 5,
    unreadable: Literal["stop", "skip"] = "stop",
    batch_size: int = 64,
    device: str = "auto",
    workers: int = 0,
) -> list[dict[str, Any]]:
    """What a trained model says of images that are prepared as its evaluation prepares them.

    Args:
        checkpoint: a trial's folder; what `vitmods.adapters.open_checkpoint` opens; or a file that `vitmods.export`
            wrote, .onnx (needs the extra `onnx`) and .pt2 too, which run on the CPU.
        images: files, folders (with all below them) and patterns as "photos/**/*.jpg"; of sequences text files,
            with one a line.
        top: how many of the likeliest classes are named.
        unreadable: "stop" at an image that cannot be read, or "skip" it with a warning.
        batch_size: images at a time.
        device: where; see `vitmods.train.train_trial`.
        workers: threads that prepare images ahead.

    Returns:
        Of each image: `image`, its path; `predicted`, the class, or of several labels all of probability 1/2 or more;
        `probabilities`, name -> probability of the `top` likeliest, the first first. Where the checkpoint names no
        classes they are numbers from 0.

    Raises:
        UserError: there is no such checkpoint, no image, or one that cannot be read.
    """
    if top < 1 or batch_size < 1:
        raise UserError(f"top and batch_size are numbers from 1 on, not {top} and {batch_size}.")
    if unreadable not in ("stop", "skip"):
        raise UserError(f'unreadable must be "stop" or "skip", not "{unreadable}".')
    paths = _files([images] if isinstance(images, str | Path) else images)
    opened = _open(str(checkpoint), device)
    kind = TASKS[opened.settings.get("task", DEFAULT)]
    task = kind.from_recipe(kind.fitted(opened.recipe))
    fabric = make_fabric("cpu" if isinstance(opened.model, _Graph) else device, opened.recipe.precision)
    model = fabric.to_device(opened.model)
    if opened.vocabulary is not None:
        return _predict_sequences(opened, paths, task, fabric, top, batch_size)
    names, found, skipped, views = opened.classes, [], [], _views(opened, paths, workers)
    while part := list(islice(views, batch_size)):
        read = [(path, view) for path, view in part if isinstance(view, Tensor)]
        for path, view in part:
            if not isinstance(view, Tensor):
                skipped.append(f"{printable(str(path))}: {view}")
                if unreadable == "stop":
                    raise UserError(f"{skipped[0]}. Repair or remove it, or leave it out with --unreadable skip.")
        if not read:
            continue
        with torch.inference_mode(), fabric.autocast():
            outputs = model(_normalized(opened, torch.cat([view for _, view in read])).to(fabric.device))
        if names is None:
            names = tuple(map(str, range(outputs.shape[1])))
            warnings.warn(f"{opened.source} does not name its classes: they are numbers from 0.", stacklevel=2)
        rows = task.predictions(outputs.cpu(), names, top)
        found += [{"image": printable(str(path)), **row} for (path, _), row in zip(read, rows, strict=True)]
    if skipped:
        warnings.warn(f"{len(skipped)} of {len(paths)} images were left out: {'; '.join(skipped[:5])}", stacklevel=2)
    if not found:
        raise UserError(f"None of the {len(paths)} images can be read.")
    return found


def _predict_sequences(
    opened: Opened, paths: Sequence[Path], task: Task, fabric: Fabric, top: int, batch_size: int
) -> list[dict[str, Any]]:
    """Of each line of text files that is not empty, named FILE:NUMBER, what the model says."""
    longest, words, sequences = int(opened.settings["img_size"][-1]), opened.vocabulary or (), {}
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{printable(str(path))} is no text file, with a sequence a line: {error}") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                name = f"{printable(str(path))}:{number}"
                sequences[name] = encode(line, words, name)
    if long := [name for name, tokens in sequences.items() if len(tokens) > longest]:
        warnings.warn(f"{len(long)} sequences are cut to {longest} tokens: {', '.join(long[:5])}", stacklevel=3)
    if not sequences:
        raise UserError("There is no sequence: give text files with one a line.")
    model, found = fabric.to_device(opened.model), list[dict[str, Any]]()
    for start in range(0, len(sequences), batch_size):
        names = list(sequences)[start : start + batch_size]
        tokens = padded_together([sequences[name][:longest] for name in names])
        index = torch.arange(len(names))
        with torch.inference_mode(), fabric.autocast():
            outputs = task.outputs(model, Batch(tokens, index, index).to(fabric.device))
        rows = task.predictions(outputs.cpu(), opened.classes or (), top)
        found += [{"image": name, **row} for name, row in zip(names, rows, strict=True)]
    return found


def _files(images: Sequence[str | Path]) -> list[Path]:
    """The images in order, each once. UserError where there are none, or where something named is not there."""
    found: dict[Path, None] = {}
    for given in images:
        path, shown = expand_user(given), printable(str(given))
        if path.exists():
            matches = [path]
        elif glob.has_magic(str(path)):
            matches = [Path(one) for one in sorted(glob.glob(str(path), recursive=True))]
        else:
            raise UserError(f"There is no {shown}: give images, folders of them, or patterns as 'photos/**/*.jpg'.")
        files = [one for match in matches for one in (images_below(match) if match.is_dir() else [match])]
        if not files:
            raise UserError(f"There are no images in {shown}, by the endings of their names.")
        found.update(dict.fromkeys(files))
    if not found:
        raise UserError("Name at least one image, or a folder of them.")
    return list(found)


def _open(source: str, device: str) -> Opened:
    """UserError where there is nothing to open, or the model takes what images do not have."""
    suffix = Path(source).suffix
    if suffix in _GRAPHS:
        if device not in ("auto", "cpu"):
            raise UserError(f"{source} runs on the CPU here: leave --device out, or give the weights.")
        opened = _open_graph(Path(source), _GRAPHS[suffix])
    else:
        seeds = seeds_in(source)
        seeds = [one for one in seeds if (Path(one) / WEIGHTS).is_file()] or seeds[:1]
        if len(seeds) > 1:
            raise UserError(f"{source} holds several trained models: give one, {' or '.join(seeds[:3])}.")
        opened = open_trained(seeds[0])
    if opened.settings["in_chans"] not in (1, 3) and opened.vocabulary is None:
        raise UserError(f"{source} takes {opened.settings['in_chans']} channels, and images have 3 (RGB) or 1 (gray).")
    return opened


def _views(opened: Opened, paths: Sequence[Path], workers: int) -> Iterator[tuple[Path, Tensor | str]]:
    """Of each image the view (1, C, H, W) in uint8 that evaluation sees, or why it cannot be read."""
    augment, size = opened.recipe.augment, opened.settings["img_size"]
    rows, columns = (size, size) if isinstance(size, int) else (size[0], size[-1])
    geometry = Geometry((rows, columns), augment.eval_crop, resample=augment.resample)

    def view(number: int) -> tuple[Path, Tensor | str]:
        try:
            with reading():
                raw = paths[number].read_bytes()
            stored = geometry.store(decode(raw, opened.settings["in_chans"]))
        except Unreadable as error:
            return paths[number], str(error)
        return paths[number], geometry.view(torch.from_numpy(stored.copy())[None])

    return in_order(view, range(len(paths)), workers)


def _normalized(opened: Opened, views: Tensor) -> Tensor:
    augment, channels = opened.recipe.augment, opened.settings["in_chans"]
    return normalize(views, per_channel(augment.mean, channels), per_channel(augment.std, channels))


class _Graph(nn.Module):
    """An exported model: images (B, C, H, W) -> logits (B, K), any number of images also where its batch is fixed."""

    def __init__(self, run: Callable[[Tensor], Tensor], batch: int | None):
        super().__init__()
        self._run, self._batch = run, batch

    def forward(self, images: Tensor) -> Tensor:
        if self._batch is None:
            return self._run(images)
        missing = -len(images) % self._batch
        padded = torch.cat([images, images[:1].expand(missing, -1, -1, -1)])
        return torch.cat([self._run(part) for part in padded.split(self._batch)])[: len(images)]


def _open_graph(path: Path, read: Callable[[Path], tuple[_Graph, dict[str, Any]]]) -> Opened:
    if not path.is_file():
        raise UserError(f"There is no {path}.")
    try:
        graph, known = read(path)
    except UserError:
        raise
    except Exception as error:  # whatever torch, ONNX Runtime and JSON raise of a file that is none of theirs
        raise UserError(f"{path} cannot be read; it may be damaged: {str(error).splitlines()[0]}") from error
    if "input_size" not in known:
        raise UserError(f"{path} does not say how its images are prepared: write it with `vitmods export`.")
    return prepared_by(str(path), graph, known)


def _read_onnx(path: Path) -> tuple[_Graph, dict[str, Any]]:
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError("Running ONNX needs onnxruntime: pip install 'vitmods[onnx]'.") from error
    session = onnxruntime.InferenceSession(os.fspath(path), providers=["CPUExecutionProvider"])
    taken, batch = session.get_inputs()[0].name, session.get_inputs()[0].shape[0]
    known = session.get_modelmeta().custom_metadata_map

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {taken: images.numpy()})[0])

    return _Graph(run, batch if isinstance(batch, int) else None), {k: _json(v) for k, v in known.items()}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # of another program
        return text


def _read_program(path: Path) -> tuple[_Graph, dict[str, Any]]:
    if not zipfile.is_zipfile(path):  # torch would write its traceback
        raise UserError(f"{path} is no program of torch.export, or it is damaged.")
    extra = {EXTRA: ""}
    program = torch.export.load(path, extra_files=extra)
    taken = next(node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs)
    batch = taken.meta["val"].shape[0]
    return _Graph(program.module(), batch if isinstance(batch, int) else None), json.loads(extra[EXTRA] or "{}")


_GRAPHS = {".onnx": _read_onnx, ".pt2": _read_program}
