"""The layer around the separable form: its settings, numbers that are hard to hold, its contract and its errors."""

import copy
import pickle
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from vitmods.layers import DynamicTokenNorm, TokenMixing
from vitmods.layers.norms import dynamic_token
from vitmods.ops import separable

GRID, DIM, HEADS, EPS = (3, 4), 12, 3, 1e-3


def build(grid=GRID, dim=DIM, heads=HEADS, **options):
    """Options of the mixture by their names."""
    mixing = TokenMixing(**{f.name: options.pop(f.name) for f in fields(TokenMixing) if f.name in options})
    return DynamicTokenNorm(dim, heads, grid, mixing=mixing, **options)


def make(grid=GRID, dim=DIM, heads=HEADS, dtype=torch.float64, **options):
    """A norm with random parameters."""
    torch.manual_seed(0)
    norm = build(grid, dim, heads, **({"eps": EPS, "dtype": dtype} | options))
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return norm


def tokens(*shape, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (2, 12, DIM)), dtype=torch.float64, generator=generator).to(dtype)


def layer_norm(norm, x):
    return F.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, norm.eps)


def instance_norm(norm, x):
    """Over the tokens of each channel, biased."""
    mean, var = x.mean(1, keepdim=True), x.var(1, unbiased=False, keepdim=True)
    return (x - mean) / torch.sqrt(var + norm.eps) * norm.weight + norm.bias


