"""Trained models: opened from a trial, a file or an exported graph, and as what a study starts from."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.adapters import load, open_checkpoint
from vitmods.adapters.apply import as_vit
from vitmods.adapters.own import read_seen, seen_by_trial
from vitmods.adapters.weights import ENDINGS, NAMES
from vitmods.fast.export import EXTRA
from vitmods.finetune.delta import fingerprint_of
from vitmods.finetune.roles import ROLES
from vitmods.model.config import ViTConfig
from vitmods.model.vit import Resampling, ViT, vit
from vitmods.recipes import Recipe
from vitmods.study.arms import BASE, Arm, LineUp, arms_from_text, find_line_up, is_foreign, parse_edits, split_training
from vitmods.study.bases import Base, ForeignBase, described, edited, load_into, read_weights, rebuilt
from vitmods.study.cells import MOST_SEEDS, image_settings
from vitmods.study.changed import open_changed, pixels_of
from vitmods.study.state import Evaluated, StudyState
from vitmods.study.store import StudyFolder, read_object, slug
from vitmods.tasks.base import DEFAULT, TASKS, TaskModel
from vitmods.train.trial import MODULES, WEIGHTS
from vitmods.util.address import named
from vitmods.util.errors import UserError, explaining, first_line, needs
from vitmods.util.files import check_weights_kept
from vitmods.util.limits import parse_json
from vitmods.util.text import printable


def seeds_of(source: str) -> list[int]:
    """List the seeds in a folder of checkpoints seed0, seed1, ...; empty for a checkpoint."""
    folder = Path(source)
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    seeds = sorted(int(match[1]) for name in names if (match := re.fullmatch(r"seed(\d+)", name)))
    return [seed for seed in seeds if seed < MOST_SEEDS]


def seeds_in(source: str) -> list[str]:
    """List the checkpoints in a folder of seed0, seed1, ... by seed; the checkpoint itself otherwise."""
    return [str(Path(source) / f"seed{seed}") for seed in seeds_of(source)] or [source]


def checkpoint_of(source: str, seed: int = 0) -> str:
    """Return the checkpoint itself, or that of the seed from a folder of seed0, seed1, ...

    Raises UserError if it does not exist.
    """
    seeds = seeds_of(source)
    if not seeds:
        return source
    chosen = seed % MOST_SEEDS  # trials for tuning start from the same weights
    if chosen not in seeds:
        names = ", ".join(f"seed{number}" for number in seeds)
        raise UserError(
            f"{source} does not hold seed{chosen}, but {names}: each seed of this study starts from the weights "
            "of the same seed. Ask for those seeds, or train the others first."
        )
    return str(Path(source) / f"seed{chosen}")


def arms_in(source: str) -> dict[str, Arm]:
    """List the arms, base among them, of a folder with several checkpoints; empty if `source` is a single one.

    A study's folder has its own arms, with their changes. Any other folder has an arm for each file of weights, each
    folder of a model and each folder of seed0, seed1, ..., named after it.

    Raises:
        UserError: none of them is base.
    """
    folder = Path(source)
    if not folder.is_dir() or is_checkpoint(folder) or (folder / "result.json").is_file():
        return {}
    study = StudyFolder(folder)
    if facts := study.facts():
        state = StudyState(study, facts.study(), Evaluated(facts.splits))
        if state.settings.sweep and state.selections:
            raise UserError(f"{study.path} is a sweep: give the folder of one arm under one setting, in its trials.")
        trained = {}
        for (setting, name), selection in state.selections.items():
            trial = state.trial(setting, name, state.settings.seeds[0])
            if trial is None:
                raise UserError(f"{study.path} has not chosen for {name} yet: finish that study first.")
            trained[name] = Arm(name, selection.arm.changes, start=str(study.trial(trial).parent))
        return trained
    paths = {p.stem if p.is_file() else p.name: p for p in sorted(folder.iterdir()) if is_checkpoint(p)}
    if paths and BASE not in paths:
        raise UserError(
            f"{source} holds the checkpoints {', '.join(paths)}, and none is named base: give the one that the others "
            "are compared with that name, or give a single checkpoint."
        )
    records = {name: _foreign_record(checkpoint_of(str(path))) or {} for name, path in paths.items()}
    return {n: Arm(n, parse_edits(records[n].get("edits", "")), start=str(path)) for n, path in paths.items()}


def use_trained_arms(arms: Any, trained: Mapping[str, Arm]) -> Any:
    """Return the arms that a user names, as `make_arms` takes them; those that the folder holds start from their own
    weights, and `NAME+train(...)` may say how they are trained. Without names, all arms of the folder but base."""
    if isinstance(arms, Mapping):
        return arms
    chosen = []
    for arm in [arms] if isinstance(arms, str | Arm) else arms:
        if isinstance(arm, str) and arm.strip() in trained:
            arm = trained[arm.strip()]
        elif isinstance(arm, str):
            name, recipe = split_training(arm)
            if recipe and name in trained:
                arm = Arm(arm.strip(), trained[name].changes, recipe, trained[name].start)
        chosen.append(arm)
    return chosen or [arm for name, arm in trained.items() if name != BASE]


def arm_names(source: str) -> tuple[str, ...]:
    """List the arms in a folder of checkpoints, without base."""
    return tuple(name for name in arms_in(source) if name != BASE)


def check_weights_for(line_up: LineUp, start: str | Path | None) -> None:
    """Raise UserError where a published table needs trained weights and none are given, or where an arm that changes
    the model would start from base's, which were trained without the change."""
    if not line_up.start:
        return
    if start is None:
        raise UserError(f"{line_up.name} starts from trained weights: add --from, {line_up.start}.")
    changed = [arm.name for text in line_up.arms for arm in arms_from_text(text) if arm.changes]
    if missing := " ".join(name for name in changed if name not in arm_names(str(start))):
        raise UserError(
            f"{start} lacks weights of {missing}, and {line_up.name} compares models trained with and without the "
            "change: give --from the folder of a study with both. What the change does to trained weights of base is "
            f"another question: `vitmods compare --from {start} --arms {missing}`."
        )


