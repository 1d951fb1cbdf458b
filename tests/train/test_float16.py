"""Training in float16: losses are scaled, and steps whose gradients overflow are as if they had not been."""

import copy
import json
from itertools import islice

import pytest
import torch

from vitmods.recipes.schedule import lr_at
from vitmods.tasks import Classification
from vitmods.train import RunOptions
from vitmods.train.loggers import Diverged
from vitmods.util.errors import UserError

FP16 = {"precision": "fp16-mixed", "ema": 0.9, "weight_decay": 0.1, "weight_decay_end": 0.3}


def infinite(loss):
    """The same loss, whose gradient is not finite."""
    return loss + ((loss - loss.detach()) ** 2 + 0.0).sqrt()


class Overflows(Classification):
    """The gradients of some steps, counted from 0, are not finite while the loss is scaled by more than `limit`."""

    def at(self, run_of, steps, limit=0.0):
        object.__setattr__(self, "plan", (run_of, set(steps), limit))
        return self

    def loss(self, model, batch):
        loss, statistics = super().loss(model, batch)
        run, steps, limit = self.plan
        if run[0].step in steps and run[0]._scaler.get_scale() > limit:
            loss = infinite(loss)
        return loss, statistics


def start(bench, out, infinite_at=(), limit=0.0, **fields):
    recipe, runs = bench.recipe(**FP16 | fields), []
    out.mkdir(exist_ok=True)
    runs.append(bench.run(out, recipe, task=Overflows.from_recipe(recipe).at(runs, infinite_at, limit)))
    return runs[0], runs[0]._batches()


def state(run):
    tensors = [*run.model.state_dict().values(), *run.ema.model.state_dict().values()]
    tensors += [value for values in run.optimizer.state.values() for value in values.values()]
    return copy.deepcopy([run.ema.updates, *tensors])


def same(a, b):
    return len(a) == len(b) and all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(a, b))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb"])
def test_a_skipped_step_moves_neither_weights_nor_average_nor_schedule(bench, tmp_path, optimizer):
    run, batches = start(bench, tmp_path, {2, 3, 5}, optimizer=optimizer)
    taken, rates, decays = [], [], []
    for _ in range(8):
        before = state(run)
        run._train_step(next(batches))
        rates.append(run.optimizer.param_groups[0]["lr"] / run.optimizer.param_groups[0]["lr_scale"])
        decays.append(max(group["weight_decay"] for group in run.optimizer.param_groups))
        taken.append(not same(before, state(run)))
    assert taken == [True, True, False, False, True, False, True, True]
    assert (run.step, run.skipped, run.ema.updates, len(run._window)) == (8, 3, 5, 5)
    updates = [0, 1, 2, 2, 2, 3, 3, 4]
    assert rates == [lr_at(run.length, update) for update in updates]
    assert decays == sorted(decays)
    assert [decays[i] == decays[i - 1] for i in range(1, 8)] == [updates[i] == updates[i - 1] for i in range(1, 8)]
    assert run._scaler.get_scale() == 2.0**13


def test_the_scale_leaves_the_gradient_as_it_is(bench, tmp_path):
    """Clipped and logged gradients are those of the loss, up to the rounding of float16."""
    norms = {}
    for precision in ("fp16-mixed", "32-true"):
        run, batches = start(bench, tmp_path / precision, precision=precision, clip_norm=1.0)
        run._train_step(next(batches))
        norms[precision] = float(run._window._steps[0]["grad_norm"])
        assert run._scaler.is_enabled() == (precision == "fp16-mixed")
    assert norms["fp16-mixed"] == pytest.approx(norms["32-true"], rel=0.02)


def test_a_trial_in_float16_goes_on_to_the_same_numbers(bench, tmp_path, goes_on):
    """Stopped after skipped steps, whose number and scale are in the checkpoint."""

    class Overflow(Classification):
        def loss(self, model, batch):
            loss, statistics = super().loss(model, batch)
            return loss if int(batch.index.sum()) % 3 else infinite(loss), statistics  # whenever that batch comes

    recipe = bench.recipe(**FP16)
    saved, last = goes_on(9, recipe=recipe, task=Overflow.from_recipe(recipe)), bench.rows(tmp_path / "whole")[-2]
    assert 0 < saved["skipped"] <= last["skipped_steps"] < 12
    assert saved["scaler"]["scale"] == 2.0 ** (16 - saved["skipped"])
    assert json.loads((tmp_path / "whole/config.json").read_text())["recipe"]["precision"] == "fp16-mixed"


@pytest.mark.parametrize(
    ("steps", "at", "scale"), [(40, 17, "1"), (3, 3, "16384")], ids=["long", "shorter than the scales"]
)
def test_gradients_that_no_scale_makes_finite_are_a_divergence(bench, tmp_path, steps, at, scale):
    run, batches = start(bench, tmp_path, range(steps), steps=steps)
    words = f"float16 gradient was not finite at step {at}, with a loss scale of {scale}$"
    with pytest.raises(Diverged, match=words):
        list(map(run._train_step, islice(batches, steps)))


def test_scaled_gradients_are_not_divided_among_processes(bench):
    options, recipe = RunOptions("cpu", shard=True), bench.recipe(**FP16)
    with pytest.raises(UserError, match="--shard does not support scaled gradients: use --precision bf16-mixed"):
        options.check_task(Classification(), recipe)
