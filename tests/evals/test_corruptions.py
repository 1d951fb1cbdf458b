from pathlib import Path

import numpy as np
import pytest
import torch

import vitmods as vm
from vitmods.evals import run_protocols
from vitmods.evals.options import Options
from vitmods.papers.corruptions import CORRUPTIONS
from vitmods.papers.corruptions.protocol import ALEXNET, check, check_metric, corruption_error
from vitmods.util.errors import UserError


def darker(dataset, name, severity, *, seed, index, textures):
    """Black from the first pixels on, by name and severity; of every other image, reported by its index."""
    rows = dataset.flatten(1).clone()
    rows[:, : (len(name) + 3 * severity) % 17] = 0
    return torch.where((index % 2 == 0)[:, None], rows, dataset.flatten(1)).reshape(dataset.shape)


def error_at(outputs, name, severity):
    pixels = torch.from_numpy(outputs.dataset.pixels["test"]).reshape(-1, 1, 4, 4)
    changed = darker(pixels, name, severity, seed=0, index=torch.arange(len(pixels)), textures=None)
    predicted = outputs.model(changed / 255 - 0.5).argmax(1)
    return (predicted != outputs.targets).double().numpy()


def test_errors_and_both_means(outputs_of, made_up, small_model):
    outputs = outputs_of(small_model(), made_up(noise=20))
    found = corruption_error(outputs, darker)
    rows = {name: np.array([error_at(outputs, name, severity) for severity in range(1, 6)]) for name in ALEXNET}
    for name, row in rows.items():
        assert found.detail["errors"][name] == pytest.approx(row.mean(axis=1))
    errors = np.array([row.mean() for row in rows.values()])
    clean = (outputs.logits.argmax(1) != outputs.targets).double().mean().item()
    assert found.metrics["mean_corruption_error"] == pytest.approx(errors.mean())
    assert found.metrics["corruption_increase"] == pytest.approx(errors.mean() - clean)
    by_hand = [row.mean(axis=1).sum() / (5 * ALEXNET[name]) for name, row in rows.items()]
    assert found.metrics["mce"] == pytest.approx(np.mean(by_hand))
    assert all(low < found.metrics[name] < high for name, (low, high) in found.intervals.items())
    by_image = np.mean([row.mean(axis=0) for row in rows.values()], axis=0)
    half = 1.959964 * by_image.std(ddof=1) / np.sqrt(len(by_image))
    low, high = found.intervals["mean_corruption_error"]
    assert high - low == pytest.approx(2 * half, rel=1e-5)


def test_mce_is_defined_for_all_of_imagenet_c_alone(outputs_of, made_up, small_model):
    dataset, model = made_up(), small_model()
    for asked in ({"corruptions": ("fog",)}, {"severities": (1, 2)}):
        found = corruption_error(outputs_of(model, dataset, **asked), darker)
        assert set(found.metrics) == {"mean_corruption_error", "corruption_increase"}
        with pytest.raises(UserError, match="all 15 corruptions"):
            check_metric("mce", Options(**asked))
    some = made_up()
    some.class_map = (7, 2, 4)  # of the model's classes
    still = corruption_error(outputs_of(small_model(classes=9), some), lambda dataset, *_, **__: dataset)
    assert still.metrics["corruption_increase"] == 0
    assert still.detail["clean_error"] == still.metrics["mean_corruption_error"] < 1
    more = corruption_error(outputs_of(model, dataset, corruptions=(*ALEXNET, "spatter")), darker)
    assert more.metrics["mce"] == corruption_error(outputs_of(model, dataset), darker).metrics["mce"]
    assert "spatter" in more.detail["errors"]
    assert tuple(ALEXNET) == CORRUPTIONS
    assert np.mean(list(ALEXNET.values())) == pytest.approx(0.788993, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corruptions": ("fogg",)}, "Did you mean 'fog'"),
        ({"corruptions": ("frost", "fog")}, "VITMODS_FROST"),
        ({"corruptions": ("frost",), "textures": Path("/no/such/folder")}, "/no/such/folder"),
        ({"corruptions": ("saturate",)}, "gray"),
        ({}, "VITMODS_FROST"),
    ],
)
def test_what_is_wrong_is_reported_before_work(options, message, made_up, monkeypatch):
    monkeypatch.delenv("VITMODS_FROST", raising=False)
    dataset = made_up()
    dataset.img_size = (8, 8)
    with pytest.raises(UserError, match=message):
        check(dataset, "test", Options(**options))
    with pytest.raises(UserError, match="at least 8 pixels"):
        check(made_up(), "test", Options(corruptions=("fog",)))
    assert dataset.passes == 0


def test_real_corruptions_of_real_images():
    """Digits: through the image set, the corruptions and the protocol; other batches, the same errors."""
    dataset = vm.data.load("digits", img_size=8, in_chans=1, augment=vm.recipes.digits().augment, limit_train=300)
    model = vm.vit("mu/4", img_size=8, in_chans=1, num_classes=10)
    options = Options(corruptions=("gaussian_noise", "contrast", "pixelate"), severities=(1, 5))
    how = {"split": "val", "device": torch.device("cpu"), "options": options}
    found = [run_protocols(model, dataset, ["corruptions"], batch_size=n, **how)["corruptions"] for n in (1, 200, 33)]
    assert found[0] == found[1] == found[2]
    assert found[0].detail["images"] == len(dataset.splits["val"])
    assert set(found[0].detail["errors"]) == {"gaussian_noise", "contrast", "pixelate"}
