"""Small studies on the digits in this process, and what happens to their folders."""

import csv
import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

from vitmods.changes import DualPatchNorm
from vitmods.data import ImageDataset
from vitmods.evals.options import Options
from vitmods.model.config import ViTConfig
from vitmods.recipes import plain
from vitmods.stats.sequential import INTERIM_LEVEL
from vitmods.study import Answer, Study
from vitmods.study.arms import Arm, arm_from_text
from vitmods.study.executors import StudyOptions
from vitmods.study.prepare import PreparedStudy, parallel_trials, threads_for, workers_for
from vitmods.study.run import make_executor
from vitmods.study.settings import Measure
from vitmods.study.store import StudyFolder
from vitmods.study.trial import TrialRunner, base_config, build_model
from vitmods.util.errors import UserError
from vitmods.util.text import no_formula

pytestmark = pytest.mark.usefixtures("short_clocks")

RECIPE = plain(epochs=1).with_(batch_size=128)


def make(arms=("dpn", "x=placement(attn=post,mlp=post)"), seeds=2, **options):
    options = {"recipe": RECIPE, "limit_train": 256, **options}
    return Study("mu/4", list(arms), **{"data": "digits", "seeds": seeds, **options})


def run(study, out, **options):
    return study.run(out, **{"workers": 1, "device": "cpu", "cost_seconds": 0, "progress": False, **options})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "out"
    return run(make(), out, cost_seconds=0.1), out


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished[1], tmp_path / "copy")


def contents(out):
    return {path: path.read_bytes() for path in sorted(Path(out).rglob("*")) if path.is_file() and path.name != ".lock"}


def test_the_answer_is_complete(finished):
    result, out = finished
    assert result.complete
    assert not result.failed
    record = json.loads((out / "results.json").read_text())
    assert record == result.to_dict() == Answer.load(out).to_dict()
    assert [arm["name"] for arm in record["arms"]] == ["dpn", "x"]
    assert set(record["base"]["scores"]) == {"0", "1"}
    assert all(0 <= value <= 1 for arm in record["arms"] for value in arm["scores"].values())
    assert record["arms"][0]["model"]["changes"][0]["title"] == "Dual PatchNorm"
    assert record["arms"][0]["cost"]["params"] > 1
    assert record["settings"]["images"] == record["data"]["fingerprint"]
    assert (out / "samples.npz").exists()


def test_effects_are_paired_differences_in_points(finished):
    result, _ = finished
    record = result.to_dict()
    base, dpn = record["base"]["scores"], record["arms"][0]["scores"]
    assert result["dpn"].effect == pytest.approx(100 * sum(dpn[s] - base[s] for s in base) / 2)
    assert result["dpn"].n == 2
    assert "dpn" in repr(result)
    assert "verdict" in repr(result)
    with pytest.raises(UserError, match="Did you mean 'dpn'"):
        result["dpm"]
    assert "nll" in result.other_metrics
    assert set(result.base.other_metrics["nll"]) == set(result.base.scores)
    assert "Negative log-likelihood: mean difference, without a verdict" in result.report().read_text()


CORRUPTION_ERROR = Measure("mean_corruption_error", Options(corruptions=("fog",), severities=(1, 2)))


@pytest.mark.parametrize(
    "options",
    [
        {"seeds": [3, 1], "margin": 1.0, "limit_train": 99},
        {"base": ViTConfig.from_name("mu/4").with_(pool="avg")},
        {"folds": 3},
        {"tune": {"lr": (1e-3, 1e-2)}, "tuning_seeds": 2, "metric": "ece"},
        {"metric": CORRUPTION_ERROR},
    ],
)
def test_the_call_in_the_report_is_the_same_study(options, settings_of_call):
    arms = [Arm("slow", (DualPatchNorm(before=False),), {"crop": "pad"}), "dpn+rms"]
    study = Study(**{"base": "mu/4", "arms": arms, "data": "digits", "recipe": RECIPE, "seeds": 3, **options})
    assert settings_of_call(study).to_dict() == study.settings.to_dict()


