"""Which changes cannot go into one model, and in which order the others do; sizes of the published names."""

from itertools import combinations

import pytest
import torch

import vitmods as vm
from vitmods.changes import parse_changes
from vitmods.changes.compose import conflicts, edit, in_order
from vitmods.stats.runs import plan_factorial
from vitmods.util.errors import NoEffect, SlotConflict, UserError

CONFIG = vm.ViTConfig.from_name("Ti/16", img_size=64)


def arms(*texts):
    return {text: parse_changes(text) for text in texts}


@pytest.mark.parametrize(
    ("texts", "config", "pairs", "says"),
    [
        (
            ("dpn", "normformer", "subln", "stem(kind=hmlp)", "swiglu"),
            None,
            {("dpn", "stem(kind=hmlp)"), ("normformer", "subln")},
            "'mlp inner norm'",
        ),
        (("patchdropout", "dtn", "rms"), None, set(), ""),  # what only the config shows
        (("patchdropout", "dtn", "rms"), CONFIG, {("patchdropout", "dtn")}, "whole grid"),  # rms goes before dtn
        (("dpn+normformer", "subln+swiglu", "rms"), CONFIG, {("dpn+normformer", "subln+swiglu")}, ""),
    ],
)
def test_changes_that_exclude_each_other(texts, config, pairs, says):
    """Those that claim one slot; arms of several changes are compared whole."""
    found = conflicts(arms(*texts), config)
    assert set(found) == pairs
    assert not pairs or says in list(found.values())[-1]


@pytest.mark.parametrize("text", ["nobias+rms", "nobias+qknorm+rms"])
def test_a_change_that_undoes_another_comes_before_it(text):
    with pytest.raises(SlotConflict, match=r"'rms' would undo 'nobias': write 'rms\+nobias'"):
        edit(CONFIG, parse_changes(text))
    with pytest.raises(SlotConflict, match="would undo"):  # also later
        vm.apply(vm.apply(vm.vit("mu1/4", img_size=8), vm.BiasFree()), vm.Norm("rms"))
    assert not edit(CONFIG, parse_changes("rms+nobias")).qkv_bias
    assert not edit(CONFIG, parse_changes("nobias+norm(kind=rms,exact=false)")).qkv_bias
    assert conflicts(arms("nobias", "rms"), CONFIG) == {}
    assert in_order(arms("nobias", "rms"), CONFIG) == ("rms", "nobias")


def test_an_arm_that_fails_by_itself_is_an_error():
    with pytest.raises(NoEffect):
        conflicts(arms("placement", "dpn"), CONFIG)
    with pytest.raises(UserError, match="both claim"):
        conflicts(arms("normformer+subln", "dpn"))


def test_the_order_is_one_in_which_all_that_can_go_together_do():
    given = arms("dpn", "dtn", "stem(kind=hmlp)", "rms", "qknorm", "swiglu")
    order = in_order(given, CONFIG)
    assert order == ("dpn", "rms", "dtn", "stem(kind=hmlp)", "qknorm", "swiglu")
    excluded = conflicts(given, CONFIG)
    for pair in combinations(order, 2):
        if pair not in excluded and pair[::-1] not in excluded:
            edit(CONFIG, [change for name in pair for change in given[name]])
    assert in_order(arms("swiglu", "qknorm", "dpn"), CONFIG) == ("swiglu", "qknorm", "dpn")  # without reasons


def test_every_run_of_a_factorial_design_is_a_model():
    given = arms("patchdropout", "dtn", "dpn", "rms", "qknorm", "normformer")
    order = in_order(given, CONFIG)
    design = plan_factorial(order, conflicts(given, CONFIG))
    assert set(map(frozenset, design.conflicts)) == {frozenset({"patchdropout", "dtn"})}
    assert len(design.arms) == 12
    for row in design.arms.values():
        edit(CONFIG, [change for name in row for change in given[name]])


SIZES = [
    ("B/16", "size(wider=0.5,deeper=4)", "S48/16"),
    ("B/16", "size(wider=0.5,deeper=4)+parallel", "S24x2/16"),
    ("B/16", "parallel+size(wider=0.5,deeper=4)", "S24x2/16"),
    ("S48/16", "size(wider=2,deeper=0.25)", "B/16"),
    ("L/16", "size(wider=0.75,deeper=1.5)", "B36/16"),
    ("B/16", "size(depth=13)", "B13/16"),
    ("S/16", "size(width=432,heads=9)", "S*/16"),
    ("Ti/16", "size(heads=4)", "T*/16"),
]


@pytest.mark.parametrize(("base", "text", "name"), SIZES)
def test_sizes_are_those_of_the_names(base, text, name):
    assert edit(vm.ViTConfig.from_name(base), vm.parse_changes(text)) == vm.ViTConfig.from_name(name)


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
