"""Steps of the training loop, schedule and clipping included, against what the papers' own optimizers did."""

from pathlib import Path

import numpy as np
import pytest
import torch

from vitmods.recipes import Recipe, weight_decay_from_big_vision
from vitmods.tasks import Classification
from vitmods.train import RunOptions, TrialRun

GOLDEN = Path(__file__).parents[1] / "golden"
BIG_VISION_NAMES = {"kernel": "a/kernel", "bias": "a/bias", "scale": "ln/scale"}
ADAM = Recipe().with_(
    steps=12, warmup_steps=4, lr=1e-2, weight_decay=weight_decay_from_big_vision(1e-2, lr=1e-2), clip_norm=1.0
)
MOMENTUM = Recipe().with_(optimizer="sgd", steps=12, warmup_steps=2, lr=3e-2, weight_decay=0.0, clip_norm=1.0)
LAMB = Recipe().with_(
    optimizer="lamb", steps=9, warmup_steps=0, schedule="linear", lr=3e-3, min_lr=3e-3, weight_decay=0.02, adam_eps=1e-6
)
BIG_VISION = {
    "bv_adam_wd_cosine": ADAM,
    "bv_adam_wd_cosine_bf16mu": ADAM.with_(moment="bfloat16"),
    "bv_momentum_hp": MOMENTUM.with_(moment="bfloat16"),
}


def errors(run, expected):
    """The largest difference of any parameter after each step."""
    batches = run._batches()
    for parameters in expected:
        run._train_step(next(batches))
        yield max((getattr(run.model, name) - value).abs().max().item() for name, value in parameters.items())


def big_vision(name, given_gradients, recipe):
    golden = np.load(GOLDEN / f"{name}.npz")

    def read(what):
        return {ours: torch.from_numpy(golden[f"{what}.{theirs}"]) for ours, theirs in BIG_VISION_NAMES.items()}

    run = given_gradients(read("step0.before"), [read(f"step{k}.grad") for k in range(6)], recipe)
    return list(errors(run, [read(f"step{k}.param") for k in range(6)]))


@pytest.mark.parametrize("name", BIG_VISION)
def test_a_step_equals_big_visions_optimizer_chain(name, given_gradients):
    assert max(big_vision(name, given_gradients, BIG_VISION[name])) < 2e-6


@pytest.mark.parametrize(("name", "recipe"), [("bv_adam_wd_cosine_bf16mu", ADAM), ("bv_momentum_hp", MOMENTUM)])
def test_float32_means_are_another_arithmetic(name, recipe, given_gradients):
    assert 2e-5 < max(big_vision(name, given_gradients, recipe)) < 2e-3


def test_decay_in_big_visions_convention_is_not_multiplied_by_the_rate(given_gradients):
    # The same number in PyTorch's convention decays a hundred times less here.
    assert max(big_vision("bv_adam_wd_cosine", given_gradients, ADAM.with_(weight_decay=1e-2))) > 1e-3


@pytest.mark.parametrize(("name", "clip_norm"), [("timm_lamb_default", 1.0), ("timm_lamb_noclip", None)])
def test_a_step_equals_timms_lamb(name, clip_norm, given_gradients):
    golden = np.load(GOLDEN / f"{name}.npz")

    def read(pattern):
        return {ours: torch.from_numpy(golden[pattern.format(i)]) for i, ours in enumerate(("kernel", "bias"))}

    gradients = [read(f"step{k}.grad{{}}") for k in range(5)]
    run = given_gradients(read("param{}.init"), gradients, LAMB.with_(clip_norm=clip_norm))
    assert max(errors(run, [read(f"step{k}.param{{}}") for k in range(5)])) < 1e-10


OPTIMIZERS = {
    "adamw": {},
    "adamw bfloat16": {"moment": "bfloat16"},
    "sgd": {"optimizer": "sgd", "lr": 0.05},
    "sgd bfloat16": {"optimizer": "sgd", "lr": 0.05, "moment": "bfloat16", "weight_decay": 0.01},
    "lamb": {"optimizer": "lamb"},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_goes_on_bit_for_bit_where_the_steps_end_inside_an_epoch(bench, tmp_path, monkeypatch, optimizer):
    recipe = bench.recipe(steps=10, layer_decay=0.7, ema=0.9, **OPTIMIZERS[optimizer])
    whole = bench.train(tmp_path / "whole", recipe=recipe)
    assert (whole["steps"], whole["epochs"]) == (10, 2.5)
    rows = [row for row in bench.rows(tmp_path / "whole") if row["split"] == "val"]
    assert [row["step"] for row in rows] == [4, 8, 10]

    bench.stop(monkeypatch, tmp_path / "parts", at=5, recipe=recipe)
    bench.train(tmp_path / "parts", recipe=recipe)
    assert bench.numbers(tmp_path / "parts") == bench.numbers(tmp_path / "whole")


@pytest.mark.parametrize("loss", ["sigmoid", "bce"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_batch_in_parts_is_a_step_of_the_whole(bench, tmp_path, optimizer, loss):
    # Where a gradient is 0 but for rounding (of the keys' bias), a small eps would make steps of either sign.
    fields = {"steps": 3, "warmup_steps": 0, "mixup": 0.3, "loss": loss, "adam_eps": 1e-3, **OPTIMIZERS[optimizer]}
    models = {}
    for accumulate in (1, 3):
        recipe, models[accumulate] = bench.recipe(accumulate=accumulate, **fields), bench.model()
        task, dataset = Classification.from_recipe(recipe), bench.images_for(recipe)
        options = {"folder": tmp_path, "options": RunOptions("cpu", tensorboard=False)}
        run = TrialRun(models[accumulate], task, dataset, recipe, **options)
        batches = run._batches()
        for _ in range(3):
            run._train_step(next(batches))
    moved, tolerance = 0.0, 3e-5 if "bfloat16" in optimizer else 3e-6  # a rounding may go the other way
    for name, start in bench.model().named_parameters():
        parts, whole = (models[accumulate].get_parameter(name) for accumulate in (3, 1))
        moved = max(moved, (whole - start).abs().max().item())
        torch.testing.assert_close(parts, whole, atol=tolerance, rtol=0, msg=name)
    assert moved > 1e-3
