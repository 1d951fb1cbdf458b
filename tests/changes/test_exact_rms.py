"""LayerNorm to RMSNorm without changing the function: outputs, the stream, refusals."""

import copy

import pytest
import timm
import torch
import transformers
from torch import nn

import vitmods as vm
from vitmods.adapters.surgery import repeat
from vitmods.layers import LayerNorm, RMSNorm
from vitmods.layers.norms import CenteredLayerNorm
from vitmods.model.slots import BranchConfig, FirstBlocks, NormConfig
from vitmods.util.errors import NoEffect, NotCertified, NotRecognized, SlotConflict, UserError

NO_PREFIX_POSITION = {"position_on_prefix": False}
BIG_VISION = {"init": "big_vision", "position": "sincos2d", "representation": True, **NO_PREFIX_POSITION}


@torch.no_grad()
def trained(model, seed=0):
    """Weights as after training: gains and biases of norms, LayerScale, tokens and positions are far from their start,
    and the stream has a mean."""
    torch.manual_seed(seed)
    for name, p in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            nn.init.normal_(p, 1, 0.3)
        elif "gamma" in name:
            nn.init.normal_(p, 0.1, 0.1)
        elif p.ndim == 1 or "token" in name or name == "pos_embed":
            nn.init.normal_(p, 0.2, 0.5)
        else:
            p.copy_(torch.randn_like(p) * p[0].numel() ** -0.5 + 0.3 * torch.randn_like(p[:1]) * p[0].numel() ** -0.5)
    return model.eval()


def tiny(**fields):
    return trained(vm.vit("mu3/4", **{"img_size": 12, "num_classes": 5, **fields}))


@torch.no_grad()
def outputs(model, images=1):
    reference = next(model.parameters())
    size = model.patch_embed.img_size
    images = torch.randn(images, 3, *size, generator=torch.Generator().manual_seed(1)).to(reference)
    return model.eval()(images).double()


def moved(old, new, **options):
    a, b = outputs(old, **options), outputs(new, **options)
    return float((a - b).abs().max() / a.abs().max())


def test_devices_without_float64_compute_on_the_cpu(monkeypatch):
    """MPS refuses float64, so that tensors are on the CPU before they have it."""
    on_cpu, to_cpu, to_double = set(), torch.Tensor.cpu, torch.Tensor.double

    def cpu(tensor):
        new = to_cpu(tensor).clone()
        on_cpu.add(new)
        return new

    def double(tensor):
        assert tensor in on_cpu or tensor.dtype == torch.float64, "MPS does not have float64"
        return to_double(tensor)

    model, norms = tiny(layer_scale=0.1), vm.DualPatchNorm(start="gentle")
    other = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=16, num_heads=2, num_classes=2)
    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    monkeypatch.setattr(torch.Tensor, "double", double)
    vm.apply(model, vm.Norm("rms"))
    vm.apply(trained(other), vm.Norm("rms"), in_place=True)
    norms.fit(vm.apply(other, norms, in_place=True), [torch.randn(2, 3, 32, 32)])


