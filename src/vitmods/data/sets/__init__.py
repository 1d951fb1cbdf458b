"""Published sets by name: "imagenet:FOLDER", "cifar10:FOLDER", "vtab:dtd?root=FOLDER", ... See docs/data-sets.md."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qsl

from vitmods.data.records import ALLOWED, Source, printable
from vitmods.data.sets import imagenet, inaturalist, transfer, variants, vtab
from vitmods.data.sets.known import KNOWN, count_warnings
from vitmods.util.errors import UserError, nearest
from vitmods.util.files import expand_user

__all__ = ["KNOWN", "open_known"]

Reader = Callable[[str, Path, dict[str, str]], Source]

_READERS: dict[str, tuple[Reader, tuple[str, ...]]] = {  # and the options that each takes
    "imagenet": (imagenet.imagenet, ("minival", "labels")),
    "imagenet-v2": (variants.v2, ("variant",)),
    "imagenet-r": (variants.renditions, ()),
    "imagenet-c": (variants.corrupted, ("corruption", "severity")),
    "imagenet-real": (variants.real, ("labels",)),
    "inat2018": (inaturalist.inaturalist, ()),
    "inat2019": (inaturalist.inaturalist, ()),
    "vtab": (vtab.vtab, ("task", "download")),
    "sun397": (transfer.sun397, ("partition", "download")),
    **dict.fromkeys(transfer.SETS, (transfer.from_torchvision, ("download",))),
}
assert _READERS.keys() == KNOWN.keys()


def open_known(spec: str, name: str, rest: str) -> Source:
    """The set NAME of KNOWN; rest is what follows "NAME:" in the spec, a folder and options after "?".

    Its splits are others', so what is odd in them (images or classes of test, see ALLOWED) is a warning. Raises
    UserError that says which files to put where if they are missing, and for unknown options.
    """
    read, allowed = _READERS[name]
    folder, _, query = rest.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if name == "vtab":
        folder, options = options.pop("root", ""), {"task": folder, **options}
    for option in options:
        if option not in allowed:
            known = nearest(option, allowed) if allowed else "It takes none."
            raise UserError(f'"{printable(spec)}": {name} has no option "{option}". {known}')
    if not folder:
        raise UserError(f'"{printable(spec)}" does not say where the files are: write {KNOWN[name].usage}.')
    root = expand_user(folder)
    if not root.is_dir():
        raise KNOWN[name].missing(root, "there is no such folder")
    source = read(name, root, options)
    warnings = [*source.warnings, *count_warnings(KNOWN[name], source)]
    source = replace(source, spec=spec, warnings=warnings, allow=frozenset(ALLOWED))
    return imagenet.minival(source, options["minival"]) if "minival" in options else source
