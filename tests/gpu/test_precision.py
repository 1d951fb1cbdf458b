"""Costs on a GPU: the precision that a time budget takes, steps in float16 are scaled, rows that the host bounds."""

import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import vitmods as vm
from vitmods.bench import finish
from vitmods.recipes import Recipe, plain
from vitmods.study import Study, choice, cost
from vitmods.study.arms import BASE
from vitmods.study.budget import make_budget
from vitmods.study.executors import StudyOptions
from vitmods.study.settings import Rung
from vitmods.tasks import Classification

pretend = sys.modules["pretend"]  # by conftest.py
HERE = StudyOptions(device="cuda")


def settings_of(sets, open=frozenset({"precision"}), **fields):
    study = Study(
        "mu2/4", ["dtn", "dpn"], data=sets["class"], recipe=Recipe().with_(batch_size=8, **fields), img_size=16
    )
    return replace(study.settings, open=open)


def times(half, tf32=1.0):
    """In place of timed steps: of the usual ones, for base; the arm gains less."""

    def time_step(settings, options, num_classes, arm, part=0, way=choice.AS_NOW):
        gain = half if settings.recipe.precision != "32-true" else tf32 if way.tf32 else 1.0
        return gain if arm == BASE else min(1.0, gain + 0.1), 8

    return time_step


@pytest.mark.parametrize(
    ("capability", "times_of", "taken", "says"),
    [
        ((9, 0), times(0.4, 0.6), "bf16-mixed", "0.50 with --precision bf16-mixed and 0.70 with --tf32. Taken: bf16"),
        ((9, 0), times(0.6, 0.4), "32-true", "0.70 with --precision bf16-mixed and 0.50 with --tf32."),
        ((9, 0), times(0.8, 0.9), "32-true", "0.90 with --precision bf16-mixed and 1.00 with --tf32."),
        ((7, 5), times(0.5), "fp16-mixed", "0.60 with --precision fp16-mixed. Taken: fp16-mixed; --precision 32-true"),
    ],
)
def test_a_budget_takes_the_fastest_precision(sets, monkeypatch, capability, times_of, taken, says):
    monkeypatch.setattr(choice, "time_step", times_of)
    with pretend.gpu(capability=capability):
        (rung,), text = choice.with_fast_precision([Rung(settings_of(sets), "", 16, 16)], HERE, make_budget("1h"))
    assert rung.settings.recipe.precision == taken
    assert says in text
    assert rung.settings.recipe.with_(precision="32-true") == settings_of(sets).recipe


@pytest.mark.parametrize(
    ("how", "device"),
    [({"open": frozenset()}, "cuda"), ({"precision": "bf16-mixed"}, "cuda"), ({}, "cpu")],
)
def test_what_was_given_stays_and_a_cpu_times_nothing(sets, monkeypatch, gpu, how, device):
    monkeypatch.setattr(choice, "time_step", lambda *_: pytest.fail("a step is timed"))
    rungs = [Rung(settings_of(sets, **how), "", 16, 16)]
    assert choice.with_fast_precision(rungs, replace(HERE, device=device), make_budget("1h")) == (rungs, "")


def test_tf32_is_proposed_where_the_recipe_sets_the_precision(sets, monkeypatch, gpu):
    monkeypatch.setattr(choice, "time_step", times(0.1, 0.5))
    study = SimpleNamespace(
        settings=settings_of(sets, frozenset()), options=HERE, dataset=SimpleNamespace(num_classes=2)
    )
    assert list(choice.faster_options(study, make_budget("30m"))) == ["--tf32 takes 0.60 of the time of a step."]
    tf32 = SimpleNamespace(**{**vars(study), "options": replace(HERE, tf32=True)})
    assert list(choice.faster_options(tf32, make_budget("30m"))) == []


@pytest.mark.parametrize("capability", [(9, 0), (7, 5)])
def test_steps_are_timed_of_base_and_the_arm_with_the_most_operations(sets, monkeypatch, capability):
    asked, time_step = [], choice.time_step
    monkeypatch.setattr(choice, "time_step", lambda *given: asked.append(given[3]) or time_step(*given))
    with pretend.gpu(capability=capability):
        _, text = choice.with_fast_precision([Rung(settings_of(sets), "", 16, 16)], HERE, make_budget("1h"))
    assert asked == ["base", "dtn"] * (3 if capability == (9, 0) else 2)
    assert "of its time in float32" in text


def test_steps_in_float16_are_timed_with_the_scaler(gpu):
    model, recipe = vm.vit("mu1/4", img_size=8, num_classes=5), Recipe().with_(precision="fp16-mixed")
    step = cost.Steps(model, Classification(), recipe, pretend.CUDA, model.vit_config).train(4)
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
    measured = finish(cost.measuring(models, Classification(), plain().with_(batch_size=4), torch.device("cuda"), 0.0))
    assert measured["arms"]["base"]["host_bound"] == (device_s == 0)