SMALL = {
    "plain": {},
    "layer scale": {"layer_scale": 0.1},
    "registers": {"reg_tokens": 3, **NO_PREFIX_POSITION},
    "late prefix": {"reg_tokens": 1, "prefix_from": 2, **NO_PREFIX_POSITION},
    "no qkv bias": {"qkv_bias": False},
    "no stem bias": {"stem": {"bias": False}},
    "no positions": {"position": "none"},
    "mean after the norm": {"pool": "avg"},
    "mean before the norm": {"pool": "avg", "norm_after_pool": True, "class_token": False},
    "map": {"pool": "map"},
    "map with registers": {"pool": "map", "reg_tokens": 2, "pool_norm": NormConfig(eps=1e-3)},
    "all tokens": {"pool": "none"},
    "representation": {"representation": True},
    "map and representation": {"pool": "map", "representation": True},
    "no head but a representation": {"representation": True, "num_classes": 0},
    "map without head": {"pool": "map", "num_classes": 0},
    "class token without head": {"num_classes": 0},
    "mean after the norm, without head": {"pool": "avg", "num_classes": 0},
    "mean before the norm, without head": {"pool": "avg", "norm_after_pool": True, "num_classes": 0},
    "all tokens without head": {"pool": "none", "num_classes": 0, "reg_tokens": 2, **NO_PREFIX_POSITION},
    "norm before the blocks": {"position_norm": NormConfig(), "position_norm_on_prefix": True},
    "norm of the patches before the blocks": {"position_norm": NormConfig(), **NO_PREFIX_POSITION},
    "norm before the blocks, without gain": {"position_norm": NormConfig(affine=False)},
    "CLIP": {
        "position_norm": NormConfig(eps=1e-5),
        "position_norm_on_prefix": True,
        "stem": {"bias": False},
        "num_classes": 0,
    },
    "norms without gain": {
        "attn": BranchConfig(NormConfig(affine=False)),
        "mlp": BranchConfig(NormConfig(affine=False)),
        "final_norm": NormConfig(affine=False),
        "qkv_bias": False,
        "num_classes": 0,
    },
    "large eps": {"attn": BranchConfig(NormConfig(eps=0.3)), "final_norm": NormConfig(eps=0.1)},
    "inner norms": {
        "attn": BranchConfig(inner=NormConfig()),
        "mlp": BranchConfig(inner=NormConfig()),
        "head_scale": True,
    },
    "norms of queries and keys": {"qk_norm": NormConfig()},
    "first blocks": {
        "first_blocks": FirstBlocks(1, BranchConfig(NormConfig(eps=1e-2)), BranchConfig(inner=NormConfig()))
    },
    "rates": {"drop_path": 0.2, "proj_drop": 0.1, "attn_drop": 0.1, "pos_drop": 0.1, "head_drop": 0.1},
    "writing norms of equal gain": {
        "attn": BranchConfig(branch=NormConfig(affine=False)),
        "stem": {"bias": True, "after": NormConfig(affine=False)},
    },
}


@pytest.fixture(scope="module", params=SMALL.values(), ids=SMALL)
def pair(request):
    config = vm.ViTConfig.from_name("mu3/4", img_size=12, num_classes=5)
    model = trained(vm.ViT(vm.ViTConfig.from_dict({**vars(config), **request.param}))).double()
    return model, vm.apply(model, vm.Norm("rms"))


def test_the_function_is_the_same(pair):
    old, new = pair
    assert moved(old, new, images=3) <= 1e-12
    with pytest.raises(NoEffect):
        vm.apply(new, vm.Norm("rms"))
    single = copy.deepcopy(old).float()
    assert moved(single, vm.apply(single, vm.Norm("rms")), images=3) <= 1e-5


def test_the_stream_has_zero_mean(pair):
    """Everywhere where a norm reads it; in the old model it has not."""
    old, new = pair
    assert stream_mean(new) < 1e-12
    assert stream_mean(old) > 1e-2


def stream_mean(model):
    """The largest mean over channels that a norm before a branch or the final norm sees, relative to the deviation."""
    results = []
    readers = [m for block in model.blocks for m in (block.norm1, block.norm2)] + [model.norm, model.fc_norm]
    hooks = [
        m.register_forward_pre_hook(lambda _, args: results.append(args[0]))
        for m in readers
        if not isinstance(m, nn.Identity)
    ]
    outputs(model)
    for hook in hooks:
        hook.remove()
    assert len(results) == 2 * len(model.blocks) + 1
    return max(float(x.mean(-1).abs().max() / x.std(-1).max()) for x in results)


def test_the_norms_that_read_the_stream_are_converted_and_no_other(pair):
    old, new = pair
    has_head = not isinstance(old.head, nn.Identity) or old.pre_logits or old.attn_pool
    for before, after in zip(old.named_modules(), new.named_modules(), strict=True):
        name, module = before
        reads = (name in ("norm", "fc_norm") and has_head) or name.rpartition(".")[2] in ("norm1", "norm2")
        centered = name == "norm_pre" and getattr(module, "weight", None) is not None
        if not isinstance(module, LayerNorm):
            continue
        assert type(after[1]) is (RMSNorm if reads else CenteredLayerNorm if centered else LayerNorm), name
        assert after[1].eps == module.eps
        if reads and module.weight is not None:
            assert torch.equal(after[1].weight, module.weight)


def test_a_bias_of_queries_and_keys_is_added_only_to_take_up_a_norms():
    assert vm.apply(tiny(qkv_bias=False), vm.Norm("rms")).vit_config.qkv_bias
    plain = BranchConfig(NormConfig(affine=False))
    assert not vm.apply(tiny(qkv_bias=False, attn=plain), vm.Norm("rms")).vit_config.qkv_bias


