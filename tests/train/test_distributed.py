"""Several processes that train one model are one: weights, metrics, files, resume; and an error of one ends all."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

import vitmods as vm
from vitmods import data
from vitmods.recipes import Recipe
from vitmods.tasks import Classification
from vitmods.train import Interrupted, Processes, RunOptions, train_trial
from vitmods.train.distributed import PeerEnded
from vitmods.train.loop import TrialRun
from vitmods.util.errors import UserError

pytestmark = pytest.mark.forks

PLAIN = Recipe().with_(epochs=2, batch_size=40, lr=2e-3, crop="pad", eval_crop=1.0, clip_norm=1.0)
BUSY = PLAIN.with_(mixup=0.4, cutmix=1.0, ema=0.9, accumulate=2, randaugment=(1, 5.0), erasing=0.3)
RECIPES = {"plain": PLAIN, "busy": BUSY, "sgd": PLAIN.with_(optimizer="sgd", moment="bfloat16")}
MODELS = {"plain": (), "busy": (vm.Norm("batch"),), "sgd": (vm.DualPatchNorm(),)}
KINDS = {2: ("plain", "busy", "sgd"), 4: ("busy",)}
STOP = 5


def trial(out: Path, kind: str, processes: Processes = Processes(), **how: object) -> dict:  # noqa: B008
    recipe = RECIPES[kind]
    images = data.load("digits", img_size=(8, 8), in_chans=1, augment=recipe.augment, limit_train=160)
    torch.manual_seed(7)
    model = vm.vit("mu2/2", img_size=8, in_chans=1, num_classes=10)
    model = vm.apply(model, *MODELS[kind]) if MODELS[kind] else model
    options = RunOptions("cpu", tensorboard=False, progress=False, processes=processes, **how)
    return train_trial(model, Classification.from_recipe(recipe), images, recipe, out=out, how=options)


def work(rank: int, size: int, store: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    processes, out = Processes(rank, size, rank), Path(folder)
    for kind in KINDS[size]:
        trial(out / kind, kind, processes)
    if size == 2:
        for kind in ("plain", "busy"):
            trial(out / f"sharded-{kind}", kind, processes, shard=True)
        step = TrialRun._train_step

        def one_is_asked_to_stop(run, batch):  # the second process alone gets a signal
            if rank == 1 and run.step == STOP:
                signal.raise_signal(signal.SIGTERM)
            step(run, batch)

        TrialRun._train_step = one_is_asked_to_stop
        for name, how in (("stopped", {}), ("stopped-sharded", {"shard": True})):
            with pytest.raises(Interrupted):
                trial(out / name, "busy", processes, **how)
        TrialRun._train_step = step
        errors = []
        for name in ("odd", "bad"):
            try:
                if name == "odd":
                    RECIPES["odd"] = PLAIN.with_(batch_size=41)
                    MODELS["odd"] = ()
                    trial(out / name, "odd", processes)
                else:
                    processes.once(lambda: (_ for _ in ()).throw(UserError("the disk is full")))
            except UserError as error:
                errors.append((type(error).__name__, str(error)))
        (out / f"errors{rank}.json").write_text(json.dumps(errors))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    for kind in ("plain", "busy", "sgd"):
        trial(folder / kind, kind)
    return folder


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The folder of what so many processes did."""
    done = {}

    def start(size: int) -> Path:
        if size not in done:
            done[size] = tmp_path_factory.mktemp(f"together{size}")
            arguments = (size, str(done[size] / "store"), str(done[size]))
            mp.start_processes(work, arguments, nprocs=size, start_method="fork")
        return done[size]

    return start


def check_same(own: Path, other: Path) -> None:
    """Weights to what AdamW makes of rounding; metrics, scores of each image in order, rows of the log."""
    ours, theirs = (load_file(path / "model.safetensors") for path in (own, other))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], atol=1e-3, rtol=1e-3, msg=name)
    results = [json.loads((path / "result.json").read_text()) for path in (own, other)]
    assert results[0]["metrics"] == pytest.approx(results[1]["metrics"], abs=5e-3)
    assert results[0]["steps"] == results[1]["steps"]
    assert results[0]["params"] == results[1]["params"]
    scores = [np.load(path / "test.npz") for path in (own, other)]
    assert list(scores[0]["ids"]) == list(scores[1]["ids"])
    np.testing.assert_allclose(scores[0]["nll"], scores[1]["nll"], atol=2e-2)
    rows = [[json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()] for path in (own, other)]
    for a, b in zip(*rows, strict=True):
        assert {**a, "wall_s": 0}.keys() == {**b, "wall_s": 0}.keys()
        assert a["loss"] == pytest.approx(b["loss"], abs=2e-3)
        if "grad_norm" in a:
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-2)


@pytest.mark.parametrize(("size", "kind"), [(size, kind) for size, kinds in KINDS.items() for kind in kinds])
def test_two_and_four_processes_are_one(alone, together, kind, size) -> None:
    check_same(alone / kind, together(size) / kind)


@pytest.mark.parametrize("kind", ["plain", "busy"])
def test_a_divided_model_is_a_whole_one(alone, together, kind) -> None:
    check_same(alone / kind, together(2) / f"sharded-{kind}")


@pytest.mark.parametrize("name", ["stopped", "stopped-sharded"])
def test_a_signal_to_one_process_stops_all_and_one_process_can_go_on(alone, together, name) -> None:
    two = together(2)
    rows = (two / name / "metrics.jsonl").read_text().splitlines()
    assert not (two / name / "result.json").exists()
    assert rows
    with pytest.warns(UserWarning, match="processes was 2, now 1"):
        trial(two / name, "busy")
    check_same(alone / "busy", two / name)


def test_errors_are_those_of_all(together) -> None:
    two = together(2)
    first, second = (json.loads((two / f"errors{rank}.json").read_text()) for rank in range(2))
    assert "41 images cannot be divided evenly among 2" in first[0][1]
    assert first[1] == ["UserError", "the disk is full"]
    assert second[1] == [PeerEnded.__name__, "the disk is full"]


def test_sharding_needs_several_processes() -> None:
    with pytest.raises(UserError, match="shard divides a model among processes, and here is one"):
        RunOptions("cpu", shard=True)


def command(out: Path, *options: str, **environment: str) -> subprocess.CompletedProcess:
    given = ["--data", "digits", "--base", "mu2/2", "--epochs", "1", "--limit-train", "160", "--batch-size", "40"]
    return subprocess.run(
        [sys.executable, "-m", "vitmods", "train", *given, "--device", "cpu", "--out", str(out), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_command_starts_its_processes_and_one_of_them_speaks(tmp_path) -> None:
    done = command(tmp_path / "run", "--devices", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Weights:") == 1
    assert json.loads((tmp_path / "run/config.json").read_text())["environment"]["processes"] == 2
    failed = command(tmp_path / "other", "--devices", "2", "--base", "nonsense")
    assert failed.returncode == 2
    assert "nonsense" in failed.stderr
    assert "Traceback" not in failed.stderr
