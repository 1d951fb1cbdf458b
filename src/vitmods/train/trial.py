"""One trial as a folder: its settings, its training, its result, its weights, scores and examples."""

import json
import os
import platform
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

import vitmods
from vitmods.data.read import Unreadable, decode
from vitmods.finetune.adapters import has_adapters, merge_adapters, save_adapters
from vitmods.finetune.blended import fit_new_norms
from vitmods.ops.native import is_switched_on
from vitmods.recipes import Recipe
from vitmods.recipes.schedule import resolve_on
from vitmods.tasks.base import DEFAULT, Example, Task, TaskModel
from vitmods.train import checkpoint
from vitmods.train.device import device_name, does_not_fit, is_out_of_memory, resolve, usable
from vitmods.train.distributed import ALONE, PeerEnded, Processes, peer_ended, whole_state
from vitmods.train.interrupt import Interrupted, StopRequest, stop_on_signals
from vitmods.train.loggers import Diverged, LoggedRun, ProgressBar
from vitmods.train.loop import MeasureSplit, TrialData, TrialRun
from vitmods.train.options import WAYS, RunOptions, check_divides
from vitmods.util.errors import UserError
from vitmods.util.files import checksum, make_folder, write_atomically, write_json
from vitmods.util.limits import read_bytes, read_json, read_npz
from vitmods.util.text import flatten

NUMERICS = 4
"""To be raised when the same settings give other numbers: finished trials of another version are not reused."""
CONFIG, RESULT, WEIGHTS = "config.json", "result.json", "model.safetensors"
MODULES = "task.safetensors"
EXAMPLES = "examples"
ADAPTERS = "adapter"
FITTED_IMAGES, GENTLE_IMAGES, FITTED_BATCH = 1000, 250, 50
_IDENTIFIES_DATA = ("name", "classes", "splits", "split_origin", "fingerprint", "vocabulary")  # but not its folder
_NOT_COMPARED = ("environment", "resolved", "id", "split", "code", "start_weights")
"""parts of config.json that may differ when a trial resumes"""
ALONE_IN_IDS = {"processes": 1, "shard": False}
"""the environment of several processes in a trial's id: they are one, up to rounding"""
_COLOR = re.compile("#[0-9a-f]{6}")


def train_trial(
    model: nn.Module,
    task: Task,
    ds: TrialData,
    recipe: Recipe,
    *,
    seed: int = 0,
    out: Path | str,
    options: RunOptions | None = None,
    processes: Processes = ALONE,
    metadata: Mapping[str, Any] | None = None,
    logged: LoggedRun | None = None,
    measure: MeasureSplit | None = None,
) -> dict[str, Any]:
    """Train `model` in the folder `out`, or resume an earlier call. Returns the content of result.json.

    A finished (or diverged) trial is not run again. Stopped at any moment and called again with the same arguments (the
    model as it was before training), it ends in the same weights and metrics as an unbroken run, bit for bit on a CPU
    with the same number of threads. The state of torch's CPU random numbers is restored.

    Args:
        model: trained in place; what `task.wrap` makes of a backbone.
        task: e.g. `vitmods.tasks.Classification.from_recipe(recipe)`.
        ds: the images, e.g. from `vitmods.data.load`.
        seed: of the order and augmentation of the images and of dropout; not of the model's weights.
        out: the trial's folder; `config.json`, `metrics.jsonl`, `checkpoint.pt` (until it is finished),
            `model.safetensors` (and `task.safetensors` with the task's own modules), `<split>.npz` with the scores of
            each image, `examples/` (if the task draws any), `adapter/` (if adapters were trained, which the weights
            hold merged), `tb/` and, written last, `result.json` with the checksums of the weights.
        options: device, checkpoints, progress, memory.
        processes: those that train the model together (`vitmods.train.join`); each batch is divided among them.
        metadata: added to config.json; `arm` and `changes` are the study's.
        logged: how loggers identify the trial; None: by its folder.
        measure: measures the model on a split, in addition to `task.evaluate`, every `task.protocol_epochs` epochs.

    Raises:
        UserError: the recipe does not fit the images or the model, the folder holds a trial with other settings or
            cannot be written, or the device does not exist.
        Interrupted: Ctrl-C or SIGTERM; the state is saved.
    """
    options = options or RunOptions()
    _check_model(model, recipe)
    resolve_on(recipe, ds)  # raises before a folder is made
    check_divides(recipe.batch_size, processes.size)
    usable(options.device, recipe.precision, processes.local_rank if processes.size > 1 else None)
    out = make_folder(Path(out))
    metadata = {**(metadata or {}), **fit_to_images(model, ds, recipe)}
    task.fit(model, ds)
    config = trial_config(model, task, ds, recipe, seed, options, processes, metadata)
    result = processes.once(lambda: _resume(out, config))
    if result is None:
        split = ds.eval_split if ds.eval_split in ds.splits else None
        empty = dict.fromkeys(("message", "steps", "epochs", "wall_s", "params", "how"))
        failed = {"schema": 1, "status": "failed", "arm": config["arm"], "seed": seed, "split": split, "metrics": {}}
        failed |= empty
        try:
            with torch.random.fork_rng(devices=[]), stop_on_signals() as request:
                run = TrialRun(
                    model, task, ds, recipe, folder=out, seed=seed, options=options, processes=processes,
                    logged=logged, measure=measure,
                )  # fmt: skip
                title = f"{config['arm']} seed {seed}"
                shows_bar = options.progress and processes.first
                with ProgressBar(shows_bar, title, run.length.steps, run.step, task.metrics) as bar:
                    result = failed | _train(run, request, bar)
                processes.once(lambda: write_json(out / RESULT, result))
        except PeerEnded:
            raise  # the other process has written why
        except Exception as error:
            if ended := peer_ended(error):
                raise ended from error
            reason = does_not_fit(recipe.part_size, resolve(options.device)) if is_out_of_memory(error) else error
            text = str(reason) if isinstance(reason, UserError) else f"{type(reason).__name__}: {reason}"
            with suppress(Exception):  # the error itself matters more than its record
                write_json(out / RESULT, {**failed, "message": text})
            if reason is error:
                raise
            raise reason from error
    if result["status"] == "finished" and processes.first:
        checkpoint.remove(out)
    return result


