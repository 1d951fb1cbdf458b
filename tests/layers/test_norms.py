"""Norms against their equations in slow float64, PyTorch, the papers' code (goldens), and their invariances."""

import copy
import gc
import json
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import vitmods as vm
from vitmods.layers.norms import (
    BatchNorm,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    PowerNorm,
    RMSNorm,
    ScaleNorm,
    ScaleShift,
    SwitchableNorm,
)  # fmt: skip
from vitmods.layers.norms.whitening import NotFittedWarning, Whitening
from vitmods.layers.stems.base import patchify
from vitmods.tasks import Classification
from vitmods.train import RunOptions, train_trial
from vitmods.util.errors import UserError

EPS = 1e-3  # large, so that a forgotten or misplaced eps is seen
DIM = 6
pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics from")

NORMS = {
    "layer": partial(LayerNorm, eps=EPS),
    "rms": partial(RMSNorm, eps=EPS),
    "scale_shift": ScaleShift,
    "scale": partial(ScaleNorm, eps=EPS),
    "scale_scalar": partial(ScaleNorm, eps=EPS, gain="scalar"),
    "batch": partial(BatchNorm, eps=EPS),
    "instance": partial(InstanceNorm, eps=EPS),
    "group": partial(GroupNorm, eps=EPS, num_heads=2),
    "power": partial(PowerNorm, eps=EPS, warmup=3),
    "power_heads": partial(PowerNorm, eps=EPS, warmup=3, num_heads=2),
    "switchable": partial(SwitchableNorm, eps=EPS),
    "switchable_no_batch": partial(SwitchableNorm, eps=EPS, batch=False),
}
EXACT = [name for name in NORMS if not name.startswith("power")]  # whose gradient is the derivative
MIXING = [name for name in NORMS if not getattr(NORMS[name](DIM), "token_wise", False)]


def make(name, dim=DIM, dtype=torch.float64, **settings):
    torch.manual_seed(0)
    norm = NORMS[name](dim, **settings).to(dtype)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, mean=0.5)
    return norm


def tokens(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (3, 5, DIM)), generator=generator, dtype=torch.float64) * 2 + 1


def mean(values):
    return sum(values) / len(values)


def variance(values, correction=0):
    center = mean(values)
    return sum((v - center) ** 2 for v in values) / (len(values) - correction)


def slow_by_token(token):
    """``token(values, norm)`` for each token."""

    def slow(x, norm):
        return torch.stack([token(values, norm) for values in x.flatten(0, 1)]).view_as(x)

    return slow


def slow_layer(token, norm):
    return (token - mean(token)) / (variance(token) + EPS) ** 0.5 * norm.weight + norm.bias


def slow_rms(token, norm):
    return token / (mean(token * token) + EPS) ** 0.5 * norm.weight


def slow_scale(token, norm):
    return token / max(float(sum(v * v for v in token) ** 0.5), EPS) * norm.weight


def slow_by_channel(x, norm, statistics):
    """``statistics(b, c)`` -> (mean, variance)."""
    out = torch.empty_like(x)
    for b, c in np.ndindex(x.shape[0], x.shape[2]):
        center, spread = statistics(b, c)
        out[b, :, c] = norm.weight[c] * (x[b, :, c] - center) / (spread + EPS) ** 0.5 + norm.bias[c]
    return out


def slow_batch(x, norm):
    return slow_by_channel(x, norm, lambda b, c: (mean(x[..., c].flatten()), variance(x[..., c].flatten())))


def slow_instance(x, norm):
    return slow_by_channel(x, norm, lambda b, c: (mean(x[b, :, c]), variance(x[b, :, c], 1)))


