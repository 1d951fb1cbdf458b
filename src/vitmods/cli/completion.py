"""The words that commands accept: completion in the shell, and errors for unknown words before anything is imported.

Both read words.json, which `python -m vitmods.cli.words` writes from the commands and the registries. An option there
accepts `{a,b}` (one of these words), `<task>` (a name of that kind), `<folder>`, `<file>`, `<new folder>` or
`<new file>`, `?` (anything) or nothing; `...` marks several values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitmods.util.errors import UserError, nearest, unknown
from vitmods.util.files import expand_user, similar_folder
from vitmods.util.limits import read_json
from vitmods.util.shorthand import check_setting, split_form, split_outside
from vitmods.util.text import printable

INDEX = Path(__file__).with_name("words.json")
HELP = ("--help", "--help-all")
PACKAGE = INDEX.parents[1]
READ = ("data", "model", "folder", "file")
"""kinds of values that may be local paths, which must exist"""

BASH = """\
_vitmods() {
    local IFS=$'\\n' lines
    lines=($("${1/#\\~/$HOME}" --complete bash "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
    COMPREPLY=("${lines[@]:1}")
    case ${lines[0]} in
        folder) compopt -o filenames 2>/dev/null; COMPREPLY+=($(compgen -d -- "$2")) ;;
        file) compopt -o filenames 2>/dev/null; COMPREPLY+=($(compgen -f -- "$2")) ;;
    esac
    [[ ${#COMPREPLY[@]} != 1 || ${COMPREPLY[0]} != *[=:] ]] || compopt -o nospace 2>/dev/null
}
complete -F _vitmods vitmods
"""
ZSH = """\
#compdef vitmods
_vitmods() {
    local -a lines open whole
    lines=("${(@f)$("${words[1]/#\\~/$HOME}" --complete zsh "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    open=("${(@M)lines[2,-1]:#*[=:]}") whole=("${(@)lines[2,-1]:#*[=:]}")
    (( $#open )) && compadd -Q -S '' -a open
    (( $#whole )) && compadd -Q -a whole
    compset -P '--*='
    case $lines[1] in
        folder) _files -/ ;;
        file) _files ;;
    esac
}
compdef _vitmods vitmods
"""
FISH = """\
function __vitmods
    set -l current (commandline -ct)
    set -l words (commandline -opc)
    set -l lines ($words[1] --complete fish $words[2..] "$current" 2>/dev/null)
    printf '%s\\n' $lines[2..]
    switch "$lines[1]"
        case folder
            __fish_complete_directories "$current" ''
        case file
            __fish_complete_path "$current"
    end
end
complete -c vitmods -f -a '(__vitmods)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def script(shell: str) -> str:
    """Return the text that a shell reads to complete `vitmods`. Raises UserError for another shell."""
    if shell not in SCRIPTS:
        raise UserError(f"--completion needs the name of a shell: {', '.join(SCRIPTS)}.")
    return SCRIPTS[shell]


def check_words(arguments: Sequence[str]) -> None:
    """Raise UserError for the first unknown option or name, and for a missing file or folder next to a similar one.

    Names are left to the command where plugins may add some; places without a similar name are left to what reads them:
    they may be models of a library or addresses.
    """
    index = read_json(INDEX)
    command, words = _split_command(arguments, index)
    if command not in index["commands"] or index["files"] != {"count": count_files()}:
        return  # a file was added to the package, which may register names
    entry = index["commands"][command]
    values = [] if {"-h", *HELP} & set(words) else list(_values(words, entry))
    try:
        check_options([*entry["options"]], words, command)
        runs_code = any(re.search(r"(^|[=+])python[(:]", value) for _, _, value in values)  # it may register names
        has_arms = any(word.split("=")[0] == "--from" for word in words)  # a study, whose arms may have any names
        for option, accepts, value in values:
            if value == "None" or runs_code or (has_arms and accepts == "<arm>"):
                continue
            if accepts == "<arm>":
                _check_arm(value, index)
            else:
                _check_value(option, accepts, value, index)
    except UserError:
        from vitmods.util.registry import has_plugins

        if not has_plugins():
            raise
    for _, accepts, value in values:
        is_plain = os.sep in value and not set(":*[") & set(value)  # not an address or a pattern
        is_plain = is_plain and (accepts != "<model>" or value[0] in "./~")  # not a size such as mu3/2
        if is_plain and accepts[1:-1] in READ and (hint := similar_folder(expand_user(value.partition("?")[0]))):
            raise UserError(f"{printable(value)} does not exist. {hint}")


def count_files() -> int:
    """Count the package's Python files."""
    return sum(name.endswith(".py") for _, _, names in os.walk(PACKAGE) for name in names)


def check_options(options: Sequence[str], words: Sequence[str], command: str) -> None:
    """Raise UserError for the first word that looks like an option and is none of these."""
    for word in words:
        option = word.partition("=")[0].replace("_", "-")
        if option.startswith("--") and option not in ("--", *HELP, *options):
            hint = nearest(option, options)
            hint = f"{hint.replace(chr(39), '')} " if hint.startswith("Did") else ""
            raise UserError(f"Unknown option {option}. {hint}`vitmods {command} --help-all` lists all.")


def _split_command(arguments: Sequence[str], index: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Split arguments into the command, of one word or two, and the words after it."""
    count = 2 if " ".join(arguments[:2]) in index["commands"] else 1
    return " ".join(arguments[:count]), list(arguments[count:])


def _values(words: Sequence[str], entry: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (option, what it accepts, value) for each value of a command; by position the option is empty."""
    positional, option, accepts = list(entry["positional"]), "", ""
    for word in words:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            accepts = entry["options"].get(option.replace("_", "-"), "")
            if equals:
                yield option, accepts.removesuffix("..."), value
                accepts = ""
        elif accepts:
            yield option, accepts.removesuffix("..."), word
            accepts = accepts if accepts.endswith("...") else ""
        else:
            yield "", positional[0].removesuffix("...") if positional else "", word
            positional = positional if positional and positional[0].endswith("...") else positional[1:]


def _check_value(option: str, accepts: str, value: str, index: Mapping[str, Any]) -> None:
    kind = accepts[1:-1]
    if accepts.startswith("{"):
        if value not in kind.split(","):
            raise UserError(f"{option} cannot be '{value}'. {nearest(value, kind.split(','))}")
    elif kind in index["checked"]:
        for part in value.split("+") if kind == "role" else [value.partition("=")[0] if kind == "field" else value]:
            name, inside = split_form(part) or (part.strip(), "")
            if not (kind == "metric" and re.fullmatch(r"fewshot\d+", name)):
                _check_name(kind, name.replace("-", "_") if kind == "field" else name, inside, index)


def _check_arm(text: str, index: Mapping[str, Any]) -> None:
    """Check the names in an arm: changes, the norm of `replace(...)`, or the table of a line-up."""
    changes = re.sub(r"^\s*[^=()]+?\s*=", "", text).strip()
    if changes.startswith("paper:"):
        _check_name("table", changes.removeprefix("paper:"), "", index)
    elif changes not in index["names"]["arm"]:
        for part in split_outside(changes, "+"):
            name, inside = split_form(part) or ("", "")
            if name == "replace":
                _check_arm(split_outside(inside, ",")[0], index)
            elif name not in ("", "python", "train"):
                _check_name("change", name.lower(), inside, index)


def _check_name(kind: str, name: str, inside: str, index: Mapping[str, Any]) -> None:
    names = index["names"][kind]
    if kind == "change" and name in index["names"]["arm"]:  # a line-up: the command says where it can be used
        return
    if name not in names:
        raise unknown(kind, name, names, **index["checked"][kind])
    if inside and not isinstance(names, Mapping):
        raise UserError(f"The {kind} {name} does not have settings: leave ({inside}) out.")
    for item in split_outside(inside, ","):
        if "=" in item:  # a bare word may be a value
            check_setting(kind, name, item.partition("=")[0].strip(), names[name])


def complete(shell: str, words: Sequence[str]) -> list[str]:
    """List the completions of the last word of a line, after a line that says which places complete it too.

    words: those after `vitmods`; for bash one text, the line as typed, since bash divides words at `=` and `:`.
    """
    if shell == "bash":
        words = re.findall(r"""(?:[^\s"'\\]|\\.|"(?:[^"\\]|\\.)*"?|'[^']*'?)+|(?<=\s)$""", words[0])[1:]
    is_quoted = words[-1:] != [] and words[-1].startswith(('"', "'"))
    *before, current = [re.sub(r"""["'\\]""", "", word) for word in words] or [""]
    place, candidates = _candidates(before, current)
    candidates = sorted({word for word in candidates if word.startswith(current)})
    if shell == "bash" and not is_quoted:
        start = len(current) - len(re.split("[=:]", current)[-1])
        candidates = [word[start:] for word in candidates]
    return [place, *candidates]


def _candidates(before: list[str], current: str) -> tuple[str, list[str]]:
    """List what the last word may become, and `folder` or `file` if also places."""
    index = read_json(INDEX)
    names, commands = index["names"], index["commands"]
    text = re.sub(r"(?<![^\0])(--debug|--plugin[=\0][^\0]*)\0", "", "\0".join([*before, ""]))
    before = text.split("\0")[:-1]
    if not before:
        return "none", [*{name.split()[0] for name in commands}, "--help", "--version", "--completion"]
    if before == ["--completion"]:
        return "none", list(SCRIPTS)
    command, words = _split_command(before, index)
    if command not in commands:
        return "none", [name.split()[1] for name in commands if before == name.split()[:1]]
    entry = commands[command]
    if current.startswith("-") and "=" not in current:
        options = [*entry["options"], *HELP]
        return "none", [name for name in options if current.startswith("--no") or not name.startswith("--no-")]
    *_, (_, accepts, value) = _values([*words, current], entry)
    head = current[: len(current) - len(value)]
    kind = accepts[1:-1]
    actions = [name.split()[1] for name in commands if name.startswith(f"{command} ")] if not words else []
    place = {"data": "folder", "model": "file"}.get(kind, kind.removeprefix("new "))
    if accepts.startswith("{"):
        choices = kind.split(",")
    elif kind in ("arm", "change", "recipe", "role", "task without labels"):
        start = re.sub(r"[^+=(,]*$", "", value)  # before the name that is being typed
        head, settings_of = head + start, names["change" if kind == "arm" else kind]
        opened = re.search(r"([\w-]+)\((?:[^()]*,)?$", start)
        if opened and opened[1] != "replace":
            choices = [f"{name}=" for name in settings_of.get(opened[1], ())]
        else:
            choices = [*settings_of, *(names["arm"] if kind == "arm" and not start else ())]
    else:
        choices = [f"{name}=" for name in names[kind]] if kind == "field" else list(names.get(kind, ()))
    return place if place in ("folder", "file") else "none", [*actions, *(head + choice for choice in choices)]
