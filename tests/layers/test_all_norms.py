"""What every norm owes, for every registered one: a new file in layers/norms is covered without being listed."""

import copy
import inspect
import pickle
import typing

import pytest
import torch

from vitmods import layers
from vitmods.layers.norms import NORMS
from vitmods.util.errors import UserError

HEADS, DIM, GRID = 2, 8, (2, 4)
MODEL = {"num_heads": HEADS, "grid_size": GRID, "prefix_tokens": 1}
KINDS = list(NORMS.values())
OPTIONS = [
    *((name, {}) for name in NORMS),
    ("scale", {"gain": "scalar"}),
    ("switchable", {"batch": False}),
    ("dynamic_token", {"variant": "released"}),
    ("dynamic_token", {"kernel": "uniform"}),
    ("dynamic_token", {"trade_off": 0.0}),
    ("dynamic_token", {"band": 3}),
    ("dynamic_token", {"window": 3}),
    ("dynamic_token", {"pool": 2}),
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
every_norm = pytest.mark.parametrize(
    ("kind", "options"), [(NORMS[name], o) for name, o in OPTIONS], ids=map(str, OPTIONS)
)
pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics from")


def make(kind, affine=True, **options):
    """A norm of a trained model."""
    torch.manual_seed(0)
    norm = kind.factory(1e-5, affine, options, **MODEL)(DIM)
    for name, parameter in norm.named_parameters():
        torch.nn.init.normal_(parameter, float(name == "weight"), 0.2)
    return norm


def tokens(batch=8, **options):
    length = MODEL["prefix_tokens"] + GRID[0] * GRID[1]
    return torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(1), **options)


@kinds
def test_its_facts_are_filled_in(kind):
    for fact in ("title", "paper", "url", "how", "published"):
        assert getattr(kind, fact).strip() == getattr(kind, fact) != "", fact
    assert kind.url.startswith("https://")
    assert kind.least_tokens >= 1
    assert bool(kind.shorts) == kind.replaces
    assert inspect.getdoc(kind.module)
    assert getattr(layers, kind.module.__name__) is kind.module
    assert kind.module.__name__ in layers.__all__
    assert set(kind.options).isdisjoint({"dim", "eps", "affine", "device", "dtype", *kind.takes})


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
@every_norm
def test_half_types_come_out_as_they_go_in_with_float32_statistics(kind, options, dtype, weights):
    """Values near 20: squares and sums of half-precision numbers would be off by far more than one rounding."""
    norm = make(kind, **options).to(weights)
    x = (tokens() * 0.1 + 20).to(dtype).requires_grad_()
    expected = copy.deepcopy(norm).double()(x.detach().double()).detach()
    y = norm(x)
    assert (y.dtype, y.shape, expected.dtype) == (dtype, x.shape, torch.float64)
    step = torch.finfo(torch.bfloat16).eps
    assert float((y.detach().double() - expected).abs().max()) <= 3 * step * float(expected.abs().max())
    y.float().square().sum().backward()
    assert x.grad.dtype == dtype
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() and p.grad.dtype == weights for p in norm.parameters())
    assert norm.eval()(x).dtype == dtype


@every_norm
def test_autocast_changes_nothing(kind, options):
    norm, x = make(kind, **options).eval(), tokens().requires_grad_()
    inputs = [x, *norm.parameters()]
    plain = [norm(x), *torch.autograd.grad(norm(x).pow(3).sum(), inputs)]
    with torch.autocast("cpu", torch.bfloat16):
        cast = [norm(x), *torch.autograd.grad(norm(x).pow(3).sum(), inputs)]
        assert norm(x.bfloat16()).dtype == torch.bfloat16
    is_matrix_product = kind.name == "whiten" or "pool" in options
    torch.testing.assert_close(cast, plain, atol=0.05 * is_matrix_product, rtol=0.05 * is_matrix_product)


@every_norm
def test_constant_tokens_stay_finite(kind, options):
    """The variance of equal values is 0, not a little less."""
    norm = make(kind, **options)
    norm.eps = 1e-12
    for value in (0.0, 0.1, 1e3):
        x = torch.full_like(tokens(), value, requires_grad=True)
        y = norm(x)
        y.sum().backward()
        assert y.isfinite().all()
        assert x.grad.isfinite().all()


