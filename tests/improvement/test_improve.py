"""`vitmods improve`: what is tried, that nothing which chose sees test, what comes out, and that it resumes."""

import importlib.util
import json
import math
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitmods as vm
from vitmods.cli import main
from vitmods.improvement import improve as module
from vitmods.improvement.improve import length_of
from vitmods.recipes import plain
from vitmods.report.hub import from_pretrained
from vitmods.study import Answer, ImageOptions, Study
from vitmods.study.budget import NotInTime
from vitmods.study.candidates import (
    BETWEEN_SETS,
    LEAST,
    USUAL,
    Candidate,
    Setting,
    expected_of,
    known_effects,
    promising,
)
from vitmods.study.defaults import RecipeChoice
from vitmods.study.evaluate import evaluate
from vitmods.study.schedule import TrialSchedule
from vitmods.study.study import FRESH
from vitmods.study.trial import TrialRunner
from vitmods.util.errors import UserError

pytestmark = pytest.mark.usefixtures("short_clocks")
HOW = {"workers": 1, "device": "cpu", "cost_seconds": 0, "progress": False}
SMALL = ImageOptions(limit_train=256, val_fraction=0.3)
SLOW = plain(epochs=6).with_(batch_size=32, lr=1e-4)  # base learns something, ten times the rate much more


def run(out, candidates=("fast=lr(3e-3)", "layerscale"), recipe=SLOW, images=SMALL, **options):
    return vm.improve(
        "digits", out, base="mu2/4", candidates=candidates, recipe=recipe, images=images, **HOW, **options
    )


@pytest.fixture(scope="module", autouse=True)
def few_trials():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SCREEN_SEEDS", 2)
        patch.setattr(module, "CONFIRM_SEEDS", 3)
        patch.setattr(module, "MOST_CONFIRM_SEEDS", 6)
        yield


@pytest.fixture(scope="module")
def finished(few_trials, tmp_path_factory):
    out = tmp_path_factory.mktemp("improve") / "out"
    return run(out), out


ONE = {"change": "a", "data": "x", "images": 1000, "channels": 3, "patch_values": 48, "effect": 4.0, "half": 2.0}
HERE = Setting(1000, 3, 48)


def test_what_is_to_be_expected_of_a_change_is_its_shrunken_mean():
    (alone,) = promising(HERE, [ONE])
    weight = 1 / (1.0**2 + BETWEEN_SETS**2)
    assert alone.expected == pytest.approx(weight * 4 / (USUAL**-2 + weight))
    (gray,) = promising(Setting(1000, 1, 48), [ONE])
    assert gray.expected < alone.expected  # images of another kind say less
    (two,) = promising(HERE, [ONE, {**ONE, "effect": 6.0, "data": "y"}])
    assert two.expected > alone.expected
    assert "+4.0 on x and +6.0 on y" in two.reason
    assert promising(HERE, [{**ONE, "effect": LEAST}, {**ONE, "change": "b", "effect": -9.0, "half": 1.0}]) == []
    assert expected_of([ONE] * 9, HERE) == pytest.approx(expected_of([ONE], HERE)), "studies of one data set"
    assert expected_of([ONE, {**ONE, "data": "y"}], HERE) > expected_of([ONE], HERE)


def test_what_was_found_on_the_same_data_set_does_not_choose_and_the_patch_is_the_models():
    known = [{**ONE, "effect": 9.0}, {**ONE, "data": "y"}]
    for data in ("x", "path/to/X/", "torchvision:X?root=there", r"C:\sets\x"):
        (left,) = promising(HERE, known, data)
        assert left.reason == "+4.0 on y (1 other data set)"
    assert "x and" in promising(HERE, known, "path/to/another/x/images")[0].reason
    config = vm.ViTConfig.from_name("mu2/4", img_size=32, num_classes=3)
    arms = [Study(base, "promising", "clothes", plain(epochs=1), 1).settings.arms for base in ("mu2/4", config)]
    assert arms[0] == arms[1]


