"""A task and a metric, each in one file outside the package, on the package's own loop, study and report."""

import json
import sys

import numpy as np
import pytest
import torch

import vitmods as vm
from vitmods import data
from vitmods.cli.compare import Compare, make_study
from vitmods.cli.options import parse
from vitmods.finetune.delta import read_delta
from vitmods.finetune.roles import parameter_roles
from vitmods.recipes import Recipe
from vitmods.study.checkpoints import open_trial
from vitmods.study.trial import trial_scores
from vitmods.tasks import TASKS, Metric, Task
from vitmods.train import RunOptions, train_trial
from vitmods.train.optim import parameter_groups
from vitmods.util.errors import UserError

pytestmark = pytest.mark.usefixtures("short_clocks")

RECIPE = Recipe().with_(epochs=2, batch_size=32, crop="none", flip=0.0, lr=1e-2)
CPU = RunOptions("cpu", progress=False, tensorboard=False)


@pytest.fixture(autouse=True)
def plugins(load):
    load("brightness", "confidence")


def wrapped(seed=0):
    torch.manual_seed(seed)
    task = TASKS["brightness"]()
    return task, task.wrap(vm.vit("mu2/2", img_size=8, in_chans=1, num_classes=10), 10)


def digits(**options):
    return data.load("digits", img_size=8, in_chans=1, augment=RECIPE.augment, limit_train=128, **options)


def test_a_task_in_a_study_from_start_to_report(tmp_path):
    options = {"data": "digits", "seeds": 2, "recipe": RECIPE, "limit_train": 128}
    study = vm.Study("mu2/2", ["dpn"], task="brightness", **options)
    estimate = study.dry_run(workers=1, device="cpu")
    assert [arm.trials for arm in estimate.arms] == [2, 2]
    result = study.run(tmp_path, workers=1, device="cpu", cost_seconds=0.1, progress=False)
    results = result.to_dict()
    assert result.complete
    assert (results["metric"]["name"], results["metric"]["higher_is_better"]) == ("brightness_error", False)
    assert "error of brightness" in result.report().read_text()
    trial = tmp_path / "trials/dpn/seed0"
    value = json.loads((trial / "result.json").read_text())["metrics"]["brightness_error"]
    scores = trial_scores(trial, "test")
    assert scores["brightness_error"].mean() == pytest.approx(value, rel=1e-6)
    assert len(set(scores["ids"])) == len(scores["ids"])


