"""Studies in which base, or single trials, have learned nothing: planted scores, read as those of a real study are."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import vitmods as vm
from vitmods.evals.accuracy import confusion_matrix, macro_f1
from vitmods.recipes import Recipe
from vitmods.report.advice import next_steps
from vitmods.stats.gains import has_learned
from vitmods.stats.verdict import Verdict
from vitmods.study.answer import read_answer
from vitmods.study.arms import make_arms
from vitmods.study.settings import Settings, make_seeds
from vitmods.study.store import Facts, ModelFacts, SeedCount, StudyFolder
from vitmods.tasks import multilabel
from vitmods.tasks.base import TASKS
from vitmods.tasks.classification import _of_each_image, first_five
from vitmods.tasks.segmentation.task import measured as segmentation_measured
from vitmods.train.trial import write_scores

IMAGES, CLASSES, SEEDS = 300, 4, 5
SHARES = (0.4, 0.3, 0.2, 0.1)


def split_of():
    """300 images of four classes; all targets that the tasks read."""
    labels = np.repeat(np.arange(CLASSES), [round(IMAGES * share) for share in SHARES])
    pixels = SimpleNamespace(classes=tuple(range(CLASSES)), pixels=(40, 30, 20, 10), crowd=np.zeros(1, bool))
    sets = tuple((int(label),) for label in labels)
    return SimpleNamespace(labels=labels, label_sets=sets, annotations=(pixels,) * IMAGES)


def constants(task):
    split = split_of()
    split.label_sets = split.label_sets if task == "multilabel" else None
    return TASKS[task].constant_scores([split], CLASSES)


class Planted:
    """A study's folder with the scores of trials that nobody trained."""

    def __init__(self, path, task, seeds=SEEDS, **options):
        fixed = {"task": task, "data": "digits", "base": "mu/4", "recipe": Recipe().to_dict(), "images": ""}
        fixed |= {"img_size": [8, 8], "in_chans": 1}
        self.folder, self.task, self.constant = StudyFolder(path), task, constants(task)
        self.settings = Settings(fixed, make_arms(["dpn", "rms"]), make_seeds(seeds), **options)
        self.metric = self.settings.measure.name
        self.best = self.constant[self.metric]

    def plant(self, arm, seed, score, single=False):
        """A finished trial: a single class predicted, or `score` by other predictions."""
        folder = self.folder.path / "trials" / arm / f"seed{seed}"
        folder.mkdir(parents=True)
        if self.task == "classification":
            rng, labels = np.random.default_rng(seed), split_of().labels
            count = round(score * IMAGES)
            right = labels == 0 if single else np.isin(np.arange(IMAGES), rng.permutation(IMAGES)[:count])
            predicted = np.where(right, labels, (labels + 1) % CLASSES) if not single else np.zeros(IMAGES, int)
            columns = {"ids": np.arange(IMAGES).astype(str), "top1": right, "predicted": predicted}
            write_scores(folder / "test.npz", columns)
            score = float(right.mean())
        elif self.task == "segmentation":
            columns = {"predicted": np.full(IMAGES, 0 if single else -1)}
            write_scores(folder / "test.npz", {"ids": np.arange(IMAGES).astype(str), **columns})
        result = {"status": "finished", "split": "test", "metrics": {self.metric: score}, "wall_s": 1.0}
        (folder / "result.json").write_text(json.dumps(result))

    def plant_all(self, scores, single=()):
        """Arm -> the scores of its seeds; `single` are (arm, seed)."""
        for arm, arm_scores in scores.items():
            for seed, score in enumerate(arm_scores):
                self.plant(arm, seed, self.best if (arm, seed) in single else float(score), (arm, seed) in single)

    def answer(self, frozen=()):
        settings = self.settings
        models = {arm.name: ModelFacts("mu/4", {}) for arm in settings.every_arm}
        classes = [f"class {k}" for k in range(CLASSES)]
        data = {"classes": classes, "splits": {"test": {"count": IMAGES}}, "constant": self.constant, "warnings": []}
        data |= {"frozen": frozen} if frozen else {}
        plan = SeedCount(len(settings.seeds))
        facts = Facts("", "", ("test",), settings.to_dict(), models, data, {}, {}, plan=plan)
        return read_answer(self.folder, facts, settings)


ARMS = ("base", "dpn", "rms")
EVERY = {(arm, seed) for arm in ARMS for seed in range(SEEDS)}
KINDS = {  # how far scores are above the constant prediction, and which trials predict a single class
    "one class everywhere": (0.0, EVERY),
    "at the constant prediction": (0.0, ()),  # no trial is constant, none is above by more than noise
    "mostly one class": (0.3, {(arm, seed) for arm, seed in EVERY if seed < SEEDS - 1}),  # arms and base alike
    "an arm in part": (0.3, {("dpn", seed) for seed in range(3)}),
    "three sd above": (0.03, ()),
    "learned": (0.3, ()),
}
NOTHING = ("one class everywhere", "at the constant prediction", "mostly one class")