def test_the_new_model_is_a_plain_one(pair):
    """Its config alone builds it, and every parameter is trained."""
    new = pair[1]
    twin = vm.ViT(vm.ViTConfig.from_json(new.vit_config.to_json())).double()
    twin.load_state_dict(new.state_dict())
    assert moved(new, twin) < 1e-7  # fixed positions are made in float32
    twin.train()(torch.randn(8, 3, 12, 12, dtype=torch.float64)).square().sum().backward()
    assert not [name for name, p in twin.named_parameters() if p.grad is None or not p.grad.any()]


@pytest.mark.parametrize("fields", [BIG_VISION, {}], ids=["fixed", "learned"])
def test_another_image_size_keeps_the_stream_centred(fields):
    """Fixed positions are equal up to the float32 in which both tables are made."""
    model, most = tiny(**fields).double(), 1e-6 if fields else 1e-12
    new = vm.apply(model, vm.Norm("rms"))
    assert moved(model, new) < most
    assert stream_mean(new) < most
    if fields:
        assert new.vit_config.position == "sincos2d_centered"
        assert "pos_embed" not in dict(new.named_parameters())
    for resized in (model, new):
        resized.set_input_size((20, 8), patch_size=(4, 2))
    assert moved(model, new) < most


def test_a_residual_scale_stays_while_it_is_the_same_for_all_channels():
    model = tiny(residual_scale=True).double()
    for block, factor in zip(model.blocks, (0.5, 1, -2), strict=True):
        nn.init.constant_(block.residual_scale.gamma, factor)
    new = vm.apply(model, vm.Norm("rms"))
    assert moved(model, new) < 1e-12
    assert new.blocks[2].residual_scale.gamma.unique().tolist() == [-2]
    model.blocks[1].residual_scale.gamma.data[3] = 2
    with pytest.raises(UserError, match=r"blocks\.1\.residual_scale\.gamma differs between channels"):
        vm.apply(model, vm.Norm("rms"))


@pytest.mark.parametrize("gamma", ["equal", "zero", "some zero", "tiny", "wide"])
def test_layer_scale_stays(gamma):
    model = tiny(layer_scale=0.1).double()
    for block in model.blocks:
        values = block.ls1.gamma.data
        values.mul_({"zero": 0, "tiny": 1e-9}.get(gamma, 1))
        if gamma == "equal":
            values.fill_(1e-5)
        elif gamma == "some zero":
            values[::3] = 0
        elif gamma == "wide":
            values.copy_(10.0 ** torch.linspace(-30, 0, 32))
    new = vm.apply(model, vm.Norm("rms"))
    assert moved(model, new) < 1e-12
    for a, b in zip(model.blocks, new.blocks):
        least = a.ls1.gamma.norm() / 32
        kept = a.ls1.gamma.abs() >= least
        assert torch.equal(b.ls1.gamma[kept], a.ls1.gamma[kept])
        torch.testing.assert_close(b.ls1.gamma[~kept], least.expand(int((~kept).sum())))
        assert b.attn.proj.weight.norm() < 5 * a.attn.proj.weight.norm()


@pytest.mark.parametrize(
    "kwargs",
    [
        {"init_values": 0.1, "reg_tokens": 4, "no_embed_class": True},
        {"global_pool": "avg", "fc_norm": False},
        {"global_pool": "map", "qkv_bias": False},
        {"qk_norm": True, "scale_attn_norm": True, "scale_mlp_norm": True},
        {"num_classes": 0, "global_pool": ""},
        {"model_name": "vit_base_patch32_clip_224", "num_classes": 0},
        {"model_name": "vit_small_patch14_dinov2", "img_size": 56, "num_classes": 0},
        {"model_name": "vit_base_patch16_siglip_224", "num_classes": 0},
    ],
    ids=str,
)
def test_timm_models(kwargs):
    shape = {"model_name": "vit_tiny_patch16_224", "img_size": 64, "depth": 2, "num_classes": 7}
    model = trained(timm.create_model(**shape | {"embed_dim": 48, "num_heads": 3} | kwargs))
    new = vm.apply(model, vm.Norm("rms"))
    assert moved(model, new, images=2) <= 1e-5
    assert vm.diff(model, new).preserves == "function"
    assert vm.diff(model, new).drift <= 1e-5


