"""Completion in real shells, and the words that it shares with the early errors."""

import os
import pty
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vitmods.cli import COMMANDS, find_command, main
from vitmods.cli.completion import INDEX, SCRIPTS, check_words, complete
from vitmods.cli.words import CLASSES
from vitmods.util.errors import UserError


def test_the_index_lists_what_commands_and_registries_have():
    # In a new process: other tests register names of their own.
    code = "from vitmods.cli.words import make_index, text_of; print(text_of(make_index()), end='')"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert INDEX.read_text() == made.stdout, "run `make words`"


@pytest.mark.parametrize("command", CLASSES)
def test_the_index_describes_the_class_that_the_command_reads(command, monkeypatch):
    class Parsed(Exception):
        pass

    def parse(kind, arguments, name, common=""):
        raise Parsed(f"{kind.__module__}:{kind.__name__}")

    name, *action = command.split()
    function = find_command(name)
    monkeypatch.setitem(function.__globals__, "parse", parse)
    with pytest.raises(Parsed) as parsed:
        function([*action, "--help"])
    assert str(parsed.value) == CLASSES[command]


def test_every_command_is_in_the_index():
    assert {command.split()[0] for command in CLASSES} == set(COMMANDS)


@pytest.mark.parametrize(
    ("line", "place", "words"),
    [
        ("", "none", "--completion --help --version " + " ".join(sorted(COMMANDS))),
        ("comp", "none", "compare"),
        ("paper ", "none", "claims list run show"),
        ("paper run dpn-table6 --ep", "none", "--epochs"),
        ("paper show dtn-table7", "none", "dtn-table7a"),
        ("compare --until", "none", "--until-decided"),
        ("compare --no-re", "none", "--no-reuse"),
        ("compare --task d", "none", "detection dino"),
        ("compare --task=d", "none", "detection dino"),
        ("--debug compare --plugin mine --metric e", "none", "ece exact_match"),
        ("compare --arms dpn rm", "none", "rms rmsnorm"),
        ("compare --arms dpn+rm", "none", "dpn+rms dpn+rmsnorm"),
        ("compare --arms 'mine=dpn+rm", "none", "mine=dpn+rms mine=dpn+rmsnorm"),
        ("compare --arms 'dpn(after_", "none", "dpn(after_position="),
        ("compare --arms 'replace(rm", "none", "replace(rms replace(rmsnorm"),
        ("compare --arms vi", "none", "vit5"),
        ("compare --arms paper:dpn-table1", "none", "dpn-table1 dpn-table1-21k"),
        ("compare --recipe 'augreg(lev", "none", "augreg(level="),
        ("compare --sweep drop", "none", "drop_path= drop_path_shape= dropout="),
        ("compare --design ", "none", "factorial"),
        ("compare --data cifar", "folder", "cifar10: cifar100:"),
        ("compare --seeds ", "none", ""),
        ("compare --out ", "folder", ""),
        ("report ", "folder", ""),
        ("predict runs/pets ", "file", ""),
        ("finetune --train attention+n", "none", "attention+norms"),
        ("changes dt", "none", "dtn"),
        ("recipe show vit", "none", ""),
        ("--completion ", "none", "bash fish zsh"),
        ("no-such-command ", "none", ""),
    ],
)
def test_words_that_complete_a_line(line, place, words):
    assert complete("bash", [f"vitmods {line}"]) == [place, *sorted(words.split())]


def test_shells_that_keep_words_whole_get_whole_words():
    for shell in ("zsh", "fish"):
        assert complete(shell, ["compare", "--arms", "paper:dpn-table6"]) == ["none", "paper:dpn-table6"]
        assert complete(shell, ["compare", "--task=din"]) == ["none", "--task=dino"]
        assert complete(shell, ["compare", "--arms", ""])[0] == "none"


def test_a_completion_is_quick_and_imports_nothing_heavy():
    script = """
import sys, time
from vitmods.cli import main
main(["--complete", "bash", "vitmods compare --arms dp"])
print(time.process_time(), *sys.modules)
"""
    shell = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    *lines, last = shell.stdout.splitlines()
    seconds, *modules = last.split()
    assert lines == ["none", "dpn"]
    assert not {"torch", "numpy", "tyro", "rich"} & set(modules)
    assert float(seconds) < 1  # 0.1 on an idle machine


def test_the_script_of_an_unknown_shell(capsys):
    for shell in SCRIPTS:
        assert main(["--completion", shell]) == 0
        assert "vitmods" in capsys.readouterr().out
    for arguments in (["--completion"], ["--completion", "tcsh"]):
        assert main(arguments) == 2
        assert "bash, zsh, fish" in capsys.readouterr().err


