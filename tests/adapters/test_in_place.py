"""Changes in place: the class of the library, with insertions that compute what a vitmods ViT with the change does."""

import contextlib
import copy
import functools
import pickle
import random
import re
import warnings
from itertools import product

import peft
import pytest
import timm
import torch
import transformers as hf
from torch import nn

import vitmods as vm
from vitmods.adapters.parts import find_parts
from vitmods.changes.compose import check_conflicts
from vitmods.util.errors import NoEffect, NotCertified, NotRecognized, UnfitStem, UserError

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION = {**SIZES, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
TEXT = {**SIZES, "intermediate_size": 64, "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"num_classes": 3, "img_size": 32, "depth": 2, "embed_dim": 64, "num_heads": 2}
SWIN = {"num_classes": 3, "img_size": 56, "embed_dim": 24, "depths": (1, 1), "num_heads": (2, 4)}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "timm vit": lambda: timm.create_model("vit_tiny_patch16_224", **SMALL),
    "timm vit with norms inside": lambda: timm.create_model("vit_tiny_patch16_224", **SMALL, scale_mlp_norm=True),
    "timm dinov3": lambda: timm.create_model("vit_small_patch16_dinov3", **SMALL),
    "timm beit": lambda: timm.create_model("beit_base_patch16_224", **SMALL),
    "timm relpos": lambda: timm.create_model("vit_relpos_small_patch16_224", **SMALL),
    "timm swin": lambda: timm.create_model("swin_tiny_patch4_window7_224", **SWIN),
    "hf dinov2": lambda: hf.Dinov2Model(hf.Dinov2Config(**SIZES, image_size=32, patch_size=8)),
    "hf siglip": lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**VISION)),
    "hf bert": lambda: hf.BertModel(hf.BertConfig(**TEXT)),
    "hf gpt2": lambda: hf.GPT2Model(hf.GPT2Config(**GPT2)),
    "hf llama": lambda: hf.LlamaModel(hf.LlamaConfig(**TEXT, num_key_value_heads=2)),
}


FACTORS = r"\.(gamma_\d|lambda1|ls\d\.gamma)$"
"""names of LayerScale in these models"""


