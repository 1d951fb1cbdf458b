"""Norms against their equations in single operations, PyTorch, the papers' code (goldens), and their invariances; under
torch.func and torch.jit.trace, and derivatives of their gradients."""

import copy
import gc
import io
import json
import math
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import vitmods as vm
from vitmods import layers as vml
from vitmods.layers.norms.whitening import NotFittedWarning, Whitening
from vitmods.layers.stems.base import patchify
from vitmods.tasks import Classification
from vitmods.train import RunOptions, train_trial
from vitmods.util.errors import UserError

EPS = 1e-3  # large, so that a forgotten or misplaced eps is seen
DIM, HEADS = 6, 2
pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics from", "ignore:.*torch.jit")


def affine(norm, x, mean, var):
    return (x - mean) / torch.sqrt(var + norm.eps) * norm.weight + norm.bias


def by_head(x):
    return x.unflatten(-1, (HEADS, -1))


def unit(norm, x, groups=1):
    x = x.unflatten(-1, (groups, -1))
    return (x / torch.sqrt(x.square().mean(-1, keepdim=True) + norm.eps)).flatten(-2)


def slow_layer(norm, x):
    return affine(norm, x, x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True))


def slow_scale(norm, x):
    return x / x.square().sum(-1, keepdim=True).sqrt() * norm.weight


def slow_instance(norm, x):
    return affine(norm, x, x.mean(1, keepdim=True), x.var(1, keepdim=True))


