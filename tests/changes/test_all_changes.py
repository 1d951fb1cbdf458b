"""What every change owes, for every registered change and variant (see conftest)."""

import shutil

import pytest
import torch

import vitmods as vm
from vitmods import testing
from vitmods.changes import REGISTRY
from vitmods.changes.compose import edit
from vitmods.fast import Forms
from vitmods.model.branch_names import sequential_name


def test_every_registered_change_is_tried(all_changes):
    assert {type(change) for change in all_changes} == set(REGISTRY.values())
    assert len(all_changes) > 2 * len(REGISTRY)


def test_it_keeps_its_promises(promise, case):
    testing.CHANGE_CHECKS[promise](case)


@pytest.fixture
def shallow(base, together, monkeypatch):
    """One block is enough to compile, at half the time, unless a change tells first blocks from last ones or makes one
    of two; a transformer within patches has one, too."""
    monkeypatch.setattr("vitmods.layers.stems.local.LOCAL_DEPTH", 1)
    edited = edit(base.vit_config, together)
    depth = 1 if edited.prefix_from == 0 and edited.parallel == 1 and not edited.value_mix else 2
    model = vm.apply(vm.vit(base.vit_config, depth=depth), *together)
    for name, parameter in model.named_parameters():
        if name.endswith(".gamma"):  # factors near 0 would hide what the branches do
            torch.nn.init.ones_(parameter)
    return model


def test_every_change_is_in_a_graph(all_changes, all_together):
    assert sorted(str(change) for changes in all_together for change in changes) == sorted(map(str, all_changes))
    assert len(all_together) < len(all_changes) / 3


def test_it_is_one_graph(shallow, images):
    testing.compiles(shallow, images)


def test_one_change_of_each_kind_compiles_together(base, images):
    """Forward and backward graphs; the variants' own graphs are seen above."""
    together = vm.parse_changes("dpn+rms+placement(attn=pre+post,mlp=pre+post)+layerscale")
    model = vm.apply(vm.vit(base.vit_config, depth=1), *together)
    model.forms = Forms(recompute=True)
    testing.compiles(model, images, "aot_eager")


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")
def test_inductor(base, images):
    """Of a stem and a block: each of their kernels takes a compiler two seconds."""
    model = vm.apply(vm.vit(base.vit_config, depth=1), *vm.parse_changes("dpn+rms+normformer"))
    parts = torch.nn.Sequential(model.patch_embed, model.blocks[0]).eval()
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(parts, fullgraph=True)
        torch.testing.assert_close(compiled(images), parts(images), atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()


def test_it_exports(shallow, images):
    testing.exports(shallow, images)


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")
def test_it_traces(shallow, images):
    testing.traces(shallow, images)


def test_second_derivatives(shallow, images):
    testing.differentiates_twice(shallow, images)


def test_training_mode_device_and_frozen_parameters_are_those_of_the_model(base, change):
    base.head.requires_grad_(False)
    base.blocks[0].attn.requires_grad_(False)
    base.set_grad_checkpointing()
    new = vm.apply(base.eval().double(), change)
    assert not new.training
    assert new.grad_checkpointing
    assert {p.dtype for p in new.parameters()} == {torch.float64}
    frozen = {
        sequential_name(name, new.vit_config.parallel) for name, p in new.named_parameters() if not p.requires_grad
    }
    kept = {sequential_name(name, new.vit_config.parallel) for name, _ in new.named_parameters()}
    assert frozen == {name for name, p in base.named_parameters() if not p.requires_grad} & kept


def test_diff_and_documentation(base, change, changed):
    difference = vm.diff(base, changed)
    record = difference.to_dict()
    assert record["params"] == [sum(p.numel() for p in m.parameters()) for m in (base, changed)]
    assert record["preserves"] == change.preserves
    assert record["changes"] == [str(change)]
    assert record["papers"] == [change.describe()["paper"]]
    assert record["added"] or record["removed"] or record["changed"]
    for text in (str(change), change.describe()["paper"], "parameters"):
        assert text in str(difference)
