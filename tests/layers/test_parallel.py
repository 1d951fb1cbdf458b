"""Parallel branches against timm's block and the formula, in float64."""

import itertools
from functools import partial

import pytest
import torch
from timm.models.vision_transformer import ParallelThingsBlock

import vitmods as vm
from vitmods.fast import Forms
from vitmods.layers import (
    Attention,
    AttentionSlots,
    Block,
    BlockConfig,
    BranchNorms,
    LayerNorm,
    Mlp,
    ParallelBlock,
    RMSNorm,
)
from vitmods.util.errors import UserError

EXACT = {"atol": 1e-12, "rtol": 1e-12}
FORMS = {"plain": None, "fast": Forms(), "recompute": Forms(recompute=True)}


def parallel(k=2, **fields):
    """A block whose every weight matters."""
    torch.manual_seed(0)
    block = ParallelBlock([Block(BlockConfig(24, 3, 48, **fields)) for _ in range(k)])
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return block.double()


def tokens(batch=3, n=5, dim=24):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, n, dim, dtype=torch.float64, generator=generator).requires_grad_()


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
    "inner norms": {"attn_norms": BranchNorms(LayerNorm, LayerNorm), "mlp_norms": BranchNorms(LayerNorm, LayerNorm)},
    "norms on the branch": {"mlp_norms": BranchNorms(LayerNorm, branch=LayerNorm)},
    "head scale, norms of q and k": {"attn": partial(Attention, slots=AttentionSlots(RMSNorm, head_scale=True))},
    "no norm": {"attn_norms": BranchNorms(), "mlp_norms": BranchNorms()},
    "another activation": {"mlp": partial(Mlp, act=torch.nn.ReLU())},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS)
def test_the_sums_of_the_branches_of_blocks(fields, forms):
    torch.manual_seed(0)
    blocks, x = [Block(BlockConfig(24, 3, 48, **fields)).double() for _ in range(2)], tokens()
    actual = run(ParallelBlock(blocks), forms, x)[0]
    h = x + sum(b.norm1_branch(b.attn(b.norm1(x))) for b in blocks)
    torch.testing.assert_close(actual, h + sum(b.norm2_branch(b.mlp(b.norm2(h))) for b in blocks), **EXACT)


@pytest.mark.parametrize("forms", [FORMS["plain"], FORMS["fast"]])
def test_each_branch_draws_its_drop_path_for_each_image(forms):
    """With rate 1/2 each branch adds twice its output or nothing, in all combinations."""
    block, x = parallel(2, drop_path=0.5, mlp=NoMlp), tokens(batch=64)
    with torch.no_grad():
        alone = [b.attn(b.norm(x)) for b in block.attns]
        added = (block(x) if forms is None else forms.run_block(block, x)) - x
    seen = set()
    for i in range(len(x)):
        fits = [c for c in itertools.product([0, 2], repeat=2)
                if torch.allclose(added[i], c[0] * alone[0][i] + c[1] * alone[1][i], atol=1e-10)]  # fmt: skip
        assert len(fits) == 1
        seen.add(fits[0])
    assert len(seen) == 4


class NoMlp(torch.nn.Module):
    def __init__(self, *args, **keywords):
        super().__init__()

    def forward(self, x):
        return torch.zeros_like(x)


def test_a_mask_reaches_every_branch():
    block, x = parallel(), tokens()
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    changed = x.detach().clone()
    changed[:, -1] += 1
    torch.testing.assert_close(block(x, attn_mask=mask)[:, :-1], block(changed, attn_mask=mask)[:, :-1], **EXACT)
    assert not torch.allclose(block(x, attn_mask=mask), block(x))
    with pytest.raises(ValueError, match="attn_mask"):
        block(x, is_causal=True)


def test_norms_after_the_sum_are_refused():
    with pytest.raises(ValueError, match="one residual sum"):
        parallel(attn_norms=BranchNorms(after=LayerNorm))
    with pytest.raises(UserError, match="reading=branch"):
        vm.apply(vm.vit("mu2x2/4", img_size=8), *vm.parse_changes("postnorm"))


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_recompute_gradients_are_the_plain_ones_bit_for_bit(norm):
    norms = BranchNorms(before=norm)
    block, x = parallel(attn_norms=norms, mlp_norms=norms), tokens()
    kept = {}
    for name, forms in FORMS.items():
        sizes = kept[name] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, s=sizes: s.update({t.untyped_storage().data_ptr(): t.untyped_storage()}) or t, lambda t: t
        ):
            actual = run(block, forms, x)
        if name == "plain":
            plain = actual
        assert all(torch.equal(a, b) for a, b in zip(actual, plain, strict=True))
    sizes = {name: sum(storage.nbytes() for storage in storages.values()) for name, storages in kept.items()}
    assert sizes["recompute"] < 0.9 * sizes["plain"]


def test_it_compiles_and_exports():
    block, x = parallel(layer_scale=0.5, drop_path=0.1).eval(), tokens().detach()
    torch._dynamo.reset()
    expected = block(x)
    torch.testing.assert_close(torch.compile(block, fullgraph=True, backend="aot_eager")(x), expected, **EXACT)
    torch.testing.assert_close(torch.export.export(block, (x,)).module()(x), expected, **EXACT)
    torch._dynamo.reset()
