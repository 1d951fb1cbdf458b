"""Small studies on the digits in this process: their answers, weights and logs, and what happens to their folders."""

import csv
import json
import shutil
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

import vitmods as vm
from vitmods.adapters import open_checkpoint
from vitmods.changes import DualPatchNorm
from vitmods.data import ImageDataset
from vitmods.data.splits import SplitOptions
from vitmods.evals.options import Options
from vitmods.layers.drop import DropPath
from vitmods.model.config import ViTConfig
from vitmods.recipes import plain
from vitmods.stats.sequential import INTERIM_LEVEL
from vitmods.study import Answer, Study
from vitmods.study.arms import Arm, arm_from_text
from vitmods.study.cells import Trial
from vitmods.study.checkpoints import Start, open_trial
from vitmods.study.defaults import defaults_for
from vitmods.study.evaluate import evaluate
from vitmods.study.executors import StudyOptions
from vitmods.study.prepare import PreparedStudy, parallel_trials, threads_for, workers_for
from vitmods.study.run import NOTED, make_executor
from vitmods.study.settings import Measure, Settings
from vitmods.study.store import StudyFolder
from vitmods.study.trial import TrialRunner, base_config, build_model
from vitmods.train import RunOptions, checkpoint, loop
from vitmods.train.loggers import LOGGERS, LoggerKind
from vitmods.util import files
from vitmods.util.errors import UserError
from vitmods.util.text import no_formula

pytestmark = pytest.mark.usefixtures("short_clocks")

RECIPE = plain().with_(batch_size=100, steps=5, warmup_steps=2, lr_batch=200, dropout=0.1, init="big_vision", flip=0.5)
RECIPE = RECIPE.with_(drop_path=0.3, drop_path_shape="constant", head_bias=-2.0, crop="pad")
QUICK = plain(epochs=1).with_(batch_size=64)
CROPPED = Arm("cropped", (), {"crop": "random_resized", "crop_scale": (0.5, 1.0), "randaugment": (2, 9)})
ARMS = ("dpn", "x=placement(attn=post,mlp=post)", CROPPED)


def make(arms=ARMS, seeds=2, **options):
    options = {"recipe": RECIPE, "limit_train": 250, "data": "digits", "seeds": seeds, **options}
    return Study(None if "start" in options else "mu2/4", list(arms), **options)


def run(study, out, **options):
    return study.run(out, **{"workers": 1, "device": "cpu", "cost_seconds": 0, "progress": False, **options})


@contextmanager
def notebook():
    """A logger, and what it gets by the name of a run."""
    told = {}

    class Notebook:
        def __init__(self, run):
            self.rows = told.setdefault(run.name, [run])

        def write(self, scalars, step):
            self.rows.append((step, scalars))

        def close(self, status, scalars):
            self.rows.append((status, scalars))

    LOGGERS.add("notebook", LoggerKind(Notebook))
    try:
        yield told
    finally:
        LOGGERS.remove("notebook")


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    """A study, its folder, and the images of each batch by trial."""
    out, seen, current = tmp_path_factory.mktemp("study") / "pets", {}, [None]
    train_batches, train = ImageDataset.train_batches, TrialRunner.train

    def record_batches(dataset, **options):
        for batch in train_batches(dataset, **options):
            seen.setdefault(current[0], []).append(batch.inputs.double().sum().item())
            yield batch

    def record_trial(runner, trial, out, **options):
        current[0] = (trial.arm.name, trial.seed)
        return train(runner, trial, out, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ImageDataset, "train_batches", record_batches)
        patched.setattr(TrialRunner, "train", record_trial)
        answer = run(make(), out, cost_seconds=0.1)
    return SimpleNamespace(answer=answer, out=out, seen=seen)


@pytest.fixture
def finished(studied):
    return studied.answer, studied.out


@pytest.fixture
def copied(studied, tmp_path):
    return shutil.copytree(studied.out, tmp_path / "pets")


def contents(out):
    return {path: path.read_bytes() for path in sorted(Path(out).rglob("*")) if path.is_file() and path.name != ".lock"}