def _train(run: TrialRun, request: StopRequest, bar: ProgressBar) -> dict[str, Any]:
    """Train, and write weights, scores and examples. Returns the part of result.json that describes the training."""
    status, metrics, message, weights = "failed", dict[str, float](), None, {}
    first = run.processes.first
    try:
        metrics = run.run(request, bar)
        _merge_adapters(run)
        tensors = whole_state(run.evaluated_model.state_dict(), keep=first)
        # No loss was computed after the last step. All processes have to agree.
        names = [name for name, _ in run.evaluated_model.named_parameters()] if first else []
        is_broken = any(name in tensors and not torch.isfinite(tensors[name]).all() for name in names)
        if any(run.processes.agree(int(is_broken))):
            raise Diverged(f"the weights were not finite after step {run.step}")
        weights = run.processes.once(lambda: _save_weights(run.evaluated_model, tensors, run.folder))
        if first:
            for split, scores in run.scores.items():
                write_scores(run.folder / f"{split}.npz", scores)
            if examples := run.examples.get(run.ds.eval_split):
                legend = run.task.legend(tuple(run.ds.summary()["classes"]))
                write_examples(run.folder, examples, run.ds.splits[run.ds.eval_split].ids, legend)
        status = "finished"
    except Diverged as divergence:
        status, message = "diverged", str(divergence)
    except Interrupted:
        status = "stopped"
        raise
    finally:
        run.close(status, metrics)
    return {
        "status": status,
        "metrics": metrics,
        "weights": weights,
        "message": message,
        "steps": run.step,
        "epochs": run.step / run.length.steps_per_epoch,
        "wall_s": round(run.wall_s, 3),
        "params": sum(p.numel() for p in run.evaluated_model.parameters()),
        "how": {  # what may change the last digits or the speed
            "device": device_name(str(run.placement.device)),
            "precision": run.recipe.precision,
            **_numerics(run.options, run.processes),
        },
    }


def _merge_adapters(run: TrialRun) -> None:
    """Write the adapters of a trained model, if it has some, and merge them into the weights that are written."""
    model = run.evaluated_model
    if has_adapters(model):
        trained = [name for name, parameter in run.model.named_parameters() if parameter.requires_grad]
        run.processes.once(lambda: save_adapters(model, trained, run.folder / ADAPTERS))
        merge_adapters(model)


def fit_to_images(model: nn.Module, ds: TrialData, recipe: Recipe | None = None) -> dict[str, Any]:
    """Fit modules that wait for images (whitening of patches, codes) to up to 1,000 training images, evenly spread over
    the split, as evaluation sees them; and norms that start gently, or that the recipe blends in, to up to 250.

    No random number is drawn, so a resumed trial computes the same. Returns the record for config.json, module ->
    number of images; empty if no module needs images.
    """
    counts: dict[str, Any] = {}
    is_blended = recipe is not None and recipe.norm_blend and hasattr(ds, "plain_images")
    if is_blended and fit_new_norms(model, ds.plain_images("train", GENTLE_IMAGES, FITTED_BATCH)):
        counts["new norms"] = min(GENTLE_IMAGES, len(ds.splits["train"]))
    for name, module in model.named_modules():
        if getattr(module, "waits_for_images", False):
            fit: Any = module.fit
            fit(ds.plain_images("train", FITTED_IMAGES, FITTED_BATCH))
            counts[name] = min(FITTED_IMAGES, len(ds.splits["train"]))
        for change in (*getattr(module, "changes", ()), *getattr(module, "vm_changes", ())):
            # Sequences do not have images, and no change starts from them.
            if hasattr(ds, "plain_images") and change.fit(
                module, ds.plain_images("train", GENTLE_IMAGES, FITTED_BATCH)
            ):
                counts[str(change)] = min(GENTLE_IMAGES, len(ds.splits["train"]))
    return {"fitted_to_images": counts} if counts else {}


