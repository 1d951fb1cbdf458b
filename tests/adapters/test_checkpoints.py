"""Checkpoints that people bring: the same weights in the forms that training scripts write, and published releases."""

import argparse
import json
import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from timm.layers import LayerNorm, QuickGELU, SwiGLUPacked
from timm.models import beit, eva, vision_transformer
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import vitmods as vm
from vitmods.adapters import coverage, load, open_checkpoint
from vitmods.layers.position import RotaryPositions
from vitmods.ops.rotary import RopeConfig
from vitmods.study.checkpoints import Checkpoint, Start, is_checkpoint
from vitmods.util.errors import UserError

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 5}
HEADS = {"num_heads": 2}


@pytest.fixture
def small(scatter):
    return lambda kind=VisionTransformer, **options: scatter(kind(**(SIZES | options)))


def under(prefix, tensors):
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def inside_blocks(word, tensors):
    """As wrappers of parts of a model write names: ``blocks.0._orig_mod.norm1``."""
    return {re.sub(r"^(blocks\.\d+\.)", rf"\1{word}.", name): tensor for name, tensor in tensors.items()}


def others(tensors):
    """Other weights of the same model."""
    return {name: tensor + 0.1 for name, tensor in tensors.items()}


def sharded(tensors, folder, ending):
    names = list(tensors)
    index = {"weight_map": {}}
    for part, chosen in enumerate((names[::2], names[1::2])):
        file = f"{'model' if ending == 'safetensors' else 'pytorch_model'}-0000{part + 1}-of-00002.{ending}"
        write = save_file if ending == "safetensors" else torch.save
        write({name: tensors[name] for name in chosen}, folder / file)
        index["weight_map"] |= dict.fromkeys(chosen, file)
    stem = "model" if ending == "safetensors" else "pytorch_model"
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps(index))
    return folder


def with_optimizer(tensors):
    parameters = [nn.Parameter(tensor.clone()) for tensor in tensors.values()]
    optimizer = torch.optim.AdamW(parameters)
    sum(parameter.sum() for parameter in parameters).backward()
    optimizer.step()
    return {"model_state_dict": tensors, "optimizer_state_dict": optimizer.state_dict(), "epoch": 3}


def of_timm(tensors):
    """What timm's train.py writes."""
    beside = {"epoch": 1, "arch": "vit", "args": argparse.Namespace(lr=0.1), "metric": 0.5}
    return {"state_dict": others(tensors), "state_dict_ema": tensors, **beside}


def of_dino(tensors):
    head = {"head.mlp.0.weight": torch.ones(2)}
    student = under("module.", under("backbone.", others(tensors)) | head)
    return {"student": student, "teacher": under("backbone.", tensors) | head, "loss": {"center": torch.ones(2)}}


def of_lightning(prefix, tensors, beside="loss.weight"):
    state = under(prefix, tensors) | {beside: torch.ones(2)}
    callbacks = {"EarlyStopping": {"wait_count": 0, "best_score": torch.tensor(0.5)}}
    return {"state_dict": state, "epoch": 1, "callbacks": callbacks, "hyper_parameters": {"lr": 0.1}}


def within_itself(tensors):
    content = {"model": tensors}
    content["again"] = content
    return content


def nested(times, tensors):
    for _ in range(times):
        tensors = {"a": tensors, "b": tensors}
    return tensors


def as_dtype(dtype, tensors):
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def decoder(width=16):
    blocks = {f"decoder_blocks.0.{name}": torch.ones(width) for name in ("norm1.weight", "attn.qkv.weight")}
    return {"mask_token": torch.ones(1, 1, width), "decoder_embed.weight": torch.ones(width, 64), **blocks}


def with_classifier(name, before, above, tensors=None):
    """The model's classifier by another name, next to what is called before."""
    tensors, above = (tensors, above) if tensors else (above, "")
    inside = under(before, {n: t for n, t in tensors.items() if not n.startswith("head.")})
    return inside | {f"{above}{name}.{kind}": tensors[f"head.{kind}"] for kind in ("weight", "bias")}


