import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, log_loss, recall_score, top_k_accuracy_score

from vitmods.data.batch import Batch
from vitmods.evals.accuracy import accuracy
from vitmods.tasks import Classification


def evaluated(logits, targets, sizes):
    return Classification().evaluate(lambda images: images, batches(logits, targets, sizes))


def batches(logits, targets, sizes):
    for x, y in zip(logits.split(sizes), targets.split(sizes), strict=True):
        yield Batch(x, y, torch.arange(len(x)))


@pytest.mark.parametrize("sizes", [[103], [50, 50, 3], [1] * 103, [100, 1, 2]])
def test_every_image_counts_the_same_however_batches_are_cut(sizes):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(103, 8, generator=generator)
    targets = torch.randint(8, (103,), generator=generator)
    metrics = evaluated(logits, targets, sizes).metrics
    scores, labels = logits.double().softmax(1).numpy(), targets.numpy()
    assert metrics["top1"] == pytest.approx(top_k_accuracy_score(labels, scores, k=1), abs=1e-12)
    assert metrics["top5"] == pytest.approx(top_k_accuracy_score(labels, scores, k=5), abs=1e-12)
    assert metrics["loss"] == pytest.approx(log_loss(labels, scores), rel=1e-6)


def test_low_precision_logits_are_summed_in_float32_and_no_images_are_an_error():
    logits, targets = torch.randn(300, 10).bfloat16(), torch.randint(10, (300,))
    expected = torch.nn.functional.cross_entropy(logits.float(), targets).item()
    assert evaluated(logits, targets, [300]).metrics["loss"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="is empty"):
        Classification().evaluate(lambda images: images, [])


def test_scores_of_each_image_have_the_metrics_as_means_and_ranks_that_agree_where_logits_tie():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(-3, 4, (200, 8), generator=generator).float()  # many ties
    targets = torch.randint(8, (200,), generator=generator)
    found = evaluated(logits, targets, [120, 80])
    scores = found.per_image
    for name in ("top1", "top5"):
        assert scores[name].mean() == pytest.approx(found.metrics[name], abs=1e-12)
    assert ((scores["rank"] == 1) == scores["top1"]).all()
    assert ((scores["rank"] <= 5) == scores["top5"]).all()
    assert scores["rank"].max() <= 8
    p = logits.double().softmax(1)
    right = p[torch.arange(200), targets]
    assert scores["p"] == pytest.approx(right.numpy(), rel=1e-5)
    assert scores["nll"] == pytest.approx(-right.log().numpy(), rel=1e-5)
    one_hot = torch.nn.functional.one_hot(targets, 8)
    assert scores["brier"] == pytest.approx(((p - one_hot) ** 2).sum(1).numpy(), abs=1e-6)


def test_the_protocol_counts_each_class(outputs_of, made_up, small_model):
    outputs = outputs_of(small_model(), made_up(test=[30, 5, 60]))
    found = accuracy(outputs)
    predicted, targets = outputs.logits.argmax(1).numpy(), outputs.targets.numpy()
    assert found.metrics["top1"] == pytest.approx((predicted == targets).mean())
    assert found.metrics["top5"] == 1.0
    assert found.metrics["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(targets, predicted))
    rows = found.detail["per_class"]
    assert [row["images"] for row in rows.values()] == [30, 5, 60]
    recalls = recall_score(targets, predicted, average=None)
    assert [row["accuracy"] for row in rows.values()] == pytest.approx(recalls)
    assert found.metrics["worst_class_accuracy"] == pytest.approx(min(recalls))
    assert all(low <= found.metrics[name] <= high for name, (low, high) in found.intervals.items())


def test_a_class_without_images_is_in_no_mean(outputs_of, made_up, small_model):
    found = accuracy(outputs_of(small_model(), made_up(test=[30, 0, 60])))
    rows = list(found.detail["per_class"].values())
    assert rows[1] == {"images": 0, "accuracy": None, "interval": [0.0, 1.0]}
    assert found.metrics["balanced_accuracy"] == pytest.approx((rows[0]["accuracy"] + rows[2]["accuracy"]) / 2)


def test_any_of_several_right_classes_counts_and_images_without_one_do_not(outputs_of, made_up, small_model):
    dataset, model = made_up(classes=8, test=2), small_model(classes=8)
    ranked = outputs_of(model, dataset).logits.argsort(dim=1, descending=True)
    first, second, sixth = (ranked[:, place].tolist() for place in (0, 1, 5))
    sets = [(first[0], sixth[0]), (sixth[1], second[1]), (sixth[2],), ()] + [(x,) for x in first[4:]]
    dataset.splits["test"].label_sets = tuple(sets)
    found = accuracy(outputs_of(model, dataset))
    assert found.detail["images"] == 15
    assert found.metrics["top1"] == pytest.approx(13 / 15)
    assert found.metrics["top5"] == pytest.approx(14 / 15)


@pytest.mark.parametrize(("known", "read"), [(9, [7, 2, 4]), (3, [0, 1, 2])])  # of the images' classes alone: no map
def test_logits_of_some_of_the_model_s_classes(outputs_of, made_up, small_model, known, read):
    dataset, model = made_up(classes=3, test=40), small_model(classes=known)
    dataset.class_map = (7, 2, 4)
    outputs = outputs_of(model, dataset)
    expected = torch.cat([model(batch.inputs) for batch in dataset.eval_batches("test", 64)])[:, read]
    torch.testing.assert_close(outputs.logits, expected)
    right = (expected.argmax(1) == outputs.targets).float().mean().item()
    assert accuracy(outputs).metrics["top1"] == pytest.approx(right)
