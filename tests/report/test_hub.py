"""Folders for timm and the Hub: they open elsewhere with the same outputs, hold nothing pickled and tell no paths."""

import json
import shlex
import shutil
import types

import pytest
import timm
import torch
import yaml
from PIL import Image

import vitmods as vm
from vitmods.adapters.timm_folder import OURS, timm_words
from vitmods.cli import main
from vitmods.report.hub import StartWeights, model_card
from vitmods.study import Answer
from vitmods.study.checkpoints import open_trial
from vitmods.study.trial import with_modules
from vitmods.tasks import Segmentation
from vitmods.train.trial import MODULES, _save_weights
from vitmods.util.errors import UserError
from vitmods.util.text import public_command, without_place, without_places

IMAGES = torch.randn(3, 1, 8, 8)


@pytest.fixture(scope="module")
def study(finished):
    return finished("plain")


def pushed(study, arm, folder):
    return vm.save_pretrained(study / "trials" / arm / "seed1", folder, license="apache-2.0")


@pytest.mark.parametrize(("arm", "architecture"), [("rms", "vit_tiny_patch16_224"), ("dpn", OURS)])
def test_timm_and_we_open_the_folder_with_the_same_outputs(study, tmp_path, arm, architecture):
    folder = pushed(study, arm, tmp_path / "model")
    expected = open_trial(study / "trials" / arm / "seed1")(IMAGES)
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert json.loads((folder / "config.json").read_text())["architecture"] == architecture
    timm_model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert type(timm_model).__module__ == ("timm.models.vision_transformer" if arm == "rms" else "vitmods.model.vit")
    torch.testing.assert_close(timm_model(IMAGES), expected, rtol=0, atol=1e-6)
    data = timm.data.resolve_model_data_config(timm_model)
    assert [list(data[name]) for name in ("input_size", "mean", "std")] == [[1, 8, 8], [0.25], [0.75]]
    assert timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=7)(IMAGES).shape == (3, 7)
    own_model = vm.from_pretrained(folder)
    assert torch.equal(own_model(IMAGES), expected)
    assert not own_model.training
    assert own_model.pretrained_cfg["label_names"] == tuple("0123456789")


def test_predict_and_transformers_read_the_folder(study, tmp_path):
    folder = pushed(study, "rms", tmp_path / "model")
    Image.new("L", (8, 8), 99).save(tmp_path / "image.png")
    expected = vm.predict(study / "trials" / "rms" / "seed1", tmp_path / "image.png", device="cpu")
    assert vm.predict(folder, tmp_path / "image.png", device="cpu") == expected
    transformers = pytest.importorskip("transformers")
    hf_model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    torch.testing.assert_close(hf_model(pixel_values=IMAGES).logits, vm.from_pretrained(folder)(IMAGES))
    assert hf_model.config.id2label[3] == "3"


def test_the_card_tells_the_studys_result(study, tmp_path):
    text = (pushed(study, "dpn", tmp_path / "digits-dpn") / "README.md").read_text()
    answer = Answer.load(study)
    _, head, body = text.split("---\n", 2)
    metadata = yaml.safe_load(head)
    result = json.loads((study / "trials" / "dpn" / "seed1" / "result.json").read_text())
    assert metadata["library_name"] == "vitmods"
    assert metadata["license"] == "apache-2.0"
    assert metadata["pipeline_tag"] == "image-classification"
    assert {"vitmods", "dpn"} <= set(metadata["tags"])
    (entry,) = metadata["model-index"]
    assert entry["name"] == "digits-dpn"
    (row,) = [row for row in entry["results"][0]["metrics"] if row["type"] == "accuracy"]
    assert row["value"] == result["metrics"]["top1"]
    assert f"**dpn: {answer['dpn'].verdict}** against base: `{answer['dpn']!r}`" in body
    assert answer.to_markdown() in body
    cost = next(arm.cost for arm in answer.arms if arm.name == "dpn")
    assert f"| peak memory of training | {cost.peak_memory.ratio:.3f} (" in body
    for part in ("Dual PatchNorm", "128 train, 179 val, 359 test", '"warmup_epochs": 0', "vm.Study(", "## Limits"):
        assert part in body
    assert all(warning in body for warning in answer.warnings)
    assert "secret" not in text  # nor any other folder of this machine