def test_what_is_beside_the_backbone_is_trained_saved_and_read_again(tmp_path):
    task, model = wrapped()
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = train_trial(model, task, digits(), RECIPE, out=tmp_path, options=CPU)
    assert set(result["weights"]) == {"model.safetensors", "task.safetensors"}
    again = open_trial(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    assert not torch.equal(first["scale.weight"], model.scale.weight)
    backbone = vm.adapters.load(tmp_path)  # as any trial's: what another training begins with
    assert torch.equal(backbone.head.weight, model.backbone.head.weight)
    (tmp_path / "task.safetensors").write_bytes((tmp_path / "task.safetensors").read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=r"task\.safetensors is damaged"):
        open_trial(tmp_path)


def test_a_delta_holds_the_modules_beside_the_backbone(tmp_path):
    _, model = wrapped()
    base = vm.vit("mu2/2", img_size=8, in_chans=1, num_classes=10)
    base.load_state_dict(model.backbone.state_dict())
    with torch.no_grad():
        model.backbone.head.bias += 1.0
        model.scale.weight += 1.0
    delta = vm.save_delta(model, base, tmp_path / "gauge.safetensors")
    assert delta.nbytes == 4 * (10 + 10 + 1)
    task, again = wrapped(seed=5)
    again = task.wrap(vm.load_delta(base, tmp_path / "gauge.safetensors"), 10)
    again.load_state_dict(read_delta(tmp_path / "gauge.safetensors").modules, strict=False)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_modules_beside_the_backbone_have_rates_roles_and_layers_of_their_own():
    _, model = wrapped()
    roles = parameter_roles(model)
    assert roles["scale.weight"] == "other"
    assert roles["backbone.head.weight"] == "head"
    inside = parameter_roles(model.backbone)
    assert {name.removeprefix("backbone."): role for name, role in roles.items() if "backbone" in name} == inside
    for decay in (None, 0.5):
        scales = {
            name: group["lr_scale"]
            for group in parameter_groups(model, 0.1, decay)
            for name, parameter in model.named_parameters()
            if any(parameter is grouped for grouped in group["params"])
        }
        assert scales["scale.weight"] == scales["scale.bias"] == 10.0
        assert scales["backbone.head.weight"] == 1.0
        assert scales["backbone.patch_embed.proj.weight"] == (1.0 if decay is None else 0.5**3)
    decaying = {group["name"]: group["params"] for group in parameter_groups(model, 0.1)}
    assert "no_decay" in decaying
    spared = [p for group in parameter_groups(model, 0.1) if group["weight_decay"] == 0 for p in group["params"]]
    assert any(model.backbone.pos_embed is p for p in spared)


def test_the_state_of_a_task_resumes(tmp_path, stopped_at):
    def train(out):
        task, model = wrapped()
        train_trial(model, task, digits(), RECIPE, out=out, options=CPU)
        return task.center

    center = train(tmp_path / "whole")
    stopped_at(5, train, tmp_path / "broken")
    assert torch.equal(train(tmp_path / "broken"), center)
    for name in ("model.safetensors", "task.safetensors", "test.npz"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_images_and_targets_are_augmented_together_in_several_views():
    ds = digits(joint=sys.modules["brightness"].upside_down)
    plain = digits()
    batch, other = (next(dataset.train_batches(seed=0, epoch=0, batch_size=16)) for dataset in (ds, plain))
    assert torch.equal(batch.index, other.index)
    turned = batch.targets["turned"].bool()
    assert turned.any()
    assert torch.equal(batch.inputs, torch.where(turned[:, None, None, None], other.inputs.flip(2), other.inputs))
    assert torch.equal(batch.targets["class"], other.targets)
    assert [view.shape for view in batch.views] == [(16, 1, 4, 4)]
    first, second = batch.parts(2)
    assert torch.equal(torch.cat([first.targets["turned"], second.targets["turned"]]), batch.targets["turned"])
    assert [len(part.views[0]) for part in (first, second)] == [8, 8]
    assert batch.to(torch.device("cpu")).targets["class"] is batch.targets["class"]


@pytest.fixture
def variant():
    """Registers a task that differs from `brightness` in class attributes."""

    def register(**attributes):
        TASKS.add("variant", type("Variant", (TASKS["brightness"],), {"name": "variant", **attributes}))

    yield register
    if "variant" in TASKS:
        TASKS.remove("variant")


def test_recipes_that_others_chose_leave_out_what_a_task_does_not_read(variant):
    variant(unread=(*Task.unread, "label_smoothing"))
    study = vm.Study("mu2/2", ["dpn"], data="digits", task="variant")
    assert study.settings.recipe.loss.label_smoothing == 0
    assert study.settings.recipe.optimizer.lr == vm.recipes.digits().optimizer.lr
    for arguments in (["--task", "variant"], ["--task", "variant", "--recipe", "deit"]):
        assert make_study(parse(Compare, arguments, "compare")).settings.recipe.loss.label_smoothing == 0
    with pytest.raises(UserError, match="variant does not read label_smoothing"):
        vm.Study("mu2/2", ["dpn"], data="digits", task="variant", recipe=RECIPE.with_(label_smoothing=0.1))


@pytest.mark.parametrize("name", ["ece", "fewshot10", "knn", "top1", "brightness_error"])
def test_a_metric_of_another_s_name_is_refused(variant, name):
    with pytest.raises(UserError, match=rf"(?s)(?=.*\(my own\)).* has a metric '{name}' .* and so does"):
        variant(metrics=(Metric(name, "my own", ""),))
    assert "variant" not in TASKS


def test_a_metric_is_compared_like_any_other(tmp_path):
    study = vm.Study("mu2/2", ["rms"], data="digits", seeds=1, recipe=RECIPE, limit_train=128, metric="confidence")
    result = study.run(tmp_path, workers=1, device="cpu", cost_seconds=0, progress=False)
    assert result.to_dict()["metric"]["title"] == "confidence"
    scores = trial_scores(tmp_path / "trials/base/seed0", "test")
    measured = json.loads((tmp_path / "trials/base/seed0/test.json").read_text())["protocols"]["confidence"]
    assert scores["confidence"].mean() == pytest.approx(measured["metrics"]["confidence"], rel=1e-6)
    assert np.isin(["top1", "nll", "rank"], list(scores)).all()  # what the training itself found of each image


DEPTH = "compare --data walls:40 --task depth --base mu2/2 --img-size 8 --in-chans 1 --device cpu --arms dpn --seeds 1"


def test_a_task_with_a_recipe_part_a_target_and_a_source_of_its_own_is_one_file(load, tmp_path, said, refused):
    load("my_depth")
    said(f"{DEPTH} --jitter 0.3 --workers 1 --cost-seconds 0 --quiet", "--out", tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["metric"]["name"], results["complete"]) == ("depth_error", True)
    config = json.loads((tmp_path / "trials/dpn/seed0/config.json").read_text())
    assert config["recipe"]["depth"] == {"meters": 255.0, "jitter": 0.3}
    assert config["recipe"]["epochs"] == 2, "the task's own recipe"
    assert Recipe.from_dict(config["recipe"]).settings()["jitter"] == 0.3
    assert "error of depth" in (tmp_path / "report.html").read_text()
    assert "depth" not in Recipe().to_dict()
    for options, message in (
        ("--jitter 0.3 --task classification --data digits", "classification does not read jitter of the recipe"),
        ("--meters 0.5", "meters must be from 1 to 10000"),
        ("--fpn-channels 8", "depth does not read fpn_channels"),
        ("--loss sigmoid", "depth does not read loss"),
    ):
        assert message in refused(f"{DEPTH} {options}"), options


def test_a_target_of_its_own_is_made_of_what_other_sources_have(load):
    load("my_depth")
    task = TASKS["depth"]()
    batch = next(task.load_data("digits", img_size=8, in_chans=1, augment=RECIPE.augment).eval_batches("test", 8))
    assert batch.targets.dtype == torch.float32
    with pytest.raises(UserError, match=r"gives a depth of each image, not a class\. Train it with --task depth"):
        data.load("walls:40", img_size=8, in_chans=1, augment=RECIPE.augment)
