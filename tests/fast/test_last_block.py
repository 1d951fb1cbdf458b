"""``forward`` computes of the last block only what the head reads: exactly the long way's outputs and gradients."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import vitmods as vm

OVERRIDES = [
    {},
    {"reg_tokens": 2},
    {"depth": 1},
    {"layer_scale": 0.1},
    {"representation": True},
    {"qkv_bias": False},
    {"pool": "avg", "norm_after_pool": True},
    {"pool": "avg", "norm_after_pool": True, "reg_tokens": 2, "layer_scale": 0.1},
    {"pool": "avg", "norm_after_pool": True, "class_token": False},
    {"pool": "avg", "final_norm": None},
    {"pool": "avg"},
    {"pool": "map"},
    {"pool": "none"},
]
NORMFORMER = "normformer(head_scale=true,residual_scale=true)"
CHANGES = ["base", NORMFORMER, "subln", "placement(attn=post,mlp=pre+post)", "postnorm", "rms+dpn"]


def build(overrides, changes="base"):
    torch.manual_seed(0)
    model = vm.vit("mu2/4", img_size=(8, 12), num_classes=3, **overrides).double()
    model = vm.apply(model, *vm.parse_changes(changes)) if changes != "base" else model
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def long_way(model, images):
    return model.forward_head(model.forward_features(images))


def assert_exact(model, images):
    images.requires_grad_()
    leaves = [images, *model.parameters()]
    results = []
    for forward in (model, lambda x: long_way(model, x)):
        torch.manual_seed(1)
        out = forward(images)
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    for short, long in zip(*results, strict=True):
        torch.testing.assert_close(short, long, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("overrides", OVERRIDES, ids=str)
def test_outputs_and_gradients_are_those_of_the_long_way(overrides, training):
    model = build(overrides).train(training)
    assert_exact(model, torch.randn(2, 3, 8, 12, dtype=torch.float64))


@pytest.mark.parametrize("pool", ["token", "avg"])
@pytest.mark.parametrize("changes", CHANGES)
def test_the_same_with_every_kind_of_block(changes, pool):
    model = build({"pool": pool, "norm_after_pool": pool == "avg"}, changes)
    assert_exact(model, torch.randn(2, 3, 8, 12, dtype=torch.float64))


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_the_same_with_checkpointing(pool):
    """test_rule.py has the other forms and stochastic depth."""
    model = build({"pool": pool, "norm_after_pool": pool == "avg"})
    model.set_grad_checkpointing()
    assert_exact(model, torch.randn(4, 3, 8, 12, dtype=torch.float64))


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        ({}, {"fc1": 1, "fc2": 1}),
        ({"pool": "avg", "norm_after_pool": True}, {"fc1": 7, "fc2": 7}),
        ({"pool": "map"}, {"fc1": 7, "fc2": 7}),
    ],
    ids=str,
)
def test_the_last_mlp_computes_only_what_is_read(overrides, rows):
    """Of 7 tokens; other heads than a class token's read all."""
    model = build(overrides)
    counter = Rows({name: getattr(model.blocks[-1].mlp, name).weight for name in rows})
    with counter:
        model(torch.randn(2, 3, 8, 12, dtype=torch.float64))
    assert counter.seen == {name: 2 * count for name, count in rows.items()}
    model.forms = dataclasses.replace(model.forms, last_block=False)
    counter.seen.clear()
    with counter:
        model(torch.randn(2, 3, 8, 12, dtype=torch.float64))
    assert counter.seen == dict.fromkeys(rows, 14)


class Rows(TorchDispatchMode):
    """How many rows the products with certain weights have."""

    def __init__(self, weights):
        super().__init__()
        self.names = {weight.untyped_storage().data_ptr(): name for name, weight in weights.items()}
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "mm" in func.__name__ or "linear" in func.__name__:
            for name in {self.names.get(a.untyped_storage().data_ptr()) for a in args if isinstance(a, torch.Tensor)}:
                if name:
                    self.seen[name] = out.flatten(0, -2).shape[0]
        return out
