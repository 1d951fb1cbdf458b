"""Costs on a GPU: steps in float16 are scaled, and rows that the host bounds say so."""

import time

import pytest
import torch

import vitmods as vm
from vitmods.bench import finish
from vitmods.recipes import plain
from vitmods.study import cost
from vitmods.tasks import Classification

CUDA = torch.device("cuda")


def test_steps_in_float16_are_timed_with_the_scaler(gpu):
    model, recipe = vm.vit("mu1/4", img_size=8, num_classes=5), plain().with_(precision="fp16-mixed")
    step = cost.Steps(model, Classification(), recipe, CUDA, model.vit_config).train(4)
    before = torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
    with gpu.launching() as launches:
        step()
    assert launches["_amp_foreach_non_finite_check_and_unscale_"] == 1
    gpu.multiplies = True
    step()
    assert not torch.equal(before, torch.cat([p.detach().cpu().flatten() for p in model.parameters()]))


@pytest.mark.parametrize("device_s", [0.0, 0.1])
def test_a_row_is_bound_by_the_host_where_the_device_is_done_first(gpu, monkeypatch, device_s):
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: time.sleep(device_s))
    monkeypatch.setattr(cost, "seconds_per_call", lambda call, times, device: call() or 1.0)
    monkeypatch.setattr(cost, "ROUNDS", (1, 1))
    models = [("base", vm.vit("mu1/4", img_size=8, num_classes=5)) for _ in range(2)]
    measured = finish(cost.measuring(models, Classification(), plain().with_(batch_size=4), CUDA, 0.0))
    assert measured["arms"]["base"]["host_bound"] == (device_s == 0)
