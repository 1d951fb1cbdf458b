"""The command line by its `main`, as a process where it matters what is imported; test_surroundings.py: whole ones."""

import io
import json
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from PIL import Image

import vitmods as vm
from vitmods import __version__
from vitmods.changes import REGISTRY
from vitmods.cli import COMMANDS, compare, main
from vitmods.cli.options import parse, readable_folder
from vitmods.recipes import TASK_PARTS
from vitmods.recipes.recipe import fields_by_name
from vitmods.study.checkpoints import open_trial
from vitmods.study.store import StudyFolder
from vitmods.util.errors import UserError

pytestmark = pytest.mark.usefixtures("short_clocks")

COMPARE = "compare --base mu/4 --arms dpn --seeds 1 --epochs 1 --limit-train 128"
COMPARE += " --workers 1 --device cpu --cost-seconds 0.1"


def test_help_is_quick_and_imports_nothing_heavy():
    script = "import sys; from vitmods.cli import main; main(['--help']); main(['--version']); print(*sys.modules)"
    shell = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    *lines, modules = shell.stdout.splitlines()
    assert all(f"  {name}" in shell.stdout for name in COMMANDS)
    assert max(map(len, lines)) <= 100
    heavy = {"torch", "numpy", "timm", "torchvision", "scipy", "sklearn", "rich", "tyro", "PIL", "matplotlib"}
    assert not heavy & set(modules.split())
    assert len(modules.split()) < 150  # which is what its time depends on


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("line", "word"),
    [("vitmods comp", "compare"), ("vitmods train --epo", "--epochs"), ("vitmods decide x --generalize see", "seeds")],
)
def test_bash_completes_commands_options_and_choices(line, word, completion):
    words = line.split()
    ask = f"source {completion}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _tyro_vitmods; echo $COMPREPLY"
    shell = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=240)
    assert shell.stdout.split() == [word], shell.stderr


@pytest.fixture(scope="module")
def completion(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "vitmods.bash"
    with path.open("w") as file, redirect_stdout(file):
        assert main(["--tyro-print-completion", "bash"]) == 0
    return path


def test_completion_of_an_unknown_shell(refused):
    for shell in ("", "abacus"):
        assert "bash, zsh or fish" in refused(f"--tyro-print-completion {shell}")


def test_help_is_a_command_and_the_folder_comes_first(said, refused):
    assert said("help").out == said("--help").out
    assert said("help compare").out == said("compare --help").out
    for command in ("compare", "base", "train"):
        assert "a-folder-that-is-missing" in refused(f"{command} a-folder-that-is-missing --device cpu")
    assert "Did you mean 'compare'" in refused("comparee")


def test_version_and_no_command(said):
    assert said("--version").out == f"vitmods {__version__}\n"
    assert "usage: vitmods" in said("").out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command, said):
    text = said(command, "--help").out
    assert f"usage: vitmods {command}" in text
    assert f"  vitmods {command}" in text
    assert text.count("(default: ") >= (1 if command in ("changes", "paper", "recipes", "report") else 3)


def test_help_shows_the_defaults_of_the_recipe(said):
    for option, crop in (("--recipe plain", "none"), ("--recipe=deit", "random_resized")):
        text = said(f"compare {option} --help-all").out
        assert re.search(rf"--crop {{.*?\(default:\s+{crop}\)", text, flags=re.DOTALL)


def shown(printed):
    """The options that a help shows, in its left column."""
    return set(re.findall(r"^[│ ] (?:-h, )?--(?:no-)?(\w[\w-]*)", printed.out, flags=re.MULTILINE))


@pytest.mark.parametrize(  # on wide terminals tyro puts two boxes in a row
    ("command", "columns"), [("compare", 60), ("compare", 200), ("train", 80), ("finetune", 80)]
)
def test_help_shows_the_main_options_and_help_all_every_one(command, columns, said, monkeypatch):
    full = shown(said(command, "--recipe", "plain", "--help-all"))
    monkeypatch.setenv("COLUMNS", str(columns))
    brief = shown(said(command, "--recipe", "plain", "--help"))
    assert 10 <= len(brief) <= 18 < 80 < len(full)
    assert brief < full
    assert "mixup" in full


