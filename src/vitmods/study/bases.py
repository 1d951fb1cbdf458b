"""Base models of other libraries and of users' functions, built for the images of a study.

What an arm makes of any model; and of models that no ViTConfig describes, what is recorded, counted and said.

Hugging Face's models of text as bases on sequences: new ones, from their configuration at a size.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import torch
from torch import Tensor, nn

from vitmods.adapters.apply import apply, config_of
from vitmods.adapters.replace import put_norms, replace_norms
from vitmods.adapters.transfer import MOST_CLASSES, MOST_NUMBER, bounded, check_numbers, evaluating, most_bytes, outline
from vitmods.bench import peak_bytes
from vitmods.changes import Change
from vitmods.changes.compose import edit as edit_config
from vitmods.model.config import ViTConfig
from vitmods.model.flops import count_macs
from vitmods.model.vit import ViT, vit
from vitmods.study.arms import PYTHON, Function, Replace, base_function, functions_of, is_foreign, parse_edits
from vitmods.tasks.base import TaskModel, noise
from vitmods.tasks.features import without_head
from vitmods.util.errors import UserError, nearest
from vitmods.util.limits import check_file, offline

if TYPE_CHECKING:
    from vitmods.recipes.recipe import ModelSettings
    from vitmods.study.arms import Edit


LIBRARY = "hf-text"
MOST_SIDE = 4 * 1024
"""pixels of an image's side in a trial that is made again"""