@torch.no_grad()
def make(name):
    """A model in which every part matters, as after training; factors of branches are alike, as before it."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for place, parameter in model.named_parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
        if re.search(FACTORS, place):
            parameter.fill_(0.7)
    return model


def inputs_of(model):
    torch.manual_seed(1)
    if hasattr(getattr(model, "config", None), "vocab_size"):
        return torch.randint(3, 50, (2, 6))
    return torch.randn(2, 3, *getattr(getattr(model, "patch_embed", None), "img_size", (32, 32)))


def output_of(model, inputs):
    output = model(inputs)
    return output if isinstance(output, torch.Tensor) else output[0]


def change(model, text):
    return vm.apply(model, *vm.parse_changes(text), in_place=True)


IMAGES = [name for name in MODELS if name not in ("hf bert", "hf gpt2", "hf llama")]


ALIKE = ("timm vit with norms inside", "timm dinov3", "timm relpos", "hf siglip", "hf gpt2")
"""models whose blocks are put together as those of another one"""
CHECKED = ("timm vit", "timm swin", "hf dinov2")
"""models that are changed by query norms and normformer in tests below"""
TEXTS = ("layerscale(init=1.0)", "qknorm", "dpn+subln(rescale=false)", "normformer", "norm(kind=rms,exact=false)")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        pytest.param(text, name, marks=[pytest.mark.long] * (text in repeated))
        for name in MODELS
        for repeated in [TEXTS[1:] if name in ALIKE else ("qknorm", "normformer") if name in CHECKED else ()]
        for text in TEXTS
    ],
)
def test_a_model_keeps_its_class_and_its_weights(name, text):
    model = make(name)
    if name == "hf llama":
        text = text.replace("norm(kind=rms,exact=false)", "norm(kind=layer)")
    if name not in IMAGES and "dpn" in text:
        with pytest.raises(UserError, match="one projection of patches"):
            change(model, "dpn")
        text = text.removeprefix("dpn+")
    before, state = output_of(model, inputs_of(model)), torch.get_rng_state()
    changed = change(model, text)
    assert torch.equal(torch.get_rng_state(), state) or not text.startswith("layerscale")
    assert type(changed) is type(model)
    weights, new = model.state_dict(), changed.state_dict()
    if not text.startswith("norm("):
        assert all(torch.equal(new[key], value) for key, value in weights.items())
        assert new.keys() - weights.keys()
    after = output_of(changed, inputs_of(changed))
    if text == "layerscale(init=1.0)":
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    else:
        assert (after - before).abs().max() > 1e-4
    torch.testing.assert_close(output_of(model, inputs_of(model)), before)  # the old model is untouched


NAMES = (
    (r"patch_embed\.proj\.stem\.", "patch_embed."),
    (r"patch_embed\.vm_proj_norms_\w+\.norm_before", "patch_embed.norm_before"),
    (r"patch_embed\.vm_proj_norms_\w+\.norm_after", "patch_embed.norm"),
    (r"(attn|mlp)\.vm_\w+_norm_before\.norm", r"\1.norm"),
    (r"attn\.vm_norm_after\.norm", "norm1_branch"),
    (r"mlp\.vm_norm_after\.norm", "norm2_branch"),
    (r"attn\.vm_gate\.gate\.", "attn.gate."),
)
"""Parameter of a timm ViT that was changed in place -> of a vitmods ViT."""
PIECES = (
    "layerscale(init=0.3)",
    "qknorm",
    "qknorm(norm=rms)",
    "dpn",
    "dpn(before=false)",
    "dpn(after=false,norm=rms)",
    "subln(rescale=false)",
    "normformer",
    "placement(attn=post,mlp=post,reading=branch)",
    "placement(attn=pre+post,reading=branch)",
    "norm(kind=rms,exact=false)",
    "norm(kind=scale)",
    "swiglu",
    "stem(kind=hmlp,norm=layer)",
)


FIRST = ("norm(", "swiglu", "stem(")


def composition(index):
    """One to four changes that go together. What replaces modules comes first: in place it leaves insertions alone."""
    draw = random.Random(index)
    chosen = []
    for piece in sorted(draw.sample(PIECES, draw.randint(1, 4)), key=lambda piece: not piece.startswith(FIRST)):
        with contextlib.suppress(UserError):
            check_conflicts(vm.parse_changes("+".join([*chosen, piece])))
            chosen.append(piece)
    return "+".join(chosen)


EVERY_PIECE = (0, 6, 9, 11, 18, 22)
"""compositions in which each piece is at least once"""
GATED = ["gate+subln(rescale=false)", "subln(rescale=false)+gate", "gate(per=head)+qknorm"]


@pytest.mark.parametrize(
    "index",
    [*GATED, *(pytest.param(index, marks=[pytest.mark.long] * (index not in EVERY_PIECE)) for index in range(200))],
)
def test_compositions_compute_what_a_vitmods_vit_computes(index):
    text = index if isinstance(index, str) else composition(index)
    model = make("timm vit").double()
    read, in_place = vm.apply(model, *vm.parse_changes(text)), change(model, text)
    torch.manual_seed(len(text))
    weights = read.state_dict()
    names = {}
    for name, parameter in in_place.named_parameters():
        names[name] = name
        for pattern, replacement in NAMES:
            names[name] = re.sub(pattern, replacement, names[name])
        with torch.no_grad():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
        weights[names[name]] = parameter.detach().clone()
    assert weights.keys() == {*names.values()}
    read.load_state_dict(weights)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    outputs = []
    for net in (read, in_place):
        output = net(images)
        output.square().sum().backward()
        outputs.append(output)
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-9)
    gradients = dict(read.named_parameters())
    for name, parameter in in_place.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[names[name]].grad, rtol=1e-8, atol=1e-8)


class Logits(nn.Module):
    """Images -> a tensor, and with labels the loss, as trainers and exporters need."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.training = model.training  # exporters return every module to the mode of the outermost

    def forward(self, pixel_values, labels=None):
        output = output_of(self.model, pixel_values)
        return output if labels is None else {"loss": output.square().mean(), "logits": output.flatten(1)}


