"""For all tests: Ctrl-C means what it means at a terminal, though a job started in the background ignores it; a slow
machine is no failure; and random numbers are the same in every run and any order of tests."""

import atexit
import copy
import dataclasses
import functools
import gc
import os
import random
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", patient, derandomize=True, max_examples=50)
settings.register_profile("new", patient)
settings.load_profile("same")  # examples that no run has tried: --hypothesis-profile new

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


os.environ["VITMODS_REUSE"] = "0"  # studies of one test do not take trials from each other
os.environ["VITMODS_LEDGER"] = "."  # nor do they know of each other: the ledger is in the folder of the study
os.fsync = lambda file: None  # no test is about a power failure, and a study waits for its disk for a tenth of its time


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Without the garbage collector, which would look for a quarter of the time through what imports have made."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # nor does it later
        gc.enable()
        atexit.register(gc.unfreeze)  # extensions that are written in C++ complain of what is left when Python ends


def pytest_collection_modifyitems(items):
    """What forks comes first, before any test has started threads of autograd in this process; then what is slow, so
    that the last tests are short ones, which processes share evenly."""
    items.sort(key=lambda item: (item.get_closest_marker("forks") is None, item.get_closest_marker("slow") is None))


@functools.cache
def remember_digits():
    """Trials that ask for the same digits in the same way share them: reading them takes longer than a short trial."""
    from vitmods.tasks import base

    load, known = base.load, {}

    def load_once(spec, **options):
        if spec != "digits":
            return load(spec, **options)
        asked = repr(sorted(options.items()))
        if asked not in known:
            known[asked] = load(spec, **options)
        return dataclasses.replace(known[asked], facts=copy.deepcopy(known[asked].facts))

    base.load = load_once


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """The same random numbers for a test and for the fixtures that are made for it, in any order of tests."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if "vitmods.tasks.base" in sys.modules:
        remember_digits()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """What a test asks for is forgotten by the test: a later one would write its plugins into commands."""
    yield
    if registry := sys.modules.get("vitmods.util.registry"):
        registry.asked_for.clear()
        left = registry.plugins()  # that have added something
        assert not left, f"{item.nodeid} leaves plugins behind: {left}"


@pytest.fixture(scope="module")
def short_clocks():
    """Costs and estimates of two or three calls each: for studies whose times nobody looks at."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("vitmods.study.cost.BLOCK_S", 0)
        patched.setattr("vitmods.bench.ROUNDS", (2, 2))
        patched.setattr("vitmods.study.stopwatch.TIMED_S", 0)
        patched.setattr("vitmods.study.budget.TRIED_S", 0.01)
        yield


@pytest.fixture(scope="module")
def short_probes():
    """Linear probes of two strengths instead of eight: for heads whose accuracy nobody looks at."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("vitmods.train.probe.STRENGTHS", (1.0, 0.1))
        yield


@pytest.fixture(scope="session")
def seconds_by_counting():
    """In place of `seconds_per_call`: of a machine that takes a nanosecond for each operation of a product."""
    from torch.utils.flop_counter import FlopCounterMode

    def seconds_per_call(call, repeats, device):
        with FlopCounterMode(display=False) as counter:
            call()
        return 1e-9 * counter.get_total_flops()

    return seconds_per_call


class Golden:
    """The arrays of one file of tests/golden as tensors, looked up by name or by the part before the first dot."""

    def __init__(self, name):
        import numpy as np
        import torch

        with np.load(Path(__file__).parent / "golden" / f"{name}.npz", allow_pickle=False) as arrays:
            self.arrays = {key: torch.from_numpy(arrays[key].copy()) for key in arrays.files}

    def __getitem__(self, name):
        return self.arrays[name]

    def __contains__(self, name):
        return name in self.arrays

    def group(self, prefix):
        return {key[len(prefix) + 1 :]: value for key, value in self.arrays.items() if key.startswith(f"{prefix}.")}


@pytest.fixture(scope="session")
def golden():
    """golden(name) -> inputs, weights, outputs and gradients that the papers' own code gave, in float64"""
    return Golden


# of a study, which says first what it does
FIRST_LINES = r"^((Comparing|Training|Adapting) .*|Results: .*|(At most )?\d+ trials?,.* in .*|Recipe .*)\n"


@pytest.fixture
def said(capsys):
    """Runs a command, of a line and more words; returns what it printed as `out` and `err`."""
    from vitmods.cli import main

    def run(line, *words):
        assert main([*shlex.split(line), *map(str, words)]) == 0
        return capsys.readouterr()

    return run


@pytest.fixture
def refused(capsys):
    """Runs a command that cannot be done; returns its error on one line: exit code 2, without a traceback, and with the
    command's name, or what tyro says of options."""
    from vitmods.cli import main

    def run(line, *words):
        arguments = [*shlex.split(line), *map(str, words)]
        assert main(arguments) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        error = re.sub(FIRST_LINES, "", printed.err, flags=re.MULTILINE)
        assert not re.search("Traceback|not foreseen", error)
        command = f"vitmods {arguments[0] if arguments else ''}"
        assert error.startswith((f"{command}: ", "note: ")) or f"{command} " in error
        return " ".join(re.sub("[\u2500-\u257f]|-{5,}", " ", error).split())

    return run
