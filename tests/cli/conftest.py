"""Commands of the shell in this process: what they say, and the errors of those that cannot be done."""

import re
import shlex

import pytest

from vitmods.cli import main

# of a study, which says first what it does
FIRST_LINES = r"^((Comparing|Training|Adapting) .*|Results: .*|(At most )?\d+ trials?,.* in .*|Recipe .*)\n"


@pytest.fixture
def said(capsys):
    """Runs a command, of a line and more words; returns what it printed as `out` and `err`."""

    def run(line, *words):
        assert main([*shlex.split(line), *map(str, words)]) == 0
        return capsys.readouterr()

    return run


@pytest.fixture
def refused(capsys):
    """Runs a command that cannot be done; returns its error on one line: exit code 2, without a traceback, and with the
    command's name, or what tyro says of options."""

    def run(line, *words):
        arguments = [*shlex.split(line), *map(str, words)]
        assert main(arguments) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        error = re.sub(FIRST_LINES, "", printed.err, flags=re.MULTILINE)
        assert not re.search("Traceback|not foreseen", error)
        command = f"vitmods {arguments[0] if arguments else ''}"
        assert error.startswith((f"{command}: ", "note: ")) or f"{command} " in error
        return " ".join(re.sub("[\u2500-\u257f]|-{5,}", " ", error).split())

    return run