def test_the_answer_is_complete(finished):
    result, out = finished
    assert result.complete
    assert not result.failed
    record = json.loads((out / "results.json").read_text())
    assert record == result.to_dict() == Answer.load(out).to_dict()
    assert [arm["name"] for arm in record["arms"]] == ["dpn", "x", "cropped"]
    assert set(record["base"]["scores"]) == {"0", "1"}
    assert all(0 <= value <= 1 for arm in record["arms"] for value in arm["scores"].values())
    assert record["arms"][0]["model"]["changes"][0]["title"] == "Dual PatchNorm"
    assert record["arms"][0]["cost"]["params"] > 1
    assert record["settings"]["images"] == record["data"]["fingerprint"]
    assert (out / "samples.npz").exists()


def test_effects_are_paired_differences_in_points_also_in_the_csv(finished):
    result, out = finished
    record = result.to_dict()
    base, dpn = record["base"]["scores"], record["arms"][0]["scores"]
    assert result["dpn"].effect == pytest.approx(100 * sum(dpn[s] - base[s] for s in base) / 2)
    assert result["dpn"].n == 2
    assert "dpn" in repr(result)
    assert "verdict" in repr(result)
    with pytest.raises(UserError, match="Did you mean 'dpn'"):
        result["dpm"]
    assert set(result.base.other_metrics["nll"]) == set(result.base.scores)
    assert "Negative log-likelihood: mean difference, without a verdict" in result.report().read_text()
    rows = list(csv.DictReader((out / "results.csv").open()))
    assert [(row["arm"], row["seed"]) for row in rows][:3] == [("base", "0"), ("base", "1"), ("dpn", "0")]
    assert len(rows) == 8
    rows = [row for row in rows if row["arm"] == "dpn"]
    assert float(rows[0]["top1"]) == dpn["0"]
    assert sum(float(row["difference_points"]) for row in rows) / 2 == pytest.approx(result["dpn"].effect)


def test_every_arm_of_a_seed_sees_the_same_batches(studied):
    seen = studied.seen
    assert seen["base", 0] == seen["dpn", 0] != seen["base", 1] == seen["dpn", 1]


CORRUPTION_ERROR = Measure("mean_corruption_error", Options(corruptions=("fog",), severities=(1, 2)))


@pytest.mark.parametrize(
    "options",
    [
        {"seeds": [3, 1], "margin": 1.0, "limit_train": 99},
        {"base": ViTConfig.from_name("mu2/4").with_(pool="avg")},
        {"folds": 3},
        {"tune": {"lr": (1e-3, 1e-2)}, "tuning_seeds": 2, "metric": "ece"},
        {"metric": CORRUPTION_ERROR},
    ],
)
def test_the_call_in_the_report_is_the_same_study(options, settings_of_call):
    arms = [Arm("slow", (DualPatchNorm(before=False),), {"crop": "pad"}), "dpn+rms"]
    study = Study(**{"base": "mu2/4", "arms": arms, "data": "digits", "recipe": RECIPE, "seeds": 3, **options})
    assert settings_of_call(study).to_dict() == study.settings.to_dict()


def test_running_it_again_changes_no_file(finished):
    _, out = finished
    before = contents(out)
    run(make(), out)
    after = contents(out)
    assert set(before) == set(after)
    assert [str(path) for path in before if before[path] != after[path]] == []


def test_a_changed_setting_is_refused_and_shown(copied):
    facts = json.loads((copied / "study.json").read_text())
    before = contents(copied)
    with pytest.raises(UserError, match=r"limit_train: 250 -> 200; .*recipe\.optimizer\.lr: 0\.001 -> 0\.5"):
        run(make(recipe=RECIPE.with_(lr=0.5), limit_train=200), copied)
    with pytest.raises(UserError, match=r"arm x: .* -> \(missing\)"):
        run(make(["dpn", CROPPED]), copied)
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
    before, answer = finished[0].to_dict()["warnings"], Answer.load(copied)
    assert any("x also brings the loss of the final norm" in notice for notice in before)
    assert len(answer.warnings) == len(before) + 1
    assert "torch 1.0" in answer.doubts[0]
    assert "more warning" in " ".join(repr(answer).split())  # the report has all
    assert "The trials were not all run alike" in answer.report().read_text()