def planted(path, task, kind):
    """A study of base and two arms without a true effect, 5 seeds, sd of a trial 1 point."""
    study, rng, (above, single) = Planted(path, task), np.random.default_rng([0, len(task)]), KINDS[kind]
    noise = 0.01 * rng.standard_normal((len(ARMS), SEEDS))
    if kind == "at the constant prediction":
        noise = np.minimum(noise, 0) / 4
    study.plant_all(dict(zip(ARMS, np.clip(study.best + above + noise, 0, 1))), single)
    return study


OF_EACH_TASK = [(task, kind) for task in ("classification", "multilabel", "segmentation") for kind in KINDS]
OF_EACH_TASK += [("detection", kind) for kind in ("one class everywhere", "an arm in part")]


@pytest.mark.parametrize(("task", "kind"), OF_EACH_TASK)
def test_verdicts_are_given_where_base_has_learned(tmp_path, task, kind):
    answer = planted(tmp_path, task, kind).answer()
    verdicts = {arm: effect.verdict for arm, effect in answer.effects.items()}
    if kind in NOTHING:
        assert set(verdicts.values()) == {Verdict.WITHHELD}
        assert repr(answer).startswith("base has not learned: there are no verdicts.")
        assert "--epochs" in next_steps(answer)[0].text
        assert "--from" not in next_steps(answer)[0].text, "no trained weights are for such images"
        assert json.loads(json.dumps(answer.to_dict()))["decision"]["effects"]["dpn"]["verdict"] == "no verdict"
        return
    assert Verdict.WITHHELD not in verdicts.values()
    assert "has not learned" not in repr(answer)
    if kind == "an arm in part":
        assert answer["dpn"].failures == 3
        assert answer["rms"].failures == 0
        reason = "predict a single class" if task in ("classification", "segmentation") else "are not above the best"
        assert f"3 of 5 dpn trials {reason}" in repr(answer)


def test_no_verdicts_where_base_is_below_the_weights_that_it_starts_from(tmp_path):
    study, words = planted(tmp_path, "classification", "learned"), "base ends below the weights that it starts from"
    scores = [result["top1"] for result in map(metrics_of, sorted(tmp_path.glob("trials/base/*/result.json")))]
    middle = float(np.median(scores))
    for probe, is_below in ((middle + 0.004, False), (middle + 0.006, True), (middle - 0.1, False)):
        answer = study.answer({"": {"probe": probe, "knn": 0.1}})
        assert ({effect.verdict for effect in answer.effects.values()} == {Verdict.WITHHELD}) is is_below
        assert (words in repr(answer)) is is_below
        assert ("--layer-decay" in next_steps(answer)[0].text) is is_below
    below = " ".join(repr(study.answer({"": {"probe": middle + 0.006, "knn": 0.1}})).split())
    reached = f"a linear probe of the frozen weights reaches {100 * (middle + 0.006):.4g}"
    assert f"is {100 * middle:.4g}, and {reached}, so verdicts are withheld." in below
    assert words not in repr(study.answer({"": {"reason": "a class has no training image"}}))
    assert words not in repr(study.answer())


def metrics_of(path):
    return json.loads(path.read_text())["metrics"]


@pytest.mark.parametrize("task", ["dino", "beit"])
def test_trainings_without_labels_must_exceed_the_most_frequent_class(task):
    split = SimpleNamespace(labels=np.array([0, 1, 1, 2]), label_sets=None)
    assert TASKS[task].constant_scores([split, split], 3) == {"knn": 0.5, "probe": 0.5}
    assert TASKS[task].constant_scores([split], 1) == {}, "images without classes"


