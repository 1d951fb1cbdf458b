"""Every norm of layers/norms against its equation written out slowly in float64, and its contract."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitmods.layers import LayerNorm, RMSNorm, ScaleShift
from vitmods.layers.norms import PowerNorm

EPS = 1e-3  # large, so that a forgotten or misplaced eps is seen


def slow_layer_norm(x, weight, bias):
    mean = sum(x) / len(x)
    variance = sum((v - mean) ** 2 for v in x) / len(x)
    return torch.stack([(v - mean) / (variance + EPS) ** 0.5 for v in x]) * weight + bias


def slow_rms_norm(x, weight, bias):
    return torch.stack([v / (sum(u * u for u in x) / len(x) + EPS) ** 0.5 for v in x]) * weight


def slow_scale_shift(x, weight, bias):
    return torch.stack([v * w + b for v, w, b in zip(x, weight, bias, strict=True)])


NORMS = {
    "layer": (partial(LayerNorm, eps=EPS), slow_layer_norm),
    "rms": (partial(RMSNorm, eps=EPS), slow_rms_norm),
    "scale_shift": (ScaleShift, slow_scale_shift),
}


def make(name, dim=6, dtype=torch.float64):
    torch.manual_seed(0)
    norm = NORMS[name][0](dim).to(dtype)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    return norm


@pytest.mark.parametrize("shape", [(2, 3, 6), (2, 2, 3, 6), (1, 6)], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_equation(name, shape):
    norm, slow = make(name), NORMS[name][1]
    x = torch.randn(shape, dtype=torch.float64) * 3 + 1
    rows = [slow(row, norm.weight, getattr(norm, "bias", None)) for row in x.reshape(-1, 6)]
    torch.testing.assert_close(norm(x), torch.stack(rows).reshape(shape), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", NORMS)
def test_gradients(name):
    norm = make(name)
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    parameters = dict(norm.named_parameters())

    def function(x, *values):
        return torch.func.functional_call(norm, dict(zip(parameters, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, (x, *parameters.values()))


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_without_gain_and_bias(kind):
    norm = kind(6, eps=EPS, affine=False)
    assert not list(norm.parameters())
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    slow = slow_layer_norm if kind is LayerNorm else slow_rms_norm
    expected = torch.stack([slow(row, torch.ones(6), torch.zeros(6)) for row in x])
    torch.testing.assert_close(norm(x), expected, atol=1e-12, rtol=0)
    assert torch.autograd.gradcheck(norm, (x,))


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm, ScaleShift])
def test_fresh_parameters_are_ones_and_zeros(kind):
    norm = kind(5)
    torch.nn.init.constant_(norm.weight, 7.0)
    norm.reset_parameters()
    assert (norm.weight == 1).all()
    assert not getattr(norm, "bias", torch.zeros(())).any()


@pytest.mark.parametrize(
    ("dtype", "parameters"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize("name", NORMS)
def test_half_types_come_out_as_they_go_in_with_float32_statistics(name, dtype, parameters):
    """1024 values near 100: squares and sums of bfloat16 numbers would be off by far more than one rounding."""
    norm = make(name, 1024, parameters).requires_grad_(False)
    x = (torch.randn(4, 1024) * 0.5 + 100).to(dtype)
    y = norm(x)
    assert y.dtype == dtype
    step = torch.finfo(dtype).eps if parameters is torch.float32 else torch.finfo(torch.bfloat16).eps
    expected = copy.deepcopy(norm).double()(x.double())
    assert float((y.double() - expected).abs().max()) <= 3 * step * float(expected.abs().max())


@pytest.mark.parametrize("name", NORMS)
def test_autocast_keeps_the_type_and_gives_gradients(name):
    norm = make(name, 8, torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 3, 8, dtype=dtype, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = norm(x)
        assert y.dtype == dtype
        y.sum().backward()
        assert x.grad.dtype == dtype
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in norm.parameters())


finite = st.floats(-5, 5, allow_subnormal=False)


@settings(deadline=None, max_examples=50)
@given(st.lists(finite, min_size=4, max_size=4), finite, st.floats(0.01, 100))
def test_invariances(values, shift, scale):
    """LayerNorm forgets shift and scale, RMSNorm scale alone; exact up to eps."""
    x = torch.tensor([values], dtype=torch.float64)
    spread = float(x.var(correction=0))
    if spread > 1e-3:
        layer = LayerNorm(4, eps=1e-14).double()
        torch.testing.assert_close(layer(x + shift), layer(x), atol=1e-7, rtol=0)
        torch.testing.assert_close(layer(x * scale), layer(x), atol=1e-7, rtol=0)
        torch.testing.assert_close(layer(x).square().mean(), torch.ones((), dtype=torch.float64), atol=1e-7, rtol=0)
    if float(x.square().mean()) > 1e-3:
        rms = RMSNorm(4, eps=1e-14).double()
        torch.testing.assert_close(rms(x * scale), rms(x), atol=1e-7, rtol=0)
        torch.testing.assert_close(rms(-x), -rms(x), atol=0, rtol=0)
        torch.testing.assert_close(rms(x).square().mean(), torch.ones((), dtype=torch.float64), atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", NORMS)
def test_constant_and_zero_tokens_stay_finite(name):
    norm = make(name)
    for value in (0.0, 1.0, 1e30):
        x = torch.full((1, 6), value, dtype=torch.float64, requires_grad=True)
        y = norm(x)
        y.sum().backward()
        assert y.isfinite().all()
        assert x.grad.isfinite().all()


def test_rms_norm_keeps_its_input_and_one_number_a_token():
    norm, sizes = RMSNorm(64), []
    x = torch.randn(2, 8, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        norm(x)
    assert sorted(sizes) == [2 * 8, 64, x.numel()]


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("eps", [0.0, -1e-6])
def test_eps_is_positive(kind, eps):
    with pytest.raises(ValueError, match="eps must be positive"):
        kind(6, eps=eps)


@pytest.mark.parametrize("norm", [RMSNorm(6), PowerNorm(6).eval(), PowerNorm(6, affine=False).eval()], ids=str)
def test_tokens_of_another_width(norm):
    with torch.no_grad(), pytest.raises(ValueError, match="6 channels and the input 9"):
        norm(torch.randn(2, 4, 9))
