"""Export a model to other programs: as torch.export's program, as ONNX, or as weights with their config."""

import contextlib
import copy
import io
import json
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from vitmods.adapters import load, save
from vitmods.adapters.apply import as_vit
from vitmods.adapters.inputs import find_inputs
from vitmods.adapters.own import preparation
from vitmods.adapters.running import tensors_of
from vitmods.adapters.surgery import width_of
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError, explaining, first_line, nearest, needs
from vitmods.util.files import disk_errors, make_folder

Format = Literal["torch", "onnx", "safetensors"]
Precision = Literal["float32", "float16", "int8"]
ENDINGS: dict[str, str] = {"torch": ".pt2", "onnx": ".onnx", "safetensors": ".safetensors"}
EXTRA = "metadata.json"  # beside the program of torch.export
TOLERANCE = {"float32": 1e-4, "float16": 5e-2, "int8": 0.1}
DYNAMIC = 3  # images to trace with when the batch is left open: 0 and 1 would be taken as constants
_TYPES = {"float32": torch.float32, "float16": torch.float16, "int8": torch.float32}


def export(
    model: nn.Module,
    path: str | Path,
    to: Format | None = None,
    batch: int | None = None,
    img_size: int | tuple[int, int] | Literal["any"] | None = None,
    precision: Precision | None = None,
) -> float:
    """Write a model to a file, read it back and compare: the largest difference of outputs, relative to the largest.

    The graphs take images (batch, in_chans, height, width) named ``images`` and give ``logits``. ``metadata`` goes with
    them: as metadata_props of ONNX, each value as JSON, and as the extra file ``metadata.json`` of torch.export.
    ``safetensors`` holds the weights with their config and the same metadata; ``vitmods.adapters.load`` reads it.

    Args:
        model: a vitmods ViT, one of timm, Hugging Face or torchvision that can be read exactly, or for graphs any model
            from images to logits, such as one that was changed in place.
        path: the file; one that is there is replaced when the new one is whole and right.
        to: "torch", "onnx" (needs the extra ``onnx``) or "safetensors"; None: by the ending.
        batch: images at a time, or None for any number.
        img_size: pixels of the images, whose positions are baked in; "any": the graph resamples positions to the images
            that it gets, whose sides are multiples of the patch's; None: the model's own.
        precision: of the weights. "float16" computes in it too, between float32 images and logits. "int8" is for ONNX
            Runtime: linear maps in 8 bits, in blocks of 32 numbers with a scale each. None: the model's own.

    Raises UserError when the format is unknown, a library is missing, the disk refuses, the model cannot be written so,
    or what was written differs by more than 1e-4 (5e-2 in half precision, 0.1 in int8). Nothing is overwritten then.
    """
    path = Path(path)
    kind: str | None = to or next((kind for kind, ending in ENDINGS.items() if path.suffix == ending), None)
    if kind is None:
        endings = ", ".join(ENDINGS.values())
        raise UserError(f"{path.name}: give the format ({', '.join(ENDINGS)}), or end the name in {endings}.")
    if kind not in ENDINGS:
        raise UserError(f"The format '{kind}' is unknown. {nearest(kind, ENDINGS)}")
    if path.suffix != ENDINGS[kind]:
        raise UserError(f"{path.name}: a file of {kind} is opened by its ending: call it {path.stem}{ENDINGS[kind]}.")
    if batch is not None and batch < 1:
        raise UserError(f"batch is a number of images, at least 1, or None for any, got {batch}.")
    if precision is not None and precision not in _TYPES:
        raise UserError(f"The precision '{precision}' is unknown. {nearest(precision, _TYPES)}")
    if precision == "int8" and kind != "onnx":
        raise UserError("int8 is written as ONNX: take to='onnx', or precision='float16'.")
    if kind == "safetensors" and (batch is not None or img_size == "any"):
        raise UserError("safetensors holds only weights, which fit any batch: leave batch and img_size='any' out.")
    if model.training:
        raise UserError("The model is in training mode, where norms and dropout differ: call model.eval() first.")
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if kind == "onnx" and precision is None and dtype != torch.float32:
        raise UserError(
            f"ONNX is written in float32, and the model is in {dtype}: say precision='float32' or 'float16'."
        )
    source = _source(model, kind, img_size)
    if getattr(getattr(source, "vit_config", None), "reads_tokens", False) and kind != "safetensors":
        raise UserError(
            f"Graphs are only for models that read images: export sequence models as safetensors, not {kind}."
        )
    make_folder(path.parent)
    temporary = path.with_name(f".{path.stem}.part{ENDINGS[kind]}")
    write = {"torch": _write_torch, "onnx": _write_onnx, "safetensors": _write_safetensors}[kind]
    exact = precision in (None, "float32") and dtype in (torch.float32, torch.float64)
    most = TOLERANCE["int8" if precision == "int8" else "float32" if exact else "float16"]
    work = _Work(source, batch, img_size == "any", precision)
    try:
        with explaining(work.refusal), disk_errors(path):
            difference = work.difference(write(work, temporary))
            if not difference <= most:
                raise UserError(f"The {kind} outputs differ by {difference:.1e} of the largest output: not written.")
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return difference


