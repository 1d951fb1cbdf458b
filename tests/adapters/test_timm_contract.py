"""timm's model contract on our ViT, compared with timm's own model call by call; timm's registry and optimizers; our
parts as arguments of timm's VisionTransformer."""

import copy
import io

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_layer_decay

import vitmods as vm
import vitmods.adapters.timm_models  # registers the models
from vitmods.adapters.timm import from_timm
from vitmods.adapters.timm_models import timm_block, timm_stem
from vitmods.layers import DualPatchNormStem, LayerNorm, LinearStem, RMSNorm
from vitmods.util.errors import UserError


@pytest.fixture(scope="module", params=[{}, {"reg_tokens": 2, "no_embed_class": True}], ids=str)
def both(request):
    """(ours, timm's) with the same weights"""
    sizes = {"img_size": (32, 48), "depth": 3, "embed_dim": 48, "num_classes": 5}
    reference = timm.create_model("vit_tiny_patch16_224", **sizes, **request.param)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return from_timm(reference).eval(), reference.eval()


@pytest.fixture
def pair(both):
    return copy.deepcopy(both)


@pytest.fixture
def images():
    return torch.randn(2, 3, 32, 48)


def same(a, b):
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_features_attributes_and_intermediates_that_are_missing(pair, images):
    converted, reference = pair
    features = reference.forward_features(images)
    same(converted.forward_features(images), features)
    for options in ({}, {"pre_logits": True}):
        same(converted.forward_head(features, **options), reference.forward_head(features, **options))
    names = "num_classes in_chans embed_dim num_features head_hidden_size num_prefix_tokens global_pool"
    for name in names.split():
        assert getattr(converted, name) == getattr(reference, name), name
    assert [i["module"] for i in converted.feature_info] == [i["module"] for i in reference.feature_info]
    assert converted.patch_embed.grid_size == reference.patch_embed.grid_size
    assert converted.get_classifier() is converted.head
    for wrong in ({"output_fmt": "NHWC"}, {"indices": [3]}, {"indices": 0}, {"indices": [-4]}):
        with pytest.raises(ValueError, match=r"NCHW|3 blocks"):
            converted.forward_intermediates(images, **wrong)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"indices": 2},
        {"indices": [0, 2]},
        {"indices": [-1]},
        {"indices": (0,), "stop_early": True, "intermediates_only": True},
        {"norm": True, "intermediates_only": True},
        {"output_fmt": "NLC"},
        {"return_prefix_tokens": True},
        {"return_prefix_tokens": True, "output_fmt": "NLC", "norm": True, "indices": 1},
        {"output_dict": True},
        {"output_dict": True, "return_prefix_tokens": True, "indices": 2, "intermediates_only": True},
        {"is_causal": True},
        {"attn_mask": "a band"},
    ],
    ids=str,
)
def test_intermediates(pair, images, options):
    if "attn_mask" in options:
        tokens = 6 + pair[0].num_prefix_tokens
        options = {"attn_mask": torch.ones(tokens, tokens, dtype=torch.bool).tril(2)}
    converted, reference = (model.forward_intermediates(images, **options) for model in pair)
    same(converted, reference)
    assert type(converted) is type(reference)


def test_reset_classifier(pair, images):
    converted, reference = pair
    before = {n: v.clone() for n, v in converted.state_dict().items() if not n.startswith("head")}
    for model in pair:
        model.reset_classifier(7)
    assert all(torch.equal(converted.state_dict()[n], v) for n, v in before.items())
    assert float(converted.head.weight.detach().std()) == pytest.approx(0.02, rel=0.3)
    assert converted(images).shape == reference(images).shape == (2, 7)
    assert converted.num_classes == converted.vit_config.num_classes == 7
    for pool in ("avg", ""):
        for model in pair:
            model.reset_classifier(0, pool)
        same(converted(images), reference(images))
        assert converted.global_pool == reference.global_pool == pool
    with pytest.raises(UserError, match="pool='map'"):
        converted.reset_classifier(3, "map")
    converted.double().reset_classifier(9)
    assert converted.head.weight.dtype == torch.float64
    assert not converted.training


def test_input_size(pair):
    for model in pair:
        model.set_input_size(img_size=(64, 32))
    converted, reference = pair
    images = torch.randn(2, 3, 64, 32)
    same(converted(images), reference(images))
    for model in pair:  # shapes alone: timm resizes the kernel bicubically, we bilinearly (FlexiViT's paper)
        model.set_input_size(img_size=(64, 96), patch_size=(32, 32))
    assert converted.patch_embed.proj.weight.shape == reference.patch_embed.proj.weight.shape == (48, 3, 32, 32)
    assert converted.patch_embed.grid_size == reference.patch_embed.grid_size == (2, 3)
    assert converted(torch.randn(1, 3, 64, 96)).shape == (1, 5)


