"""Hugging Face's ViTs as ours and back, as objects and as saved folders: outputs, gradients, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import vitmods as vm
from vitmods.adapters import coverage, from_huggingface, load, to_huggingface
from vitmods.adapters.apply import as_vit
from vitmods.adapters.huggingface import read_saved
from vitmods.util.errors import UserError

transformers = pytest.importorskip("transformers", reason="needs the hf extra: pip install 'vitmods[hf]'")


def small(kind="ViTForImageClassification", more=None, **options):
    kind = getattr(transformers, kind)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    sizes |= {"image_size": 32, "patch_size": 8, "num_labels": 5, **options}
    if kind.config_class in (transformers.SiglipConfig, transformers.CLIPConfig):
        sizes = {"vision_config": sizes, "num_labels": 5}
    return kind(kind.config_class(**sizes), **(more or {}))


MODELS = {
    "classification": {},
    "pooler": {"kind": "ViTModel"},
    "no pooler": {"kind": "ViTModel", "more": {"add_pooling_layer": False}},
    "eps": {"layer_norm_eps": 1e-3},
    "no qkv bias": {"qkv_bias": False},
    "dropout": {"attention_probs_dropout_prob": 0.2},
    "not square": {"image_size": [32, 48], "patch_size": [8, 16], "num_channels": 1},
    "eager attention": {"attn_implementation": "eager"},
    **{f"gelu_{act}": {"hidden_act": f"gelu_{act}"} for act in ("new", "fast", "pytorch_tanh", "python", "accurate")},
}


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(scatter, same_function, tmp_path, name):
    reference = scatter(small(**MODELS[name]))
    converted = from_huggingface(reference)
    size = (converted.vit_config.in_chans, *converted.vit_config.img_size)
    same_function(output(reference), converted, size)
    back = to_huggingface(converted)
    assert type(back) is type(reference)
    same_function(output(reference), output(back), size)
    assert back.state_dict().keys() == reference.state_dict().keys()
    assert from_huggingface(back).vit_config == converted.vit_config
    rates = converted.vit_config.attn_drop, converted.blocks[1].attn.attn_drop
    assert {*rates} == {reference.config.attention_probs_dropout_prob}
    reference.save_pretrained(tmp_path)
    loaded = load(tmp_path / "model.safetensors")
    assert not loaded.training
    same_function(converted, loaded, size)


def test_names_of_version_4(scatter, same_function):
    """Saved files and models of version 4 have other names inside a block than models of version 5."""
    reference = scatter(small())
    names = {
        "layers.": "encoder.layer.", "attention.q_proj": "attention.attention.query",
        "attention.k_proj": "attention.attention.key", "attention.v_proj": "attention.attention.value",
        "attention.o_proj": "attention.output.dense", "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense",
    }  # fmt: skip

    def old(name):
        for new, before in names.items():
            name = name if before in name else name.replace(new, before)
        return name

    tensors = {old(name): value for name, value in reference.state_dict().items()}
    assert "vit.encoder.layer.0.attention.attention.query.weight" in tensors
    converted, account = read_saved("old", tensors, reference.config.to_dict())
    same_function(output(reference), converted.eval())
    assert len(account.rows) == len(converted.state_dict())


def test_changes_apply(scatter, same_function):
    reference = scatter(small())
    reference.train()
    reference.vit.embeddings.requires_grad_(False)
    reference.gradient_checkpointing_enable()
    converted = vm.apply(reference, vm.LayerScale(1.0))
    assert converted.training
    assert converted.grad_checkpointing
    assert not converted.patch_embed.proj.weight.requires_grad
    assert not converted.cls_token.requires_grad
    assert converted.blocks[0].attn.qkv.weight.requires_grad
    same_function(output(reference.eval()), converted.eval())
    assert "patch_embed.norm_before" in vm.diff(reference, vm.apply(reference, vm.DualPatchNorm())).added
    back = to_huggingface(from_huggingface(reference))
    assert {n for n, p in back.named_parameters() if not p.requires_grad} == {
        n for n in back.state_dict() if n.startswith("vit.embeddings")
    }


def test_what_is_not_used_is_listed(scatter):
    reference = scatter(small("ViTModel", {"use_mask_token": True}))
    account = coverage(reference)
    assert [name for name, _ in account.left_out] == ["embeddings.mask_token"]
    assert {n for row in account.rows for n in row.theirs} | {"embeddings.mask_token"} == set(reference.state_dict())
    assert "left out: embeddings.mask_token (stands for masked patches" in str(account)


FAMILIES = [
    ("DeiTModel", {}),
    ("DeiTForImageClassification", {}),
    ("DeiTForImageClassificationWithTeacher", {}),
    ("Dinov2Model", {}),
    ("Dinov2ForImageClassification", {"use_swiglu_ffn": True}),
    ("Dinov2WithRegistersModel", {"num_register_tokens": 2}),
    ("Dinov2WithRegistersForImageClassification", {}),
    ("ViTMAEModel", {}),
    ("ViTMSNModel", {}),
    ("ViTMSNForImageClassification", {}),
    ("IJepaModel", {}),
    ("IJepaForImageClassification", {}),
    ("SiglipVisionModel", {}),
    ("SiglipForImageClassification", {}),
    ("CLIPVisionModel", {}),
    ("CLIPForImageClassification", {}),
    ("BeitModel", {"use_absolute_position_embeddings": True}),
    ("BeitForImageClassification", {"use_mean_pooling": False, "use_relative_position_bias": True}),
    ("Data2VecVisionModel", {"use_relative_position_bias": True}),
    ("Data2VecVisionForImageClassification", {}),
]


def output(model, pool="token"):
    """What our ViT gives for a model of theirs; a masked autoencoder's encoder sees all patches, in order."""

    def call(images):
        options = {}
        if hasattr(model.config, "mask_ratio"):
            model.config.mask_ratio, options["noise"] = 0.0, torch.arange(16).expand(len(images), -1)
        outputs = model(images, **options)
        if hasattr(outputs, "logits"):
            return outputs.logits
        if getattr(outputs, "pooler_output", None) is not None:
            return outputs.pooler_output
        return outputs.last_hidden_state.mean(1) if pool == "avg" else outputs.last_hidden_state[:, 0]

    return call


