"""What every change owes, for every registered change and variant (see conftest)."""

import copy
import dataclasses
import pickle
import shutil
from fnmatch import fnmatch

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import vitmods as vm
from vitmods.changes import REGISTRY
from vitmods.changes.compose import edit
from vitmods.fast import Forms
from vitmods.model.branch_names import sequential_name

PRESERVES = ("function", "weights", "nothing")


def leaves(model):
    own = [(name, p.shape) for name, p in model.named_parameters(recurse=False)]
    return own + [(name, repr(m)) for name, m in model.named_modules() if not list(m.children())]


def gradients(model, images):
    model.zero_grad()
    torch.manual_seed(2)
    out = model(images)
    out.float().square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


def test_every_registered_change_is_tried(all_changes):
    assert {type(change) for change in all_changes} == set(REGISTRY.values())
    assert len(all_changes) > 2 * len(REGISTRY)


def test_it_alters_graph_outputs_and_weights_as_declared(base, change, changed, images):
    assert leaves(changed) != leaves(base) or change.acts_in == "training"
    assert changed.vit_config != base.vit_config
    assert changed.changes == (change,)
    with torch.no_grad():
        old, new = base.eval()(images), changed.eval()(images)
    moved = float((old - new).abs().max() / old.abs().max())
    assert change.preserves in PRESERVES
    if change.preserves == "function":
        assert moved <= 1e-5
    else:
        assert moved > 1e-4
    weights = changed.state_dict()
    dropped = change.drops(base.vit_config, changed.vit_config)
    for name, value in base.state_dict().items():
        if any(fnmatch(name, pattern) for pattern in dropped):
            continue  # the change says that its slot is gone
        if change.preserves != "weights":
            assert name in weights
        else:
            assert any(value.shape == other.shape and torch.equal(value, other) for other in weights.values()), name
    if change.acts_in == "training":
        assert change.preserves == "function"
        assert weights.keys() == base.state_dict().keys()
        assert all(torch.equal(value, base.state_dict()[name]) for name, value in weights.items())
        old, new, again = (gradients(model.train(), images)[0] for model in (base, changed, changed))
        assert float((old - new).abs().max()) > 1e-4  # it differs in training,
        assert torch.equal(new, again)  # by PyTorch's own random numbers


def test_it_leaves_the_old_model_alone(base, change):
    before = {name: value.clone() for name, value in base.state_dict().items()}
    config, graph = base.vit_config, leaves(base)
    new = vm.apply(base, change)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())
    assert (base.vit_config, leaves(base), base.changes) == (config, graph, ())


