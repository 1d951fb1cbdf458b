"""The study on disk: one folder, one lock, every file whole or absent.

study.json                      the settings that define the study, and what is known before the first trial
trials/<arm>/seed<k>/           one trial each; its result.json is written last
trials/<arm>/<point>/seed<k>/   the same if recipe fields are tuned; points are named as lr=0.001,weight_decay=0.1
trials/<setting>/<arm>/...      the same in a sweep
confirm/<arm>/                  the study that trains the best combination of a factorial one on fresh seeds
  val.json  test.json           in a trial: results of its final weights on a split, by protocol, if the training did
                                not measure them. In a tuned study only chosen points have a test.json
costs.json                      the cost of each arm, measured once (in a sweep over bases: base -> costs)
retrained/<arm>/                a trial on all images, after the study; not part of the answer
results.json  results.csv       rebuilt from the trials at any time
split.csv                       each image with its split, label and group
samples.npz  images.npz         a few images for the report; hashes of all images and their groups, to detect changes
.lock  .lease                   held while a run is at work: on this machine, and against other machines
logs/worker<i>.txt              the output of a worker process; worker<i>.lock is held as long as it lives
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from vitmods.data.splits import SPLIT_FILE, read_columns
from vitmods.study.cells import MOST_SEEDS, Trial, images_key
from vitmods.study.settings import Settings, differences
from vitmods.util import limits
from vitmods.util.address import named, place
from vitmods.util.errors import UserError, explaining
from vitmods.util.files import disk_errors, make_folder, similar_folder, write_atomically, write_json
from vitmods.util.lease import LEASE, Lease, LeaseFile, is_held, leased, not_a_lease
from vitmods.util.registry import check_plugins
from vitmods.util.remote import LocalCopy, copy_of
from vitmods.util.text import listing, printable

if TYPE_CHECKING:
    from vitmods.data.dataset import Split


SCHEMA = 3  # of study.json and results.json


@dataclass(frozen=True)
class ChangeFacts:
    """A change, described for a reader who does not know it."""

    short: str
    title: str
    summary: str
    name: str = ""
    paper: str = ""
    url: str = ""
    preserves: str = ""
    published: str = ""
    cost: str = ""


@dataclass(frozen=True)
class ModelFacts:
    """A model as the report plots it: its config, and the changes that made it."""

    name: str
    config: Mapping[str, Any]
    changes: tuple[ChangeFacts, ...] = ()


@dataclass(frozen=True)
class SeedCount:
    """The number of seeds (the maximum of a study until decided; 0: not settled), and with a time budget how many there
    may be, until the time has settled their number; 0: it is settled."""

    seeds: int = 0
    spare: int = 0


@dataclass(frozen=True)
class Facts:
    """The content of study.json.

    splits:   that the answer is about
    settings: as `Settings.to_dict` returns them
    models:   name of a cell (in a sweep with its setting) -> its model, base first
    plan:     of its seeds
    """

    created: str
    command: str
    splits: tuple[str, ...]
    settings: Mapping[str, Any]
    models: Mapping[str, ModelFacts]
    data: Mapping[str, Any]
    resolved: Mapping[str, Any]
    environment: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    plan: SeedCount = SeedCount()

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    def study(self) -> Settings:
        """Return the settings. Raises UserError for damaged ones."""
        settings, plan = Settings.from_dict(self.settings), self.plan
        return replace(settings, spare=plan.spare, open=frozenset() if plan.seeds else frozenset({"seeds"}))

    @property
    def fingerprints(self) -> dict[str, str]:
        """Key of image settings (`images_key`) -> the images that a trial has to see, in each process."""
        of_default = {images_key(self.settings): self.settings["images"]} if "images" in self.settings else {}
        return {**of_default, **self.data.get("fingerprints", {})}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Facts:
        """Invert `to_dict`. Raises TypeError or KeyError for other values."""
        sections = {section.name: values[section.name] for section in fields(cls)}
        for name, kind in get_type_hints(cls).items():
            if not fits(sections[name], kind):
                raise TypeError(f"{name} is {sections[name]!r:.60}")
        for section, kinds in _WITHIN.items():
            for name, value in sections[section].items():
                if not fits(value, kinds.get(name, Any)):
                    raise TypeError(f"{name} of {section} is {value!r:.60}")
        models = {
            name: ModelFacts(
                model["name"], model["config"], tuple(ChangeFacts(**change) for change in model["changes"])
            )
            for name, model in sections["models"].items()
        }
        plan = SeedCount(**{name: value for name, value in sections["plan"].items() if name in ("seeds", "spare")})
        texts = {name: tuple(sections[name]) for name in ("splits", "warnings", "plugins")}
        return cls(**{**sections, **texts, "models": models, "plan": plan})


_WITHIN: Mapping[str, Mapping[str, Any]] = {
    "settings": {"task": str, "margin": float, "until_decided": bool, "generalize": str},
    "data": {
        "splits": Mapping[str, Mapping[str, Any]],
        "constant": Mapping[str, float],
        "fingerprints": Mapping[str, str],
        "frozen": Mapping[str, Mapping[str, Any]],
        "warnings": tuple[str, ...],
    },
}
"""the values that are read from free-form sections"""


_hints = cache(get_type_hints)


def fits(value: Any, kind: Any) -> bool:
    """Whether a value from JSON fits the type of a field."""
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return isinstance(value, Mapping) and all(fits(item, hints.get(name, Any)) for name, item in value.items())
    if origin is Mapping:
        return isinstance(value, Mapping) and all(fits(item, parts[1]) for item in value.values())
    if origin is tuple:
        return isinstance(value, list | tuple) and all(fits(item, parts[0]) for item in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return kind is Any or type(value) is kind


IMAGES_FILE = "images.npz"


class StudyImages:
    """Which images the study, or single trial, in a folder is about: images.npz, or split.csv if it is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._file = folder, folder / IMAGES_FILE

    def write(self, splits: Mapping[str, Split]) -> None:
        """Write hashes of the name and content of every image, so that a later run can report changes, groups, and
        hashes of the training images, for studies that start from these weights."""
        names, contents = _hashes(splits)
        grouped = any(split.groups is not None for split in splits.values())
        groups = {f"groups_{name}": split.groups or split.ids for name, split in splits.items() if grouped}
        arrays = {"names": names, "contents": contents, "trained": _digests(splits["train"])}
        arrays |= {name: np.array(labels) for name, labels in groups.items()}
        write_atomically(self._file, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]

    def read(self) -> dict[str, NDArray[Any]] | None:
        """Read what `write` wrote; None if it is missing or damaged."""
        try:
            arrays = limits.read_npz(self._file)
            return arrays if {"names", "contents"} <= set(arrays) else None
        except Exception:  # whatever numpy, zipfile and zlib raise: other files have the same information
            return None

    @classmethod
    def of_weights(cls, source: str) -> StudyImages | None:
        """Those of the trial, study or model that weights are in, if they are on this disk."""
        path = Path(source).absolute()
        folders = (path, *path.parents[:3]) if path.exists() else ()
        return next((cls(folder) for folder in folders if (folder / IMAGES_FILE).exists()), None)

    def trained_on(self, split: Split) -> int:
        """Count the images of another study's split that are training images here; 0 if that is unknown."""
        recorded = self.read() or {}
        return int(np.isin(_digests(split), recorded.get("trained", [])).sum())

    def groups(self, counts: Mapping[str, int]) -> NDArray[Any] | None:
        """Return the group (n,) of each image of these splits, in order; None if every image is its own group.

        counts: split -> number of its images. Raises UserError if both files that hold groups are damaged.
        """
        if (arrays := self.read()) is not None:
            groups = [arrays[name] for split in counts if (name := f"groups_{split}") in arrays]
            return np.concatenate(groups) if len(groups) == len(counts) else None
        path = self.folder / SPLIT_FILE
        if not path.exists() and not self._file.exists():
            return None
        try:
            listed = read_columns(path, ("image", "split", "group"))
            rows = [row for split in counts for row in listed if row["split"] == split]
            if len(rows) != sum(counts.values()):
                raise UserError(f"{named(path)} does not have all images.")
        except UserError as error:
            raise UserError(
                f"{named(self._file)} is damaged, and {SPLIT_FILE} cannot take its place: {error} Run "
                "the same command again, which writes both."
            ) from error
        is_ungrouped = all(row["group"] == row["image"] for row in rows)
        return None if is_ungrouped else np.array([row["group"] for row in rows])

    def check_same(self, splits: Mapping[str, Split]) -> None:
        """Raise UserError with the numbers of images that were added, removed, or changed since `write`, labels
        included. An image that moved to another split counts as removed and added."""
        recorded = self.read()
        if recorded is None:  # then only the fingerprint in the settings can differ
            return
        before, then = recorded["names"], recorded["contents"]
        names, contents = _hashes(splits)
        _, old, new = np.intersect1d(before, names, return_indices=True)
        changed = int((then[old] != contents[new]).sum())
        counts = {"added": len(names) - len(new), "removed": len(before) - len(old), "changed": changed}
        if any(counts.values()):
            changes = ", ".join(f"{count:,} {what}" for what, count in counts.items())
            if counts["added"] and counts["removed"]:
                changes += " (one that moved to another split counts twice)"
            raise UserError(
                f"{named(self.folder)} is of other images: since it began {changes}. Put the old ones back to resume "
                "it, or choose another folder with --out."
            )

    def same_contents(self, splits: Mapping[str, Split]) -> bool:
        """Whether these are the images and labels of `write`, in any splits; True if that is unknown."""
        recorded = self.read()
        return recorded is None or np.array_equal(np.sort(recorded["contents"]), contents_of(splits))


