"""Relative position bias: a learned number for each offset of two tokens."""

from dataclasses import dataclass

from vitmods.changes.base import Change
from vitmods.model.config import ViTConfig
from vitmods.model.slots import Slot
from vitmods.util.errors import UserError


@dataclass(frozen=True)
class RelativePositions(Change):
    """``softmax(q_i k_j / sqrt(D) + b[i - j]) v_j`` with a table b of offsets in rows and columns for each block and
    head, and three entries for class and register tokens (Bao et al., 2022, BEiT, after Shaw et al., 2018, and Swin).

    All entries start at 0, so that the function stays. Another grid later resamples the table. With ``shared`` all
    blocks have one table, as in BeiT's pre-training; each has a copy of it after ``relpos``, and in fine-tuning.
    """

    name = "relpos"
    title = "Relative position bias"
    paper = "Bao et al.: BEiT: BERT Pre-Training of Image Transformers. ICLR 2022"
    url = "https://arxiv.org/abs/2106.08254"
    summary = "Adds a learned number for each offset of two tokens to the logits of attention."
    cost = "((2 rows - 1) (2 columns - 1) + 3) heads parameters a block; no multiply-adds"
    published = "none by itself: BEiT has it together with its pre-training"
    words = ("rel_pos", "relative", "beit")
    preserves = "function"
    fills = frozenset({Slot.REL_POS})

    shared: bool = False

    def edit(self, config: ViTConfig) -> ViTConfig:
        if self.shared and config.rel_pos is True:
            raise UserError(f"'{self}' cannot make one table of those of all blocks: apply it to a model without them.")
        return config.with_(rel_pos="shared" if self.shared else True)