def metadata(source: nn.Module) -> dict[str, Any]:
    """Return what another program needs to prepare images and name outputs, under timm's names: ``input_size``
    (channels, rows, columns), ``mean`` and ``std`` of pixels in [0, 1], ``crop_pct``, ``interpolation``, and where
    known ``label_names`` and the ``task``."""
    if isinstance(source, Foreign):
        return {"input_size": source.shape, **preparation(source.model, source.outputs)}
    config = cast(ViT, source).vit_config
    return {"input_size": (config.in_chans, *config.img_size), **preparation(source, config.num_classes)}


class Foreign(nn.Module):
    """A model of another library from images (B, C, height, width) to logits (B, K), as a vitmods ViT is.

    Raises UserError for a model that does something else.
    """

    def __init__(self, model: nn.Module, img_size: tuple[int, int] | None) -> None:
        super().__init__()
        self.model = model
        inputs = find_inputs(model, None, width_of(model))
        images = next(tensors_of(list(inputs[0])), torch.empty(0)) if inputs else torch.empty(0)
        if images.ndim != 4:
            raise UserError(f"A {type(model).__name__} does not take a batch of images alone: a graph needs that.")
        self.shape = (images.shape[1], *(img_size or images.shape[2:]))
        with torch.no_grad(), explaining(lambda error: f"{type(model).__name__} on {self.shape}: {first_line(error)}"):
            self.outputs = self(self.example(1).to(images)).shape[-1]
        self.eval()  # as the model is

    def example(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.randn(count, *self.shape, generator=generator)

    def forward(self, images: Tensor) -> Tensor:
        output = self.model(images)
        for name in ("logits", "pooler_output"):
            output = getattr(output, name, output)
        if not isinstance(output, Tensor):
            raise UserError(f"A {type(self.model).__name__} gives {type(output).__name__}, and a graph has logits.")
        return output


class _InType(nn.Module):
    """A model that computes in a type, between images and logits in float32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = copy.deepcopy(model).to(dtype), dtype

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images.to(self.dtype))
        return logits.float()


@dataclass(frozen=True)
class _Work:
    """What is written."""

    model: nn.Module
    batch: int | None
    any_size: bool
    precision: Precision | None

    def images(self, count: int, sides: int = 0) -> Tensor:
        """Random images; ``sides`` makes them so many patches larger, twice as many in columns."""
        model, generator = self.model, torch.Generator().manual_seed(0)
        images: Tensor = (model.patch_embed if isinstance(model, ViT) else cast(Any, model)).example(count, generator)
        if sides:
            rows, columns = cast(ViT, model).vit_config.patch_size
            more = (images.shape[2] + sides * rows, images.shape[3] + 2 * sides * columns)
            images = torch.randn(*images.shape[:2], *more, generator=generator)
        p = next(model.parameters())
        return images.to(p.device, p.dtype if images.is_floating_point() else None)

    def refusal(self, error: Exception) -> str:
        """What a graph cannot be written for."""
        why = first_line(error)[:200]
        if self.any_size:
            return (
                f"The model is for one grid of patches: give img_size as sides of the images, a file for each ({why})."
            )
        return f"torch cannot write this model as a graph ({why}): write a folder (vm.save_pretrained, --to hub)."

    @property
    def graph(self) -> nn.Module:
        return self.model if self.precision is None else _InType(self.model, _TYPES[self.precision]).eval()

    @property
    def inputs(self) -> tuple[Tensor]:
        """Images to trace the graph with."""
        images = self.images(self.batch or DYNAMIC, int(self.any_size))
        return (images if self.precision is None else images.float(),)

    @property
    def shapes(self) -> Any:
        """Axes of the images that are left open."""
        axes: dict[int, Any] = {} if self.batch else {0: torch.export.Dim("batch", min=1)}
        if self.any_size:
            patch, sides = cast(ViT, self.model).vit_config.patch_size, torch.export.dims("rows", "columns", min=1)
            axes |= {2: patch[0] * sides[0], 3: patch[1] * sides[1]}
        return (axes,) if axes else None

    @torch.no_grad()
    def difference(self, run: Callable[[Tensor], Tensor]) -> float:
        """How far the outputs of what was written are from the model's, relative to the largest."""
        worst = 0.0
        for sides in (0, 2) if self.any_size else (0,):
            for count in (self.batch,) if self.batch else (1, DYNAMIC + 2):
                images = self.images(count, sides)
                expected = self.model(images).double().cpu()
                moved = run(images if self.precision is None else images.float()).double().cpu() - expected
                worst = max(worst, float(moved.abs().max() / expected.abs().max().clamp_min(1e-12)))
        return worst


def _source(model: nn.Module, kind: str, img_size: int | tuple[int, int] | Literal["any"] | None) -> nn.Module:
    """The model as a vitmods ViT for images of this size, or as it is where it cannot be read."""
    try:
        vit = as_vit(model)
    except UserError as unread:
        if kind == "safetensors" or img_size == "any":
            raise UserError(
                "safetensors and img_size='any' are for models that vitmods reads: write a graph (.onnx, .pt2) for one "
                f"size of images, or a folder (vm.save_pretrained, --to hub). {unread}"
            ) from None
        return Foreign(model, (img_size, img_size) if isinstance(img_size, int) else img_size)
    if img_size is not None:
        vit = copy.deepcopy(vit)
        vit.set_input_size(**({"dynamic_img_size": True} if img_size == "any" else {"img_size": img_size}))
    return vit


def _write_torch(work: _Work, path: Path) -> Callable[[Tensor], Tensor]:
    with torch.no_grad():
        program = torch.export.export(work.graph, work.inputs, dynamic_shapes=work.shapes)
    torch.export.save(program, path, extra_files={EXTRA: json.dumps(metadata(work.model))})
    return cast(Callable[[Tensor], Tensor], torch.export.load(path).module())


def _write_onnx(work: _Work, path: Path) -> Callable[[Tensor], Tensor]:
    with needs("Writing ONNX needs onnxruntime and onnxscript", "onnx"):
        import onnxruntime
        import onnxscript  # noqa: F401  (torch's exporter needs it, and says so late)
    quiet = contextlib.redirect_stdout(io.StringIO())
    with quiet, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            work.graph,
            work.inputs,
            dynamo=True,
            dynamic_shapes=work.shapes,
            input_names=["images"],
            output_names=["logits"],
            external_data=False,
        )
    assert program is not None
    program.model.metadata_props.update({name: json.dumps(value) for name, value in metadata(work.model).items()})
    program.save(path)
    if work.precision == "int8":
        _quantize(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.cpu().numpy()})[0])


def _quantize(path: Path) -> None:
    """Weights of linear maps in 8 bits in an ONNX file, in place. ``accuracy_level`` 4 rounds what they read too."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer  # sets up logging on import

    root.handlers[:] = handlers
    root.setLevel(level)
    quantizer = MatMulNBitsQuantizer(str(path), bits=8, block_size=32, is_symmetric=True, accuracy_level=4)
    quantizer.process()
    quantizer.model.save_model_to_file(str(path))


def _write_safetensors(work: _Work, path: Path) -> Callable[[Tensor], Tensor]:
    model = work.model if work.precision is None else cast(_InType, work.graph).model
    save(cast(ViT, model), path)
    return load(path).float()
