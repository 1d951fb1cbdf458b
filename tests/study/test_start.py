"""Studies that begin with trained weights, of one checkpoint or of a folder of them, and arms that train a part."""

import itertools
import json
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import vitmods as vm
from vitmods.adapters import open_checkpoint
from vitmods.cli import main
from vitmods.cli.compare import Compare, make_study
from vitmods.cli.options import parse
from vitmods.finetune import parameter_roles
from vitmods.model.flops import count_macs
from vitmods.recipes import finetune, plain
from vitmods.study import Study
from vitmods.study.arms import Arm, arm_from_text, make_arms
from vitmods.study.bases import make_base
from vitmods.study.cells import ImageOptions, Trial
from vitmods.study.checkpoints import Start, open_trial
from vitmods.study.executors import StudyOptions
from vitmods.study.fixed import fixed_settings
from vitmods.study.frozen import times_at_other_sizes
from vitmods.study.grid import AS_IS
from vitmods.study.prepare import build_arms
from vitmods.study.settings import Settings
from vitmods.study.store import Facts, StudyFolder
from vitmods.study.trial import TrialRunner, base_config, build_model
from vitmods.train import RunOptions
from vitmods.util.errors import UserError

pytestmark = pytest.mark.usefixtures("short_clocks", "short_probes")

