"""Several processes that train one model are one, in weights, metrics, files and resume; what ends or refuses all."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

import vitmods as vm
from vitmods import cli, data
from vitmods.recipes import Recipe
from vitmods.tasks import Classification
from vitmods.train import Interrupted, Processes, RunOptions, distributed, train_trial
from vitmods.train.distributed import Agreement, PeerEnded
from vitmods.train.loop import TrialRun
from vitmods.util.errors import UserError

pytestmark = pytest.mark.forks

PLAIN = Recipe().with_(epochs=2, batch_size=40, lr=2e-3, crop="pad", eval_crop=1.0, clip_norm=1.0)
BUSY = PLAIN.with_(mixup=0.4, cutmix=1.0, ema=0.9, accumulate=2, randaugment=(1, 5.0), erasing=0.3)
RECIPES = {
    "busy": BUSY,
    "sgd": PLAIN.with_(optimizer="sgd", moment="bfloat16"),
    "half": PLAIN.with_(epochs=1, ema=0.9, precision="bf16-mixed"),
}
MODELS = {"busy": (vm.Norm("batch"),), "sgd": (vm.DualPatchNorm(),), "half": ()}
STOP = 5
DIVIDED = "stopped-sharded"


def trial(out: Path, kind: str, processes: Processes = Processes(), **how: object) -> dict:  # noqa: B008
    recipe = RECIPES[kind]
    few = {"limit_train": 160, "limit_val": 20, "test_fraction": 0.02}
    images = data.load("digits", img_size=(8, 8), in_chans=1, augment=recipe.augment, **few)
    torch.manual_seed(7)
    model = vm.vit("mu1/2", img_size=8, in_chans=1, num_classes=10)
    model = vm.apply(model, *MODELS[kind]) if MODELS[kind] else model
    options = RunOptions("cpu", tensorboard=False, progress=False, **how)
    task = Classification.from_recipe(recipe)
    return train_trial(model, task, images, recipe, out=out, options=options, processes=processes)


def copies(source: Path, target: Path) -> None:
    """Of the trials that were stopped, to go on in another way."""
    names = {"two": DIVIDED, "whole-later": DIVIDED, "divided-later": "stopped", "damaged": DIVIDED}
    for name, of in names.items() if source == target else [("four", DIVIDED)]:
        shutil.copytree(source / of, target / name)


def work(rank: int, size: int, store: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    processes, out = Processes(rank, size, rank), Path(folder)
    if size == 4:
        trial(out / "four", "busy", processes, shard=True)
    else:
        work_of_two(processes, out)
    dist.destroy_process_group()


def work_of_two(processes: Processes, out: Path) -> None:
    trial(out / "busy", "busy", processes)
    for kind in RECIPES:
        trial(out / f"sharded-{kind}", kind, processes, shard=True)
    step = TrialRun._train_step

    def one_is_asked_to_stop(run, batch):  # the second process alone gets a signal
        if processes.rank == 1 and run.step == STOP:
            signal.raise_signal(signal.SIGTERM)
        step(run, batch)

    TrialRun._train_step = one_is_asked_to_stop
    distributed.AGREE_CALLS = 2  # of so few steps
    for name, options in (("stopped", {}), (DIVIDED, {"shard": True, "checkpoint_every_steps": 2})):
        with pytest.raises(Interrupted):
            trial(out / name, "busy", processes, **options)
    TrialRun._train_step = step
    processes.once(lambda: copies(out, out))
    trial(out / "two", "busy", processes, shard=True)
    trial(out / "divided-later", "busy", processes, shard=True)
    trial(out / "whole-later", "busy", processes)
    os.environ |= {"RANK": str(processes.rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = ["train", "--base", "mu2/2", "--limit-train", "160", "--batch-size", "41", "--device", "cpu"]
    assert cli.main([*command, "--out", str(out / "odd-command")]) == 2
    RECIPES["odd"], MODELS["odd"] = PLAIN.with_(batch_size=41), ()
    damage = [path.write_bytes for path in out.glob("damaged/checkpoint*.pt")]
    errors = []
    for fail in (
        lambda: trial(out / "odd", "odd", processes),
        lambda: processes.once(lambda: (_ for _ in ()).throw(UserError("the disk is full"))),
        lambda: (processes.once(lambda: [write(b"") for write in damage]), trial(out / "damaged", "busy", processes)),
    ):
        try:
            fail()
        except UserError as error:
            errors.append((type(error).__name__, str(error)))
    (out / f"errors{processes.rank}.json").write_text(json.dumps(errors))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    for kind in RECIPES:
        trial(folder / kind, kind)
    return folder


@pytest.fixture(scope="module")
def together(tmp_path_factory, imported):
    """The folder of what so many processes did."""
    done = {}

    def start(size: int) -> Path:
        if size not in done:
            before = start(2) if size == 4 else None
            done[size] = tmp_path_factory.mktemp(f"together{size}")
            if before:
                copies(before, done[size])
            arguments = (size, str(done[size] / "store"), str(done[size]))
            mp.start_processes(work, arguments, nprocs=size, start_method="fork")
        return done[size]

    return start


def check_weights(own: Path, other: Path, tolerance: float) -> None:
    torch.testing.assert_close(
        *(load_file(path / "model.safetensors") for path in (own, other)), atol=tolerance, rtol=tolerance
    )


def check_same(own: Path, other: Path) -> None:
    """Weights to what AdamW makes of rounding; metrics, scores of each image in order, rows of the log."""
    check_weights(own, other, 1e-3)
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


def test_two_processes_are_one_also_where_they_divide_the_model(alone, together) -> None:
    for kind, name in (("busy", "busy"), ("busy", "sharded-busy"), ("sgd", "sharded-sgd")):
        check_same(alone / kind, together(2) / name)
    check_weights(alone / "half", together(2) / "sharded-half", 5e-3)


@pytest.mark.parametrize("name", ["stopped", "stopped-sharded"])
def test_a_signal_to_one_process_stops_all_and_one_process_can_go_on(alone, together, name) -> None:
    two = together(2)
    rows = (two / name / "metrics.jsonl").read_text().splitlines()
    assert not (two / name / "result.json").exists()
    assert rows
    with pytest.warns(UserWarning, match="processes was 2, now 1"):
        trial(two / name, "busy")
    check_same(alone / "busy", two / name)


class Peers(Processes):
    """Two processes, of which the other one has got a signal when they agree for the third time."""

    def agree(self, *values):
        self.asked.append(values)
        return max(values[0], signal.SIGTERM if len(self.asked) == 3 else 0), *values[1:]


@pytest.mark.parametrize(("step_s", "expected"), [(0.01, [1, 11, 21]), (0.2, [1, 3, 5]), (2.0, [1, 2, 3])])
def test_processes_agree_now_and_then_and_not_after_each_step(monkeypatch, step_s, expected):
    clock, asked, times = [0.0], [], []
    monkeypatch.setattr(distributed.time, "perf_counter", lambda: clock[0])
    peers = Peers(0, 2)
    object.__setattr__(peers, "asked", asked)
    agreement = Agreement(peers)
    for step in range(1, 40):
        clock[0] += step_s
        signum, is_due = agreement(None, due=True)
        assert is_due == (len(asked) > len(times))
        if is_due:
            times.append(step)
        if signum:
            break
    assert times == expected
    assert signum == signal.SIGTERM
    assert Agreement(Processes())(signal.SIGINT, True) == (signal.SIGINT, True)


@pytest.mark.parametrize(("size", "name"), [(2, "two"), (4, "four"), (2, "divided-later"), (2, "whole-later")])
def test_a_divided_checkpoint_goes_on_in_any_number_of_processes(alone, together, size, name) -> None:
    check_same(alone / "busy", together(size) / name)
    if name == "two":  # the same number of processes: the same bits
        weights = [(together(2) / folder / "model.safetensors").read_bytes() for folder in (name, "sharded-busy")]
        assert weights[0] == weights[1]
    assert not list((together(size) / name).glob("checkpoint*"))


def test_errors_are_those_of_all(together) -> None:
    two = together(2)
    first, second = (json.loads((two / f"errors{rank}.json").read_text()) for rank in range(2))
    assert "41 images cannot be divided evenly among 2" in first[0][1]
    assert not list(two.glob("odd*"))  # refused before anything is written
    assert first[1] == ["UserError", "the disk is full"]
    assert second[1] == [PeerEnded.__name__, "the disk is full"]
    assert "No checkpoint in" in first[2][1]
    assert second[2] == [PeerEnded.__name__, first[2][1]]


def test_sharding_needs_several_processes(tmp_path) -> None:
    with pytest.raises(UserError, match="shard divides a model among several processes"):
        trial(tmp_path / "trial", "sgd", shard=True)


KINDS = {"busy": {}, "sharded-busy": {"shard": True}}


def work_that_is_killed(rank: int, store: str, out: Path, killed: bool, how: dict) -> None:
    """The second of two processes is killed in the middle of a step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    loss, calls = Classification.loss, []

    def second_part_of_a_step(*args):
        calls.append(1)
        if len(calls) == 2 * STOP:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(*args)

    if rank == 1 and killed:
        Classification.loss = second_part_of_a_step
    try:
        trial(out, "busy", Processes(rank, 2, rank), checkpoint_every_steps=2, **how)
    except PeerEnded as error:
        (out / "ended").write_text(str(error))
        os._exit(3)
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["busy", pytest.param("sharded-busy", marks=pytest.mark.long)])
def test_a_killed_process_ends_all_and_the_same_command_goes_on(together, tmp_path, kind) -> None:
    out = tmp_path / "trial"
    for killed, codes in ((True, [3, -signal.SIGKILL]), (False, [0, 0])):
        arguments = [(rank, str(tmp_path / f"store-{killed}"), out, killed, KINDS[kind]) for rank in range(2)]
        started = [mp.get_context("fork").Process(target=work_that_is_killed, args=given) for given in arguments]
        for process in started:
            process.start()
        for process in started:
            process.join(300)
        assert [process.exitcode for process in started] == codes
        assert "has ended without a message" in (out / "ended").read_text()
        assert (out / "result.json").exists() is not killed
    check_same(together(2) / kind, out)
    resumed, unbroken = ((path / "model.safetensors").read_bytes() for path in (out, together(2) / kind))
    assert resumed == unbroken