def test_the_csv_has_a_row_a_trial(finished):
    result, out = finished
    rows = list(csv.DictReader((out / "results.csv").open()))
    assert [(row["arm"], row["seed"]) for row in rows][:3] == [("base", "0"), ("base", "1"), ("dpn", "0")]
    assert len(rows) == 6
    dpn = [row for row in rows if row["arm"] == "dpn"]
    assert float(dpn[0]["top1"]) == result.to_dict()["arms"][0]["scores"]["0"]
    assert sum(float(row["difference_points"]) for row in dpn) / 2 == pytest.approx(result["dpn"].effect)


def test_running_it_again_changes_no_file(finished):
    _, out = finished
    before = contents(out)
    run(make(), out)
    after = contents(out)
    assert set(before) == set(after)
    assert [str(path) for path in before if before[path] != after[path]] == []


def test_an_arm_of_recipe_overrides_goes_on(tmp_path):
    arm = Arm("cropped", (), {"crop": "random_resized", "crop_scale": (0.5, 1.0), "randaugment": (2, 9)})
    first = run(make([arm], seeds=1), tmp_path)
    assert run(make([arm], seeds=1), tmp_path).to_dict() == first.to_dict()


def test_a_changed_setting_is_refused_and_shown(copied):
    facts = json.loads((copied / "study.json").read_text())
    before = contents(copied)
    with pytest.raises(UserError, match=r"limit_train: 256 -> 200; .*recipe\.optimizer\.lr: 0\.001 -> 0\.5"):
        run(make(recipe=RECIPE.with_(lr=0.5), limit_train=200), copied)
    with pytest.raises(UserError, match=r"arm x: .* -> \(missing\)"):
        run(make(["dpn"]), copied)
    assert contents(copied) == before
    facts["settings"]["images"] = "another"
    (copied / "study.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match="images: another -> "):
        run(make(), copied)


def test_trials_of_different_machines_are_reported(finished, copied):
    config = copied / "trials" / "dpn" / "seed0" / "config.json"
    record = json.loads(config.read_text())
    record["environment"]["torch"] = "1.0"
    config.write_text(json.dumps(record))
    (notice,) = finished[0].to_dict()["warnings"]
    assert "x also brings the loss of the final norm" in notice
    answer = Answer.load(copied)
    assert len(answer.warnings) == 2
    assert "torch 1.0" in answer.doubts[0]
    assert "more warning" in " ".join(
        repr(answer).split()
    )  # the first is that base has not learned; the report has all
    assert "The trials were not all run alike" in answer.report().read_text()


def test_a_warning_of_a_trial_reaches_the_results(tmp_path, monkeypatch):
    from vitmods.train import loop

    monkeypatch.setattr(loop, "without_gradient", lambda model: ["head.bias"])
    result = run(make(["dpn"], seeds=1), tmp_path)
    assert any(w.startswith("dpn, seed 0: ") and "head.bias" in w for w in result.to_dict()["warnings"])


def test_arms_and_seeds_may_be_added(tmp_path):
    out = tmp_path / "out"
    run(make(["dpn"], seeds=1), out)
    before = {path: data for path, data in contents(out).items() if "trials" in path.parts}
    created = json.loads((out / "study.json").read_text())["created"]
    grown = run(make(["dpn", "rms"], seeds=2), out, cost_seconds=0.1)
    assert grown.complete
    assert set(grown.to_dict()["base"]["scores"]) == {"0", "1"}
    assert grown.to_dict()["arms"][1]["cost"] is not None
    assert grown.to_dict()["created"] == created
    after = contents(out)
    assert all(after[path] == data for path, data in before.items())


def test_a_trial_that_fails_is_reported_and_tried_again(copied, monkeypatch):
    shutil.rmtree(copied / "trials/dpn/seed1")
    (copied / "trials/dpn/seed0/result.json").write_text("{")
    with monkeypatch.context() as patched:
        patched.setattr(TrialRunner, "train", Mock(side_effect=RuntimeError("out of luck")))
        result = run(make(), copied)
    assert not result.complete
    assert result["x"].n == 2
    damaged, failed = result.failed
    assert failed == "dpn, seed 1: RuntimeError: out of luck"
    assert "damaged" in damaged
    assert any("out of luck" in warning for warning in result.to_dict()["warnings"])
    assert Answer.load(copied).failed == result.failed
    shutil.rmtree(copied / "trials/dpn/seed0")
    again = run(make(), copied)
    assert again.complete
    assert not again.failed


def test_a_diverged_trial_is_an_outcome_that_no_mean_hides(tmp_path):
    wild = Arm("wild", arm_from_text("dpn").changes, {"lr": 1e30, "clip_norm": None, "epochs": 3})
    result = run(make([wild], seeds=1), tmp_path)
    assert result.complete
    assert result["wild"].failures == 1
    assert result["wild"].verdict == "open"
    assert result.to_dict()["arms"][0]["scores"] == {"0": None}
    assert any("diverged" in warning for warning in result.to_dict()["warnings"])


def test_an_arm_that_cannot_be_is_refused_before_anything_is_trained(tmp_path):
    study = Study("mu/4", ["bad=dpn+dpn(before=false)"], "digits", RECIPE)
    with pytest.raises(UserError, match=r"Arm bad: .*stem norm after"):
        run(study, tmp_path)
    assert not (tmp_path / "trials").exists()


def test_arms_share_base_s_initial_weights_and_images(tmp_path):
    settings = make(["dpn", "x=placement(attn=post,mlp=post)", "n=normformer"]).settings
    config = base_config(settings.cells[0], num_classes=10)
    for seed in (0, 1):
        base = build_model(config, Arm("base"), seed).state_dict()
        for arm in settings.arms:
            changed = build_model(config, arm, seed).state_dict()
            shared = [name for name in base if name in changed and base[name].shape == changed[name].shape]
            assert {name for name in base if "norm" not in name} <= set(shared)
            assert all(torch.equal(base[name], changed[name]) for name in shared)
            again = build_model(config, arm, seed).state_dict()
            assert all(torch.equal(changed[name], again[name]) for name in changed)
    assert not torch.equal(base["head.weight"], build_model(config, Arm("base"), 0).state_dict()["head.weight"])


def test_every_arm_of_a_seed_sees_the_same_batches(tmp_path, monkeypatch):
    seen, current = {}, [None]
    train_batches, train = ImageDataset.train_batches, TrialRunner.train

    def record_batches(dataset, **options):
        for batch in train_batches(dataset, **options):
            seen.setdefault(current[0], []).append(batch.inputs.double().sum().item())
            yield batch

    def record_trial(runner, trial, out, **options):
        current[0] = (trial.arm.name, trial.seed)
        return train(runner, trial, out, **options)

    monkeypatch.setattr(ImageDataset, "train_batches", record_batches)
    monkeypatch.setattr(TrialRunner, "train", record_trial)
    run(make(["dpn"], recipe=RECIPE.with_(crop="pad", flip=0.5)), tmp_path)
    assert seen["base", 0] == seen["dpn", 0] != seen["base", 1] == seen["dpn", 1]


def test_a_dry_run_estimates_and_writes_nothing(tmp_path):
    out = tmp_path / "out"
    estimate = make().dry_run(out, workers=2, device="cpu")
    assert not out.exists()
    assert [(arm.arm, arm.trials) for arm in estimate.arms] == [("base", 2), ("dpn", 2), ("x", 2)]
    assert estimate.steps == {"": 2}
    assert 0 < estimate.total_s < 60
    assert "6 trials to run, 2 at a time" in str(estimate)
    assert max(map(len, str(estimate).splitlines())) <= 100
    heading, base = (next(line for line in str(estimate).splitlines() if word in line) for word in ("arm ", "base "))
    assert heading.index("arm") == base.index("base"), "the heading stands above its column"
    assert estimate.weights_bytes() == sum(4 * arm.params * 2 for arm in estimate.arms)
    assert estimate.weights_bytes("best") == sum(4 * arm.params for arm in estimate.arms)
    assert estimate.working_bytes == 2 * 36 * max(arm.params for arm in estimate.arms)  # two at a time
    assert "Final weights that stay in the folder (all) take" in str(estimate)


def test_workers_by_default_fit_cores_memory_and_trials(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    options, size = StudyOptions(device="cpu"), 600 * 2**20
    assert workers_for(options, 100, size) == 4
    assert workers_for(options, 3, size) == 3
    assert threads_for(options, size) == 1
    assert threads_for(StudyOptions(device="cpu", workers=2), size) == 2
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 3 * 2**18, "SC_PAGE_SIZE": 2**12}.get)
    assert workers_for(options, 100, size) == 2
    assert threads_for(options, size) == 2
    assert workers_for(StudyOptions(workers=7), 100, size) == 7
    with pytest.raises(UserError, match="at least 1"):
        StudyOptions(workers=0)


