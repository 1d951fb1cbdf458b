"""Another depth, width or number of heads: what a design change of the same cost is compared with."""

from dataclasses import dataclass
from types import MappingProxyType

from vitmods.changes.base import Change, Preserves, Weights
from vitmods.model.config import ViTConfig
from vitmods.model.slots import Slot
from vitmods.util.errors import UserError

_EITHER = (("depth", "deeper"), ("width", "wider"))


@dataclass(frozen=True)
class Size(Change):
    """A ViT of another size: ``depth`` blocks or ``deeper`` times as many, ``width`` channels or ``wider`` times as
    many, ``heads``. Weights are kept unless the width changes, those of the MLPs unless ``mlp`` changes them too.

    The MLP stays as many times as wide as the tokens, or has ``mlp`` hidden channels. Without ``heads`` the channels of
    a head stay as they are, and the heads follow the width. Half the width and four times the depth,
    ``size(wider=0.5,deeper=4)``, is S48/16 of B/16 (Three Things, Table 3). Parallel branches stay: the depth counts
    their blocks one after another.

    Raises UserError where blocks, channels or heads would not be whole numbers.
    """

    name = "size"
    title = "Depth, width and heads"
    paper = "Touvron et al.: Three things everyone should know about Vision Transformers. ECCV 2022, section 3"
    url = "https://arxiv.org/abs/2203.09795"
    summary = "Makes the model deeper or shallower, wider or narrower, or gives it other heads."
    cost = "parameters and multiply-adds grow with the depth, and with the square of the width"
    published = (
        "top-1 on ImageNet-V2, all with LayerScale: ViT-L of 24 blocks (61.6 GFLOPs) 73.3, ViT-B of 36 blocks (52.5 "
        "GFLOPs) 73.2 and of 18 x 2 73.3 (Table 3)"
    )
    example = MappingProxyType({"deeper": 2})
    words = ("depth", "width", "heads", "wider", "deeper", "mlp")
    fills = frozenset({Slot.SIZE})

    depth: int | None = None
    deeper: float | None = None
    width: int | None = None
    wider: float | None = None
    heads: int | None = None
    mlp: int | None = None

    def __post_init__(self) -> None:
        if not self.values():
            raise UserError(
                "size(...) without a number changes nothing: give depth, deeper, width, wider, heads or mlp."
            )
        for name, value in self.values().items():
            if not 0 < value < 2**31:
                raise UserError(f"size({name}=...) is a positive number, got {value}.")
        for absolute, relative in _EITHER:
            if getattr(self, absolute) is not None and getattr(self, relative) is not None:
                raise UserError(f"size({absolute}=...,{relative}=...) says the same twice: give one of them.")

    @property
    def preserves(self) -> Preserves:
        """``weights`` where the width stays: weights are carried, except those of removed blocks and replaced MLPs."""
        return "weights" if self.width is None and self.wider is None else "nothing"

    def edit(self, config: ViTConfig) -> ViTConfig:
        depth = self._whole("blocks", config.unrolled.depth, self.depth, self.deeper)
        width = self._whole("channels", config.embed_dim, self.width, self.wider)
        if depth % config.parallel:
            raise UserError(f"'{self}' makes {depth} blocks, which {config.parallel} parallel branches do not divide.")
        head = config.head_dim or config.embed_dim // config.num_heads
        heads = self.heads or self._whole("heads", width, None, 1 / head)
        if self.heads and width % heads:
            raise UserError(f"'{self}': {heads} heads do not divide {width} channels.")
        mlp = self._whole("channels of the MLP", config.mlp_dim, self.mlp, width / config.embed_dim)
        head_dim = head if config.head_dim is not None and not self.heads else None
        return config.with_(
            depth=depth // config.parallel, embed_dim=width, num_heads=heads, mlp_dim=mlp, head_dim=head_dim
        )

    def _whole(self, what: str, old: int, given: int | None, factor: float | None) -> int:
        size = given if given is not None else old * (1.0 if factor is None else factor)
        if abs(size - round(size)) > 1e-6 or round(size) < 1:
            raise UserError(f"'{self}' makes {size:g} {what} of {old}: choose a size that gives whole ones.")
        return round(size)

    def carry(self, weights: Weights, old: ViTConfig, new: ViTConfig) -> Weights:
        """Carry all weights if the width stays, except those of removed blocks and of MLPs of another width."""
        if old.embed_dim != new.embed_dim:
            return {}
        is_replaced = old.mlp_dim != new.mlp_dim
        kept = {name: value for name, value in weights.items() if _block(name) < new.depth}
        return {name: value for name, value in kept.items() if not (is_replaced and ".mlp." in name)}

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        if old.embed_dim != new.embed_dim:
            return ("*",)
        mlps = ("blocks.*.mlp.*", "attn_pool.mlp.*") if old.mlp_dim != new.mlp_dim else ()
        return (*(f"blocks.{index}.*" for index in range(new.depth, old.depth)), *mlps)


def _block(name: str) -> int:
    """The index of the block that a weight belongs to; -1: to none."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blocks" else -1
