"""Table 7 of Three Things (Touvron et al., 2022): the stems against the official code in float64, and their FLOPs."""

from functools import partial

import pytest
import torch

import vitmods as vm
from vitmods.changes.compose import edit
from vitmods.layers import HMLPStem, LayerNorm, LeViTStem, StemSize
from vitmods.layers.norms import BatchNorm
from vitmods.model.flops import count_macs, count_published

from .support import close, compare

NORMS = {"bn_train": partial(BatchNorm, eps=1e-5), "bn_eval": partial(BatchNorm, eps=1e-5), "ln": LayerNorm}


def hmlp_names(official):
    """DeiT's class has one row of layers; here the last map and norm have their own names."""
    last = {"6": "proj", "7": "norm"}
    parts = ((name.split(".", 2), value) for name, value in official.items())
    return {f"{last.get(i, f'layers.{i}')}.{rest}": value for (_, i, rest), value in parts}


def levit_names(official):
    names = {}
    for name, value in official.items():
        i, kind, rest = name.split(".")
        last = {"c": "proj", "bn": "norm"}[kind]
        place = int(i) // 2 * 3 + (kind == "bn")
        names[f"{last if i == '6' else f'layers.{place}'}.{rest}"] = value
    return names


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("variant", NORMS)
def test_hmlp_equals_the_official_stem(golden, variant, by_name):
    """By name all patches are visible: in training the statistics are the same."""
    g, norm, trains = golden(f"hmlp_stem_{variant}"), NORMS[variant], variant == "bn_train"
    stem = HMLPStem(StemSize(64, 16, 3, 32), norm_layer=norm, inner_norm=norm).double().train(trains)
    stem.load_state_dict(hmlp_names(g.group("param")), strict=not trains)
    everything = torch.arange(16).expand(3, 16)
    assert not compare(stem, g, hmlp_names, (lambda images: stem(images, everything)) if by_name else None)
    for name, value in hmlp_names(g.group("out.after")).items() if trains else ():
        close(stem.get_buffer(name), value, check_dtype=False)


def test_levit_equals_the_official_stem(golden):
    g = golden("levit_stem_eval")
    stem = LeViTStem(StemSize(64, 16, 3, 32)).double().eval()
    stem.load_state_dict(levit_names(g.group("param")))
    for name in ("out.y", "ct.y"):
        g.arrays[name] = g[name].flatten(2).mT
    assert g["out.y"].shape == (2, 16, 32)
    assert not compare(stem, g, levit_names)


# change, depth, GFLOPs as published
TABLE_7 = [
    ("", 12, 17.58), ("", 13, 19.04), ("levit", 12, 19.07), ("stem(kind=levit,norm=layer)", 12, 19.07),
    ("local", 12, 19.12), ("hmlp", 12, 17.73), ("hmlp-ln", 12, 17.73),
    *((f"stem(kind=linear,{how})", 12, 17.58) for how in ("norm=batch", "gelu=true", "norm=batch,gelu=true")),
]  # fmt: skip


@pytest.mark.parametrize(("change", "depth", "giga"), TABLE_7)
def test_flops_are_the_published_ones(change, depth, giga):
    config = edit(vm.ViTConfig.from_name("B/16", depth=depth), vm.parse_changes(change))
    assert round(count_published(config) / 1e9, 2) == giga


def test_every_slot_is_counted():
    """Five for each value that passes a norm, over the matrix products."""
    base = vm.ViTConfig.from_name("mu2/4", img_size=8)  # 2 blocks of width 32, 4 patches and the class token
    counts = {"": 5 * 32 * 5 * 5, "dpn": 5 * (4 * 48 + 4 * 32), "normformer": 5 * 2 * 5 * (32 + 128)}
    counts["dpn(before=false,after=false,after_position=true)"] = 5 * 4 * 32
    assert count_published(base) - count_macs(base) == counts.pop("")
    for change, added in counts.items():
        new = edit(base, vm.parse_changes(change))
        assert count_published(new) - count_macs(new) == count_published(base) - count_macs(base) + added, change


@pytest.mark.parametrize("variant", ["bn_eval", "ln"])
def test_files_with_the_official_names_of_the_stem_are_read(golden, variant, tmp_path):
    g = golden(f"hmlp_stem_{variant}")
    tensors = dict(vm.vit("Ti1/16", img_size=64, embed_dim=32, num_heads=2, mlp_dim=64, num_classes=3).state_dict())
    del tensors["patch_embed.proj.weight"], tensors["patch_embed.proj.bias"]
    for name, value in g.group("param").items():
        tensors[f"patch_embed.{name}"] = value.float()
        if name.endswith("running_mean"):
            tensors[f"patch_embed.{name.replace('running_mean', 'num_batches_tracked')}"] = torch.tensor(1)
    torch.save({"model": tensors}, tmp_path / "deit.pth")
    model = vm.adapters.load(tmp_path / "deit.pth", num_heads=2)
    assert model.vit_config.patch_size == (16, 16)
    torch.testing.assert_close(model.patch_embed(g["in.x"].float()), g["out.y"].float(), atol=1e-4, rtol=0)
