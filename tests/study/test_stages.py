"""Stages of a study from Python: what is refused before the first one trains, and what is said once."""

import pytest

from vitmods.changes import DualPatchNorm
from vitmods.recipes import finetune
from vitmods.study import Study
from vitmods.util.errors import UserError


def test_what_the_second_stage_cannot_have_is_refused_before_the_first_trains(tmp_path):
    study = Study("mu1/2", ["rms"], seeds=(seed for seed in (0, 3)), pretrain="beit")
    assert study.settings.seeds == study._stages.first.settings.seeds == (0, 3)
    with pytest.raises(UserError, match="is not pre-trained yet"):
        study.pilot(tmp_path / "out", device="cpu")
    with pytest.raises(UserError, match="that this process alone knows"):
        Study("mu1/2", {"same": lambda model: model}, pretrain="beit")
    with pytest.raises(UserError, match="Several bases are names"):
        Study(["mu1/2", lambda *_: None], ["rms"])
    with pytest.raises(UserError, match="lr needs at least one value"):
        Study("mu1/2", ["rms"], sweep={"lr": []})


def test_both_stages_train_the_model_that_fits_the_images_of_the_first(tmp_path, draw_images):
    draw_images(tmp_path, ["train", "val"], size=(32, 32, 3))
    study = Study(None, ["rms"], pretrain="beit", pretrain_data=tmp_path)
    base = study._stages.first.settings.fixed["base"]
    assert base == study.settings.fixed["base"] == study._stages.as_long().settings.fixed["base"]
    assert base != Study(None, ["rms"]).settings.fixed["base"]


def test_what_a_table_sets_is_said_once_for_all_data_sets(tmp_path, draw_images):
    folders = [draw_images(tmp_path / name, ["train", "val"]) or tmp_path / name for name in ("a", "b")]
    study = Study("mu1/2", "paper:dpn-table6", sweep={"data": folders})
    assert len(study._notes) == 1
    assert not any(of_set._notes for of_set in study._by_data.values())


def test_the_call_in_the_report_has_the_rates_of_a_recipe_and_no_images_of_a_run(settings_of_call):
    study = Study("mu1/2", ["rms"], recipe=finetune())
    assert study.settings.recipe.rates
    expected = study.settings.to_dict()
    study.settings.fixed["images"] = "fingerprint"
    assert settings_of_call(study).to_dict() == expected


def test_an_arm_may_stand_alone_and_a_name_is_no_table():
    assert [arm.name for arm in Study("mu1/2", DualPatchNorm()).settings.arms] == ["dpn"]
    study = Study("mu1/2", {"paper:tt-table7-beit": "dpn"})
    assert not study._stages
    assert not study._notes