LANGUAGE = {"text.transformer.resblocks.0.ln_1.weight": torch.ones(4), "logit_scale": torch.ones(())}

SHAPES = {  # the name of the file, its content, and what has to be said
    "plain": ("m.pth", lambda t: t, {}),
    "the old format of torch": ("old.pth", lambda t: t, {}),
    "within itself": ("m.pth", within_itself, {}),
    "many times": ("m.pth", partial(nested, 40), {}),
    "model": ("m.pth", lambda t: {"model": t, "args": argparse.Namespace(lr=0.1)}, {}),
    "state_dict": ("m.pt", lambda t: {"state_dict": t, "epoch": 3}, {}),
    "with optimizer": ("m.pth", with_optimizer, {}),
    "any word": ("m.pth", lambda t: {"net_params": t}, {}),
    "several words": ("m.pth", lambda t: {"checkpoint": {"model": {"weights": t}}}, {}),
    "best score": ("m.pth", lambda t: {"state_dict": t, "best": np.float64(0.5), "count": np.int64(3)}, {}),
    "DDP": ("m.pth", lambda t: under("module.", t), {}),
    "DDP below model": ("m.pth", lambda t: {"model": under("module.", t)}, {}),
    "compiled": ("m.pth", lambda t: under("_orig_mod.", t), {}),
    "compiled DDP": ("m.pth", lambda t: under("_orig_mod.module.", t), {}),
    "DDP compiled": ("m.pth", lambda t: {"model": under("module._orig_mod.", t)}, {}),
    "compiled blocks": ("m.pth", lambda t: inside_blocks("_orig_mod", t), {}),
    "Lightning model": ("m.ckpt", lambda t: of_lightning("model.", t), {}),
    "Lightning net, compiled": ("m.ckpt", lambda t: of_lightning("net._orig_mod.", t), {}),
    "Lightning backbone": ("m.ckpt", lambda t: of_lightning("backbone.", t, "train_acc.tp"), {}),
    "Lightning strategy": ("m.ckpt", lambda t: of_lightning("_forward_module.model.", t), {}),
    "FSDP": ("m.pth", lambda t: under("_fsdp_wrapped_module.", inside_blocks("_fsdp_wrapped_module", t)), {}),
    "checkpointed": ("m.pth", lambda t: inside_blocks("_checkpoint_wrapped_module", t), {}),
    "DeepSpeed": ("m.pt", lambda t: {"module": t, "ds_version": "0.1", "global_steps": 3}, {}),
    "timm's train.py": ("model_best.pth.tar", of_timm, {}),
    "timm's, weights": ("last.pth.tar", lambda t: of_timm(others(t)) | {"state_dict": t}, {"key": "state_dict"}),
    "EMA in names": (
        "m.safetensors",
        lambda t: under("model.", others(t)) | under("ema_model.", t),
        {"key": "ema_model"},
    ),
    "twins": ("m.ckpt", lambda t: {"state_dict": under("model.", t) | under("encoder.", t)}, {}),
    "safetensors": ("m.safetensors", lambda t: t, {}),
    "safetensors, DDP": ("m.safetensors", lambda t: under("module.", t), {}),
    "half": ("m.safetensors", partial(as_dtype, torch.float16), {}),
    "bfloat16": ("m.bin", partial(as_dtype, torch.bfloat16), {}),
    "float64": ("m.pth", partial(as_dtype, torch.float64), {}),
    "parameters": ("m.pth", lambda t: {name: nn.Parameter(tensor) for name, tensor in t.items()}, {}),
    "indices of positions": (
        "m.pth",
        lambda t: {"backbone": t, "position_ids": torch.arange(9, dtype=torch.int32)},
        {},
    ),
    "mask token": ("m.pth", lambda t: t | {"mask_token": torch.ones(1, 64)}, {}),
    "masked autoencoder": ("m.pth", lambda t: {"model": t | decoder()}, {}),
    "open_clip": ("open_clip_model.safetensors", lambda t: under("visual.trunk.", t) | LANGUAGE, {}),
    "teacher": ("m.pth", lambda t: {"teacher": of_dino(t)["teacher"]}, {}),
    "student and teacher": ("m.pth", of_dino, {"key": "teacher"}),
    "classifier, its backbone": ("m.pth", partial(with_classifier, "classifier", "backbone."), {}),
    "backbone and head": ("m.pth", partial(with_classifier, "head", "module.model.backbone.", "module.model."), {}),
    "fc": ("m.pth", partial(with_classifier, "fc", ""), {}),
    "dropout, head": ("m.pth", partial(with_classifier, "head.1", ""), {}),
    "a list of models": ("m.pth", lambda t: {"models": [others(t), t]}, {"key": "models.1"}),
    "momentum encoder": (
        "m.pth.tar",
        lambda t: {"state_dict": under("module.base_encoder.", others(t)) | under("module.momentum_encoder.", t)},
        {"key": "momentum_encoder"},
    ),
}
FOLDERS = {"sharded safetensors": "safetensors", "sharded bin": "bin"}


