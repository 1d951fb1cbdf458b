"""Arms, seeds, sweeps and grids: what users write of them, which trials follow, and which point is chosen."""

import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest

from vitmods.changes import DualPatchNorm, DynamicTokenNorm, Norm
from vitmods.recipes import Recipe
from vitmods.study.arms import Arm, arm_from_text, make_arms
from vitmods.study.cells import MOST_SEEDS
from vitmods.study.grid import Grid, Point, choose, make_grid
from vitmods.study.settings import Settings, StudySettings, check_settings, differences, make_measure, make_seeds
from vitmods.study.state import at_the_edge
from vitmods.study.study import Study
from vitmods.util.errors import UserError

FIXED = {
    "task": "classification",
    "data": "digits",
    "base": "mu/2",
    "recipe": Recipe().with_(epochs=3, lr=0.1, crop_scale=(0.1, 1.0)).to_dict(),
}


LR = Grid((("lr", (0.1, 0.2)),))


def settings(arms=("dpn",), seeds=2, data="digits", recipe=FIXED["recipe"], **options):
    return Settings({**FIXED, "data": data, "recipe": recipe}, make_arms(arms), make_seeds(seeds), **options)


def test_an_arm_is_named_by_itself_or_by_the_user():
    assert arm_from_text("dpn+rms") == Arm("dpn+rms", (DualPatchNorm(), Norm("rms")))
    assert arm_from_text("dpn(before=false)").name == "dpn(before=false)"
    named = arm_from_text("my arm = dpn(before=false)")
    assert (named.name, named.short) == ("my arm", "dpn(before=false)")


def test_arms_come_as_a_mapping_too_and_base_is_left_out():
    assert make_arms("dpn") == make_arms({"dpn": DualPatchNorm()}) == (Arm("dpn", (DualPatchNorm(),)),)
    arms = make_arms({"base": [], "one": [DualPatchNorm()], "two": "dpn+rms"})
    assert [(arm.name, arm.short) for arm in arms] == [("one", "dpn"), ("two", "dpn+rms")]


def test_a_line_up_becomes_its_arms():
    names = ["batch", "instance", "group", "switchable", "scale", "power", "dtn", "rms", "late"]
    arms = make_arms("norms")
    assert [arm.name for arm in arms] == names
    assert arms == make_arms(["norms"]) == make_arms([" norms "]) == make_arms("paper:dtn-table3")
    assert arms[-2].changes == (Norm("rms", exact=False),)  # the exact one begins as the base's own function
    others = set(names) - {"dtn", "late"}
    assert {arm.name: arm.changes[0].kind for arm in arms if arm.name in others} == {n: n for n in others}
    assert [arms[i].changes for i in (-3, -1)] == [(DynamicTokenNorm(),), (DynamicTokenNorm(trade_off=1.0),)]
    assert [arm.name for arm in make_arms(["dpn", "norms", "post=postnorm"])] == ["dpn", *names, "post"]


def test_a_line_up_is_named_by_its_author_alone():
    """Arms of the user's keep their names, also where such a name is a line-up's."""
    assert make_arms({"norms": "dpn"}) == make_arms(["norms=dpn"]) == (Arm("norms", (DualPatchNorm(),)),)


@pytest.mark.parametrize(
    ("arms", "says"),
    [
        (["norms", "dtn"], "Two arms are named dtn. Leave one out"),
        (["norms", "norms"], "Two arms are named batch"),
        (["norms", "x=batchnorm"], "Arms batch and x are the same changes"),
        (["nroms"], "Did you mean 'norm'"),
        (["paper:dpn-table9"], "Unknown table 'dpn-table9'. Did you mean"),
        (["x=norms"], "several arms of a study.*--arms norms`.*scalenorm"),
        (["norms+dpn"], "several arms of a study"),
        ({"x": "norms"}, "several arms of a study"),
        ([], "needs an arm"),
        (["dpn", "dpn"], "Two arms are named dpn"),
        (["dpn", "x=dpn"], "the same changes"),
        (["base=dpn"], "base is the model without changes"),
        ({"x": []}, "changes nothing"),
        (["dpm"], "dpn"),
        ("dpm", "dpn"),
        ({"x": 3}, "Arm x: 3 is not a change"),
        ({"x": DualPatchNorm}, "is not a change"),
    ],
)
def test_bad_arms_are_refused_with_a_remedy(arms, says):
    with pytest.raises(UserError, match=says):
        make_arms(arms)


def test_seeds_are_a_number_or_a_list():
    assert make_seeds(3) == (0, 1, 2)
    assert make_seeds([4, 1]) == (4, 1)
    for bad in (0, [], [1, 1], [-1], [MOST_SEEDS]):
        with pytest.raises(UserError):
            make_seeds(bad)