def test_a_named_gpu_is_not_shared_out_to_several_workers(tmp_path, monkeypatch):
    monkeypatch.setattr("vitmods.study.prepare.visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr("vitmods.study.executors.processes.visible_gpus", lambda: ["0", "1"])
    settings = make().settings

    def second_worker(options):
        runner = TrialRunner(StudyFolder(tmp_path), settings.measure, options)
        study = PreparedStudy(settings, runner, Mock(), options, {}, (), 1, {}, {})
        executor = make_executor(runner, settings, options, workers=2, threads=study.threads)
        return executor.task(1)["options"]["device"], executor.environment(1).get("CUDA_VISIBLE_DEVICES")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (2, 2))
    assert workers_for(StudyOptions(device="cuda"), 9, 1) == 2
    assert second_worker(StudyOptions(device="cuda")) == ("cuda", "1")
    assert workers_for(StudyOptions(device="cuda:1"), 9, 1) == 1
    assert second_worker(StudyOptions(device="cuda:1")) == ("cuda:1", None)


@pytest.mark.parametrize(("free", "workers"), [(80, 8), (30, 6), (9, 2)])
def test_small_trials_share_a_gpu_as_far_as_its_memory_goes(monkeypatch, free, workers):
    """Half of the free memory of the GPU that has least, and at most four."""
    monkeypatch.setattr("vitmods.study.prepare.visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: ((99, free)[gpu] * 2**30, 0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    options = StudyOptions(device="cuda")
    assert (workers_for(options, 100, 5 * 2**30), parallel_trials(options)) == (workers, 2)
    assert workers_for(options, 3, 5 * 2**30) == min(3, workers)


def test_a_trial_s_evaluation_can_be_repeated(finished, tmp_path):
    from vitmods.study.evaluate import evaluate

    _, out = finished
    trial = out / "trials" / "dpn" / "seed1"
    (evaluation,) = evaluate(trial, device="cpu")
    assert evaluation["split"] == "test"
    assert evaluation["metrics"]["top1"] == json.loads((trial / "result.json").read_text())["metrics"]["top1"]
    assert evaluate(trial, split="train", device="cpu")[0]["images"] == 256
    with pytest.raises(UserError, match="does not hold a finished trial"):
        evaluate(out)
    config = json.loads((trial / "config.json").read_text())
    shutil.copytree(trial, tmp_path / "other")
    config["data"]["classes"][3:5] = ["4", "3"]
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="knows the class '4', digits has '3'"):
        evaluate(tmp_path / "other", device="cpu")