@every_norm
def test_who_reads_whom_is_as_it_says(kind, options):
    norm, x = make(kind, **options).train(), tokens()
    other = x.clone()
    other[0, 5, 0] += 1
    moved = (norm(other) - norm(x)).abs().amax(-1) > 1e-6
    assert moved[0, 5]
    assert bool(moved[0].sum() > 1) == (not kind.token_wise) == (not norm.token_wise)
    if norm.token_wise:
        assert torch.equal(norm(x)[:, 1:3], norm(x[:, 1:3]))
    assert bool(moved[1:].any()) == (not norm.image_wise)


@every_norm
def test_every_parameter_gets_a_gradient(kind, options):
    norm, x = make(kind, **options), tokens().requires_grad_()
    norm(x).square().sum().backward()
    assert x.grad.isfinite().all()
    for name, parameter in norm.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


@every_norm
def test_parameters_start_anew(kind, options):
    norm, fresh = make(kind, **options), kind.factory(1e-5, True, options, **MODEL)(DIM)
    torch.manual_seed(2)
    norm.reset_parameters()
    for (name, value), start in zip(norm.named_parameters(), fresh.parameters(), strict=True):
        if name != "a":  # drawn at random
            assert torch.equal(value, start), name
    with torch.device("meta"):
        shapes = kind.factory(1e-5, True, options, **MODEL)(DIM).bfloat16()
        assert all(p.is_meta for p in shapes.parameters())
        if kind.name != "whiten":
            assert shapes(torch.empty(8, 9, DIM)).shape == (8, 9, DIM)


@every_norm
def test_copies_are_the_norm(kind, options):
    norm, x = make(kind, **options).eval(), tokens()
    expected = norm(x)
    loaded = kind.factory(1e-5, True, options, **MODEL)(DIM).eval()
    loaded.load_state_dict(norm.state_dict())
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm)), loaded):
        assert torch.equal(other(x), expected)
        assert str(other) == str(norm)
    torch.testing.assert_close(norm.state_dict(), loaded.state_dict())  # evaluation gathers nothing


def test_a_graph_of_all_norms_compiles_and_exports():
    norms, x = torch.nn.ModuleList(make(NORMS[name], **options) for name, options in OPTIONS).eval(), tokens()

    class Each(torch.nn.Module):
        def forward(self, x):
            return [norm(x) for norm in norms]

    each = Each()
    each.norms, expected = norms, [norm(x) for norm in norms]
    torch._dynamo.reset()
    compiled = torch.compile(each, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(torch.export.export(each, (x,)).module()(x), expected)


@kinds
def test_a_gain_and_a_shift_that_fold_are_its_last_step(kind):
    """What folding for inference rests on."""
    if not kind.folds:
        pytest.skip("it does not fold")
    norm, x = make(kind).eval(), tokens()
    bare = make(kind, affine=False).eval()
    bare.load_state_dict({n: v for n, v in norm.state_dict().items() if n not in ("weight", "bias")})
    unit = kind.unit(DIM)
    bias = getattr(norm, "bias", None)
    assert (bias is not None) == kind.biased
    expected = bare(x) * norm.weight / unit + (0 if bias is None else bias)
    torch.testing.assert_close(norm(x), expected)


@kinds
def test_wrong_settings_are_refused_by_name(kind):
    for eps in (0.0, -1e-5) if "eps" in kind.arguments else ():
        with pytest.raises(ValueError, match="eps must be positive"):
            kind.factory(eps, True, {}, **MODEL)(DIM)
    with pytest.raises(UserError, match=f"norm '{kind.name}' does not have an option 'whatever'"):
        kind.check(True, {"whatever": 1})
    for name, hint in kind.options.items():
        if typing.get_origin(hint) is typing.Literal:
            with pytest.raises(UserError, match=f"cannot have {name}='nothing'"):
                kind.check(True, {name: "nothing"})
