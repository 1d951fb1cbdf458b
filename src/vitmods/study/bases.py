"""Base models of other libraries and of users' functions, built for the images of a study."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import torch
from torch import nn

from vitmods.adapters.transfer import MOST_CLASSES, MOST_NUMBER, check_numbers
from vitmods.model.config import ViTConfig
from vitmods.study.edits import PYTHON, Function, is_foreign
from vitmods.study.token_models import LIBRARY, from_text
from vitmods.util.errors import UserError, nearest
from vitmods.util.limits import offline

if TYPE_CHECKING:
    from vitmods.recipes.recipe import ModelSettings

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