def test_points_are_tried_on_seeds_of_their_own_and_every_setting():
    study = settings(["dpn"], tune=LR, sweep={"base": ("mu/4", "Ti/4")})
    trials = [(str(t.setting), t.arm.name, str(t.point), t.seed) for t in study.tuning_trials()]
    assert trials[:5] == [
        ("base=mu/4", "base", "lr=0.1", MOST_SEEDS),
        ("base=mu/4", "base", "lr=0.2", MOST_SEEDS),
        ("base=mu/4", "dpn", "lr=0.1", MOST_SEEDS),
        ("base=mu/4", "dpn", "lr=0.2", MOST_SEEDS),
        ("base=Ti/4", "base", "lr=0.1", MOST_SEEDS),
    ]
    assert study.planned == len(trials) + 2 * 3 * 2, "base at the arm's point too, at most"
    assert replace(study, tuning_seeds=2).planned == 2 * len(trials) + 2 * 3 * 2


def test_a_cell_has_the_values_of_its_setting():
    study = settings(sweep={"base": ("mu/4", "Ti/4"), "lr": (0.1, 0.3)})
    last = study.cells[-1]
    assert (last.fixed["base"], last.recipe.optimizer.lr, str(last.setting)) == ("Ti/4", 0.3, "base=Ti/4,lr=0.3")
    assert study.fixed["base"] != "Ti/4"


def test_settings_survive_json():
    study = settings({"x": Arm("x", (DualPatchNorm(before=False),), {"lr": 0.2}).changes})
    assert Settings.from_dict(study.to_dict()) == study
    grown = replace(study, tune=LR, tuning_seeds=3, margin=2.0, sweep={"limit_train": (0.5, 1.0)})
    again = Settings.from_dict(json.loads(json.dumps(grown.to_dict())))
    assert again == replace(grown, fixed=again.fixed)


def test_an_arm_may_override_the_recipe():
    arm = Arm("slow", (DualPatchNorm(),), {"lr": 0.01})
    study = Settings(FIXED, make_arms([arm]), (0,))
    assert study.cell("slow").recipe.optimizer.lr == 0.01
    assert study.cell("base").recipe.optimizer.lr == 0.1


def test_adding_arms_seeds_or_another_margin_is_the_same_study():
    grown = replace(settings(["rms", "dpn"], seeds=3, until_decided=True, margin=1.0), family=4)
    assert Settings.from_dict(grown.to_dict()).family == 4
    assert differences(settings().to_dict(), grown.to_dict()) == []


def test_a_study_whose_recipe_lacks_a_field_that_was_added_later_is_the_same_study():
    old, new = settings().to_dict(), settings().to_dict()
    old["recipe"] = json.loads(json.dumps(old["recipe"]))
    assert old["recipe"]["optimizer"].pop("decay_all") is False
    assert differences(old, new) == []


def test_every_other_change_is_a_difference_and_is_shown():
    old = settings(["dpn", "rms"], seeds=3).to_dict()
    new = settings(
        {"dpn": "dpn(before=false)"}, data="other", recipe=Recipe.from_dict(FIXED["recipe"]).with_(lr=0.3).to_dict()
    ).to_dict()
    assert differences(old, new) == [
        "data: digits -> other",
        "recipe.optimizer.lr: 0.1 -> 0.3",
        "arm dpn: dpn -> dpn(before=false)",
        "arm rms: norm(kind=rms) -> (missing)" if str(Norm("rms")) != "rms" else "arm rms: rms -> (missing)",
        "seeds: [0, 1, 2] -> [0, 1]",
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seeds": 3, "until_decided": True}, "at most 4 to 32 seeds"),
        ({"seeds": 5, "until_decided": True, "sweep": {"lr": (0.2, 0.4)}}, "number of seeds is fixed"),
        ({"sweep": {"lr": (0.2, 0.4)}, "arms": [Arm("a", (), {"lr": 0.3})]}, "swept over"),
        ({"tune": LR, "arms": [Arm("a", (), {"lr": 0.3})]}, "tuned for every arm"),
    ],
)
def test_plans_that_cannot_be_are_refused(options, says):
    with pytest.raises(UserError, match=says):
        check_settings(settings(**options))


@pytest.mark.parametrize(("sweep", "says"), [({"limit_train": "half"}, "limit_train is"), ({"lrr": 1}, "'lr'")])
def test_sweeps_that_cannot_be_are_refused(sweep, says):
    with pytest.raises(UserError, match=says):
        make_grid(sweep, "--sweep")


A, B, C = (Point((("lr", lr),)) for lr in (1e-4, 3e-4, 1e-3))


def tuned(tune, arms=("dpn",), **options):
    return Settings(FIXED, make_arms(list(arms)), (0, 1), tune=tune, tuning_seeds=2 if tune else 1, **options)


