import json

import pytest
import torch

import vitmods as vm
from vitmods.evals import PROTOCOLS, Options, metrics, run_protocols
from vitmods.evals.protocols import check_protocols, metric_named, options_for
from vitmods.util.errors import UserError

QUICK = [name for name, one in PROTOCOLS.items() if one.target == "class" and name != "corruptions"]
CPU = torch.device("cpu")


def run(model, dataset, names, split="test", batch_size=16, **more):
    return run_protocols(model, dataset, names, split=split, batch_size=batch_size, device=CPU, **more)


def test_every_protocol_gives_the_metrics_that_it_names(made_up, small_model):
    dataset = made_up()
    found = run(small_model(), dataset, QUICK)
    assert list(found) == QUICK
    assert dataset.passes == 3, "each split goes through the model once"
    for name in QUICK:
        assert list(found[name].metrics) == [metric.name for metric in PROTOCOLS[name].metrics]
        assert set(found[name].intervals) <= set(found[name].metrics)
        json.dumps(found[name].to_dict(), allow_nan=False)
    assert all(metric.name == name and metric.protocol in ("", *PROTOCOLS) for name, metric in metrics().items())


def test_the_size_of_batches_does_not_matter(made_up, small_model):
    dataset, model = made_up(), small_model()
    first, second = (run(model, dataset, QUICK, batch_size=n, options=Options(linear_epochs=2)) for n in (7, 500))
    for name in QUICK:
        assert second[name].metrics == pytest.approx(first[name].metrics, abs=1e-6)


def test_the_mode_of_the_model_is_left_as_it_was(made_up, small_model):
    model = small_model().train()
    model.body.register_forward_pre_hook(lambda module, _: None if not module.training else pytest.fail("training"))
    run(model, made_up(), ["top1"])
    assert model.training


@pytest.mark.parametrize("fields", [{}, {"representation": True}, {"pool": "avg"}, {"pool": "map"}])
def test_features_are_what_the_head_reads(fields, made_up, outputs_of):
    model = vm.vit("Ti/4", depth=2, img_size=4, patch_size=2, in_chans=1, num_classes=3, **fields).eval()
    dataset = made_up(train=5, test=4)
    outputs = outputs_of(model, dataset, batch_size=5)
    images = torch.cat([batch.inputs for batch in dataset.eval_batches("test", 12)])
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(images), pre_logits=True)
    torch.testing.assert_close(outputs.features("test").features, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outputs.logits, model(images).detach(), atol=1e-5, rtol=1e-5)
    assert not model.head._forward_pre_hooks
    headless = vm.vit("Ti/4", depth=1, img_size=4, patch_size=2, in_chans=1, num_classes=0, **fields)
    assert 0 <= run(headless, dataset, ["knn"])["knn"].metrics["knn"] <= 1


@pytest.mark.parametrize(
    ("names", "split", "options", "message"),
    [
        (["top2"], "test", {}, "Did you mean 'top1'"),
        (["top1"], "tset", {}, 'The split "tset" does not exist'),
        (["top1", "fewshot"], "test", {}, "25 shots"),
        (["knn"], "train", {}, "learns from the split train"),
        (["top1"], "test", {"shots": (5,)}, "shots is an option of the protocol fewshot, which is not asked for"),
        (["top1"], "test", {"severities": (3,)}, "severities is an option of the protocol corruptions"),
    ],
)
def test_what_is_wrong_is_reported_before_work(made_up, small_model, names, split, options, message):
    dataset, options = made_up(train=3, test=5), Options(**options)
    with pytest.raises(UserError, match=message):
        check_protocols(dataset, names, split=split, options=options)
    with pytest.raises(UserError, match=message):
        run(small_model(), dataset, names, split=split, options=options)
    assert dataset.passes == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shots": ()}, "1 or more"),
        ({"shots": (0, 5)}, "1 or more"),
        ({"shots": (5, 5)}, "twice"),
        ({"severities": (6,)}, "among 1 to 5"),
        ({"corruptions": ()}, "corruptions is empty"),
        ({"linear_epochs": 0}, "linear_epochs is a number of passes"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(UserError, match=message):
        Options(**options)


def test_metrics_by_name():
    assert metric_named("fewshot3").title == "3-shot accuracy"
    assert metric_named("ece").higher_is_better is False
    assert metric_named("ece").shown(0.0512) == "5.12 %"
    assert metric_named("nll").shown(1.5) == "1.5000 nats"
    with pytest.raises(UserError, match="Did you mean 'balanced_accuracy'"):
        metric_named("balanced_acuracy")
    assert options_for("fewshot5", Options()).shots == (5,)
    assert options_for("top1", Options(shots=(2,))) == Options(shots=(2,))
    with pytest.raises(UserError, match="all 15"):
        options_for("mce", Options(severities=(1,)))