def put(content, path):
    if path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path, _use_new_zipfile_serialization="old" not in path.name)
    return path


@pytest.mark.parametrize("shape", [*SHAPES, *FOLDERS])
@pytest.mark.filterwarnings("ignore:.*an average")
def test_the_same_weights_in_every_form(small, same_function, tmp_path, shape):
    reference = small().bfloat16().half().float()  # of numbers that half precision has
    tensors = reference.state_dict()
    if shape in FOLDERS:
        path, settings = sharded(tensors, tmp_path, FOLDERS[shape]), {}
    else:
        name, write, settings = SHAPES[shape]
        path = put(write(tensors), tmp_path / name)
    assert is_checkpoint(path)
    model = load(path, **HEADS, **settings)
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    same_function(reference, model)
    options = ",".join(f"{name}={value}" for name, value in {**HEADS, **settings}.items())
    opened = open_checkpoint(f"{path}?{options}").state_dict()
    assert all(torch.equal(opened[name], value) for name, value in model.state_dict().items())


def test_an_average_is_taken_and_said(small, tmp_path):
    path = put(of_timm(small().state_dict()), tmp_path / "m.pth.tar")
    with pytest.warns(UserWarning, match=r"tar: state_dict_ema was read, an average; key=state_dict is there too"):
        load(path, **HEADS)
    account = coverage(path, **HEADS)
    assert "chosen: state_dict_ema was read" in str(account)
    assert f"left out: state_dict (outside the model's state_dict_ema)  ({len(account.rows)}x)" in str(account)
    assert not coverage(path, **HEADS, key="state_dict").choice
    tensors = small().state_dict()
    path = put({"model": tensors, "ema": {"shadow_params": [*tensors.values()]}}, tmp_path / "m.pth")
    assert "left out: ema (outside the model's model)" in coverage(path, **HEADS).summary


def test_what_is_left_out_is_named(small, tmp_path):
    path = put(of_dino(small().state_dict() | decoder()), tmp_path / "m.pth")
    account = coverage(path, **HEADS, key="teacher")
    left_out = dict(account.left_out)
    assert left_out["decoder_embed.weight"] == "of the decoder of pre-training"
    assert left_out["mask_token"].startswith("stands for masked patches")
    assert left_out["student.module.backbone.norm.bias"] == "outside the model's teacher.backbone"
    assert "student, teacher.head, loss (outside the model's teacher.backbone)" in account.summary
    assert "decoder_blocks, decoder_embed (of the decoder of pre-training)" in account.summary
    assert load(path, **HEADS, key="teacher").pretrained_cfg["account"] == account.summary


