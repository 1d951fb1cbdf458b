"""What recipes begin with and train: a head that begins as a linear probe, a part of the model, the moving average."""

import json
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import vitmods as vm
from vitmods.finetune import BlendedNorms, MultiTask, parameter_roles
from vitmods.recipes import RECIPES, Recipe
from vitmods.tasks.base import TASKS
from vitmods.tasks.features import head_inputs
from vitmods.train import RunOptions
from vitmods.train.optim import Ema
from vitmods.train.probe import Features, head_from_probe, learn
from vitmods.util.errors import UserError


def features(bench, model, split):
    targets = []
    with torch.no_grad(), head_inputs(model.eval()) as read:
        for batch in bench.dataset.eval_batches(split, 64):
            model(batch.inputs)
            targets.append(batch.targets)
    return Features(torch.cat(read), torch.cat(targets))


def test_its_logits_are_those_of_the_probe(bench, tmp_path):
    run = bench.run(tmp_path, bench.recipe(head_start="probe"))
    run.metrics.close()
    model = run.model.eval()
    train = features(bench, model, "train")
    probe, _ = learn(train, None, 10, torch.device("cpu"))
    right = model.head(train.features).argmax(dim=1) == train.targets
    assert torch.equal(right, probe.right(train))
    assert right.float().mean() > 0.6, "features of an untrained model suffice for most training digits"
    drawn = bench.model().state_dict()
    assert all(torch.equal(value, drawn[name]) for name, value in model.state_dict().items() if "head" not in name)


def test_with_norms_that_are_blended_in_the_head_is_a_probe_of_what_base_gives(bench, tmp_path):
    base = bench.model()
    changed = vm.apply(base, vm.QKNorm(), vm.SubLN(rescale=False))
    blended = BlendedNorms(changed)
    before, read = (features(bench, model, "train").features for model in (base, changed))
    torch.testing.assert_close(read, before, rtol=0, atol=1e-5)
    weight, bias = head_from_probe(changed, bench.dataset, torch.device("cpu"), nullcontext)
    blended.remove()
    assert not torch.allclose(head_from_probe(changed, bench.dataset, torch.device("cpu"), nullcontext)[0], weight)
    run = bench.run(tmp_path, bench.recipe(head_start="probe", norm_blend=0.5), changed)
    run.metrics.close()
    assert torch.equal(run.model.head.weight, weight)
    assert torch.equal(run.model.head.bias, bias)


@pytest.mark.parametrize("head", [nn.Identity(), nn.Linear(64, 10, bias=False), nn.Linear(64, 7)], ids=str)
def test_another_head_is_left_with_a_reason(bench, tmp_path, head):
    model = bench.model()
    model.head = head
    with pytest.warns(UserWarning, match="is drawn, not a linear probe: its last layer is not a linear one"):
        bench.run(tmp_path, bench.recipe(head_start="probe"), model).metrics.close()


def test_one_image_of_a_class_is_enough():
    """There is then none to choose the strength by; one class has none at all."""
    probe, _ = learn(Features(torch.eye(9), torch.arange(9)), None, 10, torch.device("cpu"))
    weight, bias = probe.linear()
    assert (torch.eye(9) @ weight.T + bias).argmax(dim=1).tolist() == list(range(9))


@pytest.mark.parametrize("name", sorted(TASKS))
def test_tasks_without_a_head_of_classes_do_not_read_it(name):
    assert TASKS[name].fitted(RECIPES["finetune"]()).head_start == ("probe" if name == "classification" else "drawn")


@pytest.mark.parametrize("recipe", [{"ema": 0.9}, {"optimizer": "sgd", "lr": 0.01}], ids=["adamw", "sgd"])
def test_frozen_weights_stay_as_they_were(bench, tmp_path, recipe):
    model = bench.model()
    roles = parameter_roles(model)
    bench.train(tmp_path, model, bench.recipe(train="attention", epochs=1, **recipe))
    after = load_file(tmp_path / "model.safetensors")
    moved = {name for name, before in bench.model().state_dict().items() if not torch.equal(before, after[name])}
    assert {roles[name] for name in moved} == {"attention", "positions", "head"}


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


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def set(self, value):
        self.weight.data.fill_(value)
        self.mean.fill_(10 * value)
        self.count.fill_(int(value))