def test_a_warning_of_a_trial_reaches_the_results(copied, monkeypatch):
    monkeypatch.setattr(loop, "without_gradient", lambda model: ["head.bias"])
    shutil.rmtree(copied / "trials/dpn/seed0")
    result = run(make(), copied)
    assert any(w.startswith("dpn, seed 0: ") and "head.bias" in w for w in result.to_dict()["warnings"])


def test_arms_and_seeds_may_be_added_which_is_one_more_look(copied):
    before = {path: data for path, data in contents(copied).items() if "trials" in path.parts}
    created = json.loads((copied / "study.json").read_text())["created"]
    grown = run(make(seeds=4), copied)
    assert grown.decision.alpha == INTERIM_LEVEL / 4
    assert any("Trials of these arms were shown before" in doubt for doubt in grown.doubts)
    wider = run(make([*ARMS, "rms"], seeds=4), copied, cost_seconds=0.1)
    assert wider.complete
    assert set(wider.to_dict()["base"]["scores"]) == {"0", "1", "2", "3"}
    assert wider.to_dict()["arms"][3]["cost"] is not None
    assert wider.to_dict()["created"] == created
    assert wider.decision.family == 4
    after = contents(copied)
    assert all(after[path] == data for path, data in before.items())


def test_arms_that_are_added_later_are_warned_of_unless_they_were_planned(tmp_path):
    with pytest.raises(UserError, match="family counts all arms of the study, 2 or more"):
        make(["dpn", "rms"], family=1)
    for family, planned in ((None, 1), (3, 3)):
        out = tmp_path / str(family)
        few = {"limit_train": 128, "limit_val": 20, "recipe": QUICK}
        assert run(make(["dpn"], family=family, **few), out).decision.family == planned
        grown = run(make(["dpn", "rms"], **few), out)
        assert grown.decision.family == max(planned, 2)
        added = "Arms were added after scores were seen: 1 arm was" in " ".join(grown.doubts)
        assert added is (family is None)


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
    wild = Arm("wild", arm_from_text("dpn").changes, {"lr": 1e30, "clip_norm": None})
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


def test_arms_share_base_s_initial_weights_and_images():
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


def test_a_dry_run_estimates_and_writes_nothing(tmp_path):
    out = tmp_path / "out"
    estimate = make().dry_run(out, workers=2, device="cpu")
    assert not out.exists()
    assert [(arm.arm, arm.trials) for arm in estimate.arms] == [("base", 2), ("dpn", 2), ("x", 2), ("cropped", 2)]
    assert estimate.steps == {"": 5}
    assert 0 < estimate.total_s < 60
    assert "8 trials to run, 2 at a time" in str(estimate)
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
    _, out = finished
    trial = out / "trials" / "dpn" / "seed1"
    (evaluation,) = evaluate(trial, device="cpu")
    assert evaluation["split"] == "test"
    assert evaluation["metrics"]["top1"] == json.loads((trial / "result.json").read_text())["metrics"]["top1"]
    assert evaluate(trial, split="train", device="cpu")[0]["images"] == 250
    with pytest.raises(UserError, match="does not hold a finished trial"):
        evaluate(out)
    config = json.loads((trial / "config.json").read_text())
    shutil.copytree(trial, tmp_path / "other")
    config["data"]["classes"][3:5] = ["4", "3"]
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="knows the class '4', digits has '3'"):
        evaluate(tmp_path / "other", device="cpu")


def test_defaults_follow_the_size_of_the_images(tmp_path):
    split = SplitOptions()
    assert defaults_for("digits", split).img_size == 8
    for side, base, size in ((28, "Ti/4", 32), (64, "Ti/8", 64), (100, "Ti/8", 96), (500, "Ti/16", 224)):
        for name in ("a", "b"):
            folder = tmp_path / str(side) / name
            folder.mkdir(parents=True)
            Image.new("RGB", (side + 20, side)).save(folder / "0.png")
            (folder / "broken.jpg").write_text("no image")
        defaults = defaults_for(str(tmp_path / str(side)), split)
        assert (defaults.base, defaults.img_size, defaults.side) == (base, size, side)
    with pytest.raises(UserError):
        defaults_for(str(tmp_path / "nowhere"), split)