def test_a_sweep_over_data_says_why_its_arms_and_trained_weights_have_others(finished):
    sweep = Study("mu2/4", "promising", "digits", plain(epochs=1), 1, sweep={"data": ["digits", "clothes"]})
    (note,) = sweep._notes
    assert "levit" in note
    with pytest.raises(UserError, match=r"name the arms to compare in trained weights"):
        Study(None, "promising", "digits", plain(epochs=1), 1, start=finished[0].model)
    with pytest.raises(UserError, match=r"does not have an arm 'lyerscale'\. Did you mean 'layerscale'"):
        Study("mu2/4", ["layerscale"], "digits", SLOW, 2, images=SMALL).confirm(finished[1] / "screen", arm="lyerscale")


def test_known_effects_are_those_of_models_from_scratch_and_every_change_parses():
    for one in known_effects():
        assert vm.parse_changes(one["change"])
        assert one["half"] > 0
        assert one["images"] > 0
        assert one["channels"] in (1, 3)
        assert math.isfinite(one["effect"])
    best = [candidate.change for candidate in promising(Setting(5000, 3, 768))]
    assert best[:2] == ["levit", "instancenorm"]
    assert "dpn" not in best


def test_without_arms_the_shell_compares_the_most_promising_changes(tmp_path, capsys):
    few = "--base mu1/4 --limit-train 128 --epochs 1 --seeds 1 --workers 1 --cost-seconds 0 --device cpu"
    assert main(["compare", "digits", *few.split(), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    answer = Answer.load(tmp_path / "out")
    stems_and_norms = ("hmlp", "stem(kind=linear,gelu=true)", "stem(kind=levit,norm=layer)", "switchnorm", "batchnorm")
    elsewhere = [one for one in promising(Setting(0, 1, 16), data="digits") if one.change not in stems_and_norms]
    best = [one.change for one in elsewhere][:3]  # one a slot
    assert [arm.name for arm in answer.arms] == best
    assert "Comparing the most promising changes" in said
    assert all(f"{change}, " in said for change in best)
    two = Study(["mu1/4", "mu2/4"], "promising", "digits", plain(epochs=1), 2, pretrain=None)
    assert [arm.name for arm in two.settings.arms] == best
    with pytest.raises(UserError, match="patch_drop"):  # base itself cannot be built
        Study("timm:test_vit", "promising", "digits", plain(epochs=1).with_(patch_drop=0.5), 2, img_size=32)


def test_the_screen_is_about_val_and_the_confirmation_about_test_and_fresh_seeds(finished):
    found, out = finished
    screen, confirmed = Answer.load(out / "screen"), found.confirmed
    assert screen.splits == ("val",)
    assert confirmed.splits == ("test",)
    trials = [json.loads(path.read_text()) for path in out.glob("screen/trials/**/result.json")]
    assert len(trials) == 8
    assert all(trial["split"] == "val" for trial in trials)
    assert not list(out.glob("screen/trials/**/test.*"))
    assert set(screen.seeds).isdisjoint(confirmed.seeds)
    assert confirmed.seeds == [*range(FRESH, FRESH + 3)]
    settings = [study.settings for study in (screen, confirmed)]
    assert settings[0]["recipe"] == settings[1]["recipe"]
    assert settings[0]["base"] == settings[1]["base"]


def test_what_helps_is_confirmed_trained_on_all_images_and_written(finished):
    found, out = finished
    assert found.complete
    assert found.is_better
    assert "fast" in found.arm
    assert found.effect.interval[0] > 0
    assert "before and" in found.headline
    config = json.loads((found.trained.folder / "config.json").read_text())
    assert config["data"]["splits"].keys() == {"train"}
    assert config["data"]["splits"]["train"]["count"] > 256
    assert from_pretrained(found.model)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    page = found.report().read_text()
    for text in (found.arm, "Use the model", "What was tried", "screen/report.html", "vitmods predict"):
        assert text in page
    assert page.count("confirmed</span>") == len(found.chosen) == found.arm.count("+") + 1
    assert "each on average over the other changes on and off" in page
    assert (out / "screen/report.html").exists()
    assert (found.confirmed.path / "report.html").exists()


def test_another_call_trains_nothing_again_and_other_candidates_are_refused(finished):
    found, out = finished
    before = {path: path.stat().st_mtime_ns for path in out.glob("**/result.json")}
    again = vm.improve("digits", out, base="mu2/4", recipe=SLOW, images=SMALL, **HOW)  # candidates as noted
    assert {path: path.stat().st_mtime_ns for path in out.glob("**/result.json")} == before
    assert again.headline == found.headline
    with pytest.raises(
        UserError, match=r"tries fast=lr\(3e-3\) and layerscale, and was begun with --candidates .*: choose another"
    ):
        run(out, ("rms", "layerscale"))
    assert run(out, ("layerscale", "fast=lr(3e-3)")).headline == found.headline, "in any order"
    with pytest.raises(UserError, match="begun with --base mu2/4, not mu3/4"):
        vm.improve("digits", out, base="mu3/4", **HOW)


@pytest.mark.parametrize(
    "kind", ["together", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("one by one", "with more seeds"))]
)
def test_a_screen_whose_time_is_over_early_has_fewer_seeds_and_its_choice_stays(tmp_path, monkeypatch, kind):
    """On a machine that became slower than its estimate; another call trains nothing more for the choice."""
    affords = TrialSchedule._affordable
    seeds = [0, 1, FRESH, FRESH + 1]  # that there is time for
    monkeypatch.setattr(TrialSchedule, "_affordable", lambda self, work: work.seed in seeds and affords(self, work))
    monkeypatch.setattr(module, "SCREEN_SEEDS", 3)
    if kind == "one by one":
        monkeypatch.setattr(module._Request, "screening", lambda self, chosen, seeds: (
            self.study([one.change for one in chosen], seeds=4, until_decided=True, margin=1e-3)
        ))  # fmt: skip
    if kind == "with more seeds":
        seeds += [2, FRESH + 2, FRESH + 3, FRESH + 4, FRESH + 5]
        monkeypatch.setattr(module._Request, "screening", lambda self, chosen, seeds: (
            self.study([one.change for one in chosen], seeds=2)
        ))  # fmt: skip
    found = run(tmp_path / "out", budget="59m")
    assert found.complete
    assert found.effect.n == (6 if kind == "with more seeds" else 2)
    assert found.screen.seeds == {"together": [0, 1], "one by one": [0, 1, 2, 3], "with more seeds": [0, 1, 2]}[kind]
    trials = sorted((tmp_path / "out").glob("**/result.json"))
    assert {path.parent.name for path in trials if "retrained" not in path.parts} == {f"seed{seed}" for seed in seeds}
    seeds += [2, 3, *range(FRESH, FRESH + 20)]
    again = run(tmp_path / "out", budget="59m")
    assert again.headline == found.headline
    assert sorted((tmp_path / "out").glob("**/result.json")) == trials


def test_the_confirmation_is_as_long_as_fits_unless_the_length_was_given(tmp_path, monkeypatch):
    class Chosen(Exception):
        pass

    def choose(rungs, *_):
        raise Chosen(rungs)

    study = Study("mu1/4", ["rms"], "digits", None, 1, limit_train=64, img_size=8)
    full = study.settings.recipe.epochs
    study.settings = study.settings.with_recipe(epochs=1)  # as a budget chose it
    study.run(tmp_path, **HOW)
    monkeypatch.setattr("vitmods.study.choice.choose", choose)
    for given, epochs in ((None, full), (RecipeChoice("small_data", {"epochs": 1}), None)):
        again = Study("mu1/4", ["rms"], "digits", given, 1, limit_train=64, img_size=8)
        longer = {"arm": "rms", "longer": True, "budget": module.Budget(seconds=60.0, seeds_follow=True)}
        if epochs is None:
            assert length_of(again.confirm(tmp_path, 1, **longer, **HOW)) == "1 epoch"
            continue
        with pytest.raises(Chosen) as caught:
            again.confirm(tmp_path, 1, **longer, **HOW)
        (rung,) = caught.value.args[0]
        assert rung.settings.recipe.epochs == epochs > 1
        assert rung.settings.seeds == (FRESH,)
        assert not rung.settings.open & {"base", "img_size", "lr"}


def test_base_is_kept_and_written_where_nothing_looks_better(tmp_path, monkeypatch):
    def improve(**options):
        recipe = plain(epochs=6).with_(batch_size=32, lr=3e-3)
        return run(tmp_path / "out", ("lr(1e-6)", "tiny=lr(1e-7)"), recipe, **options)

    with monkeypatch.context() as patch:
        patch.setattr(TrialSchedule, "_affordable", lambda self, trial: trial.seed < FRESH)
        found = improve(budget="59m")
    assert "which is not tested yet: run the same command again" in found.headline
    assert not found.complete
    improve(budget="59m")  # which may have more seeds
    found = improve()
    assert found.complete
    assert not found.arm
    assert found.effect is None
    assert (found.confirmed.splits, found.confirmed.arms) == (("test",), ())
    assert found.confirmed.seeds == [*range(FRESH, FRESH + 4)]  # twice as many as were planned
    score = found.confirmed.metric.shown(found.confirmed.base_mean)
    assert f"on val none of 2 candidates looks better. It reaches {score}" in found.headline
    assert found.trained.arm == "base"
    assert found.trained.folder.is_relative_to(found.confirmed.path)
    assert (found.model / "model.safetensors").exists()
    assert "Base is kept" in found.report().read_text()


def test_a_confirmation_that_does_not_fit_what_is_left_is_tried_with_fewer_seeds(finished, tmp_path, monkeypatch):
    out, confirm, asked = tmp_path / "out", Study.confirm, []
    shutil.copytree(finished[1], out, ignore=shutil.ignore_patterns("confirm", "model"))

    def only_few(study, folder, seeds, **how):
        asked.append(seeds)
        if (seeds or 3) > fits:
            raise error
        return confirm(study, folder, seeds, **how)

    monkeypatch.setattr(Study, "confirm", only_few)
    fits, error = 0, UserError("Another run is at work.")
    with pytest.raises(UserError, match="Another run is at work"):  # which fewer seeds do not change
        run(out, budget="59m")
    asked.clear()
    error = NotInTime("Nothing fits 3 min.")
    assert "is not confirmed yet" in run(out, budget="59m").headline
    fits = 2
    found = run(out, budget="59m")
    assert asked == [None, 2, None, 2]
    assert found.is_tested
    assert found.confirmed.seeds[:2] == [FRESH, FRESH + 1]


def test_where_base_did_not_learn_in_the_screen_what_is_likely_is_confirmed_in_longer_trainings(tmp_path, monkeypatch):
    candidates = [Candidate("layerscale", 0.5, ""), Candidate("qknorm", 2.0, ""), Candidate("lr(3e-3)", None, "")]
    minute = module.Budget(seconds=60.0)
    for recipe, limit, expected in ((None, minute, "qknorm"), (None, module.ENDLESS, None), (SLOW, minute, None)):
        study = Study(
            "mu1/4", [one.change for one in candidates], "digits", recipe, 2, images=SMALL, design="factorial"
        )
        arm = module.likely(candidates, study, limit)
        assert (arm and arm.name) == expected
    monkeypatch.setattr(module.Improvement, "has_learned", False)
    found = run(tmp_path / "out")
    assert found.confirmed is None
    assert "Nothing is decided, for base did not learn" in found.headline
    monkeypatch.setattr(module, "likely", lambda candidates, study, limit: study.settings.factors[0])
    found = run(tmp_path / "out")
    assert (found.arm, found.chosen) == ("fast", {"fast"})
    assert found.is_better
    assert found.trained.arm == "fast"
    assert "Base did not learn in the screen, so results of other studies chose the arm." in found.headline
    monkeypatch.setattr(module, "likely", lambda candidates, study, limit: None)  # as without a budget
    again = run(tmp_path / "out")
    assert (again.headline, again.model) == (found.headline, found.model)


def test_of_trained_weights_ways_to_adapt_them_are_tried_one_by_one(tmp_path, monkeypatch):
    first = Study("mu2/4", None, "digits", plain(epochs=3), 1, images=SMALL)
    first.run(tmp_path / "base", **HOW)
    (trial,) = (tmp_path / "base/trials").glob("**/seed0")
    options, out = module.StudyOptions(), tmp_path / "out"
    request = module._Request(out, "digits", None, str(trial), None, "classification", SMALL, options, None)
    has_peft = importlib.util.find_spec("peft") is not None
    chosen, seeds = request.plan(None, (), False, module.ENDLESS)  # last(4) is all of this model
    assert [one.change for one in chosen] == ["attention", "head", *["lora(rank=8)"] * has_peft]
    study = request.screening(chosen, seeds)
    assert study.settings.until_decided
    assert study.settings.kind.name == "arms"
    assert study.settings.fixed["answer_on"] == "val"


def test_candidates_that_were_dropped_for_the_time_are_not_missed_when_the_command_goes_on(tmp_path, monkeypatch):
    options = module.StudyOptions(progress=False)
    request = module._Request(tmp_path / "out", "digits", "mu1/4", None, None, "classification", SMALL, options, None)
    monkeypatch.setattr(module._Request, "_fitting", lambda self, chosen, limit, can_drop: (chosen[:2], 2))
    first, seeds = request.plan(None, ("hmlp",), True, module.ENDLESS)
    assert len(first) == seeds == 2
    (tmp_path / "out/screen/trials").mkdir(parents=True)
    others, _ = request.plan(("rms", "dpn"), (), False, module.ENDLESS)  # nothing is trained: it is planned anew
    assert [one.change for one in others] == ["rms", "dpn"]
    (tmp_path / "out/improve.json").unlink()
    request.plan(None, ("hmlp",), True, module.ENDLESS)
    (tmp_path / "out/screen/trials/metrics.jsonl").touch()
    assert request.plan(None, ("hmlp",), True, module.ENDLESS) == (first, 2)  # the same command
    assert request.plan(None, (), False, module.ENDLESS) == (first, 2)
    with pytest.raises(UserError, match=r"begun with --without hmlp, not rms"):
        request.plan(None, ("rms",), True, module.ENDLESS)
    (tmp_path / "out/improve.json").write_text("{}")
    with pytest.raises(UserError, match=r"improve\.json is damaged"):
        request.plan(None, (), False, module.ENDLESS)


def test_a_folder_of_a_study_is_refused_and_what_the_model_has_seen_is_known(finished):
    found, out = finished
    with pytest.raises(UserError, match="is a study or a trial"):
        run(out / "screen")
    study = Study(start=found.model, arms=["head"], data="digits", recipe=plain(epochs=1), seeds=2, images=SMALL)
    with pytest.warns(UserWarning, match="were training images of the weights"):
        study.dry_run(None, **HOW)
    with pytest.warns(UserWarning, match=r"\d+ of \d+ images of test were training images of .*optimistic"):
        evaluate(found.model, ["top1"], data="digits", device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate(found.confirmed.path / "trials/base" / f"seed{FRESH}", ["top1"], device="cpu")


@pytest.mark.parametrize("others", [None, "", "test", "val", "val test"])
def test_every_folder_gets_a_val_and_a_test_split(tmp_path, monkeypatch, others):
    data, random = tmp_path / "photos", np.random.default_rng(0)
    splits = [""] if others is None else ["train", *others.split()]
    for folder in [f"{split}/{name}".strip("/") for split in splits for name in "ab"]:
        (data / folder).mkdir(parents=True)
        for i in range(12):
            Image.fromarray(random.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(data / folder / f"{i}.png")
    spec, images = module._held_out(str(data), ImageOptions())
    assert Path(spec.partition("?")[0]) == data
    monkeypatch.setenv("HOME", str(tmp_path))
    assert module._held_out("~/photos", ImageOptions())[0] == spec.replace(str(tmp_path), "~")
    assert images.val_fraction == (None if others == "val test" else 0.2)
    monkeypatch.setattr(module, "MOST_VAL", 3)
    fewer = module._held_out(str(data), ImageOptions())[1].val_fraction
    assert fewer == (images.val_fraction and 3 / (2 * 12))
    images = module.replace(images, answer_on="val")
    study = Study("mu1/4", ["rms"], spec, plain(epochs=1), 1, images=images, img_size=8)
    runner = TrialRunner(module.StudyFolder(tmp_path / "none"), study.settings.measure)
    dataset = runner.dataset(study.settings.cell("base"))
    assert set(dataset.splits) == {"train", "val", "test"}
    assert dataset.eval_split == "val"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--budget", "40trials"], "a time, such as 2h"),
        (["--candidates", "dpn"], "two or more together"),
        (["--candidates", "dpn", "nonsense"], "nonsense"),
        (["--candidates", "dpn", "norms"], "'norms' stands for several arms"),
        (["--candidates", "promising", "dpn"], "'promising' stands for several arms"),
        (["--candidates", "dpn", "base"], "leave base out"),
        (["--without", "levitt"], "levitt"),
        (["--out", "."], "has other files"),
        (["--candidates", "dpn", "rms", "--without", "rms"], "drop --without"),
        (["--base", "mu1/4", "--from", "x"], "drop --base"),
        (["--out", "s3://bucket/x"], "needs a folder on this disk"),
        (["--fold", "0", "5"], "leave fold out"),
        (["--data", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_trained(tmp_path, capsys, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    data = [] if "--data" in words else ["digits"]
    assert main(["improve", *data, "--base", "mu1/4", *words] if "--base" not in words else ["improve", *words]) == 2
    assert said in " ".join(re.split(r"[\s│]+", capsys.readouterr().err))  # also where a box wraps it
    assert not list(tmp_path.glob("**/trials"))


def test_only_what_fails_more_often_than_base_is_blamed(finished, monkeypatch):
    found, _ = finished
    effects = found.screen.headline.effects

    def failing(of_base):
        known = {name: replace(one, failures=2, base_failures=of_base, effect=-1.0) for name, one in effects.items()}
        monkeypatch.setattr(type(found.screen.headline), "effects", property(lambda _: known))
        return replace(found, arm="").headline

    assert "Trials with fast and layerscale failed." in failing(0)
    assert "failed" not in failing(2)


def test_the_command_prints_what_came_out(finished, tmp_path, capsys):
    _, out = finished
    shutil.copytree(out, copy := tmp_path / "copy")
    words = "--base mu2/4 --limit-train 256 --val-fraction 0.3 --workers 1 --device cpu --cost-seconds 0 --quiet"
    words += " --recipe plain --epochs 6 --batch-size 32 --lr 1e-4"
    assert main(["improve", "digits", "--out", str(copy), *words.split()]) == 0
    printed = capsys.readouterr().out
    assert "is better than base" in printed
    assert "vitmods predict" in printed
    assert "Report:" in printed


def test_simulated_false_gains_are_rare_and_a_factorial_screen_finds_more():
    path = Path(__file__).parents[2] / "benchmarks/improving.py"
    spec = importlib.util.spec_from_file_location("improving", path)
    simulated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(simulated)

    def end(world, choose, split, trials=64, studies=1500):
        random = np.random.default_rng(0)
        made = simulated.World(world, studies, random)
        seeds = trials // 4
        chosen = choose(made, trials - 2 * seeds, random, getattr(made, split))
        gain, better = simulated.compare(made, chosen, seeds, random)
        return gain.mean() / max(made.gain.max(1).mean(), 1e-9), better.mean()

    nothing = "nothing does anything"
    assert end(nothing, simulated.by_factorial, "val")[1] < 0.035
    assert end(nothing, simulated.by_factorial, "test")[1] > 0.05  # chosen by the images that it is compared on
    kept = [end("like the gallery", way, "val", 24)[0] for way in (simulated.by_factorial, simulated.one_by_one)]
    assert kept[0] > 0.9 > kept[1]
