"""A model run before and after its norms were replaced, on a small input: what crashes, or sees later tokens, is
refused."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.adapters.anatomy import NormSite
from vitmods.adapters.transfer import evaluating
from vitmods.util.errors import UserError

TOKENS = 8


def try_out(old: nn.Module, new: nn.Module, norms: Sequence[NormSite], example: Any, may_leak: bool) -> None:
    """Runs copies of both models, which may change as they run, in evaluation mode and without gradients.

    ``example`` is what the model is called with: a tensor, a tuple of arguments or a mapping of keywords; None for one
    that is made. Where none can be made that the old model takes, nothing is tried. ``may_leak`` looks for causality
    as well: outputs of earlier tokens that did not read the last one, and now do.

    Raises UserError naming the norm at which the new model failed, or saying that it leaks.
    """
    inputs = next((one for one in _inputs(old, example, norms[0].dim) if _runs(old, one)), None)
    if inputs is None:
        if example is not None:
            raise UserError("The model does not run on the example: give what it is called with.")
        return
    entered = [""]
    for name in (site.name for site in norms):
        new.get_submodule(name).register_forward_pre_hook(lambda m, a, name=name: entered.__setitem__(0, name))
    try:
        _run(new, inputs)
    except UserError:
        raise
    except Exception as error:  # whatever a norm or the model around it raises for tokens that do not fit
        where = f", at {entered[0]}" if entered[0] else ""
        raise UserError(
            f"The model does not run with these norms{where}: {str(error).rstrip('.')}. Leave that norm out with "
            "where=..., or use a kind that treats each token by itself."
        ) from error
    if may_leak and _reads_last(old, inputs) is False and _reads_last(new, inputs):
        raise UserError(
            "This model is causal, and with these norms earlier tokens see later ones: use a kind that treats each "
            "token by itself, or choose norms of a part that is not causal with where=..."
        )


def _inputs(model: nn.Module, example: Any, width: int) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """What the model may take, as arguments and keywords."""
    if example is not None:
        keywords = example if isinstance(example, Mapping) else {}
        yield () if keywords else example if isinstance(example, tuple) else (example,), keywords
        return
    p = next(model.parameters())
    draw: dict[str, Any] = {"device": p.device, "dtype": p.dtype}
    config = getattr(model, "config", None)
    stem = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if isinstance(words := getattr(config, "vocab_size", None), int):
        yield (), {"input_ids": torch.arange(2 * TOKENS, device=p.device).view(2, -1) % words}
    if stem is not None:
        for size in _image_sizes(model):
            yield (torch.randn(2, stem.in_channels, *size, **draw),), {}
    tokens = torch.randn(2, TOKENS, width, **draw)
    yield (tokens,), {}
    yield (tokens, tokens), {}  # a decoder's tokens and what it reads


def _image_sizes(model: nn.Module) -> Iterator[tuple[int, int]]:
    """What timm's config of the model says, Hugging Face's, and the parts of the model itself."""
    known = getattr(model, "default_cfg", None) or {}
    parts = (getattr(model, "config", None), *model.modules())
    found = [getattr(part, name, None) for part in parts for name in ("image_size", "img_size")]
    sizes = [known["input_size"][-2:] if "input_size" in known else None, *found, 224]
    pairs = [(size, size) if isinstance(size, int) else size for size in sizes]
    yield from dict.fromkeys((p[0], p[1]) for p in pairs if isinstance(p, tuple | list) and len(p) == 2)


def _runs(model: nn.Module, inputs: tuple[tuple[Any, ...], Mapping[str, Any]]) -> bool:
    try:
        _run(model, inputs)
    except Exception:  # it is no input for this model
        return False
    return True


@torch.no_grad()
def _run(model: nn.Module, inputs: tuple[tuple[Any, ...], Mapping[str, Any]]) -> list[Tensor]:
    arguments, keywords = inputs
    with torch.random.fork_rng(devices=[]), evaluating(model):
        return list(_tensors(model(*arguments, **keywords)))


def _reads_last(model: nn.Module, inputs: tuple[tuple[Any, ...], Mapping[str, Any]]) -> bool | None:
    """Whether what is put out for the other tokens depends on the last one; None where that cannot be seen."""
    arguments, keywords = inputs
    tokens = next(_tensors([*arguments, *keywords.values()]))
    if tokens.is_meta or tokens.ndim == 4:
        return None
    other = tokens.clone()
    other[:, -1] = other[:, 0]
    outputs = []
    for one in (tokens, other):
        swapped = {name: one if value is tokens else value for name, value in keywords.items()}
        outputs.append(_run(model, (tuple(one if value is tokens else value for value in arguments), swapped)))
    for a, b in zip(*outputs, strict=True):
        if a.is_floating_point() and a.ndim > 2 and a.shape[:2] == tokens.shape[:2]:
            return float((a - b)[:, :-1].abs().max()) > 1e-5 * float(a.abs().max())
    return None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
