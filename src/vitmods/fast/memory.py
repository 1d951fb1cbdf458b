"""Keep fewer tensors for backward, and recompute what is cheap.

The outputs of a norm and of a GELU take as much memory as their inputs. Here the modules run unchanged, but where
autograd would keep such an output, it keeps the recipe for it: the same operations on tensors that are kept anyway.
So outputs and gradients, including second ones, are bit-identical.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from vitmods.fast.known import exact
from vitmods.layers import LayerNorm, Mlp, ParallelBlock, RMSNorm
from vitmods.model.forms import default_forms
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError


def recompute(model: nn.Module, enable: bool = True) -> None:
    """Keep 0.6 of the activations for 1.02 to 1.04 of the time: outputs of norms and GELUs are recomputed.

    Gradients are the same to the last bit. Of no effect under torch.compile, which chooses itself what to make again,
    and in torch.func's transforms. Raises UserError for a model that is not a vitmods ViT, and where no branch has
    LayerNorm or RMSNorm before it.
    """
    for vit in _vits(model):
        if enable and not any(supports(norm) or supports_mlp(norm, part) for norm, part in _branches(vit)):
            raise UserError(
                "No block of this model has a recompute form: it needs LayerNorm or RMSNorm before its branches."
            )
        forms: Any = vit.forms or default_forms()
        vit.forms = dataclasses.replace(forms, recompute=enable)


def recompute_frozen_mlps(model: nn.Module, enable: bool = True, keep_last: int = 0) -> None:
    """Keep only the input of each frozen MLP branch and rerun its first linear map in backward, except in the last
    ``keep_last`` blocks: more time for less memory.

    Same gradients; independent of ``recompute``; of no effect on what is trained. Raises UserError for a model that is
    not a vitmods ViT, where no MLP is frozen, where none can be run again (norms other than LayerNorm and RMSNorm
    before it, another kind of MLP), and where ``keep_last`` leaves no block.
    """
    for vit in _vits(model):
        if not 0 <= keep_last < len(vit.blocks):
            raise UserError(f"keep_last is a number of blocks from 0 to {len(vit.blocks) - 1}, not {keep_last}.")
        mlps = [(norm, part) for norm, part in _branches(vit) if hasattr(part, "fc1")]
        if enable and not any(is_frozen(mlp) for _, mlp in mlps):
            raise UserError("No MLP of this model is frozen: call vitmods.train_only(model, 'attention') first.")
        if enable and not any(supports_mlp(norm, mlp) for norm, mlp in mlps):
            raise UserError("No MLP of this model can be recomputed: it needs LayerNorm or RMSNorm before it.")
        forms: Any = vit.forms or default_forms()
        vit.forms = dataclasses.replace(forms, recompute_frozen_mlps=enable, keep_last=keep_last)


def checkpoint(model: nn.Module, enable: bool = True) -> None:
    """Keep only the input of each block and run the block again in backward: a third to a half of the memory for a
    quarter more time. Raises UserError for a model that cannot (ours, timm's and Hugging Face's can)."""
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing(enable)  # type: ignore[operator]
    elif hasattr(model, "gradient_checkpointing_enable"):
        getattr(model, f"gradient_checkpointing_{'enable' if enable else 'disable'}")()
    else:
        raise UserError(f"{type(model).__name__} does not have gradient checkpointing: leave it out.")


def _vits(model: nn.Module) -> list[ViT]:
    vits = [module for module in model.modules() if isinstance(module, ViT)]
    if not vits:
        raise UserError(f"{type(model).__name__} is not a vitmods ViT: import it first, with vitmods.apply(model).")
    return vits


def _branches(model: ViT) -> list[tuple[nn.Module, nn.Module]]:
    """The norm before each branch, and the branch."""
    pairs: list[tuple[nn.Module, nn.Module]] = []
    block: Any
    for block in model.blocks:
        if isinstance(block, ParallelBlock):
            branches: list[Any] = [*block.attns, *block.ffns]
            pairs += [(branch.norm, branch.attn if hasattr(branch, "attn") else branch.mlp) for branch in branches]
        else:
            pairs += [(block.norm1, block.attn), (block.norm2, block.mlp)]
    return pairs


def supports(norm: nn.Module) -> bool:
    """Whether this norm can be run again: LayerNorm and RMSNorm, by themselves."""
    return exact(norm, LayerNorm, RMSNorm)


def supports_mlp(norm: nn.Module, mlp: nn.Module) -> bool:
    """Whether the parts of this branch can be run again."""
    return supports(norm) and exact(mlp, Mlp) and exact(mlp.act, nn.GELU)


def is_frozen(mlp: nn.Module) -> bool:
    """Whether nothing of the MLP is trained; the norm before it may be."""
    return not any(parameter.requires_grad for parameter in mlp.parameters())


def norm_then(x: Tensor, norm: nn.Module, branch: Callable[[Tensor], Tensor]) -> Tensor:
    """``branch(norm(x))`` that keeps only the norm's input; (B, N, C) -> what the branch gives."""
    normalize = partial(_normalize, norm, product_type(x))
    y = normalize(x)
    with _made_again(y, normalize, x):
        return branch(y)