def test_constant_scores_are_those_of_constant_predictions():
    """... by the tasks' own metrics; of average precision by images in random order."""
    split, targets = split_of(), torch.from_numpy(split_of().labels)
    logits = torch.log(torch.tensor(SHARES)).expand(IMAGES, -1)
    measured = {
        name: column.double().mean()
        for name, column in _of_each_image(logits, targets, first_five(logits) == targets[:, None]).items()
    }
    constant = constants("classification")
    assert constant["top1"] == pytest.approx(max(SHARES))
    assert {name: constant[name] for name in ("top1", "nll", "brier")} == pytest.approx(
        {name: float(measured[name]) for name in ("top1", "nll", "brier")}
    )
    assert constant["balanced_accuracy"] == 1 / CLASSES
    confusion = confusion_matrix(split.labels, np.zeros(IMAGES, int), CLASSES)
    assert constant["macro_f1"] == pytest.approx(macro_f1(confusion))
    constant = constants("segmentation")
    right = torch.tensor([40, 0, 0, 0]), torch.tensor([100, 0, 0, 0]), torch.tensor([40, 30, 20, 10])
    measured_scores = segmentation_measured(torch.stack(right).expand(IMAGES, -1, -1), 0.0)
    assert constant == pytest.approx({name: measured_scores.metrics[name] for name in constant})
    assert set(measured_scores.per_image["predicted"]) == {0}
    labels, generator = torch.eye(CLASSES)[targets][::6], torch.Generator().manual_seed(0)
    ordered = [torch.rand(len(labels), CLASSES, generator=generator) for _ in range(200)]
    maps = [multilabel.measured(logits_of_order, labels)[0]["map"] for logits_of_order in ordered]
    sets = tuple((int(label),) for label in split.labels[::6])
    some = TASKS["multilabel"].constant_scores([SimpleNamespace(label_sets=sets)], CLASSES)
    assert some["map"] == pytest.approx(np.mean(maps), abs=3 * np.std(maps) / np.sqrt(200))
    frequent = multilabel.measured(torch.logit(torch.tensor(SHARES)).expand(len(labels), -1), labels)[0]
    assert some["ranking_precision"] == pytest.approx(frequent["ranking_precision"])
    assert set(constants("detection").values()) == {0.0}


def test_base_that_has_not_learned_ends_a_study_until_decided(tmp_path):
    study = Planted(tmp_path, "classification", seeds=16, until_decided=True)
    study.plant_all({arm: [study.best] * 4 for arm in ("base", "dpn", "rms")})
    answer = study.answer()
    assert [look.stopped for look in answer.looks] == [("dpn", "rms")]
    assert answer.complete
    assert repr(answer).startswith("base has not learned: there are no verdicts.")


@pytest.mark.parametrize(
    ("seeds", "alarms", "misses"), [(3, 0.02, 0.13), (4, 0.005, 0.08), (5, 0.004, 0.06), (8, 0.002, 0.03)]
)
def test_how_often_learning_is_seen_wrongly(seeds, alarms, misses):
    """Base 3 sd above the constant prediction; and just as good."""
    scores, none = np.random.default_rng(0).standard_normal((2000, seeds)), np.zeros(seeds, bool)
    assert np.mean([not has_learned(row + 3, none, 0.0, 0.5) for row in scores]) <= alarms
    assert np.mean([has_learned(row, none, 0.0, 0.5) for row in scores]) <= misses


def test_scores_of_ones_own():
    """`vm.decide` with the score of the best constant prediction, and with average precisions of zero without it."""
    rng = np.random.default_rng(0)
    flat = {arm: dict(enumerate(0.196 + 0.004 * rng.standard_normal(4))) for arm in ("base", "a", "b")}
    decision = vm.decide(flat, chance=0.196)
    assert {effect.verdict for effect in decision.effects.values()} == {Verdict.WITHHELD}
    assert "base has not learned: the median of its trials (19." in repr(decision)
    assert decision.best == ()
    assert vm.decide(flat)["a"].verdict != Verdict.WITHHELD
    losses = {arm: {seed: 2.3 - score for seed, score in arm_scores.items()} for arm, arm_scores in flat.items()}
    assert vm.decide(losses, unit="nats", higher_is_better=False, chance=2.1)["a"].verdict == Verdict.WITHHELD
    nothing = {arm: dict.fromkeys(range(4), np.zeros(500)) for arm in ("base", "a", "b")}
    assert vm.decide(nothing)["a"].verdict == Verdict.WITHHELD
    learned = {arm: {seed: score + 0.3 for seed, score in arm_scores.items()} for arm, arm_scores in flat.items()}
    learned["a"] |= {0: 0.19, 2: 0.196}
    single = vm.decide(learned, constant={"a": {0, 2}}, chance=0.196)
    assert "2 of 4 a trials predict a single class" in single.notes


def right_of(shares, images=400, seed=0):
    """Which images each seed has right: so large a share of them."""
    rng = np.random.default_rng(seed)
    return {k: rng.permutation(np.arange(images) < round(share * images)) * 1.0 for k, share in enumerate(shares)}


@pytest.mark.parametrize(
    ("shares", "failures", "learned"),
    [
        ((0.262, 0.275, 0.244, 0.27), 4, False),  # within the test error of 2.2 points, or below
        ((0.27, 0.28, 0.34, 0.35), 2, True),
        ((0.33, 0.34, 0.32, 0.35), 0, True),
        ((0.275, 0.275, 0.275, 0.275), 4, False),  # the same images: their median is no better than one of them
    ],
)
def test_a_trial_at_chance_has_not_learned_however_many_classes_it_names(shares, failures, learned):
    """The most frequent class is 26.2 % of 400 images."""
    scores = {"base": right_of((0.6, 0.61, 0.59, 0.6), seed=1), "a": right_of(shares)}
    assert vm.decide(scores, chance=0.262)["a"].failures == failures
    swapped = vm.decide({"base": scores["a"], "a": scores["base"]}, chance=0.262)
    assert learned or swapped["a"].verdict == Verdict.HELPS
    assert learned == ("base has not learned" not in repr(swapped))
    losses = {arm: {seed: 1 - right for seed, right in trials.items()} for arm, trials in scores.items()}
    options = {"higher_is_better": False, "unit": "fraction"}
    assert vm.decide(losses, chance=0.738, **options)["a"].failures == failures


