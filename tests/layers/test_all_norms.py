"""What every norm owes, for every registered one: a new file in layers/norms is covered without being listed."""

import typing

import pytest
import torch

from vitmods import layers
from vitmods.layers.norms import NORMS
from vitmods.testing import NORM_CHECKS, NormCase, is_one_graph
from vitmods.util.errors import UserError

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


@every_norm
@pytest.mark.parametrize("promise", [promise for promise in NORM_CHECKS if promise != "it is one graph"])
def test_it_keeps_its_promises(promise, kind, options):
    NORM_CHECKS[promise](NormCase(kind, options))


@kinds
def test_it_is_a_public_name(kind):
    assert getattr(layers, kind.module.__name__) is kind.module
    assert kind.module.__name__ in layers.__all__


@every_norm
def test_autocast_does_not_round_statistics(kind, options):
    if kind.name == "whiten" or "pool" in options:
        pytest.skip("a matrix product, which autocast rounds")
    case = NormCase(kind, options)
    norm, x = case.trained().eval(), case.tokens
    expected = norm(x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(norm(x), expected)


def test_all_norms_are_one_graph():
    norms = torch.nn.ModuleList(NormCase(NORMS[name], options).trained() for name, options in OPTIONS).eval()

    class Each(torch.nn.Module):
        def forward(self, x):
            return torch.stack([norm(x) for norm in norms])

    each = Each()
    each.norms = norms
    is_one_graph(each, NormCase(NORMS["layer"], {}).tokens)


@kinds
def test_wrong_settings_are_refused_by_name(kind):
    with pytest.raises(UserError, match=f"norm '{kind.name}' does not have an option 'whatever'"):
        kind.check(True, {"whatever": 1})
    for name, hint in kind.options.items():
        if typing.get_origin(hint) is typing.Literal:
            with pytest.raises(UserError, match=f"cannot have {name}='nothing'"):
                kind.check(True, {name: "nothing"})
