"""Recognize the modules that a fast form may replace: exactly the known ones, without hooks."""

from typing import Any

import torch
from torch import nn

from vitmods.fast.packed import PackedLinear
from vitmods.layers import (
    Attention,
    Block,
    DropKey,
    DropPath,
    DynamicTokenNorm,
    GatedPositions,
    LayerNorm,
    LayerScale,
    Mlp,
    ParallelBlock,
    RMSNorm,
    SwiGLU,
)
from vitmods.layers.norms import GroupNorm, InstanceNorm
from vitmods.ops.context import PLAIN, has_hooks, is_as_written, transformed

_NAMES: dict[type[nn.Module], str] = {
    Block: "norm1 attn norm1_branch ls1 drop_path1 norm1_after "
    "norm2 mlp norm2_branch ls2 drop_path2 residual_scale norm2_after norm_scale",
    ParallelBlock: "attns ffns",
    Attention: "qkv q_norm k_norm rope rel_pos mask attn_drop positions head_scale norm gate value_mix proj proj_drop "
    "num_heads head_dim",
    Mlp: "fc1 act drop1 norm fc2 drop2",
    SwiGLU: "fc1_g fc1_x act drop1 norm fc2 drop2",
    LayerNorm: "weight bias normalized_shape eps elementwise_affine",
    RMSNorm: "weight eps",
    LayerScale: "gamma init",
    DropPath: "rate",
    DropKey: "rate",
    GatedPositions: "a gate grid_size prefix_tokens init start",
    nn.Linear: "weight bias in_features out_features",
    PackedLinear: "weight bias in_features out_features gelu _blocks",
    nn.GELU: "approximate",
    nn.SiLU: "inplace",
    nn.Dropout: "p inplace",
    nn.Identity: "",
}
"""Parts, parameters and other attributes of the kinds that are looked into. A name that is not here may be something
new that the forms would leave out, so that the plain module runs."""
_KNOWN = {kind: (frozenset(names.split()), kind.forward) for kind, names in _NAMES.items()}
_TOKEN_WISE = (nn.Identity, nn.Linear, PackedLinear, nn.GELU, nn.SiLU, nn.Dropout, LayerScale, Mlp, SwiGLU)
_PER_IMAGE = (DynamicTokenNorm, InstanceNorm, GroupNorm)


def exact(module: Any, *kinds: type[nn.Module]) -> bool:
    """Whether a module is exactly of one of these kinds (without kinds: of any known one): only the kind's attributes,
    parts and parameters, its own forward, plain tensors, and no hooks. Under an old torch.compile, which cannot know,
    always False."""
    kind = type(module)
    if kind not in (kinds or _KNOWN):
        return False
    names, forward = _KNOWN[kind]
    return kind.forward is forward and is_as_written(module, names)


def token_wise(*modules: nn.Module) -> bool:
    """Whether each treats each token by itself, down to its last part: of a kind that does or says so in the class that
    has its forward, with no hooks."""
    return all(map(_token_wise, modules))


def image_wise(*modules: nn.Module) -> bool:
    """Whether each treats each image by itself."""
    return all(
        _token_wise(m)
        or (type(m) in _PER_IMAGE and "forward" not in vars(m) and not has_hooks(m.modules()))
        or reads_heads(m)
        for m in modules
    )


def reads_heads(attn: Any) -> bool:
    """Whether it is our attention with known parts, each of which treats each token by itself, and without a mask now:
    one may compute only some of its queries."""
    return (
        exact(attn, Attention)
        and exact(attn.qkv, nn.Linear, PackedLinear)
        and (attn.mask is None or (exact(attn.mask, DropKey) and not attn.mask.training))
        and attn.rel_pos is None
        and attn.rope is None
        and (attn.gate is None or exact(attn.gate, nn.Linear, PackedLinear))
        and (attn.positions is None or exact(attn.positions, GatedPositions))
        and token_wise(attn.q_norm, attn.k_norm, attn.norm, attn.proj, attn.proj_drop)
    )


def _token_wise(module: nn.Module) -> bool:
    is_known = exact(module, *_TOKEN_WISE) if type(module) in _TOKEN_WISE else _declared(module)
    return is_known and all(map(_token_wise, module.children()))


def _declared(module: nn.Module) -> bool:
    if "forward" in vars(module) or has_hooks((module,)):
        return False
    for kind in type(module).__mro__:
        if "token_wise" in vars(kind):
            return bool(vars(kind)["token_wise"])
        if "forward" in vars(kind):
            return False
    return False


def random(module: nn.Module) -> bool:
    """Whether a dropout in it is active."""
    dropouts = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.AlphaDropout
    parts = module.modules() if module.training else ()
    return any(getattr(m, "attn_drop", 0) or (isinstance(m, dropouts) and m.p > 0) for m in parts)


def eager(x: Any) -> bool:
    """Whether operations on x are just done here and now: x is a plain tensor (or a fake one, which replaces it
    where memory is estimated), and nothing traces, compiles or transforms them."""
    if type(x) not in PLAIN or torch.compiler.is_compiling() or transformed():
        return False
    return not torch._C._is_tracing() and x.device.type != "meta"
