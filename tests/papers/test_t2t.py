"""T2T-ViT_t-14 with LayerNorm and with DTN: the counts of Table 12 of the DTN paper, to the printed digit."""

import pytest
import torch

import vitmods as vm
from vitmods.changes.compose import edit
from vitmods.model.flops import count_macs, count_params

TABLE_12 = {"": 6.1, "dtn": 6.4, "dtn(blocks=10)": 6.4}  # ten twelfths of 14 blocks, or the ten of ViT-S


@pytest.mark.parametrize(("arm", "giga"), TABLE_12.items())
def test_table_12(arm, giga):
    config = edit(vm.ViTConfig.from_name("T2T-14"), vm.parse_changes(arm))
    with torch.device("meta"):
        model = vm.ViT(config)
    assert count_params(model) / 1e6 == pytest.approx(21.5, abs=0.05)
    assert count_macs(config, dense_norms=True) / 1e9 == pytest.approx(giga, abs=0.05)


def test_parts():
    """The stem's two layers and its map, fourteen blocks, the class token, the last norm and the head."""
    layers = [values * 192 + 64 * 64 + 64 + 2 * (64 * 64 + 64) + 2 * values + 2 * 64 for values in (147, 576)]
    stem = sum(layers) + 576 * 384 + 384
    block = 4 * 384**2 + 384 + 2 * 384 * 1152 + 1152 + 384 + 4 * 384
    with torch.device("meta"):
        model = vm.vit("T2T-14")
    assert count_params(model.patch_embed) == stem
    assert count_params(model) == stem + 14 * block + 384 + 2 * 384 + 385 * 1000