RECIPE = plain(epochs=1).with_(batch_size=64, lr=1e-3)
IMAGES = {"img_size": 8, "in_chans": 1, "val_fraction": None, "test_fraction": None, "split_seed": 0}
PARTS = ("all", "attention", "head", "norms")
SHORT = {"data": "digits", "recipe": RECIPE, "limit_train": 128}
RUN = {"workers": 1, "device": "cpu", "cost_seconds": 0, "progress": False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a trial of one epoch."""
    out = tmp_path_factory.mktemp("checkpoint") / "trial"
    recipe = RECIPE.with_(mean=(0.4,), std=(0.3,))
    fixed, *_ = fixed_settings("mu2/4", "digits", recipe, ImageOptions(limit_train=128, **IMAGES))
    settings = Settings(fixed, (), (0,))
    TrialRunner(StudyFolder(out), settings.measure, RunOptions("cpu")).train(Trial(settings.cells[0], 0), out)
    return out


def make(checkpoint, arms=("attention", "dpn+train(head)"), seeds=1, recipe=RECIPE, **options):
    return Study(None, arms, "digits", recipe, seeds, start=checkpoint, limit_train=128, **options)


def run(study, out):
    return study.run(out, workers=1, device="cpu", cost_seconds=0.1, progress=False)


def test_parts_as_arms_of_a_study(checkpoint, tmp_path):
    study = make(checkpoint)
    result = run(study, tmp_path)
    assert result.complete
    record = result.to_dict()
    assert record["base"]["model"]["name"] == str(checkpoint)
    assert [(arm["name"], arm["changes"]) for arm in record["arms"]] == [
        ("attention", "train(attention)"),
        ("dpn+train(head)", "dpn+train(head)"),
    ]
    assert record["arms"][0]["model"]["changes"][0]["title"] == "Trains only attention"
    assert record["arms"][0]["cost"]["peak_memory"]["ratio"] < 1  # of what is trained
    started = build_model(base_config(study.settings.cells[0], 10), Arm("base"), 0, study.settings.fixed["start"])
    after = open_trial(StudyFolder(tmp_path).trial(Trial(study.settings.cell("attention"), 0))).state_dict()
    roles = parameter_roles(started)
    moved = {roles[name] for name, value in started.state_dict().items() if not torch.equal(after[name], value)}
    assert moved == {"attention", "positions", "head"}

    page = result.report().read_text()
    assert "Trains only attention" in page
    assert f"which change helps {checkpoint.name}?" in page  # not where it is
    files = {path: path.read_bytes() for path in tmp_path.rglob("result.json")}
    assert run(make(checkpoint, [*study.settings.arms, "ffn"]), tmp_path).complete  # an arm more
    assert all(path.read_bytes() == content for path, content in files.items())


def test_every_arm_and_seed_begins_with_the_checkpoint(checkpoint):
    settings = make(checkpoint).settings
    config, start = base_config(settings.cells[0], 10), settings.fixed["start"]
    trained = open_checkpoint(str(checkpoint)).state_dict()
    first, second = (build_model(config, Arm("base"), seed, start).state_dict() for seed in (0, 1))
    for name, value in trained.items():
        if not name.startswith("head."):
            assert torch.equal(first[name], value)
            assert torch.equal(second[name], value)
    assert not torch.equal(first["head.weight"], trained["head.weight"])
    changed = build_model(config, arm_from_text("dpn+train(attention)"), 0, start).state_dict()
    assert torch.equal(changed["head.weight"], first["head.weight"])
    assert torch.equal(changed["blocks.0.mlp.fc1.weight"], trained["blocks.0.mlp.fc1.weight"])


def first_steps(out):
    models = json.loads((out / "study.json").read_text())["models"]
    return {arm: facts["changes"][-1]["summary"] for arm, facts in models.items() if facts["changes"]}


def test_the_statement_before_the_first_step_has_the_accuracy_of_the_trained_head(checkpoint, tmp_path):
    study = make(checkpoint, ["dpn", "rms"])
    study.run(tmp_path / "same", **RUN)
    steps = first_steps(tmp_path / "same")
    dataset = TrialRunner(StudyFolder(tmp_path), study.settings.measure).dataset(study.settings.cells[0])
    top1 = []
    for changes in ((), (vm.DualPatchNorm(),)):
        model = vm.apply(open_trial(checkpoint), *changes) if changes else open_trial(checkpoint)
        hits = [model(x).argmax(1) == torch.as_tensor(y) for x, y in dataset.plain_batches("val", 256, 256)]
        top1.append(f"{100 * torch.cat(hits).double().mean():.1f}")
    assert f"Top-1 is {top1[1]} instead of {top1[0]} on up to 256 validation images." in steps["dpn"]
    assert steps["rms"].startswith("The outputs stay as they are.")  # with the biases of norms in that of the head


def test_the_statement_before_the_first_step_sees_through_a_head_of_zeros(folder, tmp_path):
    zeros = {**SHORT, "recipe": RECIPE.with_(init="big_vision", head_bias=-3.0)}
    study = Study(start=folder / "base.safetensors", arms=["dpn", "layerscale(init=1.0)"], **zeros, seeds=1)
    settings = study.settings
    base = build_model(base_config(settings.cells[0], 10), Arm("base"), 0, settings.fixed["start"], settings.recipe)
    assert not base.head.weight.any()
    study.run(tmp_path / "out", **RUN)
    steps = first_steps(tmp_path / "out")
    assert "of their spread. New weights" in steps["dpn"]
    assert "differ by 0%" not in steps["dpn"]
    assert steps["layerscale(init=1.0)"].startswith("The outputs stay as they are.")


def test_what_the_frozen_weights_reach_is_measured_and_stored(checkpoint, tmp_path, capfd, monkeypatch):
    """Logistic regression on the inputs of the checkpoint's head, on the images of the answer."""
    recipe = RECIPE.with_(head_start="probe")
    study = make(checkpoint, ["attention", "head"], seeds=2, recipe=recipe)
    text = str(study.dry_run(tmp_path, **{**RUN, "progress": True}))
    result = study.run(tmp_path, **{**RUN, "progress": True})
    known = result.data["frozen"][""]
    model = open_trial(checkpoint).eval()
    model.reset_classifier(0)
    dataset = TrialRunner(StudyFolder(tmp_path), study.settings.measure).dataset(study.settings.cells[0])
    x, y = {}, {}
    with torch.no_grad():
        for split in dataset.splits:
            pairs = [(model(images), torch.as_tensor(t)) for images, t in dataset.plain_batches(split, 2000, 500)]
            x[split], y[split] = (torch.cat(part) for part in zip(*pairs, strict=True))
    unit = [F.normalize(x[split]) for split in ("train", "val", "test")]
    votes, count = 0, 0
    for split, rows in zip(("val", "test"), unit[1:], strict=True):
        near = (rows @ unit[0].T).topk(20)
        scores = torch.zeros(len(rows), 10).scatter_add(1, y["train"][near.indices], (near.values / 0.07).exp())
        votes, count = votes + (scores.argmax(1) == y[split]).sum(), count + len(rows)
    assert known["knn"] == pytest.approx(float(votes / count))
    assert 0.15 < known["probe"] < 1
    assert (known["images"], known["weights"]) == (
        study.settings.fixed.get("images", known["images"]),
        known["weights"],
    )
    line = f"A linear probe of the frozen weights reaches {100 * known['probe']:.1f} %"
    rates = "Learning rates: 0.001 (base, attention and head)."
    for place in (capfd.readouterr().err, text, re.sub("<[^>]*>", "", result.report().read_text())):
        assert line in " ".join(place.split())
        assert f"Heads begin as linear probes. {rates}" in " ".join(place.split())
    # Read again, and with more arms, it is not measured again; other weights are.
    monkeypatch.setattr("vitmods.study.prepare.frozen_scores", lambda *arguments: pytest.fail("measured again"))
    more = make(checkpoint, ["attention", "head", "ffn"], seeds=2, recipe=recipe).run(tmp_path, **RUN)
    assert more.data["frozen"][""] == known
    make(checkpoint, ["attention"], seeds=2).dry_run(tmp_path / "other", **RUN)  # nor with another length
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        make(checkpoint, ["attention"], seeds=2, split_seed=1).dry_run(tmp_path / "other", **RUN)


def test_arms_by_default_of_trained_weights_keep_them(checkpoint, folder):
    def arms_of(*words):
        return tuple(arm.text for arm in make_study(parse(Compare, words, "compare")).settings.arms)

    assert arms_of("--from", str(checkpoint)) == ("train(attention)", "train(head)", "train(norms)")
    assert arms_of("--from", str(checkpoint), "--train", "head") == ("train(attention)", "train(norms)")
    assert arms_of("--from", str(folder)) == ("from wide.safetensors",)
    assert "levit" in arms_of()  # of new weights what is promising


def test_each_arm_is_trained_at_the_rate_of_its_part(checkpoint):
    def rates_of(*words):
        settings = make_study(parse(Compare, ["--from", str(checkpoint), *words], "compare")).settings
        recipes = {cell.arm.name: cell.recipe for cell in settings.cells}
        assert not any(recipe.rates for recipe in recipes.values())  # a trial does not depend on rates of other parts
        return {name: (recipe.optimizer.lr, recipe.optimizer.layer_decay) for name, recipe in recipes.items()}

    own, row = rates_of(), finetune().rates
    parts = {rate.part: (rate.lr, rate.layer_decay) for rate in row}
    expected = [parts.get(part, parts["all"]) for part in PARTS]
    assert own == dict(zip(("base", "attention", "head", "train(norms)"), expected, strict=True))
    assert set(rates_of("--lr", "1e-5").values()) == {(1e-5, decay) for _, decay in own.values()}
    assert {decay for _, decay in rates_of("--layer-decay", "0.9").values()} == {0.9}
    assert rates_of("--arms", "dpn+train(head)", "dpn") == {
        "base": own["base"], "dpn+train(head)": own["head"], "dpn": own["base"]
    }  # fmt: skip


def test_another_size_and_other_classes_but_not_other_channels(checkpoint):
    for positions in ("bicubic", "bilinear"):
        start, _, config = Start.of(str(checkpoint), positions)
        model = start.build(config.with_(img_size=16, num_classes=4), seed=0)
        expected = open_checkpoint(str(checkpoint))
        expected.set_input_size(16, positions=positions)
        assert torch.equal(model.pos_embed, expected.pos_embed)
        assert model.vit_config.img_size == (16, 16)
        assert model(torch.randn(1, 1, 16, 16)).shape == (1, 4)
    with pytest.raises(UserError, match="reads 1 channels, not 3"):
        start.build(config.with_(in_chans=3), seed=0)


def test_the_call_in_the_report_is_the_same_study(checkpoint, settings_of_call):
    study = make(checkpoint, positions="bilinear", img_size=16)
    assert study.settings.fixed["start"]["positions"] == "bilinear"
    assert settings_of_call(study).to_dict() == study.settings.to_dict()
    assert str(checkpoint) in repr(study)
    cfg = open_checkpoint(str(checkpoint)).pretrained_cfg
    assert (cfg["mean"], cfg["std"]) == ((0.4,), (0.3,)), "a trial says how its images were normalized"


def test_weights_that_changed_are_refused(checkpoint, tmp_path):
    settings = make(checkpoint).settings
    start = {**settings.fixed["start"], "fingerprint": "0" * 16}
    with pytest.raises(UserError, match="no longer holds the weights"):
        build_model(base_config(settings.cells[0], 10), Arm("base"), 0, start)
    other = json.loads(json.dumps(settings.to_dict()))
    other["start"]["fingerprint"] = "0" * 16
    facts = Facts("today", "vitmods compare", ("test",), other, {}, {}, {}, {})
    (tmp_path / "study.json").write_text(json.dumps(facts.to_dict()))
    with pytest.raises(UserError, match=r"start\.fingerprint: 0000000000000000 -> "):
        StudyFolder(tmp_path).check_same_study(settings.to_dict())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"start": "no/such/thing"}, "There is no checkpoint 'no/such/thing'"),
        ({"base": "mu2/4"}, "says what base is"),
        ({"arms": ["full"]}, r"Arm full \(train\(all\)\) is base itself"),
        ({"arms": {"some": "train(atention)"}}, "Did you mean 'attention'"),
        ({"arms": ["train(ffn)+train(head)"]}, "says twice what is trained"),
        ({"arms": ["lora", "x=lora(rank=8, alpha=8)"]}, r"are the same changes \(train\(lora\(rank=8\)\)\)"),
        ({"arms": ["lr(1e-4)+lr(1e-3)"]}, "sets lr twice"),
        ({"arms": ["full+lr"]}, r"lr is a field of the recipe: give its value, lr\(VALUE\)"),
        ({"arms": ["full+lr(fast)"]}, "lr is a number, not 'fast'"),
        ({"arms": ["lora(rank=4,on=head)"]}, "low-rank maps are for attention and ffn"),
        ({"arms": ["norms"]}, r"could be two things. To train the norms alone, write train\(norms\)"),
        ({"arms": ["ffn", "x=train(ffn)"]}, r"are the same changes \(train\(ffn\)\)"),
    ],
)
def test_what_cannot_be_begun_is_refused(checkpoint, options, words):
    with pytest.raises(UserError, match=words):
        Study(**{"base": None, "arms": ["ffn"], "start": str(checkpoint), "recipe": RECIPE, **options})


