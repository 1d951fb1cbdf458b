"""The native form of dynamic token normalization: its numbers, where it is used and where it must not be."""

import copy
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from vitmods.layers import DynamicTokenNorm, TokenMixing
from vitmods.ops import native, separable
from vitmods.ops.native import dynamic_token
from vitmods.ops.separable import MixingLayout, axis_kernels, separable_norm

pytestmark = pytest.mark.skipif(native.library("dynamic_token") is None, reason="there is no C++ compiler")

EPS = 1e-5
# (B, rows, columns, C, H): usual, not square, a sequence of either direction, heads that fill no register, one token
SHAPES = [
    (3, 4, 4, 96, 3),
    (2, 14, 14, 128, 2),
    (5, 3, 7, 60, 3),
    (1, 1, 9, 34, 2),
    (3, 17, 1, 40, 1),
    (2, 1, 1, 16, 1),
]


def values(shape, offset=0.0):
    """x, px, py, mix, weight, bias in float32, and a cotangent."""
    (batch, rows, columns, dim, heads), generator = shape, torch.Generator().manual_seed(0)

    def noise(*size):
        return torch.randn(*size, generator=generator)

    a, mixes = 0.3 * noise(heads, 3), torch.rand(2, heads, generator=generator)
    kernels = axis_kernels(a, (rows, columns))
    x = noise(batch, rows * columns, dim) + offset * noise(dim)
    return [x, *kernels, mixes, noise(dim), noise(dim)], noise(batch, rows * columns, dim)


def with_gradients(form, inputs, cotangent):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = form(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, cotangent.to(y.dtype))]


def three_forms(shape, unbiased, offset):
    """Output and gradients: native, Python's in float32, and Python's in float64 of the same numbers."""
    inputs, cotangent = values(shape, offset)
    layout = MixingLayout(shape[1:3], shape[-1], EPS, unbiased)

    def python(*tensors):
        return separable._SeparableNorm.apply(*tensors, layout, False)

    assert native.usable("dynamic_token", *inputs)
    return (
        with_gradients(lambda *tensors: separable_norm(*tensors, layout), inputs, cotangent),
        with_gradients(python, inputs, cotangent),
        with_gradients(python, [t.double() for t in inputs], cotangent),
    )


@pytest.mark.parametrize(
    ("shape", "unbiased", "offset"),
    [*itertools.product(SHAPES, [False, True], [0.0]), ((2, 6, 5, 64, 2), False, 1e2), ((2, 6, 5, 64, 2), False, 1e3)],
    ids=str,
)
def test_it_is_the_python_form_with_all_gradients(shape, unbiased, offset):
    """Also of large offsets: what float32 itself has left of the spread, and no less than the Python form."""
    names = ("y", "x", "px", "py", "mix", "weight", "bias")
    for name, actual, plain, exact in zip(names, *three_forms(shape, unbiased, offset), strict=True):
        scale, error = exact.abs().max().clamp_min(1e-6), (actual - exact).abs().max()
        assert error <= 2e-6 * scale + 2 * (plain - exact).abs().max(), name
        assert not offset or error <= 4 * offset * torch.finfo(torch.float32).eps * scale, name


def norm_and_tokens(grid=(3, 5), dim=24, heads=3, **options):
    torch.manual_seed(0)
    layer_options = {name: options.pop(name) for name in ("eps", "affine", "prefix_tokens") if name in options}
    norm = DynamicTokenNorm(dim, heads, grid, mixing=TokenMixing(**options), **layer_options)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return norm, torch.randn(2, grid[0] * grid[1] + norm.prefix_tokens, dim, requires_grad=True)


def results(norm, x):
    y = norm(x)
    return [y, *torch.autograd.grad(y.float().pow(3).sum(), [x, *norm.parameters()])]


def close(actual, expected, tolerance=1e-5):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance * max(1, b.abs().max().item()), rtol=0)


@pytest.fixture
def calls(monkeypatch):
    """Which of the native functions run: whether it is backward."""
    counted, real = [], dynamic_token.function
    hear = lambda file, name, types: counted.append("backward" in name) or real(file, name, types)  # noqa: E731
    monkeypatch.setattr(dynamic_token, "function", hear)
    return counted


@pytest.mark.parametrize(
    "options", [{}, {"prefix_tokens": 2}, {"variant": "released"}, {"affine": False}, {"window": 3}], ids=str
)
def test_the_layer_uses_it_forward_and_backward(options, calls, monkeypatch):
    norm, x = norm_and_tokens(**options)
    actual = results(norm, x)
    assert calls == [False, True]
    monkeypatch.setattr(native, "library", lambda name: None)
    close(actual, results(norm, x))
    assert calls == [False, True]