def contents_of(splits: Mapping[str, Split]) -> NDArray[np.uint64]:
    """Hash the images and labels of all splits, (n,), sorted."""
    return np.sort(_hashes(splits)[1])


def contents_by_image(splits: Mapping[str, Split]) -> dict[str, int]:
    """Return name -> a hash of the image and its label."""
    return dict(zip((image for split in splits.values() for image in split.ids), _hashes(splits)[1].tolist()))


def _hashes(splits: Mapping[str, Split]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Hash the names with their split, and the contents with their labels; (n,) each."""
    texts = (f"{name}/{image}".encode() for name, split in splits.items() for image in split.ids)
    names = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts)
    labels = np.concatenate([split.labels for split in splits.values()]).astype(np.uint64)
    contents = np.concatenate([_digests(split) for split in splits.values()])
    return np.frombuffer(names, dtype=np.uint64), contents + labels * np.uint64(0x9E3779B97F4A7C15)


def _digests(split: Split) -> NDArray[np.uint64]:
    return np.ascontiguousarray(split.store.index.digests[:, :8]).view(np.uint64).ravel()


_FILES = re.compile(
    r"\..*|(trials|confirm|retrained|pretraining|logs)|(study|config|costs|results|base)\.json|results\.csv|split\.csv|"
    r"(samples|images)\.npz|report.*\.html|.*\.tmp"
)
"""what a run writes into a study's folder, also before study.json exists"""
_NAMES = re.compile(r"^(hf|torchvision|vtab):[^?]*|^\w+:generated|[?&](?!root=)[^&]*")
"""parts of a data spec that are never the folder of the images: names of sets, and options such as allow=missing"""
WARNINGS = "warnings.json"  # in a trial's folder, for the report
ORPHAN_GRACE_S = 10.0  # workers of a killed run notice within milliseconds; a loaded machine may take a little longer
Sample = tuple[str, NDArray[np.uint8]]


def read_json(path: Path) -> Any | None:
    """Parse a file, None if it does not exist. Raises UserError if it is not JSON (files here are written whole)."""
    try:
        return limits.read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{named(path)} is damaged ({error}). Remove it, and run the command of the study again."
        ) from error


