"""Segmentation of whole images by windows, at several sizes: the inference of Segmenter.

Strudel et al., "Segmenter: Transformer for Semantic Segmentation", ICCV 2021, arXiv:2105.05633, and its code: logits of
windows are averaged where they overlap, resized to the image's own size by bilinear interpolation, mirrored back and
put through a softmax; probabilities are averaged over sizes and mirror images.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Size = tuple[int, int]


@dataclass(frozen=True)
class Windows:
    """How images are cut for a model: size and stride (rows, columns) of the windows, sizes of the image (parts of the
    one that is given), and whether mirror images are averaged over too."""

    size: Size
    stride: Size
    scales: tuple[float, ...] = (1.0,)
    flip: bool = False

    def probabilities(
        self, model: Callable[[Tensor], Tensor], images: Sequence[Tensor], sizes: Sequence[Size], at_once: int
    ) -> list[Tensor]:
        """Of each image (C, h, w) the classes' probabilities (K, *size).

        Args:
            model: windows (B, C, H, W) to logits (B, K, H, W).
            images: normalized, of any size; what is smaller than a window is enlarged.
            sizes: height and width of each result.
            at_once: windows that the model sees at a time.
        """
        found = [torch.zeros(())] * len(images)
        variants = [(scale, flip) for scale in self.scales for flip in ((False, True) if self.flip else (False,))]
        for scale, flip in variants:
            inputs = [self._variant(image, scale, flip) for image in images]
            for i, logits in enumerate(self._logits(model, inputs, at_once)):
                own = _resized(logits, sizes[i])
                found[i] = found[i].to(own) + (own.flip(-1) if flip else own).softmax(dim=0)
        return [total / len(variants) for total in found]

    def _variant(self, image: Tensor, scale: float, flip: bool) -> Tensor:
        """The image at another size, never smaller than a window."""
        if scale != 1:
            image = _resized(image, tuple(max(1, int(side * scale + 0.5)) for side in image.shape[-2:]))
        missing = max(window / side for window, side in zip(self.size, image.shape[-2:], strict=True))
        if missing > 1:
            sides = zip(self.size, image.shape[-2:], strict=True)
            image = _resized(image, tuple(max(window, int(side * missing + 1e-6)) for window, side in sides))
        return image.flip(-1) if flip else image

    def _logits(self, model: Callable[[Tensor], Tensor], images: Sequence[Tensor], at_once: int) -> Iterator[Tensor]:
        """Of each image (C, h, w) the logits (K, h, w), averaged over windows."""
        boxes = [
            (i, top, left)
            for i, image in enumerate(images)
            for top in _corners(image.shape[-2], self.size[0], self.stride[0])
            for left in _corners(image.shape[-1], self.size[1], self.stride[1])
        ]
        height, width = self.size
        cut = [images[i][:, top : top + height, left : left + width] for i, top, left in boxes]
        parts = [model(torch.stack(cut[start : start + at_once])).float() for start in range(0, len(cut), at_once)]
        windows = torch.cat(parts)
        for i, image in enumerate(images):
            total = windows.new_zeros(windows.shape[1], *image.shape[-2:])
            count = windows.new_zeros(image.shape[-2:])
            for (owner, top, left), window in zip(boxes, windows, strict=True):
                if owner == i:
                    total[:, top : top + height, left : left + width] += window
                    count[top : top + height, left : left + width] += 1
            yield total / count


def _resized(image: Tensor, size: tuple[int, ...]) -> Tensor:
    return F.interpolate(image[None], size, mode="bilinear", align_corners=False)[0]


def _corners(length: int, window: int, stride: int) -> list[int]:
    """Where windows begin along a side: one every `stride`, and the last at the end."""
    return [*range(0, max(length - window, 0), stride), length - window]