def same(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


# Table 5, and other settings


def test_special_cases_are_layer_norm_and_instance_norm():
    norm = make(trade_off=1.0)
    assert {name for name, _ in norm.named_parameters()} == {"weight", "bias"}
    same(norm(tokens()), layer_norm(norm, tokens()))
    norm = make(trade_off=0.0, kernel="uniform")
    assert {name for name, _ in norm.named_parameters()} == {"weight", "bias"}
    same(norm(tokens()), instance_norm(norm, tokens()))
    norm = build(lambda_init=0.999, dtype=torch.float64)
    assert (norm(tokens()) - layer_norm(norm, tokens())).abs().max() < 0.02


@pytest.mark.parametrize(
    ("options", "omegas"),
    [
        ({"trade_off": 0.0}, {"omega_mean": 0.0, "omega_var": 0.0}),
        ({"trade_off": 0.5}, {"omega_mean": 0.5, "omega_var": 0.5}),
        ({"statistics": "mean"}, {"omega_var": 1.0}),
        ({"statistics": "variance"}, {"omega_mean": 1.0}),
    ],
    ids=str,
)
def test_a_fixed_lambda_is_a_learned_one_that_stands_there(options, omegas):
    """Rows (c) and (d); mean or variance alone look across tokens."""
    fixed, learned = make(**options), make()
    assert all(getattr(fixed, name) is None for name in omegas)
    learned.load_state_dict(fixed.state_dict(), strict=False)
    for name, value in omegas.items():
        getattr(learned, name).data.fill_(torch.logit(torch.tensor(value, dtype=torch.float64)))
    same(fixed(tokens()), learned(tokens()))


def test_the_last_row_is_the_default():
    assert {name for name, _ in make().named_parameters()} == {"weight", "bias", "a", "omega_mean", "omega_var"}
    mixes = DynamicTokenNorm(DIM, HEADS).lambdas()
    assert all(torch.equal(mix, torch.full((HEADS,), 0.5)) for mix in mixes)


def with_matrix(norm, x, p):
    """Equations 4 and 5 with P as a T x T matrix, the same for all heads, and lambda 0."""
    m, q = p @ x, p @ x.square()
    return (x - m) / torch.sqrt(q - m.square() + norm.eps) * norm.weight + norm.bias


def places(grid):
    return torch.cartesian_prod(*(torch.arange(side) for side in grid)).view(-1, len(grid)).mT


@pytest.mark.parametrize("width", [1, 3, 5, 99])
@pytest.mark.parametrize("kind", ["band", "window"])
def test_a_band_is_of_the_sequence_and_a_window_of_the_grid(kind, width):
    """Figure 4: P has ``width`` diagonals. A window is a square of tokens on the grid."""
    norm, x = make(trade_off=0.0, **{kind: width}), tokens()
    place = places((12,)) if kind == "band" else places(GRID)
    near = ((place[:, None] - place[:, :, None]).abs().amax(0) <= (width - 1) / 2).double()
    same(norm(x), with_matrix(norm, x, near / near.sum(1, keepdim=True)), atol=1e-10)
    assert norm.a is None


def test_whole_offsets_give_each_head_one_neighbor():
    """Halves, as equation 7 has them for an even side, leave each kernel's maximum to several tokens."""
    for offsets, ties, side in (("centered", 4, 2), ("whole", 1, 2), ("centered", 1, 3), ("whole", 1, 3)):
        norm = build((9, 9), 36, side * side, offsets=offsets, dtype=torch.float64)
        px, py = norm.kernels((9, 9))
        middle = torch.einsum("hr,hc->hrc", py[:, 4], px[:, 4]).flatten(1)
        assert torch.isclose(middle, middle.amax(1, keepdim=True)).sum(1).tolist() == [ties] * side * side
    peaks = build((9, 9), 36, 4, offsets="whole").a.detach()[:, 1:] / 2
    assert sorted(peaks.tolist()) == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert (build(9, 8, 4, offsets="whole").a[:, 1] / 2).tolist() == [-1, 0, 1, 2]


@pytest.mark.parametrize("options", [{"kernel": "uniform"}, {"band": 3}, {"window": 3}, {"trade_off": 1.0}], ids=str)
def test_without_parameters_type_and_device_are_those_of_the_input(options):
    options = {"trade_off": 0.0} | options
    norm = build(affine=False, **options)
    assert not list(norm.parameters())
    y, on_meta = norm(tokens()), norm(tokens().to("meta"))
    assert (on_meta.dtype, on_meta.device.type) == (torch.float64, "meta")
    assert torch.equal(y, build(**options, dtype=torch.float64)(tokens()))


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_pooling_by_one_changes_nothing_and_by_more_shares_statistics(variant):
    plain, pooled = make((4, 4), variant=variant), make((4, 4), variant=variant, pool=2)
    x = tokens(2, 4, 4, DIM)
    blocks = x[:, ::2, ::2].repeat_interleave(2, 1).repeat_interleave(2, 2)  # all tokens of a pool are equal
    small = make((2, 2), variant=variant)(x[:, ::2, ::2])
    same(pooled(blocks), small.repeat_interleave(2, 1).repeat_interleave(2, 2))
    assert (pooled(x) - plain(x)).abs().max() > 1e-3


# Shapes


def test_prefix_tokens_get_layer_norm_and_lend_nothing():
    norm = make(prefix_tokens=2)
    x = tokens(2, 14, DIM)
    y, changed = norm(x), norm(torch.cat([x[:, :2] * 100, x[:, 2:]], dim=1))
    same(y[:, :2], layer_norm(norm, x[:, :2]))
    same(y[:, 2:], make()(x[:, 2:]))
    same(changed[:, 2:], y[:, 2:], atol=0)


def test_grids_of_images_and_sequences():
    norm = make(grid=None)
    x = tokens(2, 5, 2, DIM)
    same(norm(x), make((5, 2))(x.flatten(1, 2)).view(x.shape), atol=0)
    same(norm(x.mT.contiguous().mT), norm(x))
    same(make(grid=None)(tokens()), make(12)(tokens()), atol=0)
    peaks = DynamicTokenNorm(8, 4, 9).a.detach()
    assert peaks.tolist() == [[-1, 2 * d, 0] for d in (-1.5, -0.5, 0.5, 1.5)]
    norm = make()
    norm.grid_size = (2, 6)
    same(norm(tokens()), make((2, 6))(tokens()), atol=0)


# Numbers


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("offset", [1e2, 1e3])
def test_large_offsets_keep_their_digits(offset, variant):
    """An offset that the tokens share, larger than their spread by as much; lambda 0 leans on the difference alone."""
    exact = make(variant=variant, trade_off=0.0, eps=1e-5)
    x = (tokens() + offset * tokens(DIM, seed=2)).float()
    actual, expected = copy.deepcopy(exact).float()(x), exact(x.double())
    assert actual.isfinite().all()
    error, scale = (actual - expected).abs().max(), expected.abs().max()
    assert error <= (1e-6 if variant == "paper" else 1e-4) * scale  # the released code divides by the offset first


@pytest.mark.parametrize("form", ["function", "composed", "pooled"])
def test_flat_parts_far_from_each_other_stay_finite(form, monkeypatch):
    """The variance within a part is 0 and that of the image large: nothing may round below 0."""
    if form == "composed":
        monkeypatch.setattr(dynamic_token, "separable_norm", separable.composed)
    norm = make((12, 2), trade_off=0.0, dtype=torch.float32, eps=1e-6, pool=2 if form == "pooled" else 1)
    norm.a.data.copy_(torch.tensor([-6.0, 0.1, 0.2]))
    x = 1000 * tokens(1, 2, DIM, dtype=torch.float32).repeat_interleave(12, 1)
    y = norm(x.requires_grad_())
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("prefix", [0, 1])
def test_half_precision_has_float32_statistics(dtype, prefix):
    """Values whose squares overflow float16; the result is float32's, rounded once."""
    norm = make(prefix_tokens=prefix, dtype=torch.float32).to(dtype)
    x = (tokens(2, 12 + prefix, DIM) * 300 + 300).to(dtype)
    y, exact = norm(x), copy.deepcopy(norm).double()(x.double())
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, atol=1e-5, rtol=torch.finfo(dtype).eps / 2)
    y.float().square().mean().backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in norm.parameters())


