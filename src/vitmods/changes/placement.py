"""Where the norms of a block sit: before a branch, after it, or both, for attention and MLP by themselves."""

from dataclasses import dataclass, replace
from typing import Literal

from vitmods.changes.base import Change, Weights
from vitmods.changes.insertions import After, Insertion, Parts, Without
from vitmods.model.config import ViTConfig
from vitmods.model.slots import BranchConfig, NormConfig, Slot
from vitmods.util.errors import NeedsReading, UserError, nearest

Place = Literal["pre", "post", "pre+post"]
_PLACES = ("pre", "post", "pre+post")
_READINGS = ("residual", "branch")


@dataclass(frozen=True)
class Placement(Change):
    """One of the nine placements of Dual PatchNorm, section 4.1, for the attention and the MLP branch F:

    - pre: ``x + F(LN(x))``,
    - post: ``LN(x + F(x))``, the original Transformer's (Xiong et al., 2020, which the paper cites); with
      ``reading="branch"`` ``x + LN(F(x))``, the other way to read the paper,
    - pre+post: both.

    (pre, pre) is the usual ViT. The norms keep the kind and eps that the model has. The final norm is dropped where
    the last operation of the last block is a norm already, unless ``keep_final``, and kept otherwise.
    """

    name = "placement"
    title = "Placement of the norms"
    paper = (
        "Kumar, Dehghani & Houlsby: Dual PatchNorm. TMLR 2023, sections 4.1 and 5.2; "
        "Xiong et al.: On Layer Normalization in the Transformer Architecture. ICML 2020"
    )
    url = "https://openreview.net/forum?id=jgMqve6Qhw"
    summary = "Moves the norms of each block before the branch, after it, or both, for attention and MLP separately."
    cost = "2 width parameters for each norm more or less; no multiply-adds"
    published = "ImageNet-1k: none of the placements gains significantly over pre-norm in five ViTs (Figure 1)"
    short_forms = {"postnorm": {"attn": "post", "mlp": "post"}}  # noqa: RUF012

    attn: Place = "pre"
    mlp: Place = "pre"
    reading: Literal["residual", "branch"] = "residual"
    keep_final: bool = False

    def __post_init__(self) -> None:
        for name in ("attn", "mlp"):
            if getattr(self, name) not in _PLACES:
                raise UserError(f"placement({name}=...) is pre, post or pre+post, got '{getattr(self, name)}'.")
        if self.reading not in _READINGS:
            raise UserError(f"placement(reading=...) cannot be '{self.reading}'. {nearest(self.reading, _READINGS)}")
        if self.keep_final and (self.reading == "branch" or self.mlp == "pre"):
            raise UserError(f"'{self}' keeps the final norm anyway: leave keep_final out.")

    @property
    def fills(self) -> frozenset[Slot]:
        attn, mlp = (
            (Slot.ATTN_AFTER, Slot.MLP_AFTER) if self.reading == "residual" else (Slot.ATTN_BRANCH, Slot.MLP_BRANCH)
        )
        post = {attn: self.attn, mlp: self.mlp}
        return frozenset(
            {Slot.ATTN_BEFORE, Slot.MLP_BEFORE, *(slot for slot, place in post.items() if "post" in place)}
        )

    @property
    def adds_norms(self) -> bool:
        keeps_final = self.reading == "branch" or self.mlp == "pre" or self.keep_final
        return keeps_final and "pre" in self.attn and "pre" in self.mlp

    def edit(self, config: ViTConfig) -> ViTConfig:
        if config.first_blocks is not None:
            raise UserError(
                f"'{self}' moves the norms of all blocks, and the first blocks of this model have different norms."
            )
        norm = _kind(config)
        attn, mlp = self._place(config.attn, self.attn, norm), self._place(config.mlp, self.mlp, norm)
        final = None if mlp.after and not self.keep_final else (config.final_norm or norm)
        return config.with_(attn=attn, mlp=mlp, final_norm=final)

    def _place(self, branch: BranchConfig, place: Place, norm: NormConfig) -> BranchConfig:
        post = norm if "post" in place else None
        return replace(
            branch,
            before=norm if place.startswith("pre") else None,
            after=post if self.reading == "residual" else None,
            # A norm on the branch that another change has put there stays.
            branch=(post or branch.branch) if self.reading == "branch" else branch.branch,
        )

    def carry(self, weights: Weights, old: ViTConfig, new: ViTConfig) -> Weights:
        """A norm that leaves its slot gives its weights to the slot that is new in the same branch."""
        moved = dict(weights)
        for number, before, after in ((1, old.attn, new.attn), (2, old.mlp, new.mlp)):
            emptied = [s for s in _SLOTS if getattr(before, s) and not getattr(after, s)]
            filled = [s for s in _SLOTS if getattr(after, s) and not getattr(before, s)]
            for source, target in zip(emptied, filled):
                former, later = (f".norm{number}{_SLOTS[slot]}." for slot in (source, target))
                for name in [name for name in moved if name.startswith("blocks.") and former in name]:
                    moved[name.replace(former, later)] = moved.pop(name)
        return moved

    def insertions(self, parts: Parts) -> list[Insertion]:
        if self.reading != "branch":
            raise NeedsReading(
                f"'{self}' puts norms on the stream, for which it needs a model that vm.apply can read "
                "(docs/models.md): write reading=branch for norms on the branches."
            )
        insertions: list[Insertion] = []
        for branch in parts.branches:
            place = self.attn if branch.kind == "attn" else self.mlp
            insertions += [After(branch, parts.norm)] if "post" in place else []
            insertions += [] if place.startswith("pre") else [Without(branch)]
        return insertions

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        patterns = ["norm.*", "fc_norm.*"] if new.final_norm is None else []
        for number, before, after in ((1, old.attn, new.attn), (2, old.mlp, new.mlp)):
            gone = [s for s in _SLOTS if getattr(before, s) and not getattr(after, s)]
            patterns += [f"blocks.*.norm{number}{_SLOTS[s]}.*" for s in gone]
        return tuple(patterns)


_SLOTS = {"before": "", "branch": "_branch", "after": "_after"}


def _kind(config: ViTConfig) -> NormConfig:
    """The norm that this model uses around its branches."""
    for branch in (config.attn, config.mlp):
        for norm in (branch.before, branch.after, branch.branch):
            if norm is not None:
                return norm
    return config.final_norm or NormConfig()