def test_no_cell_of_the_csv_is_a_formula():
    assert [no_formula(cell) for cell in ("=1+1", "+dpn", "-x", "@x")] == ["'=1+1", "'+dpn", "'-x", "'@x"]
    plain = ["dpn+rms", "-0.5", "", 3, -1.5, None]
    assert [no_formula(cell) for cell in plain] == plain


def test_another_margin_metric_or_claim_after_the_scores_were_seen_is_said(finished, copied):
    def changes(answer):
        return [doubt for doubt in answer.doubts if "changed after the scores were seen" in doubt]

    assert not changes(finished[0])
    later = run(make(margin=5.0), copied)
    assert later.margin == 5
    (doubt,) = changes(later)
    assert "The margin was changed after the scores were seen: it is 5 and was 0.5." in doubt
    assert doubt in Answer.load(copied).to_dict()["warnings"]
    assert "margin was changed" in later.report().read_text()
    assert not changes(run(make(), copied))
    other = " ".join(changes(run(make(metric="nll", generalize="seeds"), copied)))
    assert "metric was changed after" in other
    assert "about was changed after" in other
    assert "margin was changed" not in other
    assert not changes(run(make(), copied))[1:]


def test_a_margin_may_change_before_any_score_is_seen(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(TrialRunner, "train", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(make(["dpn"], seeds=1, margin=1.0, recipe=QUICK), tmp_path)
    assert run(make(["dpn"], seeds=1, margin=5.0, recipe=QUICK), tmp_path).doubts == ()


def test_the_report_of_a_study_that_cannot_be_written_to(finished, tmp_path, monkeypatch):
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
    with pytest.raises(UserError, match=f"{fraction}_fraction=0 cannot apply.*Leave --{fraction}-fraction out"):
        make(["dpn"], data=images, limit_train=None, img_size=8, **{f"{fraction}_fraction": 0.0})


def test_changed_images_are_counted(tmp_path, draw_images):
    images = draw_images(tmp_path / "images", ("train", "test"), count=4)
    few = QUICK.with_(batch_size=2)
    study = make(["dpn"], seeds=1, data=images, limit_train=None, img_size=8, recipe=few)
    run(study, tmp_path / "out")
    for name in ("cat/9", "dog/0"):
        Image.new("RGB", (8, 8), (7, 7, len(name) + ord(name[-1]))).save(images / f"train/{name}.png")
    (images / "test/dog/1.png").unlink()
    with pytest.raises(UserError, match="is of other images: since it began 1 added, 1 removed, 1 changed"):
        run(study, tmp_path / "out")


def test_a_reference_has_the_intervals_of_all_pairs(finished):
    result, out = finished
    other = Answer.load(out, reference=result.arms[0].name)
    count = len(other.every_arm)
    assert other.decision.of_pairs
    assert other.decision.family == count * (count - 1) // 2
    assert "over all pairs of arms" in str(other)


def built(study, name="base"):
    cell = study.settings.cell(name)
    return build_model(base_config(cell, 10), cell.arm, 0, cell.start, cell.recipe)


def rates(model):
    return [module.rate for module in model.modules() if isinstance(module, DropPath)]


def test_every_arm_is_built_as_the_recipe_says():
    deeper = make(["dpn", Arm("deeper", (), {"drop_path": 0.5})])
    for arm, rate in (("base", 0.3), ("dpn", 0.3), ("deeper", 0.5)):
        model = built(deeper, arm)
        assert rates(model) == [rate] * 4
        assert (model.pos_drop.p, model.blocks[1].mlp.drop1.p, model.blocks[1].attn.proj_drop.p) == (0.1, 0.1, 0.1)
        assert not model.head.weight.any()
        assert (model.head.bias == -2.0).all()
        assert not model.cls_token.any()  # timm's is drawn
    untouched = built(make(recipe=plain()))
    assert rates(untouched) == []
    assert untouched.head.weight.any()


def test_trained_weights_are_dropped_too_and_the_new_head_is_as_said(finished):
    source = finished[1] / "trials/dpn/seed0"
    trained = open_checkpoint(str(source))
    recipe = plain().with_(drop_path=0.2, dropout=0.05, init="big_vision", head_bias=-6.9)
    model = built(make(["ffn"], recipe=recipe, start=source), "ffn")
    assert rates(model) == [0.2] * 4  # constant, as the checkpoint was trained
    assert model.pos_drop.p == 0.05
    assert not model.head.weight.any()
    assert (model.head.bias == torch.tensor(-6.9)).all()
    for name, value in trained.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(model.get_parameter(name), value), name
    named = dict(trained.pretrained_cfg)
    assert named.pop("label_names") == tuple("0123456789")
    assert model.pretrained_cfg == named, "the new head's classes have no names yet"
    assert rates(built(make(["ffn"], recipe=plain(), start=source), "ffn")) == [0.3] * 4


def test_what_the_recipe_came_to_is_in_the_folder_of_the_trial_and_in_the_report(finished):
    result, out = finished
    config = json.loads((out / "trials/dpn/seed0/config.json").read_text())
    record = config["resolved"]
    assert (record["steps"], record["steps_per_epoch"], record["epochs"], record["warmup_steps"]) == (5, 2, 2.5, 2)
    assert (record["lr"], record["images_seen"]) == (5e-4, 500)
    assert result.to_dict()["resolved"] == record
    assert config["model"]["drop_path"] == 0.3
    page = result.report().read_text()
    assert "Recipe as run on this data" in page
    assert "steps_per_epoch" in page.replace("<wbr>", "")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"batch_size": 512}, "A batch of 512 images is more than the 250 of the training set"),
        ({"steps": 2, "warmup_steps": None, "warmup_epochs": 1.0}, "2 steps of warm-up .* nothing of the 2 steps"),
    ],
)
def test_a_recipe_that_does_not_fit_the_images_is_refused_before_training(tmp_path, fields, words):
    with pytest.raises(UserError, match=words):
        run(make(recipe=RECIPE.with_(**fields)), tmp_path / "out")
    assert not (tmp_path / "out" / "trials").exists()


