import numpy as np
import pytest
import torch

from vitmods.errors import UserError
from vitmods.evals.corruptions import ALEXNET, check_complete, corruption_error
from vitmods.evals.options import Options


def darker(pictures, name, severity, *, seed, index, textures):
    """Black from the first pixels on, by name and severity; of every other picture, told by its index."""
    rows = pictures.flatten(1).clone()
    rows[:, : (len(name) + 3 * severity) % 17] = 0
    return torch.where((index % 2 == 0)[:, None], rows, pictures.flatten(1)).reshape(pictures.shape)


def error_at(subject, name, severity):
    pixels = torch.from_numpy(subject.pictures.pixels["test"]).reshape(-1, 1, 4, 4)
    changed = darker(pixels, name, severity, seed=0, index=torch.arange(len(pixels)), textures=None)
    predicted = subject.model(changed / 255 - 0.5).argmax(1)
    return (predicted != subject.targets).double().numpy()


def test_errors_and_both_means(subject_of, made_up, small_model):
    subject = subject_of(small_model(), made_up(noise=20))
    found = corruption_error(subject, darker)
    rows = {name: np.array([error_at(subject, name, severity) for severity in range(1, 6)]) for name in ALEXNET}
    for name, row in rows.items():
        assert found.detail["errors"][name] == pytest.approx(row.mean(axis=1))
    errors = np.array([row.mean() for row in rows.values()])
    clean = (subject.logits.argmax(1) != subject.targets).double().mean().item()
    assert found.metrics["mean_corruption_error"] == pytest.approx(errors.mean())
    assert found.metrics["corruption_increase"] == pytest.approx(errors.mean() - clean)
    by_hand = [row.mean(axis=1).sum() / (5 * ALEXNET[name]) for name, row in rows.items()]
    assert found.metrics["mce"] == pytest.approx(np.mean(by_hand))
    assert all(low < found.metrics[name] < high for name, (low, high) in found.intervals.items())
    by_picture = np.mean([row.mean(axis=0) for row in rows.values()], axis=0)
    half = 1.959964 * by_picture.std(ddof=1) / np.sqrt(len(by_picture))
    low, high = found.intervals["mean_corruption_error"]
    assert high - low == pytest.approx(2 * half, rel=1e-5)


def test_the_size_of_batches_does_not_matter(subject_of, made_up, small_model):
    pictures, model = made_up(), small_model()
    asked = {"corruptions": ("fog", "snow"), "severities": (2, 5)}
    found = [corruption_error(subject_of(model, pictures, batch_size=n, **asked), darker) for n in (1, 7, 500)]
    assert found[0] == found[1] == found[2]


def test_mce_is_defined_for_all_of_imagenet_c_alone(subject_of, made_up, small_model):
    pictures, model = made_up(), small_model()
    for asked in ({"corruptions": ("fog",)}, {"severities": (1, 2)}):
        found = corruption_error(subject_of(model, pictures, **asked), darker)
        assert set(found.metrics) == {"mean_corruption_error", "corruption_increase"}
        with pytest.raises(UserError, match="all 15 corruptions"):
            check_complete(Options(**asked))
    more = corruption_error(subject_of(model, pictures, corruptions=(*ALEXNET, "spatter")), darker)
    assert more.metrics["mce"] == corruption_error(subject_of(model, pictures), darker).metrics["mce"]
    assert "spatter" in more.detail["errors"]


def test_the_classes_of_the_pictures_may_be_some_of_the_model_s(subject_of, made_up, small_model):
    pictures, model = made_up(), small_model(classes=9)
    pictures.class_map = (7, 2, 4)
    asked = {"corruptions": ("fog",), "severities": (1,)}
    found = corruption_error(subject_of(model, pictures, **asked), lambda pictures, *_, **__: pictures)
    assert found.metrics["corruption_increase"] == 0
    assert found.detail["clean_error"] == found.metrics["mean_corruption_error"] < 1


def test_the_constants_are_alexnet_s():
    assert len(ALEXNET) == 15
    assert np.mean(list(ALEXNET.values())) == pytest.approx(0.788993, abs=1e-6)
