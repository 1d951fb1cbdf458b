"""Arms, seeds, sweeps, grids and stages: what users write of them, which trials follow, and which point is chosen."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from vitmods.changes import DualPatchNorm, DynamicTokenNorm, Norm
from vitmods.recipes import Recipe, finetune
from vitmods.study.arms import Arm, arm_from_text, make_arms
from vitmods.study.cells import MOST_SEEDS
from vitmods.study.grid import Grid, Point, choose, make_grid
from vitmods.study.settings import Settings, StudySettings, check_settings, differences, make_measure, make_seeds
from vitmods.study.state import at_the_edge
from vitmods.study.study import Study
from vitmods.util.errors import UserError

RECIPE = Recipe().with_(epochs=3, lr=0.1, crop_scale=(0.1, 1.0)).to_dict()
FIXED = {"task": "classification", "data": "digits", "base": "mu/2", "recipe": RECIPE}
DPN = DualPatchNorm()
SLOW = Arm("slow", (DPN,), {"lr": 0.01})
BASES = {"base": ("mu/4", "Ti/4")}
TWO = {"lr": (1e-4, 3e-4)}
A, B, C = (Point((("lr", lr),)) for lr in (1e-4, 3e-4, 1e-3))


def settings(arms=("dpn",), seeds=2, **options):
    fixed = {name: options.pop(name) for name in [*options] if name in (*FIXED, "limit_train", "start")}
    return Settings({**FIXED, **fixed}, make_arms(arms), make_seeds(seeds), **options)


LINE_UP = ["batch", "instance", "group", "switchable", "scale", "power", "dtn", "rms", "late"]
ARMS = {  # what a user gives, and the names and changes of the arms
    "a text": (["dpn+rms"], {"dpn+rms": "dpn+rms"}),
    "options": (["dpn(before=false)"], {"dpn(before=false)": "dpn(before=false)"}),
    "a name": (["my arm = dpn(before=false)"], {"my arm": "dpn(before=false)"}),
    "one text": ("dpn", {"dpn": "dpn"}),
    "a mapping": ({"base": [], "one": [DPN], "two": "dpn+rms"}, {"one": "dpn", "two": "dpn+rms"}),
    "the name of a line-up": ({"norms": "dpn"}, {"norms": "dpn"}),
    "its name as text": (["norms=dpn"], {"norms": "dpn"}),
}


@pytest.mark.parametrize(("given", "expected"), ARMS.values(), ids=ARMS)
def test_arms_are_named_by_themselves_or_by_the_user(given, expected):
    assert {arm.name: arm.short for arm in make_arms(given)} == expected


def test_a_line_up_becomes_its_arms():
    assert arm_from_text("dpn+rms") == Arm("dpn+rms", (DPN, Norm("rms")))
    arms = make_arms("norms")
    assert [arm.name for arm in arms] == LINE_UP
    assert arms == make_arms(["norms"]) == make_arms([" norms "]) == make_arms("paper:dtn-table3")
    assert arms[-2].changes == (Norm("rms", exact=False),)  # the exact one begins as the base's own function
    others = set(LINE_UP) - {"dtn", "late"}
    assert {arm.name: arm.changes[0].kind for arm in arms if arm.name in others} == {n: n for n in others}
    assert [arms[i].changes for i in (-3, -1)] == [(DynamicTokenNorm(),), (DynamicTokenNorm(trade_off=1.0),)]
    assert [arm.name for arm in make_arms(["dpn", "norms", "post=postnorm"])] == ["dpn", *LINE_UP, "post"]


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
        (["dpn", "x=dpn"], "the same changes"),
        (["base=dpn"], "base is the model without changes"),
        ({"x": []}, "changes nothing"),
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


def test_every_arm_is_tuned_alike_on_seeds_of_its_own_and_base_comes_first():
    study = settings(["dpn"], tune=TWO, sweep=BASES)
    trials = [(str(t.setting), t.arm.name, str(t.point), t.seed) for t in study.tuning_trials()]
    assert trials[:5] == [
        ("base=mu/4", "base", "lr=0.0001", MOST_SEEDS),
        ("base=mu/4", "base", "lr=0.0003", MOST_SEEDS),
        ("base=mu/4", "dpn", "lr=0.0001", MOST_SEEDS),
        ("base=mu/4", "dpn", "lr=0.0003", MOST_SEEDS),
        ("base=Ti/4", "base", "lr=0.0001", MOST_SEEDS),
    ]
    assert study.planned == len(trials) + 2 * 3 * 2, "base at the arm's point too, at most"
    assert replace(study, tuning_seeds=2).planned == 2 * len(trials) + 2 * 3 * 2
    study = settings(["dpn", "rms"], tune={"lr": (1e-4, 3e-4, 1e-3)}, tuning_seeds=2)
    trials = study.tuning_trials()
    assert len(set(trials)) == 3 * 2 * 3
    assert Counter(trial.arm.name for trial in trials) == {"base": 6, "dpn": 6, "rms": 6}
    assert {trial.arm.name for trial in trials[:3]} == {"base"}
    assert all(study.trial(trial.to_dict()) == trial for trial in trials), "they are named for a worker"
    assert study.cell("dpn", point=C).recipe.optimizer.lr == 1e-3


def test_a_cell_has_the_values_of_its_setting_and_of_its_arm():
    study = settings([SLOW], sweep=BASES | {"weight_decay": (0.1, 0.3)})
    last = study.cells[-1]
    assert (last.fixed["base"], str(last.setting)) == ("Ti/4", "base=Ti/4,weight_decay=0.3")
    assert (last.recipe.optimizer.weight_decay, last.recipe.optimizer.lr) == (0.3, 0.01)
    assert (study.fixed["base"], study.cells[0].recipe.optimizer.lr) == ("mu/2", 0.1)


@pytest.mark.parametrize(
    "study",
    [
        settings([Arm("x", (DualPatchNorm(before=False),), {"lr": 0.2})], until_decided=True, seeds=5, family=4),
        settings(tune=TWO | {"randaugment": ((2, 10.0), None)}, tuning_seeds=3, margin=2.0),
        settings(sweep={"limit_train": (0.5, 1.0)}),
    ],
)
def test_settings_survive_json(study):
    again = Settings.from_dict(json.loads(json.dumps(study.to_dict())))
    assert again == replace(study, fixed=again.fixed)
    assert differences(study.to_dict(), again.to_dict()) == []


DIFFERENCES = {  # settings before and after, and what is shown
    "arms, seeds and another margin are added": (
        settings(), settings(["rms", "dpn"], seeds=3, until_decided=True, margin=1.0, family=4), []),
    "every other change": (
        settings(["dpn", "rms"], seeds=3),
        settings({"dpn": "dpn(before=false)"}, data="other", recipe=Recipe.from_dict(RECIPE).with_(lr=0.3).to_dict()),
        ["data: digits -> other", "recipe.optimizer.lr: 0.1 -> 0.3", "arm dpn: dpn -> dpn(before=false)",
         "arm rms: rms -> (missing)", "seeds: [0, 1, 2] -> [0, 1]"]),
    "values are added": (settings(tune=TWO), settings(tune={"lr": (1e-3, 3e-4, 1e-4)}), []),
    "a value left": (settings(tune=TWO), settings(tune={"lr": 1e-4}), ["tune lr: [0.0001, 0.0003] -> [0.0001]"]),
    "nothing is tuned": (settings(tune=TWO), settings(), ["tune: lr -> (nothing)"]),
    "all is tuned": (settings(), settings(tune=TWO), ["tune: (nothing) -> lr"]),
    "more is tuned": (settings(tune=TWO), settings(tune=TWO | {"weight_decay": 0.1}), ["tune: lr -> lr weight_decay"]),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "shown"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_what_a_finished_trial_depends_on_may_not_change(old, new, shown):
    assert differences(old.to_dict(), new.to_dict()) == shown


def test_files_of_older_versions_are_of_the_same_study():
    old = json.loads(json.dumps(settings().to_dict()))
    assert old["recipe"]["optimizer"].pop("decay_all") is False, "a field that was added later"
    assert differences(old, settings().to_dict()) == []
    tuned = settings(tune=TWO, tuning_seeds=2)
    old = {**tuned.to_dict(), "tune_on": "val"}
    assert old["tuning_seeds"] == [MOST_SEEDS, MOST_SEEDS + 1]
    assert Settings.from_dict(old) == tuned
    assert differences(old, tuned.to_dict()) == []


REFUSED = {
    "few seeds": ({"seeds": 3, "until_decided": True}, "at most 4 to 32 seeds"),
    "a sweep until decided": ({"until_decided": True, "sweep": {"lr": (0.2, 0.4)}}, "number of seeds is fixed"),
    "an arm's own swept value": ({"arms": [SLOW], "sweep": {"lr": (0.2, 0.4)}}, "swept over"),
    "an arm's own tuned value": ({"arms": [SLOW], "tune": TWO}, r"Arm slow sets lr=0.01, and lr is tuned for every"),
    "a value out of range": ({"tune": {"lr": (1, -1)}}, r"lr=-1: recipe: lr must be at least 0"),
    "images twice": ({"sweep": {"limit_train": [0.5, 1]}, "limit_train": 9}, "leave one of the two out"),
    "bases of a checkpoint": ({"sweep": BASES, "start": {}}, "says what base is"),
    "a metric of another task": ({"metric": make_measure("miou")}, "measure miou, which segmentation does"),
}


@pytest.mark.parametrize(("options", "says"), REFUSED.values(), ids=REFUSED)
def test_plans_that_cannot_be_are_refused(options, says):
    with pytest.raises(UserError, match=says):
        check_settings(settings(**options))


def test_plans_that_can_be_are_not():
    check_settings(settings(["train(attention)+dpn"], tune=TWO))
    for metric in ("top5", "ece", "fewshot5"):
        check_settings(settings(metric=make_measure(metric)))


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
    study = Study("mu1/4", ["dpn"], sweep=(f"lr={values}" for values in ["1e-3,2e-3"]), tune={"epochs": iter([1, 2])})
    assert study.settings.sweep.to_dict() == {"lr": [0.001, 0.002]}, "values that are read once are kept"
    assert study.settings.tune.to_dict() == {"epochs": [1, 2]}


def test_points_are_the_product_in_the_given_order():
    grid = make_grid({"lr": (3e-4, 1e-4), "weight_decay": (0, 0.1)})
    order = [f"lr={lr},weight_decay={decay}" for lr in (0.0003, 0.0001) for decay in (0, 0.1)]
    assert [str(point) for point in grid.points] == order
    assert make_grid({}).points == (Point(),)
    assert Grid.from_dict(grid.to_dict()) == grid
    names = ["hf:m/v1", "hf:m/v1.0", "hf:m/v1.00"]  # which end alike
    points = make_grid({"base": names, "lr": [1.0]}, "--sweep").points
    assert [point.spelled for point in points] == [f"base={name},lr=1" for name in names]


def test_a_model_is_shown_without_its_options_and_kept_apart_from_others_of_its_name():
    first, second = (Point((("base", f"hf-text:big_bird?hidden_size={n}&num_hidden_layers=2"),)) for n in (32, 64))
    assert str(first).startswith("base=hf-text:big_bird?…")
    assert len({str(first), str(second)}) == 2
    assert first.spelled == "base=hf-text:big_bird?hidden_size=32&num_hidden_layers=2"
    assert str(Point((("base", "timm:pvt_v2_b0?drop_rate=0.1"),))) == "base=timm:pvt_v2_b0?drop_rate=0.1"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"lrr": 1}, "the field 'lrr'. Did you mean 'lr'"),
        ({"lr": ["1e-3", "0.001"]}, "lr=0.001 is listed twice"),
        ({"lr": ()}, "lr needs at least one value"),
        ({"lr": "fast"}, "lr is a number, not 'fast'"),
        ({"epochs": 1.5}, "epochs is a whole number, not 1.5"),
        ({"epochs": True}, "epochs is a whole number, not True"),
        ({"optimizer": "adam"}, "adamw or sgd"),
        ({"norm_last_layer": "no"}, "norm_last_layer is true or false, not 'no'"),
        ({"randaugment": "2"}, "with : between them or none"),
        *(([text, "lr=1"], "--tune") for text in ("lr", "lr=", "=3", "lr=1", "lr=2")),
    ],
)
def test_bad_grids_are_refused_with_a_remedy(values, says):
    with pytest.raises(UserError, match=says):
        make_grid(values)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tune": {"lrr": 1}}, "the field 'lrr'. Did you mean 'lr'"),
        ({"tune": {"lr": 1e-3}, "tuning_seeds": 0}, "tuning_seeds must be at least 1"),
        ({"tuning_seeds": 2}, "Nothing is tuned"),
        ({"sweep": {"limit_train": "0.25,0"}}, "limit_train is a number of images, or a fraction"),
        ({"sweep": {"limit_train": [1.5]}}, "a number of images, or a fraction"),
        ({"sweep": {"limit_train": "half"}}, "limit_train is"),
        ({"sweep": {"base": ["mu/4", "mu/4"]}}, "listed twice"),
        ({"sweep": {"depth": [1]}}, "the field 'depth'"),
        ({"sweep": {"lr": [1e-3]}}, r"two values or more, not lr=0.001 alone"),
        ({"margin": "1"}, "margin is how much worse an arm may be, 0 or more, not '1'"),
    ],
)
def test_bad_settings_are_refused_with_a_remedy(options, says):
    with pytest.raises(UserError, match=says):
        Study("mu/4", ["dpn"], settings=StudySettings(**options))


@pytest.mark.parametrize(
    ("seeds", "meant"),
    [(np.int64(3), (0, 1, 2)), ([np.int64(1), 2], (1, 2)), (iter((3, 4)), (3, 4)), (range(2), (0, 1))],
)
def test_seeds_as_numpy_and_python_have_them(seeds, meant):
    assert Study("mu/4", ["dpn"], seeds=seeds).settings.seeds == meant


@pytest.mark.parametrize("seeds", ["10", True, 3.0, [0.5, 1.5], ["1"], [True]])
def test_what_is_no_number_of_seeds_is_refused(seeds):
    with pytest.raises(UserError, match="seeds is how many, or which, as 5 or"):
        Study("mu/4", ["dpn"], seeds=seeds)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"recipe": {"lr": 1}}, "recipe is a Recipe"), ({"val_fraction": "0.1"}, "val_fraction must be at least 0")],
)
def test_values_of_other_kinds_are_refused(options, says):
    with pytest.raises(UserError, match=says):
        Study("mu/4", ["dpn"], **options)


def test_the_best_mean_wins_the_first_of_equals_and_divergence_is_worst():
    scores = {A: {0: 0.5, 1: 0.7}, B: {0: 0.7, 1: 0.7}, C: {0: 0.8, 1: 0.6}}
    assert choose(scores) == B
    assert choose(scores, higher_is_better=False) == A
    assert choose({**scores, B: {0: 0.9, 1: None}}) == C
    assert choose({A: {0: None, 1: None}, B: {0: None, 1: 0.1}, C: {0: None, 1: 0.1}}) == B
    assert choose({A: {0: None}, B: {0: None}}) == A


def test_a_choice_at_the_end_of_what_was_tried_is_reported():
    grid = make_grid({"lr": (3e-4, 1e-4, 1e-3), "optimizer": ("sgd", "adamw"), "weight_decay": 0.1})
    for lr, reported in ((1e-4, ["lr"]), (3e-4, [])):
        assert at_the_edge(grid, Point((("lr", lr), ("optimizer", "sgd"), ("weight_decay", 0.1)))) == reported


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
    before, after = (
        settings(data=place, start={"source": place, "fingerprint": "f", "positions": "bicubic"})
        for place in (was, now)
    )
    recorded = before.to_dict()
    assert (differences(recorded, after.continuing(recorded).to_dict()) == []) is same
    absolute = replace(before, fixed={**before.fixed, "data": str(tmp_path / was)})
    assert (absolute.continuing(recorded).fixed["data"] == was) is was.startswith("photos")


def test_what_the_second_stage_cannot_have_is_refused_before_the_first_trains(tmp_path):
    study = Study("mu1/2", ["rms"], seeds=(seed for seed in (0, 3)), pretrain="beit")
    assert study.settings.seeds == study._several.first.settings.seeds == (0, 3)
    with pytest.raises(UserError, match="is not pre-trained yet"):
        study.pilot(tmp_path / "out", device="cpu")
    with pytest.raises(UserError, match="that this process alone knows"):
        Study("mu1/2", {"same": lambda model: model}, pretrain="beit")
    with pytest.raises(UserError, match="Several bases are names"):
        Study(["mu1/2", lambda *_: None], ["rms"])


def test_both_stages_train_the_model_that_fits_the_images_of_the_first(tmp_path, draw_images):
    draw_images(tmp_path, ["train", "val"], size=(32, 32, 3))
    study = Study(None, ["rms"], pretrain="beit", pretrain_data=tmp_path)
    base = study._several.first.settings.fixed["base"]
    assert base == study.settings.fixed["base"] == study._several.as_long().settings.fixed["base"]
    assert base != Study(None, ["rms"]).settings.fixed["base"]


def test_what_a_table_sets_is_said_once_for_all_data_sets_and_a_name_is_no_table(tmp_path, draw_images):
    folders = [draw_images(tmp_path / name, ["train", "val"]) for name in ("a", "b")]
    study = Study("mu1/2", "paper:dpn-table6", sweep={"data": folders})
    assert len(study._notes) == 1
    assert not any(of_set._notes for of_set in study._several.studies.values())
    assert [arm.name for arm in Study("mu1/2", DPN).settings.arms] == ["dpn"]
    study = Study("mu1/2", {"paper:tt-table7-beit": "dpn"})
    assert not study._several
    assert not study._notes


def test_the_call_in_the_report_has_the_rates_of_a_recipe_and_no_images_of_a_run(settings_of_call):
    study = Study("mu1/2", ["rms"], recipe=finetune())
    assert study.settings.recipe.rates
    expected = study.settings.to_dict()
    study.settings.fixed["images"] = "fingerprint"
    assert settings_of_call(study).to_dict() == expected
