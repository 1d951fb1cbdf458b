"""What a model of timm or Hugging Face computes with a change, from what is known of its library alone.

Hooks on the old model's modules, named here family by family, do what the paper's equation says. Nothing of the code
that finds and certifies the places of insertions is used.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FACTOR = 0.3
LAST = re.compile(
    r"\.\d+\.(.*\.)?(attn\.proj|attention\.proj|mlp\.fc2|fc2|mlp\.w2|o_proj|out_proj|projection_layer|output\.dense|"
    r"self_attn\.dense|down_proj|c_proj|mlp\.dense2|out_lin|lin2|Wo|DenseReluDense\.wo|SelfAttention\.o)$"
)
"""the last linear map of each branch of a block"""
OTHER_ENDS = {
    "rpn": r"^blocks\.\d+\.norm\d$",
    "eva02_enormous": r"^blocks\.\d+\.norm\d$",
    "Swinv2": r"blocks\.\d+\.layernorm_(before|after)$",
    "Gemma2": r"\.\d+\.post_\w+_layernorm$",
    "Albert": r"albert_layers\.\d+\.(attention\.dense|ffn_output)$",
    "Timesformer": r"\.\d+\.(temporal_dense|attention\.output\.dense|output\.dense)$",
}
"""models whose branches end with a norm, or with another map"""
BLOCK_NORMS = re.compile(
    r"\.\d+\.((attns|ffns|layer)\.\d+\.)?((attention\.output|output)\.)?"
    r"(norm\d?|layernorm_\w+|layer_norm_?\d?|LayerNorm|rms_norm\d|ln_\d|\w*_layernorm|\w+_layer_norm|\w+_norm)$"
)
"""the norms of branches, by name; those inside attention have a module more in their name"""
JOINT = re.compile(r"\.\d+\.(.*\.)?(qkv|c_attn|Wqkv)$")
QUERY = re.compile(r"\.\d+\.(.*\.)?(q_proj|query|q|q_lin|projection_query)$")
KEY = re.compile(r"\.\d+\.(.*\.)?(k_proj|key|k|k_lin|projection_key)$")


def outputs(model: nn.Module, call: Callable[[nn.Module], Any]) -> list[Tensor]:
    """What the model puts out and its last list of modules does (a new head may be zero)."""
    kept: list[Any] = []
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1]
    hooks = [m[-1].register_forward_hook(lambda m, a, o: kept.append(o)) for m in lists]
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        made = call(model.eval())
    for hook in hooks:
        hook.remove()
    return [t for t in flat((made, kept)) if t.is_floating_point()]


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in flat(item)]


def gap(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference, relative to the largest number."""
    if [x.shape for x in a] != [x.shape for x in b]:
        return float("inf")
    return max(float((x - y).abs().max() / x.abs().max().clamp_min(1e-9)) for x, y in zip(a, b, strict=True))


def normed(x: Tensor, heads: int) -> Tensor:
    split = x.unflatten(-1, (heads, -1))
    return F.layer_norm(split, split.shape[-1:], eps=1e-6).flatten(-2)


def heads_of(model: nn.Module, path: str, is_key: bool) -> int:
    """The number of heads that the library gives the attention around a map."""
    config: Any = getattr(model, "config", None)
    if is_key and getattr(config, "num_key_value_heads", None):
        return int(config.num_key_value_heads)
    while path:
        path = path.rpartition(".")[0]
        module = model.get_submodule(path)
        for name in ("num_heads", "num_attention_heads", "n_heads"):
            if isinstance(number := getattr(module, name, None), int):
                return number
    return int(config.num_attention_heads)


def scale_branches(name: str, model: nn.Module) -> None:
    behind = next((pattern for part, pattern in OTHER_ENDS.items() if part in name), None)
    pattern = re.compile(behind) if behind else LAST
    chosen = [m for n, m in model.named_modules() if pattern.search(n) and not re.search("backbone|rel_pos", n)]
    assert chosen, f"the branches of {name} are not known"
    for module in chosen:
        module.register_forward_hook(lambda m, a, o: o * FACTOR)


