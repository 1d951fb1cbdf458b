"""Parameters of the goldens under our names."""

import pytest

from vitmods.adapters import big_vision
from vitmods.adapters.tensors import read_tensors


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
