import dataclasses
import json

import pytest

from vitmods.recipes import RECIPES, Recipe, finetune, finetune_sgd, weight_decay_from_big_vision
from vitmods.util.errors import UserError


def test_every_recipe_survives_json_and_is_written_without_what_came_later():
    for name in RECIPES:
        recipe = RECIPES[name]()
        assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    written = Recipe().to_dict()
    assert not {"rates", "head_start"} & {*written}
    assert not {"sampler", "class_weights"} & {*written["augment"], *written["loss"]}


def test_values_that_are_accepted_and_keys():
    Recipe().with_(warmup_lr=8e-4, lr=5e-4, lr_batch=32, batch_size=64)  # the rate is 1e-3
    Recipe().with_(schedule="epoch_cosine", warmup_epochs=0.0)
    Recipe().with_(steps=10, warmup_epochs=40.0)  # how many steps that are, the images decide
    recipe = Recipe()
    assert {recipe: 1}[Recipe()] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.optimizer.lr = 1.0
    with pytest.raises(UserError, match="'depth', a part of a task that is not loaded: add --plugin"):
        Recipe.from_dict({**Recipe().to_dict(), "depth": {"scale": 2.0}})


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"lr": float("nan")}, "lr must be at least 0"),
        ({"lr": float("inf")}, "lr must be at least 0 and finite"),
        ({"lr": "1e-3"}, "lr must be at least 0 and finite, not '1e-3'"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"epochs": 2.5}, "epochs must be a whole number"),
        ({"loss": "hinge"}, "loss must be one of softmax, sigmoid"),
        ({"crop_scale": (0.5, 0.2)}, "crop_scale"),
        ({"crop_scale": (0.5, 1.2)}, "at most 1"),
        ({"std": (0.0,)}, "std must be above 0"),
        ({"std": ()}, "std must be one number, or three"),
        ({"mean": (0.5, 0.4)}, "mean must be one number, or three"),
        ({"randaugment": (2, 31)}, "randaugment"),
        ({"randaugment": (2, 11), "randaugment_space": "timm"}, "randaugment"),
        ({"randaugment": (2, 9), "randaugment_noise": 0.5}, "randaugment_noise is only for the operations of timm"),
        ({"epochs": 3, "warmup_epochs": 3.0}, "warmup_epochs=3 leaves nothing"),
        ({"min_lr": 1.0}, "min_lr=1 is above lr"),
        ({"warmup_lr": 1e-2}, "warmup_lr=0.01 is above lr=0.001"),
        ({"warmup_lr": 8e-4, "lr_batch": 128}, r"warmup_lr=0.0008 is above lr=0.001 \* .* = 0.0005"),
        ({"epochs": 3, "warmup_epochs": 1.0, "warmup_steps": 5}, "set the same thing"),
        ({"steps": 10, "warmup_steps": 8, "cooldown_steps": 2}, "leave nothing of steps=10"),
        ({"optimizer": "lamb", "moment": "bfloat16"}, "moment=bfloat16 is for adamw and sgd"),
        ({"schedule": "rsqrt", "min_lr": 1e-5}, "without min_lr"),
        ({"schedule": "epoch_cosine"}, "trains two epochs at warmup_lr, which is 0"),
        ({"schedule": "stairs"}, "schedule must be one of cosine, linear, rsqrt, epoch_cosine"),
        ({"layer_decay": 0.0}, "layer_decay must be from"),
        ({"ema": 1.0}, "ema must be from 0"),
        ({"rates": (("heads", 1e-3),)}, "Unknown role 'heads'"),
        ({"rates": (("all", -1.0),)}, "lr must be"),
        ({"rates": (("head", 1.0),)}, "all"),
        ({"epoch": 3}, "Did you mean 'epochs'"),
        ({"zzz": 3}, "Known: accumulate, .*batch_size"),
    ],
)
def test_values_out_of_range_and_unknown_fields_are_refused(override, words):
    with pytest.raises(UserError, match=words):
        Recipe().with_(**override)


def test_what_is_set_of_the_model_is_named_as_the_config_names_it():
    assert Recipe().model.to_config() == {}
    same = {"drop_path": 0.2, "drop_path_shape": "constant", "patch_drop": 0.5, "init": "big_vision", "head_bias": -6.9}
    assert Recipe().with_(dropout=0.1, **same).model.to_config() == {"pos_drop": 0.1, "proj_drop": 0.1, **same}


def test_big_visions_weight_decay_is_not_multiplied_by_lr():
    # AugReg: 1e-4 at 1e-3 in big_vision is 0.1 in PyTorch.
    assert weight_decay_from_big_vision(1e-4, lr=1e-3) == pytest.approx(0.1)
    with pytest.raises(UserError):
        weight_decay_from_big_vision(1e-4, lr=0)


RATES = {
    "all": (3e-4, 0.7), "ffn": (3e-4, 0.7), "positions+tokens": (3e-4, 0.7), "attention": (3e-4, 0.7),
    "norms+attention": (3e-4, 0.7), "norms+ffn": (3e-4, 0.7), "norms+head": (9e-4, None), "norms": (9e-4, None),
    "head": (3e-3, None),
}  # fmt: skip


@pytest.mark.parametrize("part", RATES)
def test_what_is_trained_of_trained_weights_has_its_own_rate(part):
    recipe, (lr, decay) = finetune(), RATES[part]
    near = pytest.approx(lr)
    for made, expected in (
        (recipe.with_(train=part), (near, decay)),
        (recipe.with_(train="head").with_(train=part), (near, decay)),
        # What is set by itself wins, before and together with the part.
        (recipe.with_(lr=1e-5).with_(train=part), (1e-5, decay)),
        (recipe.with_(lr=1e-5, train=part), (1e-5, decay)),
        (recipe.with_(layer_decay=0.9).with_(train=part), (near, 0.9)),
        (recipe.with_(layer_decay=None).with_(train=part), (near, None)),
        (finetune_sgd().with_(train=part), (pytest.approx(lr / 3e-4 * 0.01), decay)),
        (Recipe().with_(train=part), (1e-3, None)),  # of new weights
    ):
        assert (made.optimizer.lr, made.optimizer.layer_decay) == expected
        assert Recipe.from_dict(json.loads(json.dumps(made.to_dict()))) == made
        assert Recipe().with_(**made.settings()) == made