UNFIT = {  # a classifier next to the backbone -> its tensors, which no head here has
    "several layers": {f"head.{i}.{kind}": torch.ones(64, 64) for i in (0, 2) for kind in ("weight", "bias")},
    "another width": {"fc.weight": torch.ones(5, 256), "fc.bias": torch.ones(5)},
    "the bias alone": {"head.bias": torch.ones(5)},
    "no bias": {"head.weight": torch.ones(5, 64)},
    "two of them": {"head.weight": torch.ones(5, 64), "fc.weight": torch.ones(7, 64)},
    "a convolution": {"head.weight": torch.ones(5, 64, 1, 1), "head.bias": torch.ones(5)},
    "a norm": {"head.0.weight": torch.ones(64), "head.0.bias": torch.ones(64)},
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_classifier_that_does_not_fit_is_named_and_the_backbone_is_read(small, tmp_path, kind):
    backbone = {name: tensor for name, tensor in small().state_dict().items() if not name.startswith("head.")}
    path = put(under("backbone.", backbone) | UNFIT[kind], tmp_path / "m.pth")
    with pytest.warns(
        UserWarning, match=r"m\.pth: the classifier \((head|fc)\..*\) is not one linear layer .* left out"
    ):
        read = load(path, **HEADS).state_dict()
    assert "head.weight" not in read
    assert all(torch.equal(read[name], tensor) for name, tensor in backbone.items())


def test_a_tensor_in_two_files_of_an_index_is_refused(small, tmp_path):
    tensors = small().state_dict()
    folder = sharded(tensors, tmp_path, "bin")
    put(others(tensors), folder / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(UserError, match=r"00002\.bin holds cls_token a second time"):
        load(folder, **HEADS)


@pytest.mark.parametrize("name", ["../m.safetensors", "/etc/passwd", "model.bin", "absent.safetensors"])
def test_an_index_names_files_beside_it(small, tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (tmp_path / "m.safetensors", folder / "model.bin"):
        put(small().state_dict(), file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"cls_token": name}}))
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json cannot be read"):
        load(folder, **HEADS)


def renamed(pairs, tensors):
    """The same tensors with each name rewritten by all pairs of (pattern, new)."""
    new = {}
    for name, tensor in tensors.items():
        for pattern, text in pairs.items():
            name = re.sub(pattern, text, name)
        new[name] = tensor
    return new


def head_of_dino(*names):
    return {f"{name}.{end}": torch.ones(3) for name in names for end in ("mlp.0.weight", "last_layer.weight_g")}


def of_dinov2(tensors):
    return tensors | {"mask_token": torch.ones(1, 64)}


def of_registers(tensors):
    """Registers without positions; the class token's is apart from it."""
    tensors, place = of_dinov2(tensors), torch.linspace(-1, 1, 64).view(1, 1, 64)
    token = tensors.pop("cls_token") - place
    positions = torch.cat([place, tensors.pop("pos_embed")], 1)
    return {"cls_token": token, "pos_embed": positions, "register_tokens": tensors.pop("reg_token"), **tensors}


def of_dinov3(tensors):
    names = {r"gamma_(\d)": r"ls\1.gamma", "^reg_token": "storage_tokens"}
    tensors = renamed(names, tensors)
    for i in range(2):
        q, v = (tensors.pop(f"blocks.{i}.attn.{name}_bias") for name in "qv")
        tensors[f"blocks.{i}.attn.qkv.bias"] = torch.cat([q, torch.ones_like(q), v])
        mask = torch.cat([torch.ones_like(q), torch.zeros_like(q), torch.ones_like(q)])
        tensors[f"blocks.{i}.attn.qkv.bias_mask"] = mask
    return tensors | {
        "mask_token": torch.ones(1, 64),
        "rope_embed.periods": 100 ** (2 * torch.arange(8) / 16),
        "local_cls_norm.weight": torch.ones(64),
    }


EVA02 = {
    r"mlp\.fc1_g": "mlp.w1", r"mlp\.fc1_x": "mlp.w2", r"mlp\.fc2": "mlp.w3", r"mlp\.norm": "mlp.ffn_ln",
    r"attn\.norm": "attn.inner_attn_ln", r"attn\.([qv])_proj\.bias": r"attn.\1_bias",
}  # fmt: skip


