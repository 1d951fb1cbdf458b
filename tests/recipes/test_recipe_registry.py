"""What is known of recipes: what `vitmods recipes` shows, commands that exist, models that can be built."""

import io
import math
import re
import shlex
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache

import pytest
import torch

import vitmods as vm
from vitmods import data
from vitmods.cli import main
from vitmods.recipes import RECIPES, TASK_PARTS, Recipe, a2, augreg, deit, evidence, finetune, plain
from vitmods.recipes.registry import architecture, arguments, parse_recipe, settings_of, summary, usual_model
from vitmods.recipes.schedule import overridden, resolve
from vitmods.study import Study
from vitmods.study.defaults import DIGITS, RecipeChoice
from vitmods.tasks import TASKS, Classification
from vitmods.train import RunOptions, train_trial
from vitmods.util.errors import UserError

PUBLISHED = [name for name in RECIPES if evidence(name).paper]


def test_every_recipe_says_what_for_and_what_to_expect():
    for name in RECIPES:
        text = evidence(name)
        assert text.data
        assert text.expected
        assert 0 < len(summary(name)) <= 120
        assert [argument.partition("=")[0] for argument in arguments(name)] == list(settings_of(RECIPES[name]))


@cache
def options_of(command):
    with redirect_stdout(io.StringIO()) as printed:
        for task in TASK_PARTS:
            assert main([command, "--task", task, "--help-all"]) == 0
    return set(re.findall(r"--[a-z][\w-]*", printed.getvalue()))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_papers_recipe_names_the_paper_and_a_command_that_exists(name):
    text = evidence(name)
    assert re.search(r"arXiv:\d{4}\.\d{5}", text.paper)
    program, command, *words = shlex.split(text.command)
    assert program == "vitmods"
    assert {word for word in words if word.startswith("--")} <= options_of(command)
    assert isinstance(parse_recipe(words[words.index("--recipe") + 1]), vm.Recipe)


def test_the_models_of_recipes_can_be_built():
    for name in PUBLISHED:
        model = usual_model(name)
        config = vm.ViTConfig.from_name(model, img_size=224, **architecture(name, model, {}))
        assert config.pool == ("avg" if name in ("augreg_21k", "better_plain", "jft") else "token")
        assert config.representation == (name in ("augreg", "better_plain", "sun397"))


def test_model_settings_reach_the_model_and_differ_by_size():
    torch.manual_seed(0)
    settings = {**architecture("augreg", "mu2/8", {}), **augreg(level="light1").model.to_config()}
    model = vm.vit("mu2/8", img_size=16, num_classes=5, **settings)
    assert model.head.bias.tolist() == pytest.approx([-6.9] * 5)
    assert not model.head.weight.any()
    assert model.vit_config.drop_path == 0.1
    assert model.pre_logits is not None
    assert "representation" not in architecture("augreg", "S/32", {})
    assert architecture("a2", "B/16", {"layerscale": True}) == {"layer_scale": 1e-4, "position_on_prefix": False}
    assert architecture("deit", "S/16", {}) == {}
    assert architecture("dtn", "S*/16", {}) == {"qkv_bias": False, "position_on_prefix": False}
    assert [usual_model(name) for name in ("augreg", "better_plain", "small_data")] == ["B/16", "S/16", "Ti/16"]


@pytest.mark.parametrize(
    ("text", "options", "recipe"),
    [
        ("deit", {}, deit()),
        (" a2( layerscale = true, model=S/16 ) ", {}, a2(True, "S/16")),
        ("a2(layerscale)", {}, a2(True)),
        ("augreg(level=light1,epochs=30,warmup_epochs=2.5)", {}, augreg("light1", epochs=30, warmup_epochs=2.5)),
        ("a2", {"model": "S/16"}, a2(model="S/16")),
        ("a2(model=L/16)", {"model": "S/16"}, a2(model="L/16")),
        ("a2(model=S/16)", {"model": None}, a2(model="S/16")),
        ("deit", {"model": "S/16", "like": plain()}, deit()),
        ("finetune(epochs=3)", {"like": plain()}, finetune(plain(), 3)),
    ],
)
def test_recipes_as_the_shell_writes_them(text, options, recipe):
    assert parse_recipe(text, **options) == recipe
    assert {parse_recipe(name, like=plain()).augment.crop for name in ("finetune", "finetune_sgd")} == {"none"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a2", r"name it, as in a2\(model=S/16\)"),
        ("diet", "Unknown recipe 'diet'. Did you mean 'deit'"),
        ("deit(", "not a recipe"),
        ("a2(layerscal=true)", "not have the setting 'layerscal'. Did you mean 'layerscale'"),
        ("a2(layerscale=maybe)", "true or false"),
        ("deit(epochs=many)", "a number"),
        ("deit(epochs=2,epochs=3)", "given twice"),
        ("finetune(like=plain)", "not have the setting 'like'"),
    ],
)
def test_recipes_that_cannot_be_read(text, words):
    with pytest.raises(UserError, match=words):
        parse_recipe(text, **({"model": None} if text == "a2" else {}))