@functools.cache
def changed_model(name):
    """The changed model, its input and output."""
    model = change(make(name), "layerscale(init=0.5)+qknorm+normformer" + "+dpn" * (name in IMAGES))
    inputs = inputs_of(model)
    return model, inputs, output_of(model, inputs).detach()


def equal(output, expected, tolerance=1e-5):
    """Up to a part of the largest."""
    assert (output - expected).abs().max() <= tolerance * expected.abs().max()


def gradients(model, inputs):
    model.zero_grad()
    model(inputs).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_copies(name, model, inputs, expected, folder):
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        equal(output_of(other, inputs), expected, 0)
        for parameter in other.parameters():  # the copy's hooks call the copy's modules
            nn.init.zeros_(parameter)
        equal(output_of(model, inputs), expected, 0)


def check_state_dict(name, model, inputs, expected, folder):
    fresh = change(make(name), "layerscale(init=0.5)+qknorm+dpn+normformer")
    for parameter in fresh.parameters():
        nn.init.normal_(parameter)
    fresh.load_state_dict(model.state_dict())
    equal(output_of(fresh, inputs), expected, 0)


def check_files(name, model, inputs, expected, folder):
    vm.save_pretrained(model, folder, base=ORIGINS.get(name))
    again = vm.from_pretrained(folder)
    assert type(again) is type(model)
    equal(output_of(again, inputs), expected, 0)


ORIGINS = {
    "timm vit": "timm:vit_tiny_patch16_224?depth=2&embed_dim=64&num_heads=2",
    "timm dinov3": "timm:vit_small_patch16_dinov3?depth=2&embed_dim=64&num_heads=2",
    "timm swin": "timm:swin_tiny_patch4_window7_224?embed_dim=24&depths=(1,1)&num_heads=(2,4)",
}


def check_compile(name, model, inputs, expected, folder):
    torch._dynamo.reset()
    equal(torch.compile(Logits(model), fullgraph=True, backend="eager")(inputs), expected)


def check_export(name, model, inputs, expected, folder):
    equal(torch.export.export(Logits(model), (inputs,)).module()(inputs), expected)


def check_onnx(name, model, inputs, expected, folder, dynamo=False):
    onnxruntime = pytest.importorskip("onnxruntime")
    path = folder / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {} if dynamo else {"opset_version": 18}
        torch.onnx.export(Logits(model), (inputs,), path, dynamo=dynamo, verbose=False, **options)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    equal(torch.from_numpy(session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0]), expected)


def check_onnx_of_dynamo(*given):
    check_onnx(*given, dynamo=True)


def check_lora(name, model, inputs, expected, folder):
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    config = peft.LoraConfig(target_modules=linear, init_lora_weights=False)
    tuned = peft.get_peft_model(copy.deepcopy(model), config)
    before = output_of(tuned, inputs).detach()
    assert (before - expected).abs().max() > 1e-3
    equal(output_of(tuned.merge_and_unload(), inputs), before)


def check_distributed(name, model, inputs, expected, folder):
    model = Logits(copy.deepcopy(model))
    single = gradients(model, inputs)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        shared = gradients(wrapped, inputs)
    finally:
        torch.distributed.destroy_process_group()
    assert single.keys() == {key.removeprefix("module.") for key in shared}
    for key, gradient in single.items():
        torch.testing.assert_close(shared[f"module.{key}"], gradient)


