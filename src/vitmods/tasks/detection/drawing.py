"""Objects drawn into an image."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vitmods.tasks.drawing import palette


def with_objects(
    image: NDArray[np.uint8],
    boxes: NDArray[np.floating],
    labels: NDArray[np.int64],
    names: Sequence[str] | None = None,
    masks: NDArray[np.bool_] | None = None,
) -> NDArray[np.uint8]:
    """A copy of an image (H, W, 3) with n boxes (n, 4), names beside them, and masks (n, H, W), by color of class."""
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

    drawn = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)).copy())
    if not len(labels):
        return image.copy()
    every = palette(int(labels.max()) + 1).tolist()
    colors = [tuple(every[int(label)]) for label in labels]
    if masks is not None:
        drawn = draw_segmentation_masks(drawn, torch.from_numpy(masks), alpha=0.4, colors=colors)
    width = max(1, round(min(image.shape[:2]) / 150))
    ends = torch.from_numpy(np.asarray(boxes, dtype=np.float32))
    drawn = draw_bounding_boxes(drawn, ends, labels=list(names) if names else None, colors=colors, width=width)
    pixels: NDArray[np.uint8] = drawn.permute(1, 2, 0).contiguous().numpy()
    return pixels
