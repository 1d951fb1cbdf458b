"""Recompute and frozen parts: gradients of what is trained are plain PyTorch's, and less is kept for backward."""

from contextlib import contextmanager

import pytest
import torch

import vitmods as vm
from vitmods import fast
from vitmods.util.errors import UserError


def build(what, changes="", **overrides):
    torch.manual_seed(0)
    model = vm.apply(vm.vit("mu3/4", img_size=16, num_classes=3, **overrides), *vm.parse_changes(changes))
    vm.train_only(model, what)
    return model


@contextmanager
def counting(model):
    """Bytes of each storage that autograd keeps, the parameters' own left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept, alive = {}, []

    def pack(t):
        if t.untyped_storage().data_ptr() not in parameters:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            alive.append(t.untyped_storage())  # a freed address could be given out twice
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield kept


def step(model, images, settings, autocast=False):
    """Outputs and all gradients, and the bytes kept for backward."""
    fast.recompute(model, "recompute" in settings)
    fast.recompute_frozen_mlps(model, "frozen" in settings)
    torch.manual_seed(1)
    with counting(model) as kept, torch.autocast("cpu", torch.bfloat16, autocast):
        out = model(images)
    model.zero_grad()
    images.grad = None
    out.float().square().sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    if images.requires_grad:
        grads["images"] = images.grad
    return {"output": out.detach(), **grads}, sum(kept.values())


PLACEMENT = "placement(attn=pre+post,mlp=pre)"
WHOLE = [
    *(("", fields) for fields in ({}, {"pool": "avg"}, {"qkv_bias": False, "proj_bias": False})),
    *(("", {"activation": "gelu_tanh"}), ("rms", {"activation": "gelu_tanh"}), ("rms", {"pool": "avg"})),
    *((changes, {}) for changes in ("dpn", "layerscale", "normformer", "subln", PLACEMENT)),
]


@pytest.mark.parametrize(("changes", "fields"), WHOLE, ids=str)
def test_recomputed_gradients_are_bitwise_equal_and_fewer_bytes_are_kept(changes, fields):
    model, images = build("all", changes, **fields), torch.randn(2, 3, 16, 16, requires_grad=True)
    plain, plain_bytes = step(model, images, ())
    actual, found_bytes = step(model, images, ("recompute",))
    assert plain.keys() == actual.keys() > dict(model.named_parameters()).keys()
    assert all(torch.equal(plain[name], actual[name]) for name in plain)
    assert found_bytes < plain_bytes


@pytest.mark.parametrize("pool", ["token", "avg"])
@pytest.mark.parametrize("changes", ["", "rms", "layerscale", PLACEMENT])
@pytest.mark.parametrize("what", ["attention", "attention+norms"])
def test_gradients_are_those_of_plain_pytorch(what, changes, pool):
    """In float64, where a change of the order of sums shows in the last digits only."""
    model = build(what, changes, pool=pool).double()
    images = torch.randn(5, 3, 16, 16, dtype=torch.float64)
    plain, plain_bytes = step(model, images, ())
    assert plain.keys() - {"output"} == {name for name, p in model.named_parameters() if p.requires_grad}
    for settings in (("recompute",), ("frozen",), ("recompute", "frozen")):
        actual, found_bytes = step(model, images, settings)
        assert actual.keys() == plain.keys()
        for name, value in plain.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-12, atol=1e-12 * float(value.abs().max()))
        assert found_bytes < plain_bytes


@pytest.mark.parametrize(("what", "settings"), [("attention", ("recompute", "frozen")), ("all", ("recompute",))])
def test_autocast(what, settings):
    """bfloat16 linear layers, float32 norms: as close to the plain model as bfloat16 allows."""
    model, images = build(what, "rms"), torch.randn(2, 3, 16, 16)
    plain = step(model, images, (), autocast=True)[0]
    for name, value in step(model, images, settings, autocast=True)[0].items():
        assert value.dtype == plain[name].dtype
        torch.testing.assert_close(value, plain[name], atol=0.03 * float(plain[name].abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("setting", "model", "message"),
    [
        (fast.recompute_frozen_mlps, lambda: build("all"), "No MLP of this model is frozen"),
        (fast.recompute_frozen_mlps, lambda: build("attention", "norm(kind=scale)"), "can be recomputed"),
        (fast.recompute, lambda: build("all", "postnorm"), "recompute"),
        (fast.recompute, lambda: torch.nn.Linear(1, 1), "Linear is not a vitmods ViT"),
    ],
)
def test_it_says_where_it_cannot_help(setting, model, message):
    with pytest.raises(UserError, match=message):
        setting(model())
    fast.recompute(build("all", "postnorm"), False)


def test_what_is_kept():
    """Of full training: in plain PyTorch, recompute, and with the frozen MLPs run again."""
    images, model, kept = torch.randn(2, 3, 32, 32), vm.vit("mu8/4", img_size=32), []
    for prepare in (None, lambda it: vm.train_only(it, "attention"), fast.recompute, fast.recompute_frozen_mlps):
        if prepare is not None:
            prepare(model)
        kept.append(step_bytes(model, images))
    plain, recompute, least = (bytes_kept / kept[0] for bytes_kept in kept[1:])
    assert plain < 0.72
    assert recompute < 0.66
    assert least < 0.43


def step_bytes(model, images):
    with counting(model) as kept:
        model(images)
    return sum(kept.values())


def test_nothing_is_computed_below_the_lowest_trained_parameter():
    model = build(lambda role: role == "head")
    fast.recompute(model)
    seen = []
    for block in model.blocks:
        block.register_full_backward_hook(lambda *_: seen.append(1))
    features = []
    model.norm.register_forward_hook(lambda module, given, out: features.append(out.requires_grad))
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    assert features == [False]
    assert not seen
    assert model.head.weight.grad is not None


def test_the_setting_follows_what_is_trained():
    model, images = build("attention"), torch.randn(2, 3, 16, 16)
    fast.recompute_frozen_mlps(model)
    vm.train_only(model, "all")
    model(images).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    model = build("attention")
    fast.recompute_frozen_mlps(model, keep_last=1)
    fast.recompute(model)
    forms = vm.apply(model, vm.DualPatchNorm()).forms
    assert (forms.recompute, forms.recompute_frozen_mlps, forms.keep_last) == (True, True, 1)


def test_the_last_blocks_may_keep_theirs():
    model, images = build("attention", pool="avg"), torch.randn(2, 3, 16, 16)
    kept = []
    for last in (0, 1, 2):
        fast.recompute_frozen_mlps(model, keep_last=last)
        kept.append(step_bytes(model, images))
    assert kept[0] <= kept[1] < kept[2]  # the very last block reads the mean of its hidden layer in any case
    with pytest.raises(UserError, match="from 0 to 2, not 3"):
        fast.recompute_frozen_mlps(model, keep_last=3)


@pytest.mark.parametrize(
    ("what", "settings", "channels"),
    [
        ("all", ("recompute",), 10),
        ("all", (), 16),  # input of each norm, its output, q k v, heads; its input and output, the MLP's two of four
        ("attention", (), 11),  # without the second norm's output and the GELU's
        ("attention", ("recompute",), 10),  # without the first norm's output
        ("attention", ("recompute", "recompute_frozen_mlps"), 6),  # input, q k v, heads, input of the MLP
        ("head", (), 0),
    ],
)
def test_floats_that_a_block_keeps_for_each_channel_and_token(what, settings, channels):
    """Exactly, but for a few numbers a token (statistics of norms and of the softmax)."""
    kept = []
    for depth in (2, 3):
        model = vm.vit("Ti/4", img_size=32, depth=depth, pool="avg", embed_dim=96, num_heads=2, mlp_dim=384)
        vm.train_only(model, what)
        for setting in settings:
            getattr(fast, setting)(model)
        kept.append(step_bytes(model, torch.randn(2, 3, 32, 32)))
    per_token = (kept[1] - kept[0]) / (4 * 2 * 65 * 96)
    assert channels <= per_token < channels + 0.11


def test_parallel_branches():
    model = build("attention", "parallel", depth=4).double()
    images = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    plain, plain_bytes = step(model, images, ())
    actual, found_bytes = step(model, images, ("recompute", "frozen"))
    for name, value in plain.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-10, atol=1e-10 * float(value.abs().max()))
    assert found_bytes < plain_bytes
    assert sum(name.endswith("qkv.weight") for name in plain) == 4  # two branches in each of two blocks