def refuse_two_meanings(arms: Any) -> None:
    """Raise UserError for a word that names a line-up and, with trained weights, a part of them: `norms`."""
    for arm in [arms] if isinstance(arms, str) else arms if isinstance(arms, Sequence) else ():
        if isinstance(arm, str) and arm.strip() in ROLES and (line_up := find_line_up(arm)):
            word, several = arm.strip(), " ".join(line_up.arms)
            raise UserError(
                f"With trained weights {word} could be two things. To train the {word} alone, write train({word}); for "
                f"other kinds of them, which replace trained weights, name the arms: {several}."
            )


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a file of weights by its ending, or a folder that holds one, or one of seed0, seed1, ..."""
    if path.is_file():
        return path.suffix in ENDINGS
    return any((path / name).is_file() for name in NAMES) or bool(seeds_of(str(path)))


def open_trial(folder: Path) -> Any:
    """Return the model of a finished trial in evaluation mode, with its task's modules.

    Raises:
        UserError: it does not exist, is damaged, or needs a user's module that is not imported.
    """
    check_weights_kept(folder)
    weights = folder / "model.safetensors"
    if not ((folder / "config.json").exists() and weights.exists()):
        raise UserError(
            f"{named(folder)} does not hold a finished trial: it needs config.json and model.safetensors. Trials of a "
            "study are in trials/ARM/seedK of its folder, or in trials/ARM/POINT/seedK where values were tuned."
        )
    config = read_object(folder / "config.json")
    record = config.get("model")
    if isinstance(record, dict) and "base" in record:
        backbone: Any = rebuilt(record, weights)
        load_into(backbone, weights)
        known = getattr(backbone, "pretrained_cfg", None) or {}
        backbone.pretrained_cfg = {**known, **read_seen(seen_by_trial(config))}
    else:
        backbone = load(folder)
    if not (folder / MODULES).exists():
        return backbone
    with torch.random.fork_rng(devices=[]):  # the initial weights are not used
        task = TASKS[config["task"]].from_recipe(Recipe.from_dict(config["recipe"]))
        model = task.wrap(backbone, len(config["data"]["classes"]))
    missing, unexpected = load_into(model, folder / MODULES, strict=False)
    if wrong := [*(name for name in missing if not name.startswith("backbone.")), *unexpected]:
        raise UserError(
            f"{named(folder / MODULES)} does not hold the modules of the task {config['task']}: {', '.join(wrong[:5])}."
        )
    return model.eval()


@dataclass(frozen=True)
class Checkpoint:
    """A trained model in evaluation mode, and how its images are prepared.

    name:     the arm and seed of a trial, as dpn-seed0, else that of the file; can be part of a file's name
    recipe:   how images are prepared (`augment`), and the precision
    settings: `img_size`, `in_chans`, `task`; of a trial also its `data` and how they were split
    classes:  None if they are not named
    fingerprint: of a trial's images
    data:     of a trial, the entry of its config.json
    """

    source: str
    name: str
    model: nn.Module
    recipe: Recipe
    settings: Mapping[str, Any]
    classes: tuple[str, ...] | None = None
    fingerprint: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, source: str, trust: bool = False) -> Checkpoint:
        """Open a trial's folder, a folder of one seed, a file that `vitmods.export` wrote (.onnx and .pt2 run on the
        CPU), or what `vitmods.adapters.open_checkpoint` opens.

        Raises UserError if it does not exist or cannot be read, or if it is a program of torch.export without `trust`:
        opening such a file can run its author's code.
        """
        if Path(source).suffix in GRAPHS:
            return cls._of_graph(Path(source), trust)
        seeds = seeds_in(source)
        trained = [folder for folder in seeds if (Path(folder) / WEIGHTS).is_file()] or seeds[:1]
        if len(trained) > 1:
            raise UserError(f"{source} holds several trained models: give one, {' or '.join(trained[:3])}.")
        (source,), folder = trained, Path(trained[0])
        if (changed := open_changed(folder)) is not None:
            return cls._of_model(source, changed, pixels_of(changed, folder))
        config = read_object(folder / "config.json") if folder.is_dir() else {}
        if folder.is_dir() and not is_checkpoint(folder):
            open_trial(folder)  # reports what is missing
        if not ("recipe" in config and "images" in config):
            model = open_checkpoint(source)
            shape = model.vit_config
            return cls._of_model(
                source, model, {**model.pretrained_cfg, "input_size": (shape.in_chans, *shape.img_size)}
            )
        try:
            settings, data = image_settings(config["images"]), config["data"]
            name, recipe = slug(f"{config['arm']}-seed{config['seed']}"), Recipe.from_dict(config["recipe"])
            classes, fingerprint = tuple(map(printable, data["classes"])), data["fingerprint"]
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"{folder / 'config.json'} is damaged ({error!r}): copy the folder again.") from error
        return cls(source, name, open_trial(folder), recipe, settings, classes, fingerprint, data)

    def as_seen(self) -> Checkpoint:
        """The checkpoint with its ViT for images of the size that the preprocessor beside the weights makes, which may
        be another than that of the positions."""
        size = getattr(self.model, "pretrained_cfg", {}).get("seen_size")
        if size is None or not isinstance(self.model, ViT) or size == self.model.vit_config.img_size:
            return self
        self.model.set_input_size(size)
        return replace(self, settings={**self.settings, "img_size": list(size)})

    @property
    def backbone(self) -> nn.Module:
        """The model without a task's modules."""
        backbone: nn.Module = self.model.backbone if isinstance(self.model, TaskModel) else self.model
        return backbone

    @property
    def vit(self) -> ViT:
        """The vitmods ViT, without a task's modules. Raises UserError for other models."""
        backbone = self.backbone
        if not isinstance(backbone, ViT) or described(backbone) is None:
            raise UserError(
                f"{self.source} is a {type(backbone).__name__} without a vitmods config: it cannot be a checkpoint to "
                "start from. vitmods.study.open_trial(folder) opens it, and `vitmods evaluate` evaluates it."
            )
        return backbone

    @classmethod
    def _of_model(cls, source: str, model: nn.Module, pretrained: Mapping[str, Any]) -> Checkpoint:
        """Describe images in the model's size and channels, normalized and cropped as timm's names say."""
        view = {"eval_crop": pretrained.get("crop_pct"), "resample": pretrained.get("interpolation")}
        view |= {name: tuple(pretrained[name]) for name in ("mean", "std") if pretrained.get(name)}
        task = pretrained.get("task") or DEFAULT
        recipe = Recipe().with_(**{name: value for name, value in view.items() if value})
        recipe = TASKS[task].fitted(recipe) if task in TASKS else recipe  # else its plugin is missing
        in_chans, *img_size = pretrained["input_size"]
        settings = {"img_size": img_size, "in_chans": in_chans, "task": task}
        classes = tuple(printable(str(name)) for name in pretrained.get("label_names") or ()) or None
        return cls(source, slug(Path(source).stem), model, recipe, settings, classes)

    @classmethod
    def _of_graph(cls, path: Path, trust: bool) -> Checkpoint:
        if not path.is_file():
            raise UserError(f"{path} does not exist.")
        if path.suffix in PROGRAMS and not trust:
            raise UserError(
                f"{path} is a program: opening it can run code that its author put there. If you trust its origin, "
                "say so with --trust (trust=True in Python); or export to .onnx or .safetensors, which cannot."
            )
        with explaining(lambda error: f"{path} cannot be read; it may be damaged: {first_line(error)}"):
            graph, pretrained = GRAPHS[path.suffix](path)
        if "input_size" not in pretrained:
            raise UserError(f"{path} does not say how its images are prepared: write it with `vitmods export`.")
        return cls._of_model(str(path), graph, pretrained)


