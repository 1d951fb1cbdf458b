"""The block's slots against the formula ``x = after(x + scale * branch(F(before(x))))``, written out in float64."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from vitmods.layers import Block, BranchNorms, LayerNorm, RMSNorm

NONE = BranchNorms()


def randomized(block):
    torch.manual_seed(0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return block.double()


def slow_block(block, x):
    """The formula over the block's own pieces, none of its shortcuts."""

    def residual(x, number, function, scale):
        before, branch, after = (getattr(block, f"norm{number}{slot}") for slot in ("", "_branch", "_after"))
        return after(x + scale(branch(function(before(x)))))

    x = residual(x, 1, block.attn, block.ls1)
    mlp = block.mlp
    return residual(x, 2, lambda h: mlp.fc2(mlp.norm(F.gelu(mlp.fc1(h)))), block.ls2)


FILLINGS = list(itertools.product([None, LayerNorm], repeat=4))  # before, inner, branch, after


@pytest.mark.parametrize("slots", FILLINGS, ids=lambda slots: "".join("01"[n is not None] for n in slots))
def test_every_filling_of_the_slots(slots):
    block = randomized(Block(8, 2, 2.0, attn_norms=BranchNorms(*slots), mlp_norms=BranchNorms(*slots), init_values=0.5))
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(block(x), slow_block(block, x), atol=1e-12, rtol=0)
    torch.testing.assert_close(block(x, first=2), slow_block(block, x)[:, :2], atol=1e-12, rtol=0)
    filled = sum(n is not None for n in slots)
    assert sum(isinstance(m, LayerNorm) for m in block.modules()) == 2 * filled
    if block.mean_commutes:
        mean = slow_block(block, x)[:, 1:].mean(1, keepdim=True)
        torch.testing.assert_close(block(x, mean_from=1), mean, atol=1e-12, rtol=0)
    assert block.mean_commutes == (slots[2] is None and slots[3] is None)


def test_a_norm_that_mixes_tokens_forbids_the_shortcuts():
    class Mixing(LayerNorm):
        token_wise = False

    for slot in ("inner", "branch", "after"):
        assert not Block(8, 2, attn_norms=BranchNorms(**{slot: Mixing}), mlp_norms=NONE).tokenwise
    for slot in ("before", "inner", "branch", "after"):
        assert not Block(8, 2, attn_norms=NONE, mlp_norms=BranchNorms(**{slot: Mixing})).tokenwise
    assert Block(8, 2, attn_norms=BranchNorms(before=Mixing), mlp_norms=NONE).tokenwise  # runs on all tokens anyway
    block = Block(8, 2, attn_norms=NONE, mlp_norms=BranchNorms(before=torch.nn.BatchNorm1d))
    assert not block.tokenwise  # a module that says nothing is not trusted


def test_the_mean_does_not_commute_with_dropout_in_training():
    block = Block(8, 2, proj_drop=0.1)
    assert not block.train().mean_commutes
    assert block.eval().mean_commutes


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("bias", [True, False])
def test_recompute_gradients_are_the_plain_ones_bit_for_bit(norm, bias, approximate):
    def act():
        return torch.nn.GELU(approximate=approximate)

    torch.manual_seed(0)
    block = Block(16, 2, qkv_bias=bias, proj_bias=bias, norm_layer=norm, act_layer=act, init_values=0.1)
    x = torch.randn(3, 5, 16, requires_grad=True)
    results = []
    for block.recompute in (False, True):
        y = block(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_recompute_parts_pass_gradcheck():
    block = randomized(Block(4, 2, 2.0))
    block.recompute = True
    x = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(block, (x,))


def test_recompute_works_where_only_some_parameters_are_trained():
    """Frozen weights get no gradient, and what is trained gets the plain one."""
    torch.manual_seed(0)
    block = Block(16, 2)
    block.mlp.requires_grad_(False)
    block.norm1.requires_grad_(False)
    x = torch.randn(2, 3, 16)
    results = []
    for block.recompute in (False, True):
        block.zero_grad()
        block(x).square().sum().backward()
        results.append({n: p.grad.clone() for n, p in block.named_parameters() if p.grad is not None})
    assert results[0].keys() == results[1].keys() == {n for n, p in block.named_parameters() if p.requires_grad}
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


def test_another_mlp_or_attention_is_refused():
    class Other(torch.nn.Module):
        pass

    for name in ("mlp_layer", "attn_layer"):
        with pytest.raises(ValueError, match=name):
            Block(8, 2, **{name: Other})
