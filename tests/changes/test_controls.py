"""The arms that have what a change brings along, without its idea, or its idea without that."""

import json

import pytest
import torch

import vitmods as vm
from vitmods.changes.controls import controls
from vitmods.cli import main
from vitmods.model.flops import count_macs
from vitmods.report import text
from vitmods.study import Answer


def arms(text, base="Ti3/16", **options):
    config = vm.ViTConfig.from_name(base, **{"img_size": 64, "num_classes": 3, **options})
    return config, [(name, str(change)) for _, name, change in controls(vm.parse_changes(text), config)]


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("dtn", {}, [("late", "dtn(trade_off=1.0)")]),
        ("dtn(norms=both,blocks=1)", {}, [("late1", "dtn(trade_off=1.0,blocks=1)")]),
        ("gpsa", {}, [("late", "dtn(trade_off=1.0)")]),
        ("dtn+dpn", {}, []),  # its control would have dpn too
        ("dtn(trade_off=1)", {}, []),
        ("dtn", {"class_token": False, "pool": "avg"}, []),
        ("postnorm", {}, [("post-post-final", "placement(attn=post,mlp=post,keep_final=true)")]),
        ("placement(mlp=pre+post)", {}, [("pre-both-final", "placement(mlp=pre+post,keep_final=true)")]),
        ("placement(attn=post)", {}, []),
        ("placement(attn=post,mlp=post,reading=branch)", {}, []),
        ("registers", {}, [("mlp1048", "size(mlp=1048)")]),
        ("registers", {"img_size": 1024}, []),  # 0.1 % of the multiply-adds
        ("swiglu", {}, []),
        ("swiglu(hidden=768)", {}, [("mlp1152", "size(mlp=1152)")]),
        ("rms", {}, []),
    ],
)
def test_what_comes_along_has_a_control_where_it_comes_along(text, options, expected):
    assert arms(text, **options)[1] == expected


def test_a_late_class_token_alone_is_layer_norm():
    torch.manual_seed(0)
    config, ((_, text),) = arms("dtn")
    late = vm.apply(vm.ViT(config), *vm.parse_changes(text)).eval()
    assert (late.vit_config.prefix_from, late.vit_config.position_on_prefix) == (2, False)
    x = torch.randn(2, 16, config.embed_dim)
    norm = late.blocks[0].norm1
    plain = torch.nn.functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    torch.testing.assert_close(norm(x.unflatten(1, (4, 4))).flatten(1, 2), plain)


@pytest.mark.parametrize("text", ["registers", "swiglu(hidden=768)"])
def test_a_wider_mlp_costs_as_much(text):
    config, ((_, control),) = arms(text)
    costs = [count_macs(vm.parse_changes(name)[0].edit(config)) / count_macs(config) for name in (text, control)]
    assert costs[0] == pytest.approx(costs[1], rel=1e-3)
    assert costs[0] > 1.01


def test_the_dry_run_proposes_and_the_report_compares(tmp_path, capsys, monkeypatch):
    command = ["compare", "--data", "digits", "--base", "mu2/4", "--seeds", "2", "--steps", "2", "--workers", "1"]
    assert main([*command, "--arms", "dtn", "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "dtn also brings a class token that joins late" in said
    assert "which the arm late=dtn(trade_off=1.0) tells apart" in said
    out = tmp_path / "study"
    words = ["--arms", "dtn", "gpsa", "late=dtn(trade_off=1)", "--out", str(out), "--cost-seconds", "0", "--quiet"]
    assert main([*command, *words]) in (0, 1)
    assert "tells apart. Without" not in capsys.readouterr().err
    remark = Answer.load(out).headline.remarks["dtn"]
    assert remark.startswith("it also brings a class token that joins late, without a position, which late tells apart")
    assert "late" not in Answer.load(out).headline.remarks
    monkeypatch.setattr(text, "not_learned", lambda answer: "")
    assert text.headline(Answer.load(out)).count("also brings") == 1, "of both arms"
    assert remark in json.dumps(json.loads((out / "results.json").read_text()), ensure_ascii=False)