def norm_mlp(x: Tensor, norm: nn.Module, mlp: Any) -> Tensor:
    """``mlp(norm(x))`` that keeps the norm's input and the GELU's; (B, N, C) in and out."""
    h = norm_then(x, norm, mlp.fc1)
    a = mlp.act(h)
    with _made_again(a, mlp.act, h):
        return _end(mlp, a)


def norm_frozen_mlp(x: Tensor, norm: nn.Module, mlp: Any) -> Tensor:
    """``mlp(norm(x))`` that keeps only the norm's input and runs fc1 again in backward, for a frozen MLP."""
    normalize = partial(_normalize, norm, product_type(x))
    h = mlp.fc1(normalize(x))
    with _made_again(h, lambda x: mlp.fc1(normalize(x)), x):
        a = mlp.act(h)
    return _end(mlp, a)


def _end(mlp: Any, a: Tensor) -> Tensor:
    return mlp.drop2(mlp.fc2(mlp.norm(mlp.drop1(a))))


def _normalize(norm: nn.Module, dtype: torch.dtype, x: Tensor) -> Tensor:
    y: Tensor = norm(x)
    return y.to(dtype)


def product_type(x: Tensor) -> torch.dtype:
    """The type that linear maps compute in here: autocast's where it is on. A cast by autocast would be kept."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _made_again(value: Tensor, make: Callable[[Tensor], Tensor], source: Tensor) -> saved_tensors_hooks:
    """A context in which autograd keeps ``source`` in place of ``value`` and its views, which are ``make(source)``.

    Gradients flow to where the value came from. Everything else is kept as usual: by the surrounding hooks, or as it
    is, with an error if it is written to before backward.
    """
    place, size, kind = _place(value), value.numel(), value.device.type
    autocast = partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
    keep, give = torch._C._autograd._top_saved_tensors_default_hooks(False) or (_keep, _give)
    again: list[Any] = []  # the source, kept once

    def pack(kept: Tensor) -> Any:
        if kept.numel() != size or _place(kept) != place:
            return None, keep(kept)
        if not again:
            again.append(keep(source))
        return (kept.shape, kept.stride()), again[0]

    def unpack(packed: Any) -> Tensor:
        form, kept = packed
        tensor: Tensor = give(kept)
        if form is None:
            return tensor
        with torch.no_grad(), autocast():
            return make(tensor).as_strided(*form)

    return saved_tensors_hooks(pack, unpack)


def _keep(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor.detach(), tensor._version


def _give(kept: tuple[Tensor, int]) -> Tensor:
    tensor, version = kept
    if tensor._version != version:
        raise RuntimeError("A tensor that backward needs was changed in place: do not modify it before backward.")
    return tensor


def _place(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor begins, of those that are alive; fake ones do not have an address."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())
