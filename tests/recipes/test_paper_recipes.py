"""Every number of the papers' recipes, typed in again from the sources that each block names."""

import itertools

import pytest

from vitmods.papers.recipes import SUN397_GRIDS
from vitmods.recipes import RECIPES, a2, augreg, augreg_21k, better_plain, deit, deit_384, sun397, transfer
from vitmods.recipes.schedule import lr_at, resolve
from vitmods.util.errors import UserError

IMAGENET, MINIVAL = 1_281_167, 1_268_355

# Dual PatchNorm, appendix C; big_vision, configs/vit_i1k.py and its pre-processing operations
BIG_VISION = {
    "optimizer": "adamw", "moment": "bfloat16", "lr": 1e-3, "lr_batch": None,
    "weight_decay": 0.1,  # 1e-4 where it is not multiplied by the rate
    "beta1": 0.9, "beta2": 0.999, "adam_eps": 1e-8, "schedule": "cosine", "warmup_steps": 10_000,
    "warmup_lr": 0.0, "min_lr": 0.0, "clip_norm": 1.0, "ema": None, "init": "big_vision", "loss": "sigmoid",
    "label_smoothing": 0.0, "crop": "inception", "crop_scale": (0.05, 1.0), "crop_ratio": (0.75, 1.33),
    "flip": 0.5, "resample": "big_vision", "repeats": 1, "randaugment_space": "big_vision", "erasing": 0.0,
    "cutmix": 0.0, "eval_crop": 224 / 256, "mean": (0.5,), "std": (0.5,),
}  # fmt: skip
AUGREG = {**BIG_VISION, "epochs": 300, "batch_size": 4096, "head_bias": -6.9}
REGULARISED = {"dropout": 0.1, "drop_path": 0.1, "drop_path_shape": "linear"}
FREE = {"dropout": 0.0, "drop_path": 0.0}

# DeiT, the defaults of main.py
DEIT = {
    "epochs": 300, "batch_size": 1024, "optimizer": "adamw", "moment": "float32", "lr": 5e-4 * 1024 / 512,
    "lr_batch": 1024, "weight_decay": 0.05, "adam_eps": 1e-8, "schedule": "epoch_cosine", "warmup_epochs": 5.0,
    "warmup_lr": 1e-6, "min_lr": 1e-5, "clip_norm": None, "ema": 0.99996, "dropout": 0.0, "drop_path": 0.1,
    "drop_path_shape": "linear", "loss": "softmax", "label_smoothing": 0.1, "crop": "random_resized",
    "crop_scale": (0.08, 1.0), "crop_ratio": (3 / 4, 4 / 3), "flip": 0.5, "resample": "bicubic", "repeats": 3,
    "randaugment": (2, 9), "randaugment_space": "timm", "randaugment_noise": 0.5, "erasing": 0.25, "mixup": 0.8,
    "cutmix": 1.0, "eval_crop": 0.875, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225),
}  # fmt: skip

# Three Things, section 2.2; A2 of ResNet strikes back, mmpretrain's configs
A2 = {
    "batch_size": 2048, "optimizer": "lamb", "lr_batch": 2048, "weight_decay": 0.02, "warmup_epochs": 5.0,
    "min_lr": 1e-6,
    "clip_norm": 1.0,  # inside of LAMB
    "ema": None, "dropout": 0.0, "drop_path_shape": "constant", "loss": "bce", "label_smoothing": 0.0,
    "resample": "bicubic", "repeats": 3, "randaugment": (2, 7), "randaugment_space": "timm",
    "randaugment_noise": 0.5, "erasing": 0.0, "mixup": 0.1, "cutmix": 1.0, "eval_crop": 0.95,
}  # fmt: skip

# Dual PatchNorm, appendices D and E
MOMENTUM = {
    "batch_size": 512, "optimizer": "sgd", "momentum": 0.9, "moment": "bfloat16", "weight_decay": 0.0,
    "schedule": "cosine", "min_lr": 0.0, "clip_norm": 1.0,
    "init": "big_vision",  # a head that begins at zero
    "head_bias": 0.0, "loss": "sigmoid", "randaugment": None, "mixup": 0.0, "cutmix": 0.0, **FREE,
}  # fmt: skip
HIGH_RES = {"steps": 5000, "lr": 0.03, "warmup_steps": 500, "crop": "inception", "crop_scale": (0.05, 1.0), "flip": 0.5}
SGD = {"optimizer": "sgd", "lr": 0.01, "weight_decay": 1e-4, "epochs": 1000, "erasing": 0.0, "drop_path": 0.0}
INAT = {"optimizer": "adamw", "lr": 7.5e-5, "weight_decay": 0.05, "epochs": 360, "erasing": 0.1, "drop_path": 0.1}
LIKE_DEIT = {"repeats": 3, "label_smoothing": 0.1, "mixup": 0.8, "cutmix": 1.0, "randaugment": (2, 9)}

