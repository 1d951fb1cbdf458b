"""Save and load models in the layout of timm and Hugging Face: safetensors, config, model card; nothing pickled."""

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
from vitmods.study.answer import Answer, ArmAnswer
from vitmods.study.arms import parse_edits
from vitmods.study.bases import described
from vitmods.study.checkpoints import open_trial
from vitmods.study.retrain import arm_named, estimate_of
from vitmods.study.store import StudyFolder, read_object
from vitmods.tasks.base import DEFAULT, TASKS
from vitmods.train.trial import CONFIG, MODULES, RESULT, WEIGHTS
from vitmods.util.address import named
from vitmods.util.errors import UserError
from vitmods.util.files import check_weights, disk_errors, make_folder, write_atomically, write_json
from vitmods.util.remote import is_there
from vitmods.util.text import plural, public_command, without_place, without_places

_HUB_METRICS = {"top1": "accuracy"}


@dataclass(frozen=True)
class Card:
    """A model card: what the model is, how to open it, the results of its study, and its limits.

    model:  None for a trial with modules besides a ViT
    architecture: timm's name; None if timm cannot open it
    config, result: contents of the trial's config.json and result.json, if any
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
        """The model's arm in its study."""
        names = [arm.name for arm in self.answer.every_arm] if self.answer else []
        return arm_named(self.answer, self.config["arm"]) if self.answer and self.config.get("arm") in names else None

    @property
    def data(self) -> str:
        return Path(str(self.config.get("data", {}).get("name", ""))).name

    def text(self) -> str:
        """Return README.md, with the metadata that Hugging Face reads."""
        sections = [self._title(), self._use(), *self._study(), *self._training(), self._limits()]
        return f"---\n{self._metadata()}\n---\n\n" + "\n\n".join(section.strip() for section in sections) + "\n"

    def _metadata(self) -> str:
        from huggingface_hub import EvalResult, ModelCardData

        kind = TASKS.get(self.config.get("task", DEFAULT))
        task = kind.hub_tag if kind else None
        results = [
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
        metadata = ModelCardData(
            library_name=library,
            pipeline_tag=task,
            license=self.license,
            tags=list(dict.fromkeys(["vitmods", library, "vision-transformer", *changes])),
            datasets=[place.removeprefix("hf:").partition("?")[0]]
            if place.startswith("hf:") and without_place(place) == place
            else None,
            metrics=sorted({result.metric_type for result in results}) or None,
            model_name=self.name if results else None,
            eval_results=results or None,
        )
        return str(metadata.to_yaml()).strip()

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
            changes = [
                f"- {edit}: {edit.title}. {edit.paper}, {edit.url}" for edit in edits if isinstance(edit, Change)
            ]
            lines += ["\nChanges to a plain ViT:\n", *changes] if changes else []
        return "\n".join(lines)

    def _use(self) -> str:
        code = ['import vitmods as vm\n\nmodel = vm.from_pretrained("FOLDER")  # or the name on the Hub']
        if self.architecture:
            first = "\nimport vitmods.adapters.timm_models  # adds the architecture" * (self.architecture == OURS)
            code.append(f'import timm{first}\n\nmodel = timm.create_model("local-dir:FOLDER", pretrained=True)')
        return "## Use\n\n" + "\n\n".join(f"```python\n{lines}\n```" for lines in code)

    def _study(self) -> Iterator[str]:
        answer, arm = self.answer, self.arm
        if answer is None or arm is None:
            return
        yield "## Results of the study"
        new_images = answer.settings.get("generalize") == "images"
        claim = "new trainings and new images from the same source" if new_images else "new trainings, on these images"
        if arm.effect is not None:
            yield f"**{arm.name}: {arm.effect.verdict}** against {answer.base.name}: `{arm.effect!r}`."
        yield answer.to_markdown()
        yield f"{estimate_of(answer, arm)} Verdicts generalize to {claim}."
        if arm.cost is not None:
            cost = arm.cost
            timed = {
                "training step": cost.train_step,
                "inference, one image": cost.infer_1,
                "inference, batch": cost.infer_n,
                "peak memory of training": cost.peak_memory,
            }
            rows = {
                "parameters": f"{cost.params:.3f}",
                "multiply-adds": "unknown" if cost.flops is None else f"{cost.flops:.3f}",
                **{name: f"{c.ratio:.3f} ({c.low:.3f} to {c.high:.3f})" for name, c in timed.items()},
            }
            table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
            built = "".join(f" {note}" for note in built_differently([(arm.name, cost)]))
            yield f"Costs as ratios to {answer.base.name}:{built}\n\n| | |\n| --- | --- |\n{table}"
        kind = "console" if answer.command.startswith("vitmods ") else "python"
        yield f"Run with vitmods {answer.vitmods}:\n\n```{kind}\n{public_command(answer.command)}\n```"

    def _training(self) -> Iterator[str]:
        if not self.config:
            return
        data = self.config["data"]
        counts = {name: split.get("count") for name, split in data.get("splits", {}).items()}
        splits = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
        metrics = [f"{name} {value:.4f}" for name, value in self.result.get("metrics", {}).items()]
        scored = f"\n\nThis seed on {self.result['split']}: {', '.join(metrics)}." if metrics else ""
        yield f"## Data\n\n{self.data}: {splits}; {plural(len(data['classes']), 'class', 'classes')}.{scored}"
        environment = self.config.get("environment", {})
        machine = ", ".join(f"{name} {value}" for name, value in environment.items() if name in ("torch", "device"))
        recipe = json.dumps(without_place(self.config["recipe"]), indent=1)
        took = self.result.get("wall_s")
        seconds = f", {took:,.0f} s" if took else ""
        yield f"## Training\n\nvitmods {environment.get('vitmods', __version__)}, {machine}{seconds}."
        yield f"<details><summary>Recipe</summary>\n\n```json\n{recipe}\n```\n\n</details>"

    def _limits(self) -> str:
        limits = ["These weights are of one seed; the study's numbers are over several."] * bool(self.arm)
        if self.config and not self.result.get("metrics"):
            limits.append("Trained on all images, so this model was not evaluated.")
        if self.answer is None:
            limits.append("No study has compared its changes with the unchanged model.")
        elif not self.answer.complete:
            limits.append("The study was not complete when this card was written.")
        limits.append(f"Not evaluated on data other than {self.data or 'its training data'}.")
        limits += [without_places(warning) for warning in self.answer.warnings] if self.answer else []
        return "## Limits\n\n" + "\n".join(f"- {limit}" for limit in limits)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "images"


CARD = "README.md"
_UP = 5  # at most so many folders from a trial to its study
_READ = ["*.json", "*.safetensors", CARD]  # files downloaded from the Hub


def save_pretrained(
    source: str | Path | nn.Module,
    folder: str | Path,
    *,
    study: str | Path | None = None,
    name: str | None = None,
    license: str | None = None,
) -> Path:
    """Write a model to a folder that vitmods, timm and Hugging Face's Hub can load; returns the folder.

    The folder contains model.safetensors, config.json in timm's layout and a model card (README.md) with the study's
    results. timm and transformers open models that timm's own ViT can express; timm opens any other ViT after `import
    vitmods.adapters.timm_models`. A trial with modules besides a ViT, or of another kind of model, is copied for
    `from_pretrained` and `vitmods predict`.

    Args:
        source: a trial folder, a source for `open_checkpoint`, or a model: a ViT of this library, timm, ...
        folder: created if missing; files with these names are replaced.
        study: the study reported on the card; None: the study that contains the trial, if any.
        name: title of the card; None: the folder's name.
        license: of the weights, in the Hub's spelling (apache-2.0, ...); None: not on the card.

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
        model = open_trial(trial)
    else:
        model = source if isinstance(source, nn.Module) else open_checkpoint(str(source))
    if study is None and trial is not None:
        above = [path for path in trial.resolve().parents[:_UP] if not named(path).endswith("://")]
        study = next((path for path in above if is_there(StudyFolder(path).settings_file)), None)
    answer = None if study is None else Answer.load(study)
    with disk_errors(folder):
        make_folder(folder)
        if trial is not None and config and (described(model) is None or (trial / MODULES).exists()):
            vit, architecture = None, None
            for name_of_file in (WEIGHTS, MODULES, RESULT):
                if (trial / name_of_file).exists():
                    if name_of_file != RESULT:
                        check_weights(trial / name_of_file)
                    shutil.copyfile(trial / name_of_file, folder / name_of_file)
            write_json(folder / CONFIG, without_place(config))
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
    """Write a model like `save_pretrained` and upload it to Hugging Face's Hub; returns the address of the commit.

    Args:
        source, study, license: see `save_pretrained`.
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
        save_pretrained(source, folder, study=study, name=repo_id.rpartition("/")[2], license=license)
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
    if (folder / RESULT).is_file():
        model: nn.Module = open_trial(folder)
        return model
    return open_checkpoint(str(folder))
