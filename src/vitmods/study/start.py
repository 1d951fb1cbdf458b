"""Trained weights that a study or a fine-tuning starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from vitmods.adapters import load
from vitmods.apply import as_vit
from vitmods.config import ViTConfig
from vitmods.errors import UserError
from vitmods.finetune.delta import fingerprint
from vitmods.recipes import Recipe
from vitmods.study.store import read_json
from vitmods.vit import Resampling, ViT


def open_start(source: str) -> ViT:
    """The model that a checkpoint holds, as it was trained.

    Args:
        source: a trial's folder (`vitmods train`, or one of a study), a file or folder that `vitmods.adapters.load`
            reads, or the name of a timm model with published weights, with or without `timm:` before it.

    Raises:
        UserError: there is no such checkpoint, it cannot be read, or its weights cannot be had.
    """
    path = Path(source)
    if not path.exists():
        return _from_timm(source.removeprefix("timm:"))
    model = load(path)
    told = read_json(path / "config.json") if path.is_dir() else None
    if told and "recipe" in told:  # a trial's
        recipe = Recipe.from_dict(told["recipe"])
        model.pretrained_cfg.update(mean=recipe.mean, std=recipe.std)
    return model


def open_trial(folder: Path) -> ViT:
    """The model of a finished trial. UserError where the folder holds none."""
    if not ((folder / "config.json").exists() and (folder / "model.safetensors").exists()):
        raise UserError(
            f"{folder} holds no finished trial: it needs config.json and model.safetensors. Trials of a study lie in "
            "trials/ARM/seedK of its folder."
        )
    return open_start(str(folder))


def _from_timm(name: str) -> ViT:
    import timm

    if not timm.is_model(name):
        raise UserError(
            f"There is no checkpoint '{name}': give a trial's folder, a file of weights, or a timm model's name as "
            "vit_small_patch16_224.augreg_in1k."
        )
    try:
        model = timm.create_model(name, pretrained=True)
    except Exception as error:  # whatever the network, the hub or the file may raise
        raise UserError(
            f"timm gives no weights of {name}: {str(error).rstrip('.')}. Without a network, give a file of weights."
        ) from error
    return as_vit(model.eval())


@dataclass(frozen=True)
class Start:
    """A checkpoint as part of a study: where it was found, what it held, and how positions become those of another
    resolution."""

    source: str
    fingerprint: str
    positions: Resampling = "bicubic"

    @classmethod
    def of(cls, source: str, positions: Resampling = "bicubic") -> tuple[Start, ViTConfig]:
        """The checkpoint and its config. Raises UserError as `open_start` does."""
        model = open_start(source)
        return cls(source, fingerprint(model), positions), model.config

    def build(self, config: ViTConfig, seed: int) -> ViT:
        """Its model with the pictures and classes of `config`: positions resampled, a new head drawn from the seed.

        Raises UserError if it no longer holds the same weights, or reads other channels.
        """
        model = open_start(self.source)
        if fingerprint(model) != self.fingerprint:
            raise UserError(f"{self.source} no longer holds the weights that this began with.")
        if config.in_chans != model.config.in_chans:
            raise UserError(
                f"{self.source} reads {model.config.in_chans} channels, not {config.in_chans}: set in_chans to that."
            )
        torch.manual_seed(seed)
        model.set_input_size(config.img_size, positions=self.positions)
        model.reset_classifier(config.num_classes)
        return model