@settings(max_examples=10)
@given(
    shifts=st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=DIM, max_size=DIM),
    scale=st.floats(1e-2, 1e4),
    seed=st.integers(0, 100),
)
def test_shifts_and_scales_that_change_nothing(shifts, scale, seed):
    """A shift of all values moves each statistic along; one of each channel those across tokens alone."""
    x, shifts = tokens(seed=seed), torch.tensor(shifts, dtype=torch.float64)
    for norm, other in (
        (make(), x + shifts[0]),
        (make(trade_off=0.0), x + shifts),
        (make(eps=1e-18), x * scale),
    ):
        same(norm(other), norm(x), atol=1e-9)


@settings(max_examples=5)
@given(order=st.permutations(range(12)))
def test_tokens_may_change_places_only_under_a_uniform_kernel(order):
    uniform, local, x = make(kernel="uniform"), make(), tokens()
    same(uniform(x[:, order]), uniform(x)[:, order])
    if list(order) != list(range(12)):
        assert (local(x[:, order]) - local(x)[:, order]).abs().max() > 1e-6


# Kernels are made once in evaluation


def test_kernels_are_kept_in_evaluation(monkeypatch):
    norm, calls, real = make(), [], dynamic_token.axis_kernels
    monkeypatch.setattr(dynamic_token, "axis_kernels", lambda a, grid: calls.append(grid) or real(a, grid))
    with torch.no_grad():
        for _ in range(3):
            norm(tokens())
        assert len(calls) == 1
        norm(tokens(1, 2, 3, DIM))
        assert calls == [(3, 4), (2, 3)]
    norm(tokens())
    assert len(calls) == 3  # with gradients they are made for each forward


def step(norm):
    optimizer = torch.optim.AdamW(norm.parameters(), lr=0.1)
    norm(tokens()).square().sum().backward()
    optimizer.step()