def test_gradient_checkpointing_is_used(pair, images):
    converted, _ = pair
    calls = []
    converted.blocks[0].register_forward_pre_hook(lambda *args: calls.append(1))
    converted.set_grad_checkpointing(True)
    converted(images).sum().backward()
    assert len(calls) == 2  # again in backward
    converted.set_grad_checkpointing(False)
    converted(images).sum().backward()
    assert len(calls) == 3


def test_weight_decay_and_layers_are_those_of_timm(pair):
    converted, reference = (
        {
            name: (group["lr_scale"], group["weight_decay"])
            for group in param_groups_layer_decay(model, 0.1, model.no_weight_decay(), layer_decay=0.5)
            for parameter in group["params"]
            for name in [next(n for n, p in model.named_parameters() if p is parameter)]
        }
        for model in pair
    )
    assert converted == reference
    assert converted["blocks.0.attn.qkv.weight"] != converted["blocks.2.attn.qkv.weight"]
    assert converted["pos_embed"][1] == converted["cls_token"][1] == 0


@pytest.mark.parametrize(
    "changes", ["dpn", "postnorm", "normformer(head_scale=true)", "dpn(before=false,after=false,after_position=true)"]
)
def test_layer_decay_knows_where_the_parameters_of_changes_belong(pair, changes):
    model = vm.apply(pair[0], *vm.parse_changes(changes))
    groups = param_groups_layer_decay(model, 0.1, model.no_weight_decay(), layer_decay=0.5)
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    by_name = {name: scale[id(p)] for name, p in model.named_parameters()}
    assert len(by_name) == len(list(model.parameters()))
    for name, value in by_name.items():
        part, _, others = name.partition(".")
        steps = 3 - int(others[0]) if part == "blocks" else {"norm": 1, "head": 0}.get(part, 4)  # from the end
        assert value == pytest.approx(0.5**steps), name


@pytest.mark.parametrize("name", ["tiny_patch16", "small_patch32", "base_patch16", "large_patch16", "huge_patch14"])
def test_registry(name):
    assert timm.is_model(f"vitmods_{name}_224")
    small = {"depth": 1, "num_classes": 7}
    with torch.device("meta"):
        converted, reference = (timm.create_model(f"{kind}_{name}_224", **small) for kind in ("vitmods", "vit"))
    assert isinstance(converted, vm.ViT)
    assert converted.state_dict().keys() == reference.state_dict().keys()
    assert converted.num_classes == 7


def test_create_model_passes_timms_arguments_on():
    options = {
        "num_classes": 5, "img_size": 32, "in_chans": 1, "depth": 2, "embed_dim": 48, "global_pool": "avg",
        "drop_rate": 0.1, "drop_path_rate": 0.2, "init_values": 0.3, "reg_tokens": 2, "no_embed_class": True,
    }  # fmt: skip
    reference = timm.create_model("vit_tiny_patch16_224", **options)
    converted = timm.create_model("vitmods_tiny_patch16_224", **options)
    converted.load_state_dict(reference.state_dict())
    images = torch.randn(2, 1, 32, 32)
    same(converted.eval()(images), reference.eval()(images))
    assert (converted.vit_config.head_drop, converted.vit_config.drop_path) == (0.1, 0.2)


def test_create_model_with_changes_and_unknown_arguments():
    model = timm.create_model("vitmods_tiny_patch16_224", img_size=32, depth=1, changes="dpn+rms")
    assert tuple(map(str, model.changes)) == ("dpn", "rms")
    data = timm.data.resolve_model_data_config(model)
    assert (data["input_size"], data["mean"]) == ((3, 32, 32), (0.5, 0.5, 0.5))
    for kind, words, wrong in (
        (TypeError, "'drop_path_rat'", {"drop_path_rat": 0.1}),
        (UserError, "patch dropout", {"patch_drop_rate": 0.5}),
        (UserError, "init_weights", {"weight_init": "jax"}),
        (UserError, "no pretrained weights", {"pretrained": True}),
    ):
        with pytest.raises(kind, match=words):
            timm.create_model("vitmods_tiny_patch16_224", **wrong)


def test_masks_of_attention(pair, images):
    converted, reference = pair
    tokens = 6 + converted.num_prefix_tokens
    band = torch.ones(tokens, tokens, dtype=torch.bool).tril(2)
    for options in ({"attn_mask": band}, {"is_causal": True}):
        same(converted(images, **options), reference(images, **options))
        same(converted.forward_features(images, **options), reference.forward_features(images, **options))
    same(converted(images, band), reference(images, band))
    with pytest.raises(UserError, match="not both"):
        converted(images, band, True)
    with pytest.raises(UserError, match="InstanceNorm mixes tokens"):
        vm.apply(converted, vm.Norm("instance"))(images, is_causal=True)


