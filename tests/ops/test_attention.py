"""Attention in bfloat16 with gradients on a CPU: as right as PyTorch's, and not by its slow kernel."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from vitmods.ops.attention import LARGEST, attend

SHAPES = {"few tokens": (3, 2, 17, 64), "narrow heads": (3, 2, 65, 16), "wide heads": (3, 2, 65, 64)}


def heads(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


class Types(TorchDispatchMode):
    """The types that PyTorch's fused kernel was called with."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "flash_attention" in func.__name__:
            self.seen.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def error(values, exact):
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(values, exact, strict=True))


def run(form, leaves):
    y = form(*leaves)
    return [y, *torch.autograd.grad(y.double().sin().sum(), leaves)]


@pytest.mark.parametrize("masked", [None, "boolean", "added"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_outputs_and_gradients_are_right_to_rounding(shape, masked):
    half = heads(shape, torch.bfloat16)
    mask = torch.rand(shape[2], shape[2], generator=torch.Generator().manual_seed(1)) > 0.3
    mask = {None: None, "boolean": mask, "added": mask.to(torch.bfloat16)}[masked]
    exact = [t.detach().double().requires_grad_() for t in half]
    wide = mask if masked != "added" else mask.double()
    expected = run(lambda *qkv: F.scaled_dot_product_attention(*qkv, attn_mask=wide), exact)
    ours = error(run(lambda *qkv: attend(*qkv, mask), half), expected)
    theirs = error(run(lambda *qkv: F.scaled_dot_product_attention(*qkv, attn_mask=mask), half), expected)
    assert ours < 0.02
    assert ours < 2 * theirs


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_slow_kernel_is_not_taken(shape, autocast):
    leaves = heads(shape, torch.bfloat16)
    with Types() as types, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        run(attend, leaves)
    assert set(types.seen) <= {torch.float32}


def test_the_fused_kernel_is_taken_elsewhere():
    """In float32, without gradients, with dropout drawn by PyTorch, and for so many tokens that memory counts."""
    cases = [(torch.float32, 65, True), (torch.bfloat16, 65, False)]
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():  # other processors take float32
        cases.append((torch.bfloat16, LARGEST + 1, True))
    for dtype, tokens, grad in cases:
        with Types() as types, torch.set_grad_enabled(grad):
            attend(*heads((1, 2, tokens, 64), dtype))
        assert types.seen == [dtype]
