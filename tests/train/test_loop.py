from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from vitmods.recipes.schedule import lr_at, resolve_on
from vitmods.tasks import Classification
from vitmods.train.device import DataWait
from vitmods.train.optim import clip_gradients


def steps(run, count):
    batches = run._batches()
    for _ in range(count):
        run._train_step(next(batches))
        yield


def test_equals_a_bare_loop(bench, tmp_path):
    recipe = bench.recipe(loss="sigmoid", label_smoothing=0.1, mixup=0.2, clip_norm=0.5)
    trained, bare = bench.model(), bench.model()
    bench.train(tmp_path, trained, recipe, seed=3)

    dataset = bench.images_for(recipe)
    decaying = [p for n, p in bare.named_parameters() if p.ndim > 1 and n not in bare.no_weight_decay()]
    others = [p for n, p in bare.named_parameters() if p.ndim <= 1 or n in bare.no_weight_decay()]
    groups = [{"params": decaying}, {"params": others, "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, 1.0, weight_decay=recipe.optimizer.weight_decay, fused=False, foreach=False)
    losses, norms, step, length = [], [], 0, resolve_on(recipe, dataset)
    assert (length.steps, length.warmup_steps) == (12, pytest.approx(0.3 * 4))
    for epoch in range(3):
        for batch in dataset.train_batches(seed=3, epoch=epoch, batch_size=40):
            for group in optimizer.param_groups:
                group["lr"] = lr_at(length, step)
            loss, _ = Classification.from_recipe(recipe).loss(bare, batch)
            optimizer.zero_grad()
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(bare.parameters(), 0.5).item())
            optimizer.step()
            losses.append(loss.item())
            step += 1
    for (name, parameter), expected in zip(trained.named_parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, atol=1e-5, rtol=1e-4, msg=name)
    rows = [row for row in bench.rows(tmp_path) if row["split"] == "train"]
    assert [row["step"] for row in rows] == [5, 10, 12]
    for name, values in (("loss", losses), ("grad_norm", norms)):
        means = [np.mean(part) for part in (values[:5], values[5:10], values[10:])]
        assert [row[name] for row in rows] == pytest.approx(means, rel=1e-5)
    assert max(norms) > 0.5
    assert rows[-1]["lr"] == lr_at(length, 11)


@pytest.mark.parametrize("accumulate", [3, 64])
def test_a_batch_in_parts_gives_the_gradient_of_the_whole(bench, tmp_path, accumulate):
    # 40 images in 3 parts are 14, 13 and 13: the mean of means would be wrong.
    gradients = {}
    for count in (1, accumulate):
        run = bench.run(tmp_path, bench.recipe(accumulate=count, clip_norm=None, mixup=0.3))
        statistics = run._backward(next(run._batches()))
        gradients[count] = {name: p.grad for name, p in run.model.named_parameters()} | statistics
    for name, expected in gradients[1].items():
        torch.testing.assert_close(gradients[accumulate][name], expected, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("gradient", "limit", "clipped"), [(0.0, 0.5, 0.0), (0.3, 0.5, 0.3), (0.5, 0.5, 0.5), (1e-5, 1e-6, 1e-6)]
)
def test_gradients_above_the_limit_alone_are_scaled_without_epsilon(gradient, limit, clipped):
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor([gradient, 0.0], dtype=torch.float64)
    assert clip_gradients([parameter, nn.Parameter(torch.zeros(1))], limit) == gradient
    assert parameter.grad.tolist() == pytest.approx([clipped, 0.0], rel=1e-12, abs=0)


def test_the_moving_average_is_what_is_evaluated_and_saved(bench, tmp_path):
    recipe, model = bench.recipe(ema=0.9), bench.model()
    task, dataset = Classification.from_recipe(recipe), bench.images_for(bench.recipe())
    result = bench.train(tmp_path, model, recipe)
    from safetensors.torch import load_file

    raw = task.evaluate(model.eval(), dataset.eval_batches("test", 50))
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    averaged = task.evaluate(model.eval(), dataset.eval_batches("test", 50))
    assert result["metrics"]["loss"] == pytest.approx(averaged.metrics["loss"], rel=1e-6)
    assert abs(averaged.metrics["loss"] - raw.metrics["loss"]) > 1e-4


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights_and_loss(bench, tmp_path):
    seen = {}

    class Spy(Classification):
        def loss(self, model, batch):
            seen["loss"], statistics = super().loss(model, batch)
            return seen["loss"], statistics

    model = bench.model()
    model.head.register_forward_hook(lambda module, args, out: seen.update(head=out))
    next(steps(bench.run(tmp_path, bench.recipe(precision="bf16-mixed"), model, Spy()), 1))
    assert seen["head"].dtype == torch.bfloat16
    assert seen["loss"].dtype == torch.float32
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in model.parameters())


def test_a_parameter_without_gradient_is_reported(bench, tmp_path):
    model = bench.model()
    model.forgotten = nn.Parameter(torch.zeros(3))
    with pytest.warns(UserWarning, match="1 trainable parameters get no gradient: forgotten"):
        bench.train(tmp_path / "trial", model)
    with pytest.raises(ValueError, match="unknown device 'quantum'"):
        bench.train(tmp_path / "other", device="quantum")


def test_the_log_tells_how_long_the_model_waited_for_images(bench, tmp_path, monkeypatch):
    dataset, clock = bench.images_for(bench.recipe()), [0.0]
    made = type(dataset).train_batches

    def slowly(self, **which):
        for batch in made(self, **which):
            clock[0] += 3
            yield batch

    class Second(Classification):
        def loss(self, model, batch):
            clock[0] += 1
            return super().loss(model, batch)

    monkeypatch.setattr(type(dataset), "train_batches", slowly)
    for module in ("loop", "device"):
        monkeypatch.setattr(f"vitmods.train.{module}.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    bench.train(tmp_path, bench.model(), bench.recipe(), Second())
    rows = [row for row in bench.rows(tmp_path) if row["split"] == "train"]
    assert len(rows) > 1
    assert {row["data_wait"] for row in rows} == {0.75}
    assert rows[0]["images_per_s"] == bench.recipe().batch_size / 4


@pytest.mark.parametrize(("batch_s", "step_s", "idle_s"), [(0.5, 1.0, 0.0), (1.0, 1.0, 0.0), (1.0, 0.25, 0.75)])
def test_a_wait_for_images_counts_once_the_device_has_done_the_step_before(batch_s, step_s, idle_s, monkeypatch):
    """On a device that works through a queue while the host waits for the next batch."""
    host, device = [0.0], [0.0]

    class Event:
        def __init__(self, *given, enable_timing):
            assert enable_timing

        def record(self):
            self.at = device[0] = max(host[0], device[0])

        def synchronize(self):
            host[0] = max(host[0], self.at)

        def elapsed_time(self, later):
            return 1e3 * (later.at - self.at)

    def batches():
        while True:
            host[0] += batch_s
            yield None

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr("vitmods.train.device.time", SimpleNamespace(perf_counter=lambda: host[0]))
    wait, loaded = DataWait(torch.device("cuda")), batches()
    for rows in range(2):
        for _ in range(10):
            wait.next(loaded)
            device[0] += step_s  # queued
            wait.step_is_queued()
        first = 0 if rows else batch_s - idle_s  # before the first step nothing runs
        assert wait.take() == pytest.approx(10 * idle_s + first)
