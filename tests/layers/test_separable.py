"""The separable form against the same statistics with P as a T x T matrix, in float64, and what it keeps in memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vitmods.layers import DynamicTokenNorm
from vitmods.ops import separable
from vitmods.ops.separable import MixingLayout, axis_kernels, separable_norm

HEADS, DIM, EPS = 3, 12, 1e-3  # eps large, so that a misplaced one is seen
GRIDS = [(4, 4), (3, 5), (5, 2), (1, 7), (7, 1), (1, 1)]
FORMS = {"function": separable_norm, "composed": separable.composed}


def dense_kernel(a, grid):
    """Equation 6, (H, T, T)."""
    y = torch.arange(grid[0]).repeat_interleave(grid[1]).to(a)
    x = torch.arange(grid[1]).repeat(grid[0]).to(a)
    dx, dy = x - x[:, None], y - y[:, None]
    relative = torch.stack([dx.square() + dy.square(), dx, dy])
    return torch.einsum("hk,kij->hij", a, relative).softmax(-1)


def dense(x, a, mix_mean, mix_var, weight, bias, grid, unbiased):
    """Equations 4 and 5 as they stand."""
    p, heads = dense_kernel(a, grid), x.unflatten(-1, (len(a), -1))
    m = torch.einsum("hij,bjhd->bihd", p, heads)
    v = torch.einsum("hij,bjhd->bihd", p, heads.square()) - m.square()
    lm, lv = mix_mean[:, None], mix_var[:, None]
    mean, var = x.mean(-1)[..., None, None], x.var(-1, unbiased=unbiased)[..., None, None]
    y = (heads - lm * mean - (1 - lm) * m) / torch.sqrt(lv * var + (1 - lv) * v + EPS)
    return y.flatten(2) * weight + bias


def separate(form):
    def run(x, a, mix_mean, mix_var, weight, bias, grid, unbiased):
        mix, layout = torch.stack([mix_mean, mix_var]), MixingLayout(grid, HEADS, EPS, unbiased)
        return FORMS[form](x, *axis_kernels(a, grid), mix, weight, bias, layout)

    return run


def inputs(grid, spread=0.5):
    torch.manual_seed(0)
    shapes = [(2, grid[0] * grid[1], DIM), (HEADS, 3), (HEADS,), (HEADS,), (DIM,), (DIM,)]
    values = [torch.randn(*shape, dtype=torch.float64) for shape in shapes]
    values[1] *= spread
    values[2:4] = [value.sigmoid() for value in values[2:4]]
    return [value.requires_grad_() for value in values]


def with_gradients(form, values, *options):
    """The output, and the gradients of all inputs for a random cotangent."""
    y = form(*values, *options)
    cotangent = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    return y, *torch.autograd.grad((y * cotangent).sum(), values)


PURE = [(0.0, 0.0), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0)]


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize(("grid", "mixes"), [*((g, ()) for g in GRIDS), *(((3, 4), mixes) for mixes in PURE)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_dense_form_with_all_gradients(form, grid, mixes, unbiased):
    """Of random and of pure mixes of statistics."""
    values = inputs(grid)
    for value, mix in zip(values[2:4], mixes):
        value.data.fill_(mix)
    actual, expected = (with_gradients(f, values, grid, unbiased) for f in (separate(form), dense))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12 * max(1, b.abs().max().item()), rtol=0)


def test_kernels_of_both_axes_are_the_dense_kernel_and_peak_where_equation_7_says():
    a = inputs((1, 1), spread=2.0)[1].detach()
    px, py = axis_kernels(a, (3, 5))
    outer = torch.einsum("hrs,hcw->hrcsw", py, px).reshape(HEADS, 15, 15)
    torch.testing.assert_close(outer, dense_kernel(a, (3, 5)), atol=1e-15, rtol=0)
    px, py = axis_kernels(torch.tensor([[-1.0, 2 * 2.0, 2 * -1.0]]), (4, 7))
    assert px[0, :5].argmax(-1).tolist() == [2, 3, 4, 5, 6]
    assert py[0, 1:].argmax(-1).tolist() == [0, 1, 2]


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded gradient"])
def test_inputs_that_are_not_contiguous(layout):
    values = inputs((3, 4))
    x = values[0].detach()
    if layout == "transposed":
        x = x.mT.contiguous().mT
    elif layout == "sliced":
        x = torch.cat([x[:, :1], x], 1)[:, 1:]
    strange, power = [x.requires_grad_(), *values[1:]], 1 if layout == "expanded gradient" else 3
    actual = torch.autograd.grad(separate("function")(*strange, (3, 4), False).pow(power).sum(), strange)
    reference = torch.autograd.grad(dense(*values, (3, 4), False).pow(power).sum(), values)
    for a, b in zip(actual, reference, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=0)


def test_the_input_is_left_alone():
    """One head, one image and one column or row: the layout of the heads is that of the input, no copy is implied."""
    for grid in ((4, 1), (1, 4), (1, 1)):
        x, grad = torch.randn(1, grid[0] * grid[1], 4), torch.randn(1, grid[0] * grid[1], 4)
        before = x.clone(), grad.clone()
        DynamicTokenNorm(4, 1, grid)(x.requires_grad_()).backward(grad)
        assert torch.equal(x, before[0])
        assert torch.equal(grad, before[1])


def kept_bytes(norm, x):
    parameters = {p.untyped_storage().data_ptr() for p in norm.parameters()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm(x)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return sum(size for place, size in storages.items() if place not in parameters)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation gives."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor):
                self.numel = max(self.numel, t.untyped_storage().nbytes() // t.element_size())
        return out


@pytest.mark.parametrize("side", [14, 28])
def test_memory_grows_linearly_with_the_tokens(side):
    """What is kept is little more than the input, and no tensor, forward or backward, is larger than two of them."""
    norm = DynamicTokenNorm(48, 3, (side, side))
    x = torch.randn(1, side * side, 48, requires_grad=True)
    assert kept_bytes(norm, x) <= 1.5 * x.nbytes  # half for what softmax keeps, two numbers a token, and so on
    with Largest() as largest:
        norm(x).square().sum().backward()
    assert largest.numel == 2 * x.numel()
