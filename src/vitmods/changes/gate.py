"""Gated attention: what the heads read is multiplied by gates that the tokens set."""

import math
from dataclasses import dataclass
from typing import Literal

from vitmods.changes.base import Change, Preserves, Weights
from vitmods.changes.insertions import Gate, Insertion, Parts
from vitmods.model.config import ViTConfig
from vitmods.model.slots import Slot
from vitmods.util.errors import NeedsReading, UserError

_OPEN = 4.0


@dataclass(frozen=True)
class GatedAttention(Change):
    """``proj(heads * sigmoid(W_g x + b_g))``, x the normed tokens that queries, keys and values read (Qiu et al., 2025,
    "G1", after scaled dot-product attention).

    ``per``: a gate for each channel of the heads, or one for each head. ``start="half"`` has small weights and b_g 0,
    so that what is read starts near half; "open" keeps the function: W_g starts at 0, b_g at 4, and the output
    projection is divided by sigmoid(4).
    """

    name = "gate"
    title = "Gated attention"
    paper = (
        "Qiu et al.: Gated Attention for Large Language Models: Non-linearity, Sparsity, and Attention-Sink-Free. "
        "NeurIPS 2025"
    )
    url = "https://arxiv.org/abs/2505.06708"
    summary = "Multiplies what the heads of attention read by gates that each token sets, before the output projection."
    cost = "width (width + 1) parameters and width^2 multiply-adds a token and block (per=head: heads for one width)"
    published = "none for ViTs: language models train more stably and score higher (abstract)"
    words = ("gated_attention", "gated")
    fills = frozenset({Slot.GATE})

    per: Literal["channel", "head"] = "channel"
    start: Literal["half", "open"] = "half"

    def __post_init__(self) -> None:
        for name, choices in (("per", ("channel", "head")), ("start", ("half", "open"))):
            if getattr(self, name) not in choices:
                raise UserError(f"gate({name}=...) is {' or '.join(choices)}, got '{getattr(self, name)}'.")

    @property
    def preserves(self) -> Preserves:
        return "function" if self.start == "open" else "weights"

    def edit(self, config: ViTConfig) -> ViTConfig:
        if self.start == "open" and config.gate != "none":
            raise UserError(f"'{self}' keeps the function of a model without gates, and this one has some.")
        return config.with_(gate=self.per)

    def carry(self, weights: Weights, old: ViTConfig, new: ViTConfig) -> Weights:
        if self.start == "half":
            return weights
        carried, heads = dict(weights), new.num_heads
        for name, values in weights.items():
            if name.startswith("blocks.") and name.endswith(".attn.proj.weight"):
                gate = name.replace("proj.weight", "gate")
                gates = heads if self.per == "head" else values.shape[1]
                carried[name] = values * (1 + math.exp(-_OPEN))
                carried[f"{gate}.weight"] = values.new_zeros(gates, new.embed_dim)
                carried[f"{gate}.bias"] = values.new_full((gates,), _OPEN)
        return carried

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        return ("blocks.*.attn.gate.*",) if old.gate != "none" else ()

    def insertions(self, parts: Parts) -> list[Insertion]:
        if self.start == "open":
            raise NeedsReading(
                f"'{self}' multiplies weights, for which it needs a model that vm.apply can read "
                "(docs/models.md): write gate for gates that start at one half."
            )
        return [Gate(branch, self.per) for branch in parts.branches if branch.kind == "attn"]
