"""Parallel branches: the fused form against the branches one by one and timm's, in float64, and when it is used."""

import copy
import gc
import itertools
import pickle
import weakref
from functools import partial

import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelThingsBlock
from torch.utils._python_dispatch import TorchDispatchMode

import vitmods as vm
from vitmods.layers import Block, BranchNorms, LayerNorm, ParallelBlock, RMSNorm
from vitmods.util.errors import UserError

EXACT = {"atol": 1e-12, "rtol": 1e-12}


def parallel(k=2, dim=24, heads=3, **options):
    """A block whose every weight matters."""
    torch.manual_seed(0)
    block = ParallelBlock([Block(dim, heads, 2.0, **options) for _ in range(k)])
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return block.double()


def tokens(batch=3, n=5, dim=24):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, n, dim, dtype=torch.float64, generator=generator).requires_grad_()


def run(block, fuse, x, **read):
    """Output and all gradients under one seed."""
    block.fuse = fuse
    torch.manual_seed(2)
    y = block(x, **read)
    return [y, *torch.autograd.grad(y.sin().sum(), [x, *block.parameters()])]


def is_fused(block, x):
    return block.attns.maps(x) is not None, block.ffns.maps(x) is not None


OPTIONS = {
    "plain": {},
    "layer scale": {"init_values": 0.5},
    "no qkv bias": {"qkv_bias": False},
    "no bias": {"qkv_bias": False, "proj_bias": False, "init_values": 0.5},
    "rms": {"norm_layer": RMSNorm, "init_values": 0.5},
    "rms without bias": {"norm_layer": RMSNorm, "qkv_bias": False},
    "not affine": {"norm_layer": partial(LayerNorm, affine=False)},
    "tanh": {"act_layer": partial(torch.nn.GELU, approximate="tanh")},
    "drop path": {"drop_path": 0.5, "init_values": 0.5},
    "drop path without bias": {"drop_path": 0.5, "proj_bias": False},
}


@pytest.mark.parametrize("read", [{}, {"first": 2}, {"mean_from": 1}], ids=str)
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_fused_outputs_and_gradients_are_those_one_by_one(options, k, read):
    block, x = parallel(k, **options), tokens()
    block.fuse = True
    assert is_fused(block, x) == (True, True)
    for fused, single in zip(run(block, True, x, **read), run(block, False, x, **read), strict=True):
        torch.testing.assert_close(fused, single, **EXACT)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("fuse", [True, False])
def test_both_forms_are_timms_block(k, fuse):
    theirs = ParallelThingsBlock(24, 3, num_parallel=k, mlp_ratio=2.0, qkv_bias=True, init_values=0.5, drop_path=0.4)
    block, x = parallel(k, init_values=0.5, drop_path=0.4), tokens()
    theirs.double().load_state_dict(block.state_dict())
    ours = run(block, fuse, x)
    torch.manual_seed(2)
    y = theirs(x)
    expected = [
        y,
        *torch.autograd.grad(y.sin().sum(), [x, *(theirs.get_parameter(n) for n, _ in block.named_parameters())]),
    ]
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_each_branch_draws_its_drop_path_for_each_image():
    """With rate 1/2 each branch adds twice its output or nothing, in all combinations."""
    block, x = parallel(2, drop_path=0.5), tokens(batch=64)
    for fuse in (True, False):
        block.fuse = fuse
        alone = [b.attn(b.norm(x)) for b in block.attns]
        added, seen = block.attns(x), set()
        for i in range(len(x)):
            fits = [c for c in itertools.product([0, 2], repeat=2)
                    if torch.allclose(added[i], c[0] * alone[0][i] + c[1] * alone[1][i], atol=1e-10)]  # fmt: skip
            assert len(fits) == 1
            seen.add(fits[0])
        assert len(seen) == 4


class Mixing(LayerNorm):
    token_wise = False


UNFUSED = {
    "inner norms": (
        {"attn_norms": BranchNorms(LayerNorm, LayerNorm), "mlp_norms": BranchNorms(LayerNorm, LayerNorm)},
        0,
        0,
    ),
    "norms on the branch": ({"mlp_norms": BranchNorms(LayerNorm, branch=LayerNorm)}, 1, 0),
    "norms of q and k": ({"qk_norm": True}, 0, 1),
    "head scale": ({"head_scale": True}, 0, 1),
    "another norm": ({"attn_norms": BranchNorms(Mixing)}, 0, 1),
    "no norm": ({"attn_norms": BranchNorms(), "mlp_norms": BranchNorms()}, 0, 0),
    "another activation": ({"act_layer": torch.nn.ReLU}, 1, 0),
    "dropout": ({"proj_drop": 0.5}, 0, 0),
    "dropout of attention": ({"attn_drop": 0.5}, 0, 1),
}