@dataclass(frozen=True)
class Examples:
    """Evaluated images of a trial to look at.

    ids: of the images. panels: of each, pixels uint8 (H, W, 3) by name. legend: class -> its color, as #rrggbb.
    """

    ids: tuple[str, ...] = ()
    panels: tuple[Mapping[str, NDArray[np.uint8]], ...] = ()
    legend: Mapping[str, str] | None = None


def write_examples(trial: Path, examples: Sequence[Example], ids: Sequence[str], legend: Mapping[str, str]) -> None:
    """Write `examples/<i>-<panel>.png` and examples.json. ids: of the split's images."""
    folder = make_folder(trial / EXAMPLES)
    for i, example in enumerate(examples):
        for name, pixels in example.panels.items():
            image = Image.fromarray(pixels)
            write_atomically(folder / f"{i}-{name}.png", lambda file, image=image: image.save(file, "PNG"))  # type: ignore[misc]
    images = [{"id": ids[example.index], "panels": list(example.panels)} for example in examples]
    write_json(folder / "examples.json", {"schema": 1, "images": images, "legend": dict(legend)})


def read_examples(trial: Path) -> Examples:
    """Read the examples of a trial; empty if a file is missing or damaged."""
    folder = trial / EXAMPLES
    try:
        content = read_json(folder / "examples.json")
        panels = []
        for i, image in enumerate(content["images"]):
            files = {name: read_bytes(folder / f"{i}-{name}.png", "settings") for name in image["panels"]}
            pixels = {name: decode(file, 3).transpose(1, 2, 0) for name, file in files.items()}
            panels.append({name: np.ascontiguousarray(array) for name, array in pixels.items()})
        legend = {str(name): color for name, color in content["legend"].items() if _COLOR.fullmatch(color)}
        return Examples(tuple(str(image["id"]) for image in content["images"]), tuple(panels), legend)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, Unreadable):
        return Examples()


def _save_weights(model: nn.Module, state: Mapping[str, torch.Tensor], folder: Path) -> dict[str, str]:
    """Write the weights of the backbone, and of the task's own modules. Returns file name -> checksum."""
    from safetensors.torch import save

    # Copies: a model may have one tensor at two places, which safetensors refuses.
    weights = {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
    files = {WEIGHTS: weights}
    if isinstance(model, TaskModel):
        prefix = "backbone."
        files = {
            WEIGHTS: {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)},
            MODULES: {name: tensor for name, tensor in weights.items() if not name.startswith(prefix)},
        }
    for name, tensors in files.items():
        content = save(tensors)
        write_atomically(folder / name, lambda file, content=content: file.write(content))  # type: ignore[misc]
    return {name: checksum(folder / name) for name in files}


def write_scores(path: Path, scores: Mapping[str, NDArray[Any]]) -> None:
    """Write scores of each image, (n,) arrays by name in addition to `ids`, as .npz."""
    write_atomically(path, lambda file: np.savez_compressed(file, **scores))  # type: ignore[arg-type]


def read_scores(path: Path) -> dict[str, NDArray[Any]]:
    """Read what `write_scores` wrote; empty without a file. Raises UserError if it is damaged."""
    try:
        return read_npz(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}). Delete its folder to train again.") from error


