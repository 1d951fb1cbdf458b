"""Every benchmark can be run: once at its smallest, or up to its options where it starts studies of its own."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
ONCE = "--rounds 1 "
TINY = {
    "bf16": ONCE + "--sizes",
    "data_loading": ONCE,
    "dtn": ONCE + "--sides 4 --models",
    "finetune": ONCE + "--sizes Ti/16 --pixels 32 --batch 1 --variants full head",
    "hmlp": ONCE + "--sizes Ti/16 --batch 1",
    "inference": ONCE + "--sizes Ti/16 --batch 1",
    "norms": ONCE + "--shape 1 17 24",
    "rms_conversion": ONCE + "--sizes Ti/16 --batch 1",
    "stem": ONCE + "--sizes mu6/4 --batches 1",
    "stochastic_depth": ONCE + "--batch 2 --rates 0.1",
    "throughput": ONCE + "--sizes Ti/16 --batch 1",
}
CONSTANTS = {"data_loading": {"SMALL": 64, "BATCH": 2, "FILES": 5, "LARGE": 4, "BATCHES": 1}}
"""that are made smaller"""
TESTED_ELSEWHERE = {"fuzz", "gpu_check", "minimum"}
SHARED = {"dense_dtn", "paired"}
NAMES = {path.stem for path in FOLDER.glob("*.py")} - TESTED_ELSEWHERE - SHARED


@pytest.fixture
def run(monkeypatch):
    """Call a benchmark's main with these words after its name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    threads = torch.get_num_threads()

    def run(name, words):
        module = importlib.import_module(name)
        for constant, value in CONSTANTS.get(name, {}).items():
            monkeypatch.setattr(module, constant, value)
        monkeypatch.setattr(sys, "argv", [name, *words.split()])
        module.main()

    yield run
    torch.set_num_threads(threads)
    for name in NAMES | SHARED:
        sys.modules.pop(name, None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(TINY))
def test_it_measures(run, name, capsys):
    run(name, TINY[name])
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(NAMES - TINY.keys()))
def test_it_can_be_started(run, name):
    with pytest.raises(SystemExit) as ended:
        run(name, "--help")
    assert ended.value.code == 0
