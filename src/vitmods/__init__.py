"""Published design changes for Vision Transformers, tried on your own model and pictures with paired seeds.

Names are imported when first used, so that ``import vitmods`` and the shell's help stay quick.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "ViTConfig": "config",
    "ViT": "vit",
    "vit": "vit",
    "apply": "apply",
    "diff": "apply",
    "verify": "apply",
    "optimize_for_inference": "inference",
    "export": "inference",
    "replace_norms": "adapters",
    "parse_changes": "changes",
    "train_only": "finetune",
    "save_delta": "finetune",
    "load_delta": "finetune",
    "MultiTask": "finetune",
    "Recipe": "recipes",
    "Study": "study",
}
_MODULES = ("adapters", "changes", "data", "finetune", "recipes")

__all__ = [*_HOME, *_MODULES, "__version__"]

if TYPE_CHECKING:
    from . import adapters as adapters
    from . import changes as changes
    from . import data as data
    from . import finetune as finetune
    from . import recipes as recipes
    from .adapters import replace_norms as replace_norms
    from .apply import apply as apply
    from .apply import diff as diff
    from .apply import verify as verify
    from .changes import parse_changes as parse_changes
    from .changes.dual_patchnorm import DualPatchNorm as DualPatchNorm
    from .changes.dynamic_token_norm import DynamicTokenNorm as DynamicTokenNorm
    from .changes.layer_scale import LayerScale as LayerScale
    from .changes.norm import Norm as Norm
    from .changes.normformer import NormFormer as NormFormer
    from .changes.parallel import Parallel as Parallel
    from .changes.placement import Placement as Placement
    from .changes.positional_attention import PositionalAttention as PositionalAttention
    from .changes.stem import Stem as Stem
    from .changes.subln import SubLN as SubLN
    from .config import ViTConfig as ViTConfig
    from .finetune import MultiTask as MultiTask
    from .finetune import load_delta as load_delta
    from .finetune import save_delta as save_delta
    from .finetune import train_only as train_only
    from .inference import optimize_for_inference as optimize_for_inference
    from .inference.export import export as export
    from .recipes import Recipe as Recipe
    from .study import Study as Study
    from .vit import ViT as ViT
    from .vit import vit as vit


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    if name[:1].isupper() and name in (changes := import_module(".changes", __name__)).__all__:
        return getattr(changes, name)  # every change by its class name
    raise AttributeError(f"module 'vitmods' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*__all__, *(n for n in import_module(".changes", __name__).__all__ if n[:1].isupper())})


class _Package(ModuleType):
    """``vit`` and ``apply`` are functions and also files: importing the file must not hide the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
