"""Recompute: the plain model's outputs and gradients bit for bit, with fewer bytes kept for backward."""

from functools import partial

import pytest
import torch

import vitmods as vm
from vitmods import fast
from vitmods.fast import Forms
from vitmods.layers import Attention, Block, BlockConfig, BranchNorms, LayerNorm, Mlp, RMSNorm
from vitmods.util.errors import UserError

CASES = ["", "rms", "dpn", "layerscale", "normformer", "subln", "placement(attn=pre+post,mlp=pre)"]


def step(model, images, recompute, autocast=False):
    """Outputs, gradients of the images and all parameters, and the bytes kept for backward (parameters apart)."""
    fast.recompute(model, recompute)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in parameters:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    images = images.clone().requires_grad_()
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16, autocast):
        out = model(images)
    grads = torch.autograd.grad(out.float().square().sum(), [images, *model.parameters()])
    return [out.detach(), *grads], sum(kept.values())


def build(changes, **overrides):
    torch.manual_seed(0)
    model = vm.vit("Ti4/4", img_size=16, num_classes=3, **overrides)
    return vm.apply(model, *vm.parse_changes(changes)) if changes else model


@pytest.mark.parametrize("pool", ["token", "avg"])
@pytest.mark.parametrize("changes", CASES)
def test_gradients_are_bitwise_equal_and_fewer_bytes_are_kept(changes, pool):
    model = build(changes, pool=pool)
    images = torch.randn(2, 3, 16, 16)
    plain, plain_bytes = step(model, images, recompute=False)
    recompute, recompute_bytes = step(model, images, recompute=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, recompute, strict=True))
    assert recompute_bytes < plain_bytes


def test_bytes_and_numbers():
    model = build("", depth=6, pool="avg")
    images = torch.randn(2, 3, 16, 16)
    assert step(model, images, recompute=True)[1] <= 0.65 * step(model, images, recompute=False)[1]
    torch.manual_seed(0)
    block = Block(BlockConfig(4, 2, 8)).double()
    x = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(partial(Forms().run_block, block, recomputes=True), (x,))


@pytest.mark.parametrize("changes", ["", "rms"])
def test_autocast(changes):
    """bfloat16 linear layers, float32 norms: as close to the plain model as bfloat16 allows."""
    model = build(changes)
    images = torch.randn(2, 3, 16, 16)
    plain, recompute = (step(model, images, recompute=recompute, autocast=True)[0] for recompute in (False, True))
    for a, b in zip(plain, recompute, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, atol=0.02 * float(a.abs().max()), rtol=0)


def test_evaluation_is_the_plain_one_and_the_setting_survives_changes():
    model = build("")
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        plain = model(images)
        fast.recompute(model)
        assert torch.equal(model(images), plain)
    model = build("")
    fast.recompute(model)
    assert vm.apply(model, vm.DualPatchNorm()).forms.recompute


def test_it_says_where_it_cannot_help():
    model = vm.apply(build(""), vm.Placement(attn="post", mlp="post"))
    with pytest.raises(UserError, match="recompute"):
        fast.recompute(model)
    fast.recompute(model, False)
    with pytest.raises(UserError, match="Linear is not a vitmods ViT"):
        fast.recompute(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("bias", [True, False])
def test_recompute_gradients_are_the_plain_ones_bit_for_bit(norm, bias, approximate):
    torch.manual_seed(0)
    config = BlockConfig(
        16, 2, 64,
        attn=partial(Attention, qkv_bias=bias, proj_bias=bias),
        mlp=partial(Mlp, act=torch.nn.GELU(approximate=approximate), bias=bias),
        attn_norms=BranchNorms(norm), mlp_norms=BranchNorms(norm), layer_scale=0.1,
    )  # fmt: skip
    block, x = Block(config), torch.randn(3, 5, 16, requires_grad=True)
    results = []
    for forward in (block, partial(Forms().run_block, block, recomputes=True)):
        y = forward(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
