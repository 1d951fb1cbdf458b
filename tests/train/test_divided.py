"""A model that several processes divide, and what they refuse."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

import vitmods as vm
from vitmods import data
from vitmods.cli import main
from vitmods.recipes import Recipe
from vitmods.tasks import Classification
from vitmods.train import Processes, RunOptions, train_trial

DIVIDED = Recipe().with_(epochs=1, batch_size=40, crop="none", eval_crop=1.0, ema=0.9, precision="bf16-mixed", lr=2e-3)


def train(out, processes, shard):
    images = data.load("digits", img_size=(8, 8), in_chans=1, augment=DIVIDED.augment, limit_train=80)
    torch.manual_seed(7)
    model = vm.vit("mu2/2", img_size=8, in_chans=1, num_classes=10)
    options = RunOptions("cpu", tensorboard=False, progress=False, shard=shard)
    task = Classification.from_recipe(DIVIDED)
    train_trial(model, task, images, DIVIDED, out=out, options=options, processes=processes)


def work(rank, store, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    train(folder / "divided", Processes(rank, 2, rank), shard=True)
    dist.destroy_process_group()


@pytest.mark.forks
def test_a_model_divided_in_bfloat16_is_a_whole_one(tmp_path):
    mp.start_processes(work, (str(tmp_path / "store"), tmp_path), nprocs=2, start_method="fork")
    train(tmp_path / "whole", Processes(), shard=False)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("divided", "whole"))
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], atol=5e-3, rtol=5e-3, msg=name)


@pytest.mark.parametrize("more", [["--dry-run"], []])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "2", "--shard", "--compile"], "drop --shard or --compile"),
        (["--devices", "3"], "40 images cannot be divided evenly among 3"),
    ],
)
def test_training_and_its_dry_run_refuse_the_same_before_anything_is_started(
    options, message, more, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr("vitmods.train.launch.launch", lambda *arguments: pytest.fail("was started"))
    out = tmp_path / "out"
    given = ["--base", "mu2/2", "--limit-train", "160", "--batch-size", "40", "--device", "cpu", "--out", str(out)]
    assert main(["train", *given, *options, *more]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


def test_a_dry_run_of_several_devices_says_what_each_trains(capsys):
    given = ["train", "--base", "mu2/2", "--limit-train", "160", "--batch-size", "40", "--device", "cpu", "--shard"]
    assert main([*given, "--dry-run", "--devices", "2"]) == 0
    assert capsys.readouterr().out.startswith("2 devices train 20 images each in a step.")
