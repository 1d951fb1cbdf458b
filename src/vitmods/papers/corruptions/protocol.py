"""Accuracy on corrupted images: Hendrycks and Dietterich, 2019, arXiv:1903.12261 (ImageNet-C), on any images.

Two numbers, which are not comparable with one another: the mean error over all corruptions and severities, and mCE, in
which each corruption's error is divided by AlexNet's on ImageNet-C. mCE weighs corruptions as that paper does on any
images, but its values compare with published ones only on ImageNet-C.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitmods.evals.base import ProtocolResult, means_of, protocol
from vitmods.evals.options import SEVERITIES, Options
from vitmods.evals.outputs import ModelOutputs
from vitmods.papers.corruptions import check_corruptions, corrupt
from vitmods.tasks.metrics import Metric
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.data import ImageDataset

ALEXNET = {
    "gaussian_noise": 0.886428, "shot_noise": 0.894468, "impulse_noise": 0.922640, "defocus_blur": 0.819880,
    "glass_blur": 0.826268, "motion_blur": 0.785948, "zoom_blur": 0.798360, "snow": 0.866816, "frost": 0.826572,
    "fog": 0.819324, "brightness": 0.564592, "contrast": 0.853204, "elastic_transform": 0.646056, "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}  # fmt: skip
"""AlexNet's error on ImageNet-C, mean over the five severities."""
_SEED = 0


def check(dataset: "ImageDataset", split: str, options: Options) -> None:
    """Raise UserError for a corruption that is unknown or that such images cannot have, or frost without textures."""
    if not hasattr(dataset, "img_size"):
        raise UserError(f"Corruptions need images, and {dataset.name} has none.")
    names = options.corruptions or tuple(ALEXNET)
    check_corruptions(names, textures=options.textures)
    blank, index = torch.zeros(1, dataset.in_chans, *dataset.img_size, dtype=torch.uint8), torch.zeros(1).long()
    for name in names:
        corrupt(blank, name, options.severities[0], seed=_SEED, index=index, textures=options.textures)


def is_complete(options: Options) -> bool:
    """Whether mCE is defined: all of ImageNet-C's corruptions at all severities."""
    return set(options.corruptions or ALEXNET) >= set(ALEXNET) and set(options.severities) == set(SEVERITIES)


def check_metric(metric: str, options: Options) -> None:
    """Raise UserError if the metric is mCE and the options leave it undefined."""
    if metric == "mce" and not is_complete(options):
        raise UserError(
            "mCE needs all 15 corruptions of ImageNet-C at all 5 severities: leave --corruptions and --severities out, "
            "or ask for mean_corruption_error."
        )


@protocol(
    "corruptions",
    "error under corruption",
    (
        Metric("mean_corruption_error", "mean error on corrupted images", "corruptions", higher_is_better=False),
        Metric("corruption_increase", "increase of the error by corruption", "corruptions", higher_is_better=False),
        Metric("mce", "mCE (relative to AlexNet on ImageNet-C)", "corruptions", higher_is_better=False),
    ),
    check=check,
    options=("corruptions", "severities", "textures"),
    check_metric=check_metric,
)
def corruption_error(outputs: ModelOutputs, corrupt: Callable[..., Tensor] = corrupt) -> ProtocolResult:
    """The error at every corruption and severity, its mean, the increase over the clean error, and mCE.

    mCE needs all of ImageNet-C's corruptions at all severities, and is left out without them; others are not part of
    it. Intervals are over images: an image counts once, with the mean over all its corrupted forms.
    """
    names = outputs.options.corruptions or tuple(ALEXNET)
    clean = (outputs.logits.argmax(dim=1) != outputs.targets).numpy().astype(np.float64)
    wrong = {name: _wrong(outputs, name, corrupt) for name in outputs.progress(names, len(names), "corruptions")}
    mean = np.mean([rows.mean(axis=0) for rows in wrong.values()], axis=0)
    by_image = {"mean_corruption_error": mean, "corruption_increase": mean - clean}
    if is_complete(outputs.options):
        by_image["mce"] = np.mean([wrong[name].mean(axis=0) / error for name, error in ALEXNET.items()], axis=0)
    errors = {name: rows.mean(axis=1).tolist() for name, rows in wrong.items()}
    means = {name: float(np.mean(values)) for name, values in errors.items()}
    return means_of(
        by_image,
        {},
        images=len(outputs.targets),
        clean_error=float(clean.mean()),
        severities=list(outputs.options.severities),
        errors=errors,
        mean_errors=means,
        ratio_to_alexnet={name: means[name] / error for name, error in ALEXNET.items() if name in means},
    )


def _wrong(outputs: ModelOutputs, name: str, corrupt: Callable[..., Tensor]) -> NDArray[np.float64]:
    """1 where a corrupted image is taken for another class, else 0: (severities, n), in one pass over the images."""
    options = outputs.options

    def change(images: Tensor, index: Tensor) -> Tensor:
        settings = {"seed": _SEED, "index": index, "textures": options.textures}
        return torch.cat([corrupt(images, name, severity, **settings) for severity in options.severities])

    columns = []
    for batch in outputs.dataset.eval_batches(outputs.split, outputs.batch_size, change=change):
        predicted = outputs.predicted(batch.inputs).reshape(len(options.severities), -1)
        columns.append(predicted != batch.targets)
    return torch.cat(columns, dim=1).double().numpy()
