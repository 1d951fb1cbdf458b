"""A GPU that is not there: tensors without numbers that say they are on one, with its rules and its autocast."""

from contextlib import nullcontext
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

CUDA = torch.device("cuda", 0)
HALF = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class FakeCuda(FakeTensorMode):
    """What derivatives in C++ make on the device of a tensor is made on the fake GPU, since they were told "cpu"."""

    def dispatch(self, func, types, args=(), kwargs=MappingProxyType({})):
        if torch._C._current_graph_task_id() != -1 and str(kwargs.get("device")) == "cpu":
            kwargs = {**kwargs, "device": CUDA}
        return super().dispatch(func, types, args, kwargs)


@pytest.fixture
def fake_cuda(monkeypatch):
    """FakeTensorMode whose tensors may be on "cuda" where there is no GPU, backward included.

    Operations check devices and types, and reading a number (`.item()`, `if tensor:`) raises. The engine of autograd
    asks the driver for streams of the device that a tensor names: in C++ it gets the answer "cpu", in Python "cuda:0".
    """
    asked = torch.ops.prim.device.default
    dispatch = FakeTensor.__dict__["__torch_dispatch__"].__func__

    def answer(args):
        return torch.device("meta" if args[0].fake_mode.in_kernel_invocation else "cpu")

    def dispatched(cls, func, types, args=(), kwargs=MappingProxyType({})):
        return answer(args) if func is asked else dispatch(cls, func, types, args, kwargs)

    monkeypatch.setattr(FakeTensor, "__torch_dispatch__", classmethod(dispatched))
    monkeypatch.setitem(fake_tensor._DISPATCH_META_HANDLERS, asked, answer)
    monkeypatch.setattr("torch.amp.autocast_mode.torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: True)
    # `to` visits a module that several blocks share once per block, and a fake tensor cannot be swapped again.
    swap, fake = torch.utils.swap_tensors, FakeTensor
    monkeypatch.setattr("torch.utils.swap_tensors", lambda a, b: None if type(a) is type(b) is fake else swap(a, b))
    return FakeCuda(allow_non_fake_inputs=True)


class FakePlacement:
    """Where the loop computes."""

    device = CUDA

    def __init__(self, precision):
        self.precision = precision

    def autocast(self):
        dtype = HALF[self.precision]
        return nullcontext() if dtype is None else torch.autocast("cuda", dtype)


@pytest.fixture
def run_on_fake(fake_cuda, monkeypatch, tmp_path):
    """A trial's own steps on the fake GPU, in each precision: gives the run, after so many steps in each."""
    from vitmods.train import RunOptions, TrialRun

    def run(model, task, recipe, batch, precisions=tuple(HALF), **how):
        monkeypatch.setattr("vitmods.train.loop.place", lambda *_: FakePlacement("32-true"))
        images = SimpleNamespace(
            eval_split="val", val_split="val", splits={"train": range(64)}, steps_per_epoch=lambda _: 9
        )
        options = RunOptions("cuda:0", tensorboard=False, progress=False, **how)
        with fake_cuda:
            trial = TrialRun(model, task, images, recipe, folder=tmp_path, options=options)
            trial.metrics.close()
            for precision in precisions:
                trial.placement.precision = precision
                trial._train_step(batch)
            parameters = list(trial.model.parameters())
            assert all(type(p) is FakeTensor and p.device == CUDA for p in parameters)
            assert all(p.grad is not None for p in parameters if p.requires_grad)
            assert len(trial._window._steps) == len(precisions)
        return trial

    return run