def test_defaults_follow_the_size_of_the_images(tmp_path):
    from vitmods.study.defaults import defaults_for

    assert defaults_for("digits").img_size == 8
    for side, base, size in ((28, "Ti/4", 32), (64, "Ti/8", 64), (100, "Ti/8", 96), (500, "Ti/16", 224)):
        for name in ("a", "b"):
            folder = tmp_path / str(side) / name
            folder.mkdir(parents=True)
            Image.new("RGB", (side + 20, side)).save(folder / "0.png")
            (folder / "broken.jpg").write_text("no image")
        defaults = defaults_for(str(tmp_path / str(side)))
        assert (defaults.base, defaults.img_size, defaults.side) == (base, size, side)
    with pytest.raises(UserError):
        defaults_for(str(tmp_path / "nowhere"))


def test_no_cell_of_the_csv_is_a_formula():
    assert [no_formula(cell) for cell in ("=1+1", "+dpn", "-x", "@x")] == ["'=1+1", "'+dpn", "'-x", "'@x"]
    plain = ["dpn+rms", "-0.5", "", 3, -1.5, None]
    assert [no_formula(cell) for cell in plain] == plain


def test_another_margin_metric_or_claim_after_the_scores_were_seen_is_said(finished, copied):
    assert finished[0].doubts == ()
    later = run(make(margin=5.0), copied)
    assert later.margin == 5
    (doubt,) = later.doubts
    assert "The margin was changed after the scores were seen: it is 5 and was 0.5." in doubt
    assert doubt in Answer.load(copied).to_dict()["warnings"]
    assert "margin was changed" in later.report().read_text()
    assert run(make(), copied).doubts == ()
    other = " ".join(run(make(metric="nll", generalize="seeds"), copied).doubts)
    assert "metric was changed after" in other
    assert "about was changed after" in other
    assert "margin was changed" not in other
    assert not run(make(), copied).doubts[1:]


