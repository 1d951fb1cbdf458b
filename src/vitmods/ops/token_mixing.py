"""The settings of Dynamic Token Normalization; a file without torch, since to describe a model needs none."""

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin

from vitmods.util.errors import UserError, nearest


@dataclass(frozen=True)
class TokenMixing:
    """How Dynamic Token Normalization mixes statistics within and across tokens.

    Args:
        variant: "paper", or "released" for the layer of the released code: each head of a token is first divided by
            its root mean square, and LayerNorm's variance is unbiased.
        init: of the kernels. "local" peaks each at an offset of a floor(sqrt(H)) square of offsets (equation 7;
            further heads truncated normal 0.02), "noise" is truncated normal 0.02 for all.
        offsets: of the local kernels. "centered" lie around 0 as equation 7 has them: halves for an even side, each
            with its maximum tied between neighbors. "whole" are whole numbers, which give each head one neighbor as
            in Figure 6; of an even side they reach one further to the right and down.
        trade_off: None to learn lambda, or a fixed lambda in [0, 1] (Table 5). 0 with ``kernel="uniform"`` is
            InstanceNorm, 1 is LayerNorm.
        lambda_init: where the learned lambdas start; near 1 a trained LayerNorm model starts close to itself.
        kernel: "learned", or "uniform" for P = 1 / T (Table 5).
        statistics: which of mean and variance looks across tokens; the other is LayerNorm's.
        band: instead of a learned kernel, equal weights in a band of P: over the ``band`` (odd) tokens around a token
            in the order of the sequence, |i - j| <= (band - 1) / 2 (Figure 4).
        window: instead of a learned kernel, equal weights in a square of ``window`` (odd) tokens a side on the grid.
        pool: average-pool the tokens by this side before statistics across tokens are taken (section 3.3). A side for
            each stage of a pyramid, as (4, 2, 1, 1), is for ``replace_norms``.

    Raises UserError for what does not fit, and for a setting that another one leaves without effect.
    """

    variant: Literal["paper", "released"] = "paper"
    init: Literal["local", "noise"] = "local"
    offsets: Literal["centered", "whole"] = "centered"
    trade_off: float | None = None
    lambda_init: float = 0.5
    kernel: Literal["learned", "uniform"] = "learned"
    statistics: Literal["both", "mean", "variance"] = "both"
    band: int | None = None
    window: int | None = None
    pool: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value, choices = getattr(self, field.name), get_args(field.type)
            if get_origin(field.type) is Literal and value not in choices:
                raise UserError(f"dtn({field.name}=...) cannot be '{value}'. {nearest(str(value), choices)}")
        if self.trade_off is not None and not 0 <= self.trade_off <= 1:
            raise UserError(f"dtn(trade_off=...) is a fraction between 0 and 1, got {self.trade_off}.")
        if not 0 < self.lambda_init < 1:
            raise UserError(f"dtn(lambda_init=...) must be between 0 and 1, got {self.lambda_init}.")
        if self.trade_off is not None and self.lambda_init != 0.5:
            raise UserError("dtn(trade_off=...) fixes lambda, so lambda_init cannot apply: give one of them.")
        for name in ("band", "window"):
            side = getattr(self, name)
            if side is not None and (side < 1 or side % 2 == 0):
                raise UserError(f"dtn({name}=...) is an odd number of tokens, got {side}.")
        if not isinstance(self.pool, int):
            object.__setattr__(self, "pool", tuple(self.pool))
        if not self.pools or min(self.pools) < 1:
            raise UserError(f"dtn(pool=...) is 1 (none) or more, got {self.pool}.")
        others = {
            "window": self.window is not None,
            "kernel=uniform": self.kernel == "uniform",
            "pool": max(self.pools) > 1,
        }
        chosen = ["band"] * (self.band is not None) + [name for name, is_set in others.items() if is_set]
        if len(chosen) > 1 and chosen[0] != "kernel=uniform":
            raise UserError(f"dtn({chosen[0]}=...) already sets the kernel: leave {chosen[1]} out, or {chosen[0]}.")
        starts = [name for name in ("init", "offsets") if getattr(self, name) not in ("local", "centered")]
        if starts and not self.learns_kernel:
            raise UserError(f"dtn({starts[0]}=...) needs a learned kernel: leave it out.")
        if len(starts) > 1:
            raise UserError("dtn(init=noise) does not use offsets: leave offsets out, or init.")

    @property
    def pools(self) -> tuple[int, ...]:
        """``pool`` of each stage; a single number means one stage."""
        return (self.pool,) if isinstance(self.pool, int) else self.pool

    @property
    def learns_kernel(self) -> bool:
        averages = self.band is not None or self.window is not None
        return self.kernel == "learned" and not averages and self.trade_off != 1
