import json
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy.stats import binom

import vitmods as vm
from vitmods.adapters.apply import apply
from vitmods.bench import Ratio, finish, interleave, peak_bytes, rounds_of, seconds_per_call
from vitmods.changes import parse_changes
from vitmods.model.flops import count_macs
from vitmods.model.vit import vit
from vitmods.recipes import Recipe, plain
from vitmods.report.text import remarks_on_costs
from vitmods.study.bases import ForeignBase
from vitmods.study.cost import measuring
from vitmods.study.results import ArmCost
from vitmods.tasks import Classification

CPU = torch.device("cpu")


def measure(*args, **options):
    return finish(measuring(*args, **options))


def test_peak_counts_what_is_alive_at_once():
    here = torch.zeros(10)

    def work():
        a = torch.zeros(1000)
        b = a + 1
        del a
        view = b.view(10, 100)
        del b  # the view keeps the storage
        c = view * 2
        del view, c
        torch.zeros(10)

    assert peak_bytes(work, [here], CPU) == 4 * (10 + 2000)


def test_time_on_a_cpu_is_by_its_own_clock(monkeypatch):
    clocks = {"cpu": 0.0, "wall": 0.0}
    by = {"process_time": lambda: clocks["cpu"], "perf_counter": lambda: clocks["wall"]}
    monkeypatch.setattr("vitmods.bench.time", SimpleNamespace(**by))

    def call():
        clocks["cpu"] += 2
        clocks["wall"] += 5

    assert seconds_per_call(call, 3, CPU) == 2
    assert seconds_per_call(call, 3, CPU, wall=True) == 5


@pytest.mark.parametrize(("count", "left_out"), [(1, 0), (7, 0), (10, 0), (11, 1), (20, 4), (60, 20)])
def test_the_interval_of_a_ratio_lies_between_two_of_the_rounds(count, left_out):
    """At each end as many are left out as a sign test at 2 % allows."""
    ratios = list(np.random.default_rng(0).permutation(count) + 1.0)
    middle = (count + 1) / 2
    assert Ratio.of_rounds(ratios) == Ratio(middle, 1 + left_out, count - left_out)
    if count >= 7:
        assert 2 * binom.cdf(left_out, count, 0.5) <= 0.02 < 2 * binom.cdf(left_out + 1, count, 0.5)


def test_rounds_alternate_their_order_and_stop_when_they_are_precise_or_in_time():
    calls, times = [], iter(range(1000))
    rounds = interleave({"k": None}, ["a", "b"], lambda kind, name: calls.append(name) or 1.0, budget_s=0)
    assert calls == ["a", "b", "b", "a"] * 3 + ["a", "b"]
    assert rounds == {"k": [{"a": 1.0, "b": 1.0}] * 7}
    seconds = {"steady": lambda: 1.0, "noisy": lambda: 1.0 + next(times) % 3}
    rounds = interleave(seconds, ["a", "b"], lambda timed, name: timed(), budget_s=60)
    assert {kind: len(measured) for kind, measured in rounds.items()} == {"steady": 7, "noisy": 60}


def test_a_short_budget_has_short_blocks(monkeypatch):
    repeats = []
    timed = "vitmods.study.cost.seconds_per_call"
    monkeypatch.setattr(timed, lambda call, times, device: repeats.append(times) or 1e-3)
    monkeypatch.setattr("vitmods.study.cost.Steps.fitting", lambda steps, make, largest, *limits: largest)
    models = [(name, vit("mu/4", img_size=8, in_chans=1, num_classes=10)) for name in ("base", "a", "b")]
    for budget, most in ((0.0, 1), (0.84, 10), (100.0, 40)):
        monkeypatch.setattr(
            "vitmods.study.cost.rounds_of", lambda kinds, names, seconds, budget: rounds_of(kinds, names, seconds, 0)
        )
        for slower in (1, 4):
            monkeypatch.setattr("time.perf_counter", lambda slower=slower: slower * time.process_time())
            measure(models, Classification(), plain().with_(batch_size=4), CPU, budget_s=budget, arms=2)
            assert max(repeats) == (most if budget > 1 else max(1, round(most / slower)))
            repeats.clear()


def test_arms_are_made_one_after_the_other(monkeypatch):
    """An arm's model is gone before the next one is made."""
    monkeypatch.setattr("vitmods.study.cost.BLOCK_S", 0)
    made = []

    def models():
        for name in ("base", "a", "b", "c"):
            alive = sum(model() is not None for model in made)
            assert alive <= 1, name  # base alone
            model = vit("mu/4", img_size=8, in_chans=1, num_classes=10)
            made.append(weakref.ref(model))
            yield name, model
            del model

    measured = measure(models(), Classification(), plain().with_(batch_size=4), CPU, budget_s=0.0, arms=3)
    assert list(measured["arms"]) == ["a", "b", "c"]


@pytest.fixture(scope="module")
def costs(seconds_by_counting):
    sizes = {"base": "mu2/2", "same": "mu2/2", "deeper": "mu4/2"}
    models = {name: vit(size, img_size=16, in_chans=1, num_classes=10) for name, size in sizes.items()}
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("vitmods.study.cost.seconds_per_call", seconds_by_counting)
        patched.setattr("vitmods.bench.ROUNDS", (2, 2))
        costs = measure(models.items(), Classification(), plain().with_(batch_size=16), CPU, budget_s=1.0, arms=2)
    assert torch.get_num_threads() == threads
    return models, costs


