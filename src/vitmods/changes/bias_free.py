"""Queries, keys and values without bias."""

from dataclasses import dataclass

from vitmods.changes.base import Change
from vitmods.model.config import ViTConfig
from vitmods.model.slots import Slot


@dataclass(frozen=True)
class BiasFree(Change):
    """The linear map of queries, keys and values loses its bias, in all blocks (Dehghani et al., 2023, section 2)."""

    name = "nobias"
    title = "Queries, keys and values without bias"
    paper = "Dehghani et al.: Scaling Vision Transformers to 22 Billion Parameters. ICML 2023"
    url = "https://arxiv.org/abs/2302.05442"
    summary = "Leaves out the bias of the map that makes queries, keys and values."
    cost = "3 width parameters a block fewer; no multiply-adds"
    published = "no gain in accuracy is stated: it uses accelerators better (section 2)"
    words = ("qkv_bias", "bias_free")
    fills = frozenset({Slot.QKV_BIAS})

    def edit(self, config: ViTConfig) -> ViTConfig:
        return config.with_(qkv_bias=False)

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        return ("blocks.*.attn.qkv.bias",) if old.qkv_bias else ()
