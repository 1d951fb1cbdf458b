"""Grids, what users write of them, and which point is chosen."""

from collections import Counter

import pytest

from vitmods.changes import DualPatchNorm
from vitmods.recipes import Recipe
from vitmods.study.arms import Arm, make_arms
from vitmods.study.plan import (
    Evaluation,
    Grid,
    Point,
    Settings,
    check_plan,
    choose,
    differences,
    grid_from_text,
    make_grid,
)
from vitmods.study.state import at_the_edge
from vitmods.util.errors import UserError

FIXED = {"task": "classification", "data": "digits", "base": "mu/4", "recipe": Recipe().to_dict()}
A, B, C = (Point((("lr", lr),)) for lr in (1e-4, 3e-4, 1e-3))


def settings(tune, arms=("dpn",), **options):
    grid = make_grid(tune, "val" if tune else None)
    return Settings(FIXED, make_arms(list(arms)), (0, 1), grid=grid, tuning_seeds=(0, 1) if tune else (), **options)


def test_values_are_read_by_the_type_of_their_field():
    grid = make_grid(
        grid_from_text(["lr=1e-4,3e-4", "weight-decay=0", "ema=none,0.99", "randaugment=2:10,none", "optimizer=sgd"]),
        "val",
    )
    assert dict(grid.fields) == {
        "lr": (1e-4, 3e-4),
        "weight_decay": (0.0,),
        "ema": (None, 0.99),
        "randaugment": ((2, 10.0), None),
        "optimizer": ("sgd",),
    }
    assert make_grid({"lr": 3}, "val").fields == (("lr", (3.0,)),)
    assert make_grid({"epochs": ["3"], "lr": (0.1, 1)}, "val").fields == (("epochs", (3,)), ("lr", (0.1, 1.0)))


def test_points_are_the_product_in_the_given_order():
    grid = make_grid({"lr": (3e-4, 1e-4), "weight_decay": (0, 0.1)}, "val")
    assert [str(point) for point in grid.points] == [
        "lr=0.0003,weight_decay=0",
        "lr=0.0003,weight_decay=0.1",
        "lr=0.0001,weight_decay=0",
        "lr=0.0001,weight_decay=0.1",
    ]
    assert make_grid({}, None).points == (Point(),)
    assert Grid.from_dict(grid.to_dict()) == grid


@pytest.mark.parametrize(
    ("tune", "on", "says"),
    [
        ({"lrr": 1}, "val", "no field 'lrr' to tune. Did you mean 'lr'"),
        ({"lr": ["1e-3", "0.001"]}, "val", "lr=0.001 is to be tried twice"),
        ({"lr": ()}, "val", "no value of lr"),
        ({"lr": "fast"}, "val", "'fast' is no value of lr, which is a number"),
        ({"epochs": 1.5}, "val", "1.5 is no value of epochs, which is a whole number"),
        ({"epochs": True}, "val", "True is no value of epochs"),
        ({"optimizer": "adam"}, "val", "adamw or sgd"),
        ({"randaugment": "2"}, "val", "with : between them or none"),
        ({"lr": 1e-3}, None, "--tune-on val"),
        ({"lr": 1e-3}, "test", "chosen on test: the best of several"),
        ({"lr": 1e-3}, "vla", "only on the validation split"),
        ({}, "val", "without anything to tune"),
    ],
)
def test_bad_grids_are_refused_with_a_remedy(tune, on, says):
    with pytest.raises(UserError, match=says):
        make_grid(tune, on)


@pytest.mark.parametrize("text", ["lr", "lr=", "=3", "lr=1", "lr=2"])
def test_what_the_shell_takes(text):
    with pytest.raises(UserError, match="--tune"):
        grid_from_text([text, "lr=1"])


