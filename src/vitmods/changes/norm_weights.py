"""Weights of norms under another kind: what fits is carried, what the new kind has no place for is dropped."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from math import sqrt

from vitmods.changes.base import Weights
from vitmods.model.config import NormConfig, ViTConfig

_BIASED = ("layer", "batch", "instance", "group", "power", "switchable")
_RUNNING = ("running_mean", "running_var", "running_phi", "ema_gz", "iters", "mean_weight", "var_weight")
_SLOTS = {
    "attn": {"before": "norm1", "inner": "attn.norm", "branch": "norm1_branch", "after": "norm1_after"},
    "mlp": {"before": "norm2", "inner": "mlp.norm", "branch": "norm2_branch", "after": "norm2_after"},
}


def carry_norms(weights: Weights, old: ViTConfig, new: ViTConfig) -> Weights:
    """The old weights without what has no place; gains that enter or leave ScaleNorm are put into its unit, the length
    sqrt(C) of a token of size 1, and a single gain takes or gives the mean or itself."""
    carried = dict(weights)
    for module, before, after in _changed(old, new):
        for name in [n for n in weights if n.startswith(f"{module}.")]:
            if any(fnmatchcase(name, pattern) for pattern in _dropped(module, before, after)):
                del carried[name]
        if f"{module}.weight" in carried and "scale" in (before.kind, after.kind):
            gain, dim = carried[f"{module}.weight"], _width(module, new)
            gain = gain.mean(0, keepdim=True) if _is_scalar(after) else gain.expand(dim)
            factor = sqrt(dim) ** ((after.kind == "scale") - (before.kind == "scale"))
            carried[f"{module}.weight"] = gain * factor
    return carried


def dropped_by_norms(old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
    """Names of old weights that have no place, or stand there in another unit."""
    found: list[str] = []
    for module, before, after in _changed(old, new):
        found += _dropped(module, before, after)
        if "scale" in (before.kind, after.kind):
            found.append(f"{module}.weight")
    return tuple(found)


def _dropped(module: str, before: NormConfig, after: NormConfig) -> list[str]:
    names = [f"{module}.{name}" for name in _RUNNING]
    return names if after.kind in _BIASED else [*names, f"{module}.bias"]


def _changed(old: ViTConfig, new: ViTConfig) -> Iterator[tuple[str, NormConfig, NormConfig]]:
    """(module, its old config, its new config) of every norm whose config is another."""
    pairs = [(f"blocks.{i}.{name}", a, b) for i in range(new.depth) for name, a, b in _of_block(old, new, i)]
    pairs += [(name, old.final_norm, new.final_norm) for name in ("norm", "fc_norm")]
    pairs.append(("attn_pool.norm", old.pool_norm or old.final_norm, new.pool_norm or new.final_norm))
    return ((name, a, b) for name, a, b in pairs if a is not None and b is not None and a != b)


def _of_block(old: ViTConfig, new: ViTConfig, index: int) -> Iterator[tuple[str, NormConfig | None, NormConfig | None]]:
    for names, before, after in zip(_SLOTS.values(), old.branches(index), new.branches(index), strict=True):
        for slot, name in names.items():
            yield name, getattr(before, slot), getattr(after, slot)


def _width(module: str, config: ViTConfig) -> int:
    return config.mlp_dim if module.endswith("mlp.norm") else config.embed_dim


def _is_scalar(norm: NormConfig) -> bool:
    return norm.kind == "scale" and dict(norm.options).get("gain") == "scalar"
