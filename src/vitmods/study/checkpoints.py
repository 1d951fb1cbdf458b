"""A folder of checkpoints: an arm for each, one of them base, for each seed where there are several."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitmods.study.arms import BASE, Arm, split_training
from vitmods.study.plan import MOST_SEEDS, Settings
from vitmods.study.state import Evaluated, Selection, StudyState
from vitmods.study.store import StudyFolder
from vitmods.util.errors import UserError

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
