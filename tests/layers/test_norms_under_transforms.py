"""The norms under torch.func, which takes no rule of differentiation but PyTorch's own."""

from functools import partial

import pytest
import torch

from vitmods.layers.norms import (
    BatchNorm,
    DynamicTokenNorm,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    PowerNorm,
    RMSNorm,
    ScaleNorm,
    SwitchableNorm,
)

DIM = 6
NORMS = {
    "layer": LayerNorm,
    "rms": RMSNorm,
    "scale": ScaleNorm,
    "scale, one gain": partial(ScaleNorm, gain="scalar"),
    "instance": InstanceNorm,
    "group": partial(GroupNorm, num_heads=2),
    "batch": BatchNorm,
    "power": partial(PowerNorm, num_heads=2),
    "switchable": SwitchableNorm,
    "dtn": partial(DynamicTokenNorm, num_heads=2, grid_size=(2, 2)),
}


def make(name, seed=0):
    torch.manual_seed(seed)
    norm = NORMS[name](DIM, dtype=torch.float64).eval()
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    return norm


def images():
    return torch.randn(8, 4, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loss(norm, values, x):
    return torch.func.functional_call(norm, values, (x,)).pow(3).mean()


@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_each_image(name):
    norm, x = make(name), images()
    values = dict(norm.named_parameters())
    each = torch.vmap(torch.func.grad(lambda v, one: loss(norm, v, one[None])), (None, 0))(values, x)
    for key, parameter in values.items():
        for i in range(len(x)):
            (expected,) = torch.autograd.grad(loss(norm, values, x[i : i + 1]), parameter)
            torch.testing.assert_close(each[key][i], expected, atol=1e-12, rtol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("count", [8, 2])
@pytest.mark.parametrize("name", NORMS)
def test_several_models_at_once(name, count):
    norms, x = [make(name), make(name, seed=2)], images()[:count]
    stacked = torch.func.stack_module_state(norms)
    found = torch.vmap(lambda *values: torch.func.functional_call(norms[0], values, (x,)))(*stacked)
    for norm, y in zip(norms, found, strict=True):
        torch.testing.assert_close(y, norm(x), atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("name", NORMS)
def test_directional_derivative(name):
    norm, x = make(name), images()
    direction = torch.randn_like(x)
    _, along = torch.func.jvp(norm, (x,), (direction,))
    step = 1e-6
    torch.testing.assert_close(
        along, (norm(x + step * direction) - norm(x - step * direction)) / (2 * step), atol=1e-7, rtol=1e-6
    )
