"""Detection: a box and a class for each object, and instance segmentation, a mask too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.data.batch import Batch
from vitmods.data.dataset import Joint, JointView
from vitmods.recipes import Augment, Recipe
from vitmods.tasks.base import TASKS, Example, Measured, Predicted, Splits, Task, noise
from vitmods.tasks.detection.metrics import NAMES, AveragePrecision, image_ap50
from vitmods.tasks.detection.objects import (
    Objects,
    coco_masks,
    drawn,
    evaluation_views,
    training_views,
)
from vitmods.tasks.detection.recipes import DetectionPart
from vitmods.tasks.drawing import legend, palette, pixels_of
from vitmods.tasks.metrics import Metric
from vitmods.util.errors import UserError
from vitmods.util.files import make_folder, write_json

if TYPE_CHECKING:  # torchvision's models, which studies of other tasks do without
    from vitmods.tasks.detection.heads import Detector, Found


def with_objects(
    image: NDArray[np.uint8],
    boxes: NDArray[np.floating],
    labels: NDArray[np.int64],
    names: Sequence[str] | None = None,
    masks: NDArray[np.bool_] | None = None,
) -> NDArray[np.uint8]:
    """Draw n boxes (n, 4), their names and masks (n, H, W) into a copy of an image (H, W, 3), by color of class."""
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

    drawn = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)).copy())
    if not len(labels):
        return image.copy()
    class_colors = palette(int(labels.max()) + 1).tolist()
    colors = [tuple(class_colors[int(label)]) for label in labels]
    if masks is not None:
        drawn = draw_segmentation_masks(drawn, torch.from_numpy(masks), alpha=0.4, colors=colors)
    width = max(1, round(min(image.shape[:2]) / 150))
    ends = torch.from_numpy(np.asarray(boxes, dtype=np.float32))
    drawn = draw_bounding_boxes(drawn, ends, labels=list(names) if names else None, colors=colors, width=width)
    return drawn.permute(1, 2, 0).contiguous().numpy()


SHOWN = 4  # images that are drawn in an evaluation
SURE = 0.3  # the score from which a detection is drawn and predicted
OBJECTS = 8  # in an image of noise
_TITLES = {name: name.replace("ap", "AP", 1).replace("_", " ") for name in NAMES}
BOXES = tuple(Metric(name, f"box {title}", "") for name, title in _TITLES.items())
MASKS = tuple(Metric(f"mask_{name}", f"mask {title}", "") for name, title in _TITLES.items())
OF_IMAGES = Metric("image_ap50", "AP50 of single images", "")


def group_norm(channels: int) -> nn.Module:
    """GroupNorm of 32 groups, or fewer with at least four channels each (Wu and He, arXiv:1803.08494)."""
    return nn.GroupNorm(math.gcd(32, max(1, channels // 4)), channels)


@TASKS.register("detection")
@dataclass(frozen=True)
class Detection(Task):
    """The losses of RetinaNet, summed; evaluated by COCO's average precision of boxes."""

    name = "detection"
    title = "boxes around objects, with their classes"
    target = "boxes"
    metrics: ClassVar[tuple[Metric, ...]] = (*BOXES, OF_IMAGES)
    hub_tag = "object-detection"
    uses_head = False
    divides = same_shapes = False
    usual_recipe = "small_detection"
    recipe_part = DetectionPart
    unread = (
        "crop", "crop_scale", "crop_ratio", "randaugment", "randaugment_space", "randaugment_noise",
        "erasing", "mixup", "cutmix", "eval_crop", "loss", "label_smoothing", "patch_drop", "head_bias",
    )  # fmt: skip
    masks: ClassVar[bool] = False

    fpn_channels: int = 64
    norm: Callable[[int], nn.Module] | None = group_norm
    augment: Augment = field(default_factory=Augment)

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Self:
        """With the recipe's pyramid and norms."""
        part = recipe.part(DetectionPart)
        return cls(part.fpn_channels, group_norm if part.detector_norm == "group" else None, recipe.augment)

    @property
    def joint(self) -> Joint:
        """Images with their boxes, and masks, flipped alike."""
        return partial(training_views, masks=self.masks)

    @property
    def joint_view(self) -> JointView:
        """Images with their boxes, and masks, not flipped."""
        return partial(evaluation_views, masks=self.masks)

    @classmethod
    def constant_scores(cls, splits: Splits, classes: int) -> dict[str, float]:
        """0 for average precisions, as constant boxes find nothing; for single images the share without an object."""
        objects = [not annotated.crowd.all() for split in splits for annotated in split.annotations or ()]
        bare = {"image_ap50": 1 - sum(objects) / len(objects)} if objects else {}
        return {**{metric.name: 0.0 for metric in cls.metrics}, **bare}

    def wrap(self, backbone: nn.Module, classes: int) -> Detector:
        """The backbone, which from now on takes images of any size if it is a vitmods ViT, with pyramid and heads."""
        from vitmods.tasks.detection.heads import MaskRCNNDetector, RetinaNetDetector

        if hasattr(backbone, "vit_config"):
            backbone.set_input_size(dynamic_img_size=True)  # type: ignore[operator]
        detector = MaskRCNNDetector if self.masks else RetinaNetDetector
        return detector(backbone, classes, self.fpn_channels, self.norm)

    def loss(self, model: Callable[..., Any], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the heads' losses, each of which is logged."""
        losses: dict[str, Tensor] = model(batch.inputs, batch.targets)
        return torch.stack(list(losses.values())).sum(), {name: part.detach() for name, part in losses.items()}

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> Measured:
        """Average precisions and the mean loss, in pixels of the images in their files. Per image: image_ap50, the
        numbers of its objects and of its detections with a score of 0.3 or more, and the jackknife forms of the boxes'
        `ap`, `ap50` and `ap75`.

        Sizes (`ap_small`, ...) without objects are left out; without any object `ap`, `ap50` and `ap75` are 0. In
        detail `ap` of each class, and `mask_ap`. model: a `Detector` in evaluation mode, on the device of the batches.
        Raises UserError without images, or without torchmetrics.
        """
        from vitmods.tasks.detection.heads import Detector

        assert isinstance(model, Detector)
        precision, losses, weights = AveragePrecision(self.masks), [], []
        columns: dict[str, list[float]] = {"image_ap50": [], "objects": [], "detections": []}
        examples: list[Example] = []
        for batch in batches:
            parts, detections = model.measure(batch.inputs, batch.targets)
            losses.append(float(torch.stack(list(parts.values())).sum()))
            weights.append(len(batch))
            for i, (detected, target) in enumerate(zip(_on_cpu(detections), batch.targets, strict=True)):
                precision.add(detected, target["truth"])
                columns["image_ap50"].append(image_ap50(detected, target["truth"]))
                columns["objects"].append(int((~target["truth"].crowd).sum()))
                columns["detections"].append(int((detected["scores"] >= SURE).sum()))
                if len(examples) < SHOWN:
                    examples.append(self._example(int(batch.index[i]), batch.inputs[i].cpu(), detected, target))
        if not losses:
            raise UserError("The split that is to be evaluated is empty.")
        per_image = {**{name: np.array(column) for name, column in columns.items()}, **precision.of_images()}
        images = sum(weights)
        metrics = {**precision.result(), "image_ap50": math.fsum(columns["image_ap50"]) / images}
        loss = math.fsum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / images
        detail = precision.of_classes(model.classes)
        return Measured({**metrics, "loss": loss}, per_image, tuple(examples), detail)

    def _example(self, index: int, image: Tensor, detected: dict[str, Tensor], target: dict[str, Any]) -> Example:
        """The view of the model: boxes are moved from the file's pixels to the view's."""
        height, width = target["size"]
        view = pixels_of(image[:, :height, :width], self.augment.mean, self.augment.std)
        scale = np.array([width, height, width, height]) / np.array([*target["native"][::-1], *target["native"][::-1]])
        sure = detected["scores"] >= SURE
        boxes, labels = detected["boxes"][sure].numpy() * scale, detected["labels"][sure].numpy()
        annotated = target["boxes"].cpu().numpy(), target["labels"].cpu().numpy()
        drawn: list[NDArray[np.bool_] | None] = [None, None]
        if self.masks:
            chosen = detected["masks"][sure]
            moved = F.interpolate(chosen[None].float(), (height, width))[0] > 0 if len(chosen) else chosen
            drawn = [target["masks"].cpu()[:, :height, :width].bool().numpy(), moved.numpy()]
        panels = {
            "image": view,
            "annotation": with_objects(view, *annotated, masks=drawn[0]),
            "prediction": with_objects(view, boxes, labels, masks=drawn[1]),
        }
        return Example(index, panels)

    def synthetic(self, count: int, shape: tuple[int, int, int], classes: int, recipe: Recipe) -> Batch:
        """Eight objects an image, of all sizes."""
        size = (shape[1], shape[2])
        ends = torch.tensor([(i + 1) / OBJECTS for i in range(OBJECTS)])
        boxes = torch.stack([0 * ends, 0 * ends, ends * size[1], ends * size[0]], dim=1)
        labels = torch.arange(OBJECTS) % classes
        target: dict[str, Any] = {"boxes": boxes, "labels": labels, "size": size, "native": size}
        if self.masks:
            rows, columns = torch.arange(size[0])[None, :, None], torch.arange(size[1])[None, None]
            target["masks"] = ((rows < boxes[:, 3, None, None]) & (columns < boxes[:, 2, None, None])).to(torch.uint8)
        return Batch(noise(count, shape), [dict(target) for _ in range(count)], torch.arange(count))

    def outputs(self, model: nn.Module, batch: Batch) -> Found:
        """Detections in pixels of the images in their files."""
        from vitmods.tasks.detection.heads import Detector

        assert isinstance(model, Detector)
        return _on_cpu(model.detect(batch.inputs, batch.targets))

    def predictions(self, outputs: Found, classes: tuple[str, ...], top: int = 5) -> list[dict[str, Any]]:
        """Return for each image `predicted`, the classes of its detections with a score of 0.3 or more, the surest
        first; `probabilities`, the highest score of each of the `top` classes; and `objects`: class, score, box (left,
        top, right, bottom in pixels) and perhaps mask (COCO's run lengths), of all detections."""
        rows = []
        for detected in outputs:
            scores, order = detected["scores"].sort(descending=True, stable=True)
            objects: list[dict[str, Any]] = []
            best: dict[str, float] = {}
            for i, score in zip(order.tolist(), scores.tolist(), strict=True):
                box = [round(value, 2) for value in detected["boxes"][i].tolist()]
                objects.append({"class": classes[int(detected["labels"][i])], "score": score, "box": box})
                best.setdefault(objects[-1]["class"], score)
                if "masks" in detected:
                    runs = coco_masks().encode(np.asfortranarray(detected["masks"][i].numpy().astype(np.uint8)))
                    counts = runs["counts"]
                    counts = counts.decode() if isinstance(counts, bytes) else counts
                    objects[-1]["mask"] = {"size": list(runs["size"]), "counts": counts}
            predicted = [name for name, score in best.items() if score >= SURE]
            row = {"predicted": predicted, "probabilities": dict(list(best.items())[:top]), "objects": objects}
            rows.append(row)
        return rows

    def annotate(self, out: Path, images: Sequence[Predicted], classes: tuple[str, ...]) -> None:
        """Write a JSON file in COCO's format, whose annotations have a `score`: COCO's results are this list. Images
        have the number that is their file's name, as COCO's have, or else are numbered from 1."""
        stems = [image.path.stem for image in images]
        numbered = all(stem.isascii() and stem.isdecimal() for stem in stems) and len({*map(int, stems)}) == len(stems)
        numbers = [int(stem) for stem in stems] if numbered else range(1, len(stems) + 1)
        annotations: list[dict[str, Any]] = []
        for number, image in zip(numbers, images, strict=True):
            for detection in image.prediction["objects"]:
                x, y, xmax, ymax = detection["box"]
                width, height = round(xmax - x, 2), round(ymax - y, 2)
                annotation = {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "score": detection["score"],
                    "category_id": classes.index(detection["class"]) + 1,
                    "bbox": [x, y, width, height],
                    "area": width * height,
                    "iscrowd": 0,
                }
                annotations.append(annotation | ({"segmentation": detection["mask"]} if "mask" in detection else {}))
        listed = [
            {"id": number, "file_name": image.path.name, "height": image.size[0], "width": image.size[1]}
            for number, image in zip(numbers, images, strict=True)
        ]
        categories = [{"id": i, "name": name} for i, name in enumerate(classes, 1)]
        make_folder(out.parent)
        write_json(out, {"images": listed, "categories": categories, "annotations": annotations})

    def legend(self, classes: tuple[str, ...]) -> dict[str, str]:
        """The palette's."""
        return legend(classes)

    def draw(self, image: NDArray[np.uint8], shown: Any, classes: tuple[str, ...]) -> NDArray[np.uint8]:
        """Boxes with class and score, and masks, of what `predictions` is sure of, or of an annotation."""
        if isinstance(shown, Objects):
            annotated = shown.at((image.shape[0], image.shape[1]))
            names = [classes[label] for label in annotated.labels]
            masks = annotated.masks() if self.masks and annotated.segments is not None else None
            return with_objects(image, annotated.boxes, annotated.labels, names, masks)
        sure = [detected for detected in shown["objects"] if detected["score"] >= SURE]
        labels = np.array([classes.index(detected["class"]) for detected in sure], dtype=np.int64)
        boxes = np.array([detected["box"] for detected in sure], dtype=np.float32).reshape(-1, 4)
        names = [f"{detected['class']} {detected['score']:.2f}" for detected in sure]
        runs = [detected["mask"] for detected in sure] if self.masks else []
        masks = np.stack([drawn(run, tuple(run["size"])) for run in runs]) if runs else None
        return with_objects(image, boxes, labels, names, masks)


@TASKS.register("instance_segmentation")
@dataclass(frozen=True)
class InstanceSegmentation(Detection):
    """The losses of Mask R-CNN, summed; evaluated by COCO's average precision of boxes and of masks."""

    name = "instance_segmentation"
    title = "a mask for each object, with box and class"
    hub_tag = "image-segmentation"
    target = "instances"
    metrics: ClassVar[tuple[Metric, ...]] = (*BOXES, *MASKS, OF_IMAGES)
    masks: ClassVar[bool] = True


def _on_cpu(detections: Found) -> Found:
    return [{name: value.cpu() for name, value in detected.items()} for detected in detections]
