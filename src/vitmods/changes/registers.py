"""Register tokens: tokens that blocks may write to and no head reads, learned or for trained models."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitmods.changes.base import Change, Weights
from vitmods.changes.prefix_tokens import carry_positions, dropped_positions
from vitmods.model.config import ViTConfig
from vitmods.model.slots import Slot
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Registers(Change):
    """``count`` learned tokens next to the class token and the patches, without positions, whose output no head reads
    (Darcet et al., 2024). Large trained ViTs otherwise keep global facts in patches of little content, which then stick
    out of feature maps.

    The class token takes the position that it had along. A model with another number of registers gets new ones.

    ``trained=False`` is for trained models without registers (Jiang et al., 2025, arXiv:2506.08010): the tokens are
    zeros, and the ``neurons`` of the MLPs that are most active on patches that stick out act on them instead of on the
    patches. Trials choose these neurons from 250 training images before the first step, and
    ``vitmods.layers.registers.find_register_neurons(model, batches, count)`` does so elsewhere.
    """

    name = "registers"
    title = "Register tokens"
    paper = "Darcet et al.: Vision Transformers Need Registers. ICLR 2024"
    url = "https://arxiv.org/abs/2309.16588"
    summary = "Adds learned tokens that attention may use and no head reads."
    cost = "width parameters a register; as many multiply-adds as for another patch each"
    published = "smoother feature maps and better dense prediction of large self-supervised ViTs (abstract, no numbers)"
    words = ("register", "reg_tokens")

    count: int = 4
    trained: bool = True
    neurons: int = 10

    def __post_init__(self) -> None:
        for name in ("count", "neurons"):
            if getattr(self, name) < 1:
                raise UserError(f"registers({name}=...) is a whole number, at least 1, got {getattr(self, name)}.")
        if self.trained and "neurons" in self.values():
            raise UserError("registers(neurons=...) is for registers that are not trained: set trained=false too.")

    def describe(self) -> dict[str, str]:
        if self.trained:
            return super().describe()
        facts = {
            "paper": "Jiang et al.: Vision Transformers Don't Need Trained Registers. NeurIPS 2025",
            "url": "https://arxiv.org/abs/2506.08010",
            "published": "",
        }
        summary = (
            "Adds tokens of zeros, on which the neurons that make patches stick out act instead of on the patches."
        )
        return super().describe() | facts | {"summary": summary}

    @property
    def fills(self) -> frozenset[Slot]:
        places = {Slot.PREFIX_TOKENS, Slot.PREFIX_POSITION}
        return frozenset(places if self.trained else {*places, Slot.MLP_INNER})

    def edit(self, config: ViTConfig) -> ViTConfig:
        if config.pool == "prefix" or config.pool_prefix:
            raise UserError(
                "registers adds tokens that no head reads, and the head of this model reads all prefix tokens."
            )
        occupied = config.reg_tokens or config.parallel > 1 or config.prefix_from or config.mlp.inner is not None
        if not self.trained and occupied:
            raise UserError(
                "registers(trained=false) is for models without registers, parallel branches, norms inside the MLP and "
                "a class token that joins late."
            )
        return config.with_(reg_tokens=self.count, position_on_prefix=False, register_neurons=not self.trained)

    def carry(self, weights: Weights, old: ViTConfig, new: ViTConfig) -> Weights:
        from torch.nn.functional import pad

        carried = carry_positions(weights, old)
        if not old.num_prefix_tokens:  # tables of offsets get entries for prefix tokens
            tables = {name: table for name, table in carried.items() if name.endswith("rel_pos.table")}
            carried |= {name: pad(table, (0, 0, 0, 3)) for name, table in tables.items()}
        return {name: value for name, value in carried.items() if name != "reg_token" or old.reg_tokens == self.count}

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        tables = () if old.num_prefix_tokens else ("blocks.*.rel_pos.table",)
        return (*dropped_positions(old), *(("reg_token",) if old.reg_tokens else ()), *tables)

    def fit(self, model: "nn.Module", images: "Iterable[Tensor]") -> bool:
        if not self.trained:
            from vitmods.layers.registers import find_register_neurons

            find_register_neurons(model, list(images), self.neurons)
        return not self.trained