@pytest.mark.parametrize(("kind", "options"), FAMILIES, ids=str)
def test_families_are_read_from_memory_and_folders_and_saved_back(scatter, same_function, tmp_path, kind, options):
    reference = scatter(small(kind, **options))
    reference.save_pretrained(tmp_path / "theirs")
    converted, loaded = from_huggingface(reference), load(tmp_path / "theirs")
    assert loaded.vit_config == converted.vit_config
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, converted.state_dict()[name]), name
    back = to_huggingface(loaded, like=reference)
    back.save_pretrained(tmp_path / "back")
    expected = output(reference, converted.vit_config.pool)
    same_function(expected, converted)
    same_function(expected, output(back, converted.vit_config.pool))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert {name: value.shape for name, value in before.items()} == {name: value.shape for name, value in after.items()}
    changed = vm.apply(reference, vm.DualPatchNorm(), in_place=False)
    with pytest.raises(UserError, match=r"does not have: .*stem\.before"):
        to_huggingface(changed, like=reference)


def test_a_wrapped_model_of_timm_is_read_and_saved_back(scatter, tmp_path):
    sizes = {"img_size": 32, "depth": 2, "embed_dim": 32, "num_heads": 2}
    config = transformers.TimmWrapperConfig(architecture="vit_tiny_patch16_224", num_labels=3, model_args=sizes)
    reference = scatter(transformers.TimmWrapperForImageClassification(config))
    reference.save_pretrained(tmp_path / "theirs")
    to_huggingface(load(tmp_path / "theirs"), like=reference).save_pretrained(tmp_path / "back")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(as_vit(reference).eval()(images), reference(images).logits)
    assert type(vm.apply(reference, vm.DualPatchNorm()).patch_embed).__name__ == "DualPatchNormStem"


def is_query(name):
    return name.endswith(("q_proj.weight", "query.weight"))


def changed(act):
    model = small()
    act(model)
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: small(hidden_act="relu"), "hidden_act relu"),
        (lambda: small(hidden_dropout_prob=0.1), "hidden_dropout_prob above 0"),
        (lambda: small("ViTModel", pooler_act="relu"), "pooler_act relu"),
        (lambda: small("ViTModel", pooler_output_size=16), r"pre_logits.weight is \(16, 32\)"),
        (lambda: small("ViTForMaskedImageModeling"), "ViTForMaskedImageModeling is not covered"),
        (lambda: small("BeitModel", use_shared_relative_position_bias=True), "all blocks share.*in_place=True.$"),
        (lambda: small("CLIPVisionModelWithProjection"), "CLIPVisionModelWithProjection is not covered"),
        (lambda: transformers.BertModel(transformers.BertConfig(num_hidden_layers=1)), "BertModel is not covered"),
        (lambda: changed(lambda m: m.add_module("more", nn.Linear(2, 2))), "without a place here: more.bias"),
        (lambda: small(dtype=torch.bfloat16).bfloat16(), r"in bfloat16.*model.float\(\)"),
        (lambda: changed(lambda m: m.vit.layernorm.register_forward_hook(lambda *args: args[-1] * 2)), "tokens differ"),
        (
            lambda: changed(lambda m: [p.requires_grad_(False) for n, p in m.named_parameters() if is_query(n)]),
            "a part of blocks.*.attn.qkv.weight .* is frozen",
        ),
    ],
)
def test_what_cannot_be_read_is_named(make, says):
    with pytest.raises(UserError, match=says):
        from_huggingface(make())


def test_saved_folders_that_cannot_be_read(tmp_path):
    small().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for changed, settings, words in (
        ({}, {"num_heads": 2}, "leave num_heads out"),
        ({"model_type": "vit_det"}, {}, "model_type vit_det"),
        ({"num_hidden_layers": 1}, {}, r"without a place here: .*encoder.layer.\*"),
    ):
        path.write_text(json.dumps({**config, **changed}))
        with pytest.raises(UserError, match=words):
            load(tmp_path, **settings)
    path.unlink()
    with pytest.raises(UserError, match=r"needs a readable config\.json"):
        load(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(UserError, match="nor an index of them"):
        load(tmp_path)
