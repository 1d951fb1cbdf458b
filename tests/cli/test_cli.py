"""The command line by its `main`, as a process where it matters what is imported; test_surroundings.py: whole ones."""

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from vitmods import __version__
from vitmods.cli import COMMANDS, compare, main
from vitmods.cli.options import parse, readable_folder
from vitmods.recipes import TASK_PARTS
from vitmods.recipes.recipe import fields_by_name
from vitmods.study.store import StudyFolder
from vitmods.util.errors import UserError

pytestmark = pytest.mark.usefixtures("short_clocks")

COMPARE = ["compare", "--base", "mu/4", "--arms", "dpn", "--seeds", "1", "--epochs", "1", "--limit-train", "128"]
COMPARE += ["--workers", "1", "--device", "cpu", "--cost-seconds", "0.1"]


def run(*arguments, columns=80):
    """A command in a window so wide: its exit code and what it said."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(out), redirect_stderr(err):
        patched.setenv("COLUMNS", str(columns))
        code = main(list(map(str, arguments)))
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


@pytest.mark.parametrize(
    ("option", "begins"),
    [
        ("--until-decided", True),
        ("--budget=3trials", True),
        ("--budget=1h", False),
        ("--dry-run", False),
        ("--pilot", False),
    ],
)
def test_runs_whose_steps_are_not_timed_start_the_imports_of_workers_early(monkeypatch, option, begins):
    begun = []

    @contextmanager
    def start_early(options):
        begun.append(options.workers)
        yield

    monkeypatch.setattr(compare, "start_template_early", start_early)
    monkeypatch.setattr(compare, "compare", lambda *_: 0)
    assert main(["compare", "--workers", "2", option]) == 0
    assert begun == [2] * begins


# of a study, which says first what it does
FIRST_LINES = r"^((Comparing|Training|Adapting) .*|Results: .*|(At most )?\d+ trials?,.* in .*|Recipe .*)\n"


def refused(capsys, *arguments):
    """The error of a command that cannot be done, on one line: exit code 2, no traceback. Of options tyro tells it."""
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    error = re.sub(FIRST_LINES, "", said.err, flags=re.MULTILINE)
    assert "Traceback" not in error
    assert error.startswith(f"vitmods {arguments[0]}: ") or f"vitmods {arguments[0]} --help" in error
    return " ".join(re.sub("[\u2500-\u257f]", " ", error).split())


def test_help_is_quick_and_imports_nothing_heavy():
    script = "import sys; from vitmods.cli import main; main(['--help']); main(['--version']); print(*sys.modules)"
    shell = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    *lines, modules = shell.stdout.splitlines()
    assert all(f"  {name}" in shell.stdout for name in COMMANDS)
    assert max(map(len, lines)) <= 100
    heavy = {"torch", "numpy", "timm", "torchvision", "scipy", "sklearn", "rich", "tyro", "PIL", "matplotlib"}
    assert not heavy & set(modules.split())
    assert len(modules.split()) < 150  # which is what its time depends on


UNKNOWN_WORDS = [
    ("compare --arms dpn rsm", "Unknown change 'rsm'. Did you mean 'rms'? `vitmods changes` lists all."),
    ("compare --arms layernorm_scale", "Did you mean 'layernormscaling'?"),
    ("compare --arms post=placment(attn=post)", "Did you mean 'placement'?"),
    ("compare --arms dpn(befor=false)+rms", "change 'dpn' does not have the setting 'befor'. Did you mean 'before'?"),
    ("compare --arms replace(layernrom)", "Did you mean 'layernorm'?"),
    ("compare --arms paper:dpn-tabel6", "Did you mean 'dpn-table6'? `vitmods paper` lists all."),
    ("train --arm dpn+rsm", "Did you mean 'rms'?"),
    ("diff --arm=dnp", "Did you mean 'dpn'?"),
    ("changes dnp", "Did you mean 'dpn'?"),
    ("compare --task detectoin", "Unknown task 'detectoin'. Did you mean 'detection'?"),
    ("compare --metric accuracy", "Unknown metric 'accuracy'. Did you mean 'top1'?"),
    ("evaluate runs/pets --protocol calibrate", "Did you mean 'calibration'?"),
    ("analyse runs/pets --figures kernel", "Did you mean 'kernels'?"),
    ("paper run dpn-tabel6", "Did you mean 'dpn-table6'?"),
    ("recipe show deti", "Did you mean 'deit'?"),
    ("compare --data pets/imgaes", "Did you mean pets/images?"),
    ("compare --from runs/pest", "Did you mean runs/pets?"),
    ("report runs/pest", "Did you mean runs/pets?"),
    ("predict runs/pets pets/imagse", "Did you mean pets/images?"),
    ("evaluate runs/pest/trials", "Did you mean runs/pets/trials?"),
    ("export runs/pest/trials --out x", "Did you mean runs/pets/trials?"),
    ("finetune --from runs/pest/trials --data digits", "Did you mean runs/pets/trials?"),
    ("data pets/imgaes", "Did you mean pets/images?"),
    ("paper run dpn-table6 --data pets/imgaes", "Did you mean pets/images?"),
]
"""(command, words of the error) that are refused before anything is trained"""
UNFIT_VALUES = [
    ("compar", "Did you mean 'compare'?"),
    ("compare --epoch 3", "Unrecognized options: --epoch, 3 Perhaps you meant: --epochs"),
    ("train --from runs/pets", "Unrecognized options: --from, runs/pets"),
    ("compare --design factoral", "Expected one of ("),
    ("compare --recipe plane", "Did you mean 'plain'?"),
    ("compare --recipe augreg(levle=light1)", "Did you mean 'level'?"),
    ("compare --margin -1", "margin is how much worse"),
    ("compare --img-size 8 8 8", "one side or two"),
    ("compare --sweep lrr=1,2", "Did you mean 'lr'"),
    ("report runs/pets --out answer.gif", "must end with .html, .svg, .pdf or .png"),
    ("report runs/pets --copy bibtex --out answer.pdf", "leave one of the two out"),
]
"""(command, words of the error) that are refused before torch is imported"""


def test_mistakes_are_found_many_of_them_before_torch_is_imported(tmp_path):
    for folder in ("pets/images", "runs/pets/trials"):
        (tmp_path / folder).mkdir(parents=True)
    script = """