EXPECTED = [
    ("augreg", {"model": "Ti/16"}, {**AUGREG, **FREE, "randaugment": (2, 0), "mixup": 0.0}),
    ("augreg", {"model": "S/32"}, {**AUGREG, **FREE, "randaugment": (2, 15), "mixup": 0.2}),
    ("augreg", {"model": "S/16"}, {**AUGREG, **FREE, "randaugment": (2, 15), "mixup": 0.5}),
    ("augreg", {"model": "B/32"}, {**AUGREG, **REGULARISED, "randaugment": (2, 15), "mixup": 0.5}),
    ("augreg", {}, {**AUGREG, **REGULARISED, "randaugment": (2, 15), "mixup": 0.5}),
    ("augreg", {"model": "L/16"}, {**AUGREG, **FREE, "randaugment": (2, 15), "mixup": 0.5}),
    ("augreg", {"level": "none"}, {**AUGREG, "randaugment": None, "mixup": 0.0}),
    ("augreg", {"level": "light2"}, {**AUGREG, "randaugment": (2, 10), "mixup": 0.2}),
    ("augreg", {"level": "strong1"}, {**AUGREG, "randaugment": (2, 20), "mixup": 0.5}),
    ("augreg", {"level": "strong2"}, {**AUGREG, "randaugment": (2, 20), "mixup": 0.8}),
    ("augreg", {"moment": "float32"}, {**AUGREG, "moment": "float32"}),
    # big_vision, configs/vit_i21k.py
    *(("augreg_21k", {"model": model}, {**BIG_VISION, **FREE, "steps": 930_000, "batch_size": 4096, "head_bias": -10.0}
        | {"randaugment": randaugment, "mixup": mixup})
      for model, randaugment, mixup in (("Ti/16", None, 0.0), ("S/32", None, 0.0), ("S/16", (2, 0), 0.0),
                                        ("B/32", (2, 10), 0.2), ("B/16", (2, 10), 0.2), ("L/16", (2, 15), 0.5))),
    # big_vision, configs/vit_s16_i1k.py
    ("better_plain", {}, {**BIG_VISION, **FREE, "epochs": 90, "batch_size": 1024, "loss": "softmax"}
        | {"randaugment": (2, 10), "mixup": 0.2, "head_bias": 0.0}),
    ("deit", {}, DEIT),
    ("deit_384", {}, {**DEIT, "epochs": 30, "batch_size": 512, "lr": 5e-6, "lr_batch": 512, "weight_decay": 1e-8}
        | {"warmup_epochs": 0.0, "warmup_lr": 0.0, "min_lr": 5e-6}),
    # Dynamic Token Normalization, appendix B.1, and its released code
    ("dtn", {}, {**DEIT, "lr": 5e-4, "lr_batch": 1024}),
    ("dtn", {"released": True}, {**DEIT, "mixup": 0.0, "cutmix": 0.0, "erasing": 0.0}),
    # the main.py of PVT and of LeViT, Swin's config.py
    ("pvt", {}, {**DEIT, "ema": None, "dropout": None, "init": None}),
    ("pvt", {"size": "large"}, {"drop_path": 0.3, "clip_norm": 1.0, "ema": None, "lr": 1e-3}),
    ("swin", {}, {**DEIT, "schedule": "cosine", "warmup_epochs": 20.0, "clip_norm": 5.0, "drop_path": 0.2, "repeats": 1}
        | {"ema": None, "dropout": None}),
    ("swin", {"size": "S"}, {"drop_path": 0.3, "epochs": 300, "weight_decay": 0.05}),
    ("levit", {}, {**DEIT, "epochs": 1000, "weight_decay": 0.025, "dropout": None, "drop_path": None}),
    # Dual PatchNorm, section 5.1
    ("jft", {}, {"steps": 220_000, "batch_size": 4096, "randaugment": None, "mixup": 0.0, **FREE}),
    ("a2", {"model": "Ti/16"}, {**A2, "epochs": 300, "lr": 4e-3, "drop_path": 0.0}),
    ("a2", {"model": "S/16"}, {**A2, "epochs": 300, "lr": 4e-3, "drop_path": 0.05}),
    ("a2", {}, {**A2, "epochs": 300, "lr": 3e-3, "drop_path": 0.1}),
    ("a2", {"model": "L/16", "layerscale": True}, {**A2, "epochs": 400, "lr": 3e-3, "drop_path": 0.4}),
    ("high_res_finetune", {}, {**MOMENTUM, **HIGH_RES, "eval_crop": 384 / 418, "resample": "big_vision"}),
    ("vtab", {}, {**MOMENTUM, "steps": 2500, "lr": 3e-4, "warmup_steps": 200}),
    # Dual PatchNorm, appendix F: the first point of its grid
    ("sun397", {}, {"epochs": 600, "lr": 1e-3, "weight_decay": 0.1, "dropout": 0.0, "mixup": 0.0, "randaugment": None}),
    # our own, tuned for few images
    ("small_data", {}, {"epochs": 30, "batch_size": 32, "lr": 1e-3, "lr_batch": None, "crop_scale": (0.5, 1.0)}),
    # DeiT's author, discussions 45 and 105 of its repository
    *(("transfer", {"dataset": name}, {**LIKE_DEIT, **SGD}) for name in ("cifar10", "cifar100", "cars", "flowers")),
    *(("transfer", {"dataset": name}, {**LIKE_DEIT, **INAT}) for name in ("inat18", "inat19")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "expected"), EXPECTED, ids=lambda value: str(value)[:40])
