"""Which GPU a process uses, in which precision, and what is said of one that cannot be used."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

import vitmods as vm
from vitmods.recipes import Recipe
from vitmods.study.executors import StudyOptions
from vitmods.study.executors.processes import LocalProcesses, free_memory
from vitmods.study.prepare import check_devices, parallel_trials, workers_for
from vitmods.study.store import StudyFolder
from vitmods.tasks import Classification
from vitmods.train import RunOptions, distributed, train_trial
from vitmods.train.device import place, resolve, usable
from vitmods.util.errors import UserError

pretend = sys.modules["pretend"]  # by conftest.py
TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040)."


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """driver(answer, code): a program nvidia-smi that prints this."""
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(answer, code=0):
        program = tmp_path / "bin/nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\necho '{answer}'\nexit {code}\n")
        program.chmod(0o755)

    return install


@pytest.mark.parametrize("asked", [{}, {"workers": 4}, {"devices_per_trial": "1/2"}])
def test_a_study_measures_how_many_trials_share_its_gpus_unless_told(driver, monkeypatch, tmp_path, asked):
    executors = []
    monkeypatch.setattr(LocalProcesses, "run", lambda executor, _: executors.append(executor))
    driver("60000, Default")
    with pretend.gpu(gpus=2):
        monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
        study = vm.Study("mu1/2", ["rms"], "digits", vm.recipes.digits(), limit_train=64, seeds=8)
        study.run(tmp_path / "out", device="cuda", cost_seconds=0, progress=False, **asked)
    (executor,) = executors
    assert executor.workers == (4 if asked else 8)
    if asked:
        assert executor.sharing is None
    else:
        assert (executor.sharing.gpus, executor.sharing.most, executor.sharing.limit) == (2, 4, 2)


def refuse(words):
    raise RuntimeError(words)


@pytest.mark.parametrize("reason", [TOO_OLD, "Torch not compiled with CUDA enabled"])
def test_a_gpu_that_pytorch_cannot_use_is_an_error_before_anything_is_read(
    driver, tmp_path, monkeypatch, refused, reason
):
    driver("GPU 0: NVIDIA A100 (UUID: GPU-1)")
    monkeypatch.setattr(torch.cuda, "init", lambda: refuse(reason))
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=False: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitmods.data.loading.load", lambda *a, **k: pytest.fail("images were read"))
        for command in ("compare --arms rms", "train", "compare --arms rms --dry-run"):
            message = refused(command, "--data", "torchvision:CIFAR10?root=x&download=1", "--out", tmp_path / "out")
            assert reason.rstrip(".") in message
            assert "--device cpu" in message
    assert not (tmp_path / "out").exists()
    assert resolve("cpu").type == "cpu"
    with pytest.raises(
        UserError, match=r"device 'cuda:0' is not available: PyTorch cannot use the GPU .*" + reason[:9]
    ):
        usable("cuda")


HIDDEN = [("GPU 0: A100", 0, ""), ("GPU 0: A100", 0, "-1"), ("No devices were found", 0, None), ("GPU 0", 9, None)]


@pytest.mark.parametrize(("answer", "code", "visible"), HIDDEN)
def test_a_gpu_that_is_hidden_or_not_there_is_none(driver, monkeypatch, answer, code, visible):
    driver(answer, code)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=False: None)
    monkeypatch.setattr(torch.cuda, "init", lambda: refuse(TOO_OLD))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert resolve("auto") == torch.device("cpu")


def test_bfloat16_needs_a_gpu_that_computes_in_it(tmp_path):
    model = vm.vit("mu1/4", img_size=8, in_chans=1, num_classes=10)
    recipe = Recipe().with_(precision="bf16-mixed", steps=1)
    images = vm.data.load("digits", img_size=(8, 8), in_chans=1, augment=recipe.augment, limit_train=64)
    study = vm.Study("mu1/4", ["rms"], recipe=recipe, seeds=1, img_size=8, in_chans=1)
    with pretend.gpu(capability=(7, 5)):
        message = "NVIDIA Pretend only emulates bfloat16, slowly: use --precision fp16-mixed"
        with pytest.raises(UserError, match=message):
            train_trial(model, Classification(), images, recipe, out=tmp_path / "trial")
        with pytest.raises(UserError, match=message):
            study.run(tmp_path / "study")
        assert not list(tmp_path.iterdir())
        assert place("auto", "fp16-mixed").scaler().is_enabled()
    with pretend.gpu(capability=(8, 0)):
        assert place("cuda", "bf16-mixed").device == pretend.CUDA
    assert place("cpu", "bf16-mixed").device.type == "cpu"


@pytest.mark.parametrize(
    ("gpus", "local_rank", "expected"), [(1, 0, 0), (1, 3, 0), (4, 3, 3), (2, 3, "'cuda:3' is not available: .* has 2")]
)
def test_a_process_uses_the_gpu_of_its_number_or_the_only_one_that_it_sees(gpus, local_rank, expected):
    with pretend.gpu(gpus=gpus):
        if isinstance(expected, str):
            with pytest.raises(UserError, match=expected):
                place("cuda", local_rank=local_rank)
        else:
            assert place("cuda", local_rank=local_rank).device == torch.device("cuda", expected)


def joining(monkeypatch, rank, others):
    """Join as one of two processes; gives the calls that set the GPU up, and the result."""
    calls, store = [], {f"vitmods/{other}": uuid.encode() for other, uuid in others.items()}
    environment = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "x", "MASTER_PORT": 1}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    stored = SimpleNamespace(set=lambda key, value: store.update({key: value.encode()}), get=store.__getitem__)
    monkeypatch.setattr(distributed, "rendezvous", lambda *_, **__: iter([(stored, rank, 2)]))
    monkeypatch.setattr(distributed.socket, "gethostname", lambda: "node")
    monkeypatch.setattr(distributed.atexit, "register", lambda _: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", device)))
    monkeypatch.setattr(
        distributed.dist, "init_process_group", lambda *a, **k: calls.append((a[0], k.get("device_id")))
    )
    monkeypatch.setattr(distributed.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(distributed.dist, "get_world_size", lambda: 2)
    return calls


def test_the_gpu_is_set_before_processes_are_joined(monkeypatch):
    with pretend.gpu(gpus=2):
        calls = joining(monkeypatch, 1, {0: "node other"})
        assert distributed.join("auto") == distributed.Processes(1, 2, 1)
    second = torch.device("cuda", 1)
    assert calls == [("set_device", second), ("cpu:gloo,cuda:nccl", second)]


def test_one_visible_gpu_for_each_process_and_not_one_for_all(monkeypatch):
    with pretend.gpu(gpus=1):
        calls = joining(monkeypatch, 1, {0: "node other"})  # as a task of Slurm sees it
        assert distributed.join("cuda").local_rank == 1
        assert calls[-1] == ("cpu:gloo,cuda:nccl", pretend.CUDA)
        calls = joining(monkeypatch, 1, {0: "node pretend"})
        with pytest.raises(UserError, match=r"2 processes have 1 GPUs: .*--gpus-per-task=1"):
            distributed.join("cuda")
        assert len(calls) == 1
        calls = joining(monkeypatch, 1, {})
        distributed.join("cpu")
        assert calls == [("gloo", None)]


def test_the_process_that_starts_workers_leaves_the_gpus_alone(driver, monkeypatch):
    with pretend.gpu(gpus=2):
        for name in ("mem_get_info", "set_device"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("a context is made"))
        monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
        driver("30000, Default")
        assert free_memory(1) == 30000 << 20
        RunOptions("cuda:1").check_here(["bf16-mixed"])
        assert workers_for(StudyOptions(device="cuda"), 100, 5000 << 20) == 6
        driver("30000, Exclusive_Process")
        assert workers_for(StudyOptions(device="cuda"), 100, 5000 << 20) == 2
    with pretend.gpu(gpus=8):
        driver("30000, Default")
        on_two, shared = StudyOptions("cuda", devices_per_trial=2), StudyOptions("cuda", devices_per_trial="1/3")
        assert workers_for(on_two, 100, 40000 << 20) == parallel_trials(on_two) == 4
        assert workers_for(on_two, 100, 1) == 4, "pairs are not shared"
        assert workers_for(shared, 100, 1) == 24
        settings = vm.Study("mu1/2", ["rms"], seeds=1).settings
        processes = LocalProcesses(StudyFolder("somewhere"), 4, 1, on_two, team=2)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        gpus = [processes.environment(number)["CUDA_VISIBLE_DEVICES"] for number in range(8)]
        assert gpus == [str(number) for number in range(8)]
        check_devices(settings, on_two)
        for options, message in (
            ({"devices_per_trial": 16}, "16 devices per trial are more than the 8 GPUs"),
            ({"devices_per_trial": 2, "device": "cuda:1"}, "2 devices per trial are more than the 1 GPU"),
            (
                {"devices_per_trial": 2, "workers": 5},
                "8 GPUs are enough for 4 trials at a time, each on 2: --workers 4",
            ),
        ):
            with pytest.raises(UserError, match=message):
                check_devices(settings, StudyOptions(**{"device": "cuda", **options}))
    with pretend.gpu(gpus=2, memory=7 << 30):
        driver("", 9)
        assert free_memory(1) == 7 << 30