def of_eva02(tensors, reference=16):
    """With the tables of rotary positions at the top and in each block."""
    rope = RopeConfig(base=10_000, reference=(reference, reference))
    cos, sin = RotaryPositions(32, 2, (4, 4), settings=rope).table
    sin = sin * torch.tensor([-1.0, 1.0]).repeat(16)
    tables = {f"{at}rope.freqs_{n}": x for n, x in (("cos", cos), ("sin", sin)) for at in ("", "blocks.0.attn.")}
    return renamed(EVA02, tensors) | tables


def of_beit(tensors):
    return tensors | {f"blocks.{i}.attn.relative_position_index": torch.ones(17, 17, dtype=torch.int64) for i in (0, 1)}


CLIP = {
    r"^patch_embed\.proj": "conv1", "^pos_embed": "positional_embedding", r"^blocks\.": "transformer.resblocks.",
    r"^norm_pre\.": "ln_pre.", r"^norm\.": "ln_post.", r"\.norm(\d)\.": r".ln_\1.", r"qkv\.": "in_proj_",
    r"attn\.proj": "attn.out_proj", r"mlp\.fc1": "mlp.c_fc", r"mlp\.fc2": "mlp.c_proj",
    "^cls_token": "class_embedding",
}  # fmt: skip


def of_clip(tensors, **beside):
    tensors = renamed(CLIP, {name: tensor for name, tensor in tensors.items() if name != "head.bias"})
    tensors["proj"] = tensors.pop("head.weight").T
    for name in ("class_embedding", "positional_embedding"):
        tensors[name] = tensors[name].squeeze(0).squeeze(0) if name == "class_embedding" else tensors[name][0]
    language = {"token_embedding.weight": torch.ones(9, 4), "transformer.resblocks.0.ln_1.weight": torch.ones(4)}
    return under("visual.", tensors) | LANGUAGE | language | {n: torch.tensor(v) for n, v in beside.items()}


def of_ijepa(tensors):
    tensors = under("module.", tensors)
    predictor = {"module.predictor_embed.weight": torch.ones(4), "module.mask_token": torch.ones(1, 1, 4)}
    return {"encoder": tensors, "target_encoder": others(tensors), "predictor": predictor, "epoch": 3, "lr": 0.1}


def masked_image_model(tensors):
    head = {f"lm_head.{name}": torch.ones(9) for name in ("weight", "bias")}
    return tensors | {"mask_token": torch.ones(1, 1, 64)} | head


SCALED = {"init_values": 0.1}
AT_CLASS = {"num_classes": 0, "global_pool": "token"}
PLAIN, EPS5 = {"num_classes": 0}, partial(LayerNorm, eps=1e-5)
DINOV3 = {
    "qkv_bias": True, "init_values": 0.1, "rope_type": "dinov3", "rope_temperature": 100, "rope_rotate_half": True,
    "use_rot_pos_emb": True, "use_abs_pos_emb": False, "num_reg_tokens": 4, "use_fc_norm": False, "norm_layer": EPS5,
    "img_size": 128, "dynamic_img_size": True, **AT_CLASS,
}  # fmt: skip
EVA = {"swiglu_mlp": True, "use_rot_pos_emb": True, "ref_feat_shape": (16, 16)}
EVA_FINE = {**EVA, "qkv_fused": False, "scale_mlp": True}
CLIPS = {"pre_norm": True, "norm_layer": EPS5}

