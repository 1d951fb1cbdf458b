import dataclasses
import json
import resource
import shutil
import signal
import subprocess
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from vitmods.adapters import load, open_checkpoint
from vitmods.study.checkpoints import Start, open_trial
from vitmods.study.evaluate import evaluate
from vitmods.tasks import Classification, Measured
from vitmods.train import Interrupted, RunOptions, checkpoint
from vitmods.train.trial import read_scores
from vitmods.util.errors import UserError


class Hooked(Classification):
    """Does something at a given step, or before or after a given evaluation."""

    def at(self, action, step=None, evaluation=None, after_evaluation=None):
        object.__setattr__(self, "plan", (action, step, evaluation, after_evaluation))
        object.__setattr__(self, "counts", [0, 0])
        return self

    def loss(self, model, batch):
        self.counts[0] += 1
        if self.counts[0] == self.plan[1]:
            return self.plan[0](super().loss(model, batch))
        return super().loss(model, batch)

    def evaluate(self, model, batches):
        self.counts[1] += 1
        if self.counts[1] == self.plan[2]:
            self.plan[0](None)
        measured = super().evaluate(model, list(batches))
        return self.plan[0](measured) if self.counts[1] == self.plan[3] else measured


@pytest.fixture(scope="module")
def finished(bench, tmp_path_factory):
    """The folder of a trial that nobody stopped."""
    out = tmp_path_factory.mktemp("unbroken")
    bench.train(out)
    return out


@pytest.fixture(scope="module")
def unbroken(bench, finished):
    return bench.numbers(finished)


def test_a_finished_trial_is_a_folder(bench, tmp_path):
    model, out = bench.model(drop_path=0.1), tmp_path / "dpn" / "seed2"
    before = torch.get_rng_state()
    result = bench.train(out, model, seed=2, tensorboard=True, metadata={"arm": "dpn", "changes": "dpn"})
    assert torch.equal(before, torch.get_rng_state()), "torch's random numbers outside changed"
    written = {path.name for path in out.iterdir()}
    assert written == {"config.json", "metrics.jsonl", "model.safetensors", "result.json", "val.npz", "test.npz", "tb"}
    assert json.loads((out / "result.json").read_text()) == result
    expected = {"schema": 1, "status": "finished", "arm": "dpn", "seed": 2, "split": "test", "steps": 12, "epochs": 3.0}
    assert result | expected == result
    assert result["params"] == sum(p.numel() for p in bench.model().parameters())
    config = json.loads((out / "config.json").read_text())
    assert config["recipe"]["batch_size"] == 40
    assert config["model"]["embed_dim"] == 32
    assert config["data"]["fingerprint"]
    assert config["environment"]["device"] == "cpu"
    val = [row for row in bench.rows(out) if row["split"] == "val"]
    assert [row["step"] for row in val] == [4, 8, 12]


def test_a_finished_trial_is_not_run_again_nor_with_other_settings(bench, finished):
    model = bench.model()
    model.register_forward_pre_hook(lambda *_: pytest.fail("it ran"))
    assert bench.train(finished, model) == json.loads((finished / "result.json").read_text())
    with pytest.raises(
        UserError, match=r"recipe\.ema was None, now 0\.5; recipe\.optimizer\.lr was 0\.005, now 0\.1\. Choose"
    ):
        bench.train(finished, recipe=bench.recipe(lr=0.1, ema=0.5))
    with pytest.raises(UserError, match="seed was 0, now 1"):
        bench.train(finished, seed=1)


def raise_signal(number):
    def action(value):
        signal.raise_signal(number)
        return value

    return action


@pytest.mark.parametrize(
    ("number", "when", "step"),
    [(signal.SIGINT, {"step": 6}, 6), (signal.SIGTERM, {"evaluation": 2}, 8), (signal.SIGINT, {"evaluation": 4}, 12)],
)
def test_a_signal_saves_and_the_same_call_goes_on_to_the_same_numbers(bench, tmp_path, unbroken, number, when, step):
    with pytest.raises(Interrupted, match="run the same command again to resume") as caught:
        bench.train(tmp_path, task=Hooked().at(raise_signal(number), **when))
    assert caught.value.exit_code == 128 + number
    assert checkpoint.load(tmp_path)["step"] == step
    counting = Hooked().at(None)
    bench.train(tmp_path, task=counting)
    assert counting.counts[0] == 12 - step, "steps were done twice"
    assert bench.numbers(tmp_path) == unbroken


