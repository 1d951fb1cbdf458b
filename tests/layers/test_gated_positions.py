"""Positions in attention against the matrix written out: outputs, gradients, grids, prefix tokens."""

import pytest
import torch
from torch.nn import functional as F

from vitmods.layers import Attention, AttentionSlots, GatedPositions

GRIDS = [(4, 4), (2, 5), (1, 6), (5, 1)]


def build(grid, prefix=0, heads=3, **settings):
    torch.manual_seed(0)
    positions = GatedPositions(heads, grid, prefix).double()
    attention = Attention(12, heads, AttentionSlots(positions=positions), **settings).double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    return attention


def tokens(grid, prefix=0):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, prefix + grid[0] * grid[1], 12, generator=generator, dtype=torch.float64, requires_grad=True)


def kernel(positions, grid):
    """P as a matrix, token by token: (H, T, T)."""
    places = [(r, c) for r in range(grid[0]) for c in range(grid[1])]
    offsets = [[(c2 - c, r2 - r) for r2, c2 in places] for r, c in places]
    d = torch.tensor(offsets, dtype=torch.float64)
    features = torch.cat([d.square().sum(-1, keepdim=True), d], dim=-1)
    return torch.einsum("ijf,hf->hij", features, positions.a).softmax(-1)


def written_out(attention, x, prefix, grid):
    """The mixture of both matrices, then the values."""
    heads, d = attention.num_heads, attention.head_dim
    q, k, v = attention.qkv(x).unflatten(-1, (3, heads, d)).permute(2, 0, 3, 1, 4)
    content = (q @ k.mT / d**0.5).softmax(-1)
    fraction = torch.sigmoid(attention.positions.gate).view(-1, 1, 1)
    place = F.pad(kernel(attention.positions, grid), (prefix, 0, prefix, 0))
    gated = F.pad(fraction.expand(-1, place.shape[-1] - prefix, 1), (0, 0, prefix, 0))
    weights = (1 - gated) * content + gated * place
    return attention.proj((weights @ v).transpose(1, 2).flatten(2)), weights


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_it_is_the_matrix(grid, prefix):
    attention, x = build(grid, prefix), tokens(grid, prefix)
    expected, weights = written_out(attention, x, prefix, grid)
    actual, leaves = attention(x), [x, *attention.parameters()]
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(attention.weights(x), weights, atol=1e-12, rtol=0)
    theirs = torch.autograd.grad(expected.sin().sum(), leaves)
    for a, b in zip(torch.autograd.grad(actual.sin().sum(), leaves), theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=0)


@pytest.mark.parametrize("queries", [1, 2, 3, 7])
def test_fewer_queries(queries):
    attention = build((2, 5), 2)
    read, v = torch.randn(2, 2, 3, 12, 4, dtype=torch.float64)
    positions = attention.positions
    torch.testing.assert_close(
        positions(read[:, :, :queries], v), positions(read, v)[:, :, :queries], atol=1e-12, rtol=0
    )


def test_prefix_tokens_attend_by_content():
    attention, x = build((2, 5), 2), tokens((2, 5), 2)
    plain = Attention(12, 3).double()
    plain.load_state_dict(attention.state_dict(), strict=False)
    torch.testing.assert_close(attention(x)[:, :2], plain(x)[:, :2], atol=1e-12, rtol=0)
    assert not torch.allclose(attention(x)[:, 2:], plain(x)[:, 2:], atol=0.1)


def test_another_grid_needs_no_other_parameters():
    attention, x = build((2, 3)), tokens((4, 5))
    with pytest.raises(ValueError, match=r"20 tokens.*2 x 3"):
        attention(x)
    attention.positions.grid_size = (4, 5)
    torch.testing.assert_close(attention(x), written_out(attention, x, 0, (4, 5))[0], atol=1e-12, rtol=0)


def test_the_gate_goes_from_content_to_place():
    attention, x = build((3, 4)), tokens((3, 4))
    torch.nn.init.constant_(attention.positions.gate, 50)
    torch.testing.assert_close(
        attention.weights(x), kernel(attention.positions, (3, 4)).expand(2, -1, -1, -1), atol=1e-12, rtol=0
    )
    torch.nn.init.constant_(attention.positions.gate, -50)
    plain = Attention(12, 3).double()
    plain.load_state_dict(attention.state_dict(), strict=False)
    torch.testing.assert_close(attention(x), plain(x), atol=1e-12, rtol=0)


def test_no_matrix_of_tokens_times_tokens():
    """The largest tensor of forward and backward is the query-key-value projection, 3 x C numbers a token."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
            return out

    attention = Attention(12, 3, AttentionSlots(positions=GatedPositions(3, (24, 24))))
    x = torch.randn(2, 576, 12, requires_grad=True)
    with Watch():
        attention(x).sum().backward()
    assert max(sizes) <= 2 * 576 * 36 < 3 * 576 * 576


def test_a_mask_is_refused():
    with pytest.raises(ValueError, match="take no mask"):
        build((2, 2))(tokens((2, 2)), attn_mask=torch.ones(4, 4, dtype=torch.bool))