CHANGES = {
    "step": step,
    "load": lambda norm: norm.load_state_dict({name: value + 0.1 for name, value in norm.state_dict().items()}),
    "fill": lambda norm: torch.nn.init.constant_(norm.a, 0.1),
    "replace": lambda norm: setattr(norm, "a", torch.nn.Parameter(norm.a.detach() + 0.1)),
    "narrow": torch.nn.Module.float,
    "swap data": lambda norm: setattr(norm.a, "data", norm.a.data + 0.1),
    "write data": lambda norm: norm.a.data.add_(0.1),  # as averages of weights do
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES)
def test_kernels_follow_a_parameter_that_changes(change, mode):
    norm = make()
    with mode():
        before = norm(tokens())
    CHANGES[change](norm)
    dtype = norm.weight.dtype
    with mode():
        after = norm(tokens(dtype=dtype))
    fresh = make(dtype=dtype)
    fresh.load_state_dict(norm.state_dict())
    assert torch.equal(after, fresh(tokens(dtype=dtype)))
    assert not torch.equal(before, after)


def test_kernels_kept_for_inference_do_not_reach_training():
    norm = make()
    with torch.inference_mode():
        norm(tokens())
    norm(tokens()).sum().backward()
    assert norm.a.grad is not None
    with torch.inference_mode():
        norm = make()
        first = norm(tokens())
        assert torch.equal(norm(tokens()), first)
    same(first, make()(tokens()))


# Tools


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda norm: pickle.loads(pickle.dumps(norm))])
def test_copies(twin):
    norm = make()
    with torch.no_grad():
        expected = norm(tokens())  # fills what is kept
        other = twin(norm)
        assert torch.equal(other(tokens()), expected)
        other.a.add_(1)
        assert not torch.equal(other(tokens()), expected)
        assert torch.equal(norm(tokens()), expected)


# Errors


SETTINGS = [
    ({"heads": 5}, "5 heads do not divide 12"),
    ({"heads": 0}, "heads"),
    ({"trade_off": 1.5}, "between 0 and 1"),
    ({"band": 2}, "odd"),
    ({"band": 0}, "odd"),
    ({"pool": 0}, "1 .none. or more"),
    ({"lambda_init": 1.0}, "lambda_init"),
    ({"trade_off": 0.5, "lambda_init": 0.9}, "give one"),
    ({"variant": "official"}, "variant"),
    ({"init": "zeros"}, "init"),
    ({"kernel": "flat"}, "kernel"),
    ({"statistics": "var"}, "statistics"),
    ({"band": 3, "kernel": "uniform"}, "band"),
    ({"band": 3, "window": 3}, "window"),
    ({"window": 3, "pool": 2}, "pool"),
    ({"window": 4}, "odd"),
    ({"offsets": "half"}, "offsets"),
    ({"offsets": "whole", "init": "noise"}, "does not use offsets"),
    ({"offsets": "whole", "band": 3}, "learned kernel"),
    ({"init": "noise", "trade_off": 1.0}, "learned kernel"),
]
WRONG = f"takes .B, N, {DIM}. or"
SIZES = [
    *((shape, {}, WRONG) for shape in [(2, 12, DIM + 3), (2, 3, 4, DIM + 3), (12, DIM), (DIM,)]),
    ((12, DIM), {"affine": False}, WRONG),
    ((2, 13, DIM), {}, "13 tokens after 0 prefix tokens"),
    ((2, 12, DIM), {"pool": 2}, "cannot be pooled by 2"),
]


@pytest.mark.parametrize(("shape", "options", "match"), [*((None, *row) for row in SETTINGS), *SIZES], ids=str)
def test_settings_and_shapes_that_do_not_fit(shape, options, match):
    with pytest.raises(ValueError, match=match):
        build(**({"heads": HEADS} | options)) if shape is None else make(**options)(tokens(*shape))
