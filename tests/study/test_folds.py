"""Seeds of a study that are tested on other parts of the images."""

import csv
import json
import re
import shutil
from dataclasses import replace

import pytest

from vitmods.data.splits import SPLIT_FILE
from vitmods.recipes import plain
from vitmods.report.advice import next_steps
from vitmods.report.text import common_claim, on_new_images
from vitmods.stats.decide import decide
from vitmods.study import Answer, Study
from vitmods.study.cells import Trial
from vitmods.study.checkpoints import Checkpoint
from vitmods.study.settings import Settings
from vitmods.study.store import StudyFolder
from vitmods.study.trial import TrialRunner, load_images
from vitmods.train import RunOptions
from vitmods.util.errors import UserError

pytestmark = pytest.mark.usefixtures("short_clocks")

RECIPE = plain(epochs=1).with_(batch_size=128)
FOLDS = 3


def make(seeds=4, **options):
    return Study("mu/4", ["dpn", "rms"], "digits", RECIPE, seeds, **{"folds": FOLDS, **options})


def run(study, out, **options):
    return study.run(out, **{"workers": 1, "device": "cpu", "cost_seconds": 0, "progress": False, **options})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("folds") / "out"
    return run(make(), out), out


def config(out, arm, seed):
    return json.loads((out / "trials" / arm / f"seed{seed}" / "config.json").read_text())


def images_of(out, arm, seed):
    opened = Checkpoint.open(str(out / "trials" / arm / f"seed{seed}"))
    dataset = load_images(opened.settings, opened.recipe)
    assert dataset.summary()["fingerprint"] == opened.fingerprint
    return dataset.splits


def test_each_image_is_tested_by_one_fold_and_arms_are_paired(finished):
    _, out = finished
    tested = {seed: set(images_of(out, "base", seed)["test"].ids) for seed in range(4)}
    everything = [name for split in images_of(out, "base", 0).values() for name in split.ids]
    assert sorted([*tested[0], *tested[1], *tested[2]]) == sorted(everything)
    assert tested[3] == tested[0]
    rows = list(csv.DictReader((out / SPLIT_FILE).open()))
    for seed in range(4):
        fingerprints = {config(out, arm, seed)["data"]["fingerprint"] for arm in ("base", "dpn", "rms")}
        assert len(fingerprints) == 1
        assert config(out, "rms", seed)["images"]["fold"] == [seed % FOLDS, FOLDS]
        assert tested[seed] == {row["image"] for row in rows if row["fold"] == str(seed % FOLDS)}


def test_the_answer_is_about_other_training_sets(finished):
    answer, out = finished
    counts = answer.data["splits"]
    sizes = counts["test"]["count"], counts["train"]["count"]
    scores = {arm.name: dict(arm.scores) for arm in answer.every_arm}
    constant = {arm.name: {trial.seed for trial in arm.trials if trial.constant} for arm in answer.every_arm}
    expected = decide(scores, resampled=sizes, constant=constant, chance=answer.data["constant"]["top1"])
    assert answer.splits == ("test",)
    assert answer.decision.overlap == sizes[0] / sizes[1]
    for arm in ("dpn", "rms"):
        assert [answer[arm].low, answer[arm].high] == pytest.approx([expected[arm].low, expected[arm].high])
        assert answer[arm].n == 4
    assert on_new_images(answer)
    assert "new trainings, other training sets and other images too" in common_claim(answer)
    assert Answer.load(out).to_dict() == answer.to_dict()
    assert "fold s mod 3" in answer.report().read_text()
    assert not any("until-decided" in step.command for step in next_steps(answer))


def test_worker_processes_use_the_same_folds(finished, tmp_path):
    """As such a process does: the study from its folder, a trial from its name."""
    _, out = finished
    copy = shutil.copytree(out, tmp_path / "out")
    before = (copy / "trials/base/seed1/model.safetensors").read_bytes()
    shutil.rmtree(copy / "trials/base/seed1")
    folder = StudyFolder(copy)
    settings = Settings.from_dict(folder.known_facts().settings)
    runner = TrialRunner(folder, settings.measure, RunOptions("cpu"))
    runner(settings.trial(Trial(settings.cell("base"), 1).to_dict()))
    assert (copy / "trials/base/seed1/model.safetensors").read_bytes() == before
    assert config(copy, "base", 1)["images"]["fold"] == [1, FOLDS]


def test_the_dry_run_counts_the_overlap(finished, tmp_path):
    _, out = finished
    estimate = make().dry_run(out, device="cpu")
    assert estimate.spread is not None
    plain = replace(estimate, settings=Study("mu/4", ["dpn", "rms"], "digits", RECIPE, 4).settings)

    def detectable(planned):
        return float(re.search(r"effects above about ([\d.]+)", planned.decides())[1])

    overlap = estimate.dataset["test"] / estimate.dataset["train"]
    assert detectable(estimate) / detectable(plain) == pytest.approx((1 + 4 * overlap) ** 0.5, rel=0.1)
    assert "on other images, at worst" not in str(estimate)


def test_as_many_seeds_as_folds():
    assert len(make(seeds=None, folds=8).settings.seeds) == 8
    assert len(make(seeds=None).settings.seeds) == 5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"folds": 1}, "at least 2"),
        ({"until_decided": True, "seeds": 8}, "set --seeds, not --until-decided"),
        ({"sweep": {"limit_train": [100, 200]}}, "does not support --sweep: drop"),
        ({"design": "factorial", "seeds": 3}, "does not support --design factorial: drop"),
        ({"tune": {"lr": (1e-4, 1e-3)}}, "nothing can be tuned"),
        ({"generalize": "seeds"}, "leave --generalize seeds out"),
        ({"fold": (0, 3)}, "leave --fold out"),
    ],
)
def test_what_does_not_go_together_is_refused(options, says):
    with pytest.raises(UserError, match=says):
        make(**options)


def test_other_folds_and_images_with_splits_of_their_own_are_refused(finished, tmp_path, draw_images):
    with pytest.raises(UserError, match=r"folds: 3 -> 4"):
        run(make(folds=4), finished[1])
    images = draw_images(tmp_path / "set", ("train", "test"), count=8, size=(8, 8))
    study = Study("mu/4", ["dpn"], images, RECIPE, folds=2, img_size=8, in_chans=1)
    with pytest.raises(UserError, match="these images have given splits"):
        run(study, tmp_path / "out")
    assert not (tmp_path / "out" / "study.json").exists()


def test_a_pilot_reads_the_spread_of_parts_of_different_sizes(tmp_path):
    recipe = plain().with_(steps=20, lr=0.01, batch_size=64, warmup_epochs=None)
    study = Study("mu1/4", ["dpn"], "digits", recipe, 2, folds=2, limit_train=0.2)  # parts of 898 and 899 images
    planned = study.pilot(tmp_path / "out", workers=1, device="cpu", cost_seconds=0, progress=False)
    assert planned.spread.source == "from 2 trials of base"
    assert planned.finished == 2
