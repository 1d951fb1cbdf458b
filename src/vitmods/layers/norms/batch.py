"""Batch normalization of tokens (Ioffe & Szegedy, 2015)."""

from torch import Tensor
from torch.nn import functional as F

from vitmods.layers.norms.contract import Device, Dtype, RunningNorm, batch_moments, dtn_table, norm_kind, processes
from vitmods.ops.context import upcast
from vitmods.ops.padding import padding_of


@norm_kind(
    "batch",
    title="BatchNorm",
    shorts=("batchnorm",),
    paper="Ioffe & Szegedy: Batch Normalization: "
    "Accelerating Deep Network Training by Reducing Internal Covariate Shift. "
    "ICML 2015",
    url="https://arxiv.org/abs/1502.03167",
    how="statistics over all tokens of the batch, for each channel",
    published=dtn_table(77.3, 77.2),
    folds=True,
)
class BatchNorm(RunningNorm):
    r"""Normalizes with statistics over batch and tokens, for each channel.

    .. math:: y = \gamma \, \frac{x - \mathrm{mean}}{\sqrt{\mathrm{var} + \epsilon}} + \beta

    Shapes: (B, N, C) or (B, rows, columns, C) in and out. Training normalizes by the batch (biased variance) and
    gathers ``running_mean`` and ``running_var`` (unbiased) with weight ``momentum`` for the newest batch; evaluation
    uses those. Prefix tokens are counted as any other token. Statistics are in float32 whatever the input type; the
    output has the input's type.

    Processes: when torch.distributed is initialized, training takes the statistics over the batches of all processes,
    so that they agree with one process on the whole batch, as do the gradients.

    Warns once below 8 images a batch.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        affine: bool = True,
        momentum: float = 0.1,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(dim, eps, affine, device, dtype)
        self.momentum = momentum
        self.run("running_mean", 0.0, device, dtype)
        self.run("running_var", 1.0, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.tokens(x)
        self.warn_of_small_batches(flat.shape[0] * processes())
        if self.training and (processes() > 1 or padding_of(self, flat) is not None):
            return self.normalize(flat).view_as(x)
        running = self.running_mean, self.running_var
        if self.training and not self.gathers:
            running = self.running_mean.clone(), self.running_var.clone()
        # (B N, C) is a view with channels last: the transposed view that BatchNorm1d wants costs 2 to 5 times as much.
        y = F.batch_norm(
            upcast(flat.flatten(0, 1)),
            *running,
            None if self.weight is None else upcast(self.weight),
            None if self.bias is None else upcast(self.bias),
            self.training,
            self.momentum,
            self.eps,
        )
        return y.view_as(x).to(x.dtype)

    def statistics(self, mean: Tensor, var: Tensor, length: Tensor | int) -> tuple[Tensor, Tensor]:
        """Return mean and variance over all processes."""
        mean, var, tokens = batch_moments(mean, var, length)
        self.gather("running_mean", mean, self.momentum)
        self.gather("running_var", var * (tokens / (tokens - 1)), self.momentum)
        return mean, var
