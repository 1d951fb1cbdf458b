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

HEADS, DIM, GRID = 2, 8, (3, 4)
MODEL = {"num_heads": HEADS, "grid_size": GRID, "prefix_tokens": 1}
KINDS = list(NORMS.values())
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


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
    assert set(kind.options).isdisjoint({"dim", "eps", "affine", "device", "dtype", *kind.takes})


@kinds
def test_it_is_exported(kind):
    assert getattr(layers, kind.module.__name__) is kind.module
    assert kind.module.__name__ in layers.__all__


@kinds
def test_shapes_and_types(kind):
    norm, x = make(kind), tokens()
    assert norm(x).shape == x.shape
    assert norm.eval()(x.bfloat16()).dtype == torch.bfloat16
    exact = copy.deepcopy(norm).double()(x.double())
    assert exact.dtype == torch.float64
    rough = norm.bfloat16()(x.bfloat16())
    torch.testing.assert_close(rough.double(), exact, atol=0.06, rtol=0.06)


@kinds
def test_who_reads_whom_is_as_it_says(kind):
    norm, x = make(kind).train(), tokens()
    other = x.clone()
    other[0, 5, 0] += 1
    moved = (norm(other) - norm(x)).abs().amax(-1) > 1e-6
    assert moved[0, 5]
    assert bool(moved[0].sum() > 1) == (not kind.token_wise) == (not norm.token_wise)
    if norm.token_wise:
        assert torch.equal(norm(x)[:, 1:3], norm(x[:, 1:3]))
    assert bool(moved[1:].any()) == (not norm.image_wise)


@kinds
def test_every_parameter_gets_a_gradient(kind):
    norm, x = make(kind), tokens().requires_grad_()
    norm(x).square().sum().backward()
    assert x.grad.isfinite().all()
    for name, parameter in norm.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


@kinds
def test_parameters_start_anew(kind):
    norm, fresh = make(kind), kind.factory(1e-5, True, {}, **MODEL)(DIM)
    torch.manual_seed(2)
    norm.reset_parameters()
    for (name, value), start in zip(norm.named_parameters(), fresh.parameters(), strict=True):
        if name != "a":  # drawn at random
            assert torch.equal(value, start), name


@kinds
def test_copies_and_a_compiled_graph_are_the_norm(kind):
    norm, x = make(kind).eval(), tokens()
    expected = norm(x)
    loaded = kind.factory(1e-5, True, {}, **MODEL)(DIM).eval()
    loaded.load_state_dict(norm.state_dict())
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm)), loaded):
        assert torch.equal(other(x), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(norm, fullgraph=True, backend="eager")(x), expected)


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
def test_unknown_options_are_refused_by_name(kind):
    with pytest.raises(UserError, match=f"norm '{kind.name}' has no option 'whatever'"):
        kind.check(True, {"whatever": 1})
    for name, hint in kind.options.items():
        if typing.get_origin(hint) is typing.Literal:
            with pytest.raises(UserError, match=f"cannot have {name}='nothing'"):
                kind.check(True, {name: "nothing"})