def test_a_signal_after_the_last_step_does_not_get_lost(bench, tmp_path, unbroken):
    with pytest.raises(KeyboardInterrupt):
        bench.train(tmp_path, task=Hooked().at(raise_signal(signal.SIGINT), after_evaluation=4))
    assert bench.numbers(tmp_path) == unbroken


def fail(value):
    raise RuntimeError("out of memory")


def test_a_failure_is_recorded_and_tried_again_elsewhere_and_with_a_damaged_checkpoint(bench, tmp_path, unbroken):
    with pytest.raises(RuntimeError, match="out of memory"):
        bench.train(tmp_path, task=Hooked().at(fail, step=7), checkpoint_every_steps=2)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["message"]) == ("failed", "RuntimeError: out of memory")
    config = json.loads((tmp_path / "config.json").read_text())
    config["environment"]["threads"] = 77
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:5000])  # which costs steps and no digit
    with pytest.warns(UserWarning, match="damaged"), pytest.warns(UserWarning, match="threads was 77, now"):
        bench.train(tmp_path)
    assert bench.numbers(tmp_path) == unbroken


def not_a_number(value):
    return value[0] * float("nan"), value[1]


def infinite_gradient(value):
    loss, statistics = value
    return loss + ((loss - loss.detach()) ** 2 + 0.0).sqrt(), statistics


def infinite_measure(measured):
    return Measured({**measured.metrics, "loss": float("inf")}, measured.per_image)


@pytest.mark.parametrize(
    ("action", "when", "recipe", "words"),
    [
        (not_a_number, {"step": 7}, {}, "the loss was not finite at step 7"),
        (infinite_gradient, {"step": 7}, {"precision": "bf16-mixed"}, "the gradient was not finite at step 7"),
        (infinite_gradient, {"step": 7}, {"clip_norm": None}, "the loss was not finite at step 8"),
        (infinite_measure, {"after_evaluation": 1}, {}, "the loss on val was not finite after step 12"),
        # A gradient at the last step shows in no loss where all images are trained on, and none is evaluated.
        (infinite_gradient, {"step": 12}, {"clip_norm": None}, "the weights were not finite after step 12"),
        (infinite_gradient, {"step": 12}, {"clip_norm": None, "precision": "bf16-mixed"},
         "the weights were not finite after step 12"),
    ],
)  # fmt: skip
def test_what_is_not_finite_is_an_outcome(bench, tmp_path, action, when, recipe, words):
    recipe, options = bench.recipe(**recipe), {"eval_every_epochs": 3}  # an evaluation in between would notice too
    if "weights" in words:
        splits = {"train": bench.dataset.splits["train"]}
        bench = dataclasses.replace(bench, dataset=dataclasses.replace(bench.dataset, splits=splits))
    result = bench.train(tmp_path, recipe=recipe, task=Hooked().at(action, **when), **options)
    assert (result["status"], result["message"], result["metrics"]) == ("diverged", words, {})
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert not (tmp_path / "model.safetensors").exists()
    assert all(row["step"] < 7 for row in bench.rows(tmp_path)) == (when == {"step": 7})
    assert bench.train(tmp_path, recipe=recipe, **options) == result, "a divergence was tried again"


@pytest.mark.parametrize(("save_s", "steps"), [(0, list(range(1, 13))), (30, [1, 11])])
def test_checkpoints_by_the_clock_take_a_twentieth_of_the_time_on_a_slow_disk(
    bench, tmp_path, monkeypatch, save_s, steps
):
    clock, saved = [0.0], []

    class Minute(Classification):
        def loss(self, model, batch):
            clock[0] += 60
            return super().loss(model, batch)

    def save(folder, state):
        saved.append(state["step"])
        clock[0] += save_s

    monkeypatch.setattr(checkpoint, "save", save)
    monkeypatch.setattr("vitmods.train.loop.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    bench.train(tmp_path, task=Minute(), checkpoint_minutes=0.1)
    assert saved == steps


def test_a_task_that_replaces_a_parameter_is_refused(bench, tmp_path):
    class Replacing(Classification):
        def begin(self, model):
            model.head = torch.nn.Linear(model.head.in_features, model.head.out_features)

    with pytest.raises(ValueError, match=r"the optimizer does not hold head\.weight, head\.bias"):
        bench.train(tmp_path, task=Replacing())


@contextmanager
def full_disk(folder):
    """A real file system that is full until `free` is called."""
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=False, capture_output=True)
    if mount.returncode != 0:
        pytest.skip("mounting needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_one_clear_error_and_the_checkpoint_stays(bench, tmp_path, unbroken):
    def fill(value):
        with open(tmp_path / "ballast", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1024))
            except OSError:
                return value

    options = {"checkpoint_every_steps": 2, "tensorboard": True}
    with full_disk(tmp_path):
        with pytest.raises(UserError, match="the disk is full; free some space and run the same command again"):
            bench.train(tmp_path, task=Hooked().at(fill, step=7), **options)
        assert checkpoint.load(tmp_path)["step"] == 6
        (tmp_path / "ballast").unlink()
        bench.train(tmp_path, **options)
        assert bench.numbers(tmp_path) == unbroken


