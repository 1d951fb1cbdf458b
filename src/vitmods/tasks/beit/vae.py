"""Codes of a discrete VAE (Ramesh et al., 2021, arXiv:2102.12092), in the form of BeiT's own tokenizer."""

import hashlib
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.data.store import remembered
from vitmods.model.vit import ViT
from vitmods.tasks.beit.recipes import BeitPart
from vitmods.util.cache import user_cache
from vitmods.util.errors import UserError
from vitmods.util.files import make_folder
from vitmods.util.limits import read_npz

_FORMAT = "vitmods vae 1"  # to be raised when the same images give other weights
_STAGES = 3  # at most; each halves the sides
_WIDTH = 64
_TEMPERATURE = 0.9
_KL_WEIGHT = 0.1  # of the divergence of a patch's codes from the uniform distribution
_RATE, _BATCH = 1e-3, 16


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first, second = (nn.Conv2d(_WIDTH, _WIDTH, 3, padding=1) for _ in range(2))
        self.branch = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Conv2d(_WIDTH, _WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def _encoder(channels: int, codes: int, stages: int) -> nn.Sequential:
    """Images (B, channels, height, width) -> logits of codes (B, codes, height / 2^stages, width / 2^stages)."""
    layers: list[nn.Module] = [] if stages else [nn.Conv2d(channels, _WIDTH, 1), nn.ReLU()]
    for stage in range(stages):
        layers += [nn.Conv2d(_WIDTH if stage else channels, _WIDTH, 4, stride=2, padding=1), nn.ReLU(), _Residual()]
    return nn.Sequential(*layers, nn.Conv2d(_WIDTH, codes, 1))


class Vae(nn.Module):
    """An encoder to codes, a vector for each code, and a decoder from vectors (B, 64, rows, columns) to images."""

    def __init__(self, channels: int, codes: int, stages: int) -> None:
        super().__init__()
        self.encoder, self.vectors = _encoder(channels, codes, stages), nn.Embedding(codes, _WIDTH)
        layers: list[nn.Module] = [nn.Conv2d(_WIDTH, _WIDTH, 1)]
        for _ in range(stages):
            layers += [_Residual(), nn.ConvTranspose2d(_WIDTH, _WIDTH, 4, stride=2, padding=1), nn.ReLU()]
        self.decoder = nn.Sequential(*layers, nn.Conv2d(_WIDTH, channels, 1))

    def loss(self, images: Tensor) -> Tensor:
        """The squared error of a value, and the divergence of its part of a patch's code from the uniform one."""
        logits = self.encoder(images)
        choice = F.gumbel_softmax(logits, tau=_TEMPERATURE, dim=1)
        error = F.mse_loss(self.decoder(torch.einsum("bkhw,kd->bdhw", choice, self.vectors.weight)), images)
        log_q = logits.log_softmax(dim=1)
        divergence = (log_q.exp() * log_q).sum(dim=1).mean() + np.log(logits.shape[1])
        values_of_patch = images[0].numel() / logits[0, 0].numel()
        return error + _KL_WEIGHT / values_of_patch * divergence


def train_encoder(images: Tensor, codes: int, stages: int, steps: int) -> dict[str, NDArray[np.float32]]:
    """Train a VAE on images (N, C, H, W). Returns its encoder's weights, in the same bits each time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums of several threads differ in their last bits
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.device("cpu"):
            torch.manual_seed(0)
            vae = Vae(images.shape[1], codes, stages)
            optimizer = torch.optim.Adam(vae.parameters(), _RATE)
            order = torch.empty(0, dtype=torch.int64)
            for step in range(steps):
                if len(order) < min(_BATCH, len(images)):
                    order = torch.randperm(len(images))
                batch, order = images[order[:_BATCH]], order[_BATCH:]
                optimizer.param_groups[0]["lr"] = _RATE * (1 - step / steps)
                optimizer.zero_grad()
                loss = vae.loss(batch)
                loss.backward()
                optimizer.step()
            if not torch.isfinite(loss):
                raise UserError(f"The loss of the discrete VAE is not finite after {steps:,} steps: set fewer codes.")
    finally:
        torch.set_num_threads(threads)
    return {name: tensor.numpy() for name, tensor in vae.encoder.state_dict().items()}


class VaeCodes(nn.Module):
    """The likeliest code of each patch, int64 (B, T), by the encoder of a discrete VAE of training images.

    The encoder reads images of 8 pixels, or of a smaller power of two, a patch. It is trained once: other trials on the
    same images read its weights from the user's cache. They are buffers, saved with the task's modules.
    """

    def __init__(self, part: BeitPart, backbone: ViT) -> None:
        super().__init__()
        config = backbone.vit_config
        self.steps, self.codes = part.vae_steps, part.codes
        self.stages = min(_STAGES, min(config.patch_size).bit_length() - 1)
        self.size = config.grid[0] << self.stages, config.grid[1] << self.stages
        with torch.random.fork_rng(devices=[]):
            self.encoder = _encoder(config.in_chans, part.codes, self.stages)
        for module in self.encoder.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                delattr(module, name)
                module.register_buffer(name, torch.zeros_like(parameter.detach()))

    @property
    def waits_for_images(self) -> bool:
        """Whether `fit` has not trained the encoder yet."""
        return not bool(next(self.encoder[-1].buffers()).any())

    def view(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) at the encoder's size."""
        return F.interpolate(images.float(), self.size, mode="area")

    @torch.no_grad()
    def fit(self, images: Iterable[Tensor]) -> None:
        """Train the encoder, or read it. UserError if all patches get one code; a warning if few codes are used."""
        views = torch.cat([self.view(batch).cpu() for batch in images])
        facts = f"{_FORMAT} {torch.__version__} {self.codes} {self.stages} {self.steps} {tuple(views.shape)}"
        key = hashlib.sha256(facts.encode() + views.numpy().tobytes()).hexdigest()[:32]
        with _alone(key):
            weights = remembered(
                f"vae/{key}.npz",
                lambda: train_encoder(views, self.codes, self.stages, self.steps),
                read_npz,
                lambda file, value: np.savez(file, **value),  # type: ignore[arg-type]
            )
        self.encoder.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
        used = len(torch.cat([self(part).unique() for part in views.split(50)]).unique())
        text = f"The discrete VAE uses {used:,} of {self.codes:,} codes after {self.steps:,} steps"
        if used == 1:
            raise UserError(f"{text}: nothing can be predicted. Set more vae_steps, or 0 for clusters of pixels.")
        if used < self.codes / 10:
            warnings.warn(f"{text}: set more vae_steps, or fewer codes.", stacklevel=2)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, enabled=False):
            codes: Tensor = self.encoder(self.view(images)).argmax(dim=1).flatten(1)
        return codes


def _alone(key: str) -> AbstractContextManager[object]:
    """One process at a time trains an encoder; the others then read it."""
    try:
        return FileLock(make_folder(user_cache() / "vae") / f"{key}.lock")
    except (UserError, OSError):  # without a place for caches each trains its own
        return nullcontext()