def slow_group(norm, x):
    heads = by_head(x)
    mean = heads.mean((1, 3), keepdim=True)
    var = (heads - mean).square().mean((1, 3), keepdim=True)
    return affine(norm, x, *(t.expand(-1, -1, -1, DIM // HEADS).flatten(-2) for t in (mean, var)))


def slow_batch(norm, x):
    if not norm.training:
        return affine(norm, x, norm.running_mean, norm.running_var)
    return affine(norm, x, x.mean((0, 1)), x.var((0, 1), unbiased=False))


def slow_power(norm, x, groups=1):
    """In training as of the first batch: phi is its own."""
    rows = unit(norm, x, groups)
    phi = rows.square().mean((0, 1)) if norm.training else norm.running_phi
    return rows / torch.sqrt(phi + norm.eps) * norm.weight + norm.bias


def slow_switchable(norm, x):
    means, variances = [x.mean(1, keepdim=True), x.mean((1, 2), keepdim=True)], [x.var(1, keepdim=True)]
    second = variances[0] + means[0].square()
    variances.append(second.mean(-1, keepdim=True) - means[1].square())
    if len(norm.mean_weight) == 3:
        means.append(means[0].mean(0, keepdim=True) if norm.training else norm.running_mean)
        variances.append(second.mean(0, keepdim=True) - means[2].square() if norm.training else norm.running_var)
    weights = norm.mean_weight.softmax(0), norm.var_weight.softmax(0)
    return affine(norm, x, *(sum(w * v for w, v in zip(*pair)) for pair in zip(weights, (means, variances))))


def slow_dtn(norm, x):
    """P as a 4 x 4 matrix."""
    released, pool, band = norm.mixing.variant == "released", norm.mixing.pool > 1, norm.mixing.band
    if released:
        x = unit(norm, x, HEADS)
    heads, (row, column) = by_head(x), (torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]))
    dx, dy = column - column[:, None], row - row[:, None]
    if band or pool:
        near = ((torch.arange(4) - torch.arange(4)[:, None]).abs() <= (band // 2 if band else 4)).double()
        p = (near / near.sum(1, keepdim=True)).expand(HEADS, 4, 4)
    else:
        p = torch.einsum("hk,kij->hij", norm.a, torch.stack([dx**2 + dy**2, dx, dy]).double()).softmax(-1)
    m, q = (torch.einsum("hij,bjhd->bihd", p, value) for value in (heads, heads.square()))
    lm = torch.sigmoid(norm.omega_mean)[:, None]
    lv = 1.0 if norm.omega_var is None else torch.sigmoid(norm.omega_var)[:, None]  # one pool has no variance
    mean, var = x.mean(-1)[..., None, None], x.var(-1, unbiased=released)[..., None, None]
    y = (heads - lm * mean - (1 - lm) * m) / torch.sqrt(lv * var + (1 - lv) * (q - m.square()) + norm.eps)
    return y.flatten(2) * norm.weight + norm.bias


def token_norm(**mixing):
    return partial(vml.DynamicTokenNorm, num_heads=HEADS, grid_size=(2, 2), eps=EPS, mixing=vml.TokenMixing(**mixing))


EQUATIONS = {  # the norm, and what it computes
    "layer": (partial(vml.LayerNorm, eps=EPS), slow_layer),
    "rms": (partial(vml.RMSNorm, eps=EPS), lambda norm, x: unit(norm, x) * norm.weight),
    "scale_shift": (vml.ScaleShift, lambda norm, x: x * norm.weight + norm.bias),
    "dyt": (vml.DynamicTanh, lambda norm, x: torch.tanh(norm.alpha * x) * norm.weight + norm.bias),
    "derf": (vml.DynamicErf, lambda norm, x: torch.erf(norm.alpha * x + norm.shift) * norm.weight + norm.bias),
    "scale": (partial(vml.ScaleNorm, eps=EPS), slow_scale),
    "scale, one gain": (partial(vml.ScaleNorm, eps=EPS, gain="scalar"), slow_scale),
    "batch": (partial(vml.BatchNorm, eps=EPS), slow_batch),
    "instance": (partial(vml.InstanceNorm, eps=EPS), slow_instance),
    "group": (partial(vml.GroupNorm, eps=EPS, num_heads=HEADS), slow_group),
    "power": (partial(vml.PowerNorm, eps=EPS, warmup=3), slow_power),
    "power, heads": (partial(vml.PowerNorm, eps=EPS, warmup=3, num_heads=HEADS), partial(slow_power, groups=HEADS)),
    "switchable": (partial(vml.SwitchableNorm, eps=EPS), slow_switchable),
    "switchable, no batch": (partial(vml.SwitchableNorm, eps=EPS, batch=False), slow_switchable),
    "dtn": (token_norm(), slow_dtn),
    "dtn, released": (token_norm(variant="released"), slow_dtn),
    "dtn, band": (token_norm(band=3), slow_dtn),
    "dtn, pool": (token_norm(pool=2, statistics="mean"), slow_dtn),
}
OF_A_BATCH = ("batch", "power", "power, heads", "switchable")
WITHOUT_A_GRID = [name for name in EQUATIONS if not name.startswith(("dtn", "dyt", "derf"))]
WITHOUT_SETTINGS = ("scale_shift", "dyt", "derf")
EXACT = [name for name in EQUATIONS if not name.startswith("power")]  # whose gradient is the derivative
MIXING = [name for name in WITHOUT_A_GRID if not getattr(EQUATIONS[name][0](DIM), "token_wise", False)]
every_norm = pytest.mark.parametrize("name", EQUATIONS)


def make(name, dtype=torch.float64, seed=0, **settings):
    """In training, as after some of it."""
    torch.manual_seed(seed)
    norm = EQUATIONS[name][0](DIM, **settings).to(dtype)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, mean=0.5)
    for key, buffer in norm.named_buffers():
        if key.startswith("running"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    return norm


def tokens(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (8, 4, DIM)), generator=generator, dtype=torch.float64) * 2 + 1


@every_norm
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_equation(name, training, affine):
    """With the gradients of all inputs, and without gain and shift as with those that do nothing."""
    if not affine and name in WITHOUT_SETTINGS:
        return
    norm, written = make(name, **({} if affine else {"affine": False})).train(training), make(name).train(training)
    written.load_state_dict(norm.state_dict(), strict=False)
    if not affine:
        torch.nn.init.constant_(written.weight, math.sqrt(DIM) if name.startswith("scale") else 1)
        torch.nn.init.zeros_(getattr(written, "bias", torch.empty(1)))
    x = tokens().requires_grad_()
    results = []
    for shape in [(8, 4, DIM), (8, 2, 2, DIM), None]:
        form = EQUATIONS[name][1] if shape is None else lambda norm, x, shape=shape: norm(x.view(shape)).view_as(x)
        run = copy.deepcopy(written if shape is None else norm)
        y = form(run, x)
        leaves = [x, *(p for key, p in run.named_parameters() if key in dict(norm.named_parameters()))]
        results.append(
            [y, *torch.autograd.grad(y.sin().sum(), leaves, materialize_grads=True)] if name in EXACT else [y]
        )
    for actual in results[:2]:
        torch.testing.assert_close(actual, results[2], atol=1e-11, rtol=1e-11)


@every_norm
def test_gradients_of_each_image_and_several_models_at_once(name):
    norms, x = [make(name).eval(), make(name, seed=2).eval()], tokens()
    norm, values = norms[0], dict(norms[0].named_parameters())

    def loss(values, x):
        return torch.func.functional_call(norm, values, (x,)).pow(3).mean()

    per_image = torch.vmap(torch.func.grad(lambda v, one: loss(v, one[None])), (None, 0))(values, x)
    for i in range(2):
        expected = torch.autograd.grad(loss(values, x[i : i + 1]), list(values.values()))
        for key, gradient in zip(values, expected):
            torch.testing.assert_close(per_image[key][i], gradient, atol=1e-10, rtol=1e-9)
    stacked = torch.func.stack_module_state(norms)
    for images in (x, x[:2]):
        call = lambda *values, images=images: torch.func.functional_call(norm, values, (images,))  # noqa: E731
        for one, y in zip(norms, torch.vmap(call)(*stacked), strict=True):
            torch.testing.assert_close(y, one(images), atol=1e-12, rtol=1e-10)


def cubed(y):
    return y.pow(3).sum()


def hvp_of_autograd(loss, inputs, along):
    return torch.autograd.functional.hvp(loss, inputs, along)[1]


def hvp_of_two_backwards(loss, inputs, along):
    inputs = [value.detach().clone().requires_grad_() for value in inputs]
    first = torch.autograd.grad(loss(*inputs), inputs, create_graph=True)
    pairs = [(grad, v) for grad, v in zip(first, along, strict=True) if grad.requires_grad]
    return torch.autograd.grad(sum((grad * v).sum() for grad, v in pairs), inputs, materialize_grads=True)


def hvp_of_func(loss, inputs, along):
    return torch.func.jvp(torch.func.grad(loss, tuple(range(len(inputs)))), tuple(inputs), tuple(along))[1]


WAYS = [hvp_of_autograd, hvp_of_two_backwards, hvp_of_func]


@pytest.mark.parametrize(
    ("name", "training"), [*((name, False) for name in EQUATIONS), ("batch", True), ("switchable", True)]
)
def test_second_derivatives_of_input_and_parameters(name, training):
    norm, x = make(name).train(training), tokens()
    names = [key for key, _ in norm.named_parameters()]
    inputs = (x, *(value.detach() for value in norm.parameters()))
    generator = torch.Generator().manual_seed(2)
    along = tuple(torch.randn(v.shape, dtype=v.dtype, generator=generator) for v in inputs)

    def loss(form):
        return lambda x, *values: cubed(
            torch.func.functional_call(Called(norm, form), {f"norm.{k}": v for k, v in zip(names, values)}, (x,))
        )

    expected = hvp_of_autograd(loss(EQUATIONS[name][1]), inputs, along)
    assert max(float(e.abs().max()) for e in expected) > 0.1
    for way in WAYS[:2] if training else WAYS:  # torch.func does not take statistics that are gathered
        actual = way(loss(lambda norm, x: norm(x)), inputs, along)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-9 * max(1.0, float(b.abs().max())), rtol=0)


class Called(torch.nn.Module):
    def __init__(self, norm, form):
        super().__init__()
        self.norm, self.form = norm, form

    def forward(self, x):
        return self.form(self.norm, x)


@pytest.mark.parametrize("way", WAYS)
def test_the_rule_of_power_norm_has_no_derivative(way):
    norm = make("power")
    with pytest.raises(UserError, match="its paper's rule"):
        way(lambda x: cubed(norm(x)), (tokens(),), (tokens(),))


@pytest.mark.parametrize("training", [False, True])
@every_norm
def test_traced(name, training):
    """In float32, in which native forms run; in training as TensorBoard's add_graph does with a fresh model."""
    norm, x = make(name, dtype=torch.float32).train(training), tokens().float()
    if not training:
        exact = make(name).eval()  # a size is a tensor of integers: it must not become float32
        torch.testing.assert_close(
            torch.jit.trace(exact, (tokens(),))(tokens()), exact(tokens()), atol=1e-12, rtol=1e-12
        )
    with torch.set_grad_enabled(training):
        expected = copy.deepcopy(norm)(x)
        traced = torch.jit.trace(copy.deepcopy(norm), (x,), check_trace=not training)
        if not (name.startswith("power") and training):
            torch.testing.assert_close(traced(x), expected if not training else norm(x), atol=1e-5, rtol=1e-5)
            torch.jit.save(traced, file := io.BytesIO())
            assert file.getvalue()
        assert traced(tokens().float()[:4]).shape == (4, 4, DIM)


def test_scale_norm_of_short_tokens_and_fresh():
    norm = make("scale")
    x = (tokens(1, 2, DIM) * 1e-5).requires_grad_()
    torch.testing.assert_close(norm(x), x / EPS * norm.weight)
    assert torch.autograd.gradcheck(norm, (x,))
    zero = torch.zeros(1, 1, DIM, requires_grad=True)
    norm.float()(zero).sum().backward()
    assert zero.grad.isfinite().all()
    for gain, size in (("channel", 9), ("scalar", 1)):
        norm = vml.ScaleNorm(9, gain=gain)
        assert norm.weight.shape == (size,)
        torch.testing.assert_close(norm(torch.randn(4, 9)).square().mean(-1), torch.ones(4))
    with pytest.raises(ValueError, match="scalar"):
        vml.ScaleNorm(9, gain="vector")


def close(a, b):
    torch.testing.assert_close(a, b.reshape(a.shape), atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["powernorm_g1", "powernorm_pad"])
def test_power_norm_trains_as_the_paper_s_code(golden, name):
    """Warm-up and after it, the approximate gradient, the running statistics, evaluation."""
    g = golden(name)
    norm = vml.PowerNorm(8, eps=1e-5, warmup=int(g["hp.warmup_iters"]), groups=int(g["hp.group_num"])).double()
    state = {key: value.flatten() for key, value in g.group("param").items()}
    norm.load_state_dict(state | {"iters": g["param.iters"].squeeze()})
    step = 0
    while f"step{step}.in.x" in g:
        at = g.group(f"step{step}")
        x = at["in.x"].transpose(0, 1).contiguous().requires_grad_()
        norm.zero_grad()
        y = norm(x, g.arrays.get("in.pad_mask_BT"))
        y.backward(at["ct"].transpose(0, 1))
        close(y.transpose(0, 1).detach(), at["out.y"])
        close(x.grad.transpose(0, 1), at["grad_in.x"])
        close(norm.weight.grad, at["grad_weight"])
        close(norm.bias.grad, at["grad_bias"])
        close(norm.running_phi, at["after.running_phi"])
        close(norm.ema_gz, at["after.ema_gz"])
        assert int(norm.iters) == int(at["after.iters"])
        step += 1
    assert step >= 2
    close(norm.eval()(g["eval.in.x"].transpose(0, 1)).transpose(0, 1).detach(), g["eval.out.y"])


def test_switchable_norm_is_the_paper_s_code(golden):
    g = golden("switchnorm_bn")
    norm = vml.SwitchableNorm(6, eps=1e-5).double()
    norm.load_state_dict({key: value.flatten() for key, value in g.group("param").items()})
    x = g["in.x"].requires_grad_()
    y = norm(x)
    y.backward(g["ct.y"])
    close(y.detach(), g["out.y"])
    close(x.grad, g["grad_in.x"])
    for name, parameter in norm.named_parameters():
        close(parameter.grad, g[f"grad_param.{name}"])
    close(norm.running_mean, g["out.after.running_mean"])
    close(norm.running_var, g["out.after.running_var"])
    close(norm.eval()(x).detach(), g["eval.out.y"])


def test_batch_norm_is_pytorch_s_in_training_and_evaluation():
    norm, peer = make("batch"), torch.nn.BatchNorm1d(6, eps=EPS).double()
    peer.load_state_dict(norm.state_dict(), strict=False)
    for seed in range(3):
        x = tokens(8, 5, 6, seed=seed)
        close(norm(x).detach(), peer(x.flatten(0, 1)).detach())
    close(norm.running_mean, peer.running_mean)
    close(norm.running_var, peer.running_var)
    close(norm.eval()(x).detach(), peer.eval()(x.flatten(0, 1)).detach())


@pytest.mark.parametrize("name", MIXING)
def test_offsets_do_not_eat_the_digits(name):
    norm, x = make(name, dtype=torch.float32), tokens(8, 33, DIM).float() + 1000
    exact = copy.deepcopy(norm).double()(x.double())
    torch.testing.assert_close(norm(x).double(), exact, atol=2e-3, rtol=0)


class Each(torch.nn.ModuleDict):
    """Every norm for tokens of its own, in one graph."""

    def forward(self, tokens):
        return sum(norm(x).square().sum() for norm, x in zip(self.values(), tokens))


def test_compiled_training_is_eager_training():
    torch._dynamo.reset()
    norms = Each({name: make(name, dtype=torch.float32) for name in MIXING})
    compiled = copy.deepcopy(norms)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for step in range(2):
        results = []
        for form in (norms, run):
            inputs = [tokens(8, 4, DIM, seed=step).float().requires_grad_() for _ in MIXING]
            form(inputs).backward()
            results.append({name: x.grad for name, x in zip(MIXING, inputs)})
        torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(compiled.state_dict(), norms.state_dict(), atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["batch", "power", "switchable"])
def test_a_forward_that_runs_again_in_backward_is_counted_once(name):
    plain = make(name)
    recomputed, total = copy.deepcopy(plain), 4  # more than the warm-up of PowerNorm
    for step in range(total):
        x = tokens(8, 4, DIM, seed=step).requires_grad_()
        again = x.detach().clone().requires_grad_()
        plain(x).square().sum().backward()
        checkpoint(recomputed, again, use_reentrant=False).square().sum().backward()
        torch.testing.assert_close(again.grad, x.grad, atol=0, rtol=0)
    for a, b in zip(plain.buffers(), recomputed.buffers(), strict=True):
        assert torch.equal(a, b)
    assert not all(torch.equal(a, b) for a, b in zip(plain.buffers(), make(name).buffers(), strict=True))


def test_memory_of_rms_norm_and_two_forwards_of_power_norm():
    """As with several crops of an image."""
    norm = make("power")
    loss = sum(norm(tokens(8, 4, DIM, seed=seed)).square().sum() for seed in range(2))
    loss.backward()
    assert norm.ema_gz.any()
    norm, sizes = vml.RMSNorm(64), []
    x = torch.randn(2, 8, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        norm(x)
    assert sorted(sizes) == [2 * 8, 64, x.numel()]


@pytest.mark.parametrize("name", ["batch", "power", "switchable"])
def test_small_batches_warn_once_in_training(name):
    norm = make(name)
    with pytest.warns(UserWarning, match=r"3 images.*larger batch"):
        norm(tokens(3, 5, DIM))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norm(tokens(3, 5, DIM))
        make(name)(tokens(8, 4, DIM))
        make(name).eval()(tokens(3, 5, DIM))


@pytest.mark.parametrize(
    "kind", [vml.ScaleNorm, vml.BatchNorm, vml.InstanceNorm, vml.GroupNorm, vml.PowerNorm, vml.SwitchableNorm]
)
def test_bad_settings_and_shapes_are_errors(kind):
    if kind in (vml.GroupNorm, vml.PowerNorm):
        for groups in (4, 0):
            with pytest.raises(ValueError, match=f"{groups} groups do not divide 6"):
                kind(6, groups=groups)
    if kind is not vml.ScaleNorm:
        with pytest.raises(ValueError, match="mixes tokens"):
            kind(6)(torch.randn(2, 6))
    if kind in (vml.InstanceNorm, vml.SwitchableNorm):
        with pytest.raises(ValueError, match="at least 2 tokens"):
            kind(6)(torch.randn(2, 1, 6))
    for norm in (vml.RMSNorm(6), vml.PowerNorm(6).eval(), vml.PowerNorm(6, affine=False).eval()):
        with torch.no_grad(), pytest.raises(ValueError, match="6 channels and the input 9"):
            norm(torch.randn(2, 4, 9))


@pytest.mark.parametrize("kind", [vml.BatchNorm, vml.PowerNorm, vml.SwitchableNorm])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_running_statistics_of_a_norm_made_in_a_type(kind, dtype):
    norm, x = kind(6, dtype=dtype), tokens(8, 5, 6).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {b.dtype for b in norm.buffers() if b.is_floating_point()} == {wide}
    assert norm(x).dtype == norm.eval()(x).dtype == dtype


def test_a_step_leaves_nothing_behind():
    """A cycle between a node and its own result is out of the garbage collector's sight."""
    gc.collect()
    gc.freeze()  # it looks at what is made from here on alone, which is quick
    for name in EQUATIONS:
        norm = make(name)
        x = torch.randn(4, 4, DIM, dtype=torch.float64, requires_grad=True)
        tensors_alive = []
        for _ in range(3):
            norm(x).square().sum().backward()
            gc.collect()
            tensors_alive.append(sum(type(thing) is torch.Tensor for thing in gc.get_objects()))
        assert tensors_alive[1] == tensors_alive[2], name


def images(count=40):
    """With neighbors that are alike, as in photographs, and a mean far from 0."""
    generator = torch.Generator().manual_seed(0)
    rough = torch.randn(count, 3, 10, 10, generator=generator)
    return 5 + torch.nn.functional.avg_pool2d(rough, 3, 1)


def test_it_is_zca_whitening():
    patches = patchify(images(), (4, 4)).double()
    norm = Whitening(48, eps=1e-9, floor=0.0).double()
    norm.fit(patches.split(7))
    rows = patches.flatten(0, 1).numpy()
    values, vectors = np.linalg.eigh(np.cov(rows.T, bias=True))
    expected = (rows - rows.mean(0)) @ (vectors / np.sqrt(values + 1e-9)) @ vectors.T
    whitened = norm(patches).flatten(0, 1)
    assert np.allclose(whitened.numpy(), expected, atol=1e-5)
    assert torch.allclose(torch.cov(whitened.T, correction=0), torch.eye(48).double(), atol=1e-4)
    assert torch.allclose(norm.matrix, norm.matrix.T)
    assert norm(patches.float()).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(norm.float()(patches.float()).double().flatten(0, 1), whitened, atol=1e-2)


def test_the_floor_keeps_fine_detail_from_becoming_noise():
    patches = patchify(images(), (4, 4))
    norms = [Whitening(48, floor=floor) for floor in (0.0, 1e-3, 1.0)]
    for norm in norms:
        norm.fit([patches])
    sizes = [float(norm.matrix.norm()) for norm in norms]
    assert sizes[0] > sizes[1] > sizes[2]
    with pytest.raises(ValueError, match="two patches"):
        norm.fit([patches[:1, :1]])


def test_the_stem_says_that_it_waits_and_files_keep_what_was_computed(tmp_path):
    model = vm.apply(vm.vit("mu/4", img_size=8), vm.DualPatchNorm(before="whiten", after=False))
    with pytest.warns(NotFittedWarning, match=r"model.patch_embed.fit\(images\)"):
        model.train()(images(4))
    assert model.patch_embed.waits_for_images
    model.patch_embed.fit(images())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = model.train()(images(4)), model.eval()(images(4))
    assert torch.equal(*before)
    vm.export(model, tmp_path / "model.safetensors")
    again = vm.adapters.load(tmp_path / "model.safetensors")
    assert torch.equal(again(images(4)), before[1])
    assert not again.patch_embed.waits_for_images
    with pytest.raises(UserError, match="keep the patch size"):
        again.set_input_size(patch_size=2)
    with pytest.raises(UserError, match=r"only dpn\(before=whiten\)"):
        vm.apply(vm.vit("mu/4", img_size=8), vm.DualPatchNorm()).patch_embed.fit(images())


def test_the_prototype_has_a_norm_behind():
    (change,) = vm.parse_changes("dpn(before=whiten_norm,after=false)")
    model = vm.apply(vm.vit("mu/4", img_size=8), change)
    model.patch_embed.fit(images())
    patches = model.patch_embed.norm_before(patchify(images(), (4, 4)))
    assert torch.allclose(patches.var(-1, unbiased=False), torch.ones(()), atol=1e-2)


def test_a_trial_computes_it_once_and_goes_on_with_the_same(tmp_path):
    recipe = vm.recipes.RECIPES["plain"](epochs=1).with_(batch_size=20)
    ds = vm.data.load("digits", img_size=(8, 8), in_chans=1, augment=recipe.augment, limit_train=60, limit_val=20)

    def trained(folder):
        torch.manual_seed(0)
        base = vm.vit("mu/4", img_size=8, in_chans=1, num_classes=10)
        model = vm.apply(base, vm.DualPatchNorm(before="whiten"))
        train_trial(
            model, Classification.from_recipe(recipe), ds, recipe, out=tmp_path / folder, options=RunOptions("cpu")
        )
        return model

    first, second = trained("a"), trained("b")
    complete = Whitening(16)
    complete.fit(patchify(batch, (4, 4)) for batch in ds.plain_images("train", 1000, 7))
    assert torch.allclose(first.patch_embed.norm_before.matrix, complete.matrix, atol=1e-4)
    other = second.state_dict()
    assert all(torch.equal(value, other[name]) for name, value in first.state_dict().items())
    assert json.loads((tmp_path / "a" / "config.json").read_text())["fitted_to_images"] == {"patch_embed": 60}
    plain = next(ds.plain_images("train", 3, 10))
    everything = torch.cat([batch.inputs for batch in ds.eval_batches("train", 64)])
    assert torch.equal(plain, everything[[0, 30, 59]])
