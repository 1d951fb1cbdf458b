"""Docstrings as a source: what `vitmods recipes` shows, commands that exist, models that can be built."""

import re
import shlex

import pytest
import torch

import vitmods as vm
from vitmods.cli import main
from vitmods.recipes import FINETUNING, PAPERS, PAPERS_FINETUNING, RECIPES, a2, augreg, deit, finetune, plain
from vitmods.recipes.architecture import architecture, usual_model
from vitmods.recipes.describe import describe
from vitmods.recipes.parse import parse_recipe, settings_of
from vitmods.util.errors import UserError

PUBLISHED = {**PAPERS, **PAPERS_FINETUNING}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_says_what_for_and_what_to_expect(name):
    record = describe(name, RECIPES[name])
    assert record.summary
    assert record.data
    assert record.expected_number
    assert len(record.summary) <= 120
    assert [argument.partition("=")[0] for argument in record.arguments] == list(settings_of(RECIPES[name]))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_papers_recipe_names_the_paper_and_a_command_that_exists(name, capsys):
    record = describe(name, PUBLISHED[name])
    assert re.search(r"arXiv:\d{4}\.\d{5}", record.paper)
    program, command, *words = shlex.split(record.command)
    assert program == "vitmods"
    with pytest.raises(SystemExit):
        main([command, "--help"])
    options = set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out))
    assert {word for word in words if word.startswith("--")} <= options
    assert isinstance(parse_recipe(words[words.index("--recipe") + 1]), vm.Recipe)


def test_a_description_is_what_the_docstring_says():
    def example(level: int = 3) -> vm.Recipe:
        """One line, `so`.

        Paper: Somebody et al., "A title: with
            a colon" (arXiv:1234.56789)
        Expected number: 12.3

        Prose.
        """

    record = describe("example", example)
    assert record.summary == "One line, so"
    assert record.paper == 'Somebody et al., "A title: with a colon" (arXiv:1234.56789)'
    assert record.expected_number == "12.3"
    assert record.arguments == ("level=3",)
    assert record.data == ""


CALL = re.compile(r'vm\.vit\(("[^"]+".*?)\)')


@pytest.mark.parametrize("name", [name for name in PAPERS if CALL.search(describe(name, PAPERS[name]).model)])
def test_the_model_that_a_docstring_names_is_the_one_that_is_built(name):
    written = CALL.search(describe(name, PAPERS[name]).model)[1]
    size, settings = eval(f"(lambda size, **settings: (size, settings))({written})")
    assert architecture(name, size, {}) == settings
    config = vm.ViTConfig.from_name(size, img_size=224, **settings)
    assert config.pool == ("avg" if name in ("augreg_21k", "better_plain") else "token")
    assert config.representation == (name in ("augreg", "better_plain", "sun397"))


def test_models_of_settings_and_sizes_that_differ():
    assert "representation" not in architecture("augreg", "S/32", {})
    assert architecture("a2", "B/16", {"layerscale": True}) == {"layer_scale": 1e-4}
    assert architecture("deit", "S/16", {}) == {}
    assert [usual_model(name) for name in ("augreg", "better_plain", "small_data")] == ["B/16", "S/16", "Ti/16"]


def test_model_settings_reach_the_model():
    torch.manual_seed(0)
    settings = {**architecture("augreg", "mu2/8", {}), **augreg(level="light1").model.to_config()}
    model = vm.vit("mu2/8", img_size=16, num_classes=5, **settings)
    assert model.head.bias.tolist() == pytest.approx([-6.9] * 5)
    assert not model.head.weight.any()
    assert model.vit_config.drop_path == 0.1
    assert model.pre_logits is not None


def test_recipes_as_the_shell_writes_them():
    assert parse_recipe("deit") == deit()
    assert parse_recipe(" a2( layerscale = true, model=S/16 ) ") == a2(True, "S/16")
    assert parse_recipe("a2(layerscale)") == a2(True)
    assert parse_recipe("augreg(level=light1,epochs=30,warmup_epochs=2.5)") == augreg(
        "light1", epochs=30, warmup_epochs=2.5
    )
    assert parse_recipe("a2", model="S/16") == a2(model="S/16")
    assert parse_recipe("a2(model=L/16)", model="S/16") == a2(model="L/16")
    assert parse_recipe("deit", model="S/16", like=plain()) == deit()
    for name in FINETUNING:
        assert parse_recipe(name, like=plain()).augment.crop == "none"
    assert parse_recipe("finetune(epochs=3)", like=plain()) == finetune(plain(), 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("diet", "no recipe 'diet'. Did you mean 'deit'"),
        ("deit(", "not a recipe"),
        ("a2(layerscal=true)", "no setting 'layerscal'. Did you mean 'layerscale'"),
        ("a2(layerscale=maybe)", "true or false"),
        ("deit(epochs=many)", "a number"),
        ("deit(epochs=2,epochs=3)", "given twice"),
        ("finetune(like=plain)", "no setting 'like'"),
    ],
)
def test_recipes_that_cannot_be_read(text, words):
    with pytest.raises(UserError, match=words):
        parse_recipe(text)


def test_a_model_without_a_name_must_be_reported():
    with pytest.raises(UserError, match=r"say which, as in a2\(model=S/16\)"):
        parse_recipe("a2", model=None)
    assert parse_recipe("a2(model=S/16)", model=None) == a2(model="S/16")
