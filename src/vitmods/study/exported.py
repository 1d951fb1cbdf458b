"""Exported models as models again: ONNX by ONNX Runtime, programs of torch.export, on the CPU."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.fast.export import EXTRA
from vitmods.study.opened import Opened, prepared_by
from vitmods.util.errors import UserError
from vitmods.util.limits import parse_json


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
