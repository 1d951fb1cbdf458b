"""What a training command shows from its first to its last line, in a terminal of 80 columns and 25 lines."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

from vitmods.cli.options import announce
from vitmods.util.errors import SAID_IN

FIRST = """
import os, sys

class First:
    encoding, text = "utf-8", ""

    def write(self, text):
        self.text += text
        if self.text.count("\\n") >= 2:
            print(self.text, end="")
            print("torch" in sys.modules, flush=True)
            os._exit(0)

    def flush(self): pass

from vitmods.cli import find_command, main
for command in sys.argv[1:]:
    find_command(command.split()[0])
for command in sys.argv[1:]:
    if not os.fork():
        sys.stderr = First()
        os._exit(main(command.split()) or 1)
    assert os.wait()[1] == 0, command
"""
LATER = "The time left follows from the first steps."
COMMANDS = [
    ("compare --arms dpn rms --seeds 3", "Comparing dpn, rms with base on digits, 3 seeds each.",
     f"Results: runs/digits-mu3-2. {LATER}"),
    ("compare --data a/pets --until-decided --base Ti/16 S/16",
     "Comparing the most promising changes with base (Ti/16, S/16) on a/pets, at most 16 seeds each.",
     f"Results: runs/pets-Ti-16-S-16. {LATER}"),
    ("compare --data a/pets --design factorial",
     "Comparing the most promising changes with base on a/pets, 3 seeds each.",
     f"Results: runs/pets-MODEL, where MODEL is what fits the images. {LATER}"),
    ("compare --data a/pets --arms paper:dpn-table6 --budget 2h --seeds 4",
     "Comparing paper:dpn-table6 with base on a/pets, 4 seeds each.",
     "Results: runs/pets-dpn-table6. This run takes at most 2h."),
    ("compare --arms dpn --budget 2h --out x",
     "Comparing dpn with base on digits, as many seeds as the budget allows.",
     "Results: x. This run takes about 2h."),
    ("compare --from x/weights --pilot", "Comparing its arms with base (x/weights) on digits, 5 seeds each.",
     "Results: runs/digits-weights. Now only base is trained, on 4 seeds at most."),
    ("base --base Ti/16 --data a/pets", "Training base (Ti/16) on a/pets, 16 seeds.",
     f"Results: runs/pets-Ti-16-base. {LATER}"),
    ("train --arm dpn --seed 2", "Training dpn on digits, seed 2.",
     f"Results: runs/digits-mu3-2-train-dpn-seed2. {LATER}"),
    ("train --dry-run --out x", "Training base on digits, seed 0.",
     "Results: x. Nothing is trained: a few steps are timed."),
    ("pretrain --data a/pets --base S/16", "Training base (S/16) on a/pets, seed 0.",
     f"Results: runs/pets-S-16-pretrain-base-seed0. {LATER}"),
    ("finetune --model a/trial --data pets --train ffn", "Adapting ffn of a/trial to pets, seed 0.",
     f"Results: runs/pets-trial-finetune-ffn-seed0. {LATER}"),
]  # fmt: skip


def test_the_first_lines_come_before_torch_and_the_images(tmp_path):
    """Importing torch takes seconds, and so may listing images, which these folders do not even have."""
    for folder in ("a/pets", "pets"):
        (tmp_path / folder).mkdir(parents=True)
    script = [sys.executable, "-c", FIRST, *(command for command, *_ in COMMANDS)]
    shell = subprocess.run(script, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    expected = [line for _, what, where in COMMANDS for line in (what, where, "False")]
    assert shell.stdout.splitlines() == expected, shell.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"a", "pets"}


def test_of_processes_that_train_together_one_announces_it(capsys, monkeypatch):
    for variables, is_said in (({}, True), ({"RANK": "0"}, True), ({"RANK": "1"}, False), ({SAID_IN: "x"}, False)):
        with monkeypatch.context() as patched:
            for name in ("RANK", SAID_IN):
                patched.delenv(name, raising=False)
            for name, value in variables.items():
                patched.setenv(name, value)
            announce("Training a\x1b[2J", "runs/x")
        assert capsys.readouterr().err == is_said * f"Training a\\x1b[2J.\nResults: runs/x. {LATER}\n"


def test_a_study_in_a_terminal(tmp_path):
    """One bar of 80 columns at a time, a line for each trial above it, and a last screen of 25 lines."""
    command = "compare --base mu/4 --arms placement(attn=post,mlp=post) --seeds 2 --epochs 1 --limit-train 128"
    command += " --workers 1 --device cpu --cost-seconds 0 --out study"
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 80, 0, 0))
    variables = {name: value for name, value in os.environ.items() if name not in ("CI", "COLUMNS", "LINES")}
    variables |= {"TERM": "xterm", "VITMODS_REUSE": "0"}
    with subprocess.Popen(
        [sys.executable, "-m", "vitmods", *command.split()],
        stdin=terminal, stdout=terminal, stderr=terminal, cwd=tmp_path, env=variables,
    ) as shell:  # fmt: skip
        os.close(terminal)
        received = b""
        while True:
            try:
                chunk = os.read(main, 65536)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            received += chunk
    os.close(main)
    assert shell.returncode == 0, received.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", received.decode()).replace("\r\n", "\n")
    lines = [line for part in text.split("\n") for line in part.split("\r") if line.strip()]
    bars = [line for line in lines if re.match(r"\d/4 [━╸╺]", line)]
    assert bars
    assert max(map(len, bars)) <= 80
    assert any(re.search(r" step \d+/\d+ +(about [\d.]+ s left|measuring the time)$", bar.rstrip()) for bar in bars)
    assert len([line for line in lines if re.match(r"  \d of 4  .*seed \d: top-1 .*\(\d+ s", line)]) == 4
    after = text.partition("  4 of 4  ")[2].partition("\n")[2]
    last = re.sub(r"\d/4 [━╸╺].*?[\r\n]+", "", after).strip("\r\n").split("\n")
    rows = sum(max(1, -(-len(line.rstrip()) // 80)) for line in last)
    assert rows <= 24, "and the prompt of the shell"
    assert "Next: " in "\n".join(last)
    assert last[-2:] == ["Report: study/report.html", "Results: study/results.csv, results.json"]
