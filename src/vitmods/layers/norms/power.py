"""PowerNorm: quadratic means of the batch that are steadied over time (Shen et al., 2020)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .contract import RunningNorm, tokens, widen
from .moments import processes, sum_over_processes
from .rms import rms_norm

KEPT = 0.9  # weight of the past in both running means


class _PowerNorm(torch.autograd.Function):
    """``z = x / sqrt(phi + eps)``, ``y = gamma z + beta`` over rows (B N, C), with the backward rule of the paper:
    ``a = g - (1 - 0.9) nu z`` with ``g = dy gamma``, ``nu += mean(a z)``, ``dx = a / sqrt(phi_batch + eps)``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        phi: Tensor,
        batch: Tensor,
        nu: Tensor,
        eps: float,
    ) -> Tensor:
        ctx.eps, ctx.nu = eps, nu  # nu moves with every backward, also between this forward and its own
        ctx.save_for_backward(x, weight, phi, batch)
        return F.batch_norm(x, torch.zeros_like(phi), phi, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, phi, (batch, mean) = ctx.saved_tensors
        inverse, batch_inverse = (phi + ctx.eps).rsqrt(), (batch + ctx.eps).rsqrt()
        zeros = torch.zeros_like(phi)
        # Normalization by fixed statistics has g / sqrt(phi_batch + eps) for its gradient, in one pass with the sums.
        a, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight, zeros, batch, None, None, False, ctx.eps, [True, True, True]
        )
        grad_weight = grad_weight * (inverse / batch_inverse)
        pull = (1 - KEPT) * ctx.nu.to(x.dtype)
        a = a.addcmul_(x, pull * inverse * batch_inverse, value=-1)
        along = sum_over_processes(weight * grad_weight / len(x)) / processes()
        ctx.nu.add_((along - pull * mean * inverse.square()).to(ctx.nu.dtype))
        return a, grad_weight, grad_bias, None, None, None, None


class PowerNorm(RunningNorm):
    """``y = gamma x / sqrt(phi + eps) + beta`` with phi the mean of x^2 over batch and tokens, for each channel.

    First every token is divided by its root mean square over the channels of each group (``groups``, 1 as in the
    paper's code, or the attention heads where ``num_heads`` is given, as in the code of Dynamic Token Normalization).
    For the first ``warmup`` training batches phi is the batch's own, afterwards the running one from before the batch;
    the gradient follows the paper's rule (see ``_PowerNorm``), which is not the derivative. Evaluation uses the running
    phi. State: ``running_phi``, ``ema_gz`` (nu of the rule), ``iters``.

    Shapes: (B, N, C) or (B, rows, columns, C) in and out. Prefix tokens are counted as any other token. ``padding``
    (B, N), True for tokens that are filling, leaves those out of phi. Statistics are in float32 whatever the input
    type; the output has the input's type.

    Processes: when torch.distributed is initialised, phi and nu are means over all processes' batches (of one size).
    Gradient checkpointing is exact as long as one forward is followed by its backward. Warns once below 8 pictures.
    """

    takes = ("num_heads",)
    running_phi: Tensor
    ema_gz: Tensor
    iters: Tensor

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        affine: bool = True,
        warmup: int = 3000,
        groups: int | None = None,
        num_heads: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, eps, affine, device, dtype, groups=num_heads if groups is None else groups)
        self.warmup = warmup
        self.register_buffer("running_phi", torch.ones(dim, device=device))
        self.register_buffer("ema_gz", torch.zeros(dim, device=device))
        self.register_buffer("iters", torch.zeros((), dtype=torch.long, device=device))
        self._before: tuple[Tensor, Tensor] | None = None  # phi and batch number of the last forward, to run it again

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        flat = tokens(x)
        self.warn_of_small_batches(flat.shape[0] * processes())
        rows = widen(flat).flatten(0, 1)
        rows = rms_norm(rows.unflatten(-1, (self.groups, -1)), None, self.eps).flatten(-2)
        weight, bias = self._gain_and_shift(rows)
        if not self.training:
            phi = self.running_phi.to(rows.dtype)
            y = F.batch_norm(rows, torch.zeros_like(phi), phi, weight, bias, False, 0.0, self.eps)
            return y.view_as(x).to(x.dtype)
        with torch.no_grad():
            batch = self._quadratic_means(rows, padding)
            phi = self._step(batch[0])
        y = _PowerNorm.apply(rows, weight, bias, phi, batch, self.ema_gz, self.eps)
        return y.view_as(x).to(x.dtype)

    def _gain_and_shift(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        if self.weight is None or self.bias is None:
            return rows.new_ones(self.dim), rows.new_zeros(self.dim)
        return self.weight.to(rows.dtype), self.bias.to(rows.dtype)

    def _quadratic_means(self, rows: Tensor, padding: Tensor | None) -> Tensor:
        """Means of x^2 for each channel (2, C): over the tokens that are not padding, and over all."""
        squares = rows.square()
        mean = sum_over_processes(squares.mean(0)) / processes()
        if padding is None:
            return torch.stack([mean, mean])
        kept = (~padding).flatten().to(rows.dtype)
        return torch.stack([sum_over_processes(kept @ squares) / sum_over_processes(kept.sum()), mean])

    def _step(self, batch: Tensor) -> Tensor:
        """The phi to divide by, after counting this batch."""
        if self.gathers:
            self.iters.add_(1)
            before = self._before = (self.running_phi.clone(), self.iters.clone())
            phi = torch.where(self.iters < self.warmup, before[0] + (batch - before[0]) / self.iters, before[0])
            self.running_phi.copy_(KEPT * phi + (1 - KEPT) * batch)
        before = self._before or (self.running_phi, self.iters)
        return torch.where(before[1] <= self.warmup, batch, before[0].to(batch.dtype))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, warmup={self.warmup}"
