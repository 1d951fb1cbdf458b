"""What a task without labels asks of the package: a teacher, schedules, features, images without classes."""

import json
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import vitmods as vm
from vitmods import data
from vitmods.evals import run_protocols
from vitmods.recipes import Recipe
from vitmods.recipes.schedule import half_cosine
from vitmods.study.evaluate import evaluate
from vitmods.study.trial import trial_scores
from vitmods.tasks import TASKS
from vitmods.tasks.base import make_task
from vitmods.train import Processes, RunOptions, TrialRun, train_trial
from vitmods.train.optim import clip_gradients, make_optimizer, set_weight_decay
from vitmods.util.errors import UserError

RECIPE = Recipe().with_(epochs=3, batch_size=32, crop="none", flip=0.0, lr=1e-2, warmup_epochs=0.0)
CPU = RunOptions("cpu", progress=False, tensorboard=False)


@pytest.fixture(autouse=True)
def two_views(load):
    load("two_views")
    return sys.modules["two_views"]


def model(seed=0):
    torch.manual_seed(seed)
    return vm.vit("mu1/2", img_size=8, in_chans=1, num_classes=0)


def digits(task, **options):
    few = {"limit_train": 96, "limit_val": 40, "test_fraction": 0.05}
    return task.load_data("digits", img_size=8, in_chans=1, augment=RECIPE.augment, **few, **options)


def train(out, task=None, recipe=RECIPE, options=CPU, **more):
    task = task or TASKS["two_views"]()
    student = model()
    result = train_trial(student, task, digits(task), recipe, out=out, options=options, **more)
    return task, student, result


def test_the_teacher_is_evaluated_saved_and_resumed(tmp_path, stopped_at):
    task, student, result = train(tmp_path / "whole")
    saved = load_file(tmp_path / "whole/model.safetensors")
    teacher = task.teacher.state_dict()
    assert all(torch.equal(saved[name], teacher[name]) for name in teacher)
    assert not torch.equal(saved["norm.weight"], student.state_dict()["norm.weight"])
    assert torch.equal(student.patch_embed.proj.bias, model().patch_embed.proj.bias), "before_step drops its gradient"
    images = digits(task).eval_batches("test", 64)
    assert task.evaluate(task.teacher, images).metrics == pytest.approx(result["metrics"], rel=1e-5)
    stopped_at(4, train, tmp_path / "broken")
    train(tmp_path / "broken")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "broken")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("task", "recipe", "options", "message"),
    [
        ("two_views", {"ema": 0.9}, CPU, "evaluates its teacher, not an average"),
        ("two_views", {}, RunOptions("cpu", shard=True), "--shard"),
        ("contrast", {"accumulate": 2}, CPU, "compares all images of a batch"),
    ],
)
def test_settings_that_a_teacher_or_the_loss_excludes_are_refused(two_views, tmp_path, task, recipe, options, message):
    made = {"two_views": two_views.TwoViews, "contrast": two_views.Contrast}[task]()
    processes = Processes(0, 2, 0) if options.shard else Processes()
    with pytest.raises(UserError, match=message):
        TrialRun(
            model(), made, digits(made), RECIPE.with_(**recipe), folder=tmp_path, options=options, processes=processes
        )
    if recipe:
        TASKS.add("contrast", two_views.Contrast)
        with pytest.raises(UserError, match=f"does not read {next(iter(recipe))}"):
            make_task(task, Recipe().with_(**recipe))


def test_weight_decay_follows_a_cosine_and_gradients_are_clipped_one_by_one():
    recipe = Recipe().with_(weight_decay=0.04, weight_decay_end=0.4)
    optimizer = make_optimizer(model(), recipe)
    for step in (0, 3, 10):
        set_weight_decay(optimizer, recipe, step, 10)
        by_name = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
        assert by_name == {"decay": pytest.approx(half_cosine(0.04, 0.4, step, 10)), "no_decay": 0.0}
    assert by_name["decay"] == 0.4
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 4.0]), torch.tensor([0.3, 0.4])
    assert clip_gradients(parameters, 1.0, each=True) == pytest.approx(np.sqrt(25.25))
    assert torch.allclose(parameters[0].grad, torch.tensor([0.6, 0.8]))
    assert torch.equal(parameters[1].grad, torch.tensor([0.3, 0.4]))
    with pytest.raises(UserError, match="clip_each needs a clip_norm"):
        Recipe().with_(clip_norm=None, clip_each=True)


def test_a_study_compares_by_a_protocol_that_training_measures_too(tmp_path, short_clocks):
    study = vm.Study("mu1/2", ["rms"], data="digits", task="two_views", seeds=1, recipe=RECIPE, limit_train=96)
    assert study.settings.measure.name == "knn"
    result = study.run(tmp_path, workers=1, device="cpu", cost_seconds=0.1, progress=False)
    assert result.complete
    trial = tmp_path / "trials/rms/seed0"
    rows = [json.loads(line) for line in (trial / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows if "knn" in row] == [2.0, 3.0]
    value = json.loads((trial / "result.json").read_text())["metrics"]["knn"]
    assert trial_scores(trial, "test")["knn"].mean() == pytest.approx(value)
    again = evaluate(trial)[0]["metrics"]
    assert again["knn"] == pytest.approx(value)
    with pytest.raises(UserError, match="reads logits of classes"):
        evaluate(trial, ["top1"])


def test_features_are_those_of_the_task():
    class Constant(TASKS["two_views"]):
        def features(self, model, batch):
            return torch.ones(len(batch), 2)

    for kind, is_chance in ((TASKS["two_views"], False), (Constant, True)):
        task = kind()
        images = digits(task)
        result = run_protocols(
            model(), images, ["knn"], split="test", batch_size=32, device=torch.device("cpu"), task=task
        )["knn"]
        assert (result.metrics["knn"] < 0.3) == is_chance


def test_a_failure_ends_a_trial_as_diverged(tmp_path, monkeypatch):
    monkeypatch.setattr(TASKS["two_views"], "failure", "all features are equal")
    result = train(tmp_path)[2]
    assert (result["status"], result["message"]) == ("diverged", "all features are equal after step 3")


def test_images_with_and_without_classes(tmp_path):
    from PIL import Image

    rng = np.random.default_rng(0)
    for i in range(20):
        for folder in ("loose", f"classes/{i % 2}"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(tmp_path / folder / f"{i}.png")
    (tmp_path / "labels.csv").write_text("file,labels\n" + "".join(f"loose/{i}.png,a;b\n" for i in range(20)))
    expected = {"loose": "none", "classes": "class", "labels.csv": "none"}
    for name, target in expected.items():
        images = data.load(tmp_path / name, img_size=8, augment=RECIPE.augment, target="any")
        assert images.target == target, name