def test_a_margin_may_change_before_any_score_is_seen(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(TrialRunner, "train", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(make(["dpn"], seeds=1, margin=1.0), tmp_path)
    assert run(make(["dpn"], seeds=1, margin=5.0), tmp_path).doubts == ()


def test_the_report_of_a_study_that_cannot_be_written_to(finished, tmp_path, monkeypatch):
    from vitmods.util import files

    real = files.write_atomically

    def read_only(path, write, *options):
        if Path(path).parent == finished[1]:
            raise UserError(f"Cannot write {path}: the disk is read-only.")
        return real(path, write, *options)

    monkeypatch.setattr("vitmods.util.files.write_atomically", read_only)
    monkeypatch.setattr("vitmods.study.answer.write_atomically", read_only)
    answer = Answer.load(finished[1])
    with pytest.warns(UserWarning, match="read-only"):
        page = answer.report(tmp_path / "elsewhere" / "report.html")
    assert "dpn" in page.read_text()
    with pytest.raises(UserError, match="read-only"):
        answer.report()


@pytest.mark.parametrize(("splits", "fraction"), [(("train", "val"), "val"), (("train", "test"), "test")])
def test_a_fraction_that_cannot_apply_is_refused(splits, fraction, tmp_path, draw_images):
    images = draw_images(tmp_path / "images", splits)
    study = make(["dpn"], data=images, limit_train=None, img_size=8, **{f"{fraction}_fraction": 0.0})
    with pytest.raises(UserError, match=f"{fraction}_fraction=0 cannot apply.*Leave --{fraction}-fraction out"):
        run(study, tmp_path / "out")


def test_changed_images_are_counted(tmp_path, draw_images):
    images = draw_images(tmp_path / "images", ("train", "test"), count=4)
    few = RECIPE.with_(batch_size=2)
    study = make(["dpn"], seeds=1, data=images, limit_train=None, img_size=8, recipe=few)
    run(study, tmp_path / "out")
    for name in ("cat/9", "dog/0"):
        Image.new("RGB", (8, 8), (7, 7, len(name) + ord(name[-1]))).save(images / f"train/{name}.png")
    (images / "test/dog/1.png").unlink()
    with pytest.raises(UserError, match="is of other images: since it began 1 added, 1 removed, 1 changed"):
        run(study, tmp_path / "out")


def test_seeds_that_are_added_after_the_scores_were_seen_are_one_more_look(copied):
    grown = run(make(seeds=4), copied)
    assert grown.complete
    assert grown.decision.alpha == INTERIM_LEVEL / 4
    assert any("Trials of these arms were shown before" in doubt for doubt in grown.doubts)


def test_arms_that_are_added_later_are_warned_of_unless_they_were_planned(tmp_path):
    with pytest.raises(UserError, match="family counts all arms of the study, 2 or more"):
        make(["dpn", "rms"], family=1)
    for family, planned in ((None, 1), (3, 3)):
        out = tmp_path / str(family)
        few = {"limit_train": 128, "limit_val": 20}
        assert run(make(["dpn"], family=family, **few), out).decision.family == planned
        grown = run(make(["dpn", "rms"], **few), out)
        assert grown.decision.family == max(planned, 2)
        added = "Arms were added after scores were seen: 1 arm was" in " ".join(grown.doubts)
        assert added is (family is None)


def test_a_reference_has_the_intervals_of_all_pairs(finished):
    result, out = finished
    other = Answer.load(out, reference=result.arms[0].name)
    count = len(other.every_arm)
    assert other.decision.of_pairs
    assert other.decision.family == count * (count - 1) // 2
    assert "over all pairs of arms" in str(other)
