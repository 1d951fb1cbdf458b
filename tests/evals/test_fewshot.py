from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitmods.evals.features import check_fewshot, fewshot, least_squares_scores, permuted_classes, ridge, shots_of
from vitmods.evals.options import Options
from vitmods.stats.width import mean_over_seeds
from vitmods.util.errors import UserError

GOLDEN = Path(__file__).parents[1] / "golden" / "fewshot_lsr_n_ge_d.npz"


@pytest.mark.parametrize("l2", ["1024", "1", "0.01"])
def test_scores_are_big_vision_s(l2):
    g = np.load(GOLDEN)
    scores = least_squares_scores(g["x"], g["y"], g["x_test"], int(g["num_classes"]), float(l2))
    np.testing.assert_allclose(scores, g[f"scores_l2_{l2}"], rtol=1e-6)
    assert (scores.argmax(axis=1) == g["y_test"]).mean() == pytest.approx(g[f"acc_l2_{l2}"].item(), abs=1e-6)


@given(st.integers(1, 30), st.integers(1, 30), st.sampled_from([0.01, 1.0, 1024.0]), st.integers(0, 999))
@settings(max_examples=40)
def test_both_systems_of_equations_give_the_ridge_solution(n, c, l2, seed):
    rng = np.random.default_rng(seed)
    a, targets = rng.normal(size=(n, c)), rng.normal(size=(n, 3))
    expected = np.linalg.inv(a.T @ a + l2 * np.eye(c)) @ a.T @ targets
    np.testing.assert_allclose(ridge(a, targets, l2), expected, rtol=1e-6, atol=1e-8)


def test_smaller_sets_are_parts_of_larger_ones_and_balanced():
    labels = np.random.default_rng(0).integers(0, 4, 100)
    members = permuted_classes(labels, 4, seed=1)
    assert all((labels[indices] == number).all() for number, indices in enumerate(members))
    assert sorted(np.concatenate(members).tolist()) == list(range(100))
    rng = np.random.default_rng(1)
    for number in range(4):
        assert members[number].tolist() == rng.permutation(np.where(labels == number)[0]).tolist()


def test_the_protocol_is_the_mean_over_three_choices(outputs_of, made_up, small_model):
    outputs = outputs_of(small_model(), made_up(), shots=(1, 5))
    found = fewshot(outputs)
    train, test = outputs.features("train"), outputs.features("test")
    for shots in (1, 5):
        values = []
        for seed in range(3):
            chosen = np.concatenate([m[:shots] for m in permuted_classes(train.targets.numpy(), 3, seed)])
            x, y = train.features.double().numpy()[chosen], train.targets.numpy()[chosen]
            scores = least_squares_scores(x, y, test.features.double().numpy(), 3, 1024.0)
            values.append((scores.argmax(1) == test.targets.numpy()).mean())
        assert found.detail["shots"][str(shots)]["values"] == pytest.approx(values)
        assert found.metrics[f"fewshot{shots}"] == pytest.approx(np.mean(values))
        assert found.intervals[f"fewshot{shots}"] == pytest.approx(mean_over_seeds(values))
    assert found.metrics["fewshot5"] > 0.5 > 1 / 3


def test_too_few_images_are_reported_before_work(made_up):
    def few(**splits):
        return made_up(**{"train": [40, 7, 30], "test": 5, **splits})

    check_fewshot(few(), "test", Options(shots=(1, 5, 7)))
    for images, split, options, words in (
        (few(), "test", {}, r"class 1 has 7: ask for 1 or 5 shots\."),
        (few(), "test", {"shots": (20,)}, r"ask for 7 shots\."),
        (few(train=[40, 0, 30]), "test", {}, "add images"),
        (few(), "train", {}, "evaluate it on another"),
        (made_up(test=5), "test", {}, "does not have any"),
    ):
        with pytest.raises(UserError, match=words):
            check_fewshot(images, split, Options(**options))
    assert shots_of("fewshot10") == 10
    assert [shots_of(name) for name in ("fewshot", "fewshot0", "fewshots", "top5", "10")] == [None] * 5
