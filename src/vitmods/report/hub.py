"""Save and load models in the layout of timm and Hugging Face: safetensors, config, model card; nothing pickled."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from vitmods import __version__
from vitmods.adapters.apply import as_vit
from vitmods.adapters.timm_folder import OURS, write_timm_folder
from vitmods.changes import Change
from vitmods.model.vit import ViT
from vitmods.report.templates import templates
from vitmods.study.answer import Answer
from vitmods.study.arms import parse_edits
from vitmods.study.bases import described
from vitmods.study.changed import DESCRIPTION, PREPROCESSOR, Library, Origin, open_changed, write_changed, write_library
from vitmods.study.checkpoints import Checkpoint
from vitmods.study.retrain import arm_named, estimate_of
from vitmods.study.store import StudyFolder, read_object
from vitmods.tasks.base import DEFAULT, TASKS, TaskModel
from vitmods.train.trial import CONFIG, MODULES, RESULT, WEIGHTS
from vitmods.util.address import named
from vitmods.util.errors import UserError
from vitmods.util.files import check_weights, disk_errors, make_folder, write_atomically, write_json
from vitmods.util.remote import is_there
from vitmods.util.text import public_command, without_place, without_places

CARD = "README.md"
_UP = 5  # at most so many folders from a trial to its study
_READ = ["*.json", "*.safetensors", CARD]  # files downloaded from the Hub


class StartWeights(NamedTuple):
    """The trained weights that a trial started from: their name, their place on the Hub and their license, as far as
    timm or the files beside them say."""

    name: str = ""
    hub_id: str = ""
    license: str = ""

    @classmethod
    def of(cls, start: Any) -> StartWeights:
        source = str(start.get("source", "")) if isinstance(start, Mapping) else ""
        folder, words = Path(source), None
        if source and folder.is_dir():
            card = folder / CARD
            if card.is_file():
                from huggingface_hub import ModelCard
                from yaml import YAMLError  # type: ignore[import-untyped]

                with suppress(ValueError, OSError, YAMLError):  # a page without metadata
                    words = ModelCard.load(card).data.get("license")
            return cls(folder.name, "", str(words or ""))
        if source and not folder.exists():
            from timm.models import get_pretrained_cfg

            with suppress(RuntimeError):  # an unknown tag
                words = get_pretrained_cfg(source.removeprefix("timm:"))
        return cls(without_place(source), *(str(getattr(words, name, None) or "") for name in ("hf_hub_id", "license")))


def model_card(
    name: str,
    model: ViT | None,
    architecture: str | None,
    library: str,
    config: Mapping[str, Any],
    result: Mapping[str, Any],
    answer: Answer | None,
    license: str | None,
) -> str:
    """Return README.md: what the model is, how to open it, the results of its study, its limits, and the metadata that
    Hugging Face reads.

    Args:
        name: title of the card.
        model: None for a trial with modules besides a ViT.
        architecture: timm's name, or transformers' class; None if neither can open it.
        library: that opens it: timm, transformers or vitmods.
        config, result: contents of the trial's config.json and result.json, if any.
        answer: of the study that the model belongs to, if any.
        license: of the weights, in the Hub's spelling.
    """
    arms = [arm.name for arm in answer.every_arm] if answer else []
    arm = arm_named(answer, config["arm"]) if answer and config.get("arm") in arms else None
    data = Path(str(config.get("data", {}).get("name", ""))).name
    edits = parse_edits(config.get("changes", "")) or (model.changes if model is not None else ())
    origin = StartWeights.of(config.get("start"))
    config = {"environment": {}, **config} if config else {}
    return templates().get_template("card.md").render(
        name=name, config=config, result=result, data=data, arm=arm, answer=answer, architecture=architecture,
        ours=OURS, library=library, version=__version__,
        metadata=_metadata(name, library, config, result, data, license, origin), origin=origin,
        vit=None if model is None else model.vit_config,
        parameters=0 if model is None else sum(parameter.numel() for parameter in model.parameters()),
        changes=[edit for edit in edits if isinstance(edit, Change)], without_places=without_places,
        estimate=estimate_of(answer, arm) if answer and arm else "",
        command=public_command(answer.command) if answer else "",
        recipe=json.dumps(without_place(config["recipe"]), indent=1) if config else "",
    ).strip() + "\n"  # fmt: skip


def _metadata(
    name: str,
    library: str,
    config: Mapping[str, Any],
    result: Mapping[str, Any],
    data: str,
    license: str | None,
    origin: StartWeights,
) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    def slug(words: str) -> str:
        return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") or "images"

    kind = TASKS.get(config.get("task", DEFAULT))
    task = kind.hub_tag if kind else None
    results = [
        EvalResult(
            task_type=task or "other",
            dataset_type=slug(data),
            dataset_name=data,
            dataset_split=result.get("split"),
            metric_type="accuracy" if metric == "top1" else metric,
            metric_name=metric,
            metric_value=value,
        )
        for metric, value in result.get("metrics", {}).items()
    ]
    place = str(config.get("images", {}).get("data", ""))
    is_public = place.startswith("hf:") and without_place(place) == place
    changes = [slug(change) for change in str(config.get("changes", "")).split("+") if change]
    metadata = ModelCardData(
        library_name=library,
        pipeline_tag=task,
        license=license,
        base_model=origin.hub_id or None,
        tags=list(dict.fromkeys(["vitmods", library, "vision-transformer", *changes])),
        datasets=[place.removeprefix("hf:").partition("?")[0]] if is_public else None,
        metrics=sorted({evaluation.metric_type for evaluation in results}) or None,
        model_name=name if results else None,
        eval_results=results or None,
    )
    return str(metadata.to_yaml()).strip()


def save_pretrained(
    source: str | Path | nn.Module,
    folder: str | Path,
    *,
    study: str | Path | None = None,
    name: str | None = None,
    license: str | None = None,
    base: Origin = None,
    library: Library | None = None,
) -> Path:
    """Write a model to a folder that vitmods, timm and Hugging Face's Hub can load; returns the folder.

    The folder contains model.safetensors, config.json in timm's layout and a model card (README.md) with the study's
    results. timm and transformers open models that timm's own ViT can express; timm opens any other ViT after `import
    vitmods.adapters.timm_models`. A trial with modules besides a ViT, or of another kind of model, is copied for
    `from_pretrained` and `vitmods predict`. A model that was changed in place keeps its class: `from_pretrained` opens
    it, and timm where its own arguments (`init_values`, `qk_norm`, `norm_layer`) express the changes.

    Args:
        source: a trial folder, a source for `open_checkpoint`, or a model: a ViT of this library, timm, ...
        folder: created if missing; files with these names are replaced.
        study: the study reported on the card; None: the study that contains the trial, if any.
        name: title of the card; None: the folder's name.
        license: of the weights, in the Hub's spelling (apache-2.0, ...); None: not on the card.
        base: of a model that was changed in place, what it was before: `timm:NAME?depth=2`, `torchvision:NAME`, a
            function `(num_classes, img_size, in_chans) -> model`. None: timm's or Hugging Face's own record.
        library: "timm" or "hf" (transformers): a folder that this library opens without vitmods. LayerScale, factors of
            heads and what else the library does not know, but weights can hold, is folded into the weights.

    Raises:
        UserError: the model or study does not exist, the disk refuses, or the model cannot be written in this layout.
    """
    folder, title = Path(folder), name or Path(folder).resolve().name
    config: dict[str, Any] = {}
    result: dict[str, Any] = {}
    trial = Path(source) if isinstance(source, str | Path) else None
    if trial is not None and trial.is_dir() and trial.resolve() == folder.resolve():
        raise UserError(f"{folder} is the trial itself: choose another folder.")
    if trial is not None and (trial / RESULT).is_file():
        config, result = read_object(trial / CONFIG), read_object(trial / RESULT)
    model = source if isinstance(source, nn.Module) else Checkpoint.open(str(source)).model
    if study is None and trial is not None:
        above = [path for path in trial.resolve().parents[:_UP] if not named(path).endswith("://")]
        study = next((path for path in above if is_there(StudyFolder(path).settings_file)), None)
    answer = None if study is None else Answer.load(study)
    if answer and config and not _is_of(trial, config, answer):
        raise UserError(f"{trial} is not a trial of the study {named(answer.path)}: give its own, or leave study out.")
    if (folder / CARD).is_file() and "vitmods" not in (folder / CARD).read_text(encoding="utf-8", errors="replace"):
        raise UserError(f"{folder / CARD} is not a card of vitmods, and would be replaced: choose another folder.")
    if base is None and isinstance(spec := config.get("model", {}).get("base"), str):
        base = spec
    if library and isinstance(model, TaskModel):
        raise UserError(f"{source} contains modules of its task, which {library} does not know: leave library out.")
    vit: ViT | None = None
    with disk_errors(folder):
        if library is not None:
            vit, architecture = model if isinstance(model, ViT) else None, write_library(model, folder, library, base)
            for stale in (DESCRIPTION, *([] if library == "hf" else [PREPROCESSOR])):
                (folder / stale).unlink(missing_ok=True)
        elif trial is not None and config and (described(model) is None or (trial / MODULES).exists()):
            architecture = None
            make_folder(folder)
            for name_of_file in (WEIGHTS, MODULES, RESULT):
                if (trial / name_of_file).exists():
                    if name_of_file != RESULT:
                        check_weights(trial / name_of_file)
                    shutil.copyfile(trial / name_of_file, folder / name_of_file)
            write_json(folder / CONFIG, without_place(config))
        elif hasattr(model, "vm_changes"):
            architecture = write_changed(model, make_folder(folder), base)
        else:
            vit = as_vit(model)
            architecture = write_timm_folder(vit, folder)
        opens_in = "transformers" if library == "hf" else "timm" if architecture not in (None, OURS) else "vitmods"
        card = model_card(title, vit, architecture, opens_in, config, result, answer, license)
        write_atomically(folder / CARD, lambda file: file.write(card.encode()))
    return folder


def _is_of(trial: Path | None, config: Mapping[str, Any], answer: Answer) -> bool:
    """Whether a trial is in the folder of a study, or is of one of its arms on its images."""
    if trial is None or trial.resolve().is_relative_to(answer.path.resolve()):
        return True
    arms = {arm.name for arm in answer.every_arm}
    return config.get("arm") in arms and config.get("data", {}).get("name") == answer.data.get("name")


def push_to_hub(
    source: str | Path | nn.Module,
    repo_id: str,
    *,
    study: str | Path | None = None,
    license: str | None = None,
    base: Origin = None,
    library: Library | None = None,
    private: bool | None = None,
    token: str | None = None,
) -> str:
    """Write a model like `save_pretrained` and upload it to Hugging Face's Hub; returns the address of the commit.

    Args:
        source, study, license, base, library: see `save_pretrained`.
        repo_id: "user/name"; created if it does not exist.
        private: whether a new repository is private; None: the account's default.
        token: None: the token of `hf auth login`, or HF_TOKEN.

    Raises:
        UserError: see `save_pretrained`, or the Hub refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        title = repo_id.rpartition("/")[2]
        save_pretrained(source, folder, study=study, name=title, license=license, base=base, library=library)
        try:
            api = HfApi(token=token, library_name="vitmods")
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            commit = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Model and card by vitmods")
        except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"Cannot upload to {repo_id}: {reason}. Log in with `hf auth login`.") from error
    return str(commit.commit_url)


def from_pretrained(source: str | Path, *, revision: str | None = None, token: str | None = None) -> nn.Module:
    """Load a model of `save_pretrained` or `push_to_hub`, or a ViT of timm or Hugging Face, in evaluation mode.

    Args:
        source: a folder or file, or "user/name" on the Hub; only files without code are downloaded.
        revision: branch, tag or commit on the Hub; None: the newest.
        token: for private repositories.

    Raises:
        UserError: the folder or repository does not exist, or does not contain a readable model.
    """
    folder = Path(source)
    if not folder.exists():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        try:
            folder = Path(snapshot_download(str(source), revision=revision, token=token, allow_patterns=_READ))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"Neither a local folder nor a repository on the Hub: {source} ({reason}).") from error
    elif revision is not None:
        raise UserError(f"{source} is a local file or folder, without revisions: drop revision.")
    changed = open_changed(folder)
    return Checkpoint.open(str(folder)).model if changed is None else changed