def test_costs_are_ratios_to_base(costs):
    models, costs = costs
    base, same, deeper = costs["base"], costs["arms"]["same"], costs["arms"]["deeper"]
    assert same["params"] == same["flops"] == same["peak_memory"]["ratio"] == same["infer_memory"]["ratio"] == 1
    assert base["macs"] == count_macs(models["base"].vit_config)
    assert deeper["flops"] == count_macs(models["deeper"].vit_config) / base["macs"]
    for kind in ("train_step", "infer_1", "infer_n"):
        assert same[kind]["ratio"] == 1
        assert deeper[kind]["ratio"] == pytest.approx(deeper["flops"], rel=0.01)
        assert deeper[kind]["low"] == deeper[kind]["ratio"] == deeper[kind]["high"]
    assert deeper["peak_memory"]["ratio"] > 1.3
    assert base["train_batch"] == 16
    weights = [sum(4 * p.numel() for p in models[name].parameters()) for name in ("base", "deeper")]
    more = (deeper["infer_memory"]["ratio"] - 1) * base["infer_memory_bytes"]
    # deeper is its weights alone: activations are gone after each block
    assert more == pytest.approx(weights[1] - weights[0], rel=0.01)
    hidden = 4 * base["infer_batch"] * 65 * 128  # the MLP's, before GELU
    assert base["infer_memory_bytes"] > weights[0] + hidden


def test_large_models_are_timed_with_smaller_batches(monkeypatch):
    monkeypatch.setattr("vitmods.study.cost.CALL_S", 1e-9)
    monkeypatch.setattr("vitmods.study.cost.BLOCK_S", 0)
    base = vit("mu/2", img_size=8, in_chans=1, num_classes=10)
    models = [("base", base), ("dpn", apply(base, *parse_changes("dpn")))]
    measured = measure(models, Classification(), plain(), CPU, budget_s=0.0)
    assert (measured["base"]["train_batch"], measured["base"]["infer_batch"]) == (2, 1)
    assert measured["rounds"] == 7


def test_an_arm_that_another_library_builds_than_base_is_named(monkeypatch):
    monkeypatch.setattr("vitmods.study.cost.seconds_per_call", lambda call, times, device: 1.0)
    unknown, own_vit = ForeignBase("timm:resnet10t", 10, (32, 32), 3), vit("mu/4", img_size=32, num_classes=10)
    models = [("base", unknown.build()), ("same", unknown.build()), ("vit", own_vit)]
    measured = measure(models, Classification(), plain().with_(batch_size=4), CPU, 0.0, unknown, 2)["arms"]
    built = "base is built by timm and the arm by vitmods: the ratios hold that difference too"
    assert {name: arm["against"] for name, arm in measured.items()} == {"same": None, "vit": built}
    assert remarks_on_costs([(name, ArmCost.from_dict(arm)) for name, arm in measured.items()]) == [
        f"Costs of vit: {built}."
    ]
    assert measured["vit"]["train_step"]["ratio"] == 1


def test_compiled_steps_are_measured_where_trials_are_compiled(monkeypatch):
    """In turn with those that are not; here compiling does nothing."""
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, mode=None: compiled.append(module))
    monkeypatch.setattr("vitmods.study.cost.seconds_per_call", lambda call, times, device: 1.0)
    base = vit("mu1/4", img_size=8, in_chans=1, num_classes=10)
    models = [("base", base), *((name, apply(base, *parse_changes(name))) for name in ("dpn", "rms"))]
    measured = measure(models, Classification(), plain().with_(batch_size=4), CPU, 0.0, arms=2, compiled=True)
    assert len(set(map(id, compiled))) == 3
    assert measured["base"]["compiled_step_s"] == 1.0
    arms = {name: ArmCost.from_dict(arm) for name, arm in measured["arms"].items()}
    assert {arm.compiled_step.ratio for arm in arms.values()} == {1.0}
    text = "A training step compiled: 1.00× (dpn) and 1.00× (rms); above it is not."
    assert remarks_on_costs(arms.items()) == [text]
    bound = replace(arms["rms"], compiled_step=None, host_bound=True)
    (remark,) = remarks_on_costs([("rms", bound), ("none", None)])
    assert remark.startswith("Training steps of rms are bound by the host, which takes about as long to start")


@pytest.mark.parametrize(("cost_seconds", "expected"), [(1000.0, 0.1), (1e-9, 0)])
def test_costs_take_at_most_a_tenth_of_the_training_time(cost_seconds, expected, tmp_path, monkeypatch):
    asked = []

    def measuring(*given, compiled):
        assert not compiled
        asked.append(given[4])
        yield
        return {"base": {}, "arms": {}}

    monkeypatch.setattr("vitmods.study.cost.measuring", measuring)
    monkeypatch.setattr("vitmods.study.run.read_answer", Mock())
    recipe = Recipe().with_(epochs=1, batch_size=64, crop="none", eval_crop=1.0)
    study = vm.Study("mu1/2", ["rms"], recipe=recipe, seeds=1, limit_train=128)
    study.run(tmp_path, device="cpu", workers=1, progress=False, cost_seconds=cost_seconds)
    trained = sum(json.loads(path.read_text())["wall_s"] for path in tmp_path.glob("trials/*/*/result.json"))
    assert asked == [pytest.approx(expected * trained, abs=1e-6)]