class Graph(nn.Module):
    """An exported model: images (B, C, H, W) -> logits (B, K), for any number of images even if its batch is fixed."""

    def __init__(self, run: Callable[[Tensor], Tensor], batch: int | None):
        super().__init__()
        self._run, self._batch = run, batch

    def forward(self, images: Tensor) -> Tensor:
        if self._batch is None:
            return self._run(images)
        missing = -len(images) % self._batch
        padded = torch.cat([images, images[:1].expand(missing, -1, -1, -1)])
        return torch.cat([self._run(part) for part in padded.split(self._batch)])[: len(images)]


def _read_onnx(path: Path) -> tuple[Graph, dict[str, Any]]:
    with needs("Running ONNX needs onnxruntime", "onnx"):
        import onnxruntime
    session = onnxruntime.InferenceSession(os.fspath(path), providers=["CPUExecutionProvider"])
    images_input = session.get_inputs()[0]

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {images_input.name: images.numpy()})[0])

    metadata: dict[str, Any] = {}
    for key, text in session.get_modelmeta().custom_metadata_map.items():
        try:
            metadata[key] = parse_json(text)
        except ValueError:  # of another program
            metadata[key] = text
    batch = images_input.shape[0]
    return Graph(run, batch if isinstance(batch, int) else None), metadata


