"""Gentle starts: new norms in a trained model, with gains and biases that keep its outputs as near as they can.

A norm that is put into a trained model discards the mean and the scale of each vector that it reads. Its gain and bias
give back what all vectors have in common. With z the normalized and x the old value of a channel over training images,

    gain = cov(x, z) / var(z),    bias = mean(x) - gain mean(z)

minimize the mean square of ``gain z + bias - x``; a norm without a bias takes ``gain = mean(x z) / mean(z^2)``.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

TINY = 1e-12  # a channel that never varies keeps only its mean


@torch.no_grad()
def fit_norms(model: nn.Module, norms: Sequence[nn.Module], batches: Iterable[Tensor], together: bool = False) -> None:
    """Fit new norms so that their outputs come close to their inputs, which the trained model expects in their place.

    Args:
        model: with the new norms.
        norms: with `weight`, and `bias` or none; (..., C) in and out. Each is fitted after the ones before it.
        batches: images (B, channels, height, width).
        together: fit all of them to what they read without the others, in one pass over the images.
    """
    modes, batches = [(module, module.training) for module in model.modules()], list(batches)
    model.eval()
    for i, group in enumerate([norms] if together else [[norm] for norm in norms]):
        sums = {norm: torch.zeros(()) for norm in group}
        for images in batches:
            old = _inputs(model, images, norms)
            new = _inputs(model, images, norms[i:]) if i else old
            for norm in group:
                values = old[norm], norm(new[norm])
                x, z = (value.cpu().double().flatten(0, -2) for value in values)  # not all devices have float64
                sums[norm] = sums[norm] + torch.stack((torch.ones_like(x), x, z, z * z, x * z)).sum(1)
        for norm in group:
            x, z, zz, xz = sums[norm][1:] / sums[norm][0]
            weight, bias = norm.get_parameter("weight"), getattr(norm, "bias", None)
            has_bias = bias is not None
            gain = (xz - has_bias * x * z) / (zz - has_bias * z * z).clamp_min(TINY)
            weight.copy_(gain * weight.to(gain))
            if bias is not None:
                bias.copy_(x + gain * (bias.to(gain) - z))
    for module, is_training in modes:
        module.training = is_training


def _inputs(model: nn.Module, images: Tensor, left_out: Sequence[nn.Module]) -> dict[nn.Module, Tensor]:
    """Collect the inputs of each of these norms while the model runs without them."""
    inputs: dict[nn.Module, Tensor] = {}

    def leave_out(norm: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        inputs[norm] = args[0]
        return args[0]

    hooks = [norm.register_forward_hook(leave_out) for norm in left_out]
    try:
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs
