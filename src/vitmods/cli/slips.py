"""What people type instead of our commands and options, and what they mean: errors that name the remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence

from vitmods.changes import REGISTRY
from vitmods.recipes import TASK_PARTS
from vitmods.util.errors import nearest
from vitmods.util.text import listing

COMMANDS = """
compare    run ablate ablation study experiment search sweep tune hpo grid
evaluate   eval test validate score
data       dataset datasets check images
data pack  pack shard
paper      papers table tables reproduce
paper claims  claims
report     plot show results summary html
predict    infer inference classify
export     convert onnx save
bench      benchmark speed time profile latency
changes    norms stems mods methods
finetune   ft fine-tune transfer adapt
train      fit
diff       info inspect
analyse    analyze analysis
--version  version -v -V
"""
"""command -> other words for it"""
OPTIONS = """
base                   model arch architecture network backbone net
arms|arm|candidates    arms change changes mod mods variant variants treatments
device                 gpu gpus ngpus accelerator
device cuda            cuda
device cpu             cpu no-cuda
devices|devices-per-trial  devices devices-per-trial nproc-per-node
workers                num-workers jobs j threads nproc procs parallel
lr                     learning-rate learningrate
weight-decay           wd decay
batch-size             bs batch b
img-size               image-size size resolution res input-size imgsz input
out                    output out-dir output-dir outdir save-dir savedir save o dest logdir
data                   dataset data-dir data-path datapath images path root folder input-dir train-dir
seeds|seed             num-seeds n-seeds nseeds repeat n
epochs                 max-epochs num-epochs n-epochs e
steps                  max-steps iterations iters num-steps
from|model             pretrained weights checkpoint ckpt init load pretrained-weights resume-from model-path
precision              amp half mixed-precision dtype
precision fp16-mixed   fp16 float16
precision bf16-mixed   bf16 bfloat16
budget                 time max-time hours timeout time-limit
optimizer              opt optim
metric                 metrics measure score
recipe                 config cfg preset
task                   problem objective
to                     format type
to onnx                onnx
out answer.pdf         pdf figure plot
out answer.html        html
dry-run                plan estimate test-run
tune                   search grid hpo
sweep                  vary
crop                   augmentation augment aug
randaugment            autoaugment aa
quiet                  silent q
markdown               md
latex                  tex
"""
"""option, maybe with a value -> other words for it; of several, the first that a command has"""
OF_TRAINING = {
    **dict.fromkeys(
        ("pretrained", "weights", "checkpoint"), "`vitmods finetune --model WEIGHTS` starts from trained weights."
    ),
    **dict.fromkeys(
        ("devices", "devices-per-trial", "nproc-per-node"),
        "`vitmods base --from WEIGHTS --seeds 1 --devices-per-trial 2` adapts weights on several devices.",
    ),
}
"""as SENTENCES, of commands that train"""
SENTENCES = {
    "resume": "Re-running the same command resumes.",
    "continue": "Re-running the same command resumes.",
    "verbose": "Progress is printed unless --quiet is given.",
    "v": "Progress is printed unless --quiet is given.",
    "force": "Nothing is overwritten: name another folder by --out.",
    "overwrite": "Nothing is overwritten: name another folder by --out.",
    "format": "The ending of the file that --out names says its form.",
}
"""option that there is not, if the command lacks what it may mean -> what to do"""
OF_REPORTS = {"format": "Give --latex, --markdown, --bibtex or --methods, or a file by --out."}
"""as SENTENCES, of commands that print tables for papers"""
COMMAND_SENTENCES = {
    "apply": "`vitmods diff --arm dpn` shows what a change alters; in Python, vm.apply changes a model.",
    "list": "`vitmods changes` lists the changes, `vitmods recipes` the recipes and `vitmods paper` published tables.",
    "models": "`vitmods compare --base NAME` takes S/16 and other sizes, and names of timm; see docs/models.md.",
    "gallery": "docs/gallery.md shows our studies; `vitmods report FOLDER` shows yours.",
    "init": "A study needs no set-up: `vitmods compare --data path/to/images`.",
}


def _read(table: str) -> dict[str, list[str]]:
    """Word -> what it may mean; a line is meanings, two blanks or more, and the words."""
    found: dict[str, list[str]] = {}
    for line in table.strip().splitlines():
        meant, words = re.split(r" {2,}", line, maxsplit=1)
        for word in words.split():
            found.setdefault(word, []).append(meant)
    return found


def unknown_command(name: str, commands: Collection[str]) -> str:
    """Explain a command that does not exist."""
    word = name if name.startswith("-") else name.lower().replace("_", "-")
    close = difflib.get_close_matches(word, commands, n=1, cutoff=0.7)
    if word in COMMAND_SENTENCES:
        hint = COMMAND_SENTENCES[word]
    elif meant := _read(COMMANDS).get(word, close):
        hint = f"Did you mean {'`vitmods ' + meant[0] + '`' if meant[0] not in commands else repr(meant[0])}?"
    else:
        hint = f"Known: {', '.join(sorted(commands))}."
    kind = "option" if name.startswith("-") else "command"
    return f"The {kind} {name} does not exist. {hint} `vitmods --help` says more."


def what_is(word: str, known: Collection[str]) -> str:
    """Say what the name of a folder is instead, and how a command with these options takes it; empty for other
    words."""
    if _is_change(word):
        option = _of_changes(known)
        return f"{word} is a change: write --{option} {word}." if option else f"{word} is a change."
    return f"{word} is a task: write --task {word}." if word in TASK_PARTS else ""


def _is_change(word: str) -> bool:
    name = re.split(r"[(+]", word)[0].lower()
    return name in REGISTRY or any(name in change.short_forms for change in REGISTRY.values())


def _of_changes(known: Collection[str]) -> str:
    return next((name for name in ("arms", "arm", "candidates") if name in known), "")


def refusal(box: str, command: str, known: Collection[str]) -> str:
    """Turn what tyro prints of wrong options into a paragraph.

    known: the options of the command, without dashes
    """
    _, *parts = re.split(r"^[ -]*-{5,}[ -]*$", box, flags=re.MULTILINE)
    texts = [" ".join(part.split()) for part in parts]
    said, help_all = texts[0] if texts else " ".join(box.split()), f"`vitmods {command} --help` shows what it takes."
    if match := re.match(r"Unrecognized options: (.*)", said):
        return f"{_unknown_options(match[1].split(', '), command, known)} {help_all}"
    if match := re.match(r"Missing from [^:]+: (.*)", said):
        missing = match[1].replace(" (required)", "")
        unread = re.match(r"Unrecognized options: (.*)", texts[1]) if len(texts) > 1 else None
        more = f" {_unknown_options(unread[1].split(), command, known)}" if unread else ""
        return f"Missing: {missing}.{more} {help_all}"
    if match := re.match(r"invalid choice '(.*)' for argument '(--[\w-]+)'. Expected one of \((.*)\)", said):
        choices = re.findall(r"'([^']*)'", match[3])
        return f"{match[2]} cannot be '{match[1]}'. {nearest(match[1], choices)}"
    if match := re.match(r"Missing value for argument '(--[\w-]+)'. Expected (\d+)", said):
        return f"{match[1]} needs {'a value' if match[2] == '1' else match[2] + ' values'}. {help_all}"
    if match := re.match(r"Error parsing (\S+): (.*)", said):
        option, reason = match.groups()
        value = re.search(r"(?:instantiated from \[|base 10: |to float: )'([^']*)'", reason)
        if value and ("int" in reason or "float" in reason.lower()):
            whole = "float" not in reason.lower()
            return f"{option} needs a {'whole ' * whole}number, not '{value[1]}'."
        return reason if not option.startswith("--") else f"{option}: {reason}"
    return said


def _unknown_options(words: Sequence[str], command: str, known: Collection[str]) -> str:
    """Say what to write instead of words that a command does not have."""
    options = [word for word in words if word.startswith("-") and not re.match(r"-[\d.]", word)]
    if not options:
        if (option := _of_changes(known)) and all(map(_is_change, words)):
            return f"Changes follow --{option}: write --{option} {' '.join(words)}."
        more = " `vitmods recipe show NAME` shows one." if command == "recipes" else ""
        more = " `vitmods evidence` reads several studies." if command == "report" else more
        return f"{listing([repr(word) for word in words])} cannot stand alone: a value follows its option.{more}"
    hints = [_meant(option.partition("=")[0].lstrip("-"), known) for option in options]
    names = [option.partition("=")[0] for option in options]
    return f"There is no option {listing(names)}. {' '.join(filter(None, hints))}".rstrip()


def _meant(typed: str, known: Collection[str]) -> str:
    word = typed.lower().replace("_", "-")
    for meant in _read(OPTIONS).get(word, ()):
        names = meant.split("|")
        if meant := next((name for name in names if name.split()[0] in known), ""):
            return f"Did you mean --{meant}?"
    sentences = SENTENCES | (OF_TRAINING if "epochs" in known else {}) | (OF_REPORTS if "latex" in known else {})
    if word in sentences:
        return sentences[word]
    longer = [name for name in known if name.startswith(word)] if len(word) > 1 else []
    close = longer if len(longer) == 1 else difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    return f"Did you mean --{close[0]}?" if close else ""