def test_in_evaluation_only_when_channels_are_dropped():
    """Branches that are dropped whole change nothing; channels that are dropped leave a mean behind."""
    images = torch.randn(4, 3, 12, 12, dtype=torch.float64)
    for rate, same in (({"drop_path": 0.5}, True), ({"attn_drop": 0.5}, True), ({"proj_drop": 0.5}, False)):
        model = tiny(**rate).double().train()
        new = vm.apply(model, vm.Norm("rms"))
        results = []
        for version in (model, new):
            torch.manual_seed(0)
            results.append(version(images))
        assert torch.allclose(*results, atol=1e-10) == same, rate
        assert moved(model, new) < 1e-12


def test_half_precision_and_what_is_frozen_stay():
    model = tiny().bfloat16()
    model.blocks.requires_grad_(False)
    new = vm.apply(model, vm.Norm("rms"))
    assert moved(model, new) < 5e-2
    old_names, new_names = ({n for n, p in m.named_parameters() if p.requires_grad} for m in (model, new))
    assert new_names == old_names - {"norm.bias"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"attn": BranchConfig(None, after=NormConfig())}, "post-norm"),
        ({"mlp": BranchConfig(after=NormConfig())}, "post-norm"),
        ({"mlp": BranchConfig(None)}, "without a norm"),
        ({"final_norm": None}, "without a norm"),
        ({"attn": BranchConfig(NormConfig("rms"))}, "'rms' reads"),
        ({"final_norm": NormConfig("rms")}, "'rms' reads"),
        ({"first_blocks": FirstBlocks(1, BranchConfig(NormConfig("rms")), BranchConfig())}, "'rms' reads"),
        ({"stem": {"after": NormConfig("rms")}}, "'rms' in the stem"),
        ({"stem": {"after": NormConfig("scale_shift")}}, "'scale_shift' in the stem"),
        ({"position_norm": NormConfig("rms")}, "'rms' in the stem"),
        ({"mlp": BranchConfig(branch=NormConfig("rms"))}, "'rms' in the stem, after the positions or on a branch"),
        # These are seen in the weights:
        ({"stem": {"after": NormConfig()}}, r"patch_embed\.norm\.weight differs"),
        ({"attn": BranchConfig(branch=NormConfig())}, r"norm1_branch\.weight differs"),
        ({"mlp": BranchConfig(branch=NormConfig(affine=False)), "layer_scale": 0.1}, r"ls2\.gamma differs"),
    ],
    ids=str,
)
def test_where_it_cannot_be_exact_it_is_refused_with_the_remedy(fields, says):
    config = vm.ViTConfig.from_name("mu3/4", img_size=12, num_classes=5)
    model = trained(vm.ViT(vm.ViTConfig.from_dict({**vars(config), **fields})))
    with pytest.raises(UserError, match=says) as error:
        vm.apply(model, vm.Norm("rms"))
    assert "norm(kind=rms,exact=false)" in str(error.value)
    vm.apply(model, vm.Norm("rms", exact=False))


def test_norms_are_exact_before_a_placement_alone():
    model = tiny()
    with pytest.raises(UserError, match=r"post-norm.*norm\(kind=rms,exact=false\)"):
        vm.apply(model, *vm.parse_changes("postnorm+rms"))
    for changes in ("postnorm+rms(exact=false)", "rms+postnorm"):
        vm.apply(model, *vm.parse_changes(changes))


NEW = ["dpn", "dpn(class_token=true,after_position=true)", "normformer", "subln", "layerscale", "gpsa(blocks=2)"]


@pytest.mark.parametrize("others", [*NEW, "parallel(branches=3)"])
def test_norms_that_are_new_are_no_obstacle(others):
    """Their gains are equal, so that what they write has zero mean."""
    model = vm.apply(tiny().double(), *vm.parse_changes(others))
    assert moved(model, vm.apply(model, vm.Norm("rms"))) < 1e-12
    torch.manual_seed(0)
    together = vm.apply(tiny().double(), *vm.parse_changes(others), vm.Norm("rms"))
    assert moved(model, together) < 1e-12


