"""Register tokens: learned tokens that blocks may write to and no head reads."""

from dataclasses import dataclass

from vitmods.changes.base import Change, Weights
from vitmods.changes.prefix_tokens import carry_positions, dropped_positions
from vitmods.model.config import ViTConfig
from vitmods.model.slots import Slot
from vitmods.util.errors import UserError


@dataclass(frozen=True)
class Registers(Change):
    """``count`` learned tokens beside the class token and the patches, without positions, whose output no head reads
    (Darcet et al., 2024). Large trained ViTs otherwise keep global facts in patches of little content, which then stick
    out of feature maps.

    The class token takes the position that it had along. A model with another number of registers gets new ones.
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

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UserError(f"registers(count=...) is a whole number, at least 1, got {self.count}.")

    @property
    def fills(self) -> frozenset[Slot]:
        return frozenset({Slot.PREFIX_TOKENS, Slot.PREFIX_POSITION})

    def edit(self, config: ViTConfig) -> ViTConfig:
        if config.pool == "prefix" or config.pool_prefix:
            raise UserError(
                "registers adds tokens that no head reads, and the head of this model reads all prefix tokens."
            )
        return config.with_(reg_tokens=self.count, position_on_prefix=False)

    def carry(self, weights: Weights, old: ViTConfig, new: ViTConfig) -> Weights:
        carried = carry_positions(weights, old)
        return {name: value for name, value in carried.items() if name != "reg_token" or old.reg_tokens == self.count}

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        return (*dropped_positions(old), *(("reg_token",) if old.reg_tokens else ()))
