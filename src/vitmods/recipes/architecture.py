"""The ViT that a recipe belongs to: its usual size, and what `vm.vit` must be reported beside the size."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from vitmods.recipes import RECIPES
from vitmods.recipes.models import size_and_patch

_USUAL = {
    "better_plain": "S/16",
    "deit": "S/16",
    "deit_384": "S/16",
    "high_res_finetune": "B/16",
    "sun397": "B/32",
    "transfer": "S/16",
    "vtab": "B/16",
}
_TINY = "Ti/16"  # for recipes that are for no model
_BIG_VISION = {"activation": "gelu_tanh", "position_on_prefix": False}
_REPRESENTATION = {**_BIG_VISION, "representation": True}
_POOLED = {**_BIG_VISION, "class_token": False, "pool": "avg"}
LAYER_SCALE = 1e-4  # the default of the models that were released with Three Things


def usual_model(name: str) -> str:
    """The model that a recipe is shown for when nothing is said, e.g. `B/16`."""
    argument = inspect.signature(RECIPES[name]).parameters.get("model")
    return _USUAL.get(name, _TINY) if argument is None else str(argument.default)


def architecture(name: str, model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a ViTConfig that the paper's models have and the size's name does not say.

    Args:
        name: of the recipe.
        model: the ViT, e.g. `B/16`.
        settings: of the recipe, as given.
    """
    if name == "a2":
        return {"layer_scale": LAYER_SCALE} if settings.get("layerscale") else {}
    if name == "augreg_21k":
        return dict(_POOLED)
    if name == "better_plain":
        return {**_POOLED, "position": "sincos2d", "representation": True}
    if name in ("augreg", "sun397"):
        return dict(_BIG_VISION if size_and_patch(model) == "S/32" else _REPRESENTATION)
    return {}
