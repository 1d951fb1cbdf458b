"""Models to and from folders in timm's and Hugging Face's layout: safetensors, config, model card; nothing pickled.

A model card: what a model is, how to open it, what its study found, and what is not known.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from vitmods import __version__
from vitmods.adapters import open_checkpoint
from vitmods.adapters.apply import as_vit
from vitmods.adapters.timm_folder import OURS, write_timm_folder
from vitmods.changes import Change
from vitmods.model.vit import ViT
from vitmods.report.text import built_differently
from vitmods.study.answer import Answer, ArmAnswer, CostRatio
from vitmods.study.arms import parse_edits
from vitmods.study.bases import described
from vitmods.study.checkpoints import open_trial
from vitmods.study.retrain import arm_named, estimate_of
from vitmods.study.store import StudyFolder, read_object
from vitmods.tasks.base import DEFAULT
from vitmods.train.trial import CONFIG, MODULES, RESULT, WEIGHTS
from vitmods.util.address import named
from vitmods.util.errors import UserError
from vitmods.util.files import check_weights, disk_errors, make_folder, write_atomically, write_json
from vitmods.util.remote import is_there
from vitmods.util.text import plural, public_command, without_place, without_places

_HUB_TASKS = {
    "classification": "image-classification",
    "multilabel": "image-classification",
    "segmentation": "image-segmentation",
    "detection": "object-detection",
    "instance_segmentation": "image-segmentation",
    "sequence_classification": "text-classification",
}
_HUB_METRICS = {"top1": "accuracy"}


@dataclass(frozen=True)
class Card:
    """What a card is made of.

    name:   of the model, for its title
    model:  None: a trial that is no ViT alone
    architecture: timm's word for it; None: timm does not open it
    config, result: of its trial, as config.json and result.json have them; empty where there is none
    answer: of its study, if there is one
    """

    name: str
    model: ViT | None
    architecture: str | None
    config: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    answer: Answer | None = None
    license: str | None = None

    @property
    def arm(self) -> ArmAnswer | None:
        """In its study."""
        names = [arm.name for arm in self.answer.every_arm] if self.answer else []
        return arm_named(self.answer, self.config["arm"]) if self.answer and self.config.get("arm") in names else None

    @property
    def data(self) -> str:
        return Path(str(self.config.get("data", {}).get("name", ""))).name

    def text(self) -> str:
        """README.md, with the metadata that Hugging Face reads."""
        parts = [self._title(), self._use(), *self._study(), *self._data(), *self._training(), self._limits()]
        return f"---\n{self._metadata()}\n---\n\n" + "\n\n".join(part.strip() for part in parts) + "\n"

    def _metadata(self) -> str:
        from huggingface_hub import EvalResult, ModelCardData

        task = _HUB_TASKS.get(self.config.get("task", DEFAULT))
        found = [
            EvalResult(
                task_type=task or "other",
                dataset_type=_slug(self.data),
                dataset_name=self.data,
                dataset_split=self.result.get("split"),
                metric_type=_HUB_METRICS.get(name, name),
                metric_name=name,
                metric_value=value,
            )
            for name, value in self.result.get("metrics", {}).items()
        ]
        place = str(self.config.get("images", {}).get("data", ""))
        changes = [_slug(name) for name in str(self.config.get("changes", "")).split("+") if name]
        library = "timm" if self.architecture not in (None, OURS) else "vitmods"
        given = ModelCardData(
            library_name=library,
            pipeline_tag=task,
            license=self.license,
            tags=list(dict.fromkeys(["vitmods", library, "vision-transformer", *changes])),
            datasets=[place.removeprefix("hf:").partition("?")[0]]
            if place.startswith("hf:") and without_place(place) == place
            else None,
            metrics=sorted({result.metric_type for result in found}) or None,
            model_name=self.name if found else None,
            eval_results=found or None,
        )
        return str(given.to_yaml()).strip()

    def _title(self) -> str:
        lines = [f"# {self.name}\n"]
        if self.config:
            arm, what = self.config["arm"], without_places(self.config.get("changes") or "nothing changed")
            lines.append(f"Arm **{arm}** ({what}), seed {self.config['seed']}, trained on {self.data}.")
        if self.model is not None:
            config = self.model.vit_config
            size = " x ".join(map(str, config.img_size))
            count = sum(parameter.numel() for parameter in self.model.parameters())
            lines.append(
                f"A Vision Transformer with {count:,} parameters: width {config.embed_dim}, depth {config.depth}, "
                f"{plural(config.num_heads, 'head')}, for inputs of {size}, {config.num_classes} classes."
            )
            edits = parse_edits(self.config.get("changes", "")) or self.model.changes
            changes = [f"- {one}: {one.title}. {one.paper}, {one.url}" for one in edits if isinstance(one, Change)]
            lines += ["\nWhat it changes in a plain ViT:\n", *changes] if changes else []
        return "\n".join(lines)

    def _use(self) -> str:
        code = ['import vitmods as vm\n\nmodel = vm.from_pretrained("FOLDER")  # or the name on the Hub']
        if self.architecture:
            first = "\nimport vitmods.adapters.timm_models  # adds the architecture" * (self.architecture == OURS)
            code.append(f'import timm{first}\n\nmodel = timm.create_model("local-dir:FOLDER", pretrained=True)')
        return "## Use\n\n" + "\n\n".join(f"```python\n{one}\n```" for one in code)

    def _study(self) -> Iterator[str]:
        answer, arm = self.answer, self.arm
        if answer is None or arm is None:
            return
        yield "## What the study found"
        about = "new trainings and other images from the same source"
        about = about if answer.settings.get("generalize") == "images" else "new trainings, on these test images"
        if arm.effect is not None:
            yield f"**{arm.name}: {arm.effect.verdict}** against {answer.base.name}: `{arm.effect!r}`."
        yield answer.to_markdown()
        yield f"{estimate_of(answer, arm)} Verdicts are about {about}."
        if arm.cost is not None:
            cost = arm.cost
            rows = {
                "parameters": f"{cost.params:.3f}",
                "multiply-adds": "not known" if cost.flops is None else f"{cost.flops:.3f}",
                "a training step": _shown(cost.train_step),
                "inference, one image": _shown(cost.infer_1),
                "inference, a batch": _shown(cost.infer_n),
                "peak memory of training": _shown(cost.peak_memory),
            }
            table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
            built = "".join(f" {note}" for note in built_differently([(arm.name, cost)]))
            yield f"Costs as ratios to {answer.base.name}:{built}\n\n| | |\n| --- | --- |\n{table}"
        kind = "console" if answer.command.startswith("vitmods ") else "python"
        yield f"It was run with vitmods {answer.vitmods}:\n\n```{kind}\n{public_command(answer.command)}\n```"

    def _data(self) -> Iterator[str]:
        if not self.config:
            return
        data = self.config["data"]
        counts = {name: split.get("count") for name, split in data.get("splits", {}).items()}
        shown = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
        metrics = [f"{name} {value:.4f}" for name, value in self.result.get("metrics", {}).items()]
        scored = f"\n\nThis seed on {self.result['split']}: {', '.join(metrics)}." if metrics else ""
        yield f"## Data\n\n{self.data}: {shown}; {plural(len(data['classes']), 'class', 'classes')}.{scored}"

    def _training(self) -> Iterator[str]:
        if not self.config:
            return
        environment = {**self.config.get("environment", {})}
        machine = ", ".join(f"{name} {value}" for name, value in environment.items() if name in ("torch", "device"))
        recipe = json.dumps(without_place(self.config["recipe"]), indent=1)
        took = self.result.get("wall_s")
        seconds = f", {took:,.0f} s" if took else ""
        yield f"## Training\n\nvitmods {environment.get('vitmods', __version__)}, {machine}{seconds}."
        yield f"<details><summary>The recipe</summary>\n\n```json\n{recipe}\n```\n\n</details>"

    def _limits(self) -> str:
        found = ["These weights are of one training, one seed; the study's numbers are of several."] * bool(self.arm)
        if self.config and not self.result.get("metrics"):
            found.append("It was trained on all images, so nothing was measured of it.")
        if self.answer is None:
            found.append("No study says whether its changes help.")
        elif not self.answer.complete:
            found.append("The study was not complete when this was written.")
        found.append(f"Nothing is known of data other than {self.data or 'what it was trained on'}.")
        found += [without_places(one) for one in self.answer.warnings] if self.answer else []
        return "## Limits\n\n" + "\n".join(f"- {one}" for one in found)


def _shown(cost: CostRatio) -> str:
    return f"{cost.ratio:.3f} ({cost.low:.3f} to {cost.high:.3f})"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "images"


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
        raise UserError(f"{source} is a local file or folder, which has no revisions: leave revision out.")
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
