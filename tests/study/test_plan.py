import json
from dataclasses import replace

import pytest

from vitmods.changes import DualPatchNorm, DynamicTokenNorm, Norm
from vitmods.recipes import Recipe
from vitmods.study.arms import Arm, arm_from_text, make_arms
from vitmods.study.plan import MOST_SEEDS, Grid, Settings, check_plan, differences, make_seeds, make_sweep
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
    names = ["batch", "instance", "group", "switchable", "scale", "power", "dtn", "rms"]
    arms = make_arms("norms")
    assert [arm.name for arm in arms] == names
    assert arms == make_arms(["norms"]) == make_arms([" norms "]) == make_arms("paper:dtn-table3")
    assert arms[-1].changes == (Norm("rms", exact=False),)  # the exact one begins as the base's own function
    assert {arm.name: arm.changes[0].kind for arm in arms if arm.name != "dtn"} == {n: n for n in names if n != "dtn"}
    assert arms[-2].changes == (DynamicTokenNorm(),)
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
        (["paper:dpn-table9"], "no table 'dpn-table9'. Did you mean"),
        (["paper:dpn-table4"], "dpn-table4 cannot be run: A task that learns from images and texts"),
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
        ({"x": 3}, "Arm x: 3 is no change"),
        ({"x": DualPatchNorm}, "is no change"),
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
    one = settings(["dpn"], grid=LR, tuning_seeds=(MOST_SEEDS,), sweep=make_sweep({"base": ("mu/4", "Ti/4")}, FIXED))
    trials = [(str(t.setting), t.arm.name, str(t.point), t.seed) for t in one.tuning_trials()]
    assert trials[:5] == [
        ("base=mu/4", "base", "lr=0.1", MOST_SEEDS),
        ("base=mu/4", "base", "lr=0.2", MOST_SEEDS),
        ("base=mu/4", "dpn", "lr=0.1", MOST_SEEDS),
        ("base=mu/4", "dpn", "lr=0.2", MOST_SEEDS),
        ("base=Ti/4", "base", "lr=0.1", MOST_SEEDS),
    ]
    assert one.planned == len(trials) + 2 * 2 * 2
    assert replace(one, tuning_seeds=one.seeds).planned == 2 * 2 * 2 * 2


def test_a_setting_is_a_study_with_other_values():
    one = settings(sweep=make_sweep({"base": ("mu/4", "Ti/4"), "lr": (0.1, 0.3)}, FIXED))
    last = one.at(one.sweep.points[-1])
    assert (last.fixed["base"], last.recipe.optimizer.lr, bool(last.sweep)) == ("Ti/4", 0.3, False)
    assert one.fixed["base"] != "Ti/4"


def test_settings_survive_json():
    one = settings({"x": Arm("x", (DualPatchNorm(before=False),), {"lr": 0.2}).changes})
    assert Settings.from_dict(one.to_dict()) == one
    grown = replace(one, grid=LR, tuning_seeds=(7,), until_decided=True, sweep=make_sweep({"limit_train": 0.5}, FIXED))
    again = Settings.from_dict(json.loads(json.dumps(grown.to_dict())))
    assert again == replace(grown, fixed=again.fixed)


def test_an_arm_may_override_the_recipe():
    arm = Arm("slow", (DualPatchNorm(),), {"lr": 0.01})
    one = Settings(FIXED, make_arms([arm]), (0,))
    assert one.recipe_of(one.arm("slow")).optimizer.lr == 0.01
    assert one.recipe_of(one.arm("base")).optimizer.lr == 0.1


def test_adding_arms_seeds_or_another_margin_is_the_same_study():
    grown = replace(settings(["rms", "dpn"], seeds=3, until_decided=True, margin=1.0), family=4)
    assert Settings.from_dict(grown.to_dict()).family == 4
    assert differences(settings().to_dict(), grown.to_dict()) == []


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
        ({"seeds": 5, "until_decided": True, "sweep": make_sweep({"lr": (0.2, 0.4)}, FIXED)}, "fixed number of seeds"),
        ({"sweep": make_sweep({"lr": (0.2, 0.4)}, FIXED), "arms": [Arm("a", (), {"lr": 0.3})]}, "swept over"),
        ({"grid": LR, "tuning_seeds": (7,), "arms": [Arm("a", (), {"lr": 0.3})]}, "tuned for every arm"),
    ],
)
def test_plans_that_cannot_be_are_refused(options, says):
    with pytest.raises(UserError, match=says):
        check_plan(settings(**options))


@pytest.mark.parametrize(("sweep", "says"), [({"limit_train": "half"}, "limit_train is"), ({"lrr": 1}, "'lr'")])
def test_sweeps_that_cannot_be_are_refused(sweep, says):
    with pytest.raises(UserError, match=says):
        make_sweep(sweep, FIXED)