def test_layers_as_dino_names_them(pair, images):
    for options in ({}, {"n": 2, "reshape": True}, {"n": [0], "return_prefix_tokens": True}):
        same(*(model.get_intermediate_layers(images, norm=True, **options) for model in pair))


@pytest.mark.parametrize("options", [{}, {"prune_norm": True}, {"prune_norm": True, "prune_head": False}], ids=str)
def test_pruned_models_are_timms(both, images, options):
    for index in range(3):
        pruned = copy.deepcopy(both)
        taken = [model.prune_intermediate_layers([index], **options) for model in pruned]
        assert taken[0] == taken[1]
        same(*(model(images) for model in pruned))
        names = [[n for n, _ in model.named_parameters()] for model in pruned]
        assert names[0] == names[1]


@pytest.mark.parametrize(
    "config",
    [
        {"pool": "avg", "norm_after_pool": True},
        {"pool": "map"},
        {"representation": True},
        {"prefix_from": 2, "position_on_prefix": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("prune_norm", [False, True])
def test_the_config_of_a_pruned_model_describes_it(config, prune_norm):
    torch.manual_seed(0)
    model = vm.vit("mu/8", img_size=16, depth=4, num_classes=3, drop_path=0.3, **config).eval()
    images = torch.randn(2, 3, 16, 16)
    taps = model.forward_intermediates(images, intermediates_only=True)
    for index, tap in enumerate(taps):
        pruned = copy.deepcopy(model)
        taken = pruned.prune_intermediate_layers([index], prune_norm=prune_norm)
        assert torch.equal(pruned.forward_intermediates(images, indices=taken, intermediates_only=True)[0], tap)
        fresh = vm.ViT(pruned.vit_config).eval()
        fresh.load_state_dict(pruned.state_dict())
        assert torch.equal(fresh(images), pruned(images))
        rates = [[getattr(b.drop_path1, "rate", 0.0) for b in m.blocks] for m in (pruned, fresh)]
        assert rates[0] == pytest.approx(rates[1])
    if "prefix_from" in config:
        with pytest.raises(UserError, match="prune_head"):
            model.prune_intermediate_layers([0], prune_head=False)


def test_weights_drawn_anew_are_those_of_a_new_model():
    config = vm.apply(vm.vit("mu/8", img_size=16, depth=2), *vm.parse_changes("norm(kind=batch)+gpsa")).vit_config
    with torch.device("meta"):
        model = vm.ViT(config)
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(7)
    torch.manual_seed(3)
    model.init_weights()
    torch.manual_seed(3)
    fresh = vm.ViT(config)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in fresh.state_dict().items())
    model.init_weights("big_vision")
    assert model.vit_config.init == "big_vision"
    assert not model.head.weight.any()
    kept = model.blocks[-1].norm1.weight.detach().fill_(3)
    model.init_weights("timm", needs_reset=False)
    assert model.head.weight.any()
    assert (kept == 3).all()
    with pytest.raises(UserError, match="init cannot be 'jax'"):
        model.init_weights("jax")


TINY = {"img_size": 32, "depth": 3, "embed_dim": 48, "num_classes": 5}


def test_features_only():
    images = torch.randn(2, 3, 32, 32)
    for options in ({}, {"out_indices": (0, 1)}, {"out_indices": 1}, {"feature_cls": "fx"}):
        torch.manual_seed(0)
        converted = timm.create_model("vitmods_tiny_patch16_224", features_only=True, **TINY, **options).eval()
        reference = timm.create_model("vit_tiny_patch16_224", features_only=True, **TINY, **options).eval()
        reference.load_state_dict(converted.state_dict())
        same(converted(images), reference(images))
        assert converted.feature_info.channels() == reference.feature_info.channels()
        assert converted.feature_info.reduction() == reference.feature_info.reduction()


@pytest.mark.parametrize("changes", ["", "dpn+rms", "dtn", "gpsa", "postnorm"])
def test_device_and_type(changes):
    options = {**TINY, "embed_dim": 192, "changes": changes}
    model = timm.create_model("vitmods_tiny_patch16_224", device="meta", dtype=torch.bfloat16, **options)
    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"meta"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert "+".join(map(str, model.changes)) == changes
    real = timm.create_model("vitmods_tiny_patch16_224", **options)
    assert (real.vit_config, real.changes) == (model.vit_config, model.changes)


def test_the_config_that_timm_registers():
    record = timm.get_pretrained_cfg("vitmods_small_patch32_224")
    reference = timm.get_pretrained_cfg("vit_small_patch32_224")
    for name in ("input_size", "mean", "std", "num_classes", "first_conv", "classifier", "interpolation", "crop_pct"):
        assert getattr(record, name) == getattr(reference, name), name
    model = timm.create_model("vitmods_tiny_patch16_224", pretrained_cfg_overlay={"mean": (0.1, 0.2, 0.3)}, **TINY)
    assert model.pretrained_cfg["mean"] == (0.1, 0.2, 0.3)
    assert model.default_cfg["architecture"] == "vitmods_tiny_patch16_224"


TRACED = [
    "", "dpn", "rms", "dtn", "norm(kind=batch)", "normformer", "subln", "postnorm", "gpsa",
    "stem(kind=hmlp)", "parallel(branches=3)", "layerscale", "dropkey",
    "swiglu", "qknorm", "norm(kind=dyt)",
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "training"),
    [
        *((changes, number % 2 == 1) for number, changes in enumerate(TRACED)),
        ("", True),
        ("norm(kind=batch)", True),
        ("dropkey", True),
    ],
)
def test_fx_traces_every_model(changes, training):
    torch.manual_seed(0)
    model = vm.apply(vm.vit("mu/16", img_size=32, depth=3, drop_path=0.2), *vm.parse_changes(changes)).train(training)
    images = torch.randn(8, 3, 32, 32)
    graph = torch.fx.symbolic_trace(model)
    assert [node.name for node in graph.graph.nodes if node.op == "placeholder"] == ["x"]
    outputs = []
    for form in (model, graph):
        torch.manual_seed(1)
        outputs.append(form(images))
    same(*outputs)
    with pytest.raises(TypeError):
        graph(images, keep=torch.zeros(8, 1, dtype=torch.long))


@pytest.mark.filterwarnings("ignore")
def test_torchscript_takes_the_graph(pair, images):
    converted, _ = pair
    scripted = torch.jit.script(converted)
    same(scripted(images), converted(images))
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    same(torch.jit.load(file)(images), converted(images))
    with pytest.raises(UserError, match="cannot compile RMSNorm"):
        torch.jit.script(vm.apply(converted, vm.Norm("rms")))


SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
ARGUMENTS = [
    {"embed_layer": timm_stem(LinearStem)},
    {"embed_layer": timm_stem(DualPatchNormStem)},
    {"embed_layer": timm_stem(DualPatchNormStem), "dynamic_img_size": True},
    {"embed_layer": timm_stem(LinearStem), "embed_norm_layer": RMSNorm},
    {"embed_layer": timm_stem(LinearStem), "pre_norm": True},
    {"norm_layer": RMSNorm},
    {"norm_layer": LayerNorm, "global_pool": "avg"},
    {"block_fn": timm_block},
    {"block_fn": timm_block, "norm_layer": RMSNorm, "qk_norm": True, "init_values": 0.1, "drop_path_rate": 0.1},
    {"block_fn": timm_block, "scale_attn_norm": True, "scale_mlp_norm": True, "proj_bias": False, "qkv_bias": False},
    {"block_fn": timm_block, "embed_layer": timm_stem(DualPatchNormStem), "norm_layer": RMSNorm},
]


def keywords(value):
    return ",".join(f"{k}={getattr(v, '__name__', v)}" for k, v in value.items())


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=keywords)
def test_timm_builds_and_trains_with_our_parts(arguments):
    model = VisionTransformer(**SIZES, **arguments)
    kinds = {type(m) for m in model.modules()}
    assert {v for v in arguments.values() if isinstance(v, type)} <= kinds
    images = torch.randn(2, 3, 32, 32)
    model(images).square().sum().backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None]
    if "dynamic_img_size" in arguments:
        assert model(torch.randn(1, 3, 48, 16)).shape == (1, 5)
    model.set_grad_checkpointing()
    assert model.forward_intermediates(images)[1][0].shape == (2, 32, 4, 4)


@pytest.mark.parametrize(
    "part", [{"embed_layer": timm_stem(LinearStem)}, {"norm_layer": LayerNorm}, {"block_fn": timm_block}], ids=keywords
)
def test_plain_parts_are_timms_function_with_and_without_a_mask(part):
    reference, mixed = VisionTransformer(**SIZES), VisionTransformer(**SIZES, **part)
    mixed.load_state_dict(reference.state_dict())
    images, mask = torch.randn(2, 3, 32, 32), torch.rand(17, 17) > 0.3
    mask.fill_diagonal_(True)
    for options in ({}, {"attn_mask": mask}):
        a, b = (model.forward_features(images, **options) for model in (mixed, reference))
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_meta_and_dtype_arguments():
    parts = {"block_fn": timm_block, "embed_layer": timm_stem(LinearStem), "norm_layer": RMSNorm}
    model = VisionTransformer(**SIZES, **parts, dtype=torch.bfloat16, device="meta")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in model.parameters()} == {"meta"}