def test_values_are_read_by_the_type_of_their_field():
    grid = make_grid(["lr=1e-4,3e-4", "weight-decay=0", "ema=none,0.99", "randaugment=2:10,none", "optimizer=sgd"])
    values = {"lr": (1e-4, 3e-4), "weight_decay": (0.0,), "ema": (None, 0.99), "optimizer": ("sgd",)}
    assert dict(grid.fields) == {**values, "randaugment": ((2, 10.0), None)}
    assert make_grid({"lr": 3}).fields == (("lr", (3.0,)),)
    bases = make_grid(["base=Ti/16,timm:vit_tiny_patch16_224?img_size=(64,64),S/16?drop_path=0.1"], "--sweep")
    assert bases.fields[0][1] == ("Ti/16", "timm:vit_tiny_patch16_224?img_size=(64,64)", "S/16?drop_path=0.1")
    sets = make_grid(["data=a?splits=x:train,y:test&group=name,b,c:d"], "--sweep")
    assert sets.fields[0][1] == ("a?splits=x:train,y:test&group=name", "b", "c:d")
    assert make_grid({"norm_last_layer": ["false", "true"]}).fields == (("norm_last_layer", (False, True)),)
    assert make_grid({"epochs": ["3"], "lr": (0.1, 1)}).fields == (("epochs", (3,)), ("lr", (0.1, 1.0)))


def test_points_are_the_product_in_the_given_order():
    grid = make_grid({"lr": (3e-4, 1e-4), "weight_decay": (0, 0.1)})
    order = [f"lr={lr},weight_decay={decay}" for lr in (0.0003, 0.0001) for decay in (0, 0.1)]
    assert [str(point) for point in grid.points] == order
    assert make_grid({}).points == (Point(),)
    assert Grid.from_dict(grid.to_dict()) == grid


@pytest.mark.parametrize(
    ("tune", "seeds", "says"),
    [
        ({"lrr": 1}, 1, "the field 'lrr'. Did you mean 'lr'"),
        ({"lr": ["1e-3", "0.001"]}, 1, "lr=0.001 is listed twice"),
        ({"lr": ()}, 1, "lr needs at least one value"),
        ({"lr": "fast"}, 1, "lr is a number, not 'fast'"),
        ({"epochs": 1.5}, 1, "epochs is a whole number, not 1.5"),
        ({"epochs": True}, 1, "epochs is a whole number, not True"),
        ({"optimizer": "adam"}, 1, "adamw or sgd"),
        ({"norm_last_layer": "no"}, 1, "norm_last_layer is true or false, not 'no'"),
        ({"randaugment": "2"}, 1, "with : between them or none"),
        ({"lr": 1e-3}, 0, "tuning_seeds must be at least 1"),
        ({}, 2, "Nothing is tuned"),
    ],
)
def test_bad_grids_are_refused_with_a_remedy(tune, seeds, says):
    with pytest.raises(UserError, match=says):
        StudySettings(tune=tune, tuning_seeds=seeds)


@pytest.mark.parametrize("text", ["lr", "lr=", "=3", "lr=1", "lr=2"])
def test_what_the_shell_takes(text):
    with pytest.raises(UserError, match="--tune"):
        make_grid([text, "lr=1"])


def test_an_arm_may_not_set_what_is_tuned_but_anything_else():
    check_settings(tuned({"lr": 1e-4}, ["train(attention)+dpn"]))
    with pytest.raises(UserError, match=r"Arm slow sets lr=0.5, and lr is tuned"):
        check_settings(tuned({"lr": 1e-4}, [Arm("slow", (DualPatchNorm(),), {"lr": 0.5})]))
    with pytest.raises(UserError, match=r"lr=-1: recipe: lr must be at least 0"):
        check_settings(tuned({"lr": (1, -1)}))


def test_the_best_mean_wins_the_first_of_equals_and_divergence_is_worst():
    scores = {A: {0: 0.5, 1: 0.7}, B: {0: 0.7, 1: 0.7}, C: {0: 0.8, 1: 0.6}}
    assert choose(scores) == B
    assert choose(scores, higher_is_better=False) == A
    assert choose({**scores, B: {0: 0.9, 1: None}}) == C
    assert choose({A: {0: None, 1: None}, B: {0: None, 1: 0.1}, C: {0: None, 1: 0.1}}) == B
    assert choose({A: {0: None}, B: {0: None}}) == A