@pytest.mark.parametrize("name", RECIPES)
def test_a_warm_up_fits_a_training_of_another_length(name):
    task = TASKS[evidence(name).task]

    def warmup(text=name, **overrides):
        recipe, _ = RecipeChoice(text, overrides).resolve(task, defaults, 224, usual_model(name), {})
        length = resolve(recipe, images)
        assert all(getattr(recipe, field) == value for field, value in overrides.items() if hasattr(recipe, field))
        return length.warmup_steps / length.steps

    usual = RECIPES[name]()
    images = max(evidence(name).images or 0, 10 * usual.batch_size)
    defaults = replace(DIGITS, images=images)
    for unit, length in (("steps", resolve(usual, images).steps), ("epochs", usual.epochs)):
        for shorter in {max(2, length // 2), max(2, length // 10), 2}:
            assert 0 <= warmup(**{unit: shorter}) <= 0.25
            if unit in settings_of(RECIPES[name]):
                assert warmup(f"{name}({unit}={shorter})") == warmup(**{unit: shorter})
    assert 0 <= warmup(batch_size=2 * usual.batch_size) <= 0.25


def test_a_warm_up_follows_a_length_in_steps_or_of_a_sweep():
    recipe = Recipe().with_(steps=1000, warmup_epochs=2.0)
    assert overridden(recipe, {"batch_size": recipe.batch_size}, 6400).schedule.warmup_epochs == 2
    assert overridden(recipe, {"steps": 40}, 10 * recipe.batch_size).schedule.warmup_epochs == 1
    study = Study("mu1/4", ["dpn"], "digits", recipe=RECIPES["deit"](), sweep={"epochs": [3, 30]}, seeds=1)
    at = [study.settings.cell("base", point).recipe for point in study.settings.sweep.points]
    assert [(recipe.epochs, recipe.schedule.warmup_epochs) for recipe in at] == [(3, 0.75), (30, 5)]


def test_options_are_arguments_of_the_recipe():
    def made(name, task, **overrides):
        return RecipeChoice(name, overrides).resolve(TASKS[task], DIGITS, 224, None, {})[0]

    assert made("dino_100", "dino", epochs=8, batch_size=64) == RECIPES["dino_100"](8, batch_size=64)
    assert made("dino_100", "dino", steps=2000).schedule.warmup_steps == 200
    assert made("deit", "classification", epochs=30).schedule.warmup_epochs == 5
    assert made("deit(warmup_epochs=20)", "classification", epochs=30).schedule.warmup_epochs == 20
    assert made("deit", "classification", epochs=5, warmup_epochs=4.0).schedule.warmup_epochs == 4
    assert made("dino_100", "dino", steps=5, warmup_steps=4).schedule.warmup_steps == 4
    assert made("jft(steps=500)", "classification", epochs=30, warmup_epochs=3).steps is None
    with pytest.raises(UserError, match="differ: leave one out"):
        made("dino_100(epochs=50)", "dino", epochs=8)
    with pytest.raises(UserError, match="warmup_epochs=10 leaves nothing"):
        made("deit", "classification", epochs=8, warmup_epochs=10.0)


def kind_of(recipe):
    """What decides how it trains; lengths and rates do not."""
    augment, optimizer = recipe.augment, recipe.optimizer
    how = augment.crop, augment.randaugment_space, augment.repeats, augment.mixup > 0
    return optimizer.name, optimizer.moment, recipe.loss.name, recipe.model.init, how


KINDS = {kind_of(RECIPES[name]()): name for name in RECIPES}


@pytest.mark.parametrize("name", KINDS.values())
def test_a_recipe_of_every_kind_trains(name, tmp_path):
    recipe = RECIPES[name]().with_(steps=2, warmup_steps=0, warmup_epochs=None, batch_size=36)
    few = {"limit_train": 200, "limit_val": 40, "test_fraction": 0.05}
    dataset = data.load("digits", img_size=8, in_chans=3, augment=recipe.augment, **few)
    torch.manual_seed(0)
    model = vm.vit("mu/4", img_size=8, num_classes=10, **recipe.model.to_config())
    before = [p.clone() for p in model.parameters()]
    task = Classification.from_recipe(recipe)
    result = train_trial(
        model, task, dataset, recipe, out=tmp_path, options=RunOptions("cpu", progress=False, tensorboard=False)
    )
    assert (result["status"], result["steps"]) == ("finished", 2)
    assert math.isfinite(result["metrics"]["loss"])
    changed = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    # A head of zeros lets no gradient through before its first update.
    assert sum(changed) >= (2 if recipe.model.init == "big_vision" else len(changed))
