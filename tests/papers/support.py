"""A module against a golden: outputs and the gradients of images and parameters, in float64."""

import torch


def close(actual, expected, tolerance=1e-10, **options):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0, **options)


def compare(module, g, names, forward=None, turn=lambda x: x):
    """`names`: the golden's parameters, or their gradients, under our names; `turn`: axes of its inputs and outputs.
    Returns the gradients of the parameters that it does not name."""
    x = turn(g["in.x"]).clone().requires_grad_()
    y = (forward or module)(x)
    close(turn(y), g["out.y"])
    leaves = dict(module.named_parameters())
    grad_x, *grads = torch.autograd.grad((y * turn(g["ct.y"])).sum(), [x, *leaves.values()])
    close(turn(grad_x), g["grad_in.x"])
    found, expected = dict(zip(leaves, grads, strict=True)), names(g.group("grad_param"))
    assert found.keys() >= expected.keys()
    for name, gradient in expected.items():
        close(found.pop(name), gradient, msg=name)
    return found
