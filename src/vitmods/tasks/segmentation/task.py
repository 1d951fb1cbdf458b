"""Semantic segmentation: the class of every pixel, by a linear decoder on patch tokens.

Strudel et al., "Segmenter: Transformer for Semantic Segmentation", ICCV 2021, arXiv:2105.05633 (Seg-*/Linear); Dual
PatchNorm (arXiv:2302.01327, section 6.3) trains it on ADE20K. Inference is that of Segmenter's code: logits of windows
are averaged where they overlap, resized to the image's own size by bilinear interpolation, mirrored back and put
through a softmax; probabilities are averaged over sizes and mirror images.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from vitmods.data.batch import Batch
from vitmods.data.dataset import Joint
from vitmods.model.vit import ViT
from vitmods.recipes import Recipe
from vitmods.stats.images import mean_ratio
from vitmods.tasks.base import TASKS, Example, Measured, Predicted, Splits, Task, TaskModel, noise
from vitmods.tasks.drawing import legend, palette, pixels_of
from vitmods.tasks.features import feature_channels, feature_maps, feature_strides
from vitmods.tasks.metrics import Metric
from vitmods.tasks.segmentation.masks import IGNORE, MaskFile, evaluation_views, labelled_pixels, training_views
from vitmods.tasks.segmentation.recipes import SegmentationPart
from vitmods.util.errors import UserError
from vitmods.util.files import make_folder, write_atomically

Size = tuple[int, int]


@dataclass(frozen=True)
class Windows:
    """How images are cut for a model: size and stride (rows, columns) of the windows, sizes of the image relative to
    the input, and whether mirror images are averaged over too."""

    size: Size
    stride: Size
    scales: tuple[float, ...] = (1.0,)
    flip: bool = False

    def probabilities(
        self, model: Callable[[Tensor], Tensor], images: Sequence[Tensor], sizes: Sequence[Size], at_once: int
    ) -> list[Tensor]:
        """Return for each image (C, h, w) the probabilities of the classes (K, *size).

        Args:
            model: windows (B, C, H, W) to logits (B, K, H, W).
            images: normalized, of any size; an image smaller than a window is enlarged.
            sizes: height and width of each result.
            at_once: windows in a batch of the model.
        """
        totals = [torch.zeros(())] * len(images)
        variants = [(scale, flip) for scale in self.scales for flip in ((False, True) if self.flip else (False,))]
        for scale, flip in variants:
            inputs = []
            for image in images:
                if scale != 1:
                    image = _bilinear(image, [max(1, int(side * scale + 0.5)) for side in image.shape[-2:]])
                sides = list(zip(self.size, image.shape[-2:], strict=True))
                if (missing := max(window / side for window, side in sides)) > 1:
                    image = _bilinear(image, [max(window, int(side * missing + 1e-6)) for window, side in sides])
                inputs.append(image.flip(-1) if flip else image)
            for i, logits in enumerate(self._logits(model, inputs, at_once)):
                resized = _bilinear(logits, sizes[i])
                totals[i] = totals[i].to(resized) + (resized.flip(-1) if flip else resized).softmax(dim=0)
        return [total / len(variants) for total in totals]

    def _logits(self, model: Callable[[Tensor], Tensor], images: Sequence[Tensor], at_once: int) -> Iterator[Tensor]:
        """Yield for each image (C, h, w) the logits (K, h, w), averaged over windows."""
        boxes = []
        for i, image in enumerate(images):
            tops, lefts = (
                [*range(0, max(length - window, 0), stride), length - window]  # the last window is at the end
                for length, window, stride in zip(image.shape[-2:], self.size, self.stride, strict=True)
            )
            boxes += [(i, (..., slice(y, y + self.size[0]), slice(x, x + self.size[1]))) for y in tops for x in lefts]
        cut = [images[i][box] for i, box in boxes]
        parts = [model(torch.stack(cut[start : start + at_once])).float() for start in range(0, len(cut), at_once)]
        windows = torch.cat(parts)
        for i, image in enumerate(images):
            total = windows.new_zeros(windows.shape[1], *image.shape[-2:])
            count = windows.new_zeros(image.shape[-2:])
            for (owner, box), window in zip(boxes, windows, strict=True):
                if owner == i:
                    total[box] += window
                    count[box] += 1
            yield total / count


def _bilinear(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Maps (C, h, w) or (B, C, h, w) resized to `size`, corners not aligned."""
    batch = maps if maps.ndim == 4 else maps[None]
    resized = F.interpolate(batch, tuple(size), mode="bilinear", align_corners=False)
    return resized if maps.ndim == 4 else resized[0]


EXAMPLES = 4  # evaluated images that are drawn, evenly spread
OPAQUE = 0.6  # opacity of the colors over an image


