"""The norms under torch.func and torch.jit.trace, which take PyTorch's own operations alone, and derivatives of
gradients: against the equations in single operations."""

import copy
import io
from functools import partial

import pytest
import torch

from vitmods.layers.norms import (
    BatchNorm,
    DynamicErf,
    DynamicTanh,
    DynamicTokenNorm,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    PowerNorm,
    RMSNorm,
    ScaleNorm,
    SwitchableNorm,
    TokenMixing,
)
from vitmods.util.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics from", "ignore:.*torch.jit")
DIM = 6
NORMS = {
    "layer": LayerNorm,
    "rms": RMSNorm,
    "dyt": DynamicTanh,
    "derf": DynamicErf,
    "scale": ScaleNorm,
    "scale, one gain": partial(ScaleNorm, gain="scalar"),
    "instance": InstanceNorm,
    "group": partial(GroupNorm, num_heads=2),
    "batch": BatchNorm,
    "power": partial(PowerNorm, num_heads=2),
    "switchable": SwitchableNorm,
    "dtn": partial(DynamicTokenNorm, num_heads=2, grid_size=(2, 2)),
    "dtn, released": partial(DynamicTokenNorm, num_heads=2, grid_size=(2, 2), mixing=TokenMixing("released")),
    "dtn, band": partial(DynamicTokenNorm, num_heads=2, grid_size=(2, 2), mixing=TokenMixing(band=3)),
    "dtn, pool": partial(
        DynamicTokenNorm, num_heads=2, grid_size=(2, 2), mixing=TokenMixing(pool=2, statistics="mean")
    ),
}


