"""The native forms of norms and of the Dual PatchNorm stem against the Python forms, and those in float64."""

import copy
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from vitmods.layers import DualPatchNormStem, RMSNorm
from vitmods.layers import recompute as recompute
from vitmods.layers.linear import fold_affine
from vitmods.layers.norms import GroupNorm, InstanceNorm, PowerNorm, SwitchableNorm
from vitmods.ops import native
from vitmods.ops.native import fold, library, moments, patch_norm, rms
from vitmods.ops.native.operators import function

pytestmark = [
    pytest.mark.skipif(library("rms") is None, reason="there is no C++ compiler"),
    pytest.mark.filterwarnings("ignore:.*takes its statistics from"),
]

NORMS = {
    "rms": RMSNorm,
    "rms_plain": partial(RMSNorm, affine=False),
    "instance": InstanceNorm,
    "group": partial(GroupNorm, num_heads=2),
    "switchable": SwitchableNorm,
    "switchable_no_batch": partial(SwitchableNorm, batch=False),
    "power": PowerNorm,
    "power_heads": partial(PowerNorm, num_heads=2),
    "power_running": partial(PowerNorm, num_heads=2, warmup=0),
}
SHAPES = [(1, 2, 4), (3, 5, 6), (2, 131, 70), (9, 65, 192), (2, 300, 128)]  # below and above what a tile and block hold


@pytest.fixture
def python_form(monkeypatch):
    """Switches to the Python form when called."""
    return lambda: monkeypatch.setattr(native, "library", lambda name: None)


@pytest.fixture
def calls(monkeypatch):
    """The names of the C functions that are called."""
    names = []

    def watched(source, name, types):
        names.append(name)
        return function(source, name, types)

    for module in (rms, moments, patch_norm, fold):
        monkeypatch.setattr(module, "function", watched)
    return names


def make(name, dim):
    torch.manual_seed(0)
    norm = NORMS[name](dim)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, mean=0.5)
    for name, state in norm.named_buffers():
        if name != "iters":
            torch.nn.init.uniform_(state, 0.5, 2)
    return norm


def step(norm, x, grad):
    """Output, gradients and state after a training step, in float64, and the output in evaluation."""
    norm = copy.deepcopy(norm).to(x.dtype)
    x = x.clone().requires_grad_()
    y = norm(x)
    y.backward(grad)
    found = [y, x.grad, *(p.grad for p in norm.parameters()), *norm.buffers()]
    z = norm.eval()(x)
    return [t.detach().double() for t in (*found, z, *torch.autograd.grad(z, [x, *norm.parameters()], grad))]