BEIT = {"use_abs_pos_emb": False, "init_values": 0.1}
VIT = VisionTransformer
PACKED = {r"mlp\.fc1": "mlp.w12", r"mlp\.fc2": "mlp.w3"}
GIANT = {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU, **SCALED, **PLAIN}
NO_TOKEN = {"class_token": False, **PLAIN}
RELEASES = {  # timm's class and options with the same function, what the published file holds, and settings
    "DINO": (VIT, PLAIN, lambda t: t, {}),
    "iBOT": (VIT, PLAIN, lambda t: {"state_dict": t | {"masked_embed": torch.ones(1, 64)}}, {}),
    "iBOT with head": (VIT, PLAIN, lambda t: {"state_dict": t | head_of_dino("head")}, {}),
    "MAE": (VIT, PLAIN, lambda t: {"model": t | decoder()}, {}),
    "DINOv2": (VIT, SCALED | PLAIN, of_dinov2, {}),
    "DINOv2 with registers": (VIT, {"reg_tokens": 4, "no_embed_class": True, **SCALED, **PLAIN}, of_registers, {}),
    "DINOv2 giant": (VIT, GIANT, lambda t: of_dinov2(renamed(PACKED, t)), {}),
    "DINOv3": (Eva, DINOV3, of_dinov3, {"num_heads": None, "img_size": 128}),
    "BEiT": (Beit, {"use_rel_pos_bias": True, **BEIT}, lambda t: {"model": of_beit(t)}, {}),
    "BEiT before fine-tuning": (Beit, {"use_shared_rel_pos_bias": True, **BEIT, **AT_CLASS}, masked_image_model, {}),
    "EVA": (Eva, {}, lambda t: {"module": t}, {}),
    "EVA-02 tiny": (Eva, EVA, of_eva02, {"num_heads": None}),
    "EVA-02": (Eva, EVA_FINE, of_eva02, {"num_heads": None}),
    "EVA-02 CLIP": (
        *(Eva, {**EVA_FINE, "scale_attn_inner": True, "global_pool": "token", "use_fc_norm": False}),
        *(lambda t: under("visual.", of_eva02(t)) | LANGUAGE, {"num_heads": None}),
    ),
    "EVA-02 in timm's names": (Eva, EVA, lambda t: t, {"rope": RopeConfig(base=10_000, reference=(16, 16))}),
    "OpenAI's CLIP": (VIT, {"act_layer": QuickGELU, **CLIPS}, partial(of_clip, input_resolution=32, vocab_size=9), {}),
    "open_clip": (VIT, CLIPS, of_clip, {}),
    "open_clip, DDP": (VIT, CLIPS, lambda t: {"state_dict": under("module.", of_clip(t))}, {}),
    "SigLIP in open_clip": (
        *(VIT, {"global_pool": "map", **NO_TOKEN}),
        *(lambda t: under("visual.trunk.", t) | LANGUAGE | {"logit_bias": torch.ones(1)}, {}),
    ),
    "DeiT III": (
        *(VIT, {"no_embed_class": True, **SCALED}),
        *(lambda t: {"model": renamed({r"ls(\d)\.gamma": r"gamma_\1"}, t)}, {}),
    ),
    "I-JEPA": (VIT, {"global_pool": "avg", "fc_norm": False, **NO_TOKEN}, of_ijepa, {"key": "encoder"}),
}
FILTERS = {
    VisionTransformer: partial(vision_transformer.checkpoint_filter_fn, adapt_layer_scale=True),
    Eva: eva.checkpoint_filter_fn,
    Beit: beit.checkpoint_filter_fn,
}


@pytest.mark.parametrize("release", RELEASES)
def test_releases_are_read_as_timm_reads_them(small, same_function, tmp_path, release):
    kind, options, publish, settings = RELEASES[release]
    published = publish(dict(small(kind, **options).state_dict()))
    path = put(published, tmp_path / "release.pth")
    model = load(path, **{**HEADS, **settings})
    theirs = kind(**(SIZES | options)).eval()
    found = theirs.load_state_dict(FILTERS[kind](dict(published), theirs), strict=False)
    assert not found.missing_keys
    same_function(theirs, model, (3, *theirs.patch_embed.img_size))
    read = {name for row in coverage(path, **{**HEADS, **settings}).rows for name in row.theirs}
    assert all(any(whole.endswith(name) for whole in flat_names(published)) for name in read)


