"""A block, its slots and its stochastic depth against formulas in float64."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from vitmods.layers import Block, BlockConfig, BranchNorms, DropPath, LayerNorm, LayerScale


def randomized(block):
    torch.manual_seed(0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return block.double()


def slow_block(block, x):
    """The formula over the block's own pieces."""

    def residual(x, number, function, scale):
        before, branch, after = (getattr(block, f"norm{number}{slot}") for slot in ("", "_branch", "_after"))
        return after(x + scale(branch(function(before(x)))))

    x = residual(x, 1, block.attn, block.ls1)
    mlp = block.mlp
    return residual(x, 2, lambda h: mlp.fc2(mlp.norm(F.gelu(mlp.fc1(h)))), block.ls2)


FILLINGS = list(itertools.product([None, LayerNorm], repeat=4))  # before, inner, branch, after


@pytest.mark.parametrize("slots", FILLINGS, ids=lambda slots: "".join("01"[n is not None] for n in slots))
def test_every_filling_of_the_slots(slots):
    norms = BranchNorms(*slots)
    block = randomized(Block(BlockConfig(8, 2, 16, attn_norms=norms, mlp_norms=norms, layer_scale=0.5)))
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(block(x), slow_block(block, x), atol=1e-12, rtol=0)
    filled = sum(n is not None for n in slots)
    assert sum(isinstance(m, LayerNorm) for m in block.modules()) == 2 * filled


def test_a_causal_block_is_refused():
    with pytest.raises(ValueError, match="attn_mask"):
        Block(BlockConfig(8, 2, 16))(torch.zeros(1, 2, 8), is_causal=True)


def test_drop_path_drops_whole_images_and_rescales_the_others():
    torch.manual_seed(0)
    drop = DropPath(0.25)
    y = drop(torch.ones(4000, 3, 2))
    per_image = y.flatten(1)
    assert (per_image == per_image[:, :1]).all()
    assert per_image[:, 0].unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert float(per_image.mean()) == pytest.approx(1, abs=0.04)  # 4 standard errors
    x = torch.randn(5, 2)
    assert DropPath(0.9).eval()(x) is x
    assert DropPath(0.0)(x) is x
    assert DropPath(0.5)(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_layer_scale():
    scale = LayerScale(3, 0.5)
    assert (scale.gamma == 0.5).all()
    scale.gamma.data.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(scale(torch.ones(2, 3)), torch.tensor([[1.0, 2.0, 3.0]] * 2))
    scale.reset_parameters()
    assert (scale.gamma == 0.5).all()
