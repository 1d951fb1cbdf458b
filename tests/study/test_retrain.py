"""The chosen arm on all images, once the study has ended."""

import json
import re
import shlex
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

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
from vitmods.study.retrain import best_arm, export_line, retrain_command, uses_of
from vitmods.study.store import StudyFolder
from vitmods.study.trial import load_images
from vitmods.train.interrupt import Interrupted
from vitmods.train.loop import TrialRun
from vitmods.train.trial import MODULES, WEIGHTS
from vitmods.util.errors import UserError

pytestmark = pytest.mark.usefixtures("short_clocks")

RECIPE = plain(epochs=2).with_(batch_size=64)
HERE = {"device": "cpu", "progress": False}


def make(base="mu2/4", seeds=1, **options):
    options = {"arms": ["dpn"], "data": "digits", "recipe": RECIPE, "limit_train": 128, **options}
    return Study(base, seeds=seeds, **options)


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


def test_it_is_trained_on_all_images_and_has_no_number(ended, retrained):
    out, retraining = retrained
    counts = json.loads((out / "study.json").read_text())["data"]["splits"]
    config = json.loads((retraining.folder / "config.json").read_text())
    total = sum(split["count"] for split in counts.values())
    assert retraining.folder == out / "retrained" / "base"
    assert {name: split["count"] for name, split in config["data"]["splits"].items()} == {"train": total}
    assert retraining.result["steps"] == 2 * (total // 64)
    assert retraining.result["metrics"] == {}
    assert retraining.result["split"] is None
    assert [path.name for path in retraining.folder.glob("*.npz")] == ["images.npz"]
    answer = Answer.load(out)
    mean = next(iter(answer.base.scores.values()))
    assert answer.metric.shown(mean) in str(retraining)
    assert "cannot be measured" in str(retraining)
    for path in ended.glob("trials/**/*.*"):
        assert path.is_dir() or path.read_bytes() == (out / path.relative_to(ended)).read_bytes()


def test_what_now_names_the_command_and_then_the_checkpoint(ended, retrained):
    before = [step.command for step in next_steps(Answer.load(ended))]
    assert any(command.endswith(", arm='base')") and ".retrain(" in command for command in before)
    out, retraining = retrained
    assert retraining.arm == "base"
    commands = [step.command for step in next_steps(Answer.load(out))]
    assert f"vitmods export {retraining.folder} --to onnx" in commands
    assert not any(".retrain(" in command for command in commands)


def test_what_cannot_be_retrained_is_refused(copied, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"epochs.*2 -> 3"):
        make(recipe=RECIPE.with_(epochs=3)).retrain(copied, **HERE)
    with pytest.raises(UserError, match=r"not have an arm 'dpm'\. Did you mean 'dpn'"):
        make().retrain(copied, "dpm", **HERE)
    with pytest.raises(UserError, match="multiple of 3, or their number to 1, 2"):
        make().retrain(copied, **HERE, devices_per_trial=3, cluster=ClusterOptions("slurm", "local"))
    with pytest.raises(UserError, match=r"nothing is not a study yet: .*without --retrain"):
        make().retrain(tmp_path / "nothing", **HERE)
    shutil.rmtree(copied / "trials" / "dpn")
    with pytest.raises(UserError, match="not finished"):
        make().retrain(copied, **HERE)
    monkeypatch.setattr("vitmods.study.store.StudyFolder.check_same_study", lambda *_: None)
    for kind in ({"design": "factorial", "seeds": 2}, {"sweep": {"lr": (1e-4, 1e-3)}}):
        study = Study("mu/4", ["dpn", "rms", "layerscale"], "digits", RECIPE, **kind)
        with pytest.raises(UserError, match=r"run an ordinary study|name a run \(--retrain dpn\+rms\)"):
            study.retrain(copied, **HERE)
    assert not (copied / "retrained").exists()


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


def test_it_is_evaluated_on_other_images_and_not_on_its_own(retrained, monkeypatch):
    folder, read = retrained[1].folder, []
    for data in (None, "digits"):
        with pytest.raises(UserError, match="trained on all images of digits"):
            evaluate(folder, data=data, device="cpu")
    assert Checkpoint.open(str(folder)).settings["train_on_all"] is True

    def load_digits(settings, *options):
        read.append(settings)
        return load_images({**settings, "data": "digits"}, *options)

    monkeypatch.setattr("vitmods.study.evaluate.load_images", load_digits)
    assert evaluate(folder, data="elsewhere", device="cpu")[0]["split"] == "test"
    assert "train_on_all" not in read[0]


@pytest.fixture(scope="module")
def labeled(tmp_path_factory):
    root, rng, rows = tmp_path_factory.mktemp("labels"), np.random.default_rng(0), ["file,labels"]
    for i in range(40):
        Image.fromarray(rng.integers(0, 255, (8, 8), dtype=np.uint8)).save(root / f"{i}.png")
        rows.append(f"{i}.png,{';'.join(name for bit, name in enumerate('abc') if i >> bit & 1)}")
    (root / "labels.csv").write_text("\n".join(rows))
    return root / "labels.csv"


ONE = RECIPE.with_(epochs=1)
LABELS = {"task": "multilabel", "img_size": 8, "in_chans": 1, "limit_train": None}
FOREIGN = {"base": "timm:test_vit", "arms": ["replace(rms)"], "img_size": 32, "in_chans": 3, "limit_val": 20}
KINDS = {  # a study, and the arm that is retrained
    "tuned": ({"tune": {"lr": (1e-5, 3e-3)}}, "base"),
    "of trained weights": ({"base": None, "start": "ended"}, "dpn"),
    "of another library": (FOREIGN, "replace(rms)"),
    "of several labels": ({"data": "labeled", "recipe": ONE.with_(batch_size=8, loss="sigmoid"), **LABELS}, "dpn"),
    "of folds": ({"seeds": 2, "folds": 2}, "base"),
}


@pytest.mark.filterwarnings("error:The images are no longer")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_study_can_be_retrained(kind, ended, labeled, tmp_path):
    options, arm = KINDS[kind]
    places = {"start": ended / "trials/base/seed0", "data": labeled}
    study = make(**{"recipe": ONE, **options, **{name: places[name] for name in places if name in options}})
    answer = run(study, tmp_path)
    retraining = study.retrain(tmp_path, arm, **HERE)
    assert retraining.finished
    counts = json.loads((tmp_path / "study.json").read_text())["data"]["splits"]
    config = json.loads((retraining.folder / "config.json").read_text())
    assert config["data"]["splits"]["train"]["count"] == sum(split["count"] for split in counts.values())
    if kind == "tuned":
        assert config["recipe"]["optimizer"]["lr"] == answer.chosen["base"]["lr"]
    if kind == "of trained weights":
        assert config["start"]["source"] == str(ended / "trials/base/seed0")
    if kind == "of another library":
        assert Checkpoint.open(str(retraining.folder)).classes == tuple(map(str, range(10)))


def test_the_joined_split_has_every_image_once():
    parts = load("digits", img_size=8, in_chans=1, augment=Augment()).splits
    joined = load("digits", img_size=8, in_chans=1, augment=Augment(), train_on_all=True)
    assert list(joined.splits) == ["train"]
    labels = {name: label for split in parts.values() for name, label in zip(split.ids, split.labels)}
    assert dict(zip(joined.train.ids, joined.train.labels)) == labels
    assert len(joined.train) == len(labels)
    assert not [text for text in joined.summary()["warnings"] if "split" in text]


def test_changed_images_are_warned_of_and_the_same_are_recognized_in_any_split(copied, monkeypatch):
    for changed, known in (({"train_on_all": True}, True), ({"limit_train": 100}, False)):
        images = load_images({**make().settings.fixed, **changed}, RECIPE)
        assert StudyFolder(copied).images.same_contents(images.splits) is known
    monkeypatch.setattr("vitmods.study.store.StudyImages.same_contents", lambda *_: False)
    with pytest.warns(UserWarning, match="no longer those of the study"):
        make().retrain(copied, **HERE)


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


@pytest.mark.parametrize(("task", "modules", "uses"), [
    ("classification", False, ["export", "predict", "evaluate"]),
    ("multilabel", False, ["export", "predict", "evaluate"]),
    ("segmentation", True, ["predict"]),
    ("dino", True, ["finetune"]),
    ("sequence_classification", False, ["predict"]),
])  # fmt: skip
def test_what_a_model_is_used_for_follows_from_its_task(tmp_path, task, modules, uses):
    trial, model = tmp_path / "a trial", tmp_path / "my model"
    trial.mkdir()
    (trial / "config.json").write_text(json.dumps({"task": task}))
    if modules:
        (trial / MODULES).touch()
    for folder, commands in ((trial, uses_of(trial)), (model, uses_of(trial, model))):
        assert list(commands) == uses
        for use, line in commands.items():
            words = shlex.split(line)
            assert words[:2] == ["vitmods", use]
            assert str(folder) in words, "quoted"
    assert export_line(trial) == uses_of(trial)[uses[0]]


def test_the_shell(copied, capsys):
    line = "vitmods compare --arms dpn 'x=dpn+rms' --budget 2h --retrain=best"
    assert retrain_command(line, "x") == "vitmods compare --arms dpn x=dpn+rms --retrain x"
    assert retrain_command("vm.Study('mu/4').run('a')", "x") == "vm.Study('mu/4').retrain('a', arm='x')"
    words = "compare --base mu2/4 --arms dpn --seeds 1 --recipe plain --epochs 2 --quiet --batch-size 64 --device cpu"
    command = [*words.split(), "--limit-train", "128", "--out", str(copied), "--retrain", "best"]
    assert main(command) == 0
    assert "base is trained on val, test and the training images that limit_train=128 leaves" in capsys.readouterr().out
    assert "retrained/base" in (copied / "report.html").read_text()
    for more in (["--dry-run"], ["--pilot"], ["--budget", "2h"]):
        assert main([*command, *more]) == 2
        error = re.sub("[\u2500-\u257f]| - ", " ", capsys.readouterr().err)
        assert "drop --dry-run" in " ".join(error.split())