def slow_group(x, norm):
    def statistics(b, c):
        group = x[b, :, c // 3 * 3 : c // 3 * 3 + 3].flatten()
        return mean(group), variance(group)

    return slow_by_channel(x, norm, statistics)


def slow_switchable(x, norm):
    means = [[mean(x[b, :, c]) for c in range(DIM)] for b in range(len(x))]
    spreads = [[variance(x[b, :, c], 1) for c in range(DIM)] for b in range(len(x))]
    seconds = [[s + m * m for s, m in zip(*row)] for row in zip(spreads, means)]
    fractions = [w.softmax(0) for w in (norm.mean_weight, norm.var_weight)]

    def statistics(b, c):
        layer, batch = mean(means[b]), mean([row[c] for row in means])
        centers = [means[b][c], layer, batch]
        others = [mean(seconds[b]) - layer**2, mean([row[c] for row in seconds]) - batch**2]
        return tuple(
            sum(w * v for w, v in zip(fraction, values))
            for fraction, values in zip(fractions, (centers, [spreads[b][c], *others]))
        )

    return slow_by_channel(x, norm, statistics)


def slow_power(x, norm, groups=1):
    """The first training batch: phi is its own."""
    rows = x.clone().flatten(0, 1)
    for row in rows:
        for part in row.chunk(groups):
            part /= (sum(v * v for v in part) / len(part) + EPS) ** 0.5
    phi = torch.stack([mean(rows[:, c] ** 2) for c in range(DIM)])
    return (rows / (phi + EPS).sqrt() * norm.weight + norm.bias).view_as(x)


SLOW = {
    "layer": slow_by_token(slow_layer),
    "rms": slow_by_token(slow_rms),
    "scale_shift": lambda x, norm: x * norm.weight + norm.bias,
    "scale": slow_by_token(slow_scale),
    "scale_scalar": slow_by_token(slow_scale),
    "batch": slow_batch,
    "instance": slow_instance,
    "group": slow_group,
    "power": slow_power,
    "power_heads": partial(slow_power, groups=2),
    "switchable": slow_switchable,
    "switchable_no_batch": slow_switchable,
}


@pytest.mark.parametrize("name", NORMS)
def test_equation(name):
    norm, x = make(name), tokens()
    expected = SLOW[name](x, norm).detach()
    for shape in [(3, 5, DIM), (3, 1, 5, DIM)]:
        torch.testing.assert_close(copy.deepcopy(norm)(x.view(shape)), expected.view(shape), atol=1e-12, rtol=0)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("name", EXACT)
def test_gradients(name, affine):
    norm = make(name, **({} if name == "scale_shift" else {"affine": affine}))
    x = tokens(2, 3, DIM).requires_grad_()
    parameters = dict(norm.named_parameters())

    def function(x, *values):
        return torch.func.functional_call(norm, dict(zip(parameters, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, (x, *parameters.values()))


def test_scale_norm_of_short_tokens_and_fresh():
    norm = make("scale")
    x = (tokens(1, 2, DIM) * 1e-5).requires_grad_()
    torch.testing.assert_close(norm(x), x / EPS * norm.weight)
    assert torch.autograd.gradcheck(norm, (x,))
    zero = torch.zeros(1, 1, DIM, requires_grad=True)
    norm.float()(zero).sum().backward()
    assert zero.grad.isfinite().all()
    for gain, size in (("channel", 9), ("scalar", 1)):
        norm = ScaleNorm(9, gain=gain)
        assert norm.weight.shape == (size,)
        torch.testing.assert_close(norm(torch.randn(4, 9)).square().mean(-1), torch.ones(4))
    with pytest.raises(ValueError, match="scalar"):
        ScaleNorm(9, gain="vector")


def close(a, b):
    torch.testing.assert_close(a, b.reshape(a.shape), atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["powernorm_g1", "powernorm_pad"])
def test_power_norm_trains_as_the_paper_s_code(golden, name):
    """Warm-up and after it, the approximate gradient, the running statistics, evaluation."""
    g = golden(name)
    norm = PowerNorm(8, eps=1e-5, warmup=int(g["hp.warmup_iters"]), groups=int(g["hp.group_num"])).double()
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
    norm = SwitchableNorm(6, eps=1e-5).double()
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
    norm, peer = make("batch", 6), torch.nn.BatchNorm1d(6, eps=EPS).double()
    peer.load_state_dict(norm.state_dict(), strict=False)
    for seed in range(3):
        x = tokens(8, 5, 6, seed=seed)
        close(norm(x).detach(), peer(x.flatten(0, 1)).detach())
    close(norm.running_mean, peer.running_mean)
    close(norm.running_var, peer.running_var)
    close(norm.eval()(x).detach(), peer.eval()(x.flatten(0, 1)).detach())


finite = st.floats(-5, 5, allow_subnormal=False)


@pytest.mark.parametrize("name", NORMS)
@settings(deadline=None, max_examples=15)
@given(shift=finite, factor=st.floats(0.1, 10), seed=st.integers(0, 9), data=st.data())
def test_invariances(name, shift, factor, seed, data):
    """All forget a common factor; those that take a mean off forget a common shift; none minds the tokens' order."""
    norm, x = make(name), tokens(seed=seed)
    norm.eps = 1e-14

    def run(value):
        return copy.deepcopy(norm)(value).detach()

    order = data.draw(st.permutations(range(5)))
    torch.testing.assert_close(run(x[:, order]), run(x)[:, order], atol=1e-9, rtol=0)
    if name != "scale_shift":
        torch.testing.assert_close(run(x * factor), run(x), atol=1e-7, rtol=0)
    if not name.startswith(("scale", "power", "rms")):
        torch.testing.assert_close(run(x + shift), run(x), atol=1e-7, rtol=0)


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
    norms = Each({name: make(name, dtype=torch.float32) for name in NORMS})
    compiled = copy.deepcopy(norms)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for step in range(2):
        results = []
        for form in (norms, run):
            inputs = [tokens(8, 5, DIM, seed=step).float().requires_grad_() for _ in NORMS]
            form(inputs).backward()
            results.append({name: x.grad for name, x in zip(NORMS, inputs)})
        torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(compiled.state_dict(), norms.state_dict(), atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["batch", "power", "switchable"])
def test_a_forward_that_runs_again_in_backward_is_counted_once(name):
    plain = make(name)
    recomputed, total = copy.deepcopy(plain), 4  # more than the warm-up of PowerNorm
    for step in range(total):
        x = tokens(8, 5, DIM, seed=step).requires_grad_()
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
    loss = sum(norm(tokens(8, 5, DIM, seed=seed)).square().sum() for seed in range(2))
    loss.backward()
    assert norm.ema_gz.any()
    norm, sizes = RMSNorm(64), []
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
        make(name)(tokens(8, 5, DIM))
        make(name).eval()(tokens(3, 5, DIM))


@pytest.mark.parametrize("kind", [ScaleNorm, BatchNorm, InstanceNorm, GroupNorm, PowerNorm, SwitchableNorm])
def test_bad_settings_and_shapes_are_errors(kind):
    if kind in (GroupNorm, PowerNorm):
        for groups in (4, 0):
            with pytest.raises(ValueError, match=f"{groups} groups do not divide 6"):
                kind(6, groups=groups)
    if kind is not ScaleNorm:
        with pytest.raises(ValueError, match="mixes tokens"):
            kind(6)(torch.randn(2, 6))
    if kind in (InstanceNorm, SwitchableNorm):
        with pytest.raises(ValueError, match="at least 2 tokens"):
            kind(6)(torch.randn(2, 1, 6))


@pytest.mark.parametrize("kind", [BatchNorm, PowerNorm, SwitchableNorm])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_running_statistics_of_a_norm_made_in_a_type(kind, dtype):
    norm, x = kind(6, dtype=dtype), tokens(8, 5, 6).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {b.dtype for b in norm.buffers() if b.is_floating_point()} == {wide}
    assert norm(x).dtype == norm.eval()(x).dtype == dtype


@pytest.fixture
def only_new_objects():
    """The collector looks at what is made from here on alone, which is quick."""
    gc.collect()
    gc.freeze()


def test_a_step_leaves_nothing_behind(only_new_objects):
    """A cycle between a node and its own result is out of the garbage collector's sight."""
    for name in NORMS:
        norm = make(name)
        x = torch.randn(4, 5, DIM, dtype=torch.float64, requires_grad=True)
        tensors_alive = []
        for _ in range(3):
            norm(x).square().sum().backward()
            gc.collect()
            tensors_alive.append(sum(type(thing) is torch.Tensor for thing in gc.get_objects()))
        assert tensors_alive[1] == tensors_alive[2], name


@pytest.mark.parametrize("norm", [RMSNorm(6), PowerNorm(6).eval(), PowerNorm(6, affine=False).eval()], ids=str)
def test_tokens_of_another_width(norm):
    with torch.no_grad(), pytest.raises(ValueError, match="6 channels and the input 9"):
        norm(torch.randn(2, 4, 9))


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
    sizes = []
    for floor in (0.0, 1e-3, 1.0):
        norm = Whitening(48, floor=floor)
        norm.fit([patches])
        sizes.append(float(norm.matrix.norm()))
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

    assert vm.parse_changes("dpn(before=false)") == (vm.DualPatchNorm(before=False),)


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