def test_an_arm_that_alone_has_learned_helps(tmp_path):
    """Base and one arm at chance: those agree, which says nothing; the other one is better all the same."""
    flat, better = (0.27, 0.262, 0.255, 0.26), right_of((0.41, 0.36, 0.38, 0.35), seed=3)
    scores = {"base": right_of(flat), "dpn": better, "rms": right_of(flat, seed=2), "far": right_of(np.array(flat) / 4)}
    decision = vm.decide(scores, chance=0.262)
    verdicts = {arm: effect.verdict for arm, effect in decision.effects.items()}
    assert verdicts == {"dpn": Verdict.HELPS, "rms": Verdict.WITHHELD, "far": Verdict.WITHHELD}
    assert decision.best == ()
    assert "another learning rate" in repr(decision)
    # An arm that is better than base, and at chance itself.
    low = {arm: {seed: score / 10 for seed, score in trials.items()} for arm, trials in scores.items()}
    assert vm.decide(low, chance=0.262)["dpn"].verdict == Verdict.WITHHELD
    # As the report says it.
    study = Planted(tmp_path, "classification")
    study.plant_all({"base": [study.best] * SEEDS, "dpn": [0.8, 0.81, 0.79, 0.8, 0.8], "rms": [study.best] * SEEDS})
    answer = study.answer()
    assert repr(answer).startswith("dpn helps and rms has no verdict.")
    text = " ".join(step.text for step in next_steps(answer))
    assert "another learning rate" in text
    assert "may be best" not in text


def test_what_is_no_failure():
    """A log loss may say much where the most likely class is always the same; margins that are large ask no more of
    base; a constant prediction that is only assumed asks base to be above it, and no more."""
    rng = np.random.default_rng(0)
    losses = {arm: dict(enumerate(0.2 + 0.004 * rng.standard_normal(4))) for arm in ("base", "a")}
    every = {arm: range(4) for arm in losses}
    decision = vm.decide(losses, unit="nats", higher_is_better=False, chance=0.325, margin=0.01, constant=every)
    assert (decision["a"].failures, decision["a"].base_failures) == (0, 0)
    assert decision["a"].verdict != Verdict.WITHHELD
    above = {arm: dict(enumerate(0.24 + 0.001 * rng.standard_normal(4))) for arm in ("base", "a")}
    assert vm.decide(above, chance=0.2, margin=10)["a"].verdict != Verdict.WITHHELD
    low = {"base": dict(enumerate(0.003 + 0.0002 * rng.standard_normal(4))), "a": dict.fromkeys(range(4), 0.2)}
    assert vm.decide(low)["a"].verdict == Verdict.HELPS


def test_notes_leave_out_arms_without_a_learned_base_and_seeds_without_base():
    rng = np.random.default_rng(0)
    flat = {arm: dict(enumerate(0.1 + 0.002 * rng.standard_normal(5))) for arm in ("base", "a")}
    flat["a"] |= dict.fromkeys(range(4), 0.05)
    decision = vm.decide(flat, chance=0.1)
    assert decision["a"].notes == ()
    assert not any("collapsed" in note for note in decision.notes)
    scores = {"base": {0: 0.90, 1: 0.91, 2: 0.905, 3: 0.30}, "arm": {0: 0.90, 1: 0.908, 2: 0.906, 3: 0.30}}
    notes = " ".join(vm.decide(scores).notes)
    assert "1 trial of base failed, so its seed is left out for all arms" in notes
    assert "count in the effect" not in notes


@pytest.mark.usefixtures("short_clocks")
def test_a_study_that_trains_nothing_says_so(tmp_path):
    """Trained for once, at a learning rate of nothing."""
    recipe = vm.recipes.digits(epochs=1).with_(lr=1e-9, warmup_epochs=0)
    study = vm.Study("mu/4", ["dpn"], recipe=recipe, seeds=3, limit_train=64)
    answer = study.run(tmp_path / "study", workers=1, cost_seconds=0, progress=False)
    assert repr(answer).startswith("base has not learned: there are no verdicts.")
    assert answer.report().read_text().count("base has not learned") >= 1
    assert json.loads((tmp_path / "study" / "results.json").read_text())["arms"][0]["effect"]["verdict"] == "no verdict"
