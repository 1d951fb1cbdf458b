"""What a recipe says of the model and of the length of training reaches every trial, its record and the report."""

import json

import pytest
import torch

from vitmods.adapters import open_checkpoint
from vitmods.layers.drop import DropPath
from vitmods.recipes import plain
from vitmods.study import Study
from vitmods.study.arms import Arm
from vitmods.study.trial import base_config, build_model
from vitmods.util.errors import UserError

RECIPE = plain().with_(batch_size=100, steps=5, warmup_steps=2, lr_batch=200, dropout=0.1, init="big_vision")
RECIPE = RECIPE.with_(drop_path=0.3, drop_path_shape="constant", head_bias=-2.0)


def study(arms=("dpn",), recipe=RECIPE, **options):
    return Study(None if "start" in options else "mu2/4", list(arms), "digits", recipe, 1, limit_train=250, **options)


def run(study, out):
    return study.run(out, workers=1, device="cpu", cost_seconds=0, progress=False)


def built(study, name="base"):
    cell = study.settings.cell(name)
    return build_model(base_config(cell, 10), cell.arm, 0, cell.start, cell.recipe)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("study")
    return run(study(), out), out


def rates(model):
    return [module.rate for module in model.modules() if isinstance(module, DropPath)]


def test_every_arm_is_built_as_the_recipe_says():
    for arm in ("base", "dpn"):
        model = built(study(), arm)
        assert rates(model) == [0.3] * 4
        assert (model.pos_drop.p, model.blocks[1].mlp.drop1.p, model.blocks[1].attn.proj_drop.p) == (0.1, 0.1, 0.1)
        assert not model.head.weight.any()
        assert (model.head.bias == -2.0).all()
        assert not model.cls_token.any()  # timm's is drawn
    deeper = study([Arm("deeper", (), {"drop_path": 0.5})])
    assert (rates(built(deeper, "deeper")), rates(built(deeper))) == ([0.5] * 4, [0.3] * 4)
    untouched = built(study(recipe=plain()))
    assert rates(untouched) == []
    assert untouched.head.weight.any()


def test_trained_weights_are_dropped_too_and_the_new_head_is_as_said(finished):
    checkpoint = finished[1] / "trials/dpn/seed0"
    trained = open_checkpoint(str(checkpoint))
    recipe = plain().with_(drop_path=0.2, dropout=0.05, init="big_vision", head_bias=-6.9)
    model = built(study(["ffn"], recipe, start=checkpoint), "ffn")
    assert rates(model) == [0.2] * 4  # constant, as the checkpoint was trained
    assert model.pos_drop.p == 0.05
    assert not model.head.weight.any()
    assert (model.head.bias == torch.tensor(-6.9)).all()
    for name, value in trained.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(model.get_parameter(name), value), name
    named = dict(trained.pretrained_cfg)
    assert named.pop("label_names") == tuple("0123456789")
    assert model.pretrained_cfg == named, "the new head's classes have no names yet"
    assert rates(built(study(["ffn"], plain(), start=checkpoint), "ffn")) == [0.3] * 4


def test_what_it_came_to_is_in_the_folder_of_the_trial_and_in_the_report(finished):
    result, out = finished
    assert result.complete
    config = json.loads((out / "trials/dpn/seed0/config.json").read_text())
    record = config["resolved"]
    assert (record["steps"], record["steps_per_epoch"], record["epochs"], record["warmup_steps"]) == (5, 2, 2.5, 2)
    assert (record["lr"], record["images_seen"]) == (5e-4, 500)
    assert result.to_dict()["resolved"] == record
    assert config["model"]["drop_path"] == 0.3
    page = result.report().read_text()
    assert "Recipe as run on this data" in page
    assert "steps_per_epoch" in page.replace("<wbr>", "")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"batch_size": 512}, "A batch of 512 images is more than the 250 of the training set"),
        ({"steps": 2, "warmup_steps": None, "warmup_epochs": 1.0}, "2 steps of warm-up .* nothing of the 2 steps"),
    ],
)
def test_a_recipe_that_does_not_fit_the_images_is_refused_before_training(tmp_path, fields, words):
    with pytest.raises(UserError, match=words):
        run(study(recipe=RECIPE.with_(**fields)), tmp_path / "out")
    assert not (tmp_path / "out" / "trials").exists()
