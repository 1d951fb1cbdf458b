"""Another depth, width or number of heads: the sizes of the published names, and which weights live on."""

import pytest
import torch

import vitmods as vm
from vitmods.util.errors import NoEffect, UserError


def edited(base, text):
    config = vm.ViTConfig.from_name(base)
    for change in vm.parse_changes(text):
        config = change.edit(config)
    return config


@pytest.mark.parametrize(
    ("base", "text", "name"),
    [
        ("B/16", "size(wider=0.5,deeper=4)", "S48/16"),
        ("B/16", "size(wider=0.5,deeper=4)+parallel", "S24x2/16"),
        ("B/16", "parallel+size(wider=0.5,deeper=4)", "S24x2/16"),
        ("S48/16", "size(wider=2,deeper=0.25)", "B/16"),
        ("L/16", "size(wider=0.75,deeper=1.5)", "B36/16"),
        ("B/16", "size(depth=13)", "B13/16"),
        ("S/16", "size(width=432,heads=9)", "S*/16"),
        ("Ti/16", "size(heads=4)", "T*/16"),
    ],
)
def test_sizes_are_those_of_the_names(base, text, name):
    assert edited(base, text) == vm.ViTConfig.from_name(name)


def test_weights_live_on_where_the_width_stays():
    old = vm.vit("mu3x2/4", img_size=8, num_classes=5)
    new = vm.apply(old, vm.Size(depth=4))
    assert vm.diff(old, new).preserves == "weights"
    kept = new.state_dict()
    assert all(torch.equal(old.state_dict()[name], value) for name, value in kept.items())
    assert len(new.blocks) == 2
    back = vm.apply(new, vm.Size(deeper=1.5)).state_dict()
    assert all(torch.equal(back[name], value) for name, value in kept.items())
    more_heads = vm.apply(old, vm.Size(heads=4)).state_dict()
    assert all(torch.equal(more_heads[name], value) for name, value in old.state_dict().items())
    wide = vm.apply(old, vm.Size(wider=2))
    assert wide.head.weight.shape == (5, 64)
    assert vm.diff(old, wide).preserves == "nothing"


@pytest.mark.parametrize("text", ["size(deeper=2)", "size(depth=5)", "size(heads=1)"])
def test_a_lost_weight_is_noticed_where_the_width_stays(text, monkeypatch):
    monkeypatch.setattr(vm.Size, "carry", lambda *_: {})
    with pytest.raises(AssertionError, match="promises the weights"):
        vm.apply(vm.vit("mu3/4", img_size=8), *vm.parse_changes(text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("size(wider=0.7)", "makes 22.4 channels of 32"),
        ("size(width=40)", "makes 2.5 heads of 40"),
        ("size(deeper=0.5)", "makes 0.5 blocks of 1"),
        ("size(depth=2,deeper=2)", "says the same twice"),
        ("size(heads=3)", "3 heads do not divide 32"),
        ("size", "give depth, deeper"),
        ("size(depth=0)", "positive number"),
    ],
)
def test_sizes_without_whole_parts_are_refused(text, says):
    with pytest.raises(UserError, match=says):
        edited("mu/4", text)
    with pytest.raises(NoEffect):
        vm.apply(vm.vit("mu/4", img_size=8), vm.Size(depth=1))
