"""No file of the package reads what comes from outside in a way that could run it, or without the limits."""

import ast
import re
from pathlib import Path

import pytest

import vitmods

ROOT = Path(vitmods.__file__).parent
LIMITS = "util/limits.py"
# What is never called: (module or "", name). The module is what the file calls it.
FORBIDDEN = {
    ("", "eval"), ("", "exec"), ("", "compile"), ("", "__import__"), ("os", "system"), ("os", "popen"),
    ("yaml", "safe_load"), ("yaml", "full_load"), ("yaml", "unsafe_load"), ("shutil", "unpack_archive"),
    *(("pickle", name) for name in ("load", "loads", "Unpickler")),
    *(("tarfile", name) for name in ("extractall", "extract")),
}  # fmt: skip
IMPORTS = {"marshal", "shelve", "dill", "cloudpickle", "joblib", "xml.sax", "xml.dom", "lxml"}
# Who may call what: where the call is known to be bounded, or reads what this process wrote itself.
ALLOWED = {
    ("json", "load"): set(),
    ("json", "loads"): {LIMITS, "study/executors/processes.py"},  # and what json.dumps gave
    ("csv", "DictReader"): set(),
    ("csv", "reader"): {"util/tables.py"},
    ("np", "load"): {LIMITS, "data/store.py"},
    ("yaml", "load"): {"tasks/detection/sources.py"},
    ("ElementTree", "parse"): set(),
    ("ElementTree", "fromstring"): {"tasks/detection/sources.py"},
    ("Image", "open"): {"data/read.py", "data/pack.py", "papers/corruptions/functions.py"},
    ("zipfile", "ZipFile"): {LIMITS, "train/checkpoint.py"},
    ("tarfile", "open"): {"data/sources/wds.py", "data/pack.py", "papers/sources/imagenet.py"},
    ("gzip", "open"): {"papers/sources/imagenet.py"},
    ("ast", "literal_eval"): {"model/names.py"},
    ("pickle", "dumps"): {"train/distributed.py", "testing.py"},
    ("torch.export", "load"): {"study/checkpoints.py", "fast/export.py"},  # the second what it has just written
    ("torch", "load"): {"adapters/weights.py", "train/checkpoint.py"},
}
# Who may call Path.read_bytes(), which has no limit: for what this process has just written or found by its own name.
READ_BYTES = {LIMITS, "ops/native/build.py"}  # the package's own sources, and what the compiler made of them
WANTED = {("torch", "load"): ("weights_only", True), ("np", "load"): ("allow_pickle", False)}


def problems(text: str, name: str) -> list[str]:
    """What a file does that it must not."""
    faults = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            faults += [f"{name}:{node.lineno} imports {module}" for module in modules if module in IMPORTS]
            hidden = {(module, name_of) for module in modules for name_of in names} & {*FORBIDDEN, *ALLOWED}
            faults += [f"{name}:{node.lineno} imports {name_of} by name" for name_of in sorted(hidden)]
        if not isinstance(node, ast.Call):
            continue
        module, _, function = ast.unparse(node.func).rpartition(".")
        called, where = (module, function), f"{name}:{node.lineno} calls {ast.unparse(node.func)}"
        keywords = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
        if (
            (called in FORBIDDEN and not _is_own(node))
            or function in ("extractall", "unpack_archive")
            or keywords.get("shell") is True
        ):
            faults.append(where)
        if called in ALLOWED and name not in ALLOWED[called] and not _is_own(node):
            faults.append(f"{where}, which is for {', '.join(ALLOWED[called]) or 'nobody'}: use {LIMITS}")
        if function == "read_bytes" and not node.args and name not in READ_BYTES:
            faults.append(f"{where}: use read_bytes of {LIMITS}")
        if called in WANTED and keywords.get(WANTED[called][0]) is not WANTED[called][1]:
            faults.append(f"{where} without {WANTED[called]}")
    return faults


def _is_own(call: ast.Call) -> bool:
    """Whether it reads what a call within has just written."""
    inside = ast.unparse(call.args[0]) if call.args else ""
    return inside.startswith(("json.dumps(", "pickle.dumps(")) or inside.endswith(".to_json()")


def test_nothing_is_run_or_read_without_limits():
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 200
    found = [fault for path in files for fault in problems(path.read_text(), path.relative_to(ROOT).as_posix())]
    assert found == []


FAULTS = """eval(x)
torch.load(x)
torch.load(x, weights_only=False)
np.load(x, allow_pickle=True)
pickle.loads(x)
from pickle import loads
tar.extractall()
yaml.load(x, yaml.Loader)
json.loads(path.read_text())
import dill
subprocess.run(x, shell=True)
torch.export.load(x)
path.read_bytes()"""


@pytest.mark.parametrize("text", FAULTS.splitlines())
def test_the_search_finds_what_it_looks_for(text):
    assert problems(text, "any.py")
    assert problems(text, LIMITS) or text.startswith(("json", "path"))


def test_every_promise_names_tests_that_there_are():
    text = (ROOT.parents[1] / "SECURITY.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "](tests" in line]
    assert len(rows) > 10
    for row in rows:
        files = [ROOT.parents[1] / path for path in re.findall(r"\]\(([^)#]+)\)", row)]
        assert all(path.is_file() for path in files), row
        content = "".join(path.read_text() for path in files)
        for name in re.findall(r"`(test_\w+)", row):
            assert f"def {name}" in content, f"{name} of {row[:60]}"