def assert_compiles(model, images, backend):
    torch._dynamo.reset()  # the recompile limit counts over all models of this process
    expected = gradients(copy.deepcopy(model), images)  # a copy, since training moves what some norms keep
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for a, b in zip(gradients(compiled, images), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    torch._dynamo.reset()


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
    assert_compiles(shallow, images, "eager")


def test_one_change_of_each_kind_compiles_together(base, images):
    """Forward and backward graphs; the variants' own graphs are seen above."""
    together = vm.parse_changes("dpn+rms+placement(attn=pre+post,mlp=pre+post)+layerscale")
    model = vm.apply(vm.vit(base.vit_config, depth=1), *together)
    model.forms = Forms(recompute=True)
    assert_compiles(model, images, "aot_eager")


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")
def test_inductor(base, images):
    model = vm.apply(vm.vit(base.vit_config, depth=1), *vm.parse_changes("dpn+rms+normformer")).eval()
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)
        torch.testing.assert_close(compiled(images), model(images), atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()


def test_it_exports(shallow, images):
    shallow.eval()
    with torch.no_grad():
        program = torch.export.export(shallow, (images,))
        torch.testing.assert_close(program.module()(images), shallow(images), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")
def test_it_traces(shallow, images):
    """In training too, where TensorBoard's add_graph meets a fresh model."""
    torch.jit.trace(copy.deepcopy(shallow).train(), images, check_trace=False)
    traced, other = torch.jit.trace(shallow.eval(), images, check_trace=False), images.flip(0) + 0.1
    torch.testing.assert_close(traced(other), shallow(other), atol=1e-5, rtol=1e-5)


def test_second_derivatives(shallow, images):
    """Those that autograd and torch.func give are the differences of gradients."""
    model, x, step = shallow.double().eval(), images.double(), 1e-7
    if model.reg_token is not None:  # near 0 a norm is too steep for differences
        torch.nn.init.normal_(model.reg_token)
    names = [name for name, _ in model.named_parameters()]
    values = (x, *(p.detach() for p in model.parameters()))
    generator = torch.Generator().manual_seed(2)
    along = tuple(torch.randn(v.shape, dtype=v.dtype, generator=generator) * 0.1 for v in values)

    def loss(x, *parameters):
        y = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (x,))
        return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()

    def gradient(sign):
        inputs = [(v + sign * step * d).requires_grad_() for v, d in zip(values, along, strict=True)]
        return torch.autograd.grad(loss(*inputs), inputs)

    with sdpa_kernel(SDPBackend.MATH):
        expected = [(a - b) / (2 * step) for a, b in zip(gradient(1), gradient(-1), strict=True)]
        by_autograd = torch.autograd.functional.hvp(loss, values, along)[1]
        by_func = torch.func.jvp(torch.func.grad(loss, tuple(range(len(values)))), values, along)[1]
    for a, b, c in zip(by_autograd, by_func, expected, strict=True):
        torch.testing.assert_close(a, c, atol=2e-5 * max(1.0, float(c.abs().max())), rtol=0)
        torch.testing.assert_close(b, a, atol=1e-9 * max(1.0, float(a.abs().max())), rtol=0)


def test_every_parameter_gets_a_gradient_near_that_of_autocast_and_weights_may_be_bfloat16(
    base, change, changed, images
):
    exact = gradients(changed, images)
    assert all(gradient.isfinite().all() for gradient in exact)
    silent = {name for name, p in changed.named_parameters() if not p.grad.any()}
    assert not {name for name in silent if "gamma" not in name}
    with torch.autocast("cpu", torch.bfloat16):
        rough = gradients(changed, images)
    assert rough[0].dtype == torch.bfloat16
    scale = float(exact[0].abs().max())
    assert float((rough[0].float() - exact[0]).abs().max()) < 0.05 * scale + 0.01
    assert all(g.isfinite().all() and g.dtype == torch.float32 for g in rough[1:])
    new = vm.apply(base.bfloat16(), change)
    assert {p.dtype for p in new.parameters()} == {torch.bfloat16}
    assert new(images.bfloat16()).dtype == torch.bfloat16


def test_gradient_checkpointing_changes_nothing(changed, images):
    other = copy.deepcopy(changed)
    other.set_grad_checkpointing()
    plain, again = gradients(changed, images), gradients(other, images)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    for (name, a), b in zip(changed.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b), name


def test_pickle_deepcopy_and_state_dict(changed, images):
    fresh = vm.ViT(changed.vit_config)
    fresh.load_state_dict(changed.state_dict())
    expected = changed.eval()(images)
    unpickled = pickle.loads(pickle.dumps(changed))
    for other in (unpickled, copy.deepcopy(changed), fresh):
        assert torch.equal(other.eval()(images), expected)
    assert unpickled.changes == changed.changes
    assert vm.ViTConfig.from_json(changed.vit_config.to_json()) == changed.vit_config


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


def test_it_is_a_value_whose_shell_form_round_trips(change, base):
    assert vm.parse_changes(str(change)) == (change,)
    spaced = str(change).replace("(", " ( ").replace(",", " , ").replace("=", " = ")
    assert vm.parse_changes(f"  {spaced}  ") == (change,)
    assert pickle.loads(pickle.dumps(change)) == change
    assert hash(copy.deepcopy(change)) == hash(change)
    with pytest.raises(dataclasses.FrozenInstanceError):
        change.whatever = 1
    assert change.edit(base.vit_config) == change.edit(base.vit_config)
    assert change.fills


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


@pytest.mark.parametrize("kind", REGISTRY.values(), ids=lambda kind: kind.name)
def test_documentation_is_filled_in(kind):
    for field in ("name", "title", "paper", "url", "summary", "cost", "published"):
        assert getattr(kind, field).strip() == getattr(kind, field) != "", field
    assert kind.url.startswith("https://")
    assert kind.summary.endswith(".")
    assert kind.__doc__ is not None
    assert not kind.__doc__.startswith(f"{kind.__name__}(")  # dataclass's own
    assert REGISTRY[kind.name] is kind
    for name in (kind.name, *kind.short_forms):  # the shell can write it
        assert name == name.lower()
        assert name.replace("_", "").replace("-", "").isalnum()
