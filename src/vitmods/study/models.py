"""What an arm makes of any model; and of models that no ViTConfig describes, what is recorded, counted and said."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitmods.adapters.apply import apply, config_of
from vitmods.adapters.replace import put_norms, replace_norms
from vitmods.adapters.transfer import bounded, check_numbers, evaluating, most_bytes, outline
from vitmods.analysis.timing import peak_bytes
from vitmods.changes import Change
from vitmods.changes.compose import edit as edit_config
from vitmods.model.config import ViTConfig
from vitmods.model.flops import count_macs
from vitmods.model.vit import ViT, vit
from vitmods.study.bases import Base, ForeignBase, make_base
from vitmods.study.edits import PYTHON, Function, Replace, base_function, functions_of, parse_edits
from vitmods.tasks.base import TaskModel, noise
from vitmods.tasks.features import without_head
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.study.edits import Edit


def edited(model: nn.Module, edits: Sequence[Edit], base: Base, head: bool = True) -> nn.Module:
    """What an arm makes of base's model, ready to be trained on the images that base is for. head: whether its logits
    are used, and looked at here.

    Raises:
        UserError: an edit cannot be made, or the result does not give the logits of these images.
    """
    if isinstance(model, ViT):  # of several bases, some other libraries', every one has the same arms
        edits = [edit.on_slots if isinstance(edit, Replace) else edit for edit in edits]
    for kind, group in groupby(edits, key=lambda edit: isinstance(edit, Change)):
        if kind:
            model = apply(model, *(edit for edit in group if isinstance(edit, Change)))
            continue
        for edit in group:
            model = _edited_by(model, edit)
    if head and (isinstance(base, ForeignBase) or not all(isinstance(edit, Change) for edit in edits)):
        _check_logits(model, base, "+".join(map(str, edits)))
    return model


def _edited_by(model: nn.Module, edit: Edit) -> nn.Module:
    if isinstance(edit, Replace):
        return replace_norms(model, edit.change, edit.where, edit.heads).model  # type: ignore[arg-type]
    assert isinstance(edit, Function)
    found = edit.resolve()(model)
    if not isinstance(found, nn.Module):
        raise UserError(f"{edit} gave {type(found).__name__}, not an nn.Module: it has to return the model.")
    found.edited_by_function = True  # type: ignore[assignment]  # so that nothing is said of it by its config alone
    return found


def described(model: nn.Module) -> ViTConfig | None:
    """The config that says all of a model (of a task's, of its backbone); None for other libraries' models and for what
    a function has made."""
    model = model.backbone if isinstance(model, TaskModel) else model
    return model.vit_config if isinstance(model, ViT) and not hasattr(model, "edited_by_function") else None


def _check_logits(model: nn.Module, base: Base, edits: str) -> None:
    """Two images through the model. Hugging Face's outputs become their logits. UserError where it gives no logits."""
    name = " of ".join(filter(None, (edits, base.spec if isinstance(base, ForeignBase) else "base")))
    size = " x ".join(map(str, (base.in_chans, *base.img_size)))
    try:
        found = _forward(model, _noise(base, 2))
        if not isinstance(found, Tensor) and hasattr(found, "logits"):
            model.register_forward_hook(_logits)
            found = found.logits
    except Exception as error:  # whatever a foreign model raises
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{name} cannot take images of {size}: {reason}") from error
    if not isinstance(found, Tensor) or found.shape != (2, base.num_classes):
        what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise UserError(f"{name} gives {what} for two images, and has to give logits of shape {(2, base.num_classes)}.")


def _logits(model: nn.Module, args: Any, output: Any) -> Any:
    return getattr(output, "logits", output)


@torch.no_grad()
def _forward(model: nn.Module, images: Tensor) -> Any:
    with evaluating(model), torch.random.fork_rng(devices=[]):
        return model(images)


def take_images(model: nn.Module, base: Base) -> None:
    """Run a model on two images of noise, on its device."""
    _forward(model, _noise(base, 2).to(next(model.parameters()).device))


def _noise(base: Base, count: int) -> Tensor:
    if base.reads_tokens:
        return torch.randint(1, base.in_chans, (count, base.img_size[1]), generator=torch.Generator().manual_seed(0))
    return noise(count, (base.in_chans, *base.img_size))


def record_of(model: nn.Module, base: Base, edits: Sequence[Edit], head: bool = True) -> dict[str, Any] | None:
    """How the model was made, for config.json, so that it can be made again; None where its ViTConfig says that. head:
    whether it kept its head."""
    if described(model) is not None:
        return None
    spec = base.spec if isinstance(base, ForeignBase) else json.loads(base.to_json())
    return {
        "base": spec,
        "edits": "+".join(map(str, edits)),
        "num_classes": base.num_classes,
        "img_size": list(base.img_size),
        "in_chans": base.in_chans,
        "head": head,
        "class": type(model).__name__,
        "tensors": _names_and_shapes(model),
    }


def _names_and_shapes(model: nn.Module) -> str:
    """A checksum by which another model than before is noticed where a trial goes on, or is opened again."""
    lines = (f"{name} {tuple(value.shape)} {value.dtype}\n" for name, value in model.state_dict().items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def rebuilt(record: Mapping[str, Any], weights: Path) -> nn.Module:
    """The model that `record_of` recorded, with new weights, in evaluation mode.

    The record may be damaged or hostile, so nothing larger than the file of its weights is made, no model is run, and
    no function is called that the user did not name.

    Raises:
        UserError: what it was made with is not there any more, or makes another model.
    """
    try:
        if not isinstance(record["base"], str | dict):
            raise TypeError("base is no model")
        name = base_name(record["base"])
        check_numbers(name, [record["base"], record["num_classes"], record["img_size"], record["in_chans"]])
        base = make_base(record["base"], record["num_classes"], record["img_size"], record["in_chans"])
        edits, head, tensors = parse_edits(record["edits"]), record.get("head", True), record["tensors"]
        most = most_bytes(weights.stat().st_size)
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"It does not say how its model was made ({error!r}): copy config.json anew.") from error
    for function in [*functions_of(edits), *filter(None, [base_function(record["base"])])]:
        function.resolve()
    other = UserError(f"{name} is another model than the one that was trained: its tensors differ.")
    if _is_outlined(base, edits):
        with outline(name, most):
            if _names_and_shapes(_made(base, edits, head)) != tensors:
                raise other
    with bounded(name, most):
        model = _made(base, edits, head)
    if _names_and_shapes(model) != tensors:
        raise other
    return model.eval()


def _is_outlined(base: Base, edits: Sequence[Edit]) -> bool:
    """Whether a model can be made on the meta device: not by users' functions and torchvision's RegNets, which compute
    with tensors as they make modules."""
    spec = base.spec if isinstance(base, ForeignBase) else ""
    return not functions_of(edits) and not spec.startswith((f"{PYTHON}:", "torchvision:regnet"))


def _made(base: Base, edits: Sequence[Edit], head: bool) -> nn.Module:
    """What `edited` gives, without carrying weights and without running models."""
    model = base.build(pretrained=False) if isinstance(base, ForeignBase) else vit(base)
    if isinstance(model, ViT):
        edits = [edit.on_slots if isinstance(edit, Replace) else edit for edit in edits]
    for kind, group in groupby(edits, key=lambda edit: isinstance(edit, Change)):
        if kind:
            changes = [edit for edit in group if isinstance(edit, Change)]
            config = edit_config(config_of(model), changes)
            check_numbers("+".join(map(str, changes)), json.loads(config.to_json()))
            model = vit(config)
            model.changes = tuple(changes)
            continue
        for edit in group:
            if isinstance(edit, Replace):
                model = put_norms(model, edit.change, edit.where, edit.heads)[0].model  # type: ignore[arg-type]
            else:
                model = _edited_by(model, edit)
    if head and (isinstance(base, ForeignBase) or not all(isinstance(edit, Change) for edit in edits)):
        model.register_forward_hook(_logits)
    return model if head else without_head(model)


def base_name(base: Any) -> str:
    """The base as reports name it."""
    return base if isinstance(base, str) else "ViTConfig"


def model_facts(model: nn.Module, base: Base) -> dict[str, Any]:
    """What a report shows of a model: its ViTConfig, or where none describes it, its class, size and modules."""
    config = described(model)
    if config is not None:
        return dict(json.loads(config.to_json()))
    return {
        "class": type(model).__name__,
        "params": sum(parameter.numel() for parameter in model.parameters()),
        "img_size": list(base.img_size),
        "modules": _modules(model),
    }


def _modules(model: nn.Module) -> dict[str, str]:
    """Name, with * for numbers -> what stands there, and how often."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for name, module in model.named_modules():
        own = [f"{key} {tuple(value.shape)}" for key, value in module.named_parameters(recurse=False)]
        leaf = not any(True for _ in module.children())
        if isinstance(module, nn.Identity) or not (leaf or own) or (leaf and isinstance(module, nn.Dropout)):
            continue
        inside = module.extra_repr() or ", ".join(own)
        found[re.sub(r"(?<![^.])\d+(?![^.])", "*", name) or "(model)"][f"{type(module).__name__}({inside})"] += 1
    return {
        name: ", ".join(f"{what} {count}x" if count > 1 else what for what, count in kinds.items())
        for name, kinds in found.items()
    }


def macs_of(model: nn.Module, base: Base) -> int | None:
    """Multiply-adds of matrix products for one image: from the config, or counted while the model runs, so with what a
    task puts beside the backbone. None: not known for this model: PyTorch's counter refuses some operations."""
    config = described(model)
    if config is not None and not isinstance(model, TaskModel):
        return count_macs(config)
    from torch.utils.flop_counter import FlopCounterMode

    device = next(model.parameters()).device
    try:
        with FlopCounterMode(display=False) as counter:
            _forward(model, _noise(base, 1).to(device))
    except Exception:  # whatever an operation raises that the counter does not know
        return None if config is None else count_macs(config)
    return int(counter.get_total_flops()) // 2


def activation_bytes(model: nn.Module, base: Base) -> int:
    """Roughly what an image takes in a training step beside the weights."""
    config = described(model)
    if config is not None:
        tokens = config.num_patches + config.num_prefix_tokens
        return 4 * config.depth * tokens * (10 * config.embed_dim + 2 * config.mlp_dim)
    count = 2 if base.reads_tokens else 1
    device, image = next(model.parameters()).device, _noise(base, count)

    def step() -> None:
        found = _sum(model(image.to(device)))
        if isinstance(found, Tensor):
            found.backward()

    with evaluating(model), torch.random.fork_rng(devices=[]):
        model.train(base.reads_tokens)  # Reformer makes gradients in training alone
        weights = [*model.parameters(), *model.buffers()]
        held = sum(2 * parameter.nbytes for parameter in weights)
        peak = peak_bytes(step, weights, torch.device("cpu")) - held
    model.zero_grad(set_to_none=True)
    return max(peak, 0) // count


def _sum(outputs: Any) -> Tensor | float:
    """Of all numbers with a gradient in a model's outputs, which may be tensors in lists and mappings."""
    if isinstance(outputs, Tensor):
        return outputs.sum() if outputs.requires_grad else 0.0
    parts = outputs.values() if isinstance(outputs, Mapping) else outputs
    return sum((_sum(part) for part in parts), 0.0)