def _read_program(path: Path) -> tuple[Graph, dict[str, Any]]:
    if not zipfile.is_zipfile(path):  # torch would write its traceback
        raise UserError(f"{path} is not a program of torch.export, or it is damaged.")
    extra = {EXTRA: ""}
    program = torch.export.load(path, extra_files=extra)
    images = next(node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs)
    batch = images.meta["val"].shape[0]
    return Graph(program.module(), batch if isinstance(batch, int) else None), parse_json(extra[EXTRA] or "{}")


GRAPHS = {".onnx": _read_onnx, ".pt2": _read_program}
"""ending -> how such a file is read"""
PROGRAMS = (".pt2",)
"""endings of graphs that can run code: torch unpickles parts of them and evaluates expressions in them"""


@dataclass(frozen=True)
class Start:
    """The checkpoint that a study starts from, or a folder with one for each seed.

    fingerprint: of its weights; None for one of several seeds
    positions:   how positions are resampled to another resolution
    account:     what was chosen from a file of several models, and left out
    """

    source: str
    fingerprint: str | None
    positions: Resampling = "bicubic"
    account: str = ""

    @classmethod
    def of(cls, source: str, positions: Resampling = "bicubic") -> tuple[Start, Checkpoint, ViTConfig | str]:
        """Open the checkpoint; returns it with what base is: the config of its ViT, or the spec of another model.

        Raises UserError as `Checkpoint.open` does, and for a model of another library that was changed.
        """
        if not source.strip():
            raise UserError("Trained weights are a folder, a file or the name of a model, and this is empty (--from).")
        path = checkpoint_of(source)
        checkpoint = Checkpoint.open(path)
        base: ViTConfig | str
        if (record := _foreign_record(path)) is None:
            base = _for_another_task(checkpoint.vit.vit_config)
        elif record["edits"]:
            raise UserError(
                f"{source} is {record['base']} with {record['edits']}: start from a trial of base, or give the folder "
                "of the study, whose arms then start from their own weights."
            )
        else:
            base = record["base"]
        fingerprint = fingerprint_of(checkpoint.backbone.state_dict()) if path == source else None
        account = getattr(checkpoint.backbone, "pretrained_cfg", {}).get("account", "")
        return cls(source, fingerprint, positions, account), checkpoint.as_seen(), base

    def record(self) -> dict[str, Any]:
        """Return its fields, as a study's settings have them."""
        return {name: value for name, value in asdict(self).items() if name != "account" or value}

    def build(
        self, config: Base, seed: int, recipe: Recipe | None = None, classes: Sequence[str] | None = None
    ) -> nn.Module:
        """Build its model for the images and classes of `config`, with a new head. A ViT's positions are resampled;
        models of other libraries keep the image size.

        `recipe` sets what only training reads: dropout, drop path, how the head is initialized. With names of `classes`
        the head is the trained one if it has these, and otherwise not zero, so that outputs show what a change does.
        Raises UserError if the weights have changed, or if they do not fit the images.
        """
        path = checkpoint_of(self.source, seed)
        if isinstance(config, ForeignBase):
            return self._build_foreign(Path(path), config, seed, recipe, classes)
        settings, checkpoint = recipe.model.to_config() if recipe else {}, Checkpoint.open(path)
        model = checkpoint.vit
        self._check(model.state_dict())
        if config.in_chans != model.vit_config.in_chans:
            raise UserError(
                f"{self.source} reads {model.vit_config.in_chans} channels, not {config.in_chans}: set in_chans to "
                "that."
            )
        trained_config = _for_another_task(model.vit_config).with_(**settings)
        if trained_config != model.vit_config:
            old, model = model, vit(trained_config)
            weights = old.state_dict()
            model.load_state_dict({name: weights[name] for name in model.state_dict()})
            model.changes, model.pretrained_cfg = old.changes, old.pretrained_cfg
        torch.manual_seed(seed)
        model.set_input_size(config.img_size, positions=self.positions)
        if classes is None or checkpoint.classes != tuple(classes):
            model.reset_classifier(config.num_classes)
        return model if classes is None else _with_visible_head(model, [*model.get_classifier().parameters()])

    def _check(self, weights: Mapping[str, Tensor]) -> None:
        if self.fingerprint is not None and fingerprint_of(weights) != self.fingerprint:
            raise UserError(f"{self.source} no longer holds the weights that this started from.")

    def _build_foreign(
        self, folder: Path, base: ForeignBase, seed: int, recipe: Recipe | None, classes: Sequence[str] | None
    ) -> nn.Module:
        record = _foreign_record(folder)
        if record is None or record["base"] != base.spec:
            raise UserError(f"{folder} does not hold a trial of {base.spec}.")
        settings, edits = recipe.model if recipe else None, parse_edits(record["edits"])
        trained_base = replace(base, in_place=record.get("in_place", True))
        # The head are the tensors whose shapes depend on the number of classes.
        wider = edited(
            replace(trained_base, num_classes=base.num_classes + 1).build(settings, False), edits, base, head=False
        )
        torch.manual_seed(seed)
        model = edited(trained_base.build(settings, False), edits, base, head=False)
        new, others = model.state_dict(), wider.state_dict()
        head = {name for name, value in new.items() if value.shape != others[name].shape}
        trained = read_weights(folder / WEIGHTS)
        self._check(trained)
        if classes is not None and Checkpoint.open(str(folder)).classes == tuple(classes):
            head.clear()
        kept = {name: value for name, value in trained.items() if name not in head}
        if wrong := [name for name in new.keys() - head if name not in kept or kept[name].shape != new[name].shape]:
            raise UserError(
                f"The weights of {folder} do not fit {base.spec} for {' x '.join(map(str, base.img_size))} pixels "
                f"({', '.join(sorted(wrong)[:3])}): keep its image size, {' x '.join(map(str, record['img_size']))}."
            )
        model.load_state_dict(kept, strict=False)
        if classes is not None:
            _with_visible_head(model, [p for name, p in model.named_parameters() if name in head])
        return as_vit(model) if trained_base.in_place and not base.in_place else model


def _for_another_task(config: ViTConfig) -> ViTConfig:
    """Leave out the mask token, which a task that needs one makes, and give each block separate relative
    positions where all blocks share them (BeiT)."""
    return config.with_(mask_token=False, rel_pos=bool(config.rel_pos))


@torch.no_grad()
def _with_visible_head(model: nn.Module, head: Sequence[nn.Parameter]) -> nn.Module:
    """The model with random numbers in a head of zeros, which would hide what a change does."""
    matrices = [parameter for parameter in head if parameter.ndim > 1]
    if not any(matrix.any() for matrix in matrices):
        for matrix in matrices:
            nn.init.normal_(matrix, std=0.02)
    return model


def _foreign_record(folder: str | Path) -> dict[str, Any] | None:
    """How the model of a trial on another library's base was made; None for a vitmods ViT and for other files."""
    config = Path(folder) / "config.json"
    record = read_object(config).get("model") if config.is_file() else None
    is_foreign_trial = isinstance(record, dict) and is_foreign(record.get("base"))
    return record if is_foreign_trial else None