def make(name, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    norm = NORMS[name](DIM, dtype=dtype).eval()
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
    per_image = torch.vmap(torch.func.grad(lambda v, one: loss(norm, v, one[None])), (None, 0))(values, x)
    for key, parameter in values.items():
        for i in range(len(x)):
            (expected,) = torch.autograd.grad(loss(norm, values, x[i : i + 1]), parameter)
            torch.testing.assert_close(per_image[key][i], expected, atol=1e-12, rtol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("count", [8, 2])
@pytest.mark.parametrize("name", NORMS)
def test_several_models_at_once(name, count):
    norms, x = [make(name), make(name, seed=2)], images()[:count]
    stacked = torch.func.stack_module_state(norms)
    actual = torch.vmap(lambda *values: torch.func.functional_call(norms[0], values, (x,)))(*stacked)
    for norm, y in zip(norms, actual, strict=True):
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


def affine(norm, x, mean, var):
    return (x - mean) / torch.sqrt(var + norm.eps) * norm.weight + norm.bias


def by_head(x):
    return x.unflatten(-1, (2, -1))


def rms(norm, x, groups=1):
    x = x.unflatten(-1, (groups, -1))
    return (x / torch.sqrt(x.square().mean(-1, keepdim=True) + norm.eps)).flatten(-2)


def plain_group(norm, x):
    heads = by_head(x)
    mean = heads.mean((1, 3), keepdim=True)
    var = (heads - mean).square().mean((1, 3), keepdim=True)
    return affine(norm, x, *(t.expand(-1, -1, -1, 3).flatten(-2) for t in (mean, var)))


def plain_batch(norm, x):
    if not norm.training:
        return affine(norm, x, norm.running_mean, norm.running_var)
    return affine(norm, x, x.mean((0, 1)), x.var((0, 1), unbiased=False))


def plain_switchable(norm, x):
    means, variances = [x.mean(1, keepdim=True), x.mean((1, 2), keepdim=True)], [x.var(1, keepdim=True)]
    second = variances[0] + means[0].square()
    variances.append(second.mean(-1, keepdim=True) - means[1].square())
    means.append(means[0].mean(0, keepdim=True) if norm.training else norm.running_mean)
    variances.append(second.mean(0, keepdim=True) - means[2].square() if norm.training else norm.running_var)
    weights = norm.mean_weight.softmax(0), norm.var_weight.softmax(0)
    return affine(norm, x, *(sum(w * v for w, v in zip(*pair)) for pair in zip(weights, (means, variances))))


def plain_dtn(norm, x):
    """P as a 4 x 4 matrix."""
    released, pool, band = norm.mixing.variant == "released", norm.mixing.pool > 1, norm.mixing.band
    if released:
        x = rms(norm, x, 2)
    heads, (row, column) = by_head(x), (torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]))
    dx, dy = column - column[:, None], row - row[:, None]
    if band or pool:
        near = ((torch.arange(4) - torch.arange(4)[:, None]).abs() <= (band // 2 if band else 4)).double()
        p = (near / near.sum(1, keepdim=True)).expand(2, 4, 4)
    else:
        p = torch.einsum("hk,kij->hij", norm.a, torch.stack([dx**2 + dy**2, dx, dy]).double()).softmax(-1)
    m, q = (torch.einsum("hij,bjhd->bihd", p, value) for value in (heads, heads.square()))
    lm = torch.sigmoid(norm.omega_mean)[:, None]
    lv = 1.0 if norm.omega_var is None else torch.sigmoid(norm.omega_var)[:, None]  # one pool has no variance
    mean, var = x.mean(-1)[..., None, None], x.var(-1, unbiased=released)[..., None, None]
    y = (heads - lm * mean - (1 - lm) * m) / torch.sqrt(lv * var + (1 - lv) * (q - m.square()) + norm.eps)
    return y.flatten(2) * norm.weight + norm.bias


PLAIN = {
    "layer": lambda n, x: affine(n, x, x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)),
    "rms": lambda n, x: rms(n, x) * n.weight,
    "dyt": lambda n, x: torch.tanh(n.alpha * x) * n.weight + n.bias,
    "derf": lambda n, x: torch.erf(n.alpha * x + n.shift) * n.weight + n.bias,
    "scale": lambda n, x: x / x.square().sum(-1, keepdim=True).sqrt() * n.weight,
    "scale, one gain": lambda n, x: x / x.square().sum(-1, keepdim=True).sqrt() * n.weight,
    "instance": lambda n, x: affine(n, x, x.mean(1, keepdim=True), x.var(1, keepdim=True)),
    "group": plain_group,
    "batch": plain_batch,
    "power": lambda n, x: rms(n, x, 2) / torch.sqrt(n.running_phi + n.eps) * n.weight + n.bias,
    "switchable": plain_switchable,
    "dtn": plain_dtn,
    "dtn, released": plain_dtn,
    "dtn, band": plain_dtn,
    "dtn, pool": plain_dtn,
}


def weighted(y):
    """Linear in the output: second derivatives come from the norm alone."""
    return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()


def cubed(y):
    return y.pow(3).sum()


def hvp_of_autograd(loss, inputs, along):
    return torch.autograd.functional.hvp(loss, inputs, along)[1]


def hvp_of_two_backwards(loss, inputs, along):
    inputs = [value.detach().clone().requires_grad_() for value in inputs]
    first = torch.autograd.grad(loss(*inputs), inputs, create_graph=True)
    pairs = [(grad, v) for grad, v in zip(first, along, strict=True) if grad.requires_grad]
    return torch.autograd.grad(sum((grad * v).sum() for grad, v in pairs), inputs, materialize_grads=True)


def hvp_of_func(loss, inputs, along):
    return torch.func.jvp(torch.func.grad(loss, tuple(range(len(inputs)))), tuple(inputs), tuple(along))[1]


CASES = [*((name, False) for name in NORMS), ("batch", True), ("switchable", True)]
WAYS = [hvp_of_autograd, hvp_of_two_backwards, hvp_of_func]


@pytest.mark.parametrize("reduce", [weighted, cubed])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "training"), CASES)
def test_second_derivatives_of_input_and_parameters(name, training, way, reduce):
    if training and way is hvp_of_func:
        pytest.skip("torch.func does not take statistics that are gathered")
    norm, x = make(name).train(training), images()
    names = [key for key, _ in norm.named_parameters()]
    inputs = (x, *(value.detach() for value in norm.parameters()))
    generator = torch.Generator().manual_seed(2)
    along = tuple(torch.randn(v.shape, dtype=v.dtype, generator=generator) for v in inputs)

    def loss(form):
        return lambda x, *values: reduce(
            torch.func.functional_call(Called(norm, form), {f"norm.{k}": v for k, v in zip(names, values)}, (x,))
        )

    actual = way(loss(lambda norm, x: norm(x)), inputs, along)
    expected = hvp_of_autograd(loss(PLAIN[name]), inputs, along)
    assert max(float(e.abs().max()) for e in expected) > 0.1
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9 * max(1.0, float(b.abs().max())), rtol=0)


class Called(torch.nn.Module):
    def __init__(self, norm, form):
        super().__init__()
        self.norm, self.form = norm, form

    def forward(self, x):
        return self.form(self.norm, x)


@pytest.mark.parametrize("way", WAYS)
def test_the_rule_of_power_norm_has_no_derivative(way):
    norm = make("power").train()
    with pytest.raises(UserError, match="its paper's rule"):
        way(lambda x: weighted(norm(x)), (images(),), (images(),))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_traced(name, training, grad):
    """In float32, in which native forms run; in training as TensorBoard's add_graph does with a fresh model."""
    norm, x = make(name, dtype=torch.float32).train(training), images().float()
    if not training:
        exact = make(name)  # a size is a tensor of integers: it must not become float32
        torch.testing.assert_close(
            torch.jit.trace(exact, (images(),))(images()), exact(images()), atol=1e-13, rtol=1e-13
        )
    with torch.set_grad_enabled(grad):
        expected = copy.deepcopy(norm)(x)
        traced = torch.jit.trace(copy.deepcopy(norm), (x,), check_trace=not training)
        if not (name == "power" and training):
            torch.testing.assert_close(traced(x), expected if not training else norm(x), atol=1e-5, rtol=1e-5)
            torch.jit.save(traced, file := io.BytesIO())
            assert file.getvalue()
        assert traced(images().float()[:4]).shape == (4, 4, DIM)