def check_gradient_checkpointing(name, model, inputs, expected, folder):
    plain, saving = copy.deepcopy(model), copy.deepcopy(model)
    for module in (*plain.modules(), *saving.modules()):  # in training, without random paths
        module.training = not isinstance(module, timm.layers.DropPath)
    if name.startswith("timm"):
        saving.set_grad_checkpointing()
    else:
        saving.gradient_checkpointing_enable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [gradients(Logits(net), inputs) for net in (plain, saving)]
    assert results[0].keys() == results[1].keys()
    for key, gradient in results[0].items():
        torch.testing.assert_close(results[1][key], gradient)


def check_precision(name, model, inputs, expected, folder):
    with torch.autocast("cpu", torch.bfloat16):
        equal(output_of(model, inputs).float(), expected, 0.1)
    equal(output_of(copy.deepcopy(model).double(), inputs.double()).float(), expected)


def check_trainer(name, model, inputs, expected, folder):
    pytest.importorskip("accelerate")
    model = Logits(copy.deepcopy(model))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    images = [{"pixel_values": image, "labels": torch.tensor(0)} for image in inputs]
    arguments = hf.TrainingArguments(
        str(folder), max_steps=2, learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True
    )
    hf.Trainer(model, arguments, train_dataset=images).train()
    parameters = dict(model.named_parameters())
    still = {key for key, value in parameters.items() if value.grad is not None and value.equal(before[key])}
    assert not [key for key in still if "vm_" in key]


CHECKS = [value for key, value in globals().items() if key.startswith("check_") and key != "check_conflicts"]


ONCE = {
    check_compile: ("timm vit", "hf dinov2"),
    check_copies: ("timm vit", "hf dinov2"),
    check_onnx: ("hf dinov2",),
    check_onnx_of_dynamo: ("timm vit",),
    check_trainer: ("hf dinov2",),
    check_distributed: ("timm vit",),
    check_precision: ("timm vit", "hf dinov2"),
}
"""checks that look at no block (slow graphs, trainers, copies, types), and the models for which every run makes them"""


def each_check():
    for name, check in product(["timm vit", "timm dinov3", "timm swin", "hf dinov2"], CHECKS):
        title = f"{name}-{check.__name__.removeprefix('check_')}"
        yield pytest.param(name, check, id=title, marks=[pytest.mark.long] * (name not in ONCE.get(check, [name])))
    yield pytest.param("hf llama", check_lora, id="hf llama-lora")


@pytest.mark.parametrize(("name", "check"), each_check())
def test_a_changed_model_does_what_models_do(name, check, tmp_path):
    check(name, *changed_model(name), tmp_path)


def test_a_model_that_is_compiled_before_its_first_call_hooks_the_wrapped_maps():
    model = change(timm.create_model("vit_tiny_patch16_224", **SMALL | {"depth": 1}).eval(), "qknorm+normformer")
    config = peft.LoraConfig(target_modules=["qkv", "proj", "fc1", "fc2"], init_lora_weights=False)
    eager, *others, whole = (peft.get_peft_model(copy.deepcopy(model), config) for _ in range(4))
    images = inputs_of(model)
    for compiled in others:  # also where code is reused that was compiled for another model
        compiled.load_state_dict(eager.state_dict())
        for _ in range(2):
            equal(torch.compile(compiled, backend="eager")(images), eager(images))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Run a model once before compiling it"):
        torch.compile(whole, fullgraph=True, backend="eager")(images)


def test_norms_of_queries_that_are_not_reached_are_an_error():
    """BEiT of timm gives queries and keys to fused attention alone, which can be turned off."""
    beit = make("timm beit")
    model, images = change(beit, "qknorm"), torch.randn(2, 3, 32, 32)
    model(images)
    model.blocks[0].attn.fused_attn = False
    with pytest.raises(UserError, match="leave its fused attention on"):
        model(images)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_changed_model_of_another_type_is_written_and_opened(dtype, tmp_path):
    model = change(make("timm vit").to(dtype), "dpn")
    opened = vm.from_pretrained(vm.save_pretrained(model, tmp_path / "model", base=ORIGINS["timm vit"]))
    assert {p.dtype for p in opened.parameters()} == {dtype}
    images = inputs_of(model).to(dtype)
    assert opened(images).equal(model.eval()(images))