def test_a_trial_with_modules_beside_its_vit_is_written_as_it_is(tmp_path):
    recipe = vm.recipes.RECIPES["small_segmentation"]()
    task = Segmentation.from_recipe(Segmentation.fitted(recipe))
    model = with_modules(vm.vit("mu/4", img_size=16, num_classes=3), task, 3, 0).eval()
    trial = tmp_path / "trials" / "base" / "seed0"
    trial.mkdir(parents=True)
    config = {
        "schema": 1, "arm": "base", "changes": "", "seed": 0, "task": task.name,
        "model": json.loads(model.backbone.vit_config.to_json()), "recipe": recipe.to_dict(),
        "data": {"name": "stripes", "classes": ["a", "b", "c"], "splits": {}, "fingerprint": ""},
        "images": {"data": "/data/of/mine/stripes", "img_size": [16, 16], "in_chans": 3, "task": task.name},
    }  # fmt: skip
    weights = _save_weights(model, model.state_dict(), trial)
    result = {"schema": 1, "status": "finished", "split": "test", "metrics": {"miou": 0.5}, "weights": weights}
    (trial / "config.json").write_text(json.dumps(config))
    (trial / "result.json").write_text(json.dumps(result))
    folder = vm.save_pretrained(trial, tmp_path / "shared")
    assert (folder / MODULES).exists()
    assert "/data/of" not in (folder / "config.json").read_text()
    again = vm.from_pretrained(folder).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


class FakeHub:
    """What of HfApi is used, and what it was given."""

    def __init__(self, calls, token, library_name):
        self.calls = calls
        calls.append(("token", token))

    def create_repo(self, repo_id, *, private, exist_ok):
        self.calls.append(("create", repo_id, private, exist_ok))
        return types.SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        files = {path.relative_to(folder_path).as_posix(): path.read_bytes() for path in folder_path.rglob("*")}
        self.calls.append(("upload", repo_id, files))
        return types.SimpleNamespace(commit_url=f"hub/{repo_id}/commit/1")


