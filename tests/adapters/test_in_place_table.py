"""The tables of models that are changed in place, of libraries and of strangers (vit-pytorch, x-transformers): what is
committed meets the goals, and is what the code does."""

import importlib
import json
from pathlib import Path

import pytest
import torch
import transformers

import vitmods as vm

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
TABLE = json.loads((FOLDER / "results" / "in_place.json").read_text())
PARTS = {"timm": 320, "Hugging Face, vision": 28, "Hugging Face, text": 16}
REASONS = {"not recognized", "not certified", "overlapping or layered stem", "needs a model that can be read"}
STRANGERS = json.loads((FOLDER / "results" / "strangers.json").read_text())
SAMPLE = {
    "timm": ("test_vit3", "vit_base_patch16_xp_224", "vit_relpos_base_patch16_rpn_224", "vit_base_resnet26d_224"),
    "Hugging Face, vision": ("ViT", "Siglip2Vision", "Swinv2", "Segformer", "VideoMAE", "Timesformer"),
    "Hugging Face, text": ("Bert", "T5Encoder", "Qwen3", "Mamba"),
}
LONG = (
    *("vit_relpos_base_patch16_rpn_224", "vit_base_resnet26d_224"),
    *("ViT", "Siglip2Vision", "Swinv2", "Timesformer", "Bert"),
)
"""of the sample, what is not tried in every run"""
CAUSAL = ("GPT2", "OPT", "Phi", "Llama", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Mistral")
DIFFERENT = ("GPT2", "Qwen3", "Gemma2")  # learned positions, its own qk-norm, four norms


@pytest.fixture(scope="module")
def benchmark():
    transformers.logging.set_verbosity_error()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        return importlib.import_module("in_place")


LEAST = {
    "timm": {"another norm": 315, "layerscale(init=1.0)": 315, "qknorm": 310, "dpn": 288},
    # not LeViT; not Hiera, which adds otherwise; the other five have stems of several layers or overlapping patches
    "Hugging Face, vision": {"another norm": 27, "layerscale(init=1.0)": 26, "qknorm": 26, "dpn": 23},
    "Hugging Face, text": {"another norm": 16, "layerscale(init=1.0)": 15, "qknorm": 15},  # Mamba has no attention
}


@pytest.mark.parametrize("part", LEAST)
def test_the_table_meets_its_goals_and_refusals_have_one_of_four_reasons(part):
    counted = TABLE["results"][part]
    assert counted["models"] >= PARTS[part]
    for change, least in LEAST[part].items():
        assert counted["counts"][change].get("in place", 0) + counted["counts"][change].get("has it", 0) >= least
    for counts in counted["counts"].values():
        assert counts.keys() <= {"in place", "has it"} | REASONS
        assert sum(counts.values()) == counted["models"]
    assert counted.get("CPU seconds", 0) < 240


def test_the_table_of_strangers_meets_its_goals():
    assert len(STRANGERS) == 44
    for change, least in (("layerscale(init=0.3)", 36), ("qknorm", 30)):
        assert sum(row[change] in ("in place", "has it") for row in STRANGERS.values()) >= least


def test_new_models_take_what_models_with_random_weights_take():
    assert not [line for part in TABLE["results"].values() for line in part["other when new"]]


@pytest.mark.parametrize(
    ("part", "name"),
    [
        pytest.param(part, name, marks=[pytest.mark.long] * (name in LONG))
        for part, names in SAMPLE.items()
        for name in names
    ],
)
def test_the_table_is_what_the_code_does(benchmark, part, name):
    make = benchmark.small if part == "timm" else benchmark.hugging_face
    changes = [change for change in benchmark.CHANGES if change in TABLE["results"][part]["counts"]]
    model = make(name)
    benchmark.scramble(model)
    row = {change: benchmark.outcome(model, change, benchmark.example_of(name), name)[0] for change in changes}
    committed = TABLE["results"][part]["rows"][name]
    assert row == {change: committed[change] for change in changes}
    assert benchmark.is_read(model) or not committed["read"]


@pytest.mark.parametrize("name", ["vit", "xcit", "pit", "simple_uvit", "x: vision", "x: text decoder"])
def test_the_table_of_strangers_is_what_the_code_does(monkeypatch, name):
    pytest.importorskip("vit_pytorch" if ":" not in name else "x_transformers")
    monkeypatch.syspath_prepend(str(FOLDER))
    assert importlib.import_module("strangers").row(name) == STRANGERS[name]


def test_the_page_is_made_of_the_table(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    page = importlib.import_module("models_page").page(TABLE)
    written = (FOLDER.parent / "docs" / "models.md").read_text()
    assert page == written, "run: python benchmarks/models_page.py"


WORDS = {"layerscale(init=0.5)+qknorm+subln(rescale=false)": DIFFERENT, "norm(kind=scale)": ("GPT2",)}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(name, text, marks=[pytest.mark.long] * (name not in often))
        for text, often in WORDS.items()
        for name in CAUSAL
    ],
)
def test_a_later_word_leaves_earlier_outputs_of_a_causal_model_as_they_are(benchmark, name, text):
    text = text.replace("+qknorm", "") if name == "Qwen3" else text
    model = benchmark.hugging_face(name)
    benchmark.scramble(model)
    changed = vm.apply(model, *vm.parse_changes(text), in_place=True)
    words = torch.randint(3, 50, (2, 6), generator=torch.Generator().manual_seed(0))
    other = words.clone()
    other[:, -1] = 1
    with torch.no_grad():
        first, second = changed(words)[0], changed(other)[0]
    torch.testing.assert_close(first[:, :-1], second[:, :-1])
    assert (first[:, -1] - second[:, -1]).abs().max() > 1e-3
