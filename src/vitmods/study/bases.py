"""Base models of other libraries and of functions, and models after an arm's edits: built, recorded and opened."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from vitmods.adapters.apply import apply, as_vit, config_of
from vitmods.adapters.libraries import LIBRARIES, Library
from vitmods.adapters.replace import put_norms, replace_norms
from vitmods.adapters.surgery import record_of_changes, repeat
from vitmods.adapters.transfer import (
    MOST_CLASSES,
    MOST_NUMBER,
    MOST_SIDE,
    bounded,
    check_numbers,
    evaluating,
    most_bytes,
    outline,
)
from vitmods.changes import Change
from vitmods.changes.compose import edit as edit_config
from vitmods.model.config import ViTConfig
from vitmods.model.flops import count_macs
from vitmods.model.names import split_options
from vitmods.model.vit import ViT, vit
from vitmods.study.arms import (
    PYTHON,
    Function,
    Replace,
    base_function,
    functions_of,
    is_foreign,
    parse_edits,
)
from vitmods.tasks.base import TaskModel, noise
from vitmods.tasks.features import without_head
from vitmods.util.address import named
from vitmods.util.errors import UserError, explaining, first_line, nearest
from vitmods.util.files import check_weights
from vitmods.util.limits import check_file, offline, read_bytes

if TYPE_CHECKING:
    from vitmods.recipes.recipe import ModelSettings
    from vitmods.study.arms import Edit


_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


Options = dict[str, Any]


@dataclass(frozen=True)
class ForeignBase:
    """A base model without a ViTConfig, for images of a size and a number of classes.

    spec: `timm:NAME`, `torchvision:NAME`, `hf:FOLDER` or a name of another of `LIBRARIES`, each with
        `?option=value&...` if wanted, or `python:module:function`. Options are arguments of the library's own function
        (fields of the config for Hugging Face); `pretrained=1` loads trained weights and gives them a new head.
    in_place: whether changes are put into the model, which keeps its class; False: it is read as a vitmods ViT.
    """

    spec: str
    num_classes: int
    img_size: tuple[int, int]
    in_chans: int
    in_place: bool = True

    def __post_init__(self) -> None:
        # They are arguments of the function, and may come from a file that somebody else wrote.
        numbers = (self.num_classes, *self.img_size, self.in_chans)
        are_numbers = all(isinstance(number, int) and 0 <= number <= MOST_NUMBER for number in numbers)
        if not are_numbers or self.num_classes > MOST_CLASSES:
            raise UserError(
                f"{self.spec}: classes, sides and channels of images are whole numbers up to "
                f"{(MOST_CLASSES, MOST_NUMBER)}, not {numbers!r:.60}."
            )

    def build(self, settings: ModelSettings | None = None, pretrained: bool = True) -> nn.Module:
        """The model, initialized from torch's random numbers; a vitmods ViT unless changes are made in place.

        Args:
            settings: what the recipe sets of the model: timm's and Hugging Face's models may know drop path.
            pretrained: False leaves trained weights out where the spec asks for them: others come in their place.

        Raises:
            UserError: the model does not exist, does not take these options, images or settings, or cannot be read.
        """
        model = self._build(settings, pretrained)
        if self.in_place:
            return model
        is_outline = any(parameter.is_meta for parameter in model.parameters())
        return vit(config_of(model)) if is_outline else as_vit(model)

    def _build(self, settings: ModelSettings | None, pretrained: bool) -> nn.Module:
        drop_path = None
        if settings is not None:
            for name in ("dropout", "init", "head_bias"):
                if getattr(settings, name) is not None:
                    raise _not_set(self.spec, name, getattr(settings, name))
            if settings.patch_drop:
                raise _not_set(self.spec, "patch_drop", settings.patch_drop)
            if settings.drop_path_shape == "constant":
                raise _not_set(self.spec, "drop_path_shape", "constant")
            drop_path = settings.drop_path
        library, _, name = self.spec.partition(":")
        if library == PYTHON:
            if drop_path is not None:
                raise _not_set(self.spec, "drop_path", drop_path)
            function = Function(name, getattr(self.spec, "call", None)).resolve()
            model = function(self.num_classes, self.img_size, self.in_chans)
            if not isinstance(model, nn.Module):
                raise UserError(f"{self.spec} gave {type(model).__name__}, not an nn.Module: it has to return a model.")
            return model
        name = name.partition("?")[0]
        options = split_options(self.spec)[1]
        check_numbers(self.spec, options)
        trained = bool(options.pop("pretrained", False)) and pretrained
        size_option = LIBRARIES[library].size_option
        # Arguments that some models take, and others work without: each that a model refuses is dropped.
        optional: Options = {size_option: self.img_size} if size_option else {}
        optional |= {} if drop_path is None else {"drop_path": drop_path}
        state = torch.get_rng_state()
        while True:
            torch.set_rng_state(state)
            try:
                with nullcontext() if trained else offline():
                    return LIBRARIES[library].build(self, name, trained, {**optional, **options})
            except UserError:
                raise
            except TypeError as error:
                refused = next((option for option in optional if f"'{option}'" in str(error)), None)
                if refused is None:
                    if drop_path is not None and "drop_path_rate" in str(error):
                        raise _not_set(self.spec, "drop_path", drop_path) from error
                    raise UserError(f"{self.spec} cannot be built: {error}") from error
                del optional[refused]
            except Exception as error:  # whatever a library raises, of options or of weights that it cannot fetch
                reason = first_line(error) or type(error).__name__
                raise UserError(f"{self.spec} cannot be built: {reason}") from error

    @property
    def reads_tokens(self) -> bool:
        """Whether it is given tokens (B, T) of a vocabulary of `in_chans`, up to `img_size[1]`, and no images."""
        library = self.spec.partition(":")[0]
        return library != PYTHON and LIBRARIES[library].reads_tokens


Base = ViTConfig | ForeignBase


def make_base(
    base: str | Mapping[str, Any], num_classes: int, img_size: Sequence[int], in_chans: int, in_place: bool = True
) -> Base:
    """The base that settings name, for these images: a ViTConfig, or a ForeignBase."""
    rows, columns = img_size
    if is_foreign(base):
        return ForeignBase(base, num_classes, (rows, columns), in_chans, in_place)  # type: ignore[arg-type]  # a str
    shape: dict[str, Any] = {"img_size": (rows, columns), "num_classes": num_classes, "in_chans": in_chans}
    return ViTConfig.from_name(base, **shape) if isinstance(base, str) else ViTConfig.from_dict(base).with_(**shape)


def _from_timm(base: ForeignBase, name: str, trained: bool, options: Options) -> nn.Module:
    import timm

    from vitmods.adapters.timm import check_timm

    check_timm(base.spec, name, options)
    drop_path = options.pop("drop_path", None)
    options |= {} if drop_path is None else {"drop_path_rate": drop_path}
    model: nn.Module = timm.create_model(
        name, pretrained=trained, num_classes=base.num_classes, in_chans=base.in_chans, **options
    )
    return model


def _from_torchvision(base: ForeignBase, name: str, trained: bool, options: Options) -> nn.Module:
    from torchvision import models

    from vitmods.adapters.torchvision import check_torchvision

    check_torchvision(name)
    if options.get("image_size") == (base.img_size[0],) * 2:
        options["image_size"] = base.img_size[0]
    if "drop_path" in options:
        raise _not_set(base.spec, "drop_path", options["drop_path"])
    if base.in_chans != 3:
        raise UserError(f"{base.spec}: torchvision's models read 3 channels, not {base.in_chans}: set in_chans to 3.")
    if not trained:
        return models.get_model(name, weights=None, num_classes=base.num_classes, **options)
    model = models.get_model(name, weights="DEFAULT", **options)
    heads = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    where, head = heads[-1]  # the classifier stands last in all of torchvision's
    model.set_submodule(where, nn.Linear(head.in_features, base.num_classes))
    return model


def _from_huggingface(base: ForeignBase, name: str, trained: bool, options: Options) -> nn.Module:
    folder = Path(name).expanduser()
    from vitmods.adapters.huggingface import build_classifier, check_classifier, check_values, read_huggingface_config

    config = read_huggingface_config(base.spec, folder)
    rows, columns = base.img_size
    drop_path = options.pop("drop_path", None)
    if drop_path is not None:
        if not hasattr(config, "drop_path_rate"):
            raise _not_set(base.spec, "drop_path", drop_path)
        options["drop_path_rate"] = drop_path
    wrapped = {name: getattr(config, name, None) for name in ("model_type", "architecture", "model_args")}
    check_values(base.spec, {**wrapped, **options})
    for key, value in options.items():
        if not hasattr(config, key):
            raise UserError(f"{base.spec}: the config has no '{key}'. {nearest(key, config.to_dict())}")
        setattr(config, key, value)
    if hasattr(config, "image_size") and "image_size" not in options:
        config.image_size = rows if rows == columns else (rows, columns)
    if base.in_chans != getattr(config, "num_channels", 3) and not hasattr(config, "num_channels"):
        raise UserError(f"{base.spec} reads 3 channels, not {base.in_chans}: set in_chans to 3.")
    config.num_channels, config.num_labels = base.in_chans, base.num_classes
    if not trained:
        return build_classifier(base.spec, folder, config)
    check_classifier(base.spec, folder, config)
    from transformers import AutoModelForImageClassification

    model, loading = AutoModelForImageClassification.from_pretrained(
        folder,
        config=config,
        ignore_mismatched_sizes=True,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    new = {
        *loading["missing_keys"],
        *(str(key[0] if isinstance(key, tuple) else key) for key in loading["mismatched_keys"]),
    }
    if odd := sorted(key for key in new if not key.startswith(("classifier.", "head."))):
        raise UserError(f"{base.spec}: its weights do not fit these images: {', '.join(odd[:5])}.")
    return model.train()


LIBRARIES.add("timm", Library(_from_timm, size_option="img_size"))
LIBRARIES.add("torchvision", Library(_from_torchvision, size_option="image_size"))
LIBRARIES.add("hf", Library(_from_huggingface))


def _not_set(spec: str, name: str, value: Any) -> UserError:
    return UserError(
        f"The recipe sets {name}={value!r} of the model, and {spec} knows no such setting of a recipe: set {name} to "
        "None, or choose one of vitmods' own ViTs as base. Options of the model itself may follow its name, as in "
        "timm:swin_tiny_patch4_window7_224?drop_rate=0.1."
    )


def edited(
    model: nn.Module,
    edits: Sequence[Edit],
    base: Base,
    head: bool = True,
    carry: bool = True,
    record: Sequence[Mapping[str, Any]] = (),
) -> nn.Module:
    """Make an arm's model of base's, ready to be trained on the images that base is for.

    head:  whether its logits are used, and checked here.
    carry: False makes a model of that shape alone: no weights are carried, no model is run.
    record: without `carry`, of the changes that were made in place (`vm_record`).

    Raises:
        UserError: an edit cannot be made, or the result does not give the logits of these images.
    """
    if isinstance(model, ViT):  # of several bases, some other libraries', every one has the same arms
        edits = [edit.on_slots if isinstance(edit, Replace) else edit for edit in edits]
    for are_changes, group in groupby(edits, key=lambda edit: isinstance(edit, Change)):
        changes = [edit for edit in group if isinstance(edit, Change)] if are_changes else []
        if are_changes and carry and isinstance(base, ForeignBase) and not isinstance(model, ViT):
            model = apply(model, *changes, in_place=base.in_place, example=_noise(base, 2))
        elif are_changes and carry:
            model = apply(model, *changes)
        elif are_changes and record:
            model, record = repeat(model, record[: len(changes)]), record[len(changes) :]
        elif are_changes:
            config = edit_config(config_of(model), changes)
            check_numbers("+".join(map(str, changes)), json.loads(config.to_json()))
            model = vit(config)
            model.changes = tuple(changes)
        else:
            for edit in group:
                if isinstance(edit, Replace):
                    chosen: Any = (edit.change, edit.where, edit.heads)
                    model = replace_norms(model, *chosen).model if carry else put_norms(model, *chosen)[0].model
                    continue
                assert isinstance(edit, Function)
                changed = edit.resolve()(model)
                if not isinstance(changed, nn.Module):
                    kind = type(changed).__name__
                    raise UserError(f"{edit} gave {kind}, not an nn.Module: it has to return the model.")
                changed.edited_by_function = True  # type: ignore[assignment]  # its config alone does not describe it
                model = changed
    if head and (isinstance(base, ForeignBase) or not all(isinstance(edit, Change) for edit in edits)):
        if carry:
            _check_logits(model, base, "+".join(map(str, edits)))
        else:
            model.register_forward_hook(_logits)
    return model


def described(model: nn.Module) -> ViTConfig | None:
    """The config that says all of a model (of a task's, of its backbone); None for other libraries' models and for what
    a function has made."""
    model = model.backbone if isinstance(model, TaskModel) else model
    return model.vit_config if isinstance(model, ViT) and not hasattr(model, "edited_by_function") else None


def _check_logits(model: nn.Module, base: Base, edits: str) -> None:
    """Run two images through the model, and make Hugging Face's outputs their logits. Raises UserError for others."""
    name = " of ".join(filter(None, (edits, base.spec if isinstance(base, ForeignBase) else "base")))
    size = " x ".join(map(str, (base.in_chans, *base.img_size)))
    try:
        logits = _forward(model, _noise(base, 2))
        if not isinstance(logits, Tensor) and hasattr(logits, "logits"):
            model.register_forward_hook(_logits)
            logits = logits.logits
    except Exception as error:  # whatever a foreign model raises
        reason = first_line(error) or type(error).__name__
        raise UserError(f"{name} cannot take images of {size}: {reason}") from error
    expected = (2, base.num_classes)
    if not isinstance(logits, Tensor) or logits.shape != expected:
        what = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UserError(f"{name} gives {what} for two images, and has to give logits of shape {expected}.")


def _logits(model: nn.Module, args: Any, output: Any) -> Any:
    return getattr(output, "logits", output)


@torch.no_grad()
def _forward(model: nn.Module, images: Tensor) -> Any:
    with evaluating(model), torch.random.fork_rng(devices=[]):
        return model(images)


def _noise(base: Base, count: int) -> Tensor:
    if base.reads_tokens:
        return torch.randint(1, base.in_chans, (count, base.img_size[1]), generator=torch.Generator().manual_seed(0))
    return noise(count, (base.in_chans, *base.img_size))


def record_of(model: nn.Module, base: Base, edits: Sequence[Edit], head: bool = True) -> dict[str, Any] | None:
    """Record how the model was made, for config.json, so that `rebuilt` can build it; None where its ViTConfig does.
    head: whether it kept its head."""
    if described(model) is not None:
        return None
    spec = base.spec if isinstance(base, ForeignBase) else json.loads(base.to_json())
    types = {parameter.dtype for parameter in model.parameters()}
    dtype = types.pop() if len(types) == 1 else torch.float32  # they differ, as after construction
    return {
        "base": spec,
        "edits": "+".join(map(str, edits)),
        "num_classes": base.num_classes,
        "img_size": list(base.img_size),
        "in_chans": base.in_chans,
        **({} if getattr(base, "in_place", True) else {"in_place": False}),
        **({"insertions": record} if (record := record_of_changes(model)) else {}),
        **({} if dtype is torch.float32 else {"dtype": str(dtype).removeprefix("torch.")}),
        "head": head,
        "class": type(model).__name__,
        "tensors": _names_and_shapes(model),
    }


def _names_and_shapes(model: nn.Module) -> str:
    """Return a checksum that differs for another model, when a trial resumes or is opened."""
    lines = (f"{name} {tuple(value.shape)} {value.dtype}\n" for name, value in model.state_dict().items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def rebuilt(record: Mapping[str, Any], weights: Path) -> nn.Module:
    """Build the model that `record_of` recorded, with new weights, in evaluation mode.

    The record may be damaged or hostile, so no model is made that needs much more memory than the file of its weights
    (`most_bytes`), no model is run, and no function is called that the user did not name.

    Raises:
        UserError: what it was made with does not exist any more, or makes another model.
    """
    from safetensors import SafetensorError, safe_open

    what, kinds = "It does not say how its model was made", (AttributeError, KeyError, TypeError, ValueError, OSError)
    with explaining(lambda error: f"{what} ({error!r}): copy config.json again.", *kinds):
        if not isinstance(record["base"], str | dict):
            raise TypeError("base is not a model")
        name = base_name(record["base"])
        check_numbers(name, [record["base"], record["num_classes"], record["img_size"], record["in_chans"]])
        shape = record["num_classes"], record["img_size"], record["in_chans"]
        base = make_base(record["base"], *shape, bool(record.get("in_place", True)))
        insertions = list(record.get("insertions", ()))
        check_numbers(name, insertions)
        dtype = {str(t).removeprefix("torch."): t for t in _TYPES}[record.get("dtype", "float32")]
        if isinstance(base, ViTConfig) or not base.reads_tokens:
            check_numbers(name, record["img_size"], MOST_SIDE)
        edits, head, tensors = parse_edits(record["edits"]), record.get("head", True), record["tensors"]
    for function in [*functions_of(edits), *filter(None, [base_function(record["base"])])]:
        function.resolve()
    try:
        check_file(weights, "weights")
        with safe_open(weights, framework="pt"):  # compares the lengths in its header with the file's, without reading
            size = weights.stat().st_size
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{weights} cannot be read; it may be damaged: {error}") from error

    def make() -> nn.Module:
        model = base.build(pretrained=False) if isinstance(base, ForeignBase) else vit(base)
        model = edited(model, edits, base, head, carry=False, record=insertions).to(dtype=dtype)
        return model if head else without_head(model)

    most = most_bytes(size)
    other = UserError(f"{name} is another model than the one that was trained: its tensors differ.")
    calls_function = bool(functions_of(edits)) or name.startswith(f"{PYTHON}:")
    # Users' functions and torchvision's RegNets compute with tensors as they make modules, not on the meta device.
    if not calls_function and not name.startswith("torchvision:regnet"):
        with outline(name, most):
            if _names_and_shapes(make()) != tensors:
                raise other
    elif not calls_function:  # memory is taken at once
        most = size * 6 // 5 + (16 << 20)
    with bounded(name, most):
        model = make()
    if _names_and_shapes(model) != tensors:
        raise other
    return model.eval()


def load_into(model: nn.Module, weights: Path, strict: bool = True) -> tuple[list[str], list[str]]:
    """Load a trial's weights; returns the names that are missing and unexpected."""
    with explaining(lambda error: f"{named(weights)} holds other weights: {error}", RuntimeError):
        missing, unexpected = model.load_state_dict(read_weights(weights), strict)
    return missing, unexpected


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a trial's weights, by checksum. Raises UserError for a damaged file."""
    from safetensors.torch import load as read_tensors

    check_weights(path)
    with explaining(lambda error: f"{named(path)} cannot be read: {error}"):  # safetensors raises what it likes
        return read_tensors(read_bytes(path, "weights"))


def base_name(base: Any) -> str:
    """The base as reports name it."""
    return base if isinstance(base, str) else "ViTConfig"


def model_facts(model: nn.Module, base: Base) -> dict[str, Any]:
    """Describe a model for the report: its ViTConfig, or without one its class, size and modules."""
    config = described(model)
    if config is not None:
        return dict(json.loads(config.to_json()))
    modules: dict[str, Counter[str]] = defaultdict(Counter)  # names have * for numbers
    for name, module in model.named_modules():
        parameters = [f"{key} {tuple(value.shape)}" for key, value in module.named_parameters(recurse=False)]
        is_leaf = not any(True for _ in module.children())
        if (isinstance(module, nn.Identity | nn.Dropout) and is_leaf) or not (is_leaf or parameters):
            continue
        inside = module.extra_repr() or ", ".join(parameters)
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name) or "(model)"
        modules[pattern][f"{type(module).__name__}({inside})"] += 1
    texts = {
        name: ", ".join(f"{kind} {count}x" if count > 1 else kind for kind, count in kinds.items())
        for name, kinds in modules.items()
    }
    return {
        "class": type(model).__name__,
        "params": sum(parameter.numel() for parameter in model.parameters()),
        "img_size": list(base.img_size),
        "modules": texts,
    }


def macs_of(model: nn.Module, base: Base) -> int | None:
    """Count multiply-adds of matrix products for one image, from the config or while the model runs with its task's
    modules. None if they are not known: PyTorch's counter refuses some operations."""
    config = described(model)
    if config is not None and not isinstance(model, TaskModel):
        return count_macs(config)
    from torch.utils.flop_counter import FlopCounterMode

    device = next(model.parameters()).device
    try:
        with FlopCounterMode(display=False) as counter:
            _forward(model, _noise(base, 1).to(device))
    except Exception:  # whatever an operation raises that the counter does not know
        return None if config is None else count_macs(config)
    return int(counter.get_total_flops()) // 2


def activation_bytes(model: nn.Module, base: Base) -> int:
    """Estimate the memory of an image in a training step, without the weights."""
    config = described(model)
    if config is not None:
        tokens = config.num_patches + config.num_prefix_tokens
        return 4 * config.depth * tokens * (10 * config.embed_dim + 2 * config.mlp_dim)
    kept: dict[int, int] = {}  # storage -> bytes that backward needs
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    count = 2 if base.reads_tokens else 1
    images = _noise(base, count).to(next(model.parameters()).device)
    with evaluating(model), torch.random.fork_rng(devices=[]), saved_tensors_hooks(keep, lambda tensor: tensor):
        model.train(base.reads_tokens)  # Reformer makes gradients in training alone
        outputs = model(images)  # noqa: F841 - keeps what it needs for backward until here
    return sum(kept.values()) // count
