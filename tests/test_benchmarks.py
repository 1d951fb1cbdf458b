"""Every benchmark runs once, at its smallest."""

import importlib
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from PIL import Image

from vitmods.cli import main
from vitmods.util.registry import _registries

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
ONCE = "--rounds 1 "
TINY = {
    "channels_last": ONCE + "--sizes mu3/4 --batch 2",
    "corruptions": ONCE,
    "coverage": "--studies 1 --seeds 2 --most 4",
    "loop_overhead": "",
    "metrics_over_images": "--studies 2 --images 30 --arms 1 --seeds 3",
    "parallel": ONCE + "--sizes S --batches 1 --pairs 1",
    "positional_attention": ONCE,
    "recent": ONCE,
    "recording": "",
    "scale": "--trials 32 --nodes 4 --sleep 0",
    "sequence_dtn": ONCE,
    "near_copies": "{images} --copies 4",
    "shards": "{images} " + ONCE,
    "soak": "--trials 4 --kills 1",
    "study_start": "--images 60 --side 8 --load",
    "waits": "--tasks classification --batches 2",
    "trees": "{root} {root} --model mu/4 --img-size 8 --batch 1 " + ONCE,
    "bf16": ONCE + "--sizes",
    "data_loading": ONCE,
    "dtn": ONCE + "--sides 4 --models",
    "finetune_rates": "{weights} digits --pixels 8 --steps 1 --settings default lr=1e-3,layer_decay=none,train=head",
    "finetune": ONCE + "--sizes Ti1/16 --pixels 32 --batch 1 --variants full head",
    "hmlp": ONCE + "--sizes Ti/16 --batch 1",
    "inference": ONCE + "--sizes Ti/16 --batch 1",
    "norms": ONCE + "--shape 1 17 24",
    "pretraining": ONCE + "--sizes mu1/4 --batch 8",
    "rms_conversion": ONCE + "--sizes Ti1/16 --batch 1",
    "stem": ONCE + "--sizes mu6/4 --batches 1",
    "stochastic_depth": ONCE + "--size Ti2/16 --batch 2 --rates 0.1",
    "throughput": ONCE + "--sizes Ti/16 --batch 1",
}
KILLED = "compare --base mu/4 --arms dpn --seeds 2 --epochs 1 --limit-train 64 --workers 2 --device cpu"
CONSTANTS = {
    "corruptions": {"BATCH": {32: 2}, "CORRUPTIONS": ("fog", "contrast"), "EXTRA": ()},
    "data_loading": {"SMALL": 64, "BATCH": 2, "FILES": 5, "LARGE": 4, "BATCHES": 1},
    "inference": {"timm": SimpleNamespace(create_model=partial(timm.create_model, depth=1))},
    "loop_overhead": {"STEPS": 40, "BLOCK": 10},
    "parallel": {"WIDTHS": {"S": (24, 2)}},
    "positional_attention": {"BASE": "Ti/16", "RUNS": ((32, 1),)},
    "recent": {"SIZE": {"img_size": 32, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 2}, "BATCH": 1},
    "recording": {"MODELS": {"mu/4": ("mu/4", 8, 2)}, "ROUNDS": 1},
    "scale": {"ARMS": 2},
    "sequence_dtn": {"LENGTHS": (80,), "OF_ENCODER": 16},
    "shards": {"SIZE": 16, "BATCH": 4, "BATCHES": 1},
    "soak": {
        "ARMS": ("rms",),
        "EVERY": 1,
        "WARM_UP": 0.0,
        "KILLED": [*KILLED.split(), "--cost-seconds", "0", "--quiet"],
    },
    "trees": {"MODES": ("training",)},
}
"""that are made smaller"""
PROCESSES = {"scale", "soak", "study_start", "trees"}
"""that start processes: whole studies, or a model of each tree"""
LONG = {"coverage", "finetune_rates", "inference", "pretraining"}
TESTED_ELSEWHERE = {
    "fuzz",
    "in_place",
    "in_place_oracle",
    "strangers",
    "models_page",
    "readers",
    "gpu_check",
    "minimum",
    "improving",
    "gpu_steps",
    "gpu_page",
}
SHARED = {"dense_dtn", "paired"}


def test_every_benchmark_is_run():
    assert {path.stem for path in FOLDER.glob("*.py")} == TINY.keys() | TESTED_ELSEWHERE | SHARED


@pytest.fixture
def run(monkeypatch):
    """Call a benchmark's main with these words after its name; what it times by turns runs once."""
    monkeypatch.syspath_prepend(str(FOLDER))
    threads = torch.get_num_threads()
    entries = [(registry, dict(registry._read())) for registry in _registries]
    timing = importlib.import_module("paired")

    def once(variants, reference, rounds, repeats=1):
        for call in variants.values():
            call()
        return {name: timing._summary([1.0], [1.0]) for name in variants}

    monkeypatch.setattr(timing, "paired", once)

    def run(name, words):
        module = importlib.import_module(name)
        for constant, value in CONSTANTS.get(name, {}).items():
            monkeypatch.setattr(module, constant, value)
        monkeypatch.setattr(sys, "argv", [name, *words.split()])
        module.main()

    yield run
    torch.set_num_threads(threads)
    for registry, before in entries:  # what a benchmark adds would count as code of every later trial
        registry._entries.clear()
        registry._entries.update(before)
    for name in TINY.keys() | SHARED:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of images in two classes."""
    root = tmp_path_factory.mktemp("images")
    for number in range(12):
        path = root / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.effect_noise((24, 24), 50 + number).convert("RGB").save(path)
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A folder of a trial of one step on digits."""
    out = tmp_path_factory.mktemp("weights")
    assert main(["train", "--base", "mu1/4", "--steps", "1", "--device", "cpu", "--quiet", "--out", str(out)]) == 0
    return out


def test_variants_are_timed_by_turns(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    paired, calls = importlib.import_module("paired").paired, []
    rows = paired({name: lambda name=name: calls.append(name) for name in "ab"}, "a", rounds=2, repeats=2)
    assert "".join(calls) == "ab" + "bbaa" + "bbaa"
    assert rows["a"]["ratio"] == rows["a"]["ratio_of_minima"] == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in PROCESSES | LONG)) for name in sorted(TINY)]
)
def test_it_measures(run, name, images, weights, capfd):
    run(name, TINY[name].format(images=images, weights=weights, root=FOLDER.parent))
    assert capfd.readouterr().out
