"""Trained weights that a study or a fine-tuning starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitmods.adapters import load, open_checkpoint
from vitmods.finetune.delta import fingerprint
from vitmods.model.config import ViTConfig
from vitmods.model.sizes import Resampling
from vitmods.model.vit import ViT, vit
from vitmods.study.checkpoints import checkpoint_of
from vitmods.study.models import rebuilt
from vitmods.study.store import read_json
from vitmods.train.trial import trained_model
from vitmods.util.address import named
from vitmods.util.errors import UserError
from vitmods.util.files import check_weights, check_weights_kept
from vitmods.util.limits import read_bytes


def open_trial(folder: Path) -> Any:
    """The model of a finished trial in evaluation mode, with its task's modules: a ViT, or what its base and arm were.

    Raises:
        UserError: there is none, it is damaged, or a user's module that it was made with is not imported.
    """
    check_weights_kept(folder)
    if not ((folder / "config.json").exists() and (folder / "model.safetensors").exists()):
        raise UserError(
            f"{named(folder)} holds no finished trial: it needs config.json and model.safetensors. Trials of a study "
            "lie in trials/ARM/seedK of its folder, or in trials/ARM/POINT/seedK where values were tuned."
        )
    record = (read_json(folder / "config.json") or {}).get("model")
    if isinstance(record, dict) and "base" in record:
        return trained_model(folder, _with_weights(rebuilt(record, folder / "model.safetensors"), folder))
    return trained_model(folder, load(folder))


def _with_weights(model: nn.Module, folder: Path) -> nn.Module:
    from safetensors.torch import load as read

    path = folder / "model.safetensors"
    check_weights(path)
    try:
        model.load_state_dict(read(read_bytes(path, "weights")))
    except Exception as error:  # safetensors and torch raise what they like
        raise UserError(f"{named(path)} cannot be read, or holds other weights: {error}") from error
    return model


@dataclass(frozen=True)
class Start:
    """A checkpoint as part of a study: where it was found, what it held (None: not asked), and how positions become
    those of another resolution. A folder of seed0, seed1, ... holds one for each seed."""

    source: str
    fingerprint: str | None
    positions: Resampling = "bicubic"

    @classmethod
    def of(cls, source: str, positions: Resampling = "bicubic") -> tuple[Start, ViTConfig]:
        """The checkpoint and its config. Raises UserError as `open_checkpoint` does."""
        found = checkpoint_of(source)
        model = open_checkpoint(found)
        return cls(source, fingerprint(model) if found == source else None, positions), model.vit_config

    def build(self, config: ViTConfig, seed: int, settings: Mapping[str, Any] | None = None) -> ViT:
        """Its model with the images and classes of `config`: positions resampled, a new head drawn from the seed.

        `settings` are fields of its config that training alone reads: dropout, drop path, how the head is initialized.
        Raises UserError if it no longer holds the same weights, or reads other channels.
        """
        model = open_checkpoint(checkpoint_of(self.source, seed))
        if self.fingerprint is not None and fingerprint(model) != self.fingerprint:
            raise UserError(f"{self.source} no longer holds the weights that this began with.")
        if config.in_chans != model.vit_config.in_chans:
            raise UserError(
                f"{self.source} reads {model.vit_config.in_chans} channels, not {config.in_chans}: set in_chans to "
                "that."
            )
        model = _with_settings(model, settings or {})
        torch.manual_seed(seed)
        model.set_input_size(config.img_size, positions=self.positions)
        model.reset_classifier(config.num_classes)
        return model


def _with_settings(model: ViT, settings: Mapping[str, Any]) -> ViT:
    """The same weights in a model with these settings."""
    config = model.vit_config.with_(**settings)
    if config == model.vit_config:
        return model
    built = vit(config)
    built.load_state_dict(model.state_dict())
    built.changes, built.pretrained_cfg = model.changes, model.pretrained_cfg
    return built
