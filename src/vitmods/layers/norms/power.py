"""PowerNorm: quadratic means of the batch that are steadied over time (Shen et al., 2020)."""

from typing import Any

import torch
from torch import Tensor

from vitmods.layers.norms.contract import (
    Device,
    Dtype,
    RunningNorm,
    dtn_table,
    norm_kind,
    processes,
    sum_over_processes,
)
from vitmods.ops.context import differentiates_again, upcast
from vitmods.ops.padding import padding_of
from vitmods.ops.rms import rms_norm
from vitmods.util.errors import UserError

DECAY = 0.9  # weight of the past in both running means


class _PowerNorm(torch.autograd.Function):
    """``z = x / sqrt(phi + eps)``, ``y = gamma z + beta`` over rows (B N, C). Backward follows the rule of the paper:
    ``a = g - (1 - 0.9) nu z`` with ``g = dy gamma``, ``nu += mean(a z)``, ``dx = a / sqrt(phi_batch + eps)``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, phi: Tensor, batch: Tensor, nu: Tensor, eps: float
    ) -> Tensor:
        ctx.eps, ctx.nu = eps, nu  # nu moves with every backward, also between this forward and its own
        ctx.save_for_backward(x, weight, phi, batch)
        return torch.addcmul(bias, x, weight * (phi + eps).rsqrt())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if differentiates_again():
            raise UserError(
                "PowerNorm's gradient in training is its paper's rule and cannot be differentiated again: leave "
                "create_graph out, or use another norm."
            )
        x, weight, phi, (batch, mean) = ctx.saved_tensors
        inverse, batch_inverse = (phi + ctx.eps).rsqrt(), (batch + ctx.eps).rsqrt()
        coefficient = (1 - DECAY) * ctx.nu.to(phi.dtype) * inverse
        # BatchNorm's kernel for fixed statistics, 0 and 1, makes product and both sums in one pass.
        zero = torch.zeros_like(weight)
        grad_x, sums, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad.contiguous(), x, weight * batch_inverse, zero, zero + 1, None, None, False, 0.0, [True, True, True]
        )
        grad_x.addcmul_(x, coefficient * batch_inverse, value=-1)
        grad_weight = sums * inverse
        along = sum_over_processes(weight * grad_weight / len(x)) / processes()
        ctx.nu.add_((along - coefficient * mean * inverse).to(ctx.nu.dtype))
        return grad_x, grad_weight, grad_bias, None, None, None, None


@norm_kind(
    "power",
    title="PowerNorm",
    shorts=("powernorm",),
    paper="Shen et al.: PowerNorm: Rethinking Batch Normalization in Transformers. ICML 2020",
    url="https://arxiv.org/abs/2003.07845",
    how="division by the quadratic mean over all tokens of the batch, steadied over time, for each channel",
    published=dtn_table(79.8, 80.4),
    folds=True,
)
class PowerNorm(RunningNorm):
    r"""Divides by the root of phi, the mean of x^2 over batch and tokens, for each channel.

    .. math:: y = \gamma \, \frac{x}{\sqrt{\phi + \epsilon}} + \beta

    First every token is divided by its root mean square over the channels of each group (``groups``, 1 as in the
    paper's code, or the attention heads where ``num_heads`` is given, as in the code of Dynamic Token Normalization).
    For the first ``warmup`` training batches phi is the batch's own, afterwards the running one from before the batch;
    the gradient follows the paper's rule (see ``_PowerNorm``), which is not the derivative. Evaluation uses the running
    phi. State: ``running_phi``, ``ema_gz`` (nu of the rule), ``iters``.

    Shapes: (B, N, C) or (B, rows, columns, C) in and out. Prefix tokens are counted as any other token. ``padding``
    (B, N), True for tokens that are filling, leaves those out of phi (by default what ``vitmods.ops.padding`` says).
    Statistics are in float32 whatever the input type; the output has the input's type.

    Processes: when torch.distributed is initialized, phi and nu are means over all processes' batches (of one size).
    Gradient checkpointing is exact as long as one forward is followed by its backward. Warns once below 8 images.
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
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(dim, eps, affine, device, dtype)
        self.group(num_heads if groups is None else groups)
        if warmup < 0:
            raise UserError(f"PowerNorm(warmup=...) is a number of training batches, got {warmup}.")
        self.warmup = warmup
        self.run("running_phi", 1.0, device, dtype)
        self.run("ema_gz", 0.0, device, dtype)
        self.register_buffer("iters", torch.zeros((), dtype=torch.long, device=device))
        self._before: tuple[Tensor, Tensor] | None = None  # phi and batch number of the last forward, to run it again

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        flat = self.tokens(x)
        padding = padding_of(self, flat) if padding is None else padding
        self.warn_of_small_batches(flat.shape[0] * processes())
        groups = torch.unflatten(upcast(flat).flatten(0, 1), -1, (self.groups, -1))
        rows = rms_norm(groups, None, self.eps).flatten(-2)
        weight = rows.new_ones(self.dim) if self.weight is None else upcast(self.weight)
        bias = rows.new_zeros(self.dim) if self.bias is None else upcast(self.bias)
        if not self.training:
            scale = (self.running_phi.to(rows.dtype) + self.eps).rsqrt()
            return torch.addcmul(bias, rows, weight * scale).to(x.dtype).view_as(x)
        if torch._C._are_functorch_transforms_active():
            raise UserError(
                "PowerNorm's gradient in training is its paper's rule, which torch.func does not support: call eval()."
            )
        with torch.no_grad():
            squares = rows.square()
            over_all = over_kept = sum_over_processes(squares.mean(0)) / processes()
            if padding is not None:
                kept = (~padding).flatten().to(squares.dtype)
                over_kept = sum_over_processes(kept @ squares) / sum_over_processes(kept.sum())
            batch = torch.stack([over_kept, over_all])
            phi = self._step(batch[0])
        y: Tensor = _PowerNorm.apply(rows, weight, bias, phi, batch, self.ema_gz, self.eps)
        return y.to(x.dtype).view_as(x)

    def _step(self, batch: Tensor) -> Tensor:
        """The phi to divide by, after counting this batch."""
        if self.gathers:
            self.iters.add_(1)
            before = self._before = (self.running_phi.clone(), self.iters.clone())
            phi = torch.where(self.iters < self.warmup, before[0] + (batch - before[0]) / self.iters, before[0])
            self.running_phi.copy_(DECAY * phi + (1 - DECAY) * batch)
        before = self._before or (self.running_phi, self.iters)
        return torch.where(before[1] <= self.warmup, batch, before[0].to(batch.dtype))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, warmup={self.warmup}"