def test_numbers_are_the_papers(name, arguments, expected):
    values = RECIPES[name](**arguments).settings()
    assert {key: values[key] for key in expected} == expected


def test_augreg_is_about_93_thousand_steps_with_10_thousand_of_warm_up():
    length = resolve(augreg(), MINIVAL)
    # big_vision's batches run across the ends of epochs: 92.9k steps there
    assert (length.steps, length.warmup_steps) == (300 * 309, 10_000)
    rates = {0: 0, 9_270: 0.927e-3, 10_000: 1e-3, (10_000 + 92_700) // 2: 0.5e-3, 92_700: 0}
    assert [lr_at(length, step) for step in rates] == pytest.approx([*rates.values()], abs=1e-12)


def test_deit_has_main_pys_rates_at_its_batch():
    length = resolve(deit(), IMAGENET)
    assert (length.steps_per_epoch, length.lr, length.min_lr) == (1251, 1e-3, 1e-5)
    assert [lr_at(length, epoch * 1251) for epoch in (0, 1)] == [1e-6, 1e-6]
    assert lr_at(length, 2 * 1251) == pytest.approx(1e-6 + (1e-3 - 1e-6) / 5)
    assert resolve(deit(batch_size=512), IMAGENET).lr == pytest.approx(5e-4)
    assert {lr_at(resolve(deit_384(), IMAGENET), step) for step in (0, 10_000, 70_000)} == {5e-6}


def test_a2_at_twice_the_batch_has_twice_the_rate_and_epochs_may_be_other():
    length = resolve(a2(batch_size=4096), IMAGENET)
    assert (length.lr, length.min_lr) == (6e-3, 2e-6)
    assert length.warmup_steps == 5 * 312
    assert a2(layerscale=True, epochs=300).epochs == 300
    assert better_plain(300).epochs == 300


def test_sun397_takes_every_point_of_its_grids():
    plain, augmented = SUN397_GRIDS
    expected = {"lr": {1e-3, 3e-4, 1e-4}, "weight_decay": {0.03, 0.1}, "dropout": {0.0, 0.1}}
    expected |= {"mixup": {0.0, 0.2, 0.5}, "magnitude": {0, 5, 10, 15}}
    assert {name: set(values) for name, values in (*plain.items(), *augmented.items())} == expected
    points = itertools.product(*plain.values(), *augmented.values())
    recipes = {sun397(**dict(zip((*plain, *augmented), point, strict=True))) for point in points}
    assert len(recipes) == 12 * 12
    assert {recipe.augment.randaugment for recipe in recipes} == {(2, 0), (2, 5), (2, 10), (2, 15)}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: augreg("lite1"), "Did you mean 'light1'"),
        (lambda: augreg(model="H/14"), r"only for Ti/16, .*augreg\(level=light1\)"),
        (lambda: a2(model="B36/16"), r"for B36, only for Ti, S, B, L.*drop_path=0.1"),
        (lambda: a2(model="Q/16"), "is not the name of a ViT"),
        (lambda: transfer("car"), "Did you mean 'cars'"),
        (lambda: resolve(augreg(epochs=30, batch_size=64), 5000), "warmup"),
        (lambda: augreg_21k(steps=5_000, warmup_steps=500).with_(warmup_steps=10_000), "warmup"),
        (lambda: deit(epochs=4), "warmup_epochs=5 leaves nothing"),
    ],
)
def test_what_no_paper_says_is_refused_with_a_remedy(make, words):
    with pytest.raises(UserError, match=words):
        make()


def test_values_that_are_given():
    assert augreg("light1", "H/14").model.dropout == 0.0
    assert a2(model="B36/16", lr=3e-3, drop_path=0.3).model.drop_path == 0.3
    assert augreg(model="vit_small_patch16_224") == augreg(model="S/16")
    assert resolve(augreg("light1", epochs=30, batch_size=64, warmup_epochs=3), 5000).warmup_steps == 3 * 78
    assert (transfer().batch_size, transfer().optimizer.lr_batch) == (768, 768)
    assert resolve(transfer("cars", batch_size=96, epochs=10), 8144).lr == pytest.approx(0.01 / 8)
