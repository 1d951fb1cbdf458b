"""DINO against arrays of the official code, and tiny trials: teacher, resume, collapse."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torchvision.transforms import functional

import vitmods as vm
from vitmods.recipes import RECIPES, Recipe
from vitmods.recipes.schedule import half_cosine, lr_at, resolve
from vitmods.study.checkpoints import open_trial
from vitmods.study.defaults import DIGITS, Defaults, RecipeChoice
from vitmods.study.trial import trial_scores
from vitmods.tasks import TASKS
from vitmods.tasks.dino.model import DinoHead
from vitmods.tasks.dino.recipes import DinoPart
from vitmods.tasks.dino.task import dino_loss, next_center, teacher_temperature
from vitmods.tasks.dino.views import gaussian_blur, local_size, recolor, turn_hue
from vitmods.tasks.features import last_blocks
from vitmods.train import RunOptions, train_trial
from vitmods.util.errors import UserError

from ..support import on_digits

SMALL = {"prototypes": 32, "head_width": 16, "bottleneck": 8, "local_crops": 2, "local_size": 4}
CPU = RunOptions("cpu", progress=False, tensorboard=False)


def test_the_loss_and_the_center_are_the_official_ones(golden):
    g, part = golden("dino_loss"), DinoPart(teacher_temp=0.07, teacher_temp_epochs=3)
    temperatures = [teacher_temperature(part, epoch) for epoch in range(5)]
    np.testing.assert_allclose(temperatures, g["aux.teacher_temp_schedule"], atol=1e-12)
    center = g["in.center0"]
    for step in range(3):
        read = g.group(f"step{step}")
        student = read["student"].requires_grad_()
        loss = dino_loss(student, read["teacher"], center, 0.1, temperatures[int(read["epoch"])])
        loss.backward()
        center = next_center(center, read["teacher"].mean(0, keepdim=True), 0.9)
        for actual, name in ((loss.detach(), "loss"), (student.grad, "grad_student"), (center, "center_after")):
            torch.testing.assert_close(actual, read[name], atol=1e-10, rtol=0)


def test_the_schedules_are_the_official_ones(golden):
    g, recipe = golden("dino_schedules"), RECIPES["dino_100"](10, batch_size=512).with_(warmup_epochs=2.0)
    length = resolve(recipe, 7 * 512)
    made = {"lr": [lr_at(length, step) for step in range(70)]}
    for name, start, end in (("wd", 0.04, 0.4), ("momentum", 0.996, 1.0)):
        made[name] = [half_cosine(start, end, step, 70) for step in range(70)]
    for name, values in made.items():
        np.testing.assert_allclose(values, g[name], atol=1e-12, rtol=0)


@pytest.mark.parametrize("is_fixed", [True, False])
def test_the_head_is_weight_normalized(is_fixed):
    torch.manual_seed(0)
    head = DinoHead(6, DinoPart(**{**SMALL, "local_size": None}, norm_last_layer=is_fixed)).double()
    reference = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 32, bias=False).double())
    with torch.no_grad():
        reference.parametrizations.weight.original0.fill_(1.0)
        reference.parametrizations.weight.original1.copy_(head.last_layer.weight_v)
    x = torch.randn(5, 6, dtype=torch.double)
    hidden = head.mlp(x)
    expected = reference(hidden / hidden.norm(dim=1, keepdim=True))
    actual = head(x)
    torch.testing.assert_close(actual, expected)
    (actual**2).sum().backward()
    (expected**2).sum().backward()
    weight = reference.parametrizations.weight
    torch.testing.assert_close(head.last_layer.weight_v.grad, weight.original1.grad)
    assert (head.last_layer.weight_g.grad is None) == is_fixed
    if not is_fixed:
        torch.testing.assert_close(head.last_layer.weight_g.grad, weight.original0.grad)


def small_recipe(**options) -> Recipe:
    return RECIPES["dino_100"](2, batch_size=24).with_(mean=(0.5,), std=(0.5,), drop_path=0.0, **{**SMALL, **options})


def test_crops_differ_in_size_and_follow_the_seed_alone():
    _, _, images = on_digits("dino", small_recipe())
    batches = [next(images.train_batches(seed=0, epoch=epoch, batch_size=8)) for epoch in (0, 0, 1)]
    assert [view.shape[-1] for view in (batches[0].inputs, *batches[0].views)] == [8, 8, 4, 4]
    assert torch.equal(batches[0].views[1], batches[1].views[1])
    assert not torch.equal(batches[0].inputs, batches[0].views[0])
    assert not torch.equal(batches[0].views[1], batches[0].views[2])


def trained(out, recipe, *changes, options=CPU):
    """(model, task, result)"""
    model, task, images = on_digits("dino", recipe, *changes)
    return model, task, train_trial(model, task, images, recipe, out=out, options=options)


@pytest.mark.parametrize("change", [vm.DynamicTokenNorm(), vm.Norm("batch")], ids=str)
def test_a_trial_resumes_in_the_same_bits(tmp_path, ends_in_the_same_bits, change):
    ends_in_the_same_bits(lambda out: trained(out, small_recipe(), change), tmp_path, "test", 5)
    config = json.loads((tmp_path / "whole/metrics.jsonl").read_text().splitlines()[0])
    assert {"loss", "teacher_entropy"} <= config.keys()
    teacher = open_trial(tmp_path / "whole")
    assert teacher.center.abs().sum() > 0
    assert torch.equal(teacher.head.last_layer.weight_g, torch.ones(32, 1))


def test_the_center_does_not_depend_on_parts(tmp_path):
    centers = []
    for accumulate in (1, 2):
        recipe = small_recipe().with_(accumulate=accumulate, steps=1, warmup_steps=0, warmup_epochs=None)
        _, task, _ = trained(tmp_path / str(accumulate), recipe)
        centers.append(task.teacher.center)
    torch.testing.assert_close(*centers)


def test_collapse_is_a_failure_with_a_reason():
    for words, broken in {
        "the same features": lambda model: model.backbone.norm.weight.zero_(),
        "targets are uniform": lambda model: model.head.last_layer.weight_g.zero_(),
        "all images one target": lambda model: model.center[0, 1:].fill_(1e4),
    }.items():
        model, task, images = on_digits("dino", small_recipe())
        assert task.evaluate(model, images.eval_batches("test", 32)).failure is None
        task.is_done = True
        assert task.evaluate(model, images.eval_batches("test", 32)).failure is None
        with torch.no_grad():
            broken(model)
        assert words in task.evaluate(model, images.eval_batches("test", 32)).failure


def test_hue_and_blur_are_torchvisions_with_numbers_of_each_image():
    images = torch.rand(4, 3, 20, 16, generator=torch.Generator().manual_seed(0))
    for turn in (-0.5, -0.13, 0.0, 0.07, 0.4):
        expected = functional.adjust_hue(images, turn)
        torch.testing.assert_close(turn_hue(images, torch.full((4, 1, 1, 1), turn)), expected, atol=1e-5, rtol=0)
    deviations = (0.3, 2.0, 0.9, 1.4)
    expected = [functional.gaussian_blur(image, [13, 13], [sigma]) for image, sigma in zip(images, deviations)]
    blurred = gaussian_blur(images, torch.tensor(deviations), 2.0)
    torch.testing.assert_close(blurred, torch.stack(expected), atol=1e-5, rtol=0)


def test_the_colors_of_a_crop_depend_on_its_own_numbers():
    crops = torch.randint(0, 256, (6, 3, 12, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    part, views = DinoPart(), np.arange(10, 16)
    whole = recolor(part, crops, views, 3, 1, 1)
    assert torch.equal(whole[2:3], recolor(part, crops[2:3], views[2:3], 3, 1, 1))
    assert not torch.equal(whole, crops)
    unchanged = DinoPart(color_jitter=0, grayscale=0, solarize=0, blur=(0, 0, 0))
    assert torch.equal(recolor(unchanged, crops, views, 3, 1, 1), crops)
    assert torch.equal(recolor(DinoPart(color_jitter=0, grayscale=0, blur=(0, 0, 0)), crops, views, 3, 1, 0), crops)


def test_sgd_trains_the_last_layer_once_it_thaws(tmp_path):
    recipe = small_recipe().with_(optimizer="sgd", lr=0.01)
    before = on_digits("dino", recipe)[0].head.last_layer.weight_v
    model, _, result = trained(tmp_path, recipe)
    assert result["status"] == "finished"
    assert not torch.equal(model.head.last_layer.weight_v, before)


def test_small_crops_consist_of_whole_patches():
    task = TASKS["dino"].from_recipe(small_recipe(local_size=5))
    with pytest.raises(UserError, match="--local-size to a multiple of 2"):
        task.wrap(vm.vit("mu2/2", img_size=8, in_chans=1, num_classes=0), 10)
    sizes = {224: 96, 96: 48, 32: 16, 8: 4, 384: 160}
    assert {side: local_size(DinoPart(), (side, side))[0] for side in sizes} == sizes


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_a_probe_reads_the_last_blocks(pool):
    backbone = vm.vit("mu3/2", img_size=8, in_chans=1, num_classes=0, pool=pool, class_token=pool == "token").eval()
    images = torch.rand(3, 1, 8, 8)
    with torch.inference_mode():
        features = last_blocks(backbone, images, 2)
        assert features.shape == (3, 2 * backbone.num_features)
        torch.testing.assert_close(features[:, backbone.num_features :], backbone(images))
        torch.testing.assert_close(last_blocks(backbone, images, 9)[:, -64:], features)
    with pytest.raises(UserError, match="probe_blocks=1"):
        last_blocks(torch.nn.Linear(2, 2), images, 2)


def test_the_recipe_follows_the_images():
    for defaults, name in ((DIGITS, "dino_small"), (Defaults("Ti/16", 224, images=100_000, side=300), "dino_100")):
        assert f"Recipe {name}" in RecipeChoice().resolve(TASKS["dino"], defaults, defaults.img_size, None, {})[1]


def test_a_study_compares_by_the_probe_and_its_teachers_are_fine_tuned(tmp_path, said, refused):
    few = "--data digits --limit-train 48 --limit-val 20 --epochs 1 --batch-size 24 --device cpu --quiet"
    recipe = RECIPES["dino_small"](epochs=1, batch_size=24).with_(**SMALL)
    study = vm.Study("mu1/2", ["rms"], "digits", recipe=recipe, task="dino", metric="probe", seeds=1, limit_train=48)
    answer = study.run(tmp_path, device="cpu", cost_seconds=0, progress=False, budget=1, workers=1)
    assert answer.metric.name == "probe"
    trial, out = tmp_path / "trials/base/seed0", tmp_path / "evaluated.json"
    said(f"evaluate {trial} --protocol probe --split test --device cpu --out {out}")
    evaluated = json.loads(out.read_text())["metrics"]["probe"]  # of the teacher, which the trial saved
    assert trial_scores(trial, "test")["probe"].mean() == pytest.approx(evaluated, abs=1e-9)
    said(f"finetune --from {trial} {few} --out {tmp_path}/tuned")
    assert "top1" in json.loads((tmp_path / "tuned/result.json").read_text())["metrics"]
    small = " ".join(f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items())
    said(f"pretrain {few} --base mu1/2 {small} --out {tmp_path}/dino")
    assert json.loads((tmp_path / "dino/config.json").read_text())["task"] == "dino"
    assert "reads labels" in refused(f"pretrain {few} --task classification")


@pytest.mark.long
def test_a_compiled_trial_is_the_plain_one(tmp_path, monkeypatch):
    compile = torch.nn.Module.compile  # inductor's C++ takes minutes to compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **how: compile(module, backend="aot_eager"))
    for name, options in (("plain", CPU), ("compiled", replace(CPU, compile=True))):
        trained(tmp_path / name, small_recipe(), options=options)
    plain, compiled = (load_file(tmp_path / name / "task.safetensors") for name in ("plain", "compiled"))
    for key, value in plain.items():
        torch.testing.assert_close(compiled[key], value, atol=2e-3, rtol=1e-3, msg=key)
