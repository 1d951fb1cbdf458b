"""`vitmods recipes` and `vitmods recipe show`, and recipes with settings in the other commands."""

import json

import pytest

from vitmods.cli.compare import Compare, make_study
from vitmods.cli.options import parse
from vitmods.recipes import RECIPES, a2, augreg, deit


def flat(text):
    return " ".join(text.split())


def test_the_list_has_every_recipe_with_paper_and_expected_number(said, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    text = said("recipes").out
    assert all(f" {name} " in text for name in RECIPES)
    assert max(map(len, text.splitlines())) <= 110
    assert "arXiv:2203.09795" in text
    assert "Ti/16 72.7, S/16 79.7, B/16 82.2" in flat(text)
    assert "layerscale=False, model=B/16" in flat(text)


def test_show_prints_everything_resolved(said, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    text = flat(said("recipe show a2 --model B/16 --data-size 1281167 --batch 4096").out)
    for words in (
        "a2 ImageNet-1k from scratch by LAMB",
        "images 1,281,167 batch 4,096 steps 93,600: 300 epochs of 312 warm-up 1,560 steps, 1.67 % of all",
        "views 383,385,600, 3 of an image in an epoch",
        "highest 0.006 (0.003 for a batch of 2,048) schedule cosine, down to 2e-06",
        "at 0 % 0 at 10 % 0.005894 at 50 % 0.003081 at 100 % 2e-06",
        "LAMB betas 0.9, 0.999, eps 1e-08 decay 0.02 times the learning rate clipping at global norm 1",
        "bce binary cross-entropy, mean over classes",
        "crop 8 to 100 % of the area, aspect 0.75 to 1.33 flip 0.5 resizing bicubic",
        "RandAugment 2 operations of timm, magnitude 7 +- 0.5 mixing mixup 0.1 or CutMix 1",
        "95 % of the resized image's short side",
        'vm.vit("B/16", position_on_prefix=False, pos_drop=0.0, proj_drop=0.0, drop_path=0.1, drop_path_shape=',
        "top-1 Ti/16 72.7",
        "not stated the initial value of LayerScale",
    ):
        assert words in text


def test_show_has_both_conventions_of_decay_and_the_papers_images(said):
    text = flat(said("recipe show augreg").out)
    for words in (
        "images 1,268,355 batch 4,096 steps 92,700",
        "at 10 % 0.000927",
        "at 100 % 0 ",
        "decay 0.1 times the learning rate; 0.0001 where it is not multiplied, as in big_vision",
        "first moment in bfloat16",
        "representation=True",
    ):
        assert words in text
    assert "momentum in bfloat16" in flat(said("recipe show vtab").out)
    assert "moving average, decay 0.99996" in flat(said("recipe show deit").out)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_shown(name, said):
    record = json.loads(said("recipe show --json", name).out)
    assert record["resolved"]["steps"] > record["resolved"]["warmup_steps"]
    assert list(record["learning_rates"]) == ["0 %", "10 %", "50 %", "100 %"]


def test_options_reach_the_recipe(said):
    record = json.loads(said("recipe show 'a2(layerscale=true)' --model S/16 --epochs 10 --batch 64 --json").out)
    assert record["recipe"]["model"]["drop_path"] == 0.05
    assert record["recipe"]["epochs"] == 10
    assert record["resolved"]["lr"] == pytest.approx(4e-3 * 64 / 2048)
    assert record["architecture"] == {"layer_scale": 1e-4, "position_on_prefix": False}
    record = json.loads(said("recipe show vtab --epochs 300 --batch 400 --json").out)
    assert record["resolved"]["steps"] == 600  # epochs take the place of steps
    record = json.loads(said("recipe show plain --batch 50 --json").out)  # has no such argument
    assert record["resolved"]["steps_per_epoch"] == 100


def defaults(options):
    return make_study(parse(Compare, options.split(), "compare")).settings.recipe


def test_other_commands_take_settings_and_the_model_and_epochs_for_steps():
    assert defaults("--recipe a2(layerscale=true) --base S/4") == a2(True, "S/4")
    assert defaults("--recipe deit(epochs=20)") == deit(20)
    shorter = defaults("--recipe augreg(level=light1) --warmup-epochs 3 --epochs 30")
    assert shorter == augreg("light1", "mu3/2").with_(steps=None, warmup_steps=None, warmup_epochs=3, epochs=30)
    assert defaults("--recipe vtab --epochs 30").steps is None
    assert defaults("--recipe deit --warmup-steps 30").schedule.warmup_epochs is None


def test_fields_that_are_switched_off_override_the_recipe():
    recipe = defaults("--task segmentation --recipe plain --no-final-norm")
    assert not recipe.to_dict()["segmentation"]["final_norm"]
