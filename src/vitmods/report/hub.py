"""Models to and from folders in timm's and Hugging Face's layout: safetensors, config, model card; nothing pickled."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from vitmods.adapters import open_checkpoint
from vitmods.adapters.apply import as_vit
from vitmods.adapters.timm_folder import write_timm_folder
from vitmods.report.card import Card
from vitmods.study.answer import Answer
from vitmods.study.models import described
from vitmods.study.start import open_trial
from vitmods.study.store import StudyFolder, read_object
from vitmods.train.trial import CONFIG, MODULES, RESULT, WEIGHTS
from vitmods.util.address import named
from vitmods.util.errors import UserError
from vitmods.util.files import check_weights, disk_errors, make_folder, write_atomically, write_json
from vitmods.util.places import without_place
from vitmods.util.remote import is_there

CARD = "README.md"
_UP = 5  # folders from a trial to its study, at most
_READ = ["*.json", "*.safetensors", CARD]  # of what lies on the Hub


def save_pretrained(
    source: str | Path | nn.Module,
    folder: str | Path,
    *,
    study: str | Path | None = None,
    name: str | None = None,
    license: str | None = None,
) -> Path:
    """Write a model as a folder that this library, timm and Hugging Face's Hub read; returns the folder.

    model.safetensors, config.json in timm's layout and README.md, the model card, with what the study found. timm (and
    transformers) open it by themselves where timm's own ViT can express the model, and any other ViT after `import
    vitmods.adapters.timm_models`. A trial with modules beside a ViT, or of another kind of model, is written as it is,
    for `from_pretrained` and `vitmods predict`.

    Args:
        source: a trial's folder, what `open_checkpoint` opens, or a model: a ViT of this library, timm, ...
        folder: is made; files of these names in it are replaced.
        study: the folder of the study whose result the card tells; None: that which the trial lies in, if any.
        name: the card's title; None: the folder's name.
        license: of the weights, as the Hub spells it (apache-2.0, ...); None: the card says none.

    Raises:
        UserError: there is no such model or study, the disk refuses, or the model cannot be written so.
    """
    folder, title = Path(folder), name or Path(folder).resolve().name
    config: dict[str, Any] = {}
    result: dict[str, Any] = {}
    trial = Path(source) if isinstance(source, str | Path) else None
    if trial is not None and trial.is_dir() and trial.resolve() == folder.resolve():
        raise UserError(f"{folder} is the trial itself: write it to another folder.")
    if trial is not None and (trial / RESULT).is_file():
        config, result = read_object(trial / CONFIG), read_object(trial / RESULT)
        model = open_trial(trial)
    else:
        model = source if isinstance(source, nn.Module) else open_checkpoint(str(source))
    answer = _answer(trial, study)
    with disk_errors(folder):
        make_folder(folder)
        if trial is not None and config and (described(model) is None or (trial / MODULES).exists()):
            vit, architecture = None, None
            _copy_trial(trial, folder, config)
        else:
            vit = as_vit(model)
            architecture = write_timm_folder(vit, folder)
        card = Card(title, vit, architecture, config, result, answer, license)
        write_atomically(folder / CARD, lambda file: file.write(card.text().encode()))
    return folder


def push_to_hub(
    source: str | Path | nn.Module,
    repo_id: str,
    *,
    study: str | Path | None = None,
    license: str | None = None,
    private: bool | None = None,
    token: str | None = None,
) -> str:
    """Write a model as `save_pretrained` does and upload it to Hugging Face's Hub; the address of the commit.

    Args:
        source, study, license: as of `save_pretrained`.
        repo_id: "user/name"; it is made where it is not there yet.
        private: of a new one; None: as the account says.
        token: None: that of `hf auth login`, or HF_TOKEN.

    Raises:
        UserError: as `save_pretrained`, or the Hub refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        save_pretrained(source, folder, study=study, name=repo_id.rpartition("/")[2], license=license)
        try:
            api = HfApi(token=token, library_name="vitmods")
            where = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            found = api.upload_folder(repo_id=where, folder_path=folder, commit_message="Model and card by vitmods")
        except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"The Hub does not take {repo_id}: {reason}. `hf auth login` gives access.") from error
    return str(found.commit_url)


def from_pretrained(source: str | Path, *, revision: str | None = None, token: str | None = None) -> nn.Module:
    """A model that `save_pretrained` or `push_to_hub` wrote, in evaluation mode; timm's and Hugging Face's ViTs too.

    Args:
        source: the folder or file, or "user/name" on the Hub, of which files without code are downloaded.
        revision: branch, tag or commit on the Hub; None: the newest.
        token: for private ones.

    Raises:
        UserError: there is no such folder or repository, or it holds no model that can be read.
    """
    folder = Path(source)
    if not folder.exists():
        folder = _downloaded(str(source), revision, token)
    elif revision is not None:
        raise UserError(f"{source} is here and has no revisions: leave revision out.")
    if (folder / RESULT).is_file():
        model: nn.Module = open_trial(folder)
        return model
    return open_checkpoint(str(folder))


def _downloaded(source: str, revision: str | None, token: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, revision=revision, token=token, allow_patterns=_READ))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"There is no folder {source}, and the Hub gives none: {reason}.") from error


def _answer(trial: Path | None, study: str | Path | None) -> Answer | None:
    if study is not None:
        return Answer.load(study)
    above = trial.resolve().parents[:_UP] if trial is not None else ()
    above = [path for path in above if not named(path).endswith("://")]
    found = next((path for path in above if is_there(StudyFolder(path).settings_file)), None)
    return None if found is None else Answer.load(found)


def _copy_trial(trial: Path, folder: Path, config: dict[str, Any]) -> None:
    """A trial as it is, without the places of its images on this machine."""
    for name in (WEIGHTS, MODULES, RESULT):
        if (trial / name).exists():
            if name != RESULT:
                check_weights(trial / name)
            shutil.copyfile(trial / name, folder / name)
    write_json(folder / CONFIG, without_place(config))