LINES = [
    ("vitmods comp", "vitmods compare"),
    ("vitmods compare --epo", "vitmods compare --epochs"),
    ("vitmods compare --arms dpn+layers", "vitmods compare --arms dpn+layerscale"),
    ("vitmods compare --arms paper:dpn-table6", "vitmods compare --arms paper:dpn-table6"),
    ("vitmods compare --task=din", "vitmods compare --task=dino"),
    ("vitmods report --copy mar", "vitmods report --copy markdown"),
    ("vitmods data my_im", "vitmods data my_images/"),
    ("vitmods predict my_images/fir", "vitmods predict my_images/first.png"),
]


@pytest.mark.parametrize(
    ("command", "setup"),
    [
        ("bash --norc --noprofile -i", "PS1='READY>'"),
        ("zsh -f -i", "autoload -U compinit && compinit -u -D; PROMPT='READY>'; unsetopt auto_remove_slash"),
    ],
)
def test_the_tab_key_in_a_terminal(command, setup, tmp_path):
    program, *options = command.split()
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    environment = _place(tmp_path)
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.execvpe(program, [program, *options], environment)
    try:
        _type(terminal, f'{setup}; stty -echo; show() {{ echo "LINE<$*>"; }}\n', "READY>")
        _type(terminal, f"source <(vitmods --completion {program}); echo LOADE''D\n", "LOADED")
        for line, completed in LINES:
            output = _type(terminal, f"{line}\t\x01show \x05\n", r"LINE<.*>")
            assert re.findall("LINE<(.*)>", output)[-1].strip() == completed, output
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


def _place(folder: Path) -> dict[str, str]:
    """Make a command `vitmods` and some images in a folder; return the environment of a shell in it."""
    (folder / "bin").mkdir()
    script = folder / "bin" / "vitmods"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m vitmods "$@"\n')
    script.chmod(0o755)
    (folder / "my_images").mkdir()
    (folder / "my_images" / "first.png").touch()
    paths = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder), "TERM": "dumb"}
    return {**os.environ, **paths, "INPUTRC": "/dev/null"}


def _type(terminal: int, text: str, until: str) -> str:
    """Type into a terminal, and read it until a pattern appears."""
    os.write(terminal, text.encode())
    output, limit = "", time.monotonic() + 240
    while not re.search(until, output):
        assert time.monotonic() < limit, output
        output += os.read(terminal, 4096).decode(errors="replace")
    return output


def test_fish_completes_the_same_lines(tmp_path):
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    environment = _place(tmp_path)
    for line, completed in LINES:
        script = f"vitmods --completion fish | source; complete -C '{line}'"
        shell = subprocess.run(
            ["fish", "--no-config", "-c", script], capture_output=True, text=True, env=environment, cwd=tmp_path,
            timeout=240,
        )  # fmt: skip
        assert completed.split()[-1] in shell.stdout.splitlines(), shell


@pytest.mark.parametrize(
    "line",
    [
        "compare --base mu3/2",  # next to a folder mu3-2
        "compare --arms None",
        "compare --arms python(my_module:register) my_change",  # the module may register it
        "compare --from runs/old --arms any-name",
        "compare --pretrain dino(metric=probe,epochs=3) --train attention+norms --tune weight-decay=0,1",
    ],
)
def test_words_that_may_be_right_are_left_to_the_command(line, tmp_path, monkeypatch):
    (tmp_path / "mu3-2").mkdir()
    monkeypatch.chdir(tmp_path)
    check_words(line.split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compare --task beit(epochs=50)", r"beit does not have settings: leave \(epochs=50\) out"),
        ("compare --metric top1(a=1)", "top1 does not have settings"),
        ("compare --arms dpn(befor=false)", "befor"),
        ("compare --pretrain dinoo", "Did you mean 'dino'"),
        ("compare --pretrain dino(epoch=3)", "'epoch'. Did you mean 'epochs'"),
        ("compare --train atention+norms", "Unknown role 'atention'"),
        ("compare --log wandbb", "Unknown logger 'wandbb'"),
        ("compare --sweep weightdecay=0,1", "Unknown field 'weightdecay'"),
    ],
)
def test_words_that_are_wrong_are_refused(line, message, monkeypatch):
    monkeypatch.setattr("vitmods.util.registry.has_plugins", lambda: False)  # other tests load some
    with pytest.raises(UserError, match=message):
        check_words(line.split())
