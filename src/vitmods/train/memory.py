"""Too little memory: how it shows, and what to do about it."""

import torch

from vitmods.util.errors import UserError

_SAID = ("can't allocate memory", "not enough memory", "Cannot allocate memory")  # by torch on a CPU, of no own type


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be had, of the machine or of its accelerator."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(words in str(error) for words in _SAID)


def does_not_fit(count: int, device: torch.device) -> UserError:
    """So many images at once are too many."""
    return UserError(
        f"{count} images at once do not fit the memory of {device}. Cut the batch into more parts with accumulate, or "
        "choose a smaller batch_size, model or image size. Without another study: --recompute or --checkpointing, and "
        "fewer --workers."
    )
