"""Norms that read other tokens: padding lends nothing, and a padded sequence is normalized as if it stood alone."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vitmods import layers as vml
from vitmods.layers.norms import NORMS
from vitmods.ops.padding import padded
from vitmods.util.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics from")
LENGTHS, T, C = (9, 5, 2), 9, 8
MASK = torch.arange(T) >= torch.tensor(LENGTHS)[:, None]
OF_AN_IMAGE = {
    "instance": lambda: vml.InstanceNorm(C),
    "group": lambda: vml.GroupNorm(C, groups=2),
    "switchable": lambda: vml.SwitchableNorm(C, batch=False),
    "dtn": lambda: vml.DynamicTokenNorm(C, 2),
    "dtn released": lambda: vml.DynamicTokenNorm(C, 2, mixing=vml.TokenMixing(variant="released")),
    "dtn variance": lambda: vml.DynamicTokenNorm(C, 2, mixing=vml.TokenMixing(statistics="variance")),
}
OF_A_BATCH = {
    "batch": lambda: vml.BatchNorm(C),
    "switchable of a batch": lambda: vml.SwitchableNorm(C),
    "power": lambda: vml.PowerNorm(C, warmup=2),
}
EACH = OF_AN_IMAGE | OF_A_BATCH


def drawn(seed=0):
    torch.manual_seed(seed)
    return torch.randn(len(LENGTHS), T, C, dtype=torch.double) * 2 + 1


def made(make):
    torch.manual_seed(1)
    norm = make().double()
    for p in norm.parameters():
        nn.init.normal_(p, 1.0 if p.ndim == 1 else -1.0, 0.3)
    return norm


def test_every_norm_that_mixes_tokens_is_here():
    covered = {type(make()) for make in EACH.values()}
    assert {kind.module for kind in NORMS.values() if not kind.token_wise} == covered


@pytest.mark.parametrize("name", OF_AN_IMAGE)
def test_a_sequence_is_normalized_as_if_it_stood_alone(name):
    norm, x = made(OF_AN_IMAGE[name]), drawn().requires_grad_()
    with padded(MASK):
        y = norm(x)
    assert y.isfinite().all()
    for i, length in enumerate(LENGTHS):
        torch.testing.assert_close(y[i, :length], norm(x[i : i + 1, :length])[0])
    up = torch.randn_like(y) * ~MASK[..., None]
    actual = torch.autograd.grad(y, [x, *norm.parameters()], up)
    alone = sum((norm(x[i : i + 1, :n]) * up[i, :n]).sum() for i, n in enumerate(LENGTHS))
    torch.testing.assert_close(actual, torch.autograd.grad(alone, [x, *norm.parameters()]))
    assert not actual[0][MASK].any()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", OF_A_BATCH)
def test_statistics_of_a_batch_are_of_the_tokens_that_are_no_padding(name, training):
    """What padding holds makes no difference, to outputs and to what is gathered."""
    norm = made(OF_A_BATCH[name]).train(training)
    results = []
    for filling in (0.0, 1e3):
        twin, x = copy.deepcopy(norm), drawn().masked_fill(MASK[..., None], filling)
        with padded(MASK):
            y = twin(x)
        assert y.isfinite().all()
        results.append((y[~MASK], {k: v for k, v in twin.state_dict().items() if k != "ema_gz"}))
    torch.testing.assert_close(*results)


def test_batch_norm_is_that_of_all_tokens_in_a_row_and_one_length_is_no_padding():
    norm, x = made(OF_A_BATCH["batch"]), drawn()
    other = copy.deepcopy(norm)
    with padded(MASK):
        y = norm(x)
    torch.testing.assert_close(y[~MASK], other(x[~MASK][None])[0])
    torch.testing.assert_close(norm.state_dict(), other.state_dict())
    for make in EACH.values():
        norm, x = made(make), drawn()
        expected = copy.deepcopy(norm)(x)
        with padded(torch.zeros_like(MASK)):
            torch.testing.assert_close(norm(x), expected)


def test_switchable_norm_weighs_sequences_by_their_tokens():
    """Its batch part is that of BatchNorm but for the unbiased variance, which Luo et al. take of each image."""
    norm, x = vml.SwitchableNorm(C).double(), drawn()
    with torch.no_grad():
        norm.mean_weight.copy_(torch.tensor([-60.0, -60.0, 60.0]))
        norm.var_weight.copy_(torch.tensor([-60.0, 60.0, -60.0]))
    with padded(MASK):
        norm(x)
    torch.testing.assert_close(norm.running_mean, 0.1 * x[~MASK].mean(0))


@pytest.mark.parametrize("behind", [False, True])
def test_further_tokens_come_before_or_fill_up_behind(behind):
    norm, x = made(OF_AN_IMAGE["group"]), drawn()
    mask = MASK[:, :-2]
    padded_mask = nn.functional.pad(mask, (0, 2) if behind else (2, 0), value=behind)
    with padded(padded_mask):
        expected = norm(x)
    with padded(mask, behind):
        torch.testing.assert_close(norm(x), expected)


def test_prefix_tokens_of_dynamic_token_norms():
    torch.manual_seed(0)
    norm, x = vml.DynamicTokenNorm(C, 2, prefix_tokens=2).double(), torch.randn(3, T + 2, C, dtype=torch.double)
    torch.compiler.reset()
    with padded(MASK):
        for y in (norm(x), torch.compile(norm, backend="eager", fullgraph=True)(x)):
            for i, length in enumerate(LENGTHS):
                with padded(None):
                    alone = norm(x[i : i + 1, : 2 + length])[0]
                torch.testing.assert_close(y[i, : 2 + length], alone)


@pytest.mark.parametrize("kind", ["group", "dtn", "batch"])
def test_gradient_checkpointing_sees_the_same_padding(kind):
    results = []
    for again in (False, True):
        norm, x = made(EACH[kind]), drawn().requires_grad_()
        with padded(MASK):
            y = checkpoint(norm, x, use_reentrant=False) if again else norm(x)
        results.append(torch.autograd.grad((y * ~MASK[..., None]).sin().sum(), [x, *norm.parameters()]))
    torch.testing.assert_close(*results)


def test_padding_is_forgotten_by_other_threads_and_later_calls():
    norm, x, results = made(OF_AN_IMAGE["group"]), drawn().requires_grad_(), []
    expected = norm(x)
    with padded(MASK):
        norm(x)
        thread = threading.Thread(target=lambda: results.append(norm(x)))
        thread.start()
        thread.join()
    again = checkpoint(norm, x, use_reentrant=False)
    gradients = [torch.autograd.grad(y.sin().sum(), x) for y in (expected, again)]
    for y in (*results, norm(x), again):
        torch.testing.assert_close(y, expected)
    torch.testing.assert_close(*gradients)


def test_what_cannot_be_is_refused():
    norm = made(OF_AN_IMAGE["group"])
    with padded(MASK), pytest.raises(UserError, match="The padding is known for"):
        norm(drawn()[:, :4])
    for other in (
        vml.DynamicTokenNorm(C, 2, (3, 3)),
        vml.DynamicTokenNorm(C, 2, mixing=vml.TokenMixing(kernel="uniform")),
        vml.DynamicTokenNorm(C, 2, mixing=vml.TokenMixing(band=3)),
    ):
        with padded(MASK), pytest.raises(UserError, match="Padding is left out of sequences only with learned kernels"):
            other(drawn().float())


@pytest.mark.parametrize("kind", ["dtn", "batch"])
def test_under_autocast_and_compiled(kind):
    norm, x = EACH[kind]().eval(), drawn().float()
    torch.compiler.reset()
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    for mask in (None, MASK, MASK.flip(0), None):
        kept = slice(None) if mask is None else ~mask
        with padded(mask):
            expected = norm(x)[kept]
            torch.testing.assert_close(compiled(x)[kept], expected)
            with torch.autocast("cpu", torch.bfloat16):
                actual = norm(x)
        torch.testing.assert_close(actual[kept], expected)
