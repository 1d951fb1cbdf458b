"""Registers for trained models: the neurons that make a few patches stick out act on added tokens instead."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

OUTLIER = 3.0  # a patch sticks out if its norm is that many times the median of its image


class RegisterNeurons(nn.Module):
    """Hidden activations of an MLP (B, T, H) -> the same with chosen ``neurons`` moved from the patches to registers.

    Such a neuron is 0 on all patches, and on the registers it has the largest value that it had on a patch (Jiang et
    al., 2025, arXiv:2506.08010).

    Args:
        hidden_dim: H.
        registers: positions of the registers in the sequence: the last ones of the prefix.
        prefix_tokens: tokens before the patches.
    """

    token_wise, image_wise = False, True
    neurons: Tensor

    def __init__(self, hidden_dim: int, registers: int, prefix_tokens: int) -> None:
        super().__init__()
        self.registers, self.prefix_tokens = registers, prefix_tokens
        self.register_buffer("neurons", torch.zeros(hidden_dim, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        kept, registers, patches = x.tensor_split((self.prefix_tokens - self.registers, self.prefix_tokens), dim=1)
        largest = patches.amax(dim=1, keepdim=True)
        return torch.cat(
            (kept, torch.where(self.neurons, largest, registers), patches.masked_fill(self.neurons, 0.0)), dim=1
        )


@torch.no_grad()
def find_register_neurons(model: Any, batches: Sequence[Tensor], count: int) -> None:
    """Choose the neurons that are most active on patches that stick out, and move them to the registers.

    A patch sticks out at the output of a block if its norm is ``OUTLIER`` times the median of its image. The block
    where most patches do is taken; the neurons are those of the MLPs up to it with the largest mean activation on these
    patches. Without such patches the model stays as it is, with a warning.

    Args:
        model: a ViT with `RegisterNeurons` in its MLPs.
        batches: images (B, channels, height, width).
        count: neurons, of all blocks together.
    """
    prefix, was_training = model.vit_config.num_prefix_tokens, model.training
    inputs: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        inputs[module] = (output if module in blocks else args[0])[:, prefix:]

    blocks = list(model.blocks)
    places = [block.mlp.norm for block in blocks]
    hooks = [module.register_forward_hook(keep) for module in (*blocks, *places)]
    model.eval()
    try:
        outliers = torch.zeros(len(blocks))
        for images in batches:
            model(images)
            outliers += torch.stack([_stick_out(inputs[block]).sum() for block in blocks]).cpu()
        if not outliers.any():
            warnings.warn(
                f"registers(trained=false) changes only the number of tokens: no patch sticks out, with a norm of "
                f"{OUTLIER:g} times the median of its image.",
                stacklevel=2,
            )
            return
        last = int(outliers.argmax())
        activity = torch.zeros(last + 1, len(places[0].neurons))
        for images in batches:
            model(images)
            chosen = _stick_out(inputs[blocks[last]])
            activity += torch.stack(
                [inputs[place][chosen].float().abs().sum(dim=0) for place in places[: last + 1]]
            ).cpu()
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    for place in places:
        place.neurons.zero_()
    for index in activity.flatten().topk(min(count, activity.numel())).indices.tolist():
        block, neuron = divmod(index, activity.shape[1])
        places[block].neurons[neuron] = True


def _stick_out(tokens: Tensor) -> Tensor:
    """Whether each patch of (B, T, C) sticks out, (B, T)."""
    norms = tokens.float().norm(dim=-1)
    return norms > OUTLIER * norms.median(dim=1, keepdim=True).values
