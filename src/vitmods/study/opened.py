"""A checkpoint with all that goes with it: how its images are prepared, and what its outputs are called.

Exported models as models again: ONNX by ONNX Runtime, programs of torch.export, on the CPU.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.adapters import open_checkpoint
from vitmods.fast.export import EXTRA
from vitmods.recipes import Recipe
from vitmods.study.checkpoints import is_checkpoint, open_trial
from vitmods.study.store import read_object, slug
from vitmods.study.trial import IMAGE_SETTINGS
from vitmods.util.errors import UserError
from vitmods.util.limits import parse_json
from vitmods.util.text import printable


@dataclass(frozen=True)
class Opened:
    """A model in evaluation mode, and what it knows of its images.

    recipe:   how images are prepared (`augment`), and the precision
    name:     of a trial its arm and seed, as dpn-seed0; of others the file's; fit for the name of a file
    settings: `img_size`, `in_chans`, `task`, and of a trial its `data` and how they were split
    classes:  None where they are not named
    vocabulary: of a trial on sequences, its words by token, from 1 on
    """

    source: str
    name: str
    model: nn.Module
    recipe: Recipe
    settings: Mapping[str, Any]
    classes: tuple[str, ...] | None = None
    fingerprint: str | None = None
    vocabulary: tuple[str, ...] | None = None


def open_trained(source: str) -> Opened:
    """A trial's folder, or what `vitmods.adapters.open_checkpoint` opens. Raises UserError as that and `open_trial`."""
    folder = Path(source)
    config = read_object(folder / "config.json") if folder.is_dir() else {}
    if folder.is_dir() and not is_checkpoint(folder):
        open_trial(folder)  # says what is missing
    if "recipe" in config and "images" in config:
        try:
            settings = {name: value for name, value in config["images"].items() if name in IMAGE_SETTINGS}
            known = config["data"]
            name, recipe = slug(f"{config['arm']}-seed{config['seed']}"), Recipe.from_dict(config["recipe"])
            words = tuple(known["vocabulary"]) if known.get("vocabulary") else None
            classes, mark = tuple(map(printable, known["classes"])), known["fingerprint"]
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"{folder / 'config.json'} is damaged ({error!r}): copy the folder again.") from error
        return Opened(source, name, open_trial(folder), recipe, settings, classes, mark, words)
    model = open_checkpoint(source)
    shape = model.vit_config
    return prepared_by(source, model, {**model.pretrained_cfg, "input_size": (shape.in_chans, *shape.img_size)})


def prepared_by(source: str, model: nn.Module, known: Mapping[str, Any]) -> Opened:
    """Images in the model's size and channels, normalized and cropped as `known` says under timm's names."""
    view = {"eval_crop": known.get("crop_pct"), "resample": known.get("interpolation")}
    view |= {name: tuple(known[name]) for name in ("mean", "std") if known.get(name)}
    recipe = Recipe().with_(**{name: value for name, value in view.items() if value})
    in_chans, *img_size = known["input_size"]
    settings = {"img_size": img_size, "in_chans": in_chans, **({"task": known["task"]} if known.get("task") else {})}
    classes = tuple(printable(str(name)) for name in known["label_names"]) if known.get("label_names") else None
    return Opened(source, slug(Path(source).stem), model, recipe, settings, classes)


class Graph(nn.Module):
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


def open_graph(path: Path, trust: bool = False) -> Opened:
    """A file that `vitmods.export` wrote. UserError where it is none, or cannot be run here; or where it is a program
    of torch.export, and `trust` does not say that its author may run code here, which such a file can."""
    if not path.is_file():
        raise UserError(f"There is no {path}.")
    if path.suffix in PROGRAMS and not trust:
        raise UserError(
            f"{path} is a program: opening it can run code that its author put there. If you trust its origin, say so "
            "with --trust (trust=True in Python); or export to .onnx or .safetensors, which cannot."
        )
    try:
        graph, known = GRAPHS[path.suffix](path)
    except UserError:
        raise
    except Exception as error:  # whatever torch, ONNX Runtime and JSON raise of a file that is none of theirs
        raise UserError(f"{path} cannot be read; it may be damaged: {str(error).splitlines()[0]}") from error
    if "input_size" not in known:
        raise UserError(f"{path} does not say how its images are prepared: write it with `vitmods export`.")
    return prepared_by(str(path), graph, known)


def _read_onnx(path: Path) -> tuple[Graph, dict[str, Any]]:
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError("Running ONNX needs onnxruntime: pip install 'vitmods[onnx]'.") from error
    session = onnxruntime.InferenceSession(os.fspath(path), providers=["CPUExecutionProvider"])
    taken, batch = session.get_inputs()[0].name, session.get_inputs()[0].shape[0]
    known = session.get_modelmeta().custom_metadata_map

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {taken: images.numpy()})[0])

    return Graph(run, batch if isinstance(batch, int) else None), {k: _json(v) for k, v in known.items()}


def _json(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:  # of another program
        return text


def _read_program(path: Path) -> tuple[Graph, dict[str, Any]]:
    if not zipfile.is_zipfile(path):  # torch would write its traceback
        raise UserError(f"{path} is no program of torch.export, or it is damaged.")
    extra = {EXTRA: ""}
    program = torch.export.load(path, extra_files=extra)
    taken = next(node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs)
    batch = taken.meta["val"].shape[0]
    return Graph(program.module(), batch if isinstance(batch, int) else None), parse_json(extra[EXTRA] or "{}")


GRAPHS = {".onnx": _read_onnx, ".pt2": _read_program}
"""ending -> how such a file is read"""
PROGRAMS = (".pt2",)
"""endings of those that can run code: torch unpickles parts of them and evaluates expressions in them"""