ARMS = {  # what is written, and the changes and the recipe that it stands for
    "attention": ("", {"train": "attention"}),
    "full": ("", {"train": "all"}),
    "mine=ffn": ("", {"train": "ffn"}),
    "train(norms+head)": ("", {"train": "norms+head"}),
    "train(ffn)+dpn": ("dpn", {"train": "ffn"}),
    "biases": ("", {"train": "biases"}),
    "last(4)": ("", {"train": "last(4)"}),
    "lora(rank=4, on=attention+ffn)": ("", {"train": "lora(rank=4,on=attention+ffn)"}),
    "train(lora+head)": ("", {"train": "lora(rank=8)+head"}),
    "slow=full+lr(5e-5)": ("", {"train": "all", "lr": 5e-5}),
    "dpn+attention+lr(1e-4)": ("dpn", {"train": "attention", "lr": 1e-4}),
    "layerdecay(0.6)": ("", {"layer_decay": 0.6}),
    "probe_first": ("", {"head_start": "probe"}),
    "crop_scale(0.5:1.0)+flip(0)": ("", {"crop_scale": (0.5, 1.0), "flip": 0.0}),
    "dpn+train( head )+rms": ("dpn+rms", {"train": "head"}),
}


@pytest.mark.parametrize("text", ARMS)
def test_arms_say_what_is_trained(text):
    changes, recipe = ARMS[text]
    name = text.partition("=")[0] if text.startswith(("mine=", "slow=")) else text
    arm = Arm(name, vm.parse_changes(changes) if changes else (), recipe)
    assert arm_from_text(text) == arm
    assert arm_from_text(arm.text) == Arm(arm.text, arm.changes, arm.recipe)
    assert make_arms({"some": text})[0] == Arm("some", arm.changes, arm.recipe)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    out = tmp_path_factory.mktemp("pretrained")
    Study("mu2/4", ["dpn", "post=placement(attn=post,mlp=post)"], seeds=2, **SHORT).run(out, **RUN)
    return out


