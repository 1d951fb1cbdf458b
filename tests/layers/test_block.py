"""A block, its slots and its stochastic depth against formulas in float64; parallel branches against timm's block."""

import itertools
from functools import partial

import pytest
import torch
from timm.models.vision_transformer import ParallelThingsBlock
from torch.nn import functional as F

import vitmods as vm
from vitmods import layers as vml
from vitmods.fast import Forms
from vitmods.util.errors import UserError


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


FILLINGS = list(itertools.product([None, vml.LayerNorm], repeat=4))  # before, inner, branch, after


@pytest.mark.parametrize("slots", FILLINGS, ids=lambda slots: "".join("01"[n is not None] for n in slots))
def test_every_filling_of_the_slots(slots):
    norms = vml.BranchNorms(*slots)
    block = randomized(vml.Block(vml.BlockConfig(8, 2, 16, attn_norms=norms, mlp_norms=norms, layer_scale=0.5)))
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(block(x), slow_block(block, x), atol=1e-12, rtol=0)
    filled = sum(n is not None for n in slots)
    assert sum(isinstance(m, vml.LayerNorm) for m in block.modules()) == 2 * filled


def test_drop_path_drops_whole_images_and_rescales_the_others():
    torch.manual_seed(0)
    drop = vml.DropPath(0.25)
    y = drop(torch.ones(4000, 3, 2))
    per_image = y.flatten(1)
    assert (per_image == per_image[:, :1]).all()
    assert per_image[:, 0].unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert float(per_image.mean()) == pytest.approx(1, abs=0.04)  # 4 standard errors
    x = torch.randn(5, 2)
    assert vml.DropPath(0.9).eval()(x) is x
    assert vml.DropPath(0.0)(x) is x
    assert vml.DropPath(0.5)(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_layer_scale_starts_anew():
    scale = vml.LayerScale(3, 0.5)
    assert (scale.gamma == 0.5).all()
    scale.gamma.data.fill_(2.0)
    scale.reset_parameters()
    assert (scale.gamma == 0.5).all()


EXACT = {"atol": 1e-12, "rtol": 1e-12}
FORMS = {"plain": None, "fast": Forms(), "recompute": Forms(recompute=True)}


def parallel(k=2, **fields):
    """A block whose every weight matters."""
    torch.manual_seed(0)
    block = vml.ParallelBlock([vml.Block(vml.BlockConfig(24, 3, 48, **fields)) for _ in range(k)])
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return block.double()


def tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 5, 24, dtype=torch.float64, generator=generator).requires_grad_()


def run(block, forms, x):
    """Output and all gradients under one seed."""
    torch.manual_seed(2)
    y = block(x) if forms is None else forms.run_block(block, x, recomputes=forms.recompute)
    return [y, *torch.autograd.grad(y.sin().sum(), [x, *block.parameters()])]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS)
def test_it_is_timms_block(k, forms):
    reference = ParallelThingsBlock(24, 3, num_parallel=k, mlp_ratio=2.0, qkv_bias=True, init_values=0.5, drop_path=0.4)
    block, x = parallel(k, layer_scale=0.5, drop_path=0.4), tokens()
    reference.double().load_state_dict(block.state_dict())
    torch.manual_seed(2)
    y = reference(x)
    leaves = [x, *(reference.get_parameter(n) for n, _ in block.named_parameters())]
    for a, b in zip(run(block, forms, x), [y, *torch.autograd.grad(y.sin().sum(), leaves)], strict=True):
        torch.testing.assert_close(a, b, **EXACT)


FIELDS = {
    "inner norms": {
        "attn_norms": vml.BranchNorms(vml.LayerNorm, vml.LayerNorm),
        "mlp_norms": vml.BranchNorms(vml.LayerNorm, vml.LayerNorm),
    },
    "norms on the branch": {"mlp_norms": vml.BranchNorms(vml.LayerNorm, branch=vml.LayerNorm)},
    "head scale, norms of q and k": {
        "attn": partial(vml.Attention, slots=vml.AttentionSlots(vml.RMSNorm, head_scale=True))
    },
    "no norm": {"attn_norms": vml.BranchNorms(), "mlp_norms": vml.BranchNorms()},
    "another activation": {"mlp": partial(vml.Mlp, act=torch.nn.ReLU())},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS)
def test_the_sums_of_the_branches_of_blocks(fields, forms):
    torch.manual_seed(0)
    blocks, x = [vml.Block(vml.BlockConfig(24, 3, 48, **fields)).double() for _ in range(2)], tokens()
    actual = run(vml.ParallelBlock(blocks), forms, x)[0]
    h = x + sum(b.norm1_branch(b.attn(b.norm1(x))) for b in blocks)
    torch.testing.assert_close(actual, h + sum(b.norm2_branch(b.mlp(b.norm2(h))) for b in blocks), **EXACT)


def test_a_mask_reaches_every_branch():
    block, x = parallel(), tokens()
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    changed = x.detach().clone()
    changed[:, -1] += 1
    torch.testing.assert_close(block(x, attn_mask=mask)[:, :-1], block(changed, attn_mask=mask)[:, :-1], **EXACT)
    assert not torch.allclose(block(x, attn_mask=mask), block(x))


def test_what_a_block_cannot_do_is_refused():
    for block in (vml.Block(vml.BlockConfig(24, 2, 16)), parallel()):
        with pytest.raises(ValueError, match="attn_mask"):
            block(tokens(), is_causal=True)
    with pytest.raises(ValueError, match="one residual sum"):
        parallel(attn_norms=vml.BranchNorms(after=vml.LayerNorm))
    with pytest.raises(UserError, match="reading=branch"):
        vm.apply(vm.vit("mu2x2/4", img_size=8), *vm.parse_changes("postnorm"))