def test_options_of_tasks_and_protocols_are_shown_with_their_task(said, refused):
    usual = said("compare --help-all")
    assert "`vitmods compare --task TASK --help-all`" in usual.out
    usual, tasks = shown(usual), ("classification", *TASK_PARTS)
    of_task = {task: shown(said("compare --help-all --task", task)) for task in tasks}
    assert len(usual) <= 120
    assert of_task["classification"] - usual == {
        "shots",
        "corruptions",
        "severities",
        "temperature",
        "textures",
        "linear-epochs",
    }
    assert {"codes", "mixup"} & of_task["beit"] == {"codes"}
    assert {name.replace("_", "-") for name in fields_by_name()} <= set().union(*of_task.values())
    assert "Unknown task 'dinno'. Did you mean 'dino'?" in refused("compare --task dinno --help-all")


def test_options_of_tasks_are_read_without_being_shown():
    words = "--codes 9 --fpn-channels 32 --hue 0.3 --text-depth 2 --eval-flip --shots 3 --task beit"
    options = parse(compare.Compare, words.split(), "compare", compare.COMMON)
    assert options.protocols.shots == (3,)
    assert options.training.overrides == {
        "codes": 9, "fpn_channels": 32, "hue": 0.3, "text_depth": 2, "eval_flip": True
    }  # fmt: skip


