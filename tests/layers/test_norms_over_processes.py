"""Statistics of the batch over two processes: as one process on the whole batch, in outputs, gradients and state."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from vitmods.layers.norms import BatchNorm, PowerNorm, SwitchableNorm

pytestmark = pytest.mark.forks

NORMS = {"batch": BatchNorm, "power": PowerNorm, "switchable": SwitchableNorm}
STEPS = 2


def train(norm, batches):
    """Outputs and input gradients of each step, then the parameters' gradients and the state."""
    results = []
    for batch in batches:
        x = batch.clone().requires_grad_()
        y = norm(x)
        (y * torch.linspace(-1, 1, y.shape[-1], dtype=y.dtype) + y.pow(3)).sum().backward()
        results += [y.detach(), x.grad]
    return results, [p.grad for p in norm.parameters()], list(norm.buffers())


def work(rank, address, folder):
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    batches = torch.load(os.path.join(folder, "batches.pt"))
    for name, kind in NORMS.items():
        local = [batch[4 * rank : 4 * rank + 4] for batch in batches]
        torch.save(train(kind(6).double(), local), os.path.join(folder, f"{name}{rank}.pt"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("processes")
    torch.manual_seed(0)
    torch.save([torch.randn(8, 5, 6, dtype=torch.float64) * 2 + 1 for _ in range(STEPS)], path / "batches.pt")
    mp.start_processes(work, (f"file://{path}/store", str(path)), nprocs=2, start_method="fork")
    return path


@pytest.mark.parametrize("name", NORMS)
def test_two_processes_are_one(folder, name):
    together, parameters, state = train(NORMS[name](6).double(), torch.load(folder / "batches.pt"))
    parts = [torch.load(folder / f"{name}{rank}.pt") for rank in range(2)]
    for i, expected in enumerate(together):
        torch.testing.assert_close(torch.cat([part[0][i] for part in parts]), expected, atol=1e-9, rtol=1e-9)
    for i, expected in enumerate(parameters):
        torch.testing.assert_close(sum(part[1][i] for part in parts), expected, atol=1e-9, rtol=1e-9)
    for i, expected in enumerate(state):
        for part in parts:
            torch.testing.assert_close(part[2][i], expected, atol=1e-9, rtol=1e-9)
