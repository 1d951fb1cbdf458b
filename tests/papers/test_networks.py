"""A table is trained with the paper's network: the ViT of its recipe, said in the base of every trial."""

import json
import re
import shlex

import numpy as np
import pytest
from PIL import Image

import vitmods as vm
from vitmods.cli import main
from vitmods.model.names import split_options, with_options
from vitmods.papers import TABLES
from vitmods.recipes import RECIPES
from vitmods.recipes.recipe import ModelSettings
from vitmods.recipes.registry import network
from vitmods.study.fixed import one_spelling
from vitmods.study.trial import base_config
from vitmods.util.errors import UserError

RUN = [table for table in TABLES.values() if table.study]
BASES = [  # in every run a model of each table
    pytest.param(table, base, id=f"{table.name}-{base}", marks=[pytest.mark.long] * (number > 0))
    for table in RUN
    for number, base in enumerate(base for base in table.study.bases.values() if ":" not in base)
]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for name in ("a", "b"):
            (place := folder / split / name).mkdir(parents=True)
            for number in range(2):
                Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(place / f"{number}.png")
    return str(folder)


def shown(capsys, recipe, model):
    """The network that `vitmods recipe show` prints, for 1,000 classes."""
    of_model = [] if "model=" in recipe else ["--model", model]
    assert main(["recipe", "show", recipe, *of_model, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    settings = ModelSettings(**record["recipe"]["model"]).to_config()
    config = vm.ViTConfig.from_name(model, img_size=224, **{**record["architecture"], **settings})
    words = shlex.split(record["command"])
    if "--base" in words and of_model:  # the command that is printed trains it
        assert vm.ViTConfig.from_name(words[words.index("--base") + 1], img_size=224, **settings) == config
    return config


@pytest.mark.parametrize(("table", "base"), BASES)
def test_a_trial_has_the_network_that_its_recipe_shows(photos, capsys, table, base):
    study = table.study
    if table.line_up.start:  # the weights say what base is
        return
    if study.task in ("classification", "dino"):
        pretrain = {"pretrain": study.pretrain.replace("accumulate=8", "epochs=20")} if study.pretrain else {}
        if steps := re.search(r"--sweep steps=(\S+)", study.options):
            pretrain["sweep"] = {"steps": steps[1].split(",")}
        made = vm.Study(base, f"paper:{table.name}", photos, study.recipe, img_size=224, **pretrain)
        made = made._several.first if study.pretrain else made
        cell = made.settings.cell("base")
        config = base_config(cell, 1000).with_(**cell.recipe.model.to_config())
    else:  # of other images
        config = vm.ViTConfig.from_name(network(base, table.line_up.network), img_size=224)
        config = config.with_(**RECIPES[study.recipe]().model.to_config())
    stage = study.pretrain.partition("(")[0] or study.recipe
    expected = shown(capsys, stage, base)
    if study.network:
        expected = shown(capsys, study.network, base).with_(**RECIPES[stage]().model.to_config())
    assert config == expected


def test_a_recipe_from_python_and_from_a_file_brings_its_network_too(photos):
    plain, made = vm.recipes.small_data(epochs=2), RECIPES["augreg"]("light1", epochs=12, warmup_epochs=1, batch_size=2)
    assert made.paper == "augreg(level=light1,epochs=12,batch_size=2,warmup_epochs=1)"
    assert RECIPES["beit_small"]().paper == plain.paper == ""
    study = vm.Study("mu3/8", ["dpn"], photos, made.with_(lr=1e-4), img_size=24)
    assert study.settings.fixed["base"] == "mu3/8?activation=gelu_tanh&position_on_prefix=false&representation=true"
    assert "mu3/8 with activation=gelu_tanh, position_on_prefix=false, representation=true" in study._recipe_note
    again = vm.Study("mu3/8", ["dpn"], photos, "augreg(level=light1,warmup_epochs=1)", img_size=24)
    assert again.settings.fixed["base"] == study.settings.fixed["base"]
    swept = vm.Study(["mu3/8", "S/32"], ["dpn"], photos, "augreg(level=light1,warmup_epochs=1)", img_size=96)
    assert [base.count("&") for base in swept.settings.sweep.to_dict()["base"]] == [2, 1]  # S/32 has one layer less


@pytest.mark.parametrize(
    ("table", "recipe", "base"),
    [
        ("dpn-table1", None, "activation=gelu_tanh&position_on_prefix=false&representation=true"),
        ("dpn-table1", "small_data(epochs=2)", "activation=gelu_tanh&position_on_prefix=false&representation=true"),
        ("dpn-table1", "deit", ""),
        ("dpn-table1", RECIPES["deit"](), ""),
        ("dpn-table1", "better_plain(epochs=9,warmup_epochs=1)", "activation=gelu_tanh&class_token=false&pool=avg&"
         "position=sincos2d&position_on_prefix=false&representation=true"),
        ("dtn-table3", "small_data", "position_on_prefix=false&qkv_bias=false"),
        ("dtn-table7a", "dino_small", "position_on_prefix=false&qkv_bias=false"),
        ("norm-choice", None, ""),
    ],
)  # fmt: skip
def test_a_table_is_trained_with_its_network_unless_another_papers_recipe_is_given(photos, table, recipe, base):
    study = vm.Study("mu12/8", f"paper:{table}", photos, recipe, img_size=24)
    assert study.settings.fixed["base"].partition("?")[2] == base


@pytest.mark.parametrize(
    "base", ["mu3/8?", "mu3/8?activation=gelu", "vit_tiny_patch16_224", "timm:vit_tiny_patch16_224", "T2T-14"]
)
def test_a_base_that_says_what_it_is_stays_as_it_is(base):
    assert network(base, "augreg") == base


@pytest.mark.parametrize(
    ("written", "spelling"),
    [
        ("mu2/8?", "mu2/8"),
        ("mu2/8?activation=gelu", "mu2/8"),
        ("mu2/8?depth=2&representation=True&activation=gelu_tanh", "mu2/8?activation=gelu_tanh&representation=true"),
        ("T2T-14?depth=3", "T2T-14?depth=3"),
        ("timm:vit_tiny_patch16_224?b=1&a=2", "timm:vit_tiny_patch16_224?b=1&a=2"),
    ],
)
def test_a_base_has_one_spelling(written, spelling):
    assert one_spelling(written) == one_spelling(spelling) == spelling


def test_the_paper_s_size_says_its_network_also_where_patches_shrink(photos):
    study = vm.Study(None, "paper:dpn-table1", photos, "small_data(epochs=2)", img_size=32)
    bases = {base.partition("?")[0]: base for base in study.settings.sweep.to_dict()["base"]}
    assert ["representation" in base for base in bases.values()] == [False, True, True, True, True]  # S/32 first


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("mu3/8?activation=relu", "activation cannot be 'relu'. Did you mean 'gelu'"),
        ("mu3/8?activatoin=gelu", "does not have a setting 'activatoin'. Did you mean 'activation'.*All: img_size"),
        ("mu3/8?img_size=96", r"img_size follows from the images \(--img-size\)"),
        ("mu3/8?drop_path=0.2", "the recipe sets drop_path too"),
        ("mu3/8?depth=3&depth=4", "sets an option twice"),
        ("mu3/8?layer_scale=big", "layer_scale of a ViTConfig is a finite number or None"),
        ("mu3?activation=gelu", "is not the name of a ViT"),
    ],
)
def test_options_that_a_base_cannot_have_are_refused(photos, base, words):
    recipe = vm.recipes.small_data(epochs=2).with_(drop_path=0.1)
    with pytest.raises(UserError, match=words):
        base_config(vm.Study(base, ["dpn"], photos, recipe, img_size=24).settings.cell("base"), 2)


def test_options_are_read_as_they_are_written():
    options = {"activation": "gelu_tanh", "representation": True, "layer_scale": 1e-4, "rope": None, "position": "a&b"}
    name = with_options("B/16", options)
    assert name == "B/16?activation=gelu_tanh&representation=true&layer_scale=0.0001&rope=none&position=a%26b"
    assert split_options(name) == ("B/16", options)
    config = vm.ViTConfig.from_name("S/16?class_token=false&pool=avg", img_size=32, num_classes=3)
    assert config == vm.ViTConfig.from_name("S/16", img_size=32, num_classes=3, class_token=False, pool="avg")