def error(found, exact):
    """The largest difference, relative to the largest number of each tensor."""
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize(("shape", "offset"), [*((shape, 1) for shape in SHAPES), ((9, 65, 64), 1000)], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norms_are_as_exact_as_the_python_form(name, shape, offset, calls, python_form):
    norm, x, grad = make(name, shape[-1]), torch.randn(shape) * 2 + offset, torch.randn(shape)
    native = step(norm, x, grad)
    expected = {"rms_forward", "rms_backward"}
    if not name.startswith(("rms", "power")):
        expected = {"moments", "scale_shift", "scale_shift_sums", "scale_shift_backward"}
    assert expected <= {*calls}
    calls.clear()
    python_form()
    plain, exact = step(norm, x, grad), step(norm, x.double(), grad.double())
    assert not calls
    for a, b, c in zip(native, plain, exact, strict=True):
        assert error([a], [c]) < 1e-5 + 4 * error([b], [c])


@pytest.mark.parametrize("name", NORMS)
def test_any_layout_of_memory_and_any_number_of_threads(name):
    norm, x, grad = make(name, 64), torch.randn(9, 64, 131).mT, torch.randn(64).expand(9, 131, 64)
    expected = step(norm, x.contiguous(), grad.contiguous())
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        found = step(norm, x, grad)
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_padding_of_power_norm(calls):
    norm, x, padding = make("power", 6), torch.randn(3, 5, 6), torch.rand(3, 5) < 0.4
    y, exact = copy.deepcopy(norm)(x, padding), copy.deepcopy(norm).double()(x.double(), padding)
    assert "rms_forward" in calls
    torch.testing.assert_close(y.double(), exact, atol=1e-5, rtol=1e-5)


def test_recompute_forms_use_it(calls):
    norm, linear = make("rms", 16), torch.nn.Linear(16, 8)
    x = torch.randn(2, 5, 16, requires_grad=True)
    y = recompute.norm_linear(x, norm, linear)
    torch.testing.assert_close(y, linear(norm(x)))
    calls.clear()
    y.sum().backward()
    assert calls == ["rms_forward", "rms_backward"]


def stem(**settings):
    torch.manual_seed(0)
    made = DualPatchNormStem(**{"img_size": (8, 12), "patch_size": (4, 2), "in_chans": 2, "embed_dim": 6, **settings})
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


@pytest.mark.parametrize(
    "settings",
    [{}, {"bias": False}, {"img_size": (32, 48), "patch_size": 16, "in_chans": 3, "embed_dim": 70}],
    ids=["small", "no bias", "patch 16"],
)
@pytest.mark.parametrize("offset", [0, 1000])
def test_stem(settings, offset, calls, python_form):
    made = stem(**settings)
    images = torch.randn(3, made.in_chans, *made.img_size) + offset

    def run(dtype):
        twin = copy.deepcopy(made).to(dtype)
        y = twin(images.to(dtype))
        y.sin().sum().backward()
        with torch.no_grad():
            used = twin(images.to(dtype))
        return [t.detach().double() for t in (y, used, *(p.grad for p in twin.parameters()))]

    native = run(torch.float32)
    assert calls == ["patch_norm", "fold", "fold_backward", "patch_norm", "patch_norm"]
    python_form()
    plain, exact = run(torch.float32), run(torch.float64)
    assert len(calls) == 5
    assert error(native, exact) < 1e-5 + 4 * error(plain, exact)


def test_stem_gives_images_their_gradient(calls):
    made = stem()
    images = torch.randn(2, 2, 8, 12, requires_grad=True)
    made(images).square().sum().backward()
    assert "patch_norm" not in calls
    twin = images.detach().double().requires_grad_()
    made.double()(twin).square().sum().backward()
    torch.testing.assert_close(images.grad.double(), twin.grad, atol=1e-3, rtol=1e-4)


@torch.no_grad()
def test_hooks_on_the_norms_of_the_stem_are_called():
    made, seen = stem(), []
    images = torch.randn(1, 2, 8, 12)
    expected = made(images)
    for norm in (made.norm_before, made.norm):
        norm.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    torch.testing.assert_close(made(images), expected)
    assert seen == [(1, 12, 16), (1, 12, 6)]


@pytest.mark.parametrize("biased", [True, False])
def test_fold_affine(biased):
    torch.manual_seed(0)
    values = [torch.randn(70, 131), torch.randn(70) if biased else None, torch.randn(131), torch.randn(131)]

    def run(dtype):
        leaves = [None if v is None else v.to(dtype, copy=True).requires_grad_() for v in values]
        folded, offset = fold_affine(*leaves)
        (folded.sin().sum() + offset.cos().sum()).backward()
        return [t.detach().double() for t in (folded, offset, *(v.grad for v in leaves if v is not None))]

    assert error(run(torch.float32), run(torch.float64)) < 1e-5
    weight, bias, gain, shift = values
    z = torch.randn(5, 131)
    expected = F.linear(z * gain + shift, weight, bias)
    torch.testing.assert_close(F.linear(z, *fold_affine(*values)), expected, atol=1e-4, rtol=1e-4)


X, C = (2, 5, 6), (6,)
OPERATORS = [
    ("rms_forward", (X, C, C), (2, 1e-5)),
    ("rms_forward", (X, None, None), (1, 1e-5)),
    ("rms_quadratic_means", (X,), (2, 1e-5)),
    ("rms_backward", (X, X, C, C, (2, 5, 2)), (True,)),
    ("rms_backward", (X, X, None, None, (2, 5, 1)), (False,)),
    ("moments", (X,), ()),
    ("scale_shift", (X, (2, 1, 6), (1, 1, 6)), ()),
    ("scale_shift_sums", (X, X), ()),
    ("scale_shift_backward", (X, X, (1, 1, 6), (2, 1, 6), (2, 1, 6)), ()),
    ("patch_norm", ((2, 3, 4, 6), (18,), (18,)), (2, 3, 1e-5)),
    ("fold", ((4, 6), (4,), C, C), ()),
    ("fold", ((4, 6), None, C, C), ()),
    ("fold_backward", ((4, 6), (4,), (4, 6), C, C), ()),
]


@pytest.mark.parametrize(("name", "shapes", "rest"), OPERATORS)
def test_operators_keep_to_the_rules(name, shapes, rest):
    tensors = [None if shape is None else torch.rand(shape) for shape in shapes]
    torch.library.opcheck(getattr(torch.ops.vitmods, name).default, (*tensors, *rest))


@pytest.mark.parametrize("make_layer", [lambda: make("rms", 6), lambda: make("power_heads", 6), stem])
def test_compiled_with_it_and_exported_without(make_layer):
    torch._dynamo.reset()
    layer = make_layer()
    x = torch.randn(2, 2, 8, 12) if isinstance(layer, DualPatchNormStem) else torch.randn(8, 5, 6)
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend=backend)
    plain = copy.deepcopy(layer)
    for run in (plain, compiled):
        run(x).square().sum().backward()
    for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        program = torch.export.export(layer.eval(), (x,))
        torch.testing.assert_close(program.module()(x), layer(x), atol=1e-5, rtol=1e-5)
    assert "vitmods" not in str(program.graph)
    torch._dynamo.reset()
