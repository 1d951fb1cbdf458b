"""Several labels an image: metrics against scikit-learn's, and the whole way from a CSV file to a report."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score, label_ranking_average_precision_score

from vitmods import data
from vitmods.data import Batch
from vitmods.recipes import Augment, Recipe
from vitmods.study.trial import trial_scores
from vitmods.tasks import TASKS, MultiLabel
from vitmods.tasks.multilabel import average_precisions, ranking_precision
from vitmods.util.errors import UserError

from ..data import support

LABELS = ("blue bottom", "red top", "stripe")


def draw(rng):
    """8 x 8 pixels, and the labels that can be seen in them."""
    pixels, labels = rng.integers(90, 130, (8, 8, 3)), []
    places = {"red top": np.s_[:4, :, 0], "blue bottom": np.s_[4:, :, 2], "stripe": np.s_[:, 3:5, 1]}
    for name, place in places.items():
        if rng.random() < 0.4:
            pixels[place] = 255 if name == "stripe" else 220
            labels.append(name)
    return Image.fromarray(pixels.astype("uint8")), labels


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """100 images in a folder, and labels.csv beside it."""
    root, rng = tmp_path_factory.mktemp("marks"), np.random.default_rng(0)
    (root / "images").mkdir()
    rows = [("file", "labels")]
    for number in range(100):
        image, labels = draw(rng)
        image.save(root / "images" / f"{number}.png")
        rows.append((f"images/{number}.png", " ; ".join(labels)))
    write(root / "labels.csv", rows)
    return root


def write(path, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def load(spec, **options):
    return support.load(spec, **{"target": "labels", **options})


@pytest.fixture(scope="module")
def scored():
    generator = torch.Generator().manual_seed(0)
    targets = (torch.rand(80, 6, generator=generator) < 0.3).float()
    targets[:, 4] = 0.0  # no image has it
    targets[7] = 0.0
    logits = torch.randn(80, 6, generator=generator) + targets
    logits[:, 1] = logits[:, 1].round()  # ties
    return logits, targets


@pytest.mark.parametrize("sizes", [[80], [33, 47], [1] * 80])
def test_metrics_are_sklearns(scored, sizes):
    logits, targets = scored
    batches = [Batch(x, y, torch.arange(len(x))) for x, y in zip(logits.split(sizes), targets.split(sizes))]
    outcome = MultiLabel().evaluate(lambda images: images, batches)
    present = [0, 1, 2, 3, 5]
    expected = average_precision_score(targets[:, present], logits[:, present], average="macro")
    assert outcome.metrics["map"] == pytest.approx(expected, abs=1e-6)
    expected = label_ranking_average_precision_score(targets.numpy(), logits.numpy())
    assert outcome.metrics["ranking_precision"] == pytest.approx(expected, abs=1e-6)
    exact = ((logits >= 0) == (targets > 0)).all(dim=1)
    assert outcome.metrics["exact_match"] == pytest.approx(exact.double().mean().item())
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(1)
    assert outcome.metrics["loss"] == pytest.approx(loss.mean().item(), rel=1e-6)
    assert outcome.per_image["nll"] == pytest.approx(loss.numpy(), rel=1e-5)
    for name in ("ranking_precision", "exact_match"):
        assert outcome.per_image[name].mean() == pytest.approx(outcome.metrics[name], abs=1e-6)


@pytest.mark.parametrize(("scale", "shift"), [(1, 60), (30, 0), (1, -200), (1e4, 0), (1e-6, 0)])
def test_any_logits_are_ranked_by_their_order_alone_and_many_labels_in_parts(scored, scale, shift, monkeypatch):
    """A sigmoid is 1.0 for all logits above 37: it would see ties."""
    logits, targets = (tensor.double() for tensor in scored)
    logits = scale * logits + shift
    expected = {k: average_precision_score(targets[:, k], logits[:, k]) for k in (0, 1, 2, 3, 5)}
    assert average_precisions(logits, targets) == pytest.approx(expected, abs=1e-6)
    overall = ranking_precision(logits, targets)
    monkeypatch.setattr("vitmods.tasks.multilabel._PAIRS", 100)
    assert torch.equal(ranking_precision(logits, targets), overall)


def test_one_label_alone_has_its_average_precision_and_none_is_an_error():
    logits, targets = torch.tensor([[0.3], [2.0], [-1.0], [0.9]]), torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    expected = average_precision_score(targets, logits)
    measured = MultiLabel().evaluate(lambda x: x, [Batch(logits, targets, torch.arange(4))])
    assert measured.metrics["map"] == pytest.approx(expected, abs=1e-6)
    nothing = Batch(torch.zeros(2, 3), torch.zeros(2, 3), torch.arange(2))
    for batches, words in (([], "is empty"), ([nothing], "lacks labels")):
        with pytest.raises(UserError, match=words):
            MultiLabel().evaluate(lambda x: x, batches)


def test_the_loss_is_the_recipes_and_never_a_softmax():
    assert MultiLabel.from_recipe(Recipe().with_(loss="bce", label_smoothing=0.1)) == MultiLabel("bce", 0.1)
    assert MultiLabel.fitted(Recipe()).loss.name == "sigmoid"
    assert MultiLabel.fitted(Recipe().with_(loss="bce")).loss.name == "bce"
    with pytest.raises(UserError, match="exclude each other: set loss"):
        MultiLabel.from_recipe(Recipe())


@pytest.mark.parametrize("name", ["classification", "multilabel"])
def test_a_synthetic_batch_is_one_that_can_be_learned(name):
    task, recipe = TASKS[name](), Recipe().with_(mixup=0.2)
    batch = task.synthetic(7, (1, 4, 4), 3, recipe)
    assert batch.inputs.shape == (7, 1, 4, 4)
    loss, _ = task.loss(lambda images: images.flatten(1)[:, :3], batch)
    assert torch.isfinite(loss)
    rows = task.predictions(torch.tensor([[2.0, -1.0, 0.5]]), ("a", "b", "c"))
    assert rows[0]["predicted"] == (["a"] if name == "classification" else ["a", "c"])
    assert list(rows[0]["probabilities"]) == ["a", "c", "b"]
    json.dumps(rows)


def test_labels_become_targets_in_every_split(folder):
    outcome = load(folder / "labels.csv")
    assert outcome.classes == LABELS
    assert load(folder).summary()["fingerprint"] == outcome.summary()["fingerprint"]
    batch = next(outcome.eval_batches("train", 20))
    assert batch.targets.shape == (20, 3)
    split = outcome.splits["train"]
    for row, i in zip(batch.targets, batch.index.tolist()):
        assert tuple(row.nonzero()[:, 0].tolist()) == split.label_sets[i]
    counts = outcome.summary()["splits"]
    assert sum(split["count"] for split in counts.values()) == 100
    assert all(number > 0 for split in counts.values() for number in split["per_class"].values())
    assert any("are without labels" in text for text in outcome.summary()["warnings"])
    assert all(name == "no label" or set(name.split(" + ")) <= set(LABELS) for name, _ in outcome.samples(12))
    mixed = load(folder, augment=Augment(crop="none", mixup=0.5))
    batch = next(mixed.train_batches(seed=0, epoch=0, batch_size=16))
    assert ((batch.targets > 0) & (batch.targets < 1)).any()


def test_class_folders_are_labels_joined_by_plus(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(60):
        image, labels = draw(rng)
        place = tmp_path / ("+".join(sorted(labels)) or "stripe")
        place.mkdir(exist_ok=True)
        image.save(place / f"{number}.png")
    outcome = load(tmp_path)
    assert outcome.classes == LABELS
    both = [i for i, name in enumerate(outcome.splits["train"].ids) if name.startswith("blue bottom+red top/")]
    assert {outcome.splits["train"].label_sets[i] for i in both} == {(0, 1)}
    plain = data.load("digits", img_size=8, in_chans=1, augment=Augment(crop="none"), target="labels")
    assert plain.num_classes == 10
    assert next(plain.eval_batches("test", 9)).targets.sum(1).tolist() == [1.0] * 9


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("file", "labels")], "does not name any image"),
        ([("file", "labels"), ("0.png", "")], "does not label any image"),
        ([("file", "labels"), ("0.png", "a"), ("9.png", "b"), ("", "b")], r"2 lines\):\n.*line 3: 9.png is missing"),
        ([("file", "labels", "split"), ("0.png", "a", "val"), ("1.png", "b", "test")], "lacks images with split train"),
        (b"file,labels\n\xff\xfe,a\n", "ÿþ is missing"),
        (None, "cannot be read as a CSV file"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_clear_error(folder, tmp_path, rows, message):
    """tests/data/test_faults.py has other faults."""
    for number in range(6):
        draw(np.random.default_rng(number))[0].save(tmp_path / f"{number}.png")
    if isinstance(rows, bytes):
        (tmp_path / "labels.csv").write_bytes(rows)
    elif rows:
        write(tmp_path / "labels.csv", rows)
    with pytest.raises(UserError, match=message):
        load(tmp_path / "labels.csv")
    with pytest.raises(UserError, match=r"gives labels of each image, not a class\. Train it with --task multilabel"):
        load(folder, target="class")


def test_a_study_as_a_user_runs_it(folder, tmp_path, said, short_clocks):
    out, trial = tmp_path / "study", tmp_path / "study/trials/base/seed0"
    command = f"compare --task multilabel --data {folder}/labels.csv --base mu2/4 --img-size 8 --arms dpn --seeds 1"
    command += f" --epochs 2 --batch-size 16 --workers 1 --cost-seconds 0.1 --device cpu --out {out}"
    said(f"{command} --dry-run")
    assert not out.exists()
    assert "mean average precision (val and test)" in said(command).out
    results = json.loads((out / "results.json").read_text())
    assert (results["metric"]["name"], results["complete"]) == ("map", True)
    assert results["settings"]["task"] == "multilabel"
    assert 0 < results["arms"][0]["cost"]["train_step"]["ratio"] < 10
    page = (out / "report.html").read_text()
    assert "Validation mean average precision in %" in page
    assert "red top" in page
    result, scores = json.loads((trial / "result.json").read_text()), trial_scores(trial, "test")
    assert scores["ranking_precision"].mean() == pytest.approx(result["metrics"]["ranking_precision"], abs=1e-6)
    said(command)  # a finished study is taken up
    outcome = json.loads(said(f"evaluate {trial} --device cpu --json").out)
    assert outcome["metrics"]["map"] == pytest.approx(result["metrics"]["map"], abs=1e-6)
    assert set(outcome["protocols"]["average_precision"]["per_label"]) == set(LABELS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--task multilable", "Did you mean 'multilabel'?"),
        ("", "Train it with --task multilabel"),
        ("--task multilabel --loss softmax", "set loss to sigmoid or bce"),
        ("--task multilabel --metric top1", "ask for average_precision"),
    ],
)
def test_what_does_not_suit_the_task_is_refused_before_training(folder, tmp_path, refused, words, message):
    command = f"compare --data {folder} --base mu2/4 --img-size 8 --arms dpn --out {tmp_path}/no {words}"
    assert message in refused(command)
    assert not list((tmp_path / "no").glob("trials/*"))