def averaged(values, decay):
    """The definition, summed out."""
    weights = [decay ** (len(values) - 1 - i) for i in range(len(values))]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def test_equals_the_normalized_sum_after_every_update_without_the_initial_weights():
    model, values = Counting(), [3.0, -1.0, 4.0, 1.0, 5.0, 9.0]
    model.set(1e6)
    ema = Ema(model, decay=0.9)
    for count in range(1, len(values) + 1):
        model.set(values[count - 1])
        ema.update()
        expected = averaged(values[:count], 0.9)
        torch.testing.assert_close(ema.model.weight.data, torch.full((3,), expected, dtype=torch.float64))
        torch.testing.assert_close(ema.model.mean, torch.full((2,), 10 * expected, dtype=torch.float64))
        assert ema.model.count == int(values[count - 1])


def test_what_is_frozen_is_the_models_own_and_takes_no_memory():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    ema = Ema(model, decay=0.5)
    assert not any(parameter.requires_grad for parameter in ema.model.parameters())
    assert not ema.model.training
    assert ema.model[0].weight is model[0].weight
    assert ema.model[1].weight is not model[1].weight
    with torch.no_grad():
        model[1].weight.fill_(3.0)
    ema.update()
    assert ema.model[1].weight.unique().tolist() == [3.0]
    assert model[1].weight.requires_grad


@pytest.mark.parametrize("recipe", [{"train": "lora(rank=2)"}, {"train": "dora(rank=2)", "ema": 0.8}], ids=str)
def test_a_trial_of_adapters_goes_on_and_ends_in_merged_weights(bench, tmp_path, goes_on, recipe):
    goes_on(recipe=bench.recipe(epochs=2, **recipe))
    base, images = bench.model(), torch.randn(3, 1, 8, 8)
    result = json.loads((tmp_path / "whole/result.json").read_text())
    assert result["params"] == sum(p.numel() for p in base.parameters())
    merged = bench.model().eval()
    before = {name: value.clone() for name, value in merged.state_dict().items()}
    merged.load_state_dict(load_file(tmp_path / "whole" / "model.safetensors"))
    differ = {name for name, value in merged.state_dict().items() if not torch.equal(value, before[name])}
    assert differ == {f"blocks.{i}.attn.{part}.weight" for i in (0, 1) for part in ("qkv", "proj")} | {
        "head.weight",
        "head.bias",
    }
    multi = MultiTask(base, {"digits": tmp_path / "whole" / "adapter"})
    torch.testing.assert_close(multi(images, "digits"), merged(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [("classification", {"shard": True}, "--shard"), ("dino", {}, "The task dino, which has a teacher,")],
)
def test_adapters_are_refused_where_they_cannot_be_trained(task, options, message):
    kind = TASKS[task]
    recipe = kind.fitted(Recipe().with_(train="lora"))
    with pytest.raises(UserError, match=f"{message} does not support adapters"):
        RunOptions(**options).check_task(kind.from_recipe(recipe), recipe)


def test_balanced_classes_change_what_is_drawn_or_the_weights_of_images(bench, tmp_path):
    results, recipes = {}, {name: bench.recipe(epochs=1, **{name: "balanced"}) for name in ("sampler", "class_weights")}
    for name, recipe in {"plain": bench.recipe(epochs=1), **recipes}.items():
        bench.train(tmp_path / name, recipe=recipe)
        results[name] = bench.numbers(tmp_path / name)["weights"]
        assert Recipe.from_dict(json.loads((tmp_path / name / "config.json").read_text())["recipe"]) == recipe
    assert results["class_weights"] == results["plain"], "16 digits of each class: their weights are 1"
    assert results["sampler"] != results["plain"]


def test_balance_is_refused_where_it_has_no_effect():
    for task, fields in (
        ("multilabel", "sampler"),
        ("segmentation", "class_weights"),
        ("sequence_classification", "sampler"),
    ):
        assert fields in TASKS[task].ignored_fields()
    with pytest.raises(UserError, match="leave out repeats"):
        Recipe().with_(sampler="balanced", repeats=3)
