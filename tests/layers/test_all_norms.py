"""What every norm owes, for every registered one: a new file in layers/norms is covered without being listed. Two
processes compute of a batch what one does."""

import os
import typing

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

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
    cases = [(name, options) for name, options in OPTIONS if not {"trade_off", "band"} & {*options}]
    norms = torch.nn.ModuleList(NormCase(NORMS[name], options).trained() for name, options in cases).eval()

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


OF_A_BATCH = ("batch", "power", "switchable")


def train(norm, batches):
    """Outputs and input gradients of each step, then the parameters' gradients and the state."""
    results = []
    for batch in batches:
        x = batch.clone().requires_grad_()
        y = norm(x)
        (y * torch.linspace(-1, 1, y.shape[-1], dtype=y.dtype) + y.pow(3)).sum().backward()
        results += [y.detach(), x.grad]
    return results, [p.grad for p in norm.parameters()], list(norm.buffers())


def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    batches = torch.load(os.path.join(folder, "batches.pt"))
    for name in OF_A_BATCH:
        local = [batch[4 * rank : 4 * rank + 4] for batch in batches]
        torch.save(train(NORMS[name].module(6).double(), local), os.path.join(folder, f"{name}{rank}.pt"))
    dist.destroy_process_group()


@pytest.mark.forks
def test_two_processes_are_one(tmp_path):
    """In outputs, gradients and state."""
    batches = [torch.randn(8, 5, 6, dtype=torch.float64) * 2 + 1 for _ in range(2)]
    torch.save(batches, tmp_path / "batches.pt")
    mp.start_processes(work, (str(tmp_path),), nprocs=2, start_method="fork")
    for name in OF_A_BATCH:
        together, parameters, state = train(NORMS[name].module(6).double(), batches)
        parts = [torch.load(tmp_path / f"{name}{rank}.pt") for rank in range(2)]
        found = [torch.cat([part[0][i] for part in parts]) for i in range(len(together))]
        found += [sum(part[1][i] for part in parts) for i in range(len(parameters))]
        torch.testing.assert_close(found, together + parameters, atol=1e-9, rtol=1e-9)
        for part in parts:
            torch.testing.assert_close(part[2], state, atol=1e-9, rtol=1e-9)
