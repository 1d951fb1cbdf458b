"""Dynamic token statistics of sequences against whole T x T kernels, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vitmods.ops.sequence as sequence
from vitmods.layers.norms import DynamicTokenNorm
from vitmods.ops.separable import MixingLayout, axis_kernels, separable_norm

HEADS, WIDTH = 3, 12


def by_definition(x, a, mix_mean, mix_var, weight, bias, layout, padding=None):
    place = torch.arange(x.shape[1])
    d = (place - place[:, None]).to(x.dtype)
    logits = a[:, 0, None, None] * d * d + a[:, 1, None, None] * d
    logits = logits.expand(len(x), *logits.shape)
    if padding is not None:
        logits = logits.masked_fill(padding[:, None, None], -torch.inf)
    p, heads = logits.softmax(-1), x.unflatten(-1, (HEADS, -1))
    m, q = (torch.einsum("bhij,bjhd->bihd", p, z) for z in (heads, heads.square()))
    mean, var = x.mean(-1)[..., None, None], x.var(-1, unbiased=False)[..., None, None]
    lm, lv = mix_mean[:, None], mix_var[:, None]
    s2 = lv * var + (1 - lv) * (q - m * m).clamp_min(0) + layout.eps
    return ((heads - lm * mean - (1 - lm) * m) / s2.sqrt()).flatten(-2) * weight + bias


def arguments(length, a, dtype=torch.float64, batch=2):
    torch.manual_seed(0)
    a = torch.tensor([[quadratic, linear, 0.3] for quadratic, linear in a], dtype=dtype)
    x = torch.randn(batch, length, WIDTH, dtype=dtype) + 2
    mixes = torch.rand(2, HEADS, dtype=dtype)
    affine = torch.randn(2, WIDTH, dtype=dtype)
    return [t.requires_grad_() for t in (x, a, mixes[0], mixes[1], affine[0], affine[1])]


def ends(length, *counts):
    return torch.arange(length) >= torch.tensor([max(1, round(c * length)) for c in counts])[:, None]


KERNELS = {
    "local": [(-1.0, -7.0), (-1.0, 0.0), (-1.0, 7.0)],
    "wide": [(-0.01, 0.1), (-0.003, -0.2), (-0.03, 0.0)],
    "far": [(-0.5, 60.0), (-0.5, -250.0), (-2.0, 800.0)],  # peaks 60, -250 and 200 tokens away
    "no bell": [(0.001, -0.1), (0.0, 0.3), (0.5, 0.0)],
    "flat": [(0.0, 0.0), (-1e-9, 1e-4), (1e-9, 0.0)],
}


@pytest.mark.parametrize("some_padding", [False, True])
@pytest.mark.parametrize("length", [1, 70, 300])
@pytest.mark.parametrize("kernels", KERNELS)
def test_equals_the_definition(kernels, length, some_padding):
    values = arguments(length, KERNELS[kernels])
    layout, padding = MixingLayout((1, length), HEADS, 1e-3), ends(length, 0.2, 0.7) if some_padding else None
    read = 1.0 if padding is None else (~padding)[..., None].double()
    result = sequence.sequence_norm(*values, layout, padding)
    expected = by_definition(*values, layout, padding)
    assert result.isfinite().all()
    torch.testing.assert_close(result * read, expected * read)
    up = torch.randn_like(result) * read
    torch.testing.assert_close(
        torch.autograd.grad(result, values, up), torch.autograd.grad(expected, values, up), rtol=1e-6, atol=1e-8
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.floats(-30, 30), st.floats(-300, 300)), min_size=HEADS, max_size=HEADS),
    st.integers(1, 200),
    st.lists(st.booleans(), min_size=200, max_size=200),
)
def test_any_kernel_and_any_mask(kernels, length, mask):
    values = arguments(length, kernels, batch=1)
    padding = torch.tensor(mask[:length])[None]
    padding[0, length // 2] = False
    layout = MixingLayout((1, length), HEADS, 1e-2)
    result, expected = (form(*values, layout, padding) for form in (sequence.sequence_norm, by_definition))
    assert result.isfinite().all()
    torch.testing.assert_close(result[~padding], expected[~padding], rtol=1e-6, atol=1e-6)


def test_float32_keeps_its_digits_where_logits_are_large():
    values = arguments(400, KERNELS["far"])
    layout = MixingLayout((1, 400), HEADS, 1e-2)
    result = sequence.sequence_norm(*(v.detach().float() for v in values), layout)
    torch.testing.assert_close(result.double(), by_definition(*values, layout), rtol=1e-4, atol=1e-4)


def test_second_derivatives():
    values = arguments(80, KERNELS["local"], batch=1)
    layout, padding = MixingLayout((1, 80), HEADS, 1e-2), ends(80, 0.8)
    gradients = []
    for form in (sequence.sequence_norm, by_definition):
        out = form(*values, layout, padding)[:, :60].square().sum()
        first = torch.autograd.grad(out, values, create_graph=True)
        gradients.append(torch.autograd.grad(sum(g.square().sum() for g in first), values))
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-8)


def test_parts_that_are_made_again_give_the_same(monkeypatch):
    length = 300
    layout = MixingLayout((1, length), HEADS, 1e-2)
    kernels = [KERNELS["local"][0], KERNELS["wide"][0], KERNELS["no bell"][0]]
    results = []
    for numbers in (sequence.NUMBERS, 1 << 13):
        monkeypatch.setattr(sequence, "NUMBERS", numbers)
        values = arguments(length, kernels)
        out = sequence.sequence_norm(*values, layout)
        results.append((out, *torch.autograd.grad(out.square().sum(), values)))
    torch.testing.assert_close(*results)


def test_memory_grows_with_the_length_and_not_its_square():
    """A whole kernel of 3 heads and 3,000 tokens is 216 MB in float64."""
    values = arguments(3000, KERNELS["local"], batch=1)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        sequence.sequence_norm(*values, MixingLayout((1, 3000), HEADS, 1e-2)).sum().backward()
    assert max(sizes) <= 3000 * HEADS * (sequence.BLOCK + 60)


def test_a_long_sequence_takes_this_way_and_a_short_one_the_other():
    torch.manual_seed(0)
    norm = DynamicTokenNorm(WIDTH, HEADS)
    for length in (40, 700):
        x = torch.randn(2, length, WIDTH)
        mix = torch.stack(norm.lambdas()).detach()
        layout = MixingLayout((1, length), HEADS, norm.eps)
        expected = separable_norm(x, *axis_kernels(norm.a, (1, length)), mix, norm.weight, norm.bias, layout)
        torch.testing.assert_close(norm(x), expected, rtol=1e-4, atol=1e-5)
        assert ("SequenceNorm" in type(norm(x).grad_fn).__name__) == (length == 700)
