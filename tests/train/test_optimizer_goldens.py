"""Steps of the training loop, schedule and clipping included, against what the papers' own optimizers did."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from vitmods.recipes import Recipe, weight_decay_from_big_vision

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


@pytest.mark.parametrize("name", BIG_VISION)
def test_a_step_equals_big_visions_optimizer_chain(name, given_gradients):
    golden = np.load(GOLDEN / f"{name}.npz")

    def read(what):
        return {own: torch.from_numpy(golden[f"{what}.{other}"]) for own, other in BIG_VISION_NAMES.items()}

    run = given_gradients(read("step0.before"), [read(f"step{k}.grad") for k in range(6)], BIG_VISION[name])
    assert max(errors(run, [read(f"step{k}.param") for k in range(6)])) < 2e-6


@pytest.mark.parametrize(("name", "clip_norm"), [("timm_lamb_default", 1.0), ("timm_lamb_noclip", None)])
def test_a_step_equals_timms_lamb(name, clip_norm, given_gradients):
    golden = np.load(GOLDEN / f"{name}.npz")

    def read(pattern):
        return {own_name: torch.from_numpy(golden[pattern.format(i)]) for i, own_name in enumerate(("kernel", "bias"))}

    gradients = [read(f"step{k}.grad{{}}") for k in range(5)]
    run = given_gradients(read("param{}.init"), gradients, LAMB.with_(clip_norm=clip_norm))
    assert max(errors(run, [read(f"step{k}.param{{}}") for k in range(5)])) < 1e-10


OPTIMIZERS = {
    "AdamW in bfloat16, from a probe": {"moment": "bfloat16", "head_start": "probe"},
    "SGD in bfloat16, as many of each class": {
        "optimizer": "sgd", "lr": 0.05, "moment": "bfloat16", "weight_decay": 0.01, "sampler": "balanced",
    },
    "LAMB": {"optimizer": "lamb"},
    "AdamW of a part": {"train": "attention"},
}  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_goes_on_bit_for_bit_where_the_steps_end_inside_an_epoch(bench, tmp_path, goes_on, optimizer):
    state = goes_on(recipe=bench.recipe(steps=10, layer_decay=0.7, ema=0.9, **OPTIMIZERS[optimizer]))["optimizer"]
    result = json.loads((tmp_path / "whole/result.json").read_text())
    assert (result["steps"], result["epochs"]) == (10, 2.5)
    assert [row["step"] for row in bench.rows(tmp_path / "whole") if row["split"] == "val"] == [4, 8, 10]
    trained = sum(len(group["params"]) for group in state["param_groups"])
    assert len(state["state"]) == trained
    assert (trained < len(bench.model().state_dict())) == ("part" in optimizer)