@pytest.mark.parametrize("arm", ["", "trials/base"])
def test_evaluated_images_that_the_weights_were_trained_on_are_counted(pretrained, arm):
    def notices(**options):
        study = Study(None, ["attention"], "digits", RECIPE, 1, start=pretrained / arm, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            study.dry_run(options=StudyOptions(**RUN))
        return [str(warning.message) for warning in caught if "training images of the weights" in str(warning.message)]

    assert not notices(limit_train=64)
    (text,) = notices(limit_train=64, split_seed=1)
    assert re.match(r"\d+ images of val and test were training images .*/pretrained0.*: scores on them are", text)


def test_an_arm_that_was_retrained_on_all_images_was_trained_on_test(pretrained, tmp_path):
    study = Path(shutil.copytree(pretrained, tmp_path / "study"))
    Study("mu2/4", ["dpn", "post=placement(attn=post,mlp=post)"], seeds=2, **SHORT).retrain(study, "base", device="cpu")
    after = Study(None, ["attention"], "digits", RECIPE, 1, start=study / "retrained" / "base", limit_train=64)
    with pytest.warns(UserWarning, match="538 images of val and test were training images"):
        after.dry_run(options=StudyOptions(**RUN))


@pytest.fixture
def folder(tmp_path):
    for name, size in (("base", "mu2/4"), ("wide", "mu3/4")):
        torch.manual_seed(0)
        vm.adapters.save(vm.vit(size, img_size=8, in_chans=1, num_classes=10), tmp_path / f"{name}.safetensors")
    return tmp_path


def model_of(study, name, seed=0):
    settings = study.settings
    return build_model(base_config(settings.cells[0], 10), settings.arm(name), seed, settings.fixed["start"])


def body(model):
    return {name: value for name, value in model.state_dict().items() if not name.startswith("head.")}


def test_each_arm_and_seed_begins_with_its_own_weights(pretrained):
    study = Study(start=pretrained, **SHORT)
    assert [arm.name for arm in study.settings.arms] == ["dpn", "post"]
    assert study.settings.seeds == (0, 1)  # those of the folder
    for arm, seed in itertools.product(("base", "dpn", "post"), (0, 1)):
        trained = open_trial(pretrained / "trials" / arm / f"seed{seed}")
        begun = model_of(study, arm, seed)
        assert begun.vit_config == trained.vit_config
        for name, value in body(trained).items():
            assert torch.equal(body(begun)[name], value)
        assert not torch.equal(begun.head.weight, trained.head.weight)


def test_changes_that_the_folder_lacks_begin_with_base(pretrained):
    study = Study(start=pretrained, arms=["dpn", "normformer", "dpn+train(attention)", "attention"], **SHORT, seeds=2)
    starts = {arm.name: arm.start and arm.start.rsplit("/", 1)[-1] for arm in study.settings.arms}
    assert starts == {"dpn": "dpn", "normformer": None, "dpn+train(attention)": "dpn", "attention": None}
    assert study.settings.arm("dpn+train(attention)").recipe == {"train": "attention"}
    base = open_trial(pretrained / "trials/base/seed1")
    assert torch.equal(body(model_of(study, "normformer", 1))["pos_embed"], base.pos_embed)


def test_a_study_of_transfer_runs_to_its_report(pretrained, tmp_path, settings_of_call):
    study = Study(start=pretrained, seeds=1, **SHORT)
    result = study.run(tmp_path, **RUN)
    assert result.complete
    assert "Starts from its own trained weights" in result.report().read_text()
    assert study.run(tmp_path, **RUN).to_dict() == result.to_dict()
    assert settings_of_call(study).to_dict() == study.settings.to_dict()


def test_a_folder_of_files(folder, capsys):
    study = Study(start=folder, **SHORT)
    assert study.settings.arms == (Arm("wide", start=str(folder / "wide.safetensors")),)
    assert study.settings.arms[0].text == "from wide.safetensors"
    wide = open_checkpoint(str(folder / "wide.safetensors"))
    for seed in (0, 3):
        assert torch.equal(model_of(study, "wide", seed).pos_embed, wide.pos_embed)
    assert main(["compare", "--from", str(folder), "--limit-train", "128", "--epochs", "1", "--dry-run"]) == 0
    assert "wide" in capsys.readouterr().out
    chosen = ("dpn", "rms", "placement(attn=post,mlp=post)")
    study = make_study(parse(Compare, ["--from", str(folder), "--arms", *chosen], "compare"))
    assert tuple(arm.name for arm in study.settings.arms) == chosen


@pytest.mark.parametrize("of_study", [True, False])
def test_a_budget_takes_the_seeds_that_have_weights(pretrained, tmp_path, of_study):
    """A second study reuses the trials of base, and no other seeds are looked for."""
    start, options = pretrained if of_study else pretrained / "trials" / "base", {**SHORT, "reuse": [tmp_path]}
    first = Study(start=start, arms=["attention"], **options | {"reuse": []}).run(tmp_path / "a", budget="59m", **RUN)
    second = Study(start=start, arms=["normformer"], **options).run(tmp_path / "b", budget="59m", **RUN)
    for answer in (first, second):
        assert answer.complete
        assert answer.settings["seeds"] == [0, 1]
    assert len([*(tmp_path / "b").glob("trials/base/*/reused.json")]) == 2


def test_a_folder_that_lacks_what_is_needed_or_holds_too_much_is_refused(pretrained, folder, tmp_path, capsys):
    with pytest.raises(UserError, match=r"does not hold seed2, but seed0, seed1"):
        Study(start=pretrained, seeds=[2], **SHORT).run(tmp_path / "out", **RUN)
    assert main(["finetune", "--model", str(folder)]) == 2
    assert "holds several checkpoints: base, wide" in " ".join(capsys.readouterr().err.split())
    (folder / "base.safetensors").unlink()
    with pytest.raises(UserError, match="holds the checkpoints wide, and none is named base"):
        Study(start=folder, **SHORT)


BLENDED = "soft=qknorm+norm_blend(0.5)"


def test_a_model_of_another_library_is_trained_further(tmp_path):
    """In place, with another number of classes: every arm starts from the trained weights and a new head."""
    base, run = "timm:vit_tiny_patch16_224?depth=1&embed_dim=16&num_heads=2&patch_size=4", {**RUN, "device": "cpu"}
    Study(base=base, arms=["layerscale(init=0.5)"], seeds=1, **SHORT).run(tmp_path / "first", **run)
    trials = tmp_path / "first" / "trials"
    trial = trials / "base" / "seed0"
    study = Study(start=trial, arms=["layerscale(init=1.0)", "dpn(start=gentle)", BLENDED], seeds=1, **SHORT)
    study.run(tmp_path / "second", **run)
    effects = first_steps(tmp_path / "second")
    assert effects["layerscale(init=1.0)"].startswith("The outputs stay as they are. New weights:")
    assert re.search(r"differ by .* Top-1 is \S+ instead of", effects["dpn(start=gentle)"])
    assert re.fullmatch(r"The outputs stay as they are\. New .* over the first 50% of the steps\.", effects["soft"])
    blended = open_trial(tmp_path / "second" / "trials" / "soft" / "seed0")
    assert [str(change) for change in blended.vm_changes] == ["qknorm"]

    folder = tmp_path / "plain"  # whose trials are named by hand
    for name, arm in (("base", "base"), ("scaled", "layerscale*")):
        shutil.copytree(next(trials.glob(arm)), folder / name)
    again = Study(start=folder, seeds=1, **SHORT)
    assert again.settings.arm("scaled").changes == (vm.LayerScale(init=0.5),)
    again.run(tmp_path / "third", **run)
    opened = open_trial(tmp_path / "third" / "trials" / "scaled" / "seed0")
    assert [str(change) for change in opened.vm_changes] == ["layerscale(init=0.5)"]

    start, _, spec = Start.of(str(trial))
    assert spec == base
    model, trained = start.build(make_base(spec, 7, (8, 8), 1), seed=3), open_trial(trial).state_dict()
    assert model.head.weight.shape == (7, 16)
    assert all(torch.equal(v, trained[name]) for name, v in model.state_dict().items() if not name.startswith("head."))
    with pytest.raises(UserError, match="keep its image size, 8 x 8"):
        start.build(make_base(spec, 7, (16, 16), 1), seed=3)
    with pytest.raises(UserError, match=r"layerscale\(init=0.5\): start from a trial of base"):
        Start.of(str(next(trials.glob("layerscale*/seed0"))))


def test_a_study_starts_from_the_model_that_the_key_names_and_says_what_it_left(checkpoint, tmp_path, capsys):
    weights = open_checkpoint(str(checkpoint)).state_dict()
    student = {f"student.{name}": tensor + 0.1 for name, tensor in weights.items()}
    teacher = {f"teacher.{name}": tensor for name, tensor in weights.items()}
    torch.save(student | teacher | {"teacher.mask_token": torch.ones(1, 32)}, tmp_path / "m.pth")
    words = "--data digits --limit-train 128 --arms dpn --recipe plain --epochs 1 --seeds 1 --device cpu --img-size 8"
    given = ["--from", f"{tmp_path / 'm.pth'}?num_heads=2", *words.split()]
    out = ["--out", str(tmp_path / "out"), "--workers", "1"]
    with pytest.raises(UserError, match=r"m\.pth holds the models student, teacher. Choose one: --key KEY"):
        make_study(parse(Compare, given, "compare", ""))
    assert main(["compare", *given, "--key", "teacher", *out, "--dry-run"]) == 0
    left_out = "mask_token (stands for masked patches, which a plain forward pass lacks)"
    assert left_out in " ".join(capsys.readouterr().out.split())
    assert main(["compare", *given, "--key", "teacher", *out]) == 0
    assert left_out in (tmp_path / "out" / "report.html").read_text()
    settings = Settings.from_dict(StudyFolder(tmp_path / "out").facts().settings)
    model = Start(**settings.fixed["start"]).build(base_config(settings.cells[0], 10), 0)
    assert torch.equal(model.state_dict()["blocks.0.norm1.weight"], weights["blocks.0.norm1.weight"])


def test_eight_ways_to_adapt_fit_a_shallow_model(checkpoint):
    study = Study(start=str(checkpoint), arms="adapt", seeds=2, **SHORT)
    assert len(study.settings.arms) == 8
    models = {cell.arm.name: model for cell, model in build_arms(study.settings, AS_IS, 10)}
    trained = {name: sum(p.numel() for p in m.parameters() if p.requires_grad) for name, m in models.items()}
    assert trained["head"] < trained["biases"] < trained["lora(rank=8)"] < trained["attention"] < trained["base"]


def test_a_dry_run_states_what_other_image_sizes_take(tmp_path):
    file = tmp_path / "trained.safetensors"
    vm.export(vm.vit("mu1/14", img_size=98, in_chans=1, num_classes=3).eval(), file)
    study = make(str(file), arms=["head"], img_size=98)
    line = times_at_other_sizes(study.settings)
    small, large = (
        count_macs(vm.ViTConfig.from_name("mu1/14", img_size=s, in_chans=1, num_classes=1)) for s in (98, 518)
    )
    assert line.startswith("A step of base takes about")
    assert f"{large / small:.2g} times as long at 518 px" in line
    assert " 98 px" not in line
    assert times_at_other_sizes(make(str(file), arms=["head"], img_size=14).settings) == ""


@pytest.mark.parametrize("source", ["", "  "])
def test_weights_without_a_name_are_refused(source):
    with pytest.raises(UserError, match=r"this is empty \(--from\)"):
        Study(None, ["head"], "digits", start=source)