def flat_names(content):
    """The names of a file as they are in it, whatever they are below."""
    inside = (flat_names(value) for value in content.values() if isinstance(value, dict))
    return {name for name, value in content.items() if isinstance(value, torch.Tensor)}.union(*inside)


def of_dinov2s_training(tensors):
    chunked = renamed({r"^blocks\.": "blocks.0."}, of_dinov2(tensors))
    teacher = under("backbone.", chunked) | head_of_dino("dino_head", "ibot_head")
    return {"teacher": teacher, "iteration": 3}


def test_a_checkpoint_of_dinov2s_training(small, same_function, tmp_path):
    reference = small(init_values=0.1, num_classes=0)
    same_function(reference, load(put(of_dinov2s_training(reference.state_dict()), tmp_path / "m.pth"), **HEADS))


def plain(write, says, **settings):
    return VisionTransformer, {}, write, settings, says


def with_bias(value, dtype=torch.float32):
    return lambda t: t | {"norm.bias": torch.full((64,), value, dtype=dtype)}


LEARNERS = r"student\.module\.backbone, teacher\.backbone.*"
REFUSED = [  # timm's class and options, what the file holds, what is said of it, and the error
    plain(lambda t: nn.Linear(1, 1), "more than tensors"),
    plain(with_bias(torch.nan), r"NaN .* 1 of its .*norm\.bias"),
    plain(with_bias(torch.inf), "infinite"),
    plain(with_bias(1, torch.int8), r"norm\.bias is int8: quantized weights"),
    plain(lambda t: {n: t.to(torch.int8) for n, t in t.items()}, r"is int8: quantized weights"),
    plain(lambda t: t | {"adapter.down": torch.ones(2)}, "without a place here: adapter.down"),
    plain(lambda t: t | {"blocks.0.attn.relative": torch.ones(2)}, "without a place here"),
    plain(lambda t: t | {"blocks.0.attn.qkv.lora_A": torch.ones(2, 64)}, "Merge LoRA before saving"),
    plain(lambda t: {"models": [t, others(t)]}, r"models\.0, models\.1.*--key"),
    plain(of_dino, f"{LEARNERS}--key"),
    plain(of_dino, f"{LEARNERS}ema names none.*Choose one", key="ema"),
    plain(of_dino, f"{LEARNERS}backbone names 2 of them.*Choose one", key="backbone"),
    plain(of_dino, f"{LEARNERS}names none.*Choose one", key="."),
    plain(lambda t: {"a": torch.ones(2)}, "has no names of a known ViT, and a names none", key="a"),
    plain(lambda t: {"a.conv1.weight": torch.ones(2)}, "does not contain a ViT .* a.conv1.weight"),
    plain(partial(nested, 200), "nested too deeply"),
    (Eva, EVA, lambda t: t, {}, "names of EVA-02, and not its rotary positions: give rope="),
    (Eva, EVA, lambda t: of_eva02(t) | {"rope.freqs_cos": torch.ones(16, 32)}, {}, "rotary positions other than"),
    (Eva, DINOV3, lambda t: of_dinov3(t) | {"rope_embed.periods": torch.rand(8)}, {}, "rotary positions other than"),
]


@pytest.mark.parametrize(("kind", "options", "write", "settings", "says"), REFUSED)
def test_what_is_refused(small, tmp_path, kind, options, write, settings, says):
    path = put(write(dict(small(kind, **options).state_dict())), tmp_path / "m.pth")
    with pytest.raises(UserError, match=says):
        load(path, **HEADS, **settings)


def test_a_file_of_our_own_takes_no_key(tmp_path):
    vm.adapters.save(vm.vit("mu/8", img_size=16), own := tmp_path / "own.safetensors")
    with pytest.raises(UserError, match=r"own\.safetensors is complete: leave key out"):
        load(f"{own}?key=a")


