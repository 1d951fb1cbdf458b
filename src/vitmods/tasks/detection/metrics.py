"""How good detections are: COCO's average precisions over all images, and a score of each image."""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitmods.stats.images import jackknife, precision
from vitmods.tasks.detection.objects import Objects
from vitmods.util.errors import needs

NAMES = {
    "ap": "map",
    "ap50": "map_50",
    "ap75": "map_75",
    "ap_small": "map_small",
    "ap_medium": "map_medium",
    "ap_large": "map_large",
}
"""ours -> torchmetrics'"""
OVERLAPS, RECALLS = np.linspace(0.5, 0.95, 10).tolist(), np.linspace(0, 1, 101).tolist()
"""COCO's, in double precision: torchmetrics' own are float32, where a recall of 0.6 falls short of the threshold 0.6"""


class AveragePrecision:
    """COCO's average precision of boxes, and of masks, by torchmetrics: the mean over classes and, for `ap`, over ten
    overlaps from 0.5 to 0.95.

    Crowds are not counted. A size without objects is left out. Without any object all are 0.
    """

    def __init__(self, masks: bool) -> None:
        with needs("Average precision of boxes needs torchmetrics and faster-coco-eval", "tasks"):
            from torchmetrics.detection import MeanAveragePrecision

            kinds: Any = ("bbox", "segm") if masks else "bbox"
            self._metric = MeanAveragePrecision(
                "xyxy", kinds, OVERLAPS, RECALLS, class_metrics=True, backend="faster_coco_eval"
            )
        self._metric.warn_on_many_detections = False
        self._masks, self._objects = masks, 0
        self._rated: list[tuple[NDArray[Any], ...]] = []

    def add(self, predicted: dict[str, Tensor], truth: Objects) -> None:
        """One image: boxes, labels, scores and perhaps masks on the CPU, in pixels of the image in its file."""
        wanted = {
            "boxes": torch.from_numpy(truth.boxes),
            "labels": torch.from_numpy(truth.labels),
            "iscrowd": torch.from_numpy(truth.crowd).long(),
            "area": torch.from_numpy(truth.area),
        }
        wanted |= {"masks": torch.from_numpy(truth.masks())} if self._masks else {}
        self._metric.update([predicted], [wanted])
        self._objects += int((~truth.crowd).sum())
        scores, order = predicted["scores"].sort(descending=True, stable=True)
        boxes, labels = predicted["boxes"][order], predicted["labels"][order].numpy()
        self._rated.append((scores.numpy(), labels, _right(boxes, labels, truth), truth.labels[~truth.crowd]))

    def result(self) -> dict[str, float]:
        """Return the results by name; those of masks start with `mask_`."""
        values = self._values
        metrics = {
            f"{prefix}{name}": float(values.get(f"{their_prefix}{theirs_name}", 0.0))
            for prefix, their_prefix in self._kinds.items()
            for name, theirs_name in NAMES.items()
            if self._objects or not name.endswith(("small", "medium", "large"))
        }
        return {name: value for name, value in metrics.items() if value >= 0}

    def of_classes(self, classes: int) -> dict[str, list[float | None]]:
        """`ap`, and of masks `mask_ap`, of each class; None of one without an object."""
        labels, metrics = np.atleast_1d(self._values.get("classes", np.zeros(0))).tolist(), {}
        for prefix, their_prefix in self._kinds.items():
            values = np.atleast_1d(self._values.get(f"{their_prefix}map_per_class", np.zeros(0))).tolist()
            by_class = {int(k): value for k, value in zip(labels, values, strict=True) if value >= 0}
            metrics[f"{prefix}ap"] = [by_class.get(k) for k in range(classes)]
        return metrics

    def of_images(self) -> dict[str, NDArray[np.float64]]:
        """The jackknife forms (n,) of `ap`, `ap50` and `ap75` of boxes; empty without any object."""
        if not self._objects:
            return {}
        scores, labels, right, wanted = (np.concatenate(part, axis=-1) for part in zip(*self._rated, strict=True))
        owner, holder = (np.repeat(np.arange(len(self._rated)), [len(row[i]) for row in self._rated]) for i in (0, 3))
        classes, changes = np.unique(wanted), np.zeros((len(OVERLAPS), len(self._rated)))
        for k in classes:
            objects = np.bincount(holder[wanted == k], minlength=len(self._rated))
            for row, rated in zip(changes, right, strict=True):
                counted = (labels == k) & (rated != 0)
                precisions = precision(scores[counted], rated[counted] > 0, owner[counted], objects, interpolated=True)
                row += precisions[1] / len(classes)
        values = self.result()
        rows = {"ap": changes.mean(0), "ap50": changes[0], "ap75": changes[5]}
        return {name: jackknife(values[name], row) for name, row in rows.items()}

    @cached_property
    def _values(self) -> dict[str, Any]:
        """The results of torchmetrics, once all images are added."""
        return self._metric.compute() if self._objects else {}

    @property
    def _kinds(self) -> dict[str, str]:
        """Map the beginnings of our names to those of torchmetrics."""
        return {"": "bbox_", "mask_": "segm_"} if self._masks else {"": ""}


def image_ap50(predicted: dict[str, Tensor], truth: Objects) -> float:
    """Average precision of one image, its detections of all classes in one ranking by score.

    A detection is right where it overlaps an object of its class, which none before it was right about, by 0.5 or more
    (intersection over union). Those that lie by half or more in a crowd of their class are not counted. The mean over
    the image's objects of the best precision at which so many of them are found; of an image without objects 1 minus
    the highest score.
    """
    scores, order = predicted["scores"].sort(descending=True, stable=True)
    boxes, labels = predicted["boxes"][order], predicted["labels"][order].numpy()
    objects = int((~truth.crowd).sum())
    right = _right(boxes, labels, truth)[0]
    counted = right != 0
    if not objects:
        return 1.0 - (float(scores[torch.from_numpy(counted)].max()) if counted.any() else 0.0)
    hits = right[counted] > 0
    precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    best = np.maximum.accumulate(precision[::-1])[::-1]
    return float(best[hits].sum() / objects)


def _right(boxes: Tensor, labels: NDArray[np.int64], truth: Objects) -> NDArray[np.int8]:
    """Rate each detection, the likeliest first, by each overlap (10, d): 1 right, -1 wrong, 0 not counted."""
    from torchvision.ops import box_iou  # seconds

    objects = torch.from_numpy(truth.boxes)
    same_class = labels[:, None] == truth.labels[None]
    overlap = box_iou(boxes, objects).numpy() * same_class
    # The fraction of each box that lies in each object.
    corner, end = (
        torch.max(boxes[:, None, :2], objects[None, :, :2]),
        torch.min(boxes[:, None, 2:], objects[None, :, 2:]),
    )
    area = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1).clamp(min=1e-9)
    inside = ((end - corner).clamp(min=0).prod(dim=2) / area[:, None]).numpy() * same_class
    least, rows = np.array(OVERLAPS), np.arange(len(OVERLAPS))
    free = np.tile(~truth.crowd, (len(rows), 1))
    right = np.full((len(rows), len(labels)), -1, dtype=np.int8)
    for i in range(len(labels) if len(truth.crowd) else 0):
        able = np.where(free, overlap[i], 0.0)
        is_right, in_crowd = able.max(1) >= least, inside[i][truth.crowd].max(initial=0.0) >= least
        right[:, i] = np.where(is_right, 1, np.where(in_crowd, 0, -1))
        free[rows[is_right], able.argmax(1)[is_right]] = False
    return right