def test_help_fills_its_lines(said, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = said("compare --help").out
    assert "or wds:SHARDS (default: digits)" in text
    assert re.search(r"--arms STR \.\.\. +│\n", text)
    assert "{None}" not in text
    assert {len(line) for line in text.splitlines() if line.startswith(("│", "╭"))} == {80}


def test_debug_shows_where():
    with pytest.raises(ValueError, match="study"):
        main(["report", "/no/such/folder", "--debug"])


def test_changes_are_listed_and_readable_at_80_columns(said, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text, record = said("changes").out, json.loads(said("changes --json").out)
    assert max(map(len, text.splitlines())) <= 80
    assert [change["name"] for change in record] == list(REGISTRY)
    assert "`vitmods paper`" in text  # where line-ups are
    for change in record:
        assert change["name"] in text
        assert change["preserves"] in ("function", "weights", "nothing")
        assert change["published"]


def test_one_change_has_a_card(said):
    text = " ".join(said("changes dtn").out.split())
    for part in ("Dynamic Token Normalization", "2112.02624", "slots attn norm before", "preserves", "cost", "options"):
        assert part in text
    assert "Patch" not in text
    assert json.loads(said("changes rms --json").out)["name"] == "norm"


def test_diff_shows_what_an_arm_alters(said):
    assert "Dual PatchNorm" in said("diff --base mu/4 --img-size 8 --in-chans 1 --arm dpn+rms").out


@pytest.fixture
def photos(tmp_path):
    for i in range(24):
        path = tmp_path / "photos" / ("cat", "dog")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (i * 9, 99, 9)).save(path)
    return tmp_path / "photos"


def test_data_checks_a_folder(photos, said, capsys, tmp_path):
    printed = said("data", photos, "--out", tmp_path / "check")
    assert "cat" in printed.out
    assert printed.err.startswith(f"Reading {photos} ...")
    assert json.loads((tmp_path / "check" / "data.json").read_text())["classes"] == ["cat", "dog"]
    (photos / "cat" / "broken.jpg").write_text("no image")
    assert main(["data", str(photos)]) == 1
    assert "broken.jpg" in capsys.readouterr().out


def test_data_packs_a_folder(photos, said, refused, capsys, tmp_path):
    pack, shards = ["data pack", photos, tmp_path / "shards", "--shard-mb"], tmp_path / "shards"
    assert "train: 24 images" in said(*pack, 0.01).out
    assert "were there, and were compared" in said(*pack, 0.01).out
    folder, packed = (said("data", place).out.partition("images: 2 classes")[2] for place in (photos, shards))
    assert folder == packed
    assert "Choose another folder" in refused(*pack, 1)
    (photos / "cat" / "broken.jpg").write_text("no image")
    assert "cat/broken.jpg: not an image" in refused("data pack", photos, tmp_path / "other")
    shard = shards / "train-000000.tar"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert main(["data", str(shards)]) == 1
    assert "Problem: The shard train-000000.tar is not what was packed" in capsys.readouterr().out


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A finished study, and what it printed in a window of 80 columns."""
    out = tmp_path_factory.mktemp("shell") / "out"
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(io.StringIO()) as printed:
        patched.setenv("COLUMNS", "80")
        with redirect_stderr(io.StringIO()) as progress:
            assert main([*COMPARE.split(), "--out", str(out)]) == 0
    return out, printed.getvalue(), progress.getvalue()


def test_compare_prints_a_verdict_and_writes_its_files(study):
    out, printed, progress = study
    assert f"Report: {out / 'report.html'}" in printed
    assert "dpn" in printed
    lines = [line for line in printed.replace(str(out), "").splitlines() if not line.startswith("  vitmods ")]
    assert max(map(len, lines)) <= 80, "but for commands, which are whole"
    assert {"results.json", "results.csv", "report.html", "costs.json", "study.json"} <= {p.name for p in out.iterdir()}
    assert "1 of 2  base, seed 0: top-1" in progress
    assert json.loads((out / "results.json").read_text())["command"].startswith("vitmods compare --base mu/4")


def test_another_arm_as_the_reference(study, said, refused):
    out = study[0]
    results = (out / "results.json").read_bytes()
    printed = said("report", out, "--reference", "dpn").out
    assert f"Report: {out / 'report-dpn.html'}" in printed
    assert "\nbase " in printed
    assert (out / "results.json").read_bytes() == results, "these are against base"
    assert "Did you mean 'dpn'?" in refused("report", out, "--reference", "dpm")


def test_a_budget_that_ends_is_no_failure(said, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    command = COMPARE.replace("--seeds 1", "--until-decided --max-seeds 4 --generalize seeds --budget 3trials")
    printed = said(command, "--out", tmp_path / "s")
    assert printed.out.startswith("3 of at most 8 trials finished\n")
    assert "not complete" in printed.err
    assert json.loads((tmp_path / "s" / "results.json").read_text())["settings"]["generalize"] == "seeds"


def test_a_dry_run_counts_every_point_of_the_grid(said, tmp_path):
    command = COMPARE.replace("--seeds 1", "--seeds 2 --tune lr=1e-3,3e-3,1e-2 --tune weight-decay=0,0.1 --dry-run")
    printed = said(command, "--out", tmp_path / "out").out
    assert "At most 18 trials to run" in printed
    assert "Every arm is tried with 6 points of the grid." in printed
    assert not (tmp_path / "out").exists()


def test_base_as_an_arm_is_taken_as_said(study, said):
    printed = said(COMPARE.replace("dpn", "base dpn"), "--out", study[0], "--dry-run", "--quiet")
    assert "note: base is always part of a study" in printed.err
    assert "0 trials to run (2 are finished)" in printed.out


def test_report_is_rebuilt_from_the_folder(study, said, tmp_path):
    (study[0] / "results.csv").unlink()
    assert "Report:" in said("report", study[0], "--out", tmp_path / "r.html").out
    assert (study[0] / "results.csv").exists()
    assert "<html" in (tmp_path / "r.html").read_text()


FEW = "--epochs 1 --limit-train 128 --device cpu --quiet"


def test_train_is_one_trial_and_is_not_run_twice(said, tmp_path):
    command = f"train --base mu/4 --img-size 16 --arm dpn {FEW}", "--out", tmp_path
    printed = said(*command)
    assert "top1" in printed.out
    assert "Warning: Images smaller than 16 x 16, which are enlarged: 128 of 128 in train" in printed.err
    written = (tmp_path / "result.json").stat().st_mtime_ns
    said(*command)
    assert (tmp_path / "result.json").stat().st_mtime_ns == written


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    out = tmp_path_factory.mktemp("trial") / "out"
    assert main(["train", "--base", "mu2/4", *FEW.split(), "--out", str(out)]) == 0
    return out


def test_finetune_trains_a_part_and_leaves_its_delta(trial, said, tmp_path):
    command = f"finetune {FEW} --img-size 16 --train attention --positions bilinear", "--model", trial
    printed = said(*command, "--out", tmp_path).out
    assert printed.startswith("test: top1 ")
    assert "positions" in printed
    assert f"{trial} has all but" in printed
    config = json.loads((tmp_path / "config.json").read_text())
    recipe = config["recipe"]
    assert (recipe["train"], recipe["optimizer"]["weight_decay"], recipe["augment"]["flip"]) == ("attention", 0.1, 0)
    assert config["start"]["positions"] == "bilinear"
    assert config["model"]["img_size"] == [16, 16]
    back = vm.load_delta(open_trial(trial), tmp_path / "delta.safetensors").state_dict()
    assert all(value.equal(back[name]) for name, value in open_trial(tmp_path).state_dict().items())
    assert said(*command, "--out", tmp_path).out == printed, "it is not run twice"


def test_compare_begins_with_a_checkpoint_and_knows_that_full_is_base(trial, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = said(f"compare --arms full attention ffn --seeds 2 --dry-run {FEW}", "--from", trial)
    assert "full, which is base here, is always part of a study" in printed.err
    assert [line.split()[0] for line in printed.out.splitlines()[2:5]] == ["base", "attention", "ffn"]


def test_what_a_trial_or_a_study_in_a_folder_excludes(study, trial, photos, refused, tmp_path):
    out, weights = study[0], tmp_path / "x.pth"
    weights.write_bytes(b"no weights")
    for words, message in (
        (("finetune --train attentoin", "--model", trial), "Did you mean 'attention'"),
        (("compare --base S/16 --arms ffn", "--from", trial), "drop --base"),
        (("finetune", "--model", weights), "x.pth"),
        ((COMPARE, "--out", trial), "holds a single trial"),
        ((COMPARE, "--lr", 0.5, "--out", out), " -> 0.5. Repeat the old ones to resume it"),
        (("train --epochs 1", "--out", out), "holds a study"),
        (("compare", "--data", photos.with_name("photso")), f"Did you mean {photos}?"),
        (("report", out.with_name(f"{out.name}s")), f"Did you mean {out}?"),
    ):
        assert message in refused(*words), words


COMMANDS_OF_FOLDERS = ["compare", "compare --dry-run", "compare --pilot", "train", "finetune", "Study.run"]


@pytest.mark.parametrize("command", COMMANDS_OF_FOLDERS)
def test_a_folder_for_other_things_is_not_taken(command, photos, trial, refused, tmp_path, monkeypatch):
    """Each one is as it was: neither a lock nor a folder is left there."""

    def said(out, data=photos, cwd=tmp_path):
        monkeypatch.chdir(cwd)
        if command == "Study.run":
            with pytest.raises(UserError) as error:
                vm.Study("mu2/4", ["dpn"], data=str(data)).run(out, progress=False)
            return str(error.value)
        start = ["--model", trial] if command == "finetune" else ["--base", "mu2/4", "--img-size", "8"]
        return refused(command, "--data", data, *start, "--epochs", "1", "--out", out)

    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter1.tex").touch()
    before = sorted(tmp_path.rglob("*"))
    assert "thesis has other files (chapter1.tex) and no study. Choose a folder that is empty" in said("thesis")
    assert "photos has other files (cat, dog) and no study" in said("photos")
    inside = r"runs/x is inside .*photos, the folder of the images.*Choose a folder elsewhere: --out "
    assert re.search(inside, said("photos/runs/x"))
    assert re.search(r"runs/x is inside \., the folder of the images", said("runs/x", ".", photos))
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "x").mkdir()
    photos.rename(tmp_path / "x/logs")
    assert "is above" in said("x", tmp_path / "x/logs")


def test_the_remedy_of_a_study_among_the_images_works_and_a_dry_run_needs_none(photos, said, monkeypatch):
    monkeypatch.chdir(photos)
    with pytest.raises(UserError, match=r"elsewhere: --out \.\./runs/x$"):
        StudyFolder("runs/x").check_place(".")
    StudyFolder("../runs/x").check_place(".")
    said("compare --data . --base mu2/4 --img-size 8 --arms dpn --epochs 1 --batch-size 8 --dry-run")


NAMED_DIGITS = ["digits", "hf:digits", "hf:digits?root=other", "torchvision:digits?root=other", "vtab:digits"]


@pytest.mark.parametrize("spec", [*NAMED_DIGITS, "other?allow=digits"])
@pytest.mark.parametrize("kept", ["study.json", "config.json", "logs"])
def test_a_folder_that_is_named_like_the_source_is_not_that_of_the_images(spec, kept, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits" / kept).mkdir(parents=True)
    StudyFolder("digits").check_place(spec)
    if kept != "logs":  # a study that has begun is resumed
        StudyFolder("digits").check_place("./digits")


def test_a_folder_that_a_killed_run_has_begun_is_taken_again(tmp_path):
    folder = StudyFolder(tmp_path / "x")
    for name in (".lock", ".lease", "images.npz", "split.csv", "samples.npz", "study.json.tmp", "logs/worker0.txt"):
        (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.path / name).touch()
    folder.check_place("digits")
    (folder.path / "notes.txt").touch()
    with pytest.raises(UserError, match=r"other files \(notes.txt\)"):
        folder.check_place("digits")
    (folder.path / "study.json").touch()
    folder.check_place("digits")


@pytest.mark.parametrize("spec", ["{}", "{}?stream=1", "imagenet:{}", "voc:{},other", "torchvision:CIFAR10?root={}"])
def test_the_folder_of_the_images_is_found_in_their_spec(spec, tmp_path):
    (tmp_path / "images").mkdir()
    with pytest.raises(UserError, match="is inside"):
        StudyFolder(tmp_path / "images/out").check_place(spec.format(tmp_path / "images"))
    StudyFolder(tmp_path / "images2").check_place(spec.format(tmp_path / "images"))


def test_ctrl_c_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("vitmods.study.run.run_study", stop)
    assert main(["compare", "--out", str(tmp_path / "a b")]) == 130
    assert f"to resume: vitmods compare --out '{tmp_path}/a b'" in capsys.readouterr().err


def test_folders_are_named_after_data_and_base():
    assert readable_folder("path/to/my pets/", "S/16") == Path("runs/my-pets-S-16")
    assert readable_folder("torchvision:CIFAR10?root=/x", "Ti/4") == Path("runs/torchvision-CIFAR10-Ti-4")


def test_the_best_combination_is_confirmed_in_one_command(tmp_path, capsys):
    """With --confirm a factorial study goes on to its confirmation where a combination is predicted to help."""
    command = (
        "compare --data digits --base mu1/4 --arms dpn qknorm --design factorial --seeds 2 --epochs 1 --limit-train"
    )
    command += f" 128 --workers 1 --device cpu --cost-seconds 0 --quiet --confirm --out {tmp_path / 'out'}"
    assert main(command.split()) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "out" / "confirm").exists() == ("fresh seeds" in printed)