@pytest.mark.parametrize(("options", "attn", "mlp"), UNFUSED.values(), ids=UNFUSED)
def test_what_cannot_be_fused_runs_one_by_one(options, attn, mlp):
    block, x = parallel(**options), tokens()
    block.fuse = True
    assert is_fused(block, x) == (attn, mlp)
    blocks = [Block(24, 3, 2.0, **options).double() for _ in range(2)]
    for i, other in enumerate(blocks):
        state = block.state_dict()
        for kind, number in (("attns", 1), ("ffns", 2)):
            for name, value in state.items():
                if name.startswith(f"{kind}.{i}."):
                    module, rest = name.removeprefix(f"{kind}.{i}.").split(".", 1)
                    module = {"norm": f"norm{number}", "norm_branch": f"norm{number}_branch", "ls": f"ls{number}"}.get(
                        module, module
                    )
                    other.get_parameter(f"{module}.{rest}").data.copy_(value)
        other.eval()
    block.eval()
    h = x + sum(b.norm1_branch(b.attn(b.norm1(x))) for b in blocks)
    torch.testing.assert_close(block(x), h + sum(b.norm2_branch(b.mlp(b.norm2(h))) for b in blocks), **EXACT)


def test_a_mask_runs_one_by_one():
    block, x = parallel(), tokens()
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    for fused, single in zip(run(block, True, x, attn_mask=mask), run(block, False, x, attn_mask=mask), strict=True):
        torch.testing.assert_close(fused, single, **EXACT)
    assert not torch.allclose(block(x, attn_mask=mask), block(x))
    with pytest.raises(ValueError, match="attn_mask"):
        block(x, is_causal=True)


def test_norms_after_the_sum_are_refused():
    with pytest.raises(ValueError, match="one residual sum"):
        parallel(attn_norms=BranchNorms(after=LayerNorm))
    with pytest.raises(UserError, match="reading=branch"):
        vm.apply(vm.vit("mu2x2/4", img_size=8), *vm.parse_changes("postnorm"))


def test_hooks_on_parts_are_heard():
    block, x, heard = parallel().eval(), tokens(), []
    with torch.no_grad():
        block(x)
        handle = block.attns[1].attn.register_forward_hook(lambda *_: heard.append(1))
        block(x)
        assert heard == [1]
        assert is_fused(block, x) == (False, True)
        handle.remove()
        assert is_fused(block, x) == (True, True)


def _in_place(block):
    with torch.no_grad():
        block.attns[1].attn.qkv.weight.mul_(2)


def _optimizer(block):
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    with torch.enable_grad():
        block(tokens()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _load(block):
    block.load_state_dict({name: value + 0.1 for name, value in block.state_dict().items()})


def _assign(block):
    block.load_state_dict({name: value + 0.1 for name, value in block.state_dict().items()}, assign=True)


def _replace(block):
    block.ffns[0].mlp.fc2 = torch.nn.Linear(48, 24).double()


def _data(block):
    block.ffns[0].mlp.fc2.weight.data = block.ffns[0].mlp.fc2.weight.data * 2


def _train(block):
    block.ffns[0].mlp.fc2.weight.data.mul_(2)
    block.train().eval()


@pytest.mark.parametrize("change", [_in_place, _optimizer, _load, _assign, _replace, _data, _train])
def test_kept_weights_follow_every_change(change):
    block, x = parallel(init_values=0.5).eval(), tokens()
    with torch.no_grad():
        before = block(x)
        maps = block.attns.maps(x), block.ffns.maps(x)
        assert block.attns.maps(x) is maps[0]
        assert block.ffns.maps(x) is maps[1]
        change(block)
        after = block(x)
        assert not torch.allclose(after, before)
        block.fuse = False
        torch.testing.assert_close(after, block(x), **EXACT)


def test_an_averaged_teacher_in_training_mode_follows_its_data():
    """As DINO's: no gradients, never in evaluation mode, written through .data."""
    teacher, x = parallel(init_values=0.5).train().requires_grad_(False), tokens()
    with torch.no_grad():
        teacher(x)
        for parameter in teacher.parameters():
            parameter.data.mul_(0.9)
        after = teacher(x)
        teacher.fuse = False
        torch.testing.assert_close(after, teacher(x), **EXACT)


def test_kept_weights_follow_functional_calls():
    block, x = parallel().eval(), tokens()
    twice = {name: value * 2 for name, value in block.state_dict().items()}
    with torch.no_grad():
        before = block(x)
        other = torch.func.functional_call(block, twice, (x,))
        torch.testing.assert_close(block(x), before, **EXACT)
        block.load_state_dict(twice)
        torch.testing.assert_close(other, block(x), **EXACT)


def test_copies_and_pickles_leave_the_kept_weights_behind():
    block, x = parallel().eval(), tokens()
    with torch.inference_mode():
        expected = block(x)
    size = len(pickle.dumps(parallel().eval()))
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert abs(len(pickle.dumps(other)) - size) < 100
        assert torch.equal(other(x), block(x))
        with torch.no_grad():
            torch.testing.assert_close(other(x), expected, **EXACT)
    kept = weakref.ref(block.attns.maps(x.detach()) if block.requires_grad_(False) else None)
    gc.collect()
    assert kept() is not None
    block.train()
    gc.collect()
    assert kept() is None


def test_frozen_branches_lend_their_kept_weights_to_training():
    """Also where inference mode has folded them: only x gets a gradient there."""
    block, x = parallel(drop_path=0.5), tokens()
    block.ffns.requires_grad_(False)
    with torch.inference_mode():
        block.ffns(x.detach())
    results = []
    for block.fuse in (True, False):
        torch.manual_seed(2)
        y = block(x)
        results.append([y, *torch.autograd.grad(y.sum(), [x, *block.attns.parameters()])])
    assert block.ffns._kept._maps is not None
    for fused, single in zip(*results, strict=True):
        torch.testing.assert_close(fused, single, **EXACT)


def test_weights_made_in_inference_mode_run():
    with torch.inference_mode():
        block = parallel().eval()
        x = tokens().detach()
        assert is_fused(block, x) == (False, False)
        assert block(x).isfinite().all()


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_recompute_gradients_are_the_plain_ones_bit_for_bit(norm):
    block, x = parallel(norm_layer=norm), tokens()
    assert block.can_recompute
    block.fuse = False
    plain = run(block, False, x)
    block.recompute = True
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        run(block, None, x)
    assert all(torch.equal(a, b) for a, b in zip(run(block, None, x), plain, strict=True))
    block.recompute, all_kept = False, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: all_kept.append(t.numel()) or t, lambda t: t):
        run(block, False, x)
    assert sum(kept) < 0.9 * sum(all_kept)