def test_loggers_get_a_run_a_trial_and_a_run_an_arm_with_its_verdict(tmp_path):
    recipe, out = vm.recipes.digits(epochs=1).with_(warmup_epochs=0), tmp_path / "pets"
    study = Study("mu/4", {"patch": "dpn"}, recipe=recipe, seeds=3, limit_train=512)
    with notebook() as told:
        run(study, out, log="notebook", budget=1)
        assert list(told) == ["base, seed 0"], "no verdict before the study is complete"
        answer = run(study, out, log="notebook")
        trials = {f"{arm}, seed {seed}" for arm in ("base", "patch") for seed in range(3)}
        assert set(told) == {*trials, "verdict of patch"}
        trial, *rows, last = told["patch, seed 1"]
        verdict, (status, numbers) = told["verdict of patch"]
        told.clear()
        run(study, out, log="notebook")
        assert not told, "nothing is told twice"
        noted, effect = out / NOTED, answer["patch"]
        noted.write_text(noted.read_text().replace(str(effect.verdict), "another verdict"))
        run(study, out, log="notebook")
        assert list(told) == ["verdict of patch"]
    fields = {"study": "pets", "arm": "patch", "seed": 1, "changes": "dpn", "data": "digits", "base": "mu/4"}
    assert (trial.study, trial.kind, trial.fields) == ("pets", "trial", fields)
    assert trial.config["recipe"]["epochs"] == 1
    assert {name.partition("/")[0] for _, scalars in rows for name in scalars} == {"train", "val"}
    result = json.loads((out / "trials" / "patch" / "seed1" / "result.json").read_text())
    assert last == ("finished", {f"test/{name}": value for name, value in result["metrics"].items()})
    assert (verdict.kind, verdict.group, verdict.fields["verdict"]) == ("verdict", "patch", str(effect.verdict))
    assert (status, numbers["verdict/effect"]) == ("finished", effect.effect)
    assert (numbers["verdict/low"], numbers["verdict/high"]) == effect.interval
    assert verdict.folder == out


def kept(out):
    """Trials whose weights are there, as arm/.../seed."""
    return sorted(path.parent.relative_to(out / "trials").as_posix() for path in out.rglob("model.safetensors"))


def last_score(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["top1"] for row in rows if row["split"] == "val"][-1]


FEW = {"recipe": QUICK, "limit_train": 128}


