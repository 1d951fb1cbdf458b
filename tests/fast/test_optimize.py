"""Folded and packed models compute the same, for every change and norm, and keep to what they promise."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import vitmods as vm
from vitmods.fast.packed import PackedLinear
from vitmods.layers import Block, ParallelBlock
from vitmods.model.flops import count_macs
from vitmods.model.slots import NormConfig, StemConfig
from vitmods.util.errors import UserError

ARMS = [
    "", "dpn", "layerscale", "normformer", "subln", "placement(attn=post,mlp=pre+post)", "rms", "parallel(branches=3)",
    "layerscale+normformer+batchnorm+parallel(branches=3)", "dtn(blocks=2)", "gpsa(blocks=2)", "dpn+layerscale",
    *(f"norm(kind={kind})" for kind in ("scale", "batch", "instance", "group", "power", "switchable")),
    "normformer+layerscale", "placement(attn=post,mlp=post)+layerscale", "norm(kind=batch)+layerscale",
    "subln+gate", "normformer+gate(per=head)", "normformer+norm(kind=batch)+gate",
]  # fmt: skip


@pytest.fixture(autouse=True)
def packed_products(monkeypatch):
    """Products of the sizes here are taken packed, too."""
    monkeypatch.setattr("vitmods.fast.packed.SMALL", 0)


@torch.no_grad()
def trained(model):
    """Weights, and statistics of norms, as after training: nothing is 0 or 1."""
    torch.manual_seed(3)
    for name, p in model.named_parameters():
        small = p.ndim == 1 or "token" in name or name == "pos_embed"
        nn.init.normal_(p, 1 if "norm" in name and name.endswith("weight") else 0, 0.3) if small else None
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    return model.eval()


def small(arm="", **fields):
    base = vm.vit("mu3/4", **{"img_size": 16, "num_classes": 5, **fields})
    return trained(vm.apply(base, *vm.parse_changes(arm)) if arm else base)


def random_images(model, count=3):
    p = next(model.parameters())
    return torch.randn(count, 3, *model.vit_config.img_size, generator=torch.Generator().manual_seed(1)).to(p)


@torch.no_grad()
def moved(old, new):
    x = random_images(old)
    a, b = old(x).double(), new(x).double()
    return float((a - b).abs().max() / a.abs().max())


FIELDS = [
    {"pool": "avg", "norm_after_pool": True},
    {"pool": "map", "class_token": False},
    {"qkv_bias": False, "reg_tokens": 2},
    {"head_scale": True, "layer_scale": 0.1, "residual_scale": True},
    {"num_classes": 0},
    {"stem": StemConfig(bias=False, before=NormConfig())},
    {"activation": "gelu_tanh", "representation": True, "pool": "none"},
]
STEMS = ("hmlp", "hmlp-ln", "levit", "local", "stem(kind=linear,norm=batch,gelu=true)")
CASES = [
    *((arm, {}) for arm in ARMS),
    *(("", fields) for fields in FIELDS),
    *((stem, {"patch_size": 8}) for stem in STEMS),
    ("parallel", {"depth": 4, "pool": "map", "class_token": False}),
]


@pytest.mark.parametrize(("arm", "fields"), CASES, ids=str)
def test_outputs_and_features_stay(arm, fields):
    """Folding is exact: in float64 to its last digits."""
    model = small(arm, **fields)
    new = vm.optimize_for_inference(model)
    assert moved(model, new) <= 1e-5
    x = random_images(model)
    with torch.no_grad():
        torch.testing.assert_close(new.forward_features(x), model.forward_features(x), rtol=1e-4, atol=1e-4)
    assert not any(p.requires_grad for p in new.parameters())
    assert arm not in STEMS or not any("running" in name for name, _ in new.named_buffers())
    assert moved(model.double(), vm.optimize_for_inference(model)) <= 1e-13


def test_what_is_folded_is_gone():
    new = vm.optimize_for_inference(small("dpn+layerscale"))
    unfolded = [name for name, _ in new.named_parameters() if any(part in name for part in (".norm1", ".norm2", ".ls"))]
    assert unfolded == []
    assert new.vit_config.layer_scale is None
    assert not new.vit_config.stem.before.affine
    batch = vm.optimize_for_inference(small("norm(kind=batch)"))
    assert all(isinstance(block.norm1, nn.Identity) for block in batch.blocks)


WIDE = ["parallel", "layerscale+rms+parallel(branches=3)", "batchnorm+dpn+parallel", "norm(kind=instance)+parallel"]
NARROW = ["normformer+parallel", "dtn(blocks=2)+parallel", "gpsa(blocks=2)+parallel"]


@pytest.mark.parametrize("arm", WIDE + NARROW)
def test_parallel_branches_become_wide_blocks(arm, tmp_path):
    """Where nothing of a branch alone stands between; the config says so, and files keep it."""
    model, wide = small(arm, depth=6), arm in WIDE
    new = vm.optimize_for_inference(model)
    branches = model.vit_config.parallel
    assert {type(block) for block in new.blocks} == {Block if wide else ParallelBlock}
    assert moved(model, new) <= 1e-5
    assert moved(model.double(), vm.optimize_for_inference(model)) <= 1e-12
    if wide:
        config = new.vit_config
        assert (config.parallel, config.depth, config.head_dim) == (1, 6 // branches, 16)
        assert (config.num_heads, config.mlp_dim) == (2 * branches, 128 * branches)
        assert count_macs(config) == count_macs(model.vit_config)
        vm.export(new, tmp_path / "wide.safetensors")


class Calls(TorchDispatchMode):
    """Counts operations that are no views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view and "view" not in func.__name__
        return func(*args, **(kwargs or {}))


