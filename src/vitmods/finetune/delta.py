"""The difference between a fine-tuned model and its base as a file: the tensors that differ, and their config."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.adapters.apply import as_vit
from vitmods.adapters.transfer import shapes_of
from vitmods.model.config import ViTConfig
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError
from vitmods.util.files import write_atomically
from vitmods.util.limits import parse_json

FORMAT = "vitmods-delta-1"
_BESIDE = "task:"  # before the names of the modules' tensors


@dataclass(frozen=True)
class Delta:
    """One task's own tensors, the config of its model, and the digest of every tensor of that model."""

    source: str
    config: ViTConfig
    own: Mapping[str, Tensor]
    digests: Mapping[str, str]
    base: str
    """fingerprint of the base that it was made from"""
    modules: Mapping[str, Tensor] = field(default_factory=dict)
    """all tensors of the task's modules beside the backbone (a decoder), by their names in the task's model: for its
    `load_state_dict(..., strict=False)` around what `load_delta` gives"""

    @property
    def nbytes(self) -> int:
        """Bytes of the task's own tensors."""
        return sum(tensor.nbytes for tensor in (*self.own.values(), *self.modules.values()))

    def tensors(self, base: ViT) -> dict[str, Tensor]:
        """All tensors of the task's model: its own, and for the rest the very tensors of ``base``.

        Raises UserError when a tensor is in neither, or the base's is not the one that the delta was made from.
        """
        shared = base.state_dict()
        missing = [name for name in self.digests if name not in self.own and name not in shared]
        if missing:
            raise UserError(f"{self.source} is incomplete: {_some(missing)} is neither in it nor in the base.")
        assembled = {name: self.own[name] if name in self.own else shared[name] for name in self.digests}
        other = [name for name in assembled if name not in self.own and digest(assembled[name]) != self.digests[name]]
        if other:
            raise UserError(
                f"{self.source} belongs to another base: {_some(other)} differ from what it was trained with (its base "
                f"has the fingerprint {self.base}, this one {fingerprint(base)}). Give the model that was fine-tuned."
            )
        return assembled


def save_delta(model: nn.Module, base: nn.Module, path: str | Path) -> Delta:
    """Write the tensors of ``model`` that ``base`` has not, bit for bit, as safetensors; replaces ``path`` atomically.

    Args:
        model: the fine-tuned model; its resolution and number of classes may differ from the base's. Of a task's
            model, the ``backbone`` is that, and everything else is saved whole.
        base: the model that training started from, as it was then. Both are vitmods ViTs, or models of timm, Hugging
            Face or torchvision that can be read exactly.
        path: ends in ``.safetensors``.

    Raises:
        UserError: another ending, a model that cannot be read, nothing differs, or the file cannot be written (one that
            was there is then as it was).
    """
    from safetensors.torch import save

    beside = model.state_dict() if hasattr(model, "lr_scales") else {}  # a TaskModel, which has a backbone
    modules = {n: t.detach().cpu().clone() for n, t in beside.items() if not n.startswith("backbone.")}
    path, model, base = Path(path), as_vit(model.backbone if beside else model), as_vit(base)  # type: ignore[arg-type]
    if path.suffix != ".safetensors":
        raise UserError(f"{path.name}: a delta is written as .safetensors; give it that ending.")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    digests = {name: digest(tensor) for name, tensor in tensors.items()}
    there = _digests(base)
    own = {name: tensor.clone() for name, tensor in tensors.items() if there.get(name) != digests[name]}
    if not own and not modules and model.vit_config == base.vit_config:
        raise UserError("The model equals its base: there is nothing to save. Was the base trained in place?")
    delta = Delta(path.name, model.vit_config, own, digests, fingerprint(base), modules)
    metadata = {
        "format": FORMAT,
        "base": delta.base,
        "config": model.vit_config.to_json(),
        "digests": json.dumps(digests),
        "own": json.dumps(list(own)),
        "modules": json.dumps({name: digest(tensor) for name, tensor in modules.items()}),
    }
    tensors = own | {_BESIDE + name: tensor for name, tensor in modules.items()}
    write_atomically(path, lambda file: file.write(save(tensors, metadata)))
    return delta


