"""Golden vectors: inputs, weights, outputs and gradients that the papers' own code gave, in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch

GOLDEN = Path(__file__).parents[1] / "golden"


class Case:
    """The arrays of one golden file as tensors, looked up by name or by the part before the first dot."""

    def __init__(self, name):
        with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as arrays:
            self.arrays = {key: torch.from_numpy(arrays[key].copy()) for key in arrays.files}

    def __getitem__(self, name):
        return self.arrays[name]

    def group(self, prefix):
        return {key[len(prefix) + 1 :]: value for key, value in self.arrays.items() if key.startswith(f"{prefix}.")}


def _linear(flax, name):
    return {"weight": flax[f"{name}/kernel"].T, "bias": flax[f"{name}/bias"]}


def _norm(flax, name):
    return {"weight": flax[f"{name}/scale"], "bias": flax[f"{name}/bias"]}


def _attention(flax, name):
    """Flax has query, key and value apart, (C, H, D); ours is one map with the three below each other."""
    dim = flax[f"{name}/query/kernel"].shape[0]
    parts = ("query", "key", "value")
    return {
        "qkv.weight": torch.cat([flax[f"{name}/{part}/kernel"].reshape(dim, -1).T for part in parts]),
        "qkv.bias": torch.cat([flax[f"{name}/{part}/bias"].flatten() for part in parts]),
        "proj.weight": flax[f"{name}/out/kernel"].reshape(-1, dim).T,
        "proj.bias": flax[f"{name}/out/bias"],
    }


def channel_first(values, patch=4):
    """A patch's values (first axis) from big_vision's (row, column, channel) order to our (channel, row, column)."""
    shape = values.shape
    return values.reshape(patch, patch, -1, *shape[1:]).movedim(2, 0).reshape(shape)


def from_flax(flax):
    """big_vision's parameters (or their gradients: every rule here is a permutation) under our names and layouts."""
    parts = {"head": _linear(flax, "head"), "norm": _norm(flax, "Transformer/encoder_norm")}
    for i in range(sum(name.endswith("LayerNorm_0/scale") for name in flax)):
        theirs, ours = f"Transformer/encoderblock_{i}", f"blocks.{i}"
        parts[f"{ours}.norm1"] = _norm(flax, f"{theirs}/LayerNorm_0")
        parts[f"{ours}.attn"] = _attention(flax, f"{theirs}/MultiHeadDotProductAttention_0")
        parts[f"{ours}.norm2"] = _norm(flax, f"{theirs}/LayerNorm_1")
        parts[f"{ours}.mlp.fc1"] = _linear(flax, f"{theirs}/MlpBlock_0/Dense_0")
        parts[f"{ours}.mlp.fc2"] = _linear(flax, f"{theirs}/MlpBlock_0/Dense_1")
    if "pre_logits/kernel" in flax:
        parts["pre_logits"] = _linear(flax, "pre_logits")
    if "embedding/kernel" in flax:
        kernel = flax["embedding/kernel"].permute(3, 2, 0, 1)
        parts["patch_embed.proj"] = {"weight": kernel, "bias": flax["embedding/bias"]}
    else:
        parts |= dual_patchnorm_from_flax(flax, "patch_embed.")
    found = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
    if "pos_embedding" in flax:
        found["pos_embed"] = flax["pos_embedding"]
    if "cls" in flax:
        found["cls_token"] = flax["cls"]
    return found


def dual_patchnorm_from_flax(flax, prefix="", patch=4):
    kernel = channel_first(flax["dense/kernel"], patch).T
    before = {name: channel_first(value, patch) for name, value in _norm(flax, "ln0").items()}
    return {
        f"{prefix}norm_before": before,
        f"{prefix}proj": {"weight": kernel.unflatten(1, (-1, patch, patch)), "bias": flax["dense/bias"]},
        f"{prefix}norm": _norm(flax, "ln1"),
    }


@pytest.fixture
def golden():
    return Case


@pytest.fixture
def flax_weights():
    return from_flax


@pytest.fixture
def flax_stem_weights():
    def flat(flax):
        parts = dual_patchnorm_from_flax(flax)
        return {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}

    return flat
