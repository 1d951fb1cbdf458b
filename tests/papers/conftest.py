"""Parameters of the goldens under our names."""

import pytest

from vitmods.adapters import big_vision
from vitmods.adapters.tensors import read_tensors, rows_of
from vitmods.adapters.transfer import shapes_of


@pytest.fixture
def flax_weights():
    """big_vision's parameters, or their gradients (every rule is a permutation), under our names and layouts."""

    def convert(flax):
        config = big_vision.infer_config("golden", flax, img_size=(12, 8))
        names = shapes_of("golden", config, at_most=100)
        weights, _ = read_tensors("golden", rows_of(names, big_vision.table(config, flax)), flax)
        return weights

    return convert


@pytest.fixture
def flax_stem_weights():
    """The same for a Dual PatchNorm stem alone, in a model with this config."""

    def convert(flax, config):
        names = [name for name in shapes_of("golden", config, at_most=100) if name.startswith("patch_embed.")]
        weights, _ = read_tensors("golden", rows_of(names, big_vision.table(config)), flax)
        return {name.removeprefix("patch_embed."): value for name, value in weights.items()}

    return convert