def test_one_form_or_the_other_by_size():
    """On a CPU the joint hidden layer must not be too large; weights that are trained are folded in every step, which
    a large batch alone is worth."""
    small, large = torch.zeros(1, 5, 384), torch.zeros(16, 197, 384)
    block = ParallelBlock([Block(384, 6) for _ in range(2)])
    assert is_fused(block, large) == (True, True)
    assert is_fused(block.eval(), small) == (False, False)
    with torch.no_grad():
        assert is_fused(block, small) == (True, True)
        assert is_fused(block, large) == (False, False)
        block.fuse = True
        assert is_fused(block, large) == (True, True)
    assert is_fused(block, small) == (True, True)


class Calls(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += not func.is_view and "view" not in func.__name__
        return out


def calls(model, images):
    with torch.no_grad():
        model(images)
        with Calls() as counter:
            model(images)
    return counter.count


def test_half_the_calls_of_the_sequential_model():
    """36 blocks against 18 x 2, with and without LayerScale, and timm's 18 x 2."""
    size = {"img_size": 8, "embed_dim": 8, "num_heads": 2, "mlp_dim": 32, "num_classes": 0}
    images = torch.zeros(1, 3, 8, 8)
    plain = [calls(vm.vit(name, **size).eval(), images) for name in ("mu36/4", "mu18x2/4", "mu12x3/4")]
    outside = calls(vm.vit("mu1/4", **size).eval(), images) - 10
    assert [n - outside for n in plain] == [360, 180, 120]
    scaled = [calls(vm.vit(name, layer_scale=0.1, **size).eval(), images) - outside for name in ("mu36/4", "mu18x2/4")]
    assert scaled == [432, 180]
    theirs = timm.create_model(
        "vit_small_patch16_18x2_224",
        img_size=8,
        patch_size=4,
        embed_dim=8,
        num_heads=2,
        num_classes=0,
        init_values=None,
    )
    assert calls(theirs.eval(), images) > 360


@pytest.mark.parametrize("training", [True, False])
def test_fused_branches_under_bfloat16_autocast(training):
    block = parallel(init_values=0.5).float().train(training)
    x = tokens().detach().float()
    block.fuse = True
    with torch.set_grad_enabled(training):
        exact = block(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert is_fused(block, x) == (True, True)
            rough = block.attns(x)
            assert rough.dtype == torch.bfloat16
            assert (block(x) - exact).abs().max() < 0.03 * exact.abs().max()
            if training:
                block(x).sum().backward()
                assert all(p.grad.dtype == torch.float32 and p.grad.any() for p in block.parameters())
            else:
                assert block.attns.maps(x).first.dtype == torch.bfloat16
        torch.testing.assert_close(block(x), exact)  # what was kept in bfloat16 is not taken for it


def test_fused_branches_of_bfloat16_weights():
    block = parallel(init_values=0.5).eval()
    x = tokens().detach()
    with torch.no_grad():
        exact, rough = block(x), block.bfloat16()(x.bfloat16())
    assert rough.dtype == torch.bfloat16
    assert (rough.double() - exact).abs().max() < 0.03 * exact.abs().max()


@pytest.mark.parametrize("fuse", [True, False])
def test_it_compiles_and_exports(fuse):
    block, x = parallel(init_values=0.5, drop_path=0.1).eval(), tokens().detach()
    block.fuse = fuse
    torch._dynamo.reset()
    expected = block(x)
    torch.testing.assert_close(torch.compile(block, fullgraph=True, backend="aot_eager")(x), expected, **EXACT)
    program = torch.export.export(block, (x,))
    torch.testing.assert_close(program.module()(x), expected, **EXACT)
    attentions = [n for n in program.graph.nodes if "scaled_dot_product" in str(n.target)]
    assert len(attentions) == (1 if fuse else 2)
    torch._dynamo.reset()