TWICE = "normalizes its queries and keys already"


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("timm vit with norms inside", "swiglu", NotRecognized, r"replaces the MLP \S+mlp and would lose \S+mlp.norm"),
        ("timm beit", "parallel", UserError, "'parallel' needs a model that vm.apply can read"),
        ("hf llama", "swiglu", NoEffect, "mlp is gated already"),
        ("hf bert", "swiglu", NotRecognized, "that of encoder.layer.0 is not one module"),
        ("hf bert", "rms", NotRecognized, "cannot be exact here"),
        ("hf bert", "hmlp", UnfitStem, "needs a stem of one projection of patches"),
        ("timm vit", "normformer+swiglu", UserError, "of an earlier change out: give it first"),
        ("timm beit", "subln", UserError, r"write subln\(rescale=false\)"),
        ("timm beit", "postnorm", UserError, "write reading=branch"),
        ("timm beit", "normformer(head_scale=true)", UserError, "write normformer for only the two norms"),
        ("timm beit", "dpn(after_position=true)", UserError, "needs a model that vm.apply can read"),
        ("hf bert", "placement(attn=post,reading=branch)", UserError, "a norm before .* is not recognized"),
        ("hf llama", "norm(kind=rms,exact=false)", NoEffect, "no norm to replace"),
        ("hf gpt2", "dpn", UserError, "needs a stem of one projection of patches"),
        (lambda: nn.Linear(4, 4), "layerscale", UserError, "no block with attention is recognized|No input"),
        (lambda: nn.DataParallel(make("timm vit")), "layerscale", UserError, "model.module"),
        (lambda: make("timm beit").to("meta"), "layerscale", UserError, "meta device"),
        (lambda: timm.create_model("vit_tiny_patch16_224", **SMALL, qk_norm=True), "qknorm", NoEffect, TWICE),
        (lambda: change(make("hf dinov2"), "qknorm"), "qknorm", NoEffect, TWICE),
    ],
)
def test_what_cannot_be_put_in_is_refused(name, text, error, message):
    with pytest.raises(error, match=message):
        change(make(name) if isinstance(name, str) else name(), text)


@pytest.mark.parametrize("name", ["timm vit", "timm beit", "timm dinov3", "hf siglip"])
def test_the_first_example_of_the_readme_works_or_says_what_does(name):
    model, images = make(name), inputs_of(make(name))
    try:
        changed = vm.apply(model, vm.DualPatchNorm(), vm.Norm("rms"))
    except UserError as error:
        remedy = re.search(r"Write (norm\(.*?\)),", str(error))[1]
        changed = change(model, f"dpn+{remedy}")
    assert output_of(changed, images).isfinite().all()
    assert "norm" in str(vm.diff(model, changed))


def test_a_model_that_cannot_be_read_is_changed_in_place_without_being_asked():
    model = make("timm swin")
    assert type(vm.apply(model, vm.LayerScale())) is type(model)
    assert isinstance(vm.apply(make("timm vit"), vm.LayerScale()), vm.ViT)
    with pytest.raises(UserError, match="not covered"):
        vm.apply(model, vm.LayerScale(), in_place=False)
    with pytest.raises(UserError, match="tried in place, since the model cannot be read"):
        vm.apply(model, vm.Parallel())


