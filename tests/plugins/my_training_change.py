"""A user's change that acts in training alone, in one file: whole branches are dropped."""

from dataclasses import dataclass

from vitmods.changes import Change
from vitmods.model.slots import Slot


@dataclass(frozen=True)
class Stochastic(Change):
    """Stochastic depth in all blocks alike."""

    name = "stochastic"
    title = "Stochastic depth"
    paper = "Huang et al.: Deep Networks with Stochastic Depth. ECCV 2016"
    url = "https://arxiv.org/abs/1603.09382"
    summary = "Drops whole branches while training."
    cost = "no parameters and no multiply-adds"
    published = "none for ViTs"
    preserves = "function"
    fills = frozenset({Slot.DROPOUT})
    acts_in = "training"

    rate: float = 0.5

    def edit(self, config):
        return config.with_(drop_path=self.rate, drop_path_shape="constant")