def test_a_part_that_an_earlier_change_makes_anew_is_refused():
    model = tiny()
    weights = {name: value for name, value in model.state_dict().items() if name != "blocks.1.mlp.fc2.weight"}
    with pytest.raises(UserError, match=r"blocks\.1\.mlp\.fc2\.weight is new"):
        vm.Norm("rms").carry(weights, model.vit_config, model.vit_config)


@pytest.mark.parametrize(
    ("fields", "first", "where"),
    [
        ({}, [vm.SubLN()], "blocks.0.mlp.norm"),
        ({"pool": "map"}, [], "attn_pool.norm"),
    ],
)
def test_norms_that_do_not_read_the_stream_stay_and_can_follow(fields, first, where):
    new = vm.apply(tiny(**fields), *first, vm.Norm("rms"))
    assert isinstance(new.get_submodule(where), LayerNorm)
    assert isinstance(vm.apply(new, vm.Norm("rms", exact=False)).get_submodule(where), RMSNorm)
    with pytest.raises(SlotConflict):
        vm.apply(tiny(), vm.Norm("rms"), vm.Norm("rms", exact=False))


def test_a_head_of_zeros():
    """The norm's bias cannot be seen behind it; a difference in what the head reads can."""
    model = tiny()
    nn.init.zeros_(model.head.weight)
    new = vm.apply(model, vm.Norm("rms"))
    assert torch.equal(outputs(model), outputs(new))
    new.blocks[1].mlp.fc2.weight.data.mul_(1.001)
    assert vm.verify(model, new) > 1e-5


def test_map_pooling_can_be_left():
    new = vm.apply(tiny(pool="map"), vm.Norm("rms"))
    new.reset_classifier(3, global_pool="avg")
    assert new.vit_config.pool_norm is None
    assert outputs(new).shape == (1, 3)


SMALL = {"num_classes": 3, "img_size": 32, "depth": 2, "embed_dim": 64, "num_heads": 2}
HF = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
IN_PLACE = {
    "clip": lambda: timm.create_model("vit_base_patch16_clip_quickgelu_224", **SMALL),
    "dinov3": lambda: timm.create_model("vit_small_patch16_dinov3", **SMALL),
    "relpos": lambda: timm.create_model("vit_relpos_small_patch16_224", **SMALL),
    "cait": lambda: timm.create_model("cait_xxs24_224", **SMALL),
    "hf dinov2": lambda: transformers.Dinov2Model(transformers.Dinov2Config(**HF)),
    "hf siglip": lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**HF, intermediate_size=64)),
}


def read(output):
    return output if isinstance(output, torch.Tensor) else output[0]


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_all_outputs_stay_and_the_norms_keep_their_biases(name):
    old = trained(IN_PLACE[name]()).double()
    new = vm.apply(old, vm.Norm("rms"), in_place=True)
    assert type(new) is type(old)
    assert new.state_dict().keys() == old.state_dict().keys()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(read(new(images)), read(old(images)), rtol=1e-8, atol=1e-8)
    loaded = repeat(IN_PLACE[name]().double().eval(), new.vm_record)
    loaded.load_state_dict(new.state_dict())
    torch.testing.assert_close(read(loaded(images)), read(new(images)))
    blocks = [m for n, m in new.named_modules() if isinstance(m, RMSNorm) and m.bias.abs().max() > 0.01]
    assert len(blocks) >= 4
    read(new(images)).square().sum().backward()
    assert all(norm.bias.grad is not None and norm.weight.grad is not None for norm in blocks)


BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
REFUSED_IN_PLACE = [
    (
        lambda: transformers.BertModel(transformers.BertConfig(**BERT)),
        NotRecognized,
        r"cannot be exact here: a norm before .* is not recognized. Write norm\(kind=rms,exact=false\)",
    ),
    (
        lambda: timm.create_model("vit_pe_lang_large_patch14_448", **SMALL | {"img_size": 28}),
        NotCertified,
        r"changes the outputs by .* Write norm\(kind=rms,exact=false\)",
    ),
    (lambda: vm.apply(IN_PLACE["dinov3"](), vm.Norm("rms"), in_place=True), NoEffect, "are not LayerNorms already"),
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED_IN_PLACE)
def test_in_place_refused(make, error, message):
    with pytest.raises(error, match=message):
        vm.apply(trained(make()), vm.Norm("rms"), in_place=True)