def load_delta(base: nn.Module, path: str | Path) -> ViT:
    """The fine-tuned model: a new ViT of the delta's tensors and copies of the base's, in the base's device and mode.

    Raises UserError when the file is damaged, incomplete or no delta, or was made from another base. Files are read as
    safetensors alone, which cannot run code.
    """
    base = as_vit(base)
    delta = read_delta(path)
    return assemble(delta, base, {name: tensor.clone() for name, tensor in delta.tensors(base).items()})


def assemble(delta: Delta, base: ViT, tensors: Mapping[str, Tensor]) -> ViT:
    """A ViT of the delta's config whose parameters and buffers are these very tensors, moved to the base's device."""
    _check_fits(delta, tensors)
    reference = next(base.parameters())
    with torch.random.fork_rng(devices=[]):  # its initial weights are not used
        model = ViT(delta.config).to(device=reference.device, dtype=reference.dtype)
    model.load_state_dict({name: tensor.to(reference.device) for name, tensor in tensors.items()}, assign=True)
    sizes = {"input_size": model.pretrained_cfg["input_size"], "num_classes": delta.config.num_classes}
    sizes["label_names"] = None  # base's
    model.pretrained_cfg = model.default_cfg = {**base.pretrained_cfg, **sizes}
    model.changes = base.changes
    return model.train(base.training)


def _check_fits(delta: Delta, tensors: Mapping[str, Tensor]) -> None:
    """Before memory is taken for what the file says of its model: the tensors are those of that model."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    wanted = shapes_of(delta.source, delta.config, at_most=len(shapes))
    if wanted != shapes:
        wrong = [name for name in {**wanted, **shapes} if wanted.get(name) != shapes.get(name)]
        raise UserError(f"{delta.source} does not fit its own config: {_some(wrong)} is missing or has another shape.")


def read_delta(path: str | Path) -> Delta:
    """A delta file, checked. Raises UserError when it cannot be read, is damaged, incomplete, or no delta."""
    path = Path(path)
    own, metadata = _read(path)
    if metadata.get("format") != FORMAT:
        raise UserError(f"{path.name} is not a delta of this version of vitmods: save_delta writes one.")
    try:
        config = ViTConfig.from_json(metadata["config"])
        digests, base = dict(parse_json(metadata["digests"])), metadata["base"]
        names = [str(name) for name in parse_json(metadata["own"])]
        beside = {str(name): value for name, value in parse_json(metadata.get("modules", "{}")).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path.name} is damaged: what it says of its model cannot be read ({error}).") from error
    modules = {name.removeprefix(_BESIDE): own.pop(name) for name in [*own] if name.startswith(_BESIDE)}
    missing = [name for name in names if name not in own] + [name for name in beside if name not in modules]
    if missing:
        raise UserError(f"{path.name} is incomplete: it lacks {_some(missing)}. Save the delta again.")
    broken = [name for name, tensor in own.items() if digests.get(name) != digest(tensor)]
    broken += [name for name in modules if beside.get(name) != digest(modules[name])]
    if broken:
        raise UserError(f"{path.name} is damaged: {_some(broken)} is not what was saved. Copy the file again.")
    return Delta(path.name, config, own, digests, base, modules)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            # Copies: memory that a file is mapped to is aligned otherwise, which may alter the last bit of a product.
            return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError:
        raise UserError(f"There is no delta {path}.") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path.name} is not a safetensors file, or is damaged: {error}") from error


def digest(tensor: Tensor) -> str:
    """Return 128 bits that identify type, shape and contents of a tensor."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    record = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    record.update(flat.view(torch.uint8).numpy().data)
    return record.hexdigest()


def fingerprint(model: nn.Module) -> str:
    """Return 16 hexadecimal digits that identify all weights of a model that ``save_delta`` takes."""
    record: Any = hashlib.blake2b(digest_size=8)
    for name, value in sorted(_digests(as_vit(model)).items()):
        record.update(f"{name} {value}\n".encode())
    text: str = record.hexdigest()
    return text


def _digests(model: ViT) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in model.state_dict().items()}


def _some(names: list[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
