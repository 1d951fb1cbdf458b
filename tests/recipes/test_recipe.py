import dataclasses
import json
import subprocess
import sys

import pytest

from vitmods.errors import UserError
from vitmods.recipes import RECIPES, Recipe, weight_decay_from_big_vision


def test_importing_recipes_does_not_import_torch():
    code = "import sys, vitmods.recipes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_json_and_says_what_it_is(name):
    recipe = RECIPES[name]()
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert "Expected number:" in RECIPES[name].__doc__
    assert "Data:" in RECIPES[name].__doc__


def test_a_recipe_is_a_key_and_cannot_be_changed():
    recipe = Recipe()
    assert {recipe: 1}[Recipe()] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.lr = 1.0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"lr": float("nan")}, "lr must be at least 0"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"epochs": 2.5}, "epochs must be a whole number"),
        ({"loss": "hinge"}, "loss must be one of softmax, sigmoid"),
        ({"crop_scale": (0.5, 0.2)}, "crop_scale"),
        ({"crop_scale": (0.5, 1.2)}, "at most 1"),
        ({"std": (0.0,)}, "std must be above 0"),
        ({"std": ()}, "std must be one number, or three"),
        ({"mean": (0.5, 0.4)}, "mean must be one number, or three"),
        ({"randaugment": (2, 31)}, "randaugment"),
        ({"epochs": 3, "warmup_epochs": 3.0}, "warmup_epochs=3 leaves nothing"),
        ({"min_lr": 1.0}, "min_lr=1 is above lr"),
        ({"ema": 1.0}, "ema must be from 0"),
        ({"epoch": 3}, "Did you mean 'epochs'"),
        ({"zzz": 3}, "Known: accumulate, .*batch_size"),
    ],
)
def test_values_out_of_range_and_unknown_fields_are_refused(override, words):
    with pytest.raises(UserError, match=words):
        Recipe().with_(**override)


@pytest.mark.parametrize(("epochs", "warmup", "expected"), [(30, None, 3.0), (300, None, 5.0), (30, 2.0, 2.0)])
def test_warmup_is_a_tenth_of_the_epochs_unless_given(epochs, warmup, expected):
    assert Recipe(epochs=epochs, warmup_epochs=warmup).resolved_warmup_epochs == pytest.approx(expected)


def test_part_size_is_the_largest_part():
    assert Recipe(batch_size=10, accumulate=4).part_size == 3


def test_big_visions_weight_decay_is_not_multiplied_by_lr():
    # AugReg: 1e-4 at 1e-3 in big_vision is 0.1 in PyTorch.
    assert weight_decay_from_big_vision(1e-4, lr=1e-3) == pytest.approx(0.1)
    with pytest.raises(UserError):
        weight_decay_from_big_vision(1e-4, lr=0)