def calls(model, images):
    with torch.no_grad():
        model(images)
        with Calls() as counter:
            model(images)
    return counter.count


def test_half_the_calls_of_the_sequential_model():
    """36 blocks against 18 x 2 and 12 x 3, with LayerScale, and timm's 18 x 2."""
    size = {"img_size": 8, "embed_dim": 8, "num_heads": 2, "mlp_dim": 32, "num_classes": 0, "layer_scale": 0.1}
    images = torch.zeros(1, 3, 8, 8)
    names = ("mu36/4", "mu18x2/4", "mu12x3/4", "mu1/4")
    *counts, single = [calls(vm.optimize_for_inference(vm.vit(name, **size)), images) for name in names]
    per_block = (counts[0] - single) / 35
    assert [counts[0] - count for count in counts[1:]] == [18 * per_block, 24 * per_block]
    reference = timm.create_model(
        "vit_small_patch16_18x2_224", img_size=8, patch_size=4, embed_dim=8, num_heads=2, num_classes=0
    )
    assert calls(reference.eval(), images) > 1.9 * counts[1]


def test_the_model_that_is_given_stays_and_meta_models_are_refused():
    model = small("dpn+layerscale").train()
    before = copy.deepcopy(model.state_dict())
    vm.optimize_for_inference(model)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.device("meta"):
        model = vm.vit("mu2/4", img_size=8)
    with pytest.raises(UserError, match="meta"):
        vm.optimize_for_inference(model)


def test_models_of_timm():
    reference = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, init_values=0.1, num_classes=7).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(vm.optimize_for_inference(reference)(x), reference(x), rtol=1e-5, atol=1e-5)


def test_bfloat16_stays_close():
    model = small("layerscale")
    half = vm.optimize_for_inference(model, dtype=torch.bfloat16)
    assert half.head.weight.dtype == torch.bfloat16
    with torch.inference_mode():
        out = half(random_images(half)).float()
    assert (out - model(random_images(model))).abs().max() < 0.1 * model(random_images(model)).abs().max()


def test_works_compiled_pickled_copied_and_with_autograd():
    model = small("dpn", depth=1)
    new, x = vm.optimize_for_inference(model), random_images(model)
    torch._dynamo.reset()
    compiled = torch.compile(new, fullgraph=True, backend="eager")
    for same in (compiled, pickle.loads(pickle.dumps(new)), copy.deepcopy(new)):
        with torch.no_grad():
            torch.testing.assert_close(same(x), model(x), rtol=1e-4, atol=1e-5)
    gradients = []
    for form in (new, model):
        leaf = x.clone().requires_grad_()
        gradients += torch.autograd.grad(form(leaf).sum(), leaf)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def test_small_products_are_not_packed(monkeypatch):
    monkeypatch.setattr("vitmods.fast.packed.SMALL", 1000)
    packed = PackedLinear.of(nn.Linear(10, 10), "none")
    with torch.inference_mode():
        packed(torch.zeros(9, 10))
        assert packed._blocks is None
        packed(torch.zeros(10, 10))
        assert packed._blocks is not None


@pytest.mark.parametrize("gelu", [None, "none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_linear(gelu, dtype):
    linear = nn.Linear(24, 40).to(dtype)
    packed = PackedLinear.of(linear, gelu)
    x = torch.randn(2, 5, 24, dtype=dtype)

    def expected():
        y = linear(x)
        return y if gelu is None else nn.functional.gelu(y, approximate=gelu)

    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), expected(), **tolerance)
    with torch.no_grad():
        linear.weight.mul_(2)
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), expected(), **tolerance)
        with pytest.raises(RuntimeError):
            packed(x[..., :7])


def test_a_replaced_weight_is_seen():
    packed = PackedLinear.of(nn.Linear(4, 4))
    x = torch.randn(3, 4)
    with torch.no_grad():
        packed(x)
        packed.load_state_dict({"weight": torch.eye(4), "bias": torch.zeros(4)})
        torch.testing.assert_close(packed(x), x)
        packed.weight = nn.Parameter(2 * torch.eye(4))
        packed.bias.zero_()
        torch.testing.assert_close(packed(x), 2 * x)
