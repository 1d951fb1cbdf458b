import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from vitmods.recipes import Recipe, weight_decay_from_big_vision
from vitmods.tasks import Classification
from vitmods.train.loop import TrialRun
from vitmods.train.schedule import cosine_with_warmup

GOLDEN = Path(__file__).parents[1] / "golden" / "bv_adam_wd_cosine.npz"


class GivenGradients:
    """A task whose loss has the gradients that are given for each batch."""

    metric = "top1"

    def __init__(self, gradients):
        self.gradients = gradients

    def loss(self, model, batch):
        model(batch.images)
        gradients = self.gradients[int(batch.index[0])]
        return sum((p * gradients[name]).sum() for name, p in model.named_parameters()), {}


class OneBatchAnEpoch:
    eval_split = val_split = "val"

    def steps_per_epoch(self, batch_size):
        return 1

    def train_batches(self, *, seed, epoch, batch_size, start=0):
        yield SimpleNamespace(images=torch.zeros(1, 1), targets=torch.zeros(1), index=torch.tensor([epoch]))


class Parameters(nn.Module):
    def __init__(self, values):
        super().__init__()
        for name, value in values.items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, x):
        return x


def steps(run, count):
    batches = run._batches()
    for _ in range(count):
        run._train_step(next(batches))
        yield


def test_a_step_equals_big_visions_optimizer_chain(tmp_path):
    golden = np.load(GOLDEN)
    names = {"kernel": "a/kernel", "bias": "a/bias", "scale": "ln/scale"}

    def read(what):
        return {ours: torch.from_numpy(golden[f"{what}.{theirs}"]) for ours, theirs in names.items()}

    lr, decay = 1e-2, 1e-2
    recipe = Recipe(
        epochs=12, warmup_epochs=4.0, lr=lr, weight_decay=weight_decay_from_big_vision(decay, lr), clip_norm=1.0
    )
    model = Parameters(read("step0.before"))
    task = GivenGradients([read(f"step{k}.grad") for k in range(6)])
    run = TrialRun(model, task, OneBatchAnEpoch(), recipe, folder=tmp_path, device="cpu", tensorboard=False)
    for k, _ in enumerate(steps(run, 6)):
        for name, expected in read(f"step{k}.param").items():
            torch.testing.assert_close(getattr(model, name).data, expected, atol=2e-6, rtol=0)


def test_equals_a_bare_loop(bench, tmp_path):
    recipe = bench.recipe(loss="sigmoid", label_smoothing=0.1, mixup=0.2, clip_norm=0.5)
    trained, bare = bench.model(), bench.model()
    bench.train(tmp_path, trained, recipe, seed=3)

    pictures = bench.pictures_for(recipe)
    decaying = [p for n, p in bare.named_parameters() if p.ndim > 1 and n not in bare.no_weight_decay()]
    others = [p for n, p in bare.named_parameters() if p.ndim <= 1 or n in bare.no_weight_decay()]
    groups = [{"params": decaying, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, fused=False, foreach=False)
    losses, step = [], 0
    for epoch in range(3):
        for batch in pictures.train_batches(seed=3, epoch=epoch, batch_size=40):
            for group in optimizer.param_groups:
                group["lr"] = cosine_with_warmup(step, 12, 0.3 * 4, recipe.lr)
            loss, _ = Classification.from_recipe(recipe).loss(bare, batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(bare.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
            step += 1
    for (name, ours), theirs in zip(trained.named_parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4, msg=name)
    rows = [row for row in bench.rows(tmp_path) if row["split"] == "train"]
    assert [row["step"] for row in rows] == [5, 10, 12]
    assert [row["loss"] for row in rows] == pytest.approx(
        [np.mean(losses[:5]), np.mean(losses[5:10]), np.mean(losses[10:])], rel=1e-5
    )
    assert rows[-1]["lr"] == cosine_with_warmup(11, 12, 0.3 * 4, recipe.lr)


@pytest.mark.parametrize("accumulate", [2, 3, 40, 64])
def test_a_batch_in_parts_gives_the_gradient_of_the_whole(bench, tmp_path, accumulate):
    # 40 pictures in 3 parts are 14, 13 and 13: the mean of means would be wrong.
    gradients = {}
    for count in (1, accumulate):
        recipe, model = bench.recipe(accumulate=count, clip_norm=None, mixup=0.3), bench.model()
        task = Classification.from_recipe(recipe)
        run = TrialRun(
            model, task, bench.pictures_for(recipe), recipe, folder=tmp_path, device="cpu", tensorboard=False
        )
        statistics = run._backward(next(run._batches()))
        gradients[count] = {name: p.grad for name, p in model.named_parameters()} | statistics
    for name, expected in gradients[1].items():
        torch.testing.assert_close(gradients[accumulate][name], expected, atol=1e-6, rtol=1e-4, msg=name)


def test_clipping_is_by_the_global_norm(tmp_path):
    model = Parameters({"a": torch.zeros(2, 2), "b": torch.zeros(3)})
    gradient = {"a": torch.full((2, 2), 3.0), "b": torch.full((3,), 4.0)}
    run = TrialRun(
        model,
        GivenGradients([gradient]),
        OneBatchAnEpoch(),
        Recipe(epochs=1, clip_norm=0.5),
        folder=tmp_path,
        device="cpu",
        tensorboard=False,
    )
    next(steps(run, 1))
    norm = math.sqrt(4 * 9 + 3 * 16)
    torch.testing.assert_close(model.a.grad, gradient["a"] * 0.5 / norm, rtol=1e-5, atol=0)
    torch.testing.assert_close(model.b.grad, gradient["b"] * 0.5 / norm, rtol=1e-5, atol=0)
    assert run._window.take(step=1)["grad_norm"] == pytest.approx(norm)


def test_the_moving_average_is_what_is_evaluated_and_saved(bench, tmp_path):
    recipe, model = bench.recipe(ema=0.9), bench.model()
    task, pictures = Classification.from_recipe(recipe), bench.pictures_for(bench.recipe())
    result = bench.train(tmp_path, model, recipe)
    from safetensors.torch import load_file

    raw = task.evaluate(model.eval(), pictures.eval_batches("test", 50))
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    averaged = task.evaluate(model.eval(), pictures.eval_batches("test", 50))
    assert result["metrics"]["loss"] == pytest.approx(averaged["loss"], rel=1e-6)
    assert abs(averaged["loss"] - raw["loss"]) > 1e-4


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights_and_loss(bench, tmp_path):
    seen = {}

    class Spy(Classification):
        def loss(self, model, batch):
            seen["loss"], statistics = super().loss(model, batch)
            return seen["loss"], statistics

    model = bench.model()
    model.head.register_forward_hook(lambda module, args, out: seen.update(head=out))
    recipe = bench.recipe(precision="bf16-mixed")
    run = TrialRun(model, Spy(), bench.pictures_for(recipe), recipe, folder=tmp_path, device="cpu", tensorboard=False)
    next(steps(run, 1))
    assert seen["head"].dtype == torch.bfloat16
    assert seen["loss"].dtype == torch.float32
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in model.parameters())


def test_a_parameter_without_gradient_is_told(bench, tmp_path):
    model = bench.model()
    model.forgotten = nn.Parameter(torch.zeros(3))
    with pytest.warns(UserWarning, match="1 trainable parameters get no gradient: forgotten"):
        bench.train(tmp_path, model)


def test_an_unknown_device_is_one_clear_error(bench, tmp_path):
    with pytest.raises(ValueError, match="device 'quantum' cannot be used"):
        bench.train(tmp_path, device="quantum")
