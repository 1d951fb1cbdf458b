"""Ways of running a trial that change its speed: torch.compile and TF32, each recorded with the result."""

from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from filelock import FileLock
from numpy.random import mtrand
from safetensors.torch import load_file
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from vitmods.train import RunOptions
from vitmods.train.device import check_tf32, remove_unfinished_graphs, tf32_products, usual_workers
from vitmods.util.errors import UserError

HOW = {"recompute": False, "checkpointing": False, "tf32": False, "compile": False}


@pytest.fixture(scope="module")
def plain(bench, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    bench.train(folder, recipe=bench.recipe(ema=0.9))
    return folder


def test_a_compiled_trial_is_the_plain_one_and_goes_on_with_it(bench, plain, tmp_path, monkeypatch):
    """Stopped after some steps by torch.compile and gone on without, to the same weights up to rounding."""
    compiled, compile = [], torch.nn.Module.compile

    def counted(module):  # without inductor, whose C++ takes minutes to compile
        compiled.append(type(module).__name__)
        compile(module, backend="aot_eager")

    monkeypatch.setattr(torch.nn.Module, "compile", counted)
    recipe = bench.recipe(ema=0.9)
    bench.stop(monkeypatch, tmp_path, 6, recipe=recipe, compile=True)
    assert compiled == ["StepLoss"]
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert not [name for name in state["model"] if "_orig_mod" in name]
    with pytest.warns(UserWarning, match="compile was True, now False"):
        result = bench.train(tmp_path, recipe=recipe)
    assert result["how"] == {**HOW, "device": "cpu", "precision": "32-true", "processes": 1, "shard": False}
    rows, expected = bench.rows(tmp_path), bench.rows(plain)
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], abs=2e-4)
    own_weights, expected_weights = (load_file(folder / "model.safetensors") for folder in (tmp_path, plain))
    assert own_weights.keys() == expected_weights.keys()
    for name, value in own_weights.items():
        torch.testing.assert_close(value, expected_weights[name], atol=2e-3, rtol=1e-3, msg=name)


@pytest.mark.parametrize("user", ["a/name", KeyError("getpwuid(): uid not found: 1234")])
def test_the_compilers_cache_is_the_one_of_torch_for_every_user_name(tmp_path, monkeypatch, user):
    """Also for one with a slash, and for a container whose user has none."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # to be put back
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("getpass.getuser", Mock(side_effect=[user] * 9))
    library = Path(default_cache_dir()) / "ab" / "cut.so"
    library.parent.mkdir(parents=True)
    library.touch()
    with pytest.warns(UserWarning, match=f"left 1 unfinished file in {tmp_path}/torchinductor_"):
        remove_unfinished_graphs()
    assert not library.exists()


def test_what_a_killed_compiler_left_unfinished_is_made_again(bench, tmp_path, monkeypatch):
    """Loading it would fail, or end the process. What another process is writing stays, and what is whole."""
    cache, library = tmp_path / "cache", Path(mtrand.__file__).read_bytes()
    sizes = {"whole.so": None, "cut.so": 1000, "cut.main.so": -100, "empty.so": 0, "busy.so": 1000}
    for folder in ("ab", "locks"):
        (cache / folder).mkdir(parents=True)
    for name, size in sizes.items():
        (cache / "ab" / name).write_bytes(library[:size])
    (cache / "ab" / "other.so").write_bytes(b"of another system")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **how: None)
    with FileLock(cache / "locks" / "busy.lock"), pytest.warns(UserWarning, match="left 3 unfinished files in"):
        bench.train(tmp_path / "trial", compile=True)
    assert {path.name for path in (cache / "ab").iterdir()} == {"whole.so", "busy.so", "other.so"}


def test_tf32_needs_a_gpu_that_has_it(bench, tmp_path, monkeypatch):
    for capability in ((7, 5), (8, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        with nullcontext() if capability >= (8, 0) else pytest.raises(UserError, match="not support TF32"):
            check_tf32(torch.device("cuda"))
    for call in (RunOptions(device="cpu", tf32=True).check_here, lambda: bench.train(tmp_path, tf32=True)):
        with pytest.raises(UserError, match="cpu does not support TF32, as NVIDIA GPUs since Ampere do: drop --tf32"):
            call()


def test_tf32_is_on_while_a_trial_runs_and_off_again_after(bench, tmp_path, monkeypatch):
    """By the switch that compiled graphs ask too, which raises where it was mixed with those for single products."""
    before, seen = torch.get_float32_matmul_precision(), []
    monkeypatch.setattr("vitmods.train.loop.check_tf32", lambda device: None)
    step = torch.optim.AdamW.step

    def looks(optimizer, *given):
        seen.append((torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32))
        return step(optimizer, *given)

    monkeypatch.setattr(torch.optim.AdamW, "step", looks)
    bench.train(tmp_path, tf32=True)
    assert set(seen) == {("high", True)}
    assert torch.get_float32_matmul_precision() == before
    with pytest.raises(ZeroDivisionError), tf32_products(True):
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == before


def test_a_gpu_has_threads_that_prepare_images(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert usual_workers("cpu") == 0
    assert usual_workers("cuda") == 8
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert usual_workers("cuda:1") == 3
