"""Recipes: functions that return a complete `Recipe`, registered with what is known of them."""

from vitmods.recipes.augreg import augreg, augreg_21k
from vitmods.recipes.better_plain import better_plain
from vitmods.recipes.big_vision_transfer import high_res_finetune, vtab
from vitmods.recipes.defaults import default, digits, finetune, finetune_sgd, plain, small_images
from vitmods.recipes.deit import deit, deit_384
from vitmods.recipes.detection import coco_1x, small_detection
from vitmods.recipes.dynamic_token_norm import dtn
from vitmods.recipes.jft import jft
from vitmods.recipes.levit import levit
from vitmods.recipes.listops import listops
from vitmods.recipes.pvt import pvt
from vitmods.recipes.recipe import (
    Augment,
    Detection,
    Loss,
    ModelSettings,
    Optimizer,
    Recipe,
    Schedule,
    Segmentation,
    weight_decay_from_big_vision,
)
from vitmods.recipes.registry import RECIPES, Evidence, evidence
from vitmods.recipes.segmentation import ade20k, small_segmentation
from vitmods.recipes.small_data import small_data
from vitmods.recipes.sun397 import SUN397_GRIDS, sun397
from vitmods.recipes.swin import swin
from vitmods.recipes.three_things import a2
from vitmods.recipes.transfer import transfer

__all__ = [
    "RECIPES",
    "SUN397_GRIDS",
    "Augment",
    "Detection",
    "Evidence",
    "Loss",
    "ModelSettings",
    "Optimizer",
    "Recipe",
    "Schedule",
    "Segmentation",
    "a2",
    "ade20k",
    "augreg",
    "augreg_21k",
    "better_plain",
    "coco_1x",
    "default",
    "deit",
    "deit_384",
    "digits",
    "dtn",
    "evidence",
    "finetune",
    "finetune_sgd",
    "high_res_finetune",
    "jft",
    "levit",
    "listops",
    "plain",
    "pvt",
    "small_data",
    "small_detection",
    "small_images",
    "small_segmentation",
    "sun397",
    "swin",
    "transfer",
    "vtab",
    "weight_decay_from_big_vision",
]
