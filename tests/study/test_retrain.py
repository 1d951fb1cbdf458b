"""The chosen arm on all images, once the study has ended."""

import json
import re
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch

import vitmods as vm
from vitmods.cli import main
from vitmods.data import load
from vitmods.recipes import Augment, plain
from vitmods.report.advice import next_steps
from vitmods.study import Answer, Study
from vitmods.study.checkpoints import Checkpoint
from vitmods.study.evaluate import evaluate
from vitmods.study.executors import ClusterOptions
from vitmods.study.executors.processes import LocalProcesses
from vitmods.study.retrain import best_arm, retrain_command
from vitmods.study.trial import load_images
from vitmods.train.interrupt import Interrupted
from vitmods.train.loop import TrialRun
from vitmods.train.trial import WEIGHTS
from vitmods.util.errors import UserError

RECIPE = plain(epochs=2).with_(batch_size=64)
HERE = {"device": "cpu", "progress": False}


def make(base="mu/4", seeds=1, **options):
    return Study(base, ["dpn"], "digits", seeds=seeds, **{"recipe": RECIPE, "limit_train": 128, **options})


def run(study, out):
    return study.run(out, workers=1, cost_seconds=0, **HERE)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    out = tmp_path_factory.mktemp("ended") / "out"
    run(make(), out)
    return out


@pytest.fixture
def copied(ended, tmp_path):
    return shutil.copytree(ended, tmp_path / "out")


@pytest.fixture(scope="module")
def retrained(ended, tmp_path_factory):
    """A copy of the study whose base is trained on all images, and what its retraining returned."""
    out = shutil.copytree(ended, tmp_path_factory.mktemp("retrained") / "out")
    return out, make().retrain(out, **HERE)