@pytest.mark.parametrize("name", ["timm beit", "hf dinov2", "timm vit"])
def test_factors_that_were_trained_are_not_multiplied(name):
    model = make(name) if name != "timm vit" else change(make(name), "layerscale(init=0.5)")
    change(model, "layerscale(init=0.5)")
    factor = next(p for place, p in model.named_parameters() if re.search(FACTORS, place) or "ls1" in place)
    with torch.no_grad():
        factor[0] += 0.1
    with pytest.raises(UserError, match="LayerScale of this model was trained"):
        change(model, "layerscale(init=0.5)")
    change(model, "layerscale(init=1.0)")  # which alters nothing


def test_a_second_change_at_the_same_place_is_kept_beside_the_first():
    model = make("hf dinov2")
    once = change(model, "layerscale(init=0.5)")
    twice, quarter = change(once, "layerscale(init=0.5)"), change(model, "layerscale(init=0.25)")
    inputs = inputs_of(model)
    torch.testing.assert_close(output_of(twice, inputs), output_of(quarter, inputs))
    counts = [len([*net.parameters()]) for net in (model, once, twice)]
    assert counts[2] - counts[1] == counts[1] - counts[0]


@pytest.mark.parametrize("name", [pytest.param("hf dinov2", marks=pytest.mark.long), "hf bert"])
def test_a_branch_is_normalized_before_it_is_scaled(name):
    """A norm behind the scale would cancel it."""
    model = make(name)
    inputs, sizes = inputs_of(model), []
    first = next(b.module for b in find_parts(model, ((inputs,), {})).branches if b.kind == "attn")
    for factor in ("1e-4", "1.0"):
        changed = change(model, f"layerscale(init={factor})+normformer")
        changed.get_submodule(first).register_forward_hook(lambda m, a, out: sizes.append(out))
        output_of(changed, inputs)
    small, large = (out if isinstance(out, torch.Tensor) else out[0] for out in sizes)
    torch.testing.assert_close(small.abs().mean(), large.abs().mean() * 1e-4, rtol=1e-2, atol=0)


def test_the_comparison_says_where_a_factor_of_post_norm_blocks_is():
    for name, times in (("hf bert", 1), ("hf dinov2", 0)):
        model = make(name)
        text = str(vm.diff(model, change(model, "layerscale")))
        assert text.count("it sits on the branches, before the norms of the sums") == times


class Reading(nn.LayerNorm):
    """Normalizes with statistics of its own."""

    def forward(self, x):
        return super().forward(x) + x.amax(-1, keepdim=True)


class Encoder(nn.Module):
    """Two blocks of a timm ViT on tokens (B, N, 32), each of which may see those before it alone."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        block = timm.models.vision_transformer.Block
        self.blocks = nn.ModuleList(block(32, 4, norm_layer=norm) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, attn_mask=torch.ones(x.shape[1], x.shape[1]).tril().log())
        return x


def test_norms_are_swapped_where_the_same_norm_again_keeps_the_outputs():
    vm.apply(Encoder(), vm.Norm("scale"))
    with pytest.raises(NotCertified, match="in its neutral form it changes the outputs"):
        vm.apply(Encoder(norm=Reading), vm.Norm("scale"))
    vm.apply(Encoder(), vm.LayerScale(), vm.QKNorm())
    with pytest.raises(NotCertified, match="is causal, and tokens would see later ones"):
        vm.apply(Encoder(), vm.Norm("instance"))


def test_models_without_attention_take_other_norms_alone_and_a_model_of_tokens_gets_an_input_of_its_width():
    mixer = timm.models.mlp_mixer.MlpMixer(3, img_size=64, num_blocks=2, embed_dim=32)
    assert vm.apply(mixer, vm.Norm("scale"))(torch.randn(2, 3, 64, 64)).shape == (2, 3)
    with pytest.raises(NotRecognized, match="no block with attention is recognized"):
        vm.apply(mixer, vm.LayerScale())
    layer = nn.TransformerEncoderLayer(24, 4, 48, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert change(model, "layerscale(init=1.0)")(torch.randn(2, 5, 24)).shape == (2, 5, 24)
