from types import SimpleNamespace

import pytest
import torch
from sklearn.metrics import log_loss, top_k_accuracy_score

from vitmods.evals import top1


def cross_entropy(logits, targets):
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def identity(images):
    return images


def batches(logits, targets, sizes):
    for x, y in zip(logits.split(sizes), targets.split(sizes), strict=True):
        yield SimpleNamespace(images=x, targets=y)


@pytest.mark.parametrize("sizes", [[103], [50, 50, 3], [1] * 103, [100, 1, 2]])
def test_every_picture_counts_the_same_however_batches_are_cut(sizes):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(103, 8, generator=generator)
    targets = torch.randint(8, (103,), generator=generator)
    metrics = top1(identity, batches(logits, targets, sizes), cross_entropy)
    scores, labels = logits.double().softmax(1).numpy(), targets.numpy()
    assert metrics["top1"] == pytest.approx(top_k_accuracy_score(labels, scores, k=1), abs=1e-12)
    assert metrics["top5"] == pytest.approx(top_k_accuracy_score(labels, scores, k=5), abs=1e-12)
    assert metrics["loss"] == pytest.approx(log_loss(labels, scores), rel=1e-6)


def test_with_fewer_than_five_classes_top5_is_one():
    logits, targets = torch.randn(9, 3), torch.randint(3, (9,))
    assert top1(identity, batches(logits, targets, [4, 5]), cross_entropy)["top5"] == 1.0


def test_low_precision_logits_are_summed_in_float32():
    logits = torch.randn(300, 10).bfloat16()
    targets = torch.randint(10, (300,))
    metrics = top1(identity, batches(logits, targets, [300]), cross_entropy)
    assert metrics["loss"] == pytest.approx(cross_entropy(logits.float(), targets).mean().item(), rel=1e-5)


def test_no_pictures_is_an_error():
    with pytest.raises(ValueError, match="no pictures"):
        top1(identity, [], cross_entropy)