def read_object(path: Path) -> dict[str, Any]:
    """Parse a file that holds an object; empty if it does not exist."""
    content = read_json(path)
    if content is not None and not isinstance(content, dict):
        raise UserError(f"{named(path)} is damaged (not an object). Remove it, and run the command of the study again.")
    return content or {}


def read_warnings(trial: Path) -> list[str]:
    """Read a trial's warnings for the report; a damaged file is a warning too."""
    try:
        return [str(text) for text in read_json(trial / WARNINGS) or ()]
    except (UserError, TypeError):
        return [f"{WARNINGS} is damaged: the warnings of this trial are lost."]


def slug(name: str, extra: str = "") -> str:
    """Return a folder name for an arm or a point: the name itself if it is plain, else its plain part and a hash.

    Letters, digits, `_`, `+`, `-` and the `extra` characters are plain.
    """
    plain = re.sub(rf"[^A-Za-z0-9_+{extra}-]+", "-", name).strip("-")[:60]
    if plain == name and plain:
        return plain
    return f"{plain or 'arm'}-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:8]}"


class StudyFolder:
    """The paths and files of one study."""

    def __init__(self, path: str | Path):
        """path: a folder, or an address that fsspec opens; the files are then its local copy."""
        self.path = place(path)
        self.settings_file, self.costs_file = self.path / "study.json", self.path / "costs.json"
        self.samples_file, self.logs = self.path / "samples.npz", self.path / "logs"
        self.images = StudyImages(self.path)
        self._copy: LocalCopy | None = None

    def __repr__(self) -> str:
        return f"StudyFolder({str(self.path)!r})"

    def trial(self, trial: Trial) -> Path:
        if trial.cell.is_on_all_images:
            return self.retrained(trial.arm.name)
        setting, point = (slug(values.spelled, "=.,") if values else "" for values in (trial.setting, trial.point))
        return self.path.joinpath("trials", setting, slug(trial.arm.name), point, f"seed{trial.seed}")

    def retrained(self, arm: str) -> Path:
        """The folder of an arm on all images."""
        return self.path / "retrained" / slug(arm)

    @property
    def confirmations(self) -> list[Path]:
        """The folders of the studies that confirm what this one chose."""
        return sorted(file.parent for file in self.path.glob("confirm/*/study.json"))

    @property
    def confirmed_study(self) -> Path | None:
        """The folder of the study whose choice this one confirms; None for others."""
        above = self.path.parent.parent
        is_below = self.path.parent.name == "confirm" and (above / "study.json").is_file()
        return above if is_below else None

    def confirmation(self, arm: str) -> StudyFolder:
        """The folder of the study that trains what this one chose on fresh seeds."""
        return StudyFolder(self.path / "confirm" / slug(arm))

    def evaluation(self, trial: Trial, split: str, path: Path | None = None) -> dict[str, Any]:
        """Read <split>.json of a trial, or of an equal one in another folder."""
        empty = {"schema": 1, "split": split, "protocols": {}, "failed": None}
        return {**empty, **read_object((path or self.trial(trial)) / f"{split}.json")}

    def record_failure(self, trial: Trial, split: str, reason: str) -> None:
        """Record why a trial failed that could not record it itself, e.g. since its process ended."""
        path = self.trial(trial) / "result.json"
        try:
            result = read_object(path)
            evaluated = self.evaluation(trial, split)
        except UserError:  # a damaged file is reported when the trial is read
            return
        if not path.exists():
            make_folder(path.parent)
            failed = {"schema": 1, "status": "failed", "arm": trial.arm.name, "seed": trial.seed}
            write_json(path, {**failed, "metrics": {}, "message": reason})
        elif result.get("status") in ("finished", "diverged"):
            write_json(path.parent / f"{split}.json", {**evaluated, "failed": reason})

    def facts(self) -> Facts | None:
        """Read study.json, None before the first run. Raises UserError if it is damaged or of another version."""
        values = read_object(self.settings_file)
        if not values and not self.settings_file.exists():
            return None
        schema = values.get("schema")
        if isinstance(schema, int) and schema != SCHEMA:
            raise UserError(
                f"{named(self.settings_file)} is of another version of vitmods (schema {schema}, this one reads "
                f"{SCHEMA}). Read the study with the version that ran it, or run it again in another folder."
            )
        with self.naming_damage():
            facts = Facts.from_dict(values)
            if any(seed < MOST_SEEDS for seed in facts.settings.get("tuning_seeds", ())):
                raise UserError(
                    f"{named(self.path)} reports the trials that its tuned values were chosen by, whose scores are too "
                    "good: this version does not read it. Run the study again in another folder."
                )
            return facts

    def naming_damage(self) -> AbstractContextManager[None]:
        """Turn errors in reading the facts into a UserError that names study.json."""
        file, kinds = named(self.settings_file), (AttributeError, KeyError, TypeError, ValueError)
        return explaining(lambda error: f"{file} is damaged ({error!r}). Run the study in another folder.", *kinds)

    def known_facts(self) -> Facts:
        """Read study.json; raises UserError if it does not exist."""
        facts = self.facts()
        if facts is None:
            what = "it is a trial" if (self.path / "config.json").is_file() else "study.json is missing"
            hint = similar_folder(self.path) or "Give the folder that --out named."
            if inside := sorted(file.parent.name for file in self.path.glob("*/study.json")):
                hint = f"It holds the studies {listing(inside)}: give one, or the folder to `vitmods evidence`."
            raise UserError(f"{named(self.path)} is not a study: {what}. {hint}")
        check_plugins(facts.plugins, named(self.path))
        return facts

    def check_same_study(self, settings: Mapping[str, Any]) -> None:
        """Raise UserError with each difference if the folder holds a study that these settings do not continue."""
        facts = self.facts()
        with self.naming_damage():
            changed = differences(facts.settings, settings) if facts else []
        if changed:
            raise UserError(
                f"{named(self.path)} holds a study with other settings: {'; '.join(changed)}. Repeat the old ones to "
                "resume it, or choose another folder with --out. Arms, seeds and values to tune may be added."
            )

    def check_place(self, data: Any) -> None:
        """Raise UserError if the folder has other files than a study or trial, or is inside or above the images."""
        copy, names = copy_of(self.path), list[str]()
        with suppress(FileNotFoundError, NotADirectoryError):
            names = copy.names() if copy else os.listdir(self.path)
        if {"study.json", "config.json"}.intersection(names):  # it is resumed
            return
        if others := sorted(name for name in names if not _FILES.fullmatch(name)):
            raise UserError(
                f"{named(self.path)} has other files ({printable(', '.join(others[:3]))}) and no study. Choose a "
                "folder that is empty or not there yet with --out."
            )
        # Of imagenet:FOLDER, voc:FOLDER,FOLDER and torchvision:NAME?root=FOLDER these parts.
        spec = "" if data == "digits" else str(data)
        for part in filter(os.path.isdir, (spec, *re.split(r"^[a-z0-9-]+:|[?&,]|root=", _NAMES.sub("", spec)))):
            images, folder = Path(part).resolve(), self.path.resolve()
            if images.is_relative_to(folder) or folder.is_relative_to(images):
                where = "inside" if folder.is_relative_to(images) else "above"
                elsewhere = os.path.relpath(images.parent / "runs" / folder.name)
                raise UserError(
                    f"{named(self.path)} is {where} {printable(part)}, the folder of the images, and would mix their "
                    f"files with the study's. Choose a folder elsewhere: --out {shlex.quote(printable(elsewhere))}"
                )

    def refuse_study(self) -> None:
        """Raise UserError if the folder is a study's: a single trial would be among its files."""
        if self.settings_file.exists():
            raise UserError(f"{named(self.path)} holds a study. Choose another folder for a single trial with --out.")

    def write_samples(self, samples: Sequence[Sample]) -> None:
        """Write images with their names, (H, W) or (H, W, C) in uint8, of any sizes."""
        images = {f"image{i}": image for i, (_, image) in enumerate(samples)}
        names = np.array([name for name, _ in samples], dtype=str)
        write_atomically(self.samples_file, lambda file: np.savez_compressed(file, names=names, **images))  # type: ignore[arg-type]

    def samples(self) -> list[Sample]:
        """Read what `write_samples` wrote; empty without the file, and with a warning if it is damaged."""
        path = self.samples_file
        if not path.is_file():
            return []
        try:
            arrays = limits.read_npz(path)
            names = [str(name) for name in arrays["names"]]
            images = [arrays[f"image{i}"] for i in range(len(names))]
            if not all(image.dtype == np.uint8 and image.ndim in (2, 3) and image.size for image in images):
                raise ValueError("a part of it is not an image")
        except Exception as error:  # whatever numpy, zipfile and zlib raise: the report does not need them
            warnings.warn(
                f"{named(path)} is damaged ({error}); the report is without images. Remove that file.", stacklevel=2
            )
            return []
        return list(zip(names, images, strict=True))

    def is_at_work(self) -> bool:
        """Whether a run holds the folder, here or on another machine."""
        copy = copy_of(self.path)
        lease = LeaseFile(f"{copy.address if copy else self.path.absolute()}/{LEASE}")
        return is_held(lease, self.path / ".lock")

    def worker_lock(self, index: int) -> FileLock:
        """The lock that a worker process holds as long as it lives."""
        return FileLock(self.logs / f"worker{index}.lock", timeout=ORPHAN_GRACE_S)

    @contextmanager
    def lock(self) -> Iterator[Lease]:
        """Lock the folder against a second run once no worker of a killed run writes to it; the copy of an address is
        downloaded, and what is written in it is sent.

        A lock holds it on this machine, which the kernel frees when the process ends; a lease against other machines.
        """
        path = make_folder(self.path) / ".lock"
        try:
            limits.check_file(path, "lease")
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            raise not_a_lease(str(path), error) from error
        lock, held = FileLock(path), b""
        try:
            with disk_errors(path):
                held = limits.read_bytes(path, "lease") if path.exists() else b""  # old filelocks empty it
                lock.acquire(timeout=0)
        except Timeout:
            holder = printable(held.decode(errors="replace").strip())[:80]
            who = f" (process {holder})" if holder else ""
            raise UserError(
                f"Another run is at work in {named(self.path)}{who}. Wait for it or end it, then run the same command."
            ) from None
        try:
            with disk_errors(path):
                path.write_text(f"{os.getpid()}\n")
            copy = self._copy = copy_of(self.path)
            lease_file = LeaseFile(f"{copy.address if copy else self.path.absolute()}/{LEASE}")
            local = copy.identity() if copy else str(self.path.resolve())
            with leased(lease_file, named(self.path), local) as lease:
                for index in range(len(list(self.logs.glob("worker*.lock")))):
                    try:
                        with self.worker_lock(index):
                            pass
                    except Timeout:
                        raise UserError(
                            f"A worker of an earlier run still writes to {named(self.path)}. End it, then run the same "
                            "command."
                        ) from None
                with copy.kept(lease) if copy else nullcontext():
                    yield lease
        finally:
            self._copy = None
            lock.release()

    def delete(self, path: Path) -> None:
        """Delete a file of the study while `lock` is held, also at its address."""
        path.unlink(missing_ok=True)
        if self._copy is not None:
            self._copy.delete(path)

    def refresh(self) -> None:
        """Download what an answer is read from, if the folder is a local copy and not locked by a run."""
        copy = copy_of(self.path)
        if copy is not None:
            with suppress(Timeout), FileLock(make_folder(self.path) / ".lock", timeout=0):
                copy.fetch(weights=False)
