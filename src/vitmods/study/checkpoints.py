"""A folder of checkpoints: an arm for each, one of them base, for each seed where there are several.

Trained weights that a study or a fine-tuning starts from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitmods.adapters import load, open_checkpoint
from vitmods.finetune.delta import fingerprint
from vitmods.model.config import ViTConfig
from vitmods.model.vit import Resampling, ViT, vit
from vitmods.study.arms import BASE, Arm, split_training
from vitmods.study.bases import rebuilt
from vitmods.study.plan import MOST_SEEDS, Settings
from vitmods.study.state import Evaluated, Selection, StudyState
from vitmods.study.store import StudyFolder, read_json
from vitmods.train.trial import trained_model
from vitmods.util.address import named
from vitmods.util.errors import UserError
from vitmods.util.files import check_weights, check_weights_kept
from vitmods.util.limits import read_bytes

_FILES = (".safetensors", ".npz", ".pth", ".pt", ".bin", ".ckpt")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def checkpoint_of(source: str, seed: int = 0) -> str:
    """The checkpoint itself, or in a folder of seed0, seed1, ... that of the seed. UserError if it is not there."""
    seeds = _seeds(Path(source))
    if not seeds:
        return source
    chosen = seed % MOST_SEEDS  # trials for tuning begin with the same weights
    if chosen not in seeds:
        raise UserError(
            f"{source} holds no seed{chosen}, but {', '.join(f'seed{k}' for k in seeds)}: each seed of this study "
            "begins with the weights of the same seed. Ask for those seeds, or train the others first."
        )
    return str(Path(source) / f"seed{chosen}")


def seeds_in(source: str) -> list[str]:
    """The checkpoints of seed0, seed1, ... in a folder of those; the checkpoint itself otherwise."""
    return [str(Path(source) / f"seed{seed}") for seed in _seeds(Path(source))] or [source]


def arms_in(source: str) -> dict[str, Arm]:
    """The arms, base among them, of a folder that holds several checkpoints; empty where `source` is a single one.

    A study's folder has its own arms, with their changes. Any other has one for each file of weights, each folder of a
    model and each folder of seed0, seed1, ..., named as that.

    Raises:
        UserError: none of them is base.
    """
    folder = Path(source)
    if not folder.is_dir() or is_checkpoint(folder):
        return {}
    study = StudyFolder(folder)
    if facts := study.facts():
        state = StudyState(study, Settings.from_dict(facts.settings), Evaluated(facts.splits))
        return {one.arm.name: _begun(study, state, one) for one in state.selections.values()}
    found = {_name(path): Arm(_name(path), start=str(path)) for path in sorted(folder.iterdir()) if is_checkpoint(path)}
    if found and BASE not in found:
        raise UserError(
            f"{source} holds the checkpoints {', '.join(found)}, and none is named base: say which one the others are "
            "compared with by that name, or give a single checkpoint."
        )
    return found


def _begun(study: StudyFolder, state: StudyState, selection: Selection) -> Arm:
    """An arm of a study, with the weights of the chosen point where one was tuned."""
    arm, settings = selection.arm, state.settings
    if settings.sweep:
        raise UserError(f"{study.path} is a sweep: give the folder of one arm under one setting, in its trials.")
    trial = state.trial(selection.setting, arm.name, settings.seeds[0])
    if trial is None:
        raise UserError(f"{study.path} has not chosen for {arm.name} yet: finish that study first.")
    return Arm(arm.name, arm.changes, start=str(study.trial(trial).parent))


def adopt(arms: Any, found: Mapping[str, Arm]) -> Any:
    """The arms that a user names, as `make_arms` takes them, with those that the folder holds begun with their own
    weights; `NAME+train(...)` may say what is trained. All that it holds, if none is named."""
    if isinstance(arms, Mapping):
        return arms
    listed = [arms] if isinstance(arms, str | Arm) else list(arms)
    return [_adopted(arm, found) for arm in listed] or [arm for name, arm in found.items() if name != BASE]


def _adopted(arm: Any, found: Mapping[str, Arm]) -> Any:
    if not isinstance(arm, str):
        return arm
    if arm.strip() in found:
        return found[arm.strip()]
    name, recipe = split_training(arm) if "train(" in arm else (arm, {})
    return Arm(arm.strip(), found[name].changes, recipe, found[name].start) if name in found else arm


def names(source: str) -> tuple[str, ...]:
    """What `arms_in` finds beside base."""
    return tuple(name for name in arms_in(source) if name != BASE)


def is_checkpoint(path: Path) -> bool:
    """Whether it is a file of weights by its ending, or a folder with one, or of seed0, seed1, ..."""
    if path.is_file():
        return path.suffix in _FILES
    return any((path / name).is_file() for name in _WEIGHTS) or bool(_seeds(path))


def _name(path: Path) -> str:
    return path.stem if path.is_file() else path.name


def _seeds(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    named = (re.fullmatch(r"seed(\d+)", path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in named if match and int(match[1]) < MOST_SEEDS)


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