def from_text(base: ForeignBase, name: str, trained: bool, options: dict[str, Any]) -> nn.Module:
    """A model of that type for sequence classification; options are fields of its configuration.

    Its call takes tokens (B, T), 0 being padding. It puts a class token of its own before them, which its head reads,
    and fills them up to one length, a multiple of the blocks and chunks of its attention: some models choose their
    attention by the length of the first batch.

    Raises UserError for an unknown type or field, and where trained weights are asked for.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN

    if trained or "drop_path" in options:
        raise UserError(f"{base.spec}: models of tokens begin with new weights, and know no drop path.")
    if name not in KNOWN:
        raise UserError(f"Hugging Face has no model '{name}' that classifies sequences. {nearest(name, KNOWN)}")
    config = AutoConfig.for_model(name)
    for key in options:
        if not hasattr(config, key):
            raise UserError(f"{base.spec}: the config has no '{key}'. {nearest(key, config.to_dict())}")
    if hasattr(config, "axial_pos_embds"):  # axial positions want lengths that are products
        options = {"axial_pos_embds": False, **options}
    config = AutoConfig.for_model(name, **options)
    length = _length(config, base.img_size[1] + 1)
    config.vocab_size, config.pad_token_id, config.num_labels = base.in_chans + 1, 0, base.num_classes
    config.max_position_embeddings = length
    if getattr(config, "attention_type", "") == "block_sparse":
        _choose_attention(base.spec, config, length)
    model: nn.Module = AutoModelForSequenceClassification.from_config(config)
    for part in model.modules():
        if getattr(part, "pooler", None) is not None and name == "big_bird":  # which its classifier does not read
            part.pooler = None  # type: ignore[assignment]
        for method in ("_init_attention_seed", "_init_feed_forward_seed"):
            if hasattr(part, method):
                setattr(part, method, MethodType(_SEEDS[method], part))
    reads = ReadsTokens(base.in_chans, length)
    model.register_forward_pre_hook(reads.before, with_kwargs=True)
    model.register_forward_hook(reads.after, always_call=True)
    return model


def _length(config: Any, tokens: int) -> int:
    """So many tokens or a few more, as attention needs it."""
    names = ("block_size", "lsh_attn_chunk_length", "local_attn_chunk_length", "attention_window")
    parts = [value for name in names if isinstance(value := getattr(config, name, 1), int)]
    multiple = math.lcm(*parts)
    return -(-tokens // multiple) * multiple


def _choose_attention(spec: str, config: Any, length: int) -> None:
    """Blocks pay, and work, from a length on; the model itself would change over at the first short batch."""
    least = (5 + 2 * config.num_random_blocks) * config.block_size
    if length <= least:
        config.attention_type = "original_full"
        warnings.warn(
            f"{spec} attends in blocks to more than {least} tokens; with {length} it attends to all of them. Longer "
            "sequences, or ?block_size=... and ?num_random_blocks=... below, make blocks.",
            stacklevel=2,
        )


def _draw(self: Any, name: str) -> None:
    """A seed from torch's random numbers, which a checkpoint keeps; Reformer's own comes from the operating system."""
    setattr(self, name, int(torch.randint(2**62, ())))
    torch.manual_seed(getattr(self, name))


_SEEDS = {
    "_init_attention_seed": lambda self: _draw(self, "attention_seed"),
    "_init_feed_forward_seed": lambda self: _draw(self, "feed_forward_seed"),
}


class ReadsTokens:
    """Hooks around a model of text that is called with tokens alone. In evaluation its random numbers (of hashing) are
    the same at each call, and those outside stay as they were."""

    def __init__(self, class_token: int, length: int):
        self.class_token, self.length = class_token, length
        self._open: list[ExitStack] = []

    def before(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """(B, T) -> filled up, with a class token, and with the mask that says where."""
        stack = ExitStack()
        self._open.append(stack)
        tokens: Tensor = args[0] if args else kwargs["input_ids"]
        if not model.training:
            cuda = [tokens.device] if tokens.device.type == "cuda" else []
            stack.enter_context(torch.random.fork_rng(devices=cuda))
            torch.manual_seed(0)
        rest = self.length - 1 - tokens.shape[1]
        if rest < 0:
            raise UserError(f"A sequence of {tokens.shape[1]} tokens is longer than the model's {self.length - 1}.")
        first = tokens.new_full((len(tokens), 1), self.class_token)
        tokens = torch.cat([first, nn.functional.pad(tokens, (0, rest))], dim=1)
        return (), {**kwargs, "input_ids": tokens, "attention_mask": (tokens != 0).long()}

    def after(self, model: nn.Module, args: Any, output: Any) -> None:
        """Random numbers as before."""
        if self._open:
            self._open.pop().close()


Options = dict[str, Any]


@dataclass(frozen=True)
class ForeignBase:
    """A base model that vitmods has no config of, for images of a size and a number of classes.

    spec: `timm:NAME`, `torchvision:NAME`, `hf:FOLDER`, `hf-text:TYPE` (of tokens), each with `?option=value&...` if
        wanted, or `python:module:function`. Options are arguments of the library's own function (fields of the config
        for Hugging Face); `pretrained=1` loads trained weights and gives them a new head.
    call: the function, where the spec names one that this process alone knows.
    """

    spec: str
    num_classes: int
    img_size: tuple[int, int]
    in_chans: int
    call: Callable[..., nn.Module] | None = None

    def __post_init__(self) -> None:
        # They are arguments of the function, and may come from a file that somebody else wrote.
        numbers = (self.num_classes, *self.img_size, self.in_chans)
        limits = (MOST_CLASSES, MOST_NUMBER, MOST_NUMBER, MOST_NUMBER)
        if not all(
            isinstance(number, int) and 0 <= number <= most for number, most in zip(numbers, limits, strict=True)
        ):
            raise UserError(
                f"{self.spec}: classes, sides and channels of images are whole numbers up to {limits[:2]}, not "
                f"{numbers!r:.60}."
            )

    def build(self, settings: ModelSettings | None = None, pretrained: bool = True) -> nn.Module:
        """The model, initialized from torch's random numbers.

        Args:
            settings: what the recipe sets of the model: timm's and Hugging Face's models may know drop path.
            pretrained: False leaves trained weights out where the spec asks for them: others come in their place.

        Raises:
            UserError: there is no such model, it does not take these options or images, or the settings.
        """
        library, _, rest = self.spec.partition(":")
        drop_path = _drop_path(self.spec, settings)
        if library == PYTHON:
            if drop_path is not None:
                raise _not_set(self.spec, "drop_path", drop_path)
            return self._call(Function(rest, self.call).resolve())
        name, _, query = rest.partition("?")
        options = {key: _literal(value) for key, value in parse_qsl(query, keep_blank_values=True)}
        check_numbers(self.spec, options)
        trained = bool(options.pop("pretrained", False)) and pretrained
        make = {"timm": _from_timm, "torchvision": _from_torchvision, "hf": _from_huggingface, LIBRARY: from_text}[
            library
        ]
        state = torch.get_rng_state()

        def attempt(optional: Options) -> nn.Module:
            torch.set_rng_state(state)
            with nullcontext() if trained else offline():
                return make(self, name, trained, {**optional, **options})

        return _with_what_it_takes(self.spec, attempt, self._optional(library), drop_path)

    @property
    def reads_tokens(self) -> bool:
        """Whether it is given tokens (B, T) of a vocabulary of `in_chans`, up to `img_size[1]`, and no images."""
        return self.spec.startswith(f"{LIBRARY}:")

    def _optional(self, library: str) -> Options:
        """Arguments that some models of a library take, and others work without."""
        side = self.img_size[0] if self.img_size[0] == self.img_size[1] else self.img_size
        known: dict[str, Options] = {"timm": {"img_size": self.img_size}, "torchvision": {"image_size": side}}
        return known.get(library, {})

    def _call(self, function: Callable[..., nn.Module]) -> nn.Module:
        model = function(self.num_classes, self.img_size, self.in_chans)
        if not isinstance(model, nn.Module):
            raise UserError(f"{self.spec} gave {type(model).__name__}, not an nn.Module: it has to return the model.")
        return model


Base = ViTConfig | ForeignBase


def make_base(base: str | Mapping[str, Any], num_classes: int, img_size: Sequence[int], in_chans: int) -> Base:
    """The base that settings name, for these images: a ViTConfig, or a ForeignBase."""
    rows, columns = img_size
    if is_foreign(base):
        return ForeignBase(str(base), num_classes, (rows, columns), in_chans, getattr(base, "call", None))
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
    if "drop_path" in options:
        raise _not_set(base.spec, "drop_path", options["drop_path"])
    if base.in_chans != 3:
        raise UserError(f"{base.spec}: torchvision's models read 3 channels, not {base.in_chans}: set in_chans to 3.")
    if not trained:
        model: nn.Module = models.get_model(name, weights=None, num_classes=base.num_classes, **options)
        return model
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

    model, about = AutoModelForImageClassification.from_pretrained(
        folder,
        config=config,
        ignore_mismatched_sizes=True,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    new = {
        *about["missing_keys"],
        *(str(key[0] if isinstance(key, tuple) else key) for key in about["mismatched_keys"]),
    }
    if odd := sorted(key for key in new if not key.startswith(("classifier.", "head."))):
        raise UserError(f"{base.spec}: its weights do not fit these images: {', '.join(odd[:5])}.")
    trained_model: nn.Module = model.train()
    return trained_model


def _with_what_it_takes(
    spec: str, attempt: Callable[[Options], nn.Module], optional: Options, drop_path: float | None
) -> nn.Module:
    """The model, made with those of the optional arguments that it takes; drop path is none of them."""
    optional = dict(optional) | ({} if drop_path is None else {"drop_path": drop_path})
    while True:
        try:
            return attempt(optional)
        except UserError:
            raise
        except TypeError as error:
            refused = next((name for name in optional if f"'{name}'" in str(error)), None)
            if refused is None:
                if drop_path is not None and "drop_path_rate" in str(error):
                    raise _not_set(spec, "drop_path", drop_path) from error
                raise UserError(f"{spec} cannot be built: {error}") from error
            del optional[refused]
        except Exception as error:  # whatever a library raises, of options or of weights that it cannot fetch
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise UserError(f"{spec} cannot be built: {reason}") from error


def _drop_path(spec: str, settings: ModelSettings | None) -> float | None:
    """The rate that a recipe sets. UserError for settings that only vitmods ViTs have."""
    if settings is None:
        return None
    for name in ("dropout", "init", "head_bias"):
        if getattr(settings, name) is not None:
            raise _not_set(spec, name, getattr(settings, name))
    if settings.drop_path_shape == "constant":
        raise _not_set(spec, "drop_path_shape", "constant")
    return settings.drop_path


def _not_set(spec: str, name: str, value: Any) -> UserError:
    return UserError(
        f"The recipe sets {name}={value!r} of the model, and {spec} knows no such setting of a recipe: set {name} to "
        "None, or choose one of vitmods' own ViTs as base. Options of the model itself may follow its name, as in "
        "timm:swin_tiny_patch4_window7_224?drop_rate=0.1."
    )


def _literal(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def edited(model: nn.Module, edits: Sequence[Edit], base: Base, head: bool = True) -> nn.Module:
    """What an arm makes of base's model, ready to be trained on the images that base is for. head: whether its logits
    are used, and looked at here.

    Raises:
        UserError: an edit cannot be made, or the result does not give the logits of these images.
    """
    if isinstance(model, ViT):  # of several bases, some other libraries', every one has the same arms
        edits = [edit.on_slots if isinstance(edit, Replace) else edit for edit in edits]
    for kind, group in groupby(edits, key=lambda edit: isinstance(edit, Change)):
        if kind:
            model = apply(model, *(edit for edit in group if isinstance(edit, Change)))
            continue
        for edit in group:
            model = _edited_by(model, edit)
    if head and (isinstance(base, ForeignBase) or not all(isinstance(edit, Change) for edit in edits)):
        _check_logits(model, base, "+".join(map(str, edits)))
    return model


def _edited_by(model: nn.Module, edit: Edit) -> nn.Module:
    if isinstance(edit, Replace):
        return replace_norms(model, edit.change, edit.where, edit.heads).model  # type: ignore[arg-type]
    assert isinstance(edit, Function)
    found = edit.resolve()(model)
    if not isinstance(found, nn.Module):
        raise UserError(f"{edit} gave {type(found).__name__}, not an nn.Module: it has to return the model.")
    found.edited_by_function = True  # type: ignore[assignment]  # so that nothing is said of it by its config alone
    return found


def described(model: nn.Module) -> ViTConfig | None:
    """The config that says all of a model (of a task's, of its backbone); None for other libraries' models and for what
    a function has made."""
    model = model.backbone if isinstance(model, TaskModel) else model
    return model.vit_config if isinstance(model, ViT) and not hasattr(model, "edited_by_function") else None


def _check_logits(model: nn.Module, base: Base, edits: str) -> None:
    """Two images through the model. Hugging Face's outputs become their logits. UserError where it gives no logits."""
    name = " of ".join(filter(None, (edits, base.spec if isinstance(base, ForeignBase) else "base")))
    size = " x ".join(map(str, (base.in_chans, *base.img_size)))
    try:
        found = _forward(model, _noise(base, 2))
        if not isinstance(found, Tensor) and hasattr(found, "logits"):
            model.register_forward_hook(_logits)
            found = found.logits
    except Exception as error:  # whatever a foreign model raises
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{name} cannot take images of {size}: {reason}") from error
    if not isinstance(found, Tensor) or found.shape != (2, base.num_classes):
        what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise UserError(f"{name} gives {what} for two images, and has to give logits of shape {(2, base.num_classes)}.")


def _logits(model: nn.Module, args: Any, output: Any) -> Any:
    return getattr(output, "logits", output)


@torch.no_grad()
def _forward(model: nn.Module, images: Tensor) -> Any:
    with evaluating(model), torch.random.fork_rng(devices=[]):
        return model(images)


def take_images(model: nn.Module, base: Base) -> None:
    """Run a model on two images of noise, on its device."""
    _forward(model, _noise(base, 2).to(next(model.parameters()).device))


def _noise(base: Base, count: int) -> Tensor:
    if base.reads_tokens:
        return torch.randint(1, base.in_chans, (count, base.img_size[1]), generator=torch.Generator().manual_seed(0))
    return noise(count, (base.in_chans, *base.img_size))


def record_of(model: nn.Module, base: Base, edits: Sequence[Edit], head: bool = True) -> dict[str, Any] | None:
    """How the model was made, for config.json, so that it can be made again; None where its ViTConfig says that. head:
    whether it kept its head."""
    if described(model) is not None:
        return None
    spec = base.spec if isinstance(base, ForeignBase) else json.loads(base.to_json())
    return {
        "base": spec,
        "edits": "+".join(map(str, edits)),
        "num_classes": base.num_classes,
        "img_size": list(base.img_size),
        "in_chans": base.in_chans,
        "head": head,
        "class": type(model).__name__,
        "tensors": _names_and_shapes(model),
    }


def _names_and_shapes(model: nn.Module) -> str:
    """A checksum by which another model than before is noticed where a trial goes on, or is opened again."""
    lines = (f"{name} {tuple(value.shape)} {value.dtype}\n" for name, value in model.state_dict().items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def rebuilt(record: Mapping[str, Any], weights: Path) -> nn.Module:
    """The model that `record_of` recorded, with new weights, in evaluation mode.

    The record may be damaged or hostile, so no model is made that needs much more memory than the file of its weights
    (`most_bytes`), no model is run, and no function is called that the user did not name.

    Raises:
        UserError: what it was made with is not there any more, or makes another model.
    """
    try:
        if not isinstance(record["base"], str | dict):
            raise TypeError("base is no model")
        name = base_name(record["base"])
        check_numbers(name, [record["base"], record["num_classes"], record["img_size"], record["in_chans"]])
        base = make_base(record["base"], record["num_classes"], record["img_size"], record["in_chans"])
        if isinstance(base, ViTConfig) or not base.reads_tokens:
            check_numbers(name, record["img_size"], MOST_SIDE)
        edits, head, tensors = parse_edits(record["edits"]), record.get("head", True), record["tensors"]
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"It does not say how its model was made ({error!r}): copy config.json anew.") from error
    for function in [*functions_of(edits), *filter(None, [base_function(record["base"])])]:
        function.resolve()
    size = _size_of_weights(weights)
    most = most_bytes(size)
    other = UserError(f"{name} is another model than the one that was trained: its tensors differ.")
    if _is_outlined(base, edits):
        with outline(name, most):
            if _names_and_shapes(_made(base, edits, head)) != tensors:
                raise other
    elif not functions_of(edits) and not name.startswith(f"{PYTHON}:"):  # memory is taken at once
        most = size * 6 // 5 + (16 << 20)
    with bounded(name, most):
        model = _made(base, edits, head)
    if _names_and_shapes(model) != tensors:
        raise other
    return model.eval()


def _size_of_weights(path: Path) -> int:
    """Bytes of a safetensors file whose header says as much. Raises UserError."""
    from safetensors import SafetensorError, safe_open

    try:
        check_file(path, "weights")
        with safe_open(path, framework="pt"):  # compares the lengths in its header with the file's, without reading it
            return path.stat().st_size
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read; it may be damaged: {error}") from error


def _is_outlined(base: Base, edits: Sequence[Edit]) -> bool:
    """Whether a model can be made on the meta device: not by users' functions and torchvision's RegNets, which compute
    with tensors as they make modules."""
    spec = base.spec if isinstance(base, ForeignBase) else ""
    return not functions_of(edits) and not spec.startswith((f"{PYTHON}:", "torchvision:regnet"))


def _made(base: Base, edits: Sequence[Edit], head: bool) -> nn.Module:
    """What `edited` gives, without carrying weights and without running models."""
    model = base.build(pretrained=False) if isinstance(base, ForeignBase) else vit(base)
    if isinstance(model, ViT):
        edits = [edit.on_slots if isinstance(edit, Replace) else edit for edit in edits]
    for kind, group in groupby(edits, key=lambda edit: isinstance(edit, Change)):
        if kind:
            changes = [edit for edit in group if isinstance(edit, Change)]
            config = edit_config(config_of(model), changes)
            check_numbers("+".join(map(str, changes)), json.loads(config.to_json()))
            model = vit(config)
            model.changes = tuple(changes)
            continue
        for edit in group:
            if isinstance(edit, Replace):
                model = put_norms(model, edit.change, edit.where, edit.heads)[0].model  # type: ignore[arg-type]
            else:
                model = _edited_by(model, edit)
    if head and (isinstance(base, ForeignBase) or not all(isinstance(edit, Change) for edit in edits)):
        model.register_forward_hook(_logits)
    return model if head else without_head(model)


def base_name(base: Any) -> str:
    """The base as reports name it."""
    return base if isinstance(base, str) else "ViTConfig"


def model_facts(model: nn.Module, base: Base) -> dict[str, Any]:
    """What a report shows of a model: its ViTConfig, or where none describes it, its class, size and modules."""
    config = described(model)
    if config is not None:
        return dict(json.loads(config.to_json()))
    return {
        "class": type(model).__name__,
        "params": sum(parameter.numel() for parameter in model.parameters()),
        "img_size": list(base.img_size),
        "modules": _modules(model),
    }


def _modules(model: nn.Module) -> dict[str, str]:
    """Name, with * for numbers -> what stands there, and how often."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for name, module in model.named_modules():
        own = [f"{key} {tuple(value.shape)}" for key, value in module.named_parameters(recurse=False)]
        leaf = not any(True for _ in module.children())
        if isinstance(module, nn.Identity) or not (leaf or own) or (leaf and isinstance(module, nn.Dropout)):
            continue
        inside = module.extra_repr() or ", ".join(own)
        found[re.sub(r"(?<![^.])\d+(?![^.])", "*", name) or "(model)"][f"{type(module).__name__}({inside})"] += 1
    return {
        name: ", ".join(f"{what} {count}x" if count > 1 else what for what, count in kinds.items())
        for name, kinds in found.items()
    }


def macs_of(model: nn.Module, base: Base) -> int | None:
    """Multiply-adds of matrix products for one image: from the config, or counted while the model runs, so with what a
    task puts beside the backbone. None: not known for this model: PyTorch's counter refuses some operations."""
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
    """Roughly what an image takes in a training step beside the weights."""
    config = described(model)
    if config is not None:
        tokens = config.num_patches + config.num_prefix_tokens
        return 4 * config.depth * tokens * (10 * config.embed_dim + 2 * config.mlp_dim)
    count = 2 if base.reads_tokens else 1
    device, image = next(model.parameters()).device, _noise(base, count)

    def step() -> None:
        found = _sum(model(image.to(device)))
        if isinstance(found, Tensor):
            found.backward()

    with evaluating(model), torch.random.fork_rng(devices=[]):
        model.train(base.reads_tokens)  # Reformer makes gradients in training alone
        weights = [*model.parameters(), *model.buffers()]
        held = sum(2 * parameter.nbytes for parameter in weights)
        peak = peak_bytes(step, weights, torch.device("cpu")) - held
    model.zero_grad(set_to_none=True)
    return max(peak, 0) // count


def _sum(outputs: Any) -> Tensor | float:
    """Of all numbers with a gradient in a model's outputs, which may be tensors in lists and mappings."""
    if isinstance(outputs, Tensor):
        return outputs.sum() if outputs.requires_grad else 0.0
    parts = outputs.values() if isinstance(outputs, Mapping) else outputs
    return sum((_sum(part) for part in parts), 0.0)
