"""Golden vectors: inputs, weights, outputs and gradients that the papers' own code gave, in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch

from vitmods.adapters import big_vision
from vitmods.adapters.tensors import read_tensors

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


@pytest.fixture
def golden():
    return Case


@pytest.fixture
def flax_weights():
    """big_vision's parameters, or their gradients (every rule is a permutation), under our names and layouts."""

    def convert(flax):
        config = big_vision.infer_config("golden", flax, img_size=(12, 8))
        weights, _ = read_tensors("golden", big_vision.rows(config, flax), flax)
        return weights

    return convert


@pytest.fixture
def flax_stem_weights():
    """The same for a Dual PatchNorm stem alone, in a model with this config."""

    def convert(flax, config):
        weights, _ = read_tensors("golden", big_vision.stem_rows(config), flax)
        return {name.removeprefix("patch_embed."): value for name, value in weights.items()}

    return convert