def normalize_heads(name: str, model: nn.Module) -> None:
    if name.startswith("beit_"):  # which reads the weights of its map itself
        for module in model.modules():
            if type(module).__name__ == "Attention":
                module.forward = partial(with_normed_product, module.forward)
        return
    has_places = any(type(m).__module__.startswith("timm") for m in model.modules())
    for path, module in model.named_modules():
        around = model.get_submodule(path.rpartition(".")[0])
        if has_places and hasattr(around, "q_norm"):
            continue
        if (
            has_places and isinstance(getattr(module, "q_norm", None), nn.Identity) and re.search(r"\.\d+\.", path)
        ):  # timm's places
            dim = module.head_dim
            module.q_norm, module.k_norm = (nn.LayerNorm(dim, 1e-6, elementwise_affine=False) for _ in range(2))
        elif JOINT.search(path):
            heads = heads_of(model, path, False)

            def joint(m: nn.Module, a: Any, o: Tensor, heads: int = heads) -> Tensor:
                q, k, v = o.chunk(3, -1)
                return torch.cat((normed(q, heads), normed(k, heads), v), -1)

            module.register_forward_hook(joint)
        elif QUERY.search(path) or KEY.search(path):
            heads = heads_of(model, path, bool(KEY.search(path)))
            module.register_forward_hook(lambda m, a, o, heads=heads: normed(o, heads))


def with_normed_product(forward: Any, *args: Any, **keywords: Any) -> Any:
    product = F.scaled_dot_product_attention

    def of_normed(q: Tensor, k: Tensor, *rest: Any, **more: Any) -> Tensor:
        q, k = (F.layer_norm(x, x.shape[-1:], eps=1e-6) for x in (q, k))
        return product(q, k, *rest, **more)

    F.scaled_dot_product_attention = of_normed
    try:
        return forward(*args, **keywords)
    finally:
        F.scaled_dot_product_attention = product


def normalize_patches(name: str, model: nn.Module) -> None:
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Conv3d) and m.in_channels == 3]
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and not m.in_features % (3 * 8 * 8)]
    stem: Any = (convolutions or linear)[0]

    def hook(m: Any, args: Any, output: Tensor) -> Tensor:
        x, axis = args[0], -1
        if isinstance(m, nn.Conv2d | nn.Conv3d):
            for i, side in enumerate(m.kernel_size):
                x = x.unfold(2 + i, side, side)
            count = len(m.kernel_size)
            x, axis = x.movedim(1, 1 + count).flatten(1 + count), 1
        x = F.layer_norm(x, x.shape[-1:], eps=1e-6)
        y = F.linear(x, m.weight.flatten(1), m.bias)
        return F.layer_norm(y, y.shape[-1:], eps=1e-6).movedim(-1, axis)

    stem.register_forward_hook(hook)


def other_norms(name: str, model: nn.Module, changed: nn.Module) -> None:
    new = {n for n, m in changed.named_modules() if type(m).__module__.startswith("vitmods.layers.norms")}
    for path, module in model.named_modules():
        kind = type(module).__name__.lower()
        of_branch = BLOCK_NORMS.search(path) and "norm" in kind and "batch" not in kind
        of_branch = of_branch and not re.search("backbone|patch_embed", path)
        assert path in new or not of_branch or re.search("sub_norm|[qk]_norm", path), f"{name}: {path} is left out"
        if path not in new:
            continue
        eps = next(float(getattr(module, key)) for key in ("eps", "variance_epsilon") if hasattr(module, key))
        weight: Any = getattr(module, "weight", None)
        gain = 1.0 if weight is None else weight + ("Gemma" in type(module).__name__)

        def rms(m: Any, args: Any, o: Tensor, eps: float = eps, gain: Any = gain) -> Tensor:
            x = args[0]
            if isinstance(m, nn.LayerNorm):
                return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * gain
            return F.layer_norm(x, x.shape[-1:], eps=eps) * gain

        module.register_forward_hook(rms)


def error(name: str, change: str, old: nn.Module, changed: nn.Module, call: Callable[[nn.Module], Any]) -> float:
    """How far the changed model is from the paper's equation on the old one."""
    reference = copy.deepcopy(old)
    if change.startswith("layerscale"):
        for parameter in (p for n, p in changed.named_parameters() if n not in dict(old.named_parameters())):
            nn.init.constant_(parameter, FACTOR)
        scale_branches(name, reference)
    elif change == "qknorm":
        normalize_heads(name, reference)
    elif change == "dpn":
        normalize_patches(name, reference)
    elif change == "rms":
        left = [n for n, m in changed.named_modules() if BLOCK_NORMS.search(n) and isinstance(m, nn.LayerNorm)]
        assert not [
            n for n in left if not re.search(r"patch|downsample|^(stages|encoder\.layers)\.\d+\.layer_norm$", n)
        ], f"{name}: {left}"
    else:
        other_norms(name, reference, changed)
    before, after = outputs(reference, call), outputs(changed, call)
    if change == "rms":  # of the stream only the mean of the channels moves; some models put out the stream
        for axes in ((3, 4), (4,)):  # images of features have their channels on the second axis or on the last
            axis = -1 if 3 in axes else 1
            before, after = (
                [x - x.mean(axis, keepdim=True) if x.ndim in axes else x for x in made] for made in (before, after)
            )
    return gap(before, after)