@pytest.fixture(scope="module")
def best(tmp_path_factory):
    out = tmp_path_factory.mktemp("best")
    run(make(["dpn"], **FEW), out, keep_weights="best")
    before = kept(out)
    assert run(make(["dpn"], 3, **FEW), out, keep_weights="best").complete  # it resumes and grows
    assert all((out / "trials" / name).exists() for name in before)
    return out


def test_the_best_seed_of_each_arm_stays(best, tmp_path):
    expected = []
    for arm in ("base", "dpn"):
        scores = {f"{arm}/seed{seed}": last_score(best / "trials" / arm / f"seed{seed}") for seed in range(3)}
        expected.append(max(scores, key=scores.get))
    assert kept(best) == expected
    assert evaluate(best / "trials" / expected[1], device="cpu")[0]["images"] == 359
    Image.new("L", (8, 8)).save(tmp_path / "image.png")
    predictions = vm.predict(best / "trials" / "dpn", tmp_path, device="cpu")  # the one seed that is there
    assert predictions == vm.predict(best / "trials" / expected[1], tmp_path, device="cpu")


def test_what_needs_other_weights_says_so(best, tmp_path):
    gone = next(name for name in ("dpn/seed0", "dpn/seed1") if name not in kept(best))
    with pytest.raises(UserError, match=r"keep-weights"):
        evaluate(best / "trials" / gone, device="cpu")
    with pytest.raises(UserError, match=r"ece has to be computed.*--keep-weights all"):
        run(make(["dpn"], 3, metric="ece", **FEW), best)
    (tmp_path / "result.json").write_text('{"status": "diverged", "weights": {}}')
    with pytest.raises(UserError, match="does not hold a finished trial"):  # and never had weights
        open_trial(tmp_path)
    with pytest.raises(UserError, match="keep-weights"):
        Start(str(best / "trials" / "dpn"), None).build(ViTConfig(), int(gone[-1]))


def test_none_stay_and_metrics_do(tmp_path):
    study = make(["dpn"], 1, **FEW)
    for keep in ("none", "all"):
        assert run(study, tmp_path, keep_weights=keep).complete, "nothing is trained again"
        assert kept(tmp_path) == []


def test_a_tuned_study_keeps_the_best_of_the_chosen_point(tmp_path):
    assert run(make(["dpn"], 1, tune={"lr": (1e-4, 1e-3)}, **FEW), tmp_path, keep_weights="best").complete
    assert [name.split("/")[0] for name in kept(tmp_path)] == ["base", "dpn"]
    results = [json.loads((tmp_path / "trials" / name / "result.json").read_text()) for name in kept(tmp_path)]
    assert {result["split"] for result in results} == {"test"}


def test_what_a_spare_trial_gave_is_in_no_number_and_its_checkpoint_goes(tmp_path, draw_images):
    """Trials that no look counts, which free workers had begun, change nothing."""
    images = draw_images(tmp_path / "pets", ["train"], count=30)
    recipe = plain(epochs=2).with_(batch_size=16)
    study = Study("mu2/4", ["dpn", "rms"], images, recipe=recipe, seeds=6, until_decided=True, margin=60.0)
    before = run(study, tmp_path / "out")
    assert before.complete
    folder = StudyFolder(tmp_path / "out")
    settings = Settings.from_dict(folder.known_facts().settings)
    (looked,) = {len([*folder.path.glob(f"trials/{arm.name}/*/result.json")]) for arm in settings.every_arm}
    assert looked < 5
    runner = TrialRunner(folder, settings.measure, RunOptions(device="cpu"))
    for cell in settings.cells:
        runner(Trial(cell, looked))
    rests = folder.trial(Trial(settings.cell("dpn"), 5))
    rests.mkdir(parents=True)
    for name in (checkpoint.NAME, checkpoint.PREVIOUS):
        (rests / name).write_bytes(b"of a trial that was stopped")
    after = Answer.load(folder.path)
    assert after.to_dict() == before.to_dict()
    assert repr(after) == repr(before)
    assert after.to_csv() == before.to_csv()
    assert run(study, folder.path).to_dict() == before.to_dict()
    assert not [*folder.path.rglob("checkpoint*")]