class LinearDecoder(nn.Module):
    """Feature maps (B, C_i, h_i, w_i), fine to coarse -> logits (B, K, h_1, w_1): one linear layer on all channels of a
    position; coarser maps are interpolated.

    For a plain ViT it is Segmenter's DecoderLinear: one layer on each patch token. Each map of a pyramid goes through
    its part of the layer first, which gives the same, and K channels are interpolated.
    """

    def __init__(self, channels: list[int], classes: int) -> None:
        super().__init__()
        self.channels = channels
        self.head = nn.Linear(sum(channels), classes)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, maps: list[Tensor]) -> Tensor:
        size = maps[0].shape[-2:]
        total = self.head.bias[:, None, None]
        for features, weight in zip(maps, self.head.weight.split(self.channels, dim=1), strict=True):
            logits = torch.einsum("bchw,kc->bkhw", features, weight)
            total = total + (logits if logits.shape[-2:] == size else _bilinear(logits, size))
        return total


class Segmenter(TaskModel):
    """A backbone and a LinearDecoder: images (B, C, H, W) -> logits (B, K, H, W).

    Images are padded with 0 on the right and below to whole patches (whole strides of a pyramid's last map); logits are
    interpolated to the padded image (bilinear, corners not aligned), and what was padded is cut off. Class and register
    tokens are not decoded. A vitmods ViT takes images of any size: its positions are resampled.

    final_norm: whether patch tokens go through a plain ViT's final norm, as in Segmenter's code. Unused modules are
    frozen: that norm without it, and modules that pool for a head.
    """

    def __init__(self, backbone: nn.Module, classes: int, final_norm: bool = True) -> None:
        super().__init__(backbone)
        if isinstance(backbone, ViT) and not backbone.vit_config.dynamic_img_size:
            backbone.set_input_size(dynamic_img_size=True)
        self.decoder = LinearDecoder(feature_channels(backbone), classes)
        self.final_norm, self.stride = final_norm, max(feature_strides(backbone))
        for name in ("attn_pool", "fc_norm", "pre_logits", "head", *([] if final_norm else ["norm"])):
            if isinstance(module := getattr(backbone, name, None), nn.Module):
                module.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        padded = F.pad(images, (0, -width % self.stride, 0, -height % self.stride))
        logits = self.decoder(feature_maps(self.backbone, padded, self.final_norm))
        return _bilinear(logits, padded.shape[-2:])[..., :height, :width]