def test_every_arm_has_the_same_budget_and_base_comes_first():
    study = tuned({"lr": (1e-4, 3e-4, 1e-3)}, ["dpn", "rms"])
    trials = study.tuning_trials()
    assert len(trials) == len(set(trials)) == 3 * 2 * 3
    assert Counter(trial.arm.name for trial in trials) == {"base": 6, "dpn": 6, "rms": 6}
    assert {trial.arm.name for trial in trials[:3]} == {"base"}
    assert study.cell("dpn", point=C).recipe.optimizer.lr == 1e-3


def test_trials_are_named_for_a_worker():
    study = tuned({"lr": (1e-4, 3e-4), "randaugment": ((2, 10.0), None)})
    for trial in study.tuning_trials():
        assert study.trial(trial.to_dict()) == trial
    assert Settings.from_dict(study.to_dict()) == study


def test_an_older_file_may_say_that_values_are_chosen_on_val():
    study = tuned({"lr": (1e-4, 3e-4)})
    old = {**study.to_dict(), "tune_on": "val"}
    assert old["tuning_seeds"] == [MOST_SEEDS, MOST_SEEDS + 1]
    assert Settings.from_dict(old) == study
    assert differences(old, study.to_dict()) == []


def test_values_may_be_added_but_nothing_may_leave():
    old = tuned({"lr": (1e-4, 3e-4)}).to_dict()
    assert differences(old, tuned({"lr": (1e-3, 3e-4, 1e-4)}).to_dict()) == []
    assert differences(old, tuned({"lr": 1e-4}).to_dict()) == ["tune lr: [0.0001, 0.0003] -> [0.0001]"]
    assert differences(old, tuned({}).to_dict()) == ["tune: lr -> (nothing)"]
    assert differences(tuned({}).to_dict(), old) == ["tune: (nothing) -> lr"]
    both = tuned({"lr": (1e-4, 3e-4), "weight_decay": 0.1}).to_dict()
    assert differences(old, both) == ["tune: lr -> lr weight_decay"]


def test_a_choice_at_the_end_of_what_was_tried_is_reported():
    grid = make_grid({"lr": (3e-4, 1e-4, 1e-3), "optimizer": ("sgd", "adamw"), "weight_decay": 0.1})
    assert at_the_edge(grid, Point((("lr", 1e-4), ("optimizer", "sgd"), ("weight_decay", 0.1)))) == ["lr"]
    assert at_the_edge(grid, Point((("lr", 3e-4), ("optimizer", "sgd"), ("weight_decay", 0.1)))) == []


def test_a_model_is_shown_without_its_options_and_kept_apart_from_others_of_its_name():
    first, second = (Point((("base", f"hf-text:big_bird?hidden_size={n}&num_hidden_layers=2"),)) for n in (32, 64))
    assert str(first).startswith("base=hf-text:big_bird?…")
    assert len({str(first), str(second)}) == 2
    assert first.spelled == "base=hf-text:big_bird?hidden_size=32&num_hidden_layers=2"
    assert str(Point((("base", "timm:pvt_v2_b0?drop_rate=0.1"),))) == "base=timm:pvt_v2_b0?drop_rate=0.1"


@pytest.mark.parametrize(("metric", "refused"), [("top5", False), ("ece", False), ("fewshot5", False), ("miou", True)])
def test_a_metric_that_the_task_does_not_measure_is_refused(metric, refused):
    planned = settings(metric=make_measure(metric))
    with pytest.raises(UserError, match="does not measure miou, which segmentation does") if refused else nullcontext():
        check_settings(planned)


def test_values_that_are_read_once_are_kept():
    study = Study("mu1/4", ["dpn"], sweep=(f"lr={values}" for values in ["1e-3,2e-3"]), tune={"epochs": iter([1, 2])})
    assert study.settings.sweep.to_dict() == {"lr": [0.001, 0.002]}
    assert study.settings.tune.to_dict() == {"epochs": [1, 2]}


@pytest.mark.parametrize(
    ("was", "now", "same"),
    [
        ("photos", "photos/", True),
        ("photos/", "./photos", True),
        ("photos?label=kind", "./photos?label=kind", True),
        ("photos?label=kind", "photos?label=color", False),
        ("photos", "others", False),
        ("digits", "clothes", False),
        ("digits", "./digits", False),  # a folder of that name
    ],
)
def test_another_spelling_of_the_place_of_images_and_weights_is_the_same_study(tmp_path, monkeypatch, was, now, same):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    start = {"fingerprint": "f", "positions": "bicubic"}
    study = settings(["dpn"])
    before, after = (
        replace(study, fixed={**study.fixed, "data": place, "start": {"source": place, **start}})
        for place in (was, now)
    )
    recorded = before.to_dict()
    assert (differences(recorded, after.continuing(recorded).to_dict()) == []) is same
    absolute = replace(before, fixed={**before.fixed, "data": str(tmp_path / was)})
    assert (absolute.continuing(recorded).fixed["data"] == was) is was.startswith("photos")
