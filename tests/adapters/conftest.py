"""Models whose every weight matters, and the comparison of functions by outputs and by gradients of the images."""

import pytest
import torch
from torch import nn


def _scatter(model):
    """Random weights everywhere: a norm or bias at its initial value would hide that it went to the wrong place."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
        if parameter.dim() == 1:
            parameter.data += 0.5
    return model.eval()


@pytest.fixture
def scatter():
    return _scatter


@pytest.fixture
def same_function():
    def compare(first, second, size=(3, 32, 32)):
        """Two functions from images to tensors agree to 1e-5 of the largest value in float32; so do gradients."""
        results = []
        for function in (first, second):
            images = torch.randn(2, *size, generator=torch.Generator().manual_seed(1)).requires_grad_()
            out = function(images)
            weights = torch.linspace(-1, 1, out.numel()).view_as(out)
            results.append((out.detach(), torch.autograd.grad((out * weights).sum(), images)[0]))
        for a, b in zip(*results, strict=True):
            assert a.shape == b.shape
            assert a.isfinite().all()
            assert a.std() > 0
            assert (a - b).abs().max() <= 1e-5 * a.abs().max()

    return compare