def test_a_value_that_is_no_number_is_not_hidden_and_memory_may_have_any_order(calls):
    norm, x = norm_and_tokens()
    strange = x.detach().mT.contiguous().mT.requires_grad_()
    close(results(norm, strange), results(norm, x), 0)
    ones = torch.autograd.grad(norm(x).sum(), x)  # an expanded gradient
    close(ones, torch.autograd.grad(norm(x), x, torch.ones_like(x)), 0)
    assert len(calls) == 8
    x.data[0, 4, 5] = torch.nan
    y = norm(x)
    assert y[0, 4].isnan().all()
    assert y[1].isfinite().all()


def test_other_numbers_take_the_python_form(calls):
    norm, x = norm_and_tokens()
    copy.deepcopy(norm).double()(x.double())
    copy.deepcopy(norm).to("meta")(x.to("meta"))
    norm(x.detach().as_subclass(type("Other", (torch.Tensor,), {})))
    assert calls == []
    y = norm(x.bfloat16())  # statistics in float32, and so in the native form
    assert (y.dtype, calls) == (torch.bfloat16, [False])


def test_the_number_of_threads_changes_nothing():
    (inputs, cotangent), layout = values((4, 5, 6, 96, 3)), MixingLayout((5, 6), 3, EPS)
    before, by_threads = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            by_threads.append(with_gradients(lambda *tensors: separable_norm(*tensors, layout), inputs, cotangent))
    finally:
        torch.set_num_threads(before)
    for other in by_threads[1:]:
        close(other, by_threads[0], 0)


@pytest.mark.parametrize("way", ["compile", "export", "strict export"])
def test_it_is_part_of_a_compiled_graph_and_an_exported_one_runs_anywhere(way, calls):
    norm, x = norm_and_tokens(prefix_tokens=1)
    torch._dynamo.reset()
    if way == "compile":
        expected = results(norm, x)
        close(results(torch.compile(norm, fullgraph=True, backend="aot_eager"), x), expected)
        assert calls == [False, True] * 2
    else:
        expected = norm(x).detach()
        exported = torch.export.export(norm.eval(), (x.detach(),), strict=way == "strict export")
        assert not [node for node in exported.graph.nodes if "vitmods" in str(node.target)]
        close([exported.module()(x.detach())], [expected])
        assert calls == [False]


def test_transforms_and_dispatch_modes_see_single_operations(calls):
    from torch.utils.flop_counter import FlopCounterMode

    norm, x = norm_and_tokens()
    slow = copy.deepcopy(norm).double()
    x = x.detach()
    expected = torch.autograd.functional.jacobian(slow, x.double()).float()
    close([torch.func.jacrev(norm)(x)], [expected], 1e-4)
    close([torch.func.vmap(norm)(x[None])], [norm(x)[None]])
    with FlopCounterMode(display=False) as counter:
        norm(x)
    assert counter.get_total_flops() == 2 * 2 * x.numel() * (3 + 5)
    assert calls == [False]  # the plain call above


def test_gradients_of_gradients(calls):
    norm, x = norm_and_tokens()
    [grad] = torch.autograd.grad(norm(x).pow(3).sum(), x, create_graph=True)
    assert calls == [False]  # the first derivative is a graph of single operations
    actual = torch.autograd.grad(grad.square().sum(), [x, *norm.parameters()])
    slow = copy.deepcopy(norm).double()
    wide = x.detach().double().requires_grad_()
    [grad] = torch.autograd.grad(slow(wide).pow(3).sum(), wide, create_graph=True)
    exact = torch.autograd.grad(grad.square().sum(), [wide, *slow.parameters()])
    for a, b in zip(actual, exact, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-4 * b.abs().max().item(), rtol=0)


def test_checkpointing_and_what_is_kept(calls):
    norm, x = norm_and_tokens()
    expected = results(norm, x)
    y = checkpoint(norm, x, use_reentrant=False)
    close([y, *torch.autograd.grad(y.pow(3).sum(), [x, *norm.parameters()])], expected, 0)
    assert calls == [False, True, False, False, True]
    inputs, _ = values((2, 14, 14, 128, 2))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        separable_norm(*[t.requires_grad_() for t in inputs], MixingLayout((14, 14), 2, EPS))
    assert sum(t.nbytes for t in kept) == sum(t.nbytes for t in inputs)


def test_operators_are_sound_and_frozen_inputs_get_no_gradient(calls):
    (x, px, py, mix, weight, bias), cotangent = values((2, 3, 4, 24, 2))
    inputs = x, px, py, *mix, weight
    torch.library.opcheck(torch.ops.vitmods.dynamic_token_norm.default, (*inputs, bias, EPS, False))
    torch.library.opcheck(torch.ops.vitmods.dynamic_token_norm_backward.default, (cotangent, *inputs, EPS, True))
    norm, x = norm_and_tokens()
    expected = results(norm, x)
    norm.a.requires_grad_(False)
    norm.bias.requires_grad_(False)
    norm(x.detach()).pow(3).sum().backward()
    assert x.grad is norm.a.grad is norm.bias.grad is None
    close([norm.weight.grad], [expected[1 + [n for n, _ in norm.named_parameters()].index("weight") + 1]])
