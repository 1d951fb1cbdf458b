"""What the pages say is so: links lead somewhere, code runs, commands and options exist, counts are the code's."""

import ast
import contextlib
import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import vitmods as vm
from vitmods.changes import REGISTRY, Change, parse_changes
from vitmods.changes.compose import edit
from vitmods.cli import COMMANDS, main
from vitmods.layers import NORMS
from vitmods.model.config import ViTConfig
from vitmods.model.flops import count_params
from vitmods.recipes import TASK_PARTS
from vitmods.study.arms import BASE, arms_from_text
from vitmods.util import registry

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
FENCE = re.compile(r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
PLACEHOLDER = "path/to/"  # code that names the reader's own images is not run; its names are checked


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(kind: str) -> list[tuple[Path, str]]:
    """(page, text) of every fenced block of this kind."""
    fences = ((page, fence) for page in PAGES for fence in FENCE.finditer(page.read_text()))
    return [(page, fence["text"]) for page, fence in fences if fence["kind"] == kind]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_resolve(page):
    text = FENCE.sub("", page.read_text())
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    for target in targets:
        if "://" not in target and not target.startswith("#"):
            assert (page.parent / target.partition("#")[0]).exists(), f"{name_of(page)} links to {target}"


def test_results_answer_questions_and_name_every_page_of_the_log():
    text = (ROOT / "RESULTS.md").read_text()
    assert len(text.splitlines()) <= 250, "what a run printed goes to docs/log"
    assert not [page for page in (ROOT / "docs" / "log").glob("*.md") if f"](docs/log/{page.name})" not in text]


def test_pages_that_the_code_names_exist():
    for source in (ROOT / "src").rglob("*.py"):
        for page in re.findall(r"\bdocs/[\w/]+\.md", source.read_text()):
            assert (ROOT / page).exists(), f"{name_of(source)} names {page}"


@pytest.mark.parametrize("name", REGISTRY)
def test_every_change_has_a_page(name):
    page = ROOT / "docs" / "changes" / f"{name}.md"
    assert page.exists(), f"write {name_of(page)}: where the change sits, why, the paper's number, the cost"
    text, change = page.read_text(), REGISTRY[name]
    assert f"`{name}`" in text
    assert change.url in text
    for number in re.findall(r"\d+\.\d", change.published):
        assert number in text, f"{name_of(page)} lacks {number} of the published gain"
    for setting in dataclasses.fields(change):
        assert f"`{setting.name}`" in text, f"{name_of(page)} does not explain the setting {setting.name}"


@pytest.mark.parametrize("kind", [kind for kind in NORMS.values() if kind.replaces], ids=lambda kind: kind.name)
def test_every_kind_of_norm_is_on_a_page(kind):
    pages = [page.read_text() for page in (ROOT / "docs" / "changes").glob("*.md")]
    named = [text for text in pages if all(f"`{name}`" in text for name in (*kind.shorts, *kind.options))]
    assert named, f"write docs/changes/{kind.name}.md with `{'`, `'.join((*kind.shorts, *kind.options))}`"
    if not (ROOT / "docs" / "changes" / f"{kind.name}.md").exists():
        return
    assert any(kind.url in text and all(n in text for n in re.findall(r"\d+\.\d", kind.published)) for text in named)


COUNT = re.compile(r"(?:`([^`]+)` on )?S/16: ([+-][\d,]+)\s+parameters")


@cache
def parameters_of(*changes: Change) -> int:
    with torch.device("meta"):  # shapes alone
        return count_params(vm.ViT(edit(ViTConfig.from_name("S/16"), changes)))


@pytest.mark.parametrize("name", REGISTRY)
def test_parameter_counts_of_a_page_are_those_of_the_code(name):
    counts = COUNT.findall((ROOT / "docs" / "changes" / f"{name}.md").read_text())
    assert counts, "say what it costs: 'S/16: +1,234 parameters', or '`CHANGE` on S/16: ...'"
    for change, count in counts:
        assert parameters_of(*parse_changes(change or name)) - parameters_of() == int(count.replace(",", ""))


PYTHON = [(page, text) for page, text in blocks("python") if page.parent.name != "tutorials"]  # test_tutorials.py


@pytest.mark.parametrize(("page", "code"), PYTHON, ids=[name_of(page) for page, _ in PYTHON])
def test_python_blocks_run(page, code, tmp_path, monkeypatch, short_clocks):
    compiled = compile(code, name_of(page), "exec")
    if PLACEHOLDER in code:
        _check_names(code)
        return
    monkeypatch.chdir(tmp_path)
    plain = vm.recipes.plain  # only training is made small
    monkeypatch.setattr(vm.recipes, "plain", lambda **given: plain(**{**given, "epochs": 1}))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), _registered_by_a_page():
        exec(compiled, {"__name__": "a_page"})
    assert printed.getvalue().strip()


@contextlib.contextmanager
def _registered_by_a_page():
    """What a page adds is forgotten after it: later studies of this process do without."""
    yield
    for known in registry._registries:
        for name in [name for name, entry in known._entries.items() if entry.module == "a_page"]:
            known.remove(name)


def _check_names(code: str) -> None:
    """Of a block that is not run, at least the names must exist."""
    for name in re.findall(r"\bvm((?:\.\w+)+)", code):
        value = vm
        for part in name.split(".")[1:]:
            value = getattr(value, part)


