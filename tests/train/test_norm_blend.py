"""Trials whose new norms are blended in."""

import json

import pytest
import torch
from safetensors.torch import load_file

import vitmods as vm
from vitmods.finetune import BlendedNorms
from vitmods.tasks import Classification
from vitmods.train.loop import TrialRun
from vitmods.util.files import make_folder


def changed(bench, change=vm.QKNorm()):  # noqa: B008
    return vm.apply(bench.model(), change)


@pytest.mark.parametrize(("at", "more"), [(3, {"ema": 0.9}), (8, {"accumulate": 2, "dropout": 0.1})], ids=str)
def test_a_stopped_trial_goes_on_to_the_same_weights(bench, tmp_path, goes_on, at, more):
    """Before and after the end of the blend at step 6 of 12; the checkpoint and the result are those of plain norms."""
    recipe = bench.recipe(norm_blend=0.5, **more)

    def model():
        return vm.apply(bench.model(**recipe.model.to_config()), vm.QKNorm())

    saved = goes_on(at, model, recipe=recipe)
    assert [*saved["model"]] == [*model().state_dict()]
    assert [*load_file(tmp_path / "whole" / "model.safetensors")] == sorted(model().state_dict())


def test_fractions_are_those_of_the_step(bench, tmp_path, monkeypatch):
    fractions, step = [], TrialRun._train_step
    monkeypatch.setattr(BlendedNorms, "set", lambda self, fraction: fractions.append(fraction))
    monkeypatch.setattr(TrialRun, "_train_step", lambda run, batch: (fractions.append("step"), step(run, batch)))
    bench.train(tmp_path, changed(bench), bench.recipe(steps=5, norm_blend=0.4))
    assert fractions == [0.0, "step", 0.5, "step", 1.0, "step", 1.5, "step", 2.0, "step", 2.5]


def test_the_first_step_is_that_of_the_old_model(bench, tmp_path):
    """All gradients of old weights are base's, and the trained end is evaluated with plain norms."""
    recipe = bench.recipe(norm_blend=0.5)
    gradients = {}
    for name, model in (("old", bench.model()), ("new", changed(bench))):
        run = bench.run(make_folder(tmp_path / name), recipe, model)
        run._backward(next(run._batches()))
        gradients[name] = {name: p.grad for name, p in run.model.named_parameters()}
        run.metrics.close()
    for name, gradient in gradients["old"].items():
        assert torch.allclose(gradients["new"][name], gradient, atol=1e-6), name
    new = gradients["new"].keys() - gradients["old"].keys()
    assert len(new) == 8
    assert not any(gradients["new"][name].any() for name in new), "a is 0"
    model = changed(bench)
    result = bench.train(tmp_path / "end", model, recipe)
    plain = changed(bench)
    plain.load_state_dict(load_file(tmp_path / "end" / "model.safetensors"))
    task = Classification.from_recipe(recipe)
    metrics = task.evaluate(plain.eval(), bench.dataset.eval_batches(bench.dataset.eval_split, 40)).metrics
    assert metrics["loss"] == pytest.approx(result["metrics"]["loss"], rel=1e-5)
    assert all(not module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("recipe", [{"steps": 1}, {"warmup_epochs": 0.0}, {"epochs": 1}, {"optimizer": "sgd"}], ids=str)
def test_every_length_ends_with_plain_norms(bench, tmp_path, recipe):
    model = changed(bench)
    bench.train(tmp_path, model, bench.recipe(norm_blend=0.1, **recipe))
    assert all(not module._forward_hooks for module in model.modules())


def test_a_model_without_new_norms_trains_as_ever(bench, tmp_path):
    for name, blend in (("without", 0.0), ("with", 0.5)):
        bench.train(tmp_path / name, bench.model(), bench.recipe(norm_blend=blend))
    assert bench.numbers(tmp_path / "with")["weights"] == bench.numbers(tmp_path / "without")["weights"]
    assert json.loads((tmp_path / "with" / "config.json").read_text())["recipe"]["norm_blend"] == 0.5
