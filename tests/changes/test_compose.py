"""Which changes cannot go into one model, and in which order the others do."""

from itertools import combinations

import pytest

import vitmods as vm
from vitmods.changes import parse_changes
from vitmods.changes.compose import conflicts, edit, in_order
from vitmods.stats.design import plan_factorial
from vitmods.util.errors import NoEffect, SlotConflict, UserError

CONFIG = vm.ViTConfig.from_name("Ti/16", img_size=64)


def arms(*texts):
    return {text: parse_changes(text) for text in texts}


def test_changes_that_claim_one_slot_exclude_each_other():
    pairs = conflicts(arms("dpn", "normformer", "subln", "stem(kind=hmlp)", "swiglu"))
    assert set(pairs) == {("dpn", "stem(kind=hmlp)"), ("normformer", "subln")}
    assert "'mlp inner norm'" in pairs["normformer", "subln"]


def test_what_only_the_config_shows_needs_the_config():
    chosen = arms("patchdropout", "dtn", "rms")
    assert conflicts(chosen) == {}
    pairs = conflicts(chosen, CONFIG)
    assert set(pairs) == {("patchdropout", "dtn")}  # rms goes before dtn, though not after it
    assert "whole grid" in pairs["patchdropout", "dtn"]


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


def test_arms_of_several_changes_are_compared_whole():
    pairs = conflicts(arms("dpn+normformer", "subln+swiglu", "rms"), CONFIG)
    assert set(pairs) == {("dpn+normformer", "subln+swiglu")}


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


def test_every_run_of_a_factorial_design_is_a_model():
    given = arms("patchdropout", "dtn", "dpn", "rms", "qknorm", "normformer")
    order = in_order(given, CONFIG)
    design = plan_factorial(order, conflicts(given, CONFIG))
    assert set(map(frozenset, design.conflicts)) == {frozenset({"patchdropout", "dtn"})}
    assert len(design.arms) == 12
    for row in design.arms.values():
        edit(CONFIG, [change for name in row for change in given[name]])


def test_an_order_without_reasons_is_the_given_one():
    given = arms("swiglu", "qknorm", "dpn")
    assert in_order(given, CONFIG) == ("swiglu", "qknorm", "dpn")
