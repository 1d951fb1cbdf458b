"""SwiGLU: a gated MLP in every block."""

from dataclasses import dataclass

from vitmods.changes.base import Change
from vitmods.changes.insertions import GatedMLP, Insertion, Parts
from vitmods.model.config import ViTConfig
from vitmods.model.slots import Slot
from vitmods.util.errors import UserError


@dataclass(frozen=True)
class SwiGLU(Change):
    """``x + fc2(silu(W_g x) * W_x x)`` instead of ``x + fc2(gelu(W x))`` (Shazeer, 2020), in all blocks.

    The hidden width is 2/3 of the MLP's, so that three maps have the parameters of two (section 1 of the paper),
    rounded up to a multiple of 8 as in DINOv2. ``hidden`` sets another. The new maps train from their start, all other
    weights are kept. Attention pooling keeps its MLP.
    """

    name = "swiglu"
    title = "SwiGLU"
    paper = "Shazeer: GLU Variants Improve Transformer. 2020"
    url = "https://arxiv.org/abs/2002.05202"
    summary = "Gates the hidden layer of each MLP by a second linear map, at 2/3 of its width."
    cost = "about as many parameters and multiply-adds as the MLP that it replaces"
    published = "none for ViTs as a single change; in T5 (language) it lowers the log-perplexity (Table 1)"
    fills = frozenset({Slot.MLP})

    hidden: int | None = None

    def __post_init__(self) -> None:
        if self.hidden is not None and self.hidden < 1:
            raise UserError(f"swiglu(hidden=...) is a whole number, at least 1, got {self.hidden}.")

    def edit(self, config: ViTConfig) -> ViTConfig:
        if config.mlp_kind == self.name and self.hidden in (None, config.mlp_dim):
            return config
        width = self._width(config.mlp_dim)
        pool = (config.pool_mlp_dim or config.mlp_dim) if config.pool == "map" else None
        return config.with_(mlp_kind=self.name, mlp_dim=width, pool_mlp_dim=pool)

    def _width(self, hidden: int) -> int:
        return self.hidden or -(-hidden * 2 // 3 // 8) * 8

    def insertions(self, parts: Parts) -> list[Insertion]:
        return [GatedMLP(b, self._width(b.hidden)) for b in parts.branches if b.kind == "mlp"]

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        return ("blocks.*.mlp.*",)