def commands() -> list[tuple[str, str]]:
    """(page, command): lines after a $ in console blocks, and `vitmods ...` or `make ...` within the text."""
    found = [(name_of(page), line) for page, text in blocks("console") for line in re.findall(r"^\$ (.+)$", text, re.M)]
    for page in PAGES:
        inline = re.findall(r"`((?:vitmods|make) [^`]+)`", FENCE.sub("", page.read_text()))
        found += [(name_of(page), line) for line in inline]
    return found


@pytest.mark.parametrize(("page", "command"), commands())
def test_shell_commands_exist(page, command):
    words = shlex.split(command, comments=True)
    program, rest = Path(words[0]).name, words[1:]
    if program == "make":
        assert set(rest) <= make_targets()
    elif program == "python":
        assert (ROOT / rest[0]).is_file()
    elif program == "pre-commit":
        assert (ROOT / ".pre-commit-config.yaml").is_file()
    else:
        assert program == "vitmods", f"{page}: what is {program}?"
        _check_vitmods(rest)


def _check_vitmods(words: list[str]) -> None:
    if words[0].startswith("-"):
        assert words[0] in options_of("--help")
        return
    name, arguments = words[0], words[1:]
    if "COMMAND" in words:  # capitals stand for something
        return
    name, arguments = (words[1], words[2:]) if name == "help" else (name, arguments)
    assert name in COMMANDS
    arms, plugins = False, {Path(word).stem for word in arguments if word.endswith(".py")}  # named as what they add
    for word in arguments:
        if word.startswith("--"):
            assert any(word in options for options in helps(name)), f"vitmods {name} has no option {word}"
            arms = word in ("--arm", "--arms")
        elif arms and word not in {BASE, *plugins}:
            arms_from_text(word)


def helps(command: str) -> Iterator[set[str]]:
    """The options that a command's helps show, one help after another: those of tasks take long."""
    yield options_of("--help")
    yield options_of(command, "--help-all")
    if command == "paper":
        yield options_of("paper", "show", "--help")
        yield from helps("compare")
    if command in ("compare", "base", "train", "pretrain", "finetune"):
        yield from (options_of(command, "--task", task, "--help-all") for task in ("classification", *TASK_PARTS))


@cache
def options_of(*arguments: str) -> set[str]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([*arguments]) == 0
    return set(re.findall(r"--[a-z][\w-]*", printed.getvalue()))


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


NEW_CHANGE = '''
from dataclasses import dataclass, replace

from vitmods.model.config import ViTConfig
from vitmods.model.slots import NormConfig
from vitmods.changes.base import Change


@dataclass(frozen=True)
class Scratch(Change):
    """A norm on the output of the MLP."""

    name = "scratch"
    title = "Scratch"
    paper = "A paper"
    url = "https://example.org"
    summary = "Adds a norm on the output of the MLP."
    cost = "2 width parameters a block"
    published = "none"

    eps: float = 1e-3

    @property
    def fills(self) -> frozenset[str]:
        return frozenset({"mlp norm on branch"})

    def edit(self, config: ViTConfig) -> ViTConfig:
        return config.with_(mlp=replace(config.mlp, branch=NormConfig("layer", self.eps)))
'''


def test_a_change_is_one_new_file(tmp_path):
    """As CONTRIBUTING says: in a copy of the library, one file is added and everything knows it."""
    shutil.copytree(ROOT / "src" / "vitmods", tmp_path / "vitmods", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "vitmods" / "changes" / "scratch.py").write_text(NEW_CHANGE)
    ask = (
        "import sys, vitmods as vm; from vitmods.cli import main\n"
        "assert vm.__file__.startswith(sys.argv[1]) and vm.changes.Scratch().eps == 1e-3\n"
        "assert main(['changes']) == 0\n"
        "sys.exit(main(['diff', '--base', 'mu2/4', '--img-size', '8', '--arm', 'scratch(eps=1e-4)+dpn']))"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONIOENCODING": "utf-8", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", ask, str(tmp_path)], env=environment, cwd=tmp_path, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    assert "Adds a norm on the output of the MLP." in done.stdout  # the list
    assert "scratch(eps=0.0001) + dpn" in done.stdout  # the difference
    assert "blocks.*.norm2_branch" in done.stdout


def test_the_demo_is_the_study_whose_picture_and_numbers_are_shown():
    facts = json.loads((ROOT / "docs/gallery/demo.json").read_text())
    recipe = re.search(r"(vitmods compare .*?) --out runs/demo", (ROOT / "Makefile").read_text(), re.S)
    assert " ".join(recipe[1].replace("\\", " ").split()) == facts["command"].removesuffix(" --workers 1")
    shown = facts["effects"]["levit"].removesuffix(" helps")
    for page in ("README.md", "docs/index.md"):
        text = (ROOT / page).read_text()
        assert shown in text, f"{page} has other numbers of the demo than docs/gallery/demo.json: {shown}"
        assert f"base has {facts['base']}" in text
        assert "gallery/demo.svg" in text


FAULTS = re.findall(r"^\| (?!fault|---).*", (ROOT / "docs/reliability.md").read_text(), re.M)


@cache
def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_fault_and_the_makefile_name_tests_that_exist():
    assert len(FAULTS) > 10
    for row in FAULTS:
        *_, shown = cells = re.split(r"(?<!\\)\|", row.strip("|"))
        tests = re.findall(r"`([^`]+)`", shown)
        assert (len(cells), bool(tests)) == (3, True), row
        for name in tests:
            path, _, test = name.partition("::")
            assert (ROOT / path).exists(), path
            assert not (test and path.startswith("tests/")) or test in functions_of(ROOT / path), name
    words = re.findall(r"tests/[\w/.]+", (ROOT / "Makefile").read_text())
    assert words
    assert [word for word in words if not (ROOT / word).exists()] == []
