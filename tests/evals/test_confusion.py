import numpy as np
import pytest
from sklearn.metrics import confusion_matrix as sklearn_matrix
from sklearn.metrics import f1_score

from vitmods.evals.accuracy import confusion, confusion_matrix, macro_f1, most_confused


def test_matrix_and_f1_are_sklearn_s():
    rng = np.random.default_rng(0)
    true, predicted = rng.integers(0, 6, 300), rng.integers(0, 6, 300)
    matrix = confusion_matrix(true, predicted, 6)
    assert (matrix == sklearn_matrix(true, predicted)).all()
    assert macro_f1(matrix) == pytest.approx(f1_score(true, predicted, average="macro"))


def test_a_class_without_images_is_not_in_the_mean():
    assert macro_f1(confusion_matrix(np.array([0, 0, 1]), np.array([0, 0, 1]), 3)) == 1.0
    true, predicted = np.array([0, 0, 1, 1, 1]), np.array([0, 2, 1, 1, 0])  # 2 is only predicted
    expected = f1_score(true, predicted, average="macro", labels=[0, 1])
    assert macro_f1(confusion_matrix(true, predicted, 3)) == pytest.approx(expected)


def test_the_most_frequent_confusion_comes_first():
    matrix = np.array([[5, 2, 0], [7, 1, 0], [0, 0, 9]])
    rows = most_confused(matrix, ("a", "b", "c"))
    assert rows == [{"class": "b", "taken_for": "a", "images": 7}, {"class": "a", "taken_for": "b", "images": 2}]


def test_the_protocol(outputs_of, made_up, small_model):
    found = confusion(outputs_of(small_model(), made_up(test=[4, 6, 9])))
    assert np.sum(found.detail["matrix"], axis=1).tolist() == [4, 6, 9]
    many = confusion(outputs_of(small_model(classes=201), made_up(classes=201, test=1)))
    assert "matrix" not in many.detail
    assert len(many.detail["most_confused"]) == 20
