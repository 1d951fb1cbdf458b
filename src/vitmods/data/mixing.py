"""Mixup and CutMix of a whole batch. Partners and amount are a function of (seed, epoch, batch number)."""

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from vitmods.data.boxes import cutmix_box
from vitmods.data.rng import Stream, uniform


def mix(
    images: Tensor, labels: Tensor, classes: int, *, mixup: float, cutmix: float, seed: int, epoch: int, batch: int
) -> tuple[Tensor, Tensor]:
    """Mix each image with its predecessor in the batch, whose order is random already.

    images (B, C, H, W) float and labels (B,), or float (B, K) of several labels each -> images and targets (B, K). mixup and cutmix are the
    alphas of the Beta(alpha, alpha) that says how much of each image stays; 0 is off; with both on, each batch takes
    one or the other with equal chance. Mixup: Zhang et al., ICLR 2018. CutMix: Yun et al., ICCV 2019. With one image
    in the batch there is no partner and only the targets change their form.
    """

    def draw(stream: Stream) -> float:
        return float(uniform(seed, stream, epoch, batch))

    targets = labels if labels.is_floating_point() else one_hot(labels, classes).float()
    use_cutmix = cutmix > 0 and (mixup == 0 or draw(Stream.MIX_KIND) < 0.5)
    kept = _beta(cutmix if use_cutmix else mixup, draw(Stream.MIX_LAMBDA))
    if use_cutmix:
        images, kept = cut_in(images, kept, (draw(Stream.MIX_TOP), draw(Stream.MIX_LEFT)))
    else:
        # As in big_vision the larger share is the image's own. The order of a batch is random, and exchanging the
        # shares exchanges an image with its successor: the mixed images of a batch are distributed as without this.
        kept = max(kept, 1 - kept)
        images = blend(images, kept)
    return images, blend(targets, kept)


def blend(values: Tensor, kept: float) -> Tensor:
    """kept * value + (1 - kept) * predecessor's value, along the batch."""
    return torch.lerp(values.roll(1, 0), values, kept)


def cut_in(images: Tensor, kept: float, at: tuple[float, float]) -> tuple[Tensor, float]:
    """Paste the predecessor's pixels into a box of about 1 - kept of the area; also returns the area that is kept."""
    height, width = images.shape[-2:]
    top, left, box_h, box_w = cutmix_box((height, width), kept, at)
    box = (..., slice(top, top + box_h), slice(left, left + box_w))
    mixed = images.clone()
    mixed[box] = images.roll(1, 0)[box]
    return mixed, 1.0 - box_h * box_w / (height * width)


def _beta(alpha: float, draw: float) -> float:
    """The Beta(alpha, alpha) number at this quantile: a pure function, where a sampler would need a state."""
    from scipy.special import betaincinv

    return float(betaincinv(alpha, alpha, draw))