import json, sys
from vitmods.cli import main
for line in json.loads(sys.argv[1]):
    code = main(line.split())
    heavy = [name for name in ("torch", "torchvision", "timm", "scipy", "PIL") if name in sys.modules]
    print(json.dumps([code, bool(heavy)]), file=sys.stderr)
"""
    rows = [*UNFIT_VALUES, *UNKNOWN_WORDS]
    lines = [line for line, _ in rows]
    shell = subprocess.run(
        [sys.executable, "-c", script, json.dumps(lines)], capture_output=True, text=True, cwd=tmp_path, timeout=240
    )
    assert shell.stdout == ""
    *said, end = re.split(r"^\[2, (?:true|false)\]$", shell.stderr, flags=re.MULTILINE)
    assert len(said) == len(lines), shell.stderr
    assert not end.strip()
    assert shell.stderr.count("[2, false]") == len(UNFIT_VALUES), shell.stderr
    for (line, words), error in zip(rows, said):
        error = re.sub(FIRST_LINES, "", error.strip(), flags=re.MULTILINE)
        command = f"vitmods {line.split()[0]}"
        assert error.startswith(f"{command}: ") or f"{command} --help" in error, error
        assert words in " ".join(re.sub("[\u2500-\u257f]", " ", error).split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("line", "word"),
    [("vitmods comp", "compare"), ("vitmods train --epo", "--epochs"), ("vitmods report --copy mar", "markdown")],
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


def test_completion_of_an_unknown_shell(capsys):
    for shell in ([], ["abacus"]):
        assert main(["--tyro-print-completion", *shell]) == 2
        assert "bash, zsh or fish" in capsys.readouterr().err


def test_version_and_no_command(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"vitmods {__version__}\n"
    assert main([]) == 0
    assert "usage: vitmods" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command, capsys):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: vitmods {command}" in text
    assert f"  vitmods {command}" in text
    assert text.count("(default: ") >= (1 if command in ("changes", "paper", "recipes", "report") else 3)


def test_help_shows_the_defaults_of_the_recipe(capsys):
    for arguments, crop in ((["--recipe", "plain"], "none"), (["--recipe=deit"], "random_resized")):
        assert main(["compare", *arguments, "--help-all"]) == 0
        assert re.search(rf"--crop {{.*?\(default:\s+{crop}\)", capsys.readouterr().out, flags=re.DOTALL)


@pytest.mark.parametrize("columns", [60, 80, 200])  # on wide terminals tyro puts two boxes in a row
@pytest.mark.parametrize("command", ["compare", "train", "finetune"])
def test_help_shows_the_main_options_and_help_all_every_one(command, columns, capsys, monkeypatch):
    def options(word):
        assert main([command, "--recipe", "plain", word]) == 0
        return re.findall(r"^[│ ] (?:-h, )?--([\w-]+)", capsys.readouterr().out, flags=re.MULTILINE)

    full = options("--help-all")
    monkeypatch.setenv("COLUMNS", str(columns))
    brief = options("--help")
    assert 10 <= len(brief) <= 18 < 80 < len(full)
    assert set(brief) < set(full)
    assert "mixup" in full


def test_options_of_tasks_and_protocols_are_shown_with_their_task(capsys):
    def options(*words):
        assert main(["compare", *words, "--help-all"]) == 0
        printed = capsys.readouterr().out
        assert "`vitmods compare --task TASK --help-all`" in printed
        return set(re.findall(r"^[│ ] (?:-h, )?--(?:no-)?(\w[\w-]*)", printed, flags=re.MULTILINE))

    usual, of_task = options(), {task: options("--task", task) for task in ("classification", *TASK_PARTS)}
    assert len(usual) <= len(of_task["classification"]) <= 120
    assert of_task["classification"] - usual == {"shots", "corruptions", "severities", "textures"}
    assert {"codes", "mixup"} & of_task["beit"] == {"codes"}
    assert {name.replace("_", "-") for name in fields_by_name()} <= set().union(*of_task.values())
    assert "Unknown task 'dinno'. Did you mean 'dino'?" in refused(capsys, "compare", "--task", "dinno", "--help-all")


def test_options_of_tasks_are_read_without_being_shown():
    words = "--codes 9 --fpn-channels 32 --hue 0.3 --text-depth 2 --eval-flip --shots 3 --task beit"
    options = parse(compare.Compare, words.split(), "compare", compare.COMMON)
    assert options.protocols.shots == (3,)
    assert options.training.overrides == {
        "codes": 9, "fpn_channels": 32, "hue": 0.3, "text_depth": 2, "eval_flip": True
    }  # fmt: skip


def test_help_fills_its_lines(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["compare", "--help"]) == 0
    text = capsys.readouterr().out
    assert "or wds:SHARDS (default: digits)" in text
    assert re.search(r"--arms STR \.\.\. +│\n", text)
    assert "{None}" not in text
    assert {len(line) for line in text.splitlines() if line.startswith(("│", "╭"))} == {80}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--margin 200", "does not exclude any difference"),
        ("--margin inf", "does not exclude any difference"),
        ("--steps 20 --epochs 3", "epochs and steps both set the length"),
        ("--steps 50 --sweep epochs=5,10", "do not depend on epochs"),
        ("--tune lr=1e-4,1e-3 --sweep lr=1e-4,1e-3", "lr is both tuned and swept over"),
        ("--tune momentum=0.8,0.9", "momentum has no effect with the optimizer adamw"),
        ("--optimizer sgd --beta1 0.8", "beta1 has no effect with the optimizer sgd"),
        ("--step-at 0.5 0.9", "step_at has no effect with the schedule"),
        ("--sweep poly_power=0.5,0.9", "poly_power has no effect with the schedule"),
        ("--arms dpn rms --design factorial --family 10", "family is for studies of arms"),
        ("--recipe dino_small", "add --task dino"),
        ("--task dino --recipe beit_small", "add --task beit"),
        ("--metric miou", "does not measure miou"),
        ("--base mu1/2 --tune train=attention,layer_scale", "layer_scale"),
        ("--base mu1/2 --task multilabel --tune loss=sigmoid,softmax", "softmax"),
        ("--base mu1/2 --arms x=placement(attn=post,mlp=post) --recompute", "Arm x: "),
        ("--base mu1/2 --metric fewshot25 --sweep limit_train=300,80", "25 shots need"),
        ("--base mu1/2 --sweep limit_train=5000,6000", "the same"),
        ("--base timm:test_vit --img-size 32 --patch-drop 0.5", "patch_drop"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_training(options, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vitmods.study.run._work", lambda *args: pytest.fail("it trains"))
    assert main(["compare", "--device", "cpu", *shlex.split(options)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


REFUSED = {
    "compare": [
        ("--max-seeds 8", "--max-seeds needs --until-decided"),
        ("--max-seeds 40 --until-decided --data digits", "32"),
        ("--until-decided --seeds 8", "set --max-seeds, not --seeds"),
        ("--confirm", "--confirm needs --design factorial"),
        ("--runs 8", "--runs needs --design factorial"),
        ("--retrain best --pilot", "drop --dry-run, --pilot and --budget"),
        ("--retrain best --budget 2h", "drop --dry-run, --pilot and --budget"),
        ("--sweep lrr=1,2", "Did you mean 'lr'"),
        ("--sweep lr=0.1", "two values or more"),
        ("--sweep lr", "lr"),
        ("--tune lrr=1e-3", "Did you mean 'lr'"),
        ("--tune lr=1e-3,0.001", "lr"),
        ("--tune lr=1e-3 --tune lr=1e-2", "lr"),
        ("--tuning-seeds 2", "--tune"),
        ("--tuning-seeds 2", "--tune"),
        ("--folds 1", "folds must be at least 2"),
        ("--seeds 0", "at least one seed"),
        ("--seeds three", "--seeds"),
        ("--margin -1", "margin is how much worse an arm may be"),
        ("--epochs 0", "epochs must be at least 1"),
        ("--epcohs 3", "--epochs"),
        ("--recipe augreg(levle=light1)", "Did you mean 'level'"),
        ("--recipe plane", "plain"),
        ("--task segmentaton", "Did you mean 'segmentation'?"),
        ("--img-size 8 8 8", "img_size is one side or two"),
        ("--mean 0.5 0.4 --data digits", "mean"),
        ("--device cup", "cup"),
        ("--device cuda:99 --dry-run", "cuda:99"),
        ("--data-workers -1", "workers"),
        ("--log wandbb", "Did you mean 'wandb'"),
        ("--metric briar", "Did you mean 'brier'"),
        ("--metric fewshot5 --shots 1", "shots"),
        ("--limit-val 0", "limit_val"),
        ("--arms", "needs an arm besides base"),
        ("--arms dpm", "dpn"),
        ("--arms nroms", "Did you mean 'norm'?"),
        ("--arms dpn x=dpn", "dpn"),
        ("--base Q/16", "is not the name of a ViT"),
        ("--budget soon", "soon"),
        ("--budget 2", "The budget 2 does not have a unit"),
        ("--data /no/such/folder", "/no/such/folder"),
        ("--data digits --out /proc/no/such --epochs 1", "/proc/no/such"),
    ],
    "train": [("--lr ten", "--lr"), ("--seed -1", "Seeds are whole numbers"), ("--recipe augrge", "augreg")],
    "finetune": [
        ("--data digits", "Say what is adapted: --model"),
        ("--model no", "There is no checkpoint 'no'"),
        ("--model x --limit-trian 9", "--limit-trian"),
    ],
    "diff": [
        ("--arm norms", "several arms of a study"),
        ("--arm placment", "placement"),
        ("--base Z/16 --arm dpn", "S/16"),
    ],
    "changes": [("dnt", "Did you mean 'dtn'?"), ("norms", "line-up")],
    "evaluate": [("/no/such/folder", "/no/such/folder"), ("", "Name at least one checkpoint")],
    "report": [("/no/such/folder", "/no/such/folder")],
    "data": [("/no/such/folder", "/no/such/folder")],
    "compair": [("", "Did you mean 'compare'?")],
    "--color": [("", "--color")],
}


@pytest.mark.parametrize(
    ("command", "options", "message"), [(command, *row) for command, rows in REFUSED.items() for row in rows]
)
def test_mistakes_are_refused_in_one_paragraph_before_anything_is_read_or_written(
    command, options, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = [command, *options.split()]
    if command in ("compare", "train") and "--data" not in options:
        monkeypatch.setattr("vitmods.study.study.defaults_for", lambda data: pytest.fail("the images were listed"))
        words += ["--data", "large"]
    error = refused(capsys, *words)
    assert message in error
    assert len(error) > 40
    assert "not foreseen" not in error
    assert not list(tmp_path.iterdir())


def test_without_torch_the_message_says_how_to_install_it(tmp_path):
    script = "import sys; sys.modules['torch'] = None; from vitmods.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "compare", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "The package torch is not installed: pip install torch" in done.stderr
    assert "not foreseen" not in done.stderr


def test_debug_shows_where(capsys):
    with pytest.raises(ValueError, match="study"):
        main(["report", "/no/such/folder", "--debug"])


def test_changes_are_listed_and_readable_at_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["changes"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert main(["changes", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    from vitmods.changes import REGISTRY

    assert [change["name"] for change in record] == list(REGISTRY)
    assert "`vitmods paper`" in text  # where line-ups are
    for change in record:
        assert change["name"] in text
        assert change["preserves"] in ("function", "weights", "nothing")
        assert change["published"]


def test_one_change_has_a_card(capsys):
    assert main(["changes", "dtn"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("Dynamic Token Normalization", "2112.02624", "slots attn norm before", "preserves", "cost", "options"):
        assert part in text
    assert "Patch" not in text
    assert main(["changes", "rms", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "norm"


def test_diff_shows_what_an_arm_alters(capsys):
    assert main(["diff", "--base", "mu/4", "--img-size", "8", "--in-chans", "1", "--arm", "dpn+rms"]) == 0
    assert "Dual PatchNorm" in capsys.readouterr().out


@pytest.fixture
def pets(tmp_path):
    for number in range(20):
        path = tmp_path / "images" / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 30), (number, 0, 9)).save(path)


def test_data_checks_a_folder(pets, capsys, tmp_path):
    assert main(["data", str(tmp_path / "images"), "--out", str(tmp_path / "check")]) == 0
    printed = capsys.readouterr()
    assert "cat" in printed.out
    assert printed.err.startswith(f"Reading {tmp_path / 'images'} ...")
    assert json.loads((tmp_path / "check" / "data.json").read_text())["classes"] == ["cat", "dog"]
    (tmp_path / "images" / "cat" / "broken.jpg").write_text("no image")
    assert main(["data", str(tmp_path / "images")]) == 1
    assert "broken.jpg" in capsys.readouterr().out


def test_data_packs_a_folder(pets, capsys, tmp_path):
    pack = ["data", "pack", str(tmp_path / "images"), str(tmp_path / "shards"), "--shard-mb", "0.01"]
    assert main(pack) == 0
    assert "train: 20 images" in capsys.readouterr().out
    assert main(pack) == 0
    assert "were there, and were compared" in capsys.readouterr().out
    assert main(["data", str(tmp_path / "images")]) == main(["data", str(tmp_path / "shards")]) == 0
    folder, shards = capsys.readouterr().out.split("images: 2 classes")[1:]
    assert folder == shards
    assert "Choose another folder" in refused(capsys, *pack[:-1], "1")
    (tmp_path / "images" / "cat" / "broken.jpg").write_text("no image")
    assert "cat/broken.jpg: not an image" in refused(capsys, *pack[:3], tmp_path / "other")
    shard = tmp_path / "shards" / "train-000000.tar"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert main(["data", str(tmp_path / "shards")]) == 1
    assert "Problem: The shard train-000000.tar is not what was packed" in capsys.readouterr().out


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shell")
    return run(*COMPARE, "--out", folder / "out"), folder / "out"


def test_compare_prints_a_verdict_and_writes_its_files(study):
    found, out = study
    assert found.returncode == 0, found.stderr
    assert f"Report: {out / 'report.html'}" in found.stdout
    assert "dpn" in found.stdout
    lines = [line for line in found.stdout.replace(str(out), "").splitlines() if not line.startswith("  vitmods ")]
    assert max(map(len, lines)) <= 80, "but for commands, which are whole"
    assert {"results.json", "results.csv", "report.html", "costs.json", "study.json"} <= {p.name for p in out.iterdir()}
    assert "1 of 2  base, seed 0: top-1" in found.stderr
    assert json.loads((out / "results.json").read_text())["command"].startswith("vitmods compare --base mu/4")


def test_another_arm_as_the_reference(study, capsys):
    _, out = study
    results = (out / "results.json").read_bytes()
    assert main(["report", str(out), "--reference", "dpn"]) == 0
    said = capsys.readouterr().out
    assert f"Report: {out / 'report-dpn.html'}" in said
    assert "\nbase " in said
    assert (out / "results.json").read_bytes() == results, "these are against base"
    assert "Did you mean 'dpn'?" in refused(capsys, "report", out, "--reference", "dpm")


def test_a_budget_that_ends_is_no_failure(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    command = [word for word in COMPARE if word != "--seeds"]
    command.remove("1")
    decide = [*command, "--until-decided", "--max-seeds", "4", "--generalize", "seeds", "--out", str(tmp_path / "s")]
    assert main([*decide, "--budget", "3trials"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("3 of at most 8 trials finished\n")
    assert "not complete" in said.err
    assert json.loads((tmp_path / "s" / "results.json").read_text())["settings"]["generalize"] == "seeds"


def test_compare_refuses_a_changed_setting(study, capsys):
    _, out = study
    said = refused(capsys, *COMPARE, "--out", out, "--lr", "0.5")
    assert "recipe.optimizer.lr: " in said
    assert " -> 0.5" in said


def test_a_dry_run_counts_every_point_of_the_grid(capsys, tmp_path):
    tune = ["--tune", "lr=1e-3,3e-3,1e-2", "--tune", "weight-decay=0,0.1"]
    few = ["--base", "mu/4", "--arms", "dpn", "--seeds", "2", "--epochs", "1", "--limit-train", "128"]
    assert main(["compare", *few, *tune, "--device", "cpu", "--dry-run", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "At most 18 trials to run" in said
    assert "Every arm is tried with 6 points of the grid." in said
    assert not (tmp_path / "out").exists()


def test_base_as_an_arm_is_taken_as_said(study, capsys):
    _, out = study
    arguments = [*COMPARE, "--out", str(out), "--dry-run", "--quiet"]
    arguments[4:5] = ["base", "dpn"]
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert "note: base is always part of a study" in said.err
    assert "0 trials to run (2 are finished)" in said.out


def test_report_is_rebuilt_from_the_folder(study, capsys, tmp_path):
    _, out = study
    (out / "results.csv").unlink()
    assert main(["report", str(out), "--out", str(tmp_path / "r.html")]) == 0
    assert (out / "results.csv").exists()
    assert "<html" in (tmp_path / "r.html").read_text()
    assert "Report:" in capsys.readouterr().out


def test_train_is_one_trial_and_is_not_run_twice(capsys, tmp_path):
    arguments = ["train", "--base", "mu/4", "--arm", "dpn", "--epochs", "1", "--limit-train", "128", "--device", "cpu"]
    arguments += ["--quiet", "--out", str(tmp_path / "trial")]
    assert main(arguments) == 0
    assert "top1" in capsys.readouterr().out
    written = (tmp_path / "trial" / "result.json").stat().st_mtime_ns
    assert main(arguments) == 0
    assert (tmp_path / "trial" / "result.json").stat().st_mtime_ns == written
    capsys.readouterr()
    assert "holds a single trial" in refused(capsys, *COMPARE, "--out", tmp_path / "trial")


def test_train_says_what_is_odd_about_the_images(capsys, tmp_path):
    few = ["--epochs", "1", "--limit-train", "128", "--device", "cpu", "--quiet"]
    assert main(["train", "--base", "mu/4", "--img-size", "16", *few, "--out", str(tmp_path / "trial")]) == 0
    assert "Warning: Images smaller than 16 x 16, which are enlarged: 128 of 128 in train" in capsys.readouterr().err


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    out = tmp_path_factory.mktemp("trial") / "out"
    few = ["--epochs", "1", "--limit-train", "128", "--device", "cpu", "--quiet"]
    assert main(["train", "--base", "mu2/4", *few, "--out", str(out)]) == 0
    return out, few


def test_finetune_trains_a_part_and_leaves_its_delta(trial, capsys, tmp_path):
    import vitmods as vm
    from vitmods.study.checkpoints import open_trial

    start, few = trial
    command = ["finetune", "--model", str(start), *few, "--img-size", "16", "--train", "attention"]
    command += ["--positions", "bilinear", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert said.startswith("test: top1 ")
    assert "positions" in said
    assert f"{start} has all but" in said
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    recipe = config["recipe"]
    assert (recipe["train"], recipe["optimizer"]["weight_decay"], recipe["augment"]["flip"]) == ("attention", 0.1, 0)
    assert config["start"]["positions"] == "bilinear"
    assert config["model"]["img_size"] == [16, 16]
    back = vm.load_delta(open_trial(start), tmp_path / "out" / "delta.safetensors").state_dict()
    assert all(value.equal(back[name]) for name, value in open_trial(tmp_path / "out").state_dict().items())
    assert main(command) == 0  # and is not run twice
    assert capsys.readouterr().out == said


def test_compare_begins_with_a_checkpoint_and_knows_that_full_is_base(trial, capsys, tmp_path, monkeypatch):
    start, few = trial
    monkeypatch.chdir(tmp_path)
    arms = ["--arms", "full", "attention", "ffn", "--seeds", "2", "--dry-run"]
    assert main(["compare", "--from", str(start), *arms, *few]) == 0
    said = capsys.readouterr()
    assert "full, which is base here, is always part of a study" in said.err
    assert [line.split()[0] for line in said.out.splitlines()[2:5]] == ["base", "attention", "ffn"]


def test_what_finetune_refuses(trial, capsys, tmp_path):
    start, _ = trial
    assert "Did you mean 'attention'" in refused(capsys, "finetune", "--model", start, "--train", "attentoin")
    assert "drop --base" in refused(capsys, "compare", "--from", start, "--base", "S/16", "--arms", "ffn")
    (tmp_path / "x.pth").write_bytes(b"no weights")
    assert "x.pth" in refused(capsys, "finetune", "--model", tmp_path / "x.pth")


def test_a_single_trial_is_not_put_between_the_files_of_a_study(study, capsys):
    assert "holds a study" in refused(capsys, "train", "--epochs", "1", "--out", study[1])


@pytest.fixture
def photos(tmp_path):
    for i in range(24):
        path = tmp_path / "photos" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (i * 9, 99, 9)).save(path)
    return tmp_path / "photos"


@pytest.mark.parametrize(
    "command", ["compare", "compare --dry-run", "compare --pilot", "train", "finetune", "Study.run"]
)
def test_a_folder_for_other_things_is_not_taken(command, photos, trial, capsys, tmp_path, monkeypatch):
    """Each one is as it was: neither a lock nor a folder is left there."""
    import vitmods as vm

    def said(out, data=photos, cwd=tmp_path):
        monkeypatch.chdir(cwd)
        if command == "Study.run":
            with pytest.raises(UserError) as error:
                vm.Study("mu2/4", ["dpn"], data=str(data)).run(out, progress=False)
            return str(error.value)
        start = ["--model", trial[0]] if command == "finetune" else ["--base", "mu2/4", "--img-size", "8"]
        return refused(capsys, *command.split(), "--data", data, *start, "--epochs", "1", "--out", out)

    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter1.tex").touch()
    before = sorted(tmp_path.rglob("*"))
    assert "thesis has other files (chapter1.tex) and no study. Choose a folder that is empty" in said("thesis")
    assert "photos has other files (a, b) and no study" in said("photos")
    assert re.search(
        r"runs/x is inside .*photos, the folder of the images.*Choose a folder elsewhere: --out ", said("photos/runs/x")
    )
    assert re.search(r"runs/x is inside \., the folder of the images", said("runs/x", ".", photos))
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "x").mkdir()
    photos.rename(tmp_path / "x/logs")
    assert "is above" in said("x", tmp_path / "x/logs")


def test_the_remedy_of_a_study_among_the_images_works_and_a_dry_run_needs_none(photos, capsys, monkeypatch):
    monkeypatch.chdir(photos)
    few = ["--base", "mu2/4", "--img-size", "8", "--arms", "dpn", "--epochs", "1", "--batch-size", "8"]
    with pytest.raises(UserError, match=r"elsewhere: --out \.\./runs/x$"):
        StudyFolder("runs/x").check_place(".")
    StudyFolder("../runs/x").check_place(".")
    assert main(["compare", "--data", ".", *few, "--dry-run"]) == 0, capsys.readouterr().err


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


def test_a_folder_that_is_not_there_hints_at_one_that_is(study, photos, capsys):
    assert f"Did you mean {photos}?" in refused(capsys, "compare", "--data", photos.with_name("photso"))
    out = Path(study[1])
    assert f"Did you mean {out}?" in refused(capsys, "report", out.with_name(f"{out.name}s"))


def test_ctrl_c_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("vitmods.study.run.run_study", stop)
    assert main(["compare", "--out", str(tmp_path / "a b")]) == 130
    assert f"to resume: vitmods compare --out '{tmp_path}/a b'" in capsys.readouterr().err


def test_an_unwritable_place_is_one_error(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert "Cannot write" in refused(capsys, *COMPARE, "--out", tmp_path / "file" / "study")


def test_folders_are_named_after_data_and_base():
    assert readable_folder("path/to/my pets/", "S/16") == Path("runs/my-pets-S-16")
    assert readable_folder("torchvision:CIFAR10?root=/x", "Ti/4") == Path("runs/torchvision-CIFAR10-Ti-4")


@pytest.mark.parametrize("name", ["a" * 4096, "a/" * 2048])
@pytest.mark.parametrize("command", [["data"], ["report"], ["evaluate"], ["data", "wds:"]])
def test_a_path_that_is_too_long_is_named(command, name, capsys):
    *words, last = [*command, ""] if len(command) == 1 else command
    assert "not foreseen" not in refused(capsys, *words, last + name)