KILLER = """
import os, signal
from vitmods.train import TrialRun
step = TrialRun._train_step
def dies(run, batch):
    if run.step == 2 and os.environ["RANK"] == os.environ.get("DIES"):
        os.kill(os.getpid(), signal.SIGKILL)
    step(run, batch)
TrialRun._train_step = dies
"""


@pytest.mark.slow
def test_the_command_starts_its_processes_and_goes_on_after_a_kill(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    step = TrialRun._train_step  # which the plugin replaces here too
    (tmp_path / "killer.py").write_text(KILLER)
    command = ["train", "--base", "mu1/2", "--epochs", "1", "--limit-train", "160", "--batch-size", "40"]
    command += ["--checkpoint-minutes", "0", "--device", "cpu", "--out", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr(TrialRun, "_train_step", step)
        patch.setattr("vitmods.util.registry.asked_for", [])  # what other tests have asked for
        patch.setenv("DIES", "1")
        two = [*command, "--devices", "2", "--plugin", str(tmp_path / "killer.py")]
        assert cli.main(two) == 128 + signal.SIGKILL
    error = capfd.readouterr().err
    assert error.count("Process 1 of 2 was killed by SIGKILL") == 1
    assert "without a message" not in error
    assert "Traceback" not in error
    assert (tmp_path / "run/checkpoint.pt").exists()  # of which step depends on the speed of the disk
    monkeypatch.setattr("vitmods.util.registry.asked_for", [])
    assert json.loads((tmp_path / "run/config.json").read_text())["environment"]["processes"] == 2
    assert cli.main(command) == 0  # in this process alone
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "finished"


def test_training_and_its_dry_run_refuse_the_same_before_anything_is_started(refused, said, tmp_path, monkeypatch):
    monkeypatch.setattr("vitmods.train.launch.launch", lambda *arguments: pytest.fail("was started"))
    command = f"train --base mu2/2 --limit-train 160 --batch-size 40 --device cpu --out {tmp_path}/out --devices"
    for more in ("", " --dry-run"):
        assert "drop --shard or --compile" in refused(f"{command} 2 --shard --compile{more}")
        assert "40 images cannot be divided evenly among 3" in refused(f"{command} 3{more}")
    without_out = command.replace(f" --out {tmp_path}/out", "")
    assert said(f"{without_out} 2 --shard --dry-run").out.startswith("2 devices train 20 images each in a step.")
    assert not (tmp_path / "out").exists()