def test_it_is_trained_on_all_images_and_has_no_number(copied):
    before = {path: path.read_bytes() for path in copied.glob("trials/**/*.*") if path.is_file()}
    retraining = make().retrain(copied, "dpn", **HERE)
    counts = json.loads((copied / "study.json").read_text())["data"]["splits"]
    config = json.loads((retraining.folder / "config.json").read_text())
    total = sum(split["count"] for split in counts.values())
    assert retraining.folder == copied / "retrained" / "dpn"
    assert {name: split["count"] for name, split in config["data"]["splits"].items()} == {"train": total}
    assert retraining.result["steps"] == 2 * (total // 64)
    assert retraining.result["metrics"] == {}
    assert retraining.result["split"] is None
    assert [path.name for path in retraining.folder.glob("*.npz")] == ["images.npz"]
    answer = Answer.load(copied)
    mean = next(iter(answer.arms[0].scores.values()))
    assert answer.metric.shown(mean) in str(retraining)
    assert "cannot be measured" in str(retraining)
    assert before == {path: path.read_bytes() for path in before}


def test_what_now_names_the_command_and_then_the_checkpoint(ended, retrained):
    before = [step.command for step in next_steps(Answer.load(ended))]
    assert any(command.endswith(", arm='base')") and ".retrain(" in command for command in before)
    out, retraining = retrained
    assert retraining.arm == "base"
    commands = [step.command for step in next_steps(Answer.load(out))]
    assert f"vitmods export {retraining.folder} --to onnx" in commands
    assert not any(".retrain(" in command for command in commands)


def test_an_unfinished_study_is_refused(copied):
    shutil.rmtree(copied / "trials" / "dpn")
    with pytest.raises(UserError, match="not finished"):
        make().retrain(copied, **HERE)
    assert not (copied / "retrained").exists()


@pytest.mark.parametrize("kind", [{"design": "factorial", "seeds": 2}, {"sweep": {"lr": (1e-4, 1e-3)}}])
def test_what_has_no_one_arm_to_take_is_refused(kind, copied, monkeypatch):
    study = Study("mu/4", ["dpn", "rms", "layerscale"], "digits", RECIPE, **kind)
    monkeypatch.setattr("vitmods.study.store.StudyFolder.check_same_study", lambda *_: None)
    with pytest.raises(UserError, match=r"run an ordinary study|name a run \(--retrain dpn\+rms\)"):
        study.retrain(copied, **HERE)


def test_another_study_or_arm_is_refused(copied, tmp_path):
    with pytest.raises(UserError, match=r"epochs.*2 -> 3"):
        make(recipe=RECIPE.with_(epochs=3)).retrain(copied, **HERE)
    with pytest.raises(UserError, match=r"not have an arm 'dpm'\. Did you mean 'dpn'"):
        make().retrain(copied, "dpm", **HERE)
    with pytest.raises(UserError, match="multiple of 3, or their number to 1, 2"):
        make().retrain(copied, **HERE, devices_per_trial=3, cluster=ClusterOptions("slurm", "local"))
    with pytest.raises(UserError, match=r"nothing is not a study yet: .*without --retrain"):
        make().retrain(tmp_path / "nothing", **HERE)


def test_it_continues_where_it_was_stopped(copied, retrained, monkeypatch):
    whole = retrained[1].folder
    batches = vm.data.ImageDataset.train_batches

    def stopped(self, **options):
        for number, batch in enumerate(batches(self, **options)):
            if options["epoch"] == 1 and number == 1:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(vm.data.ImageDataset, "train_batches", stopped)
    with pytest.raises(KeyboardInterrupt):
        make().retrain(copied, checkpoint_minutes=0, **HERE)
    monkeypatch.undo()
    folder = copied / "retrained/base"
    assert (folder / "checkpoint.pt").exists()
    make(seeds=None).retrain(copied, **HERE)  # as many seeds as the study itself says were planned
    assert (folder / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    time = (folder / WEIGHTS).stat().st_mtime_ns
    make().retrain(copied, **HERE)
    assert (folder / WEIGHTS).stat().st_mtime_ns == time


def test_one_process_begins_it_and_two_end_it_as_one_would(copied, retrained, monkeypatch):
    step = TrialRun._train_step

    def stops(run, batch):
        if run.step == 3:
            raise Interrupted("stopped", signal.SIGINT)
        step(run, batch)

    monkeypatch.setattr(TrialRun, "_train_step", stops)
    with pytest.raises(Interrupted):
        make().retrain(copied, checkpoint_every_steps=1, **HERE)
    monkeypatch.undo()
    assert (copied / "retrained/base/checkpoint.pt").exists()
    retraining = make().retrain(copied, devices_per_trial=2, **HERE)
    assert retraining.result["how"]["processes"] == 2
    assert retraining.result["steps"] == retrained[1].result["steps"]
    models = (Checkpoint.open(str(one.folder)).model.eval() for one in (retraining, retrained[1]))
    ours, theirs = (model(torch.rand(64, 1, 8, 8, generator=torch.manual_seed(0))).softmax(-1) for model in models)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)  # biases of keys, which have no effect, are rounding
    assert (retraining.folder / "images.npz").exists()
    assert retraining.folder == copied / "retrained/base"


def test_a_process_that_fails_is_named(copied, monkeypatch):
    monkeypatch.setattr(LocalProcesses, "run", lambda _, source: source.ended(source.take(), "it was killed"))
    with pytest.raises(UserError, match="base on all images is not trained: it was killed"):
        make().retrain(copied, devices_per_trial=2, **HERE)
    assert not list(copied.glob("retrained/**/images.npz"))


def test_it_predicts_and_is_not_evaluated_on_its_own_images(retrained):
    folder = retrained[1].folder
    for data in (None, "digits"):
        with pytest.raises(UserError, match="trained on all images of digits"):
            evaluate(folder, data=data, device="cpu")
    assert Checkpoint.open(str(folder)).settings["train_on_all"] is True


def test_it_is_evaluated_on_other_images(retrained, monkeypatch):
    read = []

    def load_digits(settings, *options):
        read.append(settings)
        return load_images({**settings, "data": "digits"}, *options)

    monkeypatch.setattr("vitmods.study.evaluate.load_images", load_digits)
    assert evaluate(retrained[1].folder, data="elsewhere", device="cpu")[0]["split"] == "test"
    assert "train_on_all" not in read[0]


def test_tuned_studies_take_the_chosen_point(tmp_path):
    study = make(tune={"lr": (1e-5, 3e-3)})
    chosen = run(study, tmp_path).chosen["base"]
    folder = study.retrain(tmp_path, "base", **HERE).folder
    assert json.loads((folder / "config.json").read_text())["recipe"]["optimizer"]["lr"] == chosen["lr"]


def test_trained_weights_and_foreign_bases(ended, tmp_path):
    begun = Study(
        start=ended / "trials/base/seed0", arms=["rms"], data="digits", seeds=1, recipe=RECIPE, limit_train=128
    )
    run(begun, tmp_path / "begun")
    config = json.loads((begun.retrain(tmp_path / "begun", **HERE).folder / "config.json").read_text())
    assert config["start"]["source"] == str(ended / "trials/base/seed0")
    foreign = Study(
        "timm:test_vit", ["replace(rms)"], "digits", RECIPE, 1, limit_train=64, img_size=32, in_chans=3, limit_val=20
    )
    run(foreign, tmp_path / "foreign")
    retraining = foreign.retrain(tmp_path / "foreign", "replace(rms)", **HERE)
    assert retraining.finished
    assert Checkpoint.open(str(retraining.folder)).classes == tuple(map(str, range(10)))


def test_several_labels(tmp_path, labeled):
    recipe = plain(epochs=1).with_(batch_size=8, loss="sigmoid")
    study = Study("mu/4", ["dpn"], labeled, recipe, 1, task="multilabel", img_size=8, in_chans=1)
    run(study, tmp_path / "out")
    retraining = study.retrain(tmp_path / "out", **HERE)
    config = json.loads((retraining.folder / "config.json").read_text())
    assert config["data"]["splits"]["train"]["count"] == 40
    assert retraining.finished


@pytest.fixture
def labeled(tmp_path):
    import numpy as np
    from PIL import Image

    rng, rows = np.random.default_rng(0), ["file,labels"]
    for i in range(40):
        Image.fromarray(rng.integers(0, 255, (8, 8), dtype=np.uint8)).save(tmp_path / f"{i}.png")
        rows.append(f"{i}.png,{';'.join(name for bit, name in enumerate('abc') if i >> bit & 1)}")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    return tmp_path / "labels.csv"


@pytest.mark.filterwarnings("error:The images are no longer")
def test_folds_are_joined_too(tmp_path):
    study = make(seeds=2, folds=2)
    run(study, tmp_path)
    counts = json.loads((tmp_path / "study.json").read_text())["data"]["splits"]
    config = json.loads((study.retrain(tmp_path, **HERE).folder / "config.json").read_text())
    assert config["data"]["splits"]["train"]["count"] == sum(split["count"] for split in counts.values())


def test_the_joined_split_has_every_image_once():
    parts = load("digits", img_size=8, in_chans=1, augment=Augment()).splits
    joined = load("digits", img_size=8, in_chans=1, augment=Augment(), train_on_all=True)
    assert list(joined.splits) == ["train"]
    labels = {name: label for split in parts.values() for name, label in zip(split.ids, split.labels)}
    assert dict(zip(joined.train.ids, joined.train.labels)) == labels
    assert len(joined.train) == len(labels)
    assert not [text for text in joined.summary()["warnings"] if "split" in text]


def test_changed_images_are_warned_of(copied, monkeypatch):
    monkeypatch.setattr("vitmods.study.store.StudyImages.same_contents", lambda *_: False)
    with pytest.warns(UserWarning, match="no longer those of the study"):
        make().retrain(copied, **HERE)


def test_the_same_images_are_recognized_in_any_split(copied):
    from vitmods.study.store import StudyFolder

    for changed, known in (({"train_on_all": True}, True), ({"limit_train": 100}, False)):
        images = load_images({**make().settings.fixed, **changed}, RECIPE)
        assert StudyFolder(copied).images.same_contents(images.splits) is known


def test_the_cheapest_of_the_best_is_taken():
    def arm(name, gain, cost, verdict="helps"):
        ratio = SimpleNamespace(ratio=cost)
        effect = SimpleNamespace(gain=gain, verdict=verdict)
        return SimpleNamespace(name=name, effect=effect, cost=SimpleNamespace(infer_n=ratio, train_step=ratio))

    arms = [arm("large", 3, 1.2), arm("cheap", 2, 1.0), arm("weak", 1, 0.5), arm("saves", 0, 0.1, "no worse")]

    def best(*names, among=arms):
        gains = {arm.name: arm.effect for arm in among}
        answer = type("Found", (dict,), {"arms": among, "base": "base", "decision": SimpleNamespace(best=names)})
        return best_arm(answer(gains))

    assert best("large", "cheap", "saves").name == "cheap"
    assert best("base").name == "weak"
    assert best("saves", among=arms[-1:]) == "base"


def test_commands():
    command = "vitmods compare --arms dpn 'x=dpn+rms' --budget 2h --retrain=best"
    assert retrain_command(command, "x") == "vitmods compare --arms dpn x=dpn+rms --retrain x"
    assert retrain_command("vm.Study('mu/4').run('a')", "x") == "vm.Study('mu/4').retrain('a', arm='x')"


def test_the_shell(copied, capsys, tmp_path):
    command = [
        "compare", "--base", "mu/4", "--arms", "dpn", "--seeds", "1", "--recipe", "plain", "--epochs", "2", "--quiet",
        "--batch-size", "64", "--limit-train", "128", "--device", "cpu", "--out", str(copied), "--retrain", "best",
    ]  # fmt: skip
    assert main(command) == 0
    assert "base is trained on all images" in capsys.readouterr().out
    assert "retrained/base" in (copied / "report.html").read_text()
    for more in (["--dry-run"], ["--pilot"], ["--budget", "2h"]):
        assert main([*command, *more]) == 2
        error = re.sub("[\u2500-\u257f]| - ", " ", capsys.readouterr().err)
        assert "drop --dry-run" in " ".join(error.split())