def test_an_arm_may_not_set_what_is_tuned_but_anything_else():
    check_plan(settings({"lr": 1e-4}, ["train(attention)+dpn"]))
    with pytest.raises(UserError, match=r"Arm slow sets lr=0.5, and lr is tuned"):
        check_plan(settings({"lr": 1e-4}, [Arm("slow", (DualPatchNorm(),), {"lr": 0.5})]))
    with pytest.raises(UserError, match=r"lr=-1: recipe: lr must be at least 0"):
        check_plan(settings({"lr": (1, -1)}))


def test_the_best_mean_wins_the_first_of_equals_and_divergence_is_worst():
    scores = {A: {0: 0.5, 1: 0.7}, B: {0: 0.7, 1: 0.7}, C: {0: 0.8, 1: 0.6}}
    assert choose(scores) == B
    assert choose(scores, higher_is_better=False) == A
    assert choose({**scores, B: {0: 0.9, 1: None}}) == C
    assert choose({A: {0: None, 1: None}, B: {0: None, 1: 0.1}, C: {0: None, 1: 0.1}}) == B
    assert choose({A: {0: None}, B: {0: None}}) == A


def test_every_arm_has_the_same_budget_and_base_comes_first():
    one = settings({"lr": (1e-4, 3e-4, 1e-3)}, ["dpn", "rms"])
    trials = one.tuning_trials()
    assert len(trials) == len(set(trials)) == 3 * 2 * 3
    assert Counter(trial.arm.name for trial in trials) == {"base": 6, "dpn": 6, "rms": 6}
    assert {trial.arm.name for trial in trials[:3]} == {"base"}
    assert one.recipe_of(one.arm("dpn"), C).optimizer.lr == 1e-3


def test_work_is_named_for_a_worker():
    one = settings({"lr": (1e-4, 3e-4), "randaugment": ((2, 10.0), None)})
    for trial in one.tuning_trials():
        assert one.work(trial.to_dict()) == trial
        assert one.work(Evaluation(trial, "test").to_dict()) == Evaluation(trial, "test")
    assert Settings.from_dict(one.to_dict()) == one


def test_values_may_be_added_but_nothing_may_leave():
    old = settings({"lr": (1e-4, 3e-4)}).to_dict()
    assert differences(old, settings({"lr": (1e-3, 3e-4, 1e-4)}).to_dict()) == []
    assert differences(old, settings({"lr": 1e-4}).to_dict()) == ["tune lr: [0.0001, 0.0003] -> [0.0001]"]
    assert differences(old, settings({}).to_dict()) == ["tune: lr -> (nothing)"]
    assert differences(settings({}).to_dict(), old) == ["tune: (nothing) -> lr"]
    both = settings({"lr": (1e-4, 3e-4), "weight_decay": 0.1}).to_dict()
    assert differences(old, both) == ["tune: lr -> lr weight_decay"]


def test_a_choice_at_the_end_of_what_was_tried_is_reported():
    grid = make_grid({"lr": (3e-4, 1e-4, 1e-3), "optimizer": ("sgd", "adamw"), "weight_decay": 0.1}, "val")
    assert at_the_edge(grid, Point((("lr", 1e-4), ("optimizer", "sgd"), ("weight_decay", 0.1)))) == ["lr"]
    assert at_the_edge(grid, Point((("lr", 3e-4), ("optimizer", "sgd"), ("weight_decay", 0.1)))) == []


def test_a_model_is_shown_without_its_options_and_kept_apart_from_others_of_its_name():
    first, second = (Point((("base", f"hf-text:big_bird?hidden_size={n}&num_hidden_layers=2"),)) for n in (32, 64))
    assert str(first).startswith("base=hf-text:big_bird?…")
    assert len({str(first), str(second)}) == 2
    assert first.spelled == "base=hf-text:big_bird?hidden_size=32&num_hidden_layers=2"
    assert str(Point((("base", "timm:pvt_v2_b0?drop_rate=0.1"),))) == "base=timm:pvt_v2_b0?drop_rate=0.1"