@TASKS.register("segmentation")
@dataclass(frozen=True)
class Segmentation(Task):
    """Mean cross-entropy over labelled pixels; evaluated by the mean over classes of intersection over union.

    Evaluation is Segmenter's: windows of the image size over the whole image, resized so that it just covers one, and
    results at the size of the mask in its file. Augmentation: `vitmods.tasks.segmentation.masks`.
    """

    name = "segmentation"
    title = "the class of every pixel"
    target = "mask"
    metrics = (
        Metric("miou", "mean IoU", ""),
        Metric("image_miou", "mean IoU of an image", ""),
        Metric("pixel_accuracy", "pixel accuracy", ""),
    )
    recipe_part = SegmentationPart
    hub_tag = "image-segmentation"
    uses_head = False
    usual_recipe = "small_segmentation"
    joint_view = staticmethod(evaluation_views)  # whole images, and masks as in their files
    unread = (
        "crop", "crop_scale", "crop_ratio", "randaugment", "randaugment_space", "randaugment_noise", "erasing",
        "mixup", "cutmix", "eval_crop", "loss", "patch_drop", "head_bias",
    )  # fmt: skip

    label_smoothing: float = 0.0
    part: SegmentationPart = field(default_factory=SegmentationPart)
    image_mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Self:
        """With the recipe's label smoothing, decoder and evaluation."""
        return cls(recipe.loss.label_smoothing, recipe.part(SegmentationPart), recipe.augment.mean, recipe.augment.std)

    @property
    def joint(self) -> Joint:
        """Images and masks cut alike."""
        return partial(training_views, self.part)

    def check_size(self, img_size: tuple[int, int]) -> None:
        """Raise UserError where windows would leave pixels between them unseen."""
        stride = self.part.window_stride
        if stride is not None and stride > min(img_size):
            raise UserError(
                f"window_stride={stride} leaves pixels between windows of {img_size[0]} x {img_size[1]} unseen: "
                f"give at most {min(img_size)} (--window-stride)."
            )

    @classmethod
    def constant_scores(cls, splits: Splits, classes: int) -> dict[str, float]:
        """By naming the best single class for every pixel."""
        masks = [mask for split in splits for mask in split.annotations or ()]
        if not masks:
            return {}
        pixels = np.zeros((len(masks), classes))
        for row, mask in zip(pixels, masks, strict=True):
            row[list(mask.classes)] = mask.pixels
        share, has = pixels / pixels.sum(1, keepdims=True), pixels > 0
        most = float(pixels.sum(0).max() / pixels.sum())
        return {
            "miou": most / int(has.any(0).sum()),
            "image_miou": float((share / has.sum(1, keepdims=True)).mean(0).max()),
            "pixel_accuracy": most,
        }

    def wrap(self, backbone: nn.Module, classes: int) -> Segmenter:
        """With a linear decoder. Raises UserError for a model without feature maps."""
        return Segmenter(backbone, classes, self.part.final_norm)

    def loss(self, model: Callable[[Tensor], Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean over the labelled pixels of the batch, and `pixel_accuracy`, the fraction of them that is right."""
        targets = batch.targets
        masks, pixels = targets if isinstance(targets, tuple) else (targets, labelled_pixels(targets))
        logits = model(batch.inputs).float()
        losses = F.cross_entropy(
            logits, masks, ignore_index=IGNORE, reduction="none", label_smoothing=self.label_smoothing
        )
        right = (logits.detach().argmax(dim=1) == masks).sum(dim=(1, 2))  # no class is IGNORE
        return (losses.sum(dim=(1, 2)) / pixels).mean(), {"pixel_accuracy": (right / pixels).mean()}

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> Measured:
        """The metrics over all labelled pixels, at the size of the masks in their files.

        `miou`: intersection over union of each class over all images; the mean over classes that occur or were
        predicted. `image_miou`: the same in each image over its classes, mean over images. `loss`: mean over pixels of
        the negative log-probability.

        Per image: its only predicted class (-1: several), `image_miou`, `pixel_accuracy` in the linear form of a
        ratio, A + (right - A pixels) / (mean pixels), whose mean over images is the accuracy A over pixels, and the
        jackknife form of `miou`. In `detail` the IoU of each class.

        model: a Segmenter in evaluation mode, on the device of the batches of `evaluation_views`. Raises UserError
        without images.
        """
        counts: list[Tensor] = []
        examples: list[Example] = []
        loss, pixels, apart = 0.0, 0, 1
        for batch in batches:
            probabilities = self._probabilities(model, batch)
            for i, (p, mask) in enumerate(zip(probabilities, batch.targets["mask"], strict=True)):
                labelled, predicted = mask != IGNORE, p.max(dim=0).indices
                of_truth = p.gather(0, mask.long().clamp(max=len(p) - 1)[None])[0][labelled]
                counts.append(counted(predicted[labelled], mask[labelled], len(p)))
                loss -= float(of_truth.clamp(min=1e-12).log().sum(dtype=torch.float64))
                pixels += len(of_truth)
                if (len(counts) - 1) % apart == 0:
                    examples.append(self._example(batch, i, predicted.to(torch.uint8)))
                if len(examples) == 2 * EXAMPLES:
                    examples, apart = examples[::2], 2 * apart
        if not counts:
            raise UserError("The split that is to be evaluated is empty.")
        chosen = sorted({round(i) for i in np.linspace(0, len(examples) - 1, EXAMPLES)})
        return measured(torch.stack(counts).cpu(), loss / max(pixels, 1), tuple(examples[i] for i in chosen))

    def synthetic(self, count: int, shape: tuple[int, int, int], classes: int, recipe: Recipe) -> Batch:
        """Classes in turn, a column each."""
        masks = (torch.arange(shape[2]) % classes).expand(count, *shape[1:]).contiguous()
        return Batch(noise(count, shape), masks, torch.arange(count))

    def outputs(self, model: nn.Module, batch: Batch) -> list[Tensor]:
        """The classes of each image, uint8 (native height, native width)."""
        return [p.max(dim=0).indices.to(torch.uint8).cpu() for p in self._probabilities(model, batch)]

    def predictions(self, outputs: list[Tensor], classes: tuple[str, ...], top: int = 5) -> list[dict[str, Any]]:
        """`predicted`: the classes that occur, the most frequent first; `pixels`: of the `top` most frequent the
        fractions of the image; `mask`: the classes, an array that `draw` takes."""
        rows = []
        for labels in outputs:
            fractions = torch.bincount(labels.flatten(), minlength=len(classes)) / labels.numel()
            order = [k for k in fractions.argsort(descending=True, stable=True).tolist() if fractions[k] > 0]
            named = {classes[k]: round(float(fractions[k]), 6) for k in order}
            row = {"predicted": list(named), "pixels": dict(list(named.items())[:top]), "mask": labels.numpy()}
            rows.append(row)
        return rows

    def draw(self, image: NDArray[np.uint8], shown: Any, classes: tuple[str, ...]) -> NDArray[np.uint8]:
        """The image with its classes in colors."""
        labels = shown.read() if isinstance(shown, MaskFile) else shown["mask"]
        return overlay(image, labels)

    def annotate(self, out: Path, images: Sequence[Predicted], classes: tuple[str, ...]) -> None:
        """Write a folder of masks: gray PNG files whose values are class numbers, and classes.txt with the names."""
        make_folder(out)
        for image in images:
            mask = Image.fromarray(image.prediction["mask"])
            write_atomically(out / f"{image.name}.png", partial(mask.save, format="PNG"))
        write_atomically(
            out / "classes.txt", lambda file: file.write("".join(f"{name}\n" for name in classes).encode())
        )

    def legend(self, classes: tuple[str, ...]) -> dict[str, str]:
        """The palette's."""
        return legend(classes)

    def _probabilities(self, model: nn.Module, batch: Batch) -> Iterator[Tensor]:
        """Yield for each image (K, native height, native width)."""
        sizes = batch.targets["size"].tolist()
        images = [image[:, :height, :width] for image, (height, width) in zip(batch.inputs, sizes, strict=True)]
        native = [(int(height), int(width)) for height, width in batch.targets["native"].tolist()]
        height, width = batch.targets["window"][0].tolist()
        side = self.part.window_stride
        stride = (side, side) if side else (max(1, height * 2 // 3), max(1, width * 2 // 3))
        windows = Windows((height, width), stride, self.part.eval_scales, self.part.eval_flip)
        yield from windows.probabilities(model, images, native, len(images))

    def _example(self, batch: Batch, i: int, predicted: Tensor) -> Example:
        """In the size that the model sees."""
        height, width = batch.targets["size"][i].tolist()
        image = pixels_of(batch.inputs[i, :, :height, :width], self.image_mean, self.std)
        drawn = {"image": image}
        for name, labels in (("annotation", batch.targets["mask"][i]), ("prediction", predicted)):
            small = F.interpolate(labels[None, None].cpu(), (height, width), mode="nearest-exact")[0, 0]
            drawn[name] = overlay(image, small.numpy())
        return Example(int(batch.index[i]), drawn)


def counted(predicted: Tensor, wanted: Tensor, classes: int) -> Tensor:
    """Count for each class the pixels (n,) that are right, predicted, and of the class: int64 (3, K)."""
    right = wanted[predicted == wanted]
    return torch.stack([part.bincount(minlength=classes) for part in (right, predicted, wanted)])


def measured(counts: Tensor, loss: float, examples: tuple[Example, ...] = ()) -> Measured:
    """The result of `Segmentation.evaluate` from the counts of each image, int64 (n, 3, K), and the mean loss."""
    right, predicted, wanted = counts.double().unbind(dim=1)
    iou = right.sum(dim=0) / (predicted + wanted - right).sum(dim=0)  # nan: neither there nor predicted
    has = wanted > 0
    of_image = torch.where(has, right / (predicted + wanted - right), 0.0).sum(dim=1) / has.sum(dim=1)
    # A ratio's linear form: its mean over images is the ratio, and its spread that of the ratio.
    overall, pixels = right.sum() / wanted.sum(), wanted.sum(dim=1)
    accuracy = overall + (right.sum(dim=1) - overall * pixels) / (wanted.sum() / len(wanted))
    metrics = {
        "miou": iou.nanmean().item(),
        "image_miou": of_image.mean().item(),
        "pixel_accuracy": overall.item(),
        "loss": loss,
    }
    miou = mean_ratio(right.numpy(), (predicted + wanted - right).numpy())
    single = torch.where((predicted > 0).sum(dim=1) == 1, predicted.argmax(dim=1), -1)
    detail = {"iou": [None if np.isnan(value) else value for value in iou.tolist()]}
    columns = {"image_miou": of_image.numpy(), "pixel_accuracy": accuracy.numpy(), "miou": miou}
    return Measured(metrics, {"predicted": single.numpy(), **columns}, examples, detail)


def overlay(image: NDArray[np.uint8], labels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The image (H, W, 3) under the colors of its classes (H, W), with dark lines between them; where the class is
    IGNORE it shows as it is."""
    colors = np.concatenate([palette(IGNORE), np.zeros((1, 3), np.uint8)])
    labeled = (labels != IGNORE)[..., None]
    drawn = np.where(labeled, (1 - OPAQUE) * image + OPAQUE * colors[labels], image)
    edge = np.zeros(labels.shape, dtype=bool)
    edge[:-1] |= labels[:-1] != labels[1:]
    edge[:, :-1] |= labels[:, :-1] != labels[:, 1:]
    return np.where(edge[..., None], 0.4 * drawn, drawn).astype(np.uint8)