def _resume(out: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """Write config.json in a new folder; in an old one, compare it. Returns the final result, if there is one."""
    path = out / CONFIG
    if not path.exists():
        write_json(path, config)
        return None
    old = _read_json(path)
    differences = _differences(_decisive(old), _decisive(config))
    if differences:
        raise UserError(f"{out} holds a trial with other settings: {'; '.join(differences)}. Choose another folder.")
    result = _read_json(out / RESULT) if (out / RESULT).exists() else None
    if result is not None and result["status"] != "failed":
        return result
    before, now = ({**content["environment"], **content.get("code", {})} for content in (old, config))
    moved = _differences(before, now)
    if moved and any((out / name).exists() for name in (checkpoint.NAME, checkpoint.PREVIOUS)):
        warnings.warn(f"{out}: resumed in another environment, numbers may differ: {'; '.join(moved)}", stacklevel=3)
        if _differences(before | ALONE_IN_IDS, now | ALONE_IN_IDS):
            write_json(path, {**old, "id": None})
    elif moved:
        write_json(path, config)
    (out / RESULT).unlink(missing_ok=True)
    return None


def _decisive(config: dict[str, Any]) -> dict[str, Any]:
    """Return what must be equal to resume a trial. Fields that its recipe did not have yet have their defaults."""
    settings = {name: value for name, value in config.items() if name not in _NOT_COMPARED}
    recipe = json.loads(json.dumps(Recipe.from_dict(config["recipe"]).to_dict()))
    return {"task": DEFAULT, **settings, "recipe": recipe}


def _check_model(model: nn.Module, recipe: Recipe) -> None:
    """Raise UserError if the model is not built as the recipe says: its dropout would silently differ."""
    # Models of other libraries: their modules have the rates of stochastic depth.
    rates = [float(getattr(m, "drop_prob", 0) or 0) for m in model.modules() if type(m).__name__.endswith("DropPath")]
    built = {"drop_path": round(max(rates, default=0.0), 6), "drop_path_shape": "linear"}
    config = getattr(model, "vit_config", None)
    for name, value in recipe.model.to_config().items():
        present = getattr(config, name, "not reported") if config else built.get(name, "not reported")
        if present != value:
            raise UserError(
                f"The recipe sets {name}={value!r}, and the model was built with {present!r}. Build it with the "
                "recipe's settings: vitmods.vit(..., **recipe.model.to_config())."
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}). Delete its folder to train again.") from error
    return content


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    before, now = flatten(old), flatten(new)
    names = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    return [f"{name} was {before.get(name)!r}, now {now.get(name)!r}" for name in names]


def trial_config(
    model: Any,
    task: Task,
    ds: TrialData,
    recipe: Recipe,
    seed: int,
    options: RunOptions,
    processes: Processes = ALONE,
    metadata: Mapping[str, Any] = MappingProxyType({}),
    threads: int | None = None,
) -> dict[str, Any]:
    """Return the content of config.json: all that decides the numbers, as it is read back from JSON.

    Args:
        model: the model, or its config.
        threads: of the process that trains; None: of this one.
    """
    model_config = getattr(model, "vit_config", model)
    config = {
        "schema": 1,
        "arm": "base",
        "changes": "",
        "model": json.loads(model_config.to_json()) if hasattr(model_config, "to_json") else type(model).__name__,
        "seed": seed,
        "eval_every_epochs": options.eval_every_epochs,
        "task": task.name,
        **metadata,
        "data": {key: value for key, value in ds.summary().items() if key in _IDENTIFIES_DATA},
        "recipe": recipe.to_dict(),
        "split": ds.eval_split,
        "resolved": asdict(resolve_on(recipe, ds)),
        "environment": _environment(options, processes, threads),
    }
    content: dict[str, Any] = json.loads(json.dumps(config, allow_nan=False))
    return {**content, "id": identify(content)}


def identify(config: Mapping[str, Any]) -> str:
    """Return a short hash of what a trial's numbers depend on. Trials with one hash end with the same numbers."""
    return sha256(json.dumps(decisive_settings(config), sort_keys=True).encode()).hexdigest()[:32]


def decisive_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Select from config.json what a trial's numbers depend on, which excludes names and places of files."""
    copies = {name: dict(config.get(name, {})) for name in ("start", "images", "data")}
    settings = _decisive({**config, **copies})
    for name in ("schema", "arm", "fitted_to_images"):
        settings.pop(name, None)
    if os.path.exists(str(settings["images"].get("data"))):  # else it is a name, and may stand for a stream
        del settings["images"]["data"]
        settings["data"].pop("name", None)
    start = settings["start"]
    if config.get("start_weights"):
        settings["start"] = {"weights": config["start_weights"], "positions": start.get("positions")}
    environment = {name: value for name, value in config["environment"].items() if name not in ("vitmods", "python")}
    environment |= ALONE_IN_IDS
    if environment["device"] != "cpu":
        environment = {name: value for name, value in environment.items() if name not in ("threads", "cpu", "native")}
    return {**settings, "split": config["split"], "code": config.get("code"), "environment": environment}


def _numerics(options: RunOptions, processes: Processes) -> dict[str, Any]:
    return {**{way: getattr(options, way) for way in WAYS}, "processes": processes.size, "shard": options.shard}


def _environment(options: RunOptions, processes: Processes, threads: int | None = None) -> dict[str, Any]:
    """Describe what may change the last digits of the numbers, or their speed."""
    return {
        "vitmods": vitmods.__version__,
        "numerics": NUMERICS,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "pillow": version("pillow"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": device_name(options.device),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "native": is_switched_on(),
        "matmul": torch.get_float32_matmul_precision(),
        **_numerics(options, processes),
        "threads": threads or torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }
