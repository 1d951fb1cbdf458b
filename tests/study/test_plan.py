import pytest

from vitmods.changes import DualPatchNorm, DynamicTokenNorm, Norm
from vitmods.recipes import Recipe
from vitmods.study.arms import Arm, arm_from_text, make_arms
from vitmods.study.plan import OTHER_SEEDS, Settings, differences, make_seeds
from vitmods.util.errors import UserError

FIXED = {
    "task": "classification",
    "data": "digits",
    "base": "mu/2",
    "recipe": Recipe().with_(epochs=3, lr=0.1, crop_scale=(0.1, 1.0)).to_dict(),
}


def settings(arms=("dpn",), seeds=2, noise_floor=False, margin=0.5, **fixed):
    return Settings({**FIXED, **fixed}, make_arms(arms), make_seeds(seeds), noise_floor, margin)


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
    names = ["batch", "group", "instance", "power", "rms", "scale", "switchable", "dtn"]
    arms = make_arms("norms")
    assert [arm.name for arm in arms] == names
    assert arms == make_arms(["norms"]) == make_arms([" norms "])
    assert arms[4].changes == (Norm("rms", exact=False),)  # the exact one begins as the base's own function
    assert {arm.name: arm.changes[0].kind for arm in arms[:-1]} == {name: name for name in names[:-1]}
    assert arms[-1].changes == (DynamicTokenNorm(),)
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
        (["nroms"], "Did you mean 'norms'"),
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
    for bad in (0, [], [1, 1], [-1], [OTHER_SEEDS]):
        with pytest.raises(UserError):
            make_seeds(bad)


def test_base_and_its_noise_floor_come_first_and_pairs_stay_together():
    trials = [(t.arm.name, t.seed) for t in settings(["dpn", "rms"], noise_floor=True).trials()]
    assert trials[:4] == [("base", 0), ("base", 1), ("base", OTHER_SEEDS), ("base", OTHER_SEEDS + 1)]
    assert trials[4:] == [("dpn", 0), ("rms", 0), ("dpn", 1), ("rms", 1)]


def test_settings_survive_json():
    one = settings({"x": Arm("x", (DualPatchNorm(before=False),), {"lr": 0.2}).changes})
    assert Settings.from_dict(one.to_dict()) == one


def test_an_arm_may_override_the_recipe():
    arm = Arm("slow", (DualPatchNorm(),), {"lr": 0.01})
    one = Settings(FIXED, make_arms([arm]), (0,))
    assert one.recipe_of(one.arm("slow")).optimizer.lr == 0.01
    assert one.recipe_of(one.arm("base")).optimizer.lr == 0.1


def test_adding_arms_seeds_a_noise_floor_or_another_margin_is_the_same_study():
    grown = settings(["rms", "dpn"], seeds=3, noise_floor=True, margin=1.0)
    assert differences(settings().to_dict(), grown.to_dict()) == []


def test_every_other_change_is_a_difference_and_is_shown():
    old = settings(["dpn", "rms"], seeds=3, noise_floor=True).to_dict()
    new = settings(
        {"dpn": "dpn(before=false)"}, data="other", recipe=Recipe.from_dict(FIXED["recipe"]).with_(lr=0.3).to_dict()
    ).to_dict()
    assert differences(old, new) == [
        "data: digits -> other",
        "recipe.optimizer.lr: 0.1 -> 0.3",
        "arm dpn: dpn -> dpn(before=false)",
        "arm rms: norm(kind=rms) -> (missing)" if str(Norm("rms")) != "rms" else "arm rms: rms -> (missing)",
        "seeds: [0, 1, 2] -> [0, 1]",
        "noise_floor: true -> false",
    ]