def towers():
    """Models of Hugging Face with more than a ViT, and the ViT in them."""
    import transformers as hf

    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {**small, "image_size": 32, "patch_size": 8}
    words = {**small, "vocab_size": 99, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}
    both = {"vision_config": vision, "text_config": words}
    decoder = {f"decoder_{name}": value for name, value in small.items()}
    mae = hf.ViTMAEConfig(**vision, **decoder, mask_ratio=0.0)
    beit = hf.BeitConfig(**vision, use_mean_pooling=False)
    return {
        "CLIP": lambda: (hf.CLIPModel(hf.CLIPConfig(**both)), "vision_model", "text_model"),
        "SigLIP": lambda: (hf.SiglipModel(hf.SiglipConfig(**both)), "vision_model", "logit_bias"),
        "MAE": lambda: (hf.ViTMAEForPreTraining(mae), "vit", "decoder"),
        "BEiT": lambda: (hf.BeitForMaskedImageModeling(beit), "beit", "lm_head"),
    }


@pytest.mark.parametrize("name", ["CLIP", "SigLIP", "MAE", "BEiT"])
def test_the_tower_for_images_in_a_folder_of_hugging_face(name, scatter, same_function, tmp_path):
    pytest.importorskip("transformers")
    model, tower, other = towers()[name]()
    scatter(model).save_pretrained(tmp_path)
    noise = {"noise": torch.arange(16.0).expand(2, -1)} if name == "MAE" else {}

    def theirs(images):
        output = getattr(model, tower)(images, **noise)
        return output.last_hidden_state[:, 0] if output.get("pooler_output") is None else output.pooler_output

    same_function(theirs, load(tmp_path))
    assert f"(outside the model's {tower})" in coverage(tmp_path).summary
    assert other in coverage(tmp_path).summary
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.warns(UserWarning, match="an adapter beside the weights .* is not applied: merge it first"):
        load(tmp_path)


@pytest.fixture
def dinov2_small():
    folder = Path(os.environ.get("VITMODS_DATA", "")) / "dinov2_small"
    if not (folder / "model.safetensors").is_file():
        pytest.skip("VITMODS_DATA does not name the folder with a trained DINOv2")
    pytest.importorskip("transformers")
    return folder


@torch.no_grad()
def test_a_trained_dinov2_by_folder_by_file_by_timms_names_and_in_place(dinov2_small, tmp_path):
    from transformers import Dinov2Model

    theirs = Dinov2Model.from_pretrained(dinov2_small, dtype=torch.float32).eval()
    images = torch.randn(1, 3, 518, 518, generator=torch.Generator().manual_seed(0))
    expected, folder = theirs(images).last_hidden_state, load(dinov2_small)
    assert (folder.forward_features(images) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert "mask_token" in coverage(dinov2_small).summary
    put(folder.state_dict() | {"mask_token": torch.ones(1, 384)}, tmp_path / "dinov2_vits14.pth")  # timm's names
    for source in (dinov2_small / "model.safetensors", tmp_path / "dinov2_vits14.pth"):
        weights = load(source).state_dict()
        assert all(torch.equal(weights[name], tensor) for name, tensor in folder.state_dict().items())
    few = images[..., :56, :56]
    del theirs.encoder.layer[2:]
    changed, before = vm.apply(theirs, vm.GatedAttention(), in_place=True, example=few), theirs(few).last_hidden_state
    assert type(changed).__name__ == "Dinov2Model"
    assert not torch.allclose(changed(few).last_hidden_state, before, rtol=1e-2)
    assert "2x" in str(vm.diff(theirs, changed))


def test_images_have_the_size_of_the_preprocessor(dinov2_small):
    trained = Checkpoint.open(str(dinov2_small))
    assert trained.settings["img_size"] == [518, 518]
    seen = trained.as_seen()
    assert seen.settings["img_size"] == [224, 224] == [*seen.model.vit_config.img_size]
    assert Start.of(str(dinov2_small))[1].settings["img_size"] == [224, 224]
