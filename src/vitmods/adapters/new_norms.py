"""Which norms are new in a changed model: those at places where the model had none before."""

import re
from collections.abc import Sequence

from torch import nn

from vitmods.changes import Change
from vitmods.changes.compose import adds_norms
from vitmods.layers.norms import NORMS
from vitmods.model.branch_names import parallel_name, sequential_name


def mark_new_norms(old: nn.Module, new: nn.Module, changes: Sequence[Change]) -> None:
    """Set ``new.new_norms`` to the norms that the changes added to `old`, and those that were new there already, so
    that training can blend them in (`vitmods.finetune.BlendedNorms`); to none of changes that do more than add them.
    """
    before, still_new = dict(old.named_modules()), getattr(old, "new_norms", ())
    kinds, adds = {kind.module for kind in NORMS.values()}, adds_norms(changes)
    parallel = [getattr(getattr(model, "vit_config", None), "parallel", 1) for model in (old, new)]

    def is_new(name: str) -> bool:
        place = parallel_name(sequential_name(f"{name}.weight", parallel[1]), parallel[0]).removesuffix(".weight")
        block = re.match(r".*\.\d+(?=\.)", place)
        if block is not None and block[0] not in before:
            return False  # of a new block, whose norms replace nothing
        there = before.get(place)
        return there in still_new or (adds and (there is None or isinstance(there, nn.Identity)))

    norms = tuple(module for name, module in new.named_modules() if type(module) in kinds and is_new(name))
    new.new_norms = norms  # type: ignore[assignment]
