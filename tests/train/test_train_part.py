"""A recipe that trains a part: the rest stays bit for bit, and a stopped trial goes on as if it had not been."""

import pytest
import torch
from safetensors.torch import load_file

from vitmods.finetune import parameter_roles
from vitmods.util.errors import UserError


@pytest.mark.parametrize("recipe", [{"ema": 0.9}, {"optimizer": "sgd", "lr": 0.01}], ids=["adamw", "sgd"])
def test_frozen_weights_stay_as_they_were(bench, tmp_path, recipe):
    model = bench.model()
    roles = parameter_roles(model)
    bench.train(tmp_path, recipe=bench.recipe(train="attention", epochs=1, **recipe))
    after = load_file(tmp_path / "model.safetensors")
    moved = {name for name, before in bench.model().state_dict().items() if not torch.equal(before, after[name])}
    assert {roles[name] for name in moved} == {"attention", "positions", "head"}


def test_it_resumes_bit_for_bit(bench, tmp_path, monkeypatch):
    recipe = bench.recipe(train="attention", ema=0.9)
    bench.train(tmp_path / "whole", recipe=recipe)
    bench.stop(monkeypatch, tmp_path / "parts", at=5, recipe=recipe)
    state = torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)
    trained = sum(len(group["params"]) for group in state["optimizer"]["param_groups"])
    assert len(state["optimizer"]["state"]) == trained < len(bench.model().state_dict())
    bench.train(tmp_path / "parts", recipe=recipe)
    assert bench.numbers(tmp_path / "parts") == bench.numbers(tmp_path / "whole")


def test_a_part_that_is_not_there_is_refused_before_training(bench, tmp_path):
    with pytest.raises(UserError, match="does not have parameters with the role layer_scale"):
        bench.train(tmp_path, recipe=bench.recipe(train="layer_scale"))
    with pytest.raises(UserError, match="recipe: train: Unknown role 'atention'"):
        bench.recipe(train="atention")


def test_what_is_frozen_beforehand_stays_frozen_under_all(bench, tmp_path):
    model = bench.model()
    model.cls_token.requires_grad_(False)
    bench.train(tmp_path, model=model, recipe=bench.recipe(epochs=1))
    assert torch.equal(load_file(tmp_path / "model.safetensors")["cls_token"], bench.model().cls_token)