def test_a_file_that_may_not_grow_is_one_clear_error(bench, tmp_path, unbroken):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(value):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
        return value

    try:
        with pytest.raises(UserError, match="a file may not grow further"):
            bench.train(tmp_path, task=Hooked().at(limit, step=12), checkpoint_every_steps=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpoint.load(tmp_path)["step"] == 10
    bench.train(tmp_path)
    assert bench.numbers(tmp_path) == unbroken


@pytest.mark.parametrize("fields", [{"drop_path": 0.1}, {"dropout": 0.1}, {"init": "big_vision"}, {"head_bias": -1.0}])
def test_a_model_that_is_not_built_as_the_recipe_says_is_refused(bench, tmp_path, fields):
    recipe = bench.recipe(epochs=1, **fields)
    with pytest.raises(ValueError, match=r"The recipe sets \w+=.*, and the model was .*\*\*recipe\.model\.to_config"):
        bench.train(tmp_path, recipe=recipe)
    with pytest.raises(ValueError, match=r"was built with ('not reported'|0\.0)"):
        bench.train(tmp_path, torch.nn.Linear(2, 2), recipe)
    with pytest.raises(ValueError, match="A batch of 161 images is more than the 160"):
        bench.train(tmp_path / "out", recipe=bench.recipe(batch_size=161))
    assert not (tmp_path / "out").exists()


def test_a_folder_from_before_a_field_of_the_recipe_goes_on(bench, tmp_path):
    bench.train(tmp_path, recipe=bench.recipe(epochs=1))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["resolved"], config["recipe"]["schedule"]["rsqrt_timescale"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    bench.train(tmp_path, recipe=bench.recipe(epochs=1))
    with pytest.raises(ValueError, match="rsqrt_timescale was 10000, now 5"):
        bench.train(tmp_path, recipe=bench.recipe(epochs=1, rsqrt_timescale=5))


def test_scores_of_each_image_lie_beside_the_result_also_of_a_resumed_trial(bench, finished, tmp_path, monkeypatch):
    result = json.loads((finished / "result.json").read_text())
    scores = read_scores(finished / "test.npz")
    test = bench.dataset.splits["test"]
    assert scores.pop("ids").tolist() == list(test.ids)
    assert set(scores) == {"top1", "top5", "rank", "p", "nll", "brier", "predicted"}
    assert {len(column) for column in scores.values()} == {len(test)}
    assert scores["top1"].mean() == pytest.approx(result["metrics"]["top1"], abs=1e-12)
    bench.stop(monkeypatch, tmp_path / "stopped", at=7)
    bench.train(tmp_path / "stopped")
    for split in ("val", "test"):
        assert (tmp_path / f"stopped/{split}.npz").read_bytes() == (finished / f"{split}.npz").read_bytes()


def test_a_damaged_byte_in_the_weights_is_seen_by_all_that_read_them(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    assert set(json.loads((tmp_path / "result.json").read_text())["weights"]) == {"model.safetensors"}
    assert open_trial(tmp_path)
    content = bytearray(weights.read_bytes())
    content[-7] ^= 1
    weights.write_bytes(content)
    readers = [open_trial, load, lambda folder: open_checkpoint(str(folder)), lambda folder: Start.of(str(folder))]
    for read in (*readers, lambda _: load(weights), lambda folder: evaluate(folder, device="cpu")):
        with pytest.raises(UserError, match=r"model\.safetensors is damaged.*Copy it again"):
            read(tmp_path)


@pytest.mark.parametrize("option", ["recompute", "checkpointing"])
def test_memory_is_saved_on_request_which_is_recorded_and_changes_nothing(bench, finished, tmp_path, option):
    plain = json.loads((finished / "result.json").read_text())
    saved = bench.train(tmp_path / option, **{option: True})
    assert saved["metrics"] == pytest.approx(plain["metrics"], rel=1e-5)
    environment = json.loads((tmp_path / option / "config.json").read_text())["environment"]
    assert environment[option] is True
    with pytest.raises(UserError, match="Linear"):
        RunOptions(**{option: True}).save_memory(torch.nn.Linear(1, 1))
