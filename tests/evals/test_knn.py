import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from vitmods.evals import features as module
from vitmods.evals.features import knn, vote


def features(n, seed):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, 10))).float()


@pytest.mark.parametrize("known", [200, 7])  # fewer than 20 too
def test_votes_are_sklearn_s(known, monkeypatch):
    x, asked, labels = features(known, 0), features(50, 1), torch.arange(known) % 4
    peer = KNeighborsClassifier(
        min(20, known), metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07)
    ).fit(x, labels)
    scores = vote(x, labels, asked, 4)
    fractions = (scores / scores.sum(dim=1, keepdim=True)).numpy()
    np.testing.assert_allclose(fractions, peer.predict_proba(asked), atol=1e-4)
    monkeypatch.setattr(module, "_SIMILARITIES", 3 * known)
    torch.testing.assert_close(vote(x, labels, asked, 4), scores, rtol=1e-4, atol=0)


def test_the_protocol(outputs_of, made_up, small_model):
    outputs = outputs_of(small_model(), made_up(noise=40))
    found = knn(outputs)
    train, test = outputs.features("train"), outputs.features("test")
    scores = vote(train.features, train.targets, test.features, 3)
    assert found.metrics["knn"] == pytest.approx((scores.argmax(1) == outputs.targets).float().mean().item())
    assert found.metrics["knn"] > 0.6
    assert found.detail["neighbors"] == 20
