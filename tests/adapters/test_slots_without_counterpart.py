"""Our models as those of other libraries and files: what has no counterpart there is named, and nothing is written."""

import pytest

import vitmods as vm
from vitmods.adapters import save, to_huggingface, to_timm, to_torchvision
from vitmods.model.slots import BranchConfig, NormConfig
from vitmods.util.errors import UserError

BIG_VISION = {"activation": "gelu_tanh", "position_on_prefix": False, "init": "big_vision"}
GAP = {"pool": "avg", "class_token": False}
COARSE, RMS = NormConfig("layer", 1e-3), NormConfig("rms", 1e-5)
SLOTS = {
    "big_vision": [
        ({"activation": "gelu"}, r"activation=gelu \(there: gelu_tanh\)"),
        ({"pool": "avg"}, "class_token=True"),
        ({**GAP, "norm_after_pool": True}, "norm_after_pool=True"),
        ({"pool": "none"}, "pool=none"),
        ({"mlp": BranchConfig(NormConfig("layer", 1e-5))}, "mlp.before=layer norm, eps 1e-05"),
        ({"layer_scale": 0.1}, "layer_scale=0.1"),
        ({"position": "none"}, "position=none"),
    ],
    "DeiT": [
        ({"layer_scale": 0.1}, "layer_scale=0.1"),
        ({"activation": "gelu_tanh"}, "activation=gelu_tanh"),
        ({"pool": "avg"}, "pool=avg"),
        ({"reg_tokens": 1}, "reg_tokens=1"),
    ],
    "Hugging Face's ViT": [
        ({"pool": "avg"}, "pool=avg"),
        ({"reg_tokens": 2}, "reg_tokens=2"),
        ({"representation": True}, "representation=True"),
        ({"proj_drop": 0.1}, "proj_drop=0.1"),
        ({"mlp": BranchConfig(COARSE)}, "mlp.before=layer norm, eps 0.001"),
        ({"position_on_prefix": False}, "position_on_prefix=False"),
    ],
    "torchvision's VisionTransformer": [
        ({"img_size": (8, 16)}, r"img_size=\(8, 16\)"),
        ({"in_chans": 1}, "in_chans=1"),
        ({"pool": "avg"}, "pool=avg"),
        ({"layer_scale": 0.1}, "layer_scale=0.1"),
        ({"activation": "gelu_tanh"}, "activation=gelu_tanh"),
        ({"pos_drop": 0.1}, "pos_drop=0.1"),
    ],
    "timm's VisionTransformer": [
        ("dpn", r"stem.before=layer norm, eps 1e-06 \(there: None\); stem.after|stem.before"),
        ("gpsa", "positional"),
        ("stem(kind=hmlp)", "stem"),
        ("postnorm", "attn.before=None"),
        ("subln+placement(mlp=pre+post)", "mlp.after="),
        ("normformer(head_scale=true,residual_scale=true)", "attn.branch=.*head_scale=True.*residual_scale=True"),
        ("dpn(before=false,after=false,after_position=true)", "position_norm_on_prefix|stem.bias"),
        ({"mask_token": True}, "mask_token"),
        ({"representation": True}, "representation=True"),
        ({"position": "sincos2d", "position_on_prefix": False}, "position=sincos2d"),
        ({"drop_path": 0.1, "drop_path_shape": "constant"}, "drop_path_shape=constant"),
        ({"final_norm": COARSE}, "final_norm=layer norm, eps 0.001 "),
        (
            {"pool": "map", "final_norm": None, "attn": BranchConfig(COARSE), "mlp": BranchConfig(COARSE)},
            "pool_norm=None",
        ),
        ({"mlp": BranchConfig(RMS)}, "mlp.before=rms norm, eps 1e-05 "),
    ],
}
WRITERS = {
    "big_vision": lambda model, folder: save(model, folder / "model.npz"),
    "DeiT": lambda model, folder: save(model, folder / "model.pth"),
    "Hugging Face's ViT": lambda model, _: to_huggingface(model),
    "torchvision's VisionTransformer": lambda model, _: to_torchvision(model),
    "timm's VisionTransformer": lambda model, _: to_timm(model),
}


@pytest.mark.parametrize(("library", "model", "slot"), [(name, *row) for name, rows in SLOTS.items() for row in rows])
def test_slots_without_counterpart_are_named(tmp_path, library, model, slot):
    base = BIG_VISION if library == "big_vision" else {}
    fields, changes = (model, "") if isinstance(model, dict) else ({}, model)
    vit = vm.vit("mu2/4", **{"img_size": 8, "num_classes": 5, **base, **fields})
    vit = vm.apply(vit, *vm.parse_changes(changes)) if changes else vit
    with pytest.raises(UserError, match=f"{library} does not have: .*({slot})"):
        WRITERS[library](vit, tmp_path)
    assert not list(tmp_path.iterdir())