def test_push_uploads_weights_config_and_card_and_nothing_pickled(study, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr("huggingface_hub.HfApi", lambda token, library_name: FakeHub(calls, token, library_name))
    trial = str(study / "trials" / "dpn" / "seed0")
    assert main(["export", trial, "--to", "hub", "--push", "me/digits-dpn"]) == 0
    assert capsys.readouterr().out == "hub/me/digits-dpn/commit/1\n"
    token, create, (_, repo, files) = calls
    assert (token, create, repo) == (("token", None), ("create", "me/digits-dpn", None, True), "me/digits-dpn")
    assert set(files) == {"README.md", "config.json", "model.safetensors"}
    assert b"# digits-dpn" in files["README.md"]
    assert not any(content.startswith((b"PK", b"\x80")) for content in files.values())


def test_what_the_hub_refuses_is_an_error_with_the_remedy(study, monkeypatch):
    from huggingface_hub.errors import LocalTokenNotFoundError

    def refuse(*args, **given):
        raise LocalTokenNotFoundError("no token here")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", refuse)
    with pytest.raises(UserError, match=r"no token here.*hf auth login"):
        vm.push_to_hub(study / "trials" / "rms" / "seed0", "me/rms")


def test_from_the_hub_no_file_that_could_run_code_is_downloaded(study, tmp_path, monkeypatch):
    from fnmatch import fnmatch

    folder = pushed(study, "dpn", tmp_path / "model")
    asked = {}

    def download(repo_id, *, revision, token, allow_patterns):
        asked.update(repo_id=repo_id, revision=revision, patterns=allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model = vm.from_pretrained("me/digits-dpn", revision="v1")
    assert model.vit_config == vm.from_pretrained(folder).vit_config
    assert (asked["repo_id"], asked["revision"]) == ("me/digits-dpn", "v1")
    for name in ("pytorch_model.bin", "model.pth", "modeling.py", "weights.pkl", "model.pt2"):
        assert not any(fnmatch(name, pattern) for pattern in asked["patterns"])


def test_a_card_without_a_study_says_so(study, tmp_path, capsys):
    folder = vm.save_pretrained(vm.vit("mu/4", img_size=8, in_chans=1, num_classes=3), tmp_path / "new")
    text = (folder / "README.md").read_text()
    assert "No study has compared its changes with the unchanged model." in text
    assert "model-index" not in text
    trial = study / "trials" / "dpn" / "seed0"
    with pytest.raises(UserError, match="the trial itself"):
        vm.save_pretrained(trial, trial)
    for options in (["--to", "hub", "--batch", "2"], ["--to", "onnx", "--push", "me/x"]):
        assert main(["export", str(trial), *options]) == 2
        assert "leave it out" in capsys.readouterr().err


def test_folders_repositories_and_studies_that_do_not_fit_are_named(study, tmp_path, monkeypatch):
    from huggingface_hub.errors import HFValidationError

    def refuse(*args, **given):
        raise HFValidationError("no such name")

    trial = study / "trials" / "dpn" / "seed0"
    moved = shutil.copytree(trial, tmp_path / "moved")
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps({**config, "arm": "other"}))
    with pytest.raises(UserError, match="is not a trial of the study"):
        vm.save_pretrained(moved, tmp_path / "out", study=study)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/README.md").write_text("Mine.")
    with pytest.raises(UserError, match="is not a card of vitmods"):
        vm.save_pretrained(trial, tmp_path / "mine")
    with pytest.raises(UserError, match="without revisions"):
        vm.from_pretrained(trial, revision="v1")
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(UserError, match=r"Neither a local folder nor a repository on the Hub: a/b \(no such name\)"):
        vm.from_pretrained("a/b")


def test_timm_is_named_exactly_where_it_can_express_the_model():
    kinds = {
        "rms": True,
        "qknorm+layerscale": True,
        "subln": False,
        "dyt": False,
        "placement(attn=post,mlp=post)": False,
    }
    for changes, is_timms in kinds.items():
        config = vm.apply(vm.vit("mu2/4", img_size=(16, 24), num_classes=3), *vm.parse_changes(changes)).vit_config
        assert (timm_words(config) is not None) == is_timms, changes


PLACES = {
    "/home/jane/x": "path/to/x",
    "imagenet:/home/jane/x": "imagenet:path/to/x",
    "a:b:~jane/my photos/x": "a:b:path/to/x",
    "/home/jane's place/my pets/": "path/to/my pets",
    "file:///home/jane/x": "path/to/x",
    "../../jane/x": "path/to/x",
    "--data=imagenet:/home/jane doe/x": "--data=imagenet:path/to/x",
}


@pytest.mark.parametrize(("place", "public"), PLACES.items())
def test_places_of_this_machine_are_taken_out_and_nothing_else(place, public):
    assert without_place(place) == public
    assert without_place({"a": [{"b": [place, 1, None]}]}) == {"a": [{"b": [public, 1, None]}]}
    command = shlex.join(["vitmods", "compare", "--data", place, "--arms", "a=dpn(x=1)"])
    assert public_command(command) == shlex.join(["vitmods", "compare", "--data", public, "--arms", "a=dpn(x=1)"])
    assert public_command(f"vm.Study({place!r}, ['dpn'])").replace("'", '"') == f'vm.Study("{public}", ["dpn"])'
    twice = f"vitmods a --out {shlex.quote(place)} --out={shlex.quote(place)} b"
    assert public_command(twice, ["--out"]) == "vitmods a b"
    same = (
        "see https://openreview.net/forum?id=jg, base='mu3/2', 1/2, timm/vit, hf:beans, s3://bucket/x, '/', \"a/b c\""
    )
    assert without_places(same) == same


def test_the_card_names_the_weights_that_training_started_from(tmp_path):
    folder = tmp_path / "my-backbone"
    folder.mkdir()
    assert StartWeights.of({"source": str(folder)}) == ("my-backbone", "", "")
    (folder / "config.json").write_text('{"_name_or_path": "facebook/dinov2-small"}')
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    assert StartWeights.of({"source": str(folder)}) == ("my-backbone", "", "apache-2.0")
    timms = StartWeights.of({"source": "vit_small_patch16_224.augreg_in21k_ft_in1k"})
    assert timms[1:] == ("timm/vit_small_patch16_224.augreg_in21k_ft_in1k", "apache-2.0")
    assert StartWeights.of({"source": "/home/me/secret/gone.pth"}) == ("path/to/gone.pth", "", "")
    assert StartWeights.of(None) == ("", "", "")
    (folder / "README.md").write_text("---\na: [\n---\n# A model\n")
    assert StartWeights.of({"source": str(folder)}) == ("my-backbone", "", "")
    start = {"source": "timm:vit_small_patch16_224.augreg_in21k_ft_in1k"}
    config = {"arm": "base", "seed": 0, "recipe": {}, "data": {"classes": ["a"]}, "start": start}
    text = model_card("pets", None, None, "vitmods", config, {}, None, None)
    assert yaml.safe_load(text.split("---\n")[1])["base_model"] == timms.hub_id
    assert f"(https://huggingface.co/{timms.hub_id}), license apache-2.0." in text
