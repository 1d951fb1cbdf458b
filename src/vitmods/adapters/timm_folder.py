"""A ViT as a folder in timm's layout: model.safetensors and a config.json from which timm makes the model again.

timm's own VisionTransformer where it can express the model, so that timm and transformers open the folder without this
library; else the architecture `vitmods_vit`, which `import vitmods.adapters.timm_models` adds to timm's registry. Both
hold our own config too, and `vitmods.adapters.load` opens both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from vitmods.adapters.own import preparation, write_own
from vitmods.model.config import ViTConfig
from vitmods.model.slots import NormConfig
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError
from vitmods.util.files import make_folder, write_json

OURS = "vitmods_vit"
CONFIG, WEIGHTS = "config.json", "model.safetensors"
_NORMS = {"layer": "layernorm", "rms": "rmsnorm"}  # timm's words, which mean an eps of 1e-6
_SIZES = {192: "tiny", 384: "small", 768: "base"}


def write_timm_folder(model: ViT, folder: Path) -> str:
    """Write the folder, read it back by timm and compare; the architecture that it names.

    Raises UserError where the disk refuses, or timm computes something else.
    """
    named = timm_words(model.vit_config)
    architecture, arguments = named or (OURS, {"vitmods_config": json.loads(model.vit_config.to_json())})
    prepared = preparation(model, model.vit_config.num_classes)
    labels, task = prepared.pop("label_names", None), prepared.pop("task", None)
    config = model.vit_config
    make_folder(folder)
    write_own(model, folder / WEIGHTS)
    pretrained = {"custom_load": False, "num_classes": config.num_classes, "fixed_input_size": True, **prepared}
    pretrained |= {"input_size": [config.in_chans, *config.img_size], "pool_size": None}
    pretrained |= {name: model.default_cfg[name] for name in ("first_conv", "classifier") if name in model.default_cfg}
    record = {
        "architecture": architecture,
        "num_classes": config.num_classes,
        "num_features": config.embed_dim,
        "global_pool": config.pool if config.pool in ("token", "avg", "map") else "",
        **({"label_names": list(labels)} if labels else {}),
        **({"task": task} if task else {}),
        "model_args": arguments,
        "pretrained_cfg": pretrained,
    }
    write_json(folder / CONFIG, record)
    _check(model, folder)
    return architecture


def timm_words(config: ViTConfig) -> tuple[str, dict[str, Any]] | None:
    """The architecture and the arguments, as JSON has them, by which timm makes the model; None where it cannot."""
    import timm

    from vitmods.adapters.timm import read_config, timm_arguments

    norms = [norm for norm in (config.attn.before or NormConfig(), config.stem.after) if norm]
    if any(norm.eps != 1e-6 or not norm.affine or norm.kind not in _NORMS for norm in norms):
        return None
    try:
        arguments = timm_arguments(config)
    except UserError:
        return None
    words = [_NORMS[norm.kind] for norm in norms]
    arguments |= {"norm_layer": words[0], "embed_norm_layer": words[1] if config.stem.after else None}
    if config.parallel != 1 or "mlp_layer" in arguments:
        return None  # timm takes its kinds of blocks and MLPs as classes
    arguments["act_layer"] = config.activation
    del arguments["block_fn"], arguments["num_classes"]  # the number of classes is next to the arguments
    arguments = {name: value for name, value in arguments.items() if value is not None}
    arguments |= {"img_size": list(config.img_size), "patch_size": list(config.patch_size)}
    arguments["in_chans"] = config.in_chans
    size, patch = _SIZES.get(config.embed_dim, "tiny"), config.patch_size[0]
    nearest = f"vit_{size}_patch{patch}_224"
    architecture = nearest if timm.is_model(nearest) else f"vit_{size}_patch16_224"
    try:
        with torch.device("meta"):
            read = read_config(timm.create_model(architecture, num_classes=config.num_classes, **arguments))
    except (UserError, TypeError):
        return None
    same = read.with_(init=config.init, head_bias=config.head_bias, drop_path_shape=config.drop_path_shape)
    return (architecture, arguments) if same == config else None


@torch.no_grad()
def _check(model: ViT, folder: Path) -> None:
    import timm

    import vitmods.adapters.timm_models  # noqa: F401  (adds the architecture)

    with torch.random.fork_rng(devices=[]):
        again = timm.create_model(f"local-dir:{folder}", pretrained=True)
        for name, tensor in model.state_dict().items():
            if not torch.equal(again.state_dict()[name].cpu(), tensor.cpu()):
                raise UserError(f"timm reads {folder} with another {name}: the folder cannot be used.")
        p = next(model.parameters())
        images = model.patch_embed.example(2, torch.Generator().manual_seed(0))
        images = images.to(p.device, p.dtype if images.is_floating_point() else None)
        mode = model.training
        expected, actual = model.eval()(images), again.to(p.device, p.dtype).eval()(images)
        model.train(mode)
    worst = float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-12))
    if not worst <= 1e-4:
        raise UserError(f"What timm computes from {folder} differs by {worst:.1e} of the largest output.")
