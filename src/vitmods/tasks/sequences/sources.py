"""Long ListOps of Long Range Arena (Tay et al., ICLR 2021): nested operations on digits, as sequences of tokens.

An expression is a digit, or an operation on 2 to 10 expressions: MIN, MAX, MED (the median, cut to a whole number) and
SM (the sum modulo 10). Its value, a digit, is the class.
"""

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from vitmods.data.records import Records, Source, printable
from vitmods.data.sources import Spec, data_source
from vitmods.data.store import remembered
from vitmods.tasks.sequences.data import Tokens, encode
from vitmods.util.errors import UserError
from vitmods.util.files import expand_user
from vitmods.util.limits import read_npz
from vitmods.util.tables import read_table

OPERATIONS = ("[MIN", "[MAX", "[MED", "[SM")
VOCABULARY = (*"0123456789", *OPERATIONS, "]")
"""Token i + 1 is the word in place i; 0 is padding."""
DEEPEST, MOST_ARGUMENTS, OPERATION_SHARE = 10, 10, 0.25
CLOSE = len(VOCABULARY)
_FORMAT = 1  # of what is kept
_LISTED = 20  # wrong lines named in an error


class TooLong(Exception):
    """An expression has more tokens than were asked for."""


def expression(rng: random.Random, longest: float = float("inf")) -> tuple[list[int], int]:
    """A random expression as tokens, and its value. It draws as Long Range Arena's generator does, so that the same
    random numbers give the same expressions. Raises TooLong as soon as it has more than `longest` tokens."""
    tokens: list[int] = []
    share, bits = rng.random, rng.getrandbits

    def below(n: int, k: int) -> int:
        """rng.randrange(n), where n has k bits, in a third of the time."""
        drawn = bits(k)
        while drawn >= n:
            drawn = bits(k)
        return drawn

    def node(depth: int) -> int:
        if len(tokens) >= longest:
            raise TooLong
        if depth == DEEPEST or share() > OPERATION_SHARE:
            value = below(10, 4)
            tokens.append(value + 1)
            return value
        place = len(tokens)
        tokens.append(0)
        values = [node(depth + 1) for _ in range(2 + below(MOST_ARGUMENTS - 1, 4))]
        operation = below(len(OPERATIONS), 3)
        tokens[place] = 11 + operation
        tokens.append(CLOSE)
        return _APPLIED[OPERATIONS[operation]](values)

    value = node(1)
    if len(tokens) > longest:
        raise TooLong
    return tokens, value


_APPLIED: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(median(values)),
    "[SM": lambda values: sum(values) % 10,
}


@dataclass(frozen=True)
class ListOpsOptions:
    """Random expressions of more than min_length and fewer than max_length tokens, no two the same."""

    min_length: int = 50
    max_length: int = 200
    train: int = 10_000
    val: int = 1_000
    test: int = 1_000
    seed: int = 0


@data_source(
    "listops",
    "listops:FOLDER",
    "nested operations on digits as token sequences; listops:generated creates them",
    options=tuple(asdict(ListOpsOptions())),
)
def listops(spec: Spec) -> Source:
    """Generated, or from a folder with Long Range Arena's basic_train.tsv, basic_val.tsv and basic_test.tsv."""
    if spec.rest == "generated":
        return _source(spec, _generated(_options_of(spec)))
    if spec.options:
        raise UserError(f'"{spec}": options are only for listops:generated; a folder has what its files have.')
    folder = expand_user(spec.rest)
    wrong: list[str] = []
    splits = {name: _read(folder / f"basic_{name}.tsv", wrong) for name in ("train", "val", "test")}
    if wrong:
        more = [f"and {len(wrong) - _LISTED} more"] if len(wrong) > _LISTED else []
        many = "line" if len(wrong) == 1 else "lines"
        raise UserError("\n  ".join([f"{len(wrong)} {many} cannot be used:", *wrong[:_LISTED], *more]))
    return _source(spec, splits)


Sequences = tuple[list[NDArray[np.int16]], NDArray[np.int64]]


def _source(spec: Spec, splits: dict[str, Sequences]) -> Source:
    def records(name: str, tokens: list[NDArray[np.int16]], values: NDArray[np.int64]) -> Records:
        ids = tuple(f"{name}-{i:06d}" for i in range(len(tokens)))
        return Records(ids, values, ids, lambda key: tokens[key], np.arange(len(tokens)))

    records_of = {name: records(name, *sequences) for name, sequences in splits.items()}
    return Source("listops", tuple("0123456789"), records_of, inputs=Tokens(VOCABULARY, "LRA-64", "listops"))


def _options_of(spec: Spec) -> ListOpsOptions:
    for name, value in spec.options.items():
        if not value.isdecimal():
            raise UserError(f'"{spec}": {name} is a whole number, not "{printable(value)}".')
    options = ListOpsOptions(**{name: int(value) for name, value in spec.options.items()})
    if options.max_length - options.min_length < 2:
        raise UserError(f'"{spec}": max_length must exceed min_length by 2 or more.')
    if min(options.train, options.val, options.test) < 1:
        raise UserError(f'"{spec}": train, val and test are numbers of sequences, at least 1 each.')
    return options


def _generated(options: ListOpsOptions) -> dict[str, Sequences]:
    """Kept in the user's cache folder: the published set takes minutes."""

    def make() -> list[NDArray[Any]]:
        sequences, values = _draw(options)
        return [np.concatenate(sequences), np.array([len(sequence) for sequence in sequences]), values]

    def read(kept: Path) -> list[NDArray[Any]]:
        return list(read_npz(kept, ["tokens", "lengths", "values"]).values())

    def write(file: IO[bytes], arrays: list[NDArray[Any]]) -> None:
        np.savez_compressed(file, **dict(zip(("tokens", "lengths", "values"), arrays, strict=True)))  # type: ignore[arg-type]

    key = blake2b(json.dumps([_FORMAT, asdict(options)]).encode(), digest_size=8).hexdigest()
    tokens, lengths, values = remembered(f"listops-{key}.npz", make, read, write)
    sequences, start, splits = np.split(tokens, np.cumsum(lengths)[:-1]), 0, {}
    for name in ("train", "val", "test"):
        end = start + getattr(options, name)
        splits[name] = sequences[start:end], values[start:end]
        start = end
    return splits


def _draw(options: ListOpsOptions) -> tuple[list[NDArray[np.int16]], NDArray[np.int64]]:
    rng, seen, values = random.Random(options.seed), dict[tuple[int, ...], int](), list[int]()
    count, tried = options.train + options.val + options.test, 0
    while len(seen) < count:
        tried += 1
        if tried > 2000 * (count + 100):
            raise UserError(
                f"Fewer than {count:,} expressions exist of {options.min_length + 1} to {options.max_length - 1} "
                "tokens: ask for fewer, or for other lengths."
            )
        try:
            tokens, value = expression(rng, options.max_length - 1)
        except TooLong:
            continue
        if len(tokens) > options.min_length:
            seen.setdefault(tuple(tokens), value)
    values = list(seen.values())
    return [np.array(tokens, np.int16) for tokens in seen], np.array(values, np.int64)


def _read(path: Path, wrong: list[str]) -> Sequences:
    """A file with the columns Source and Target. Its invalid lines are added to `wrong`."""
    tokens: list[NDArray[np.int16]] = []
    values: list[int] = []
    layout = "Give the folder with basic_train.tsv, as Long Range Arena writes it."
    for number, row in read_table(path, ("source", "target"), layout, delimiter="\t"):
        where = f"{printable(path.name)}, line {number}"
        if not row["source"] or row["target"] not in tuple("0123456789"):
            wrong.append(f"{where}: it needs an expression in the column Source and a digit in Target")
            continue
        try:
            tokens.append(encode(row["source"], VOCABULARY, where).astype(np.int16))
            values.append(int(row["target"]))
        except UserError as error:
            wrong.append(str(error))
    return tokens, np.array(values, np.int64)
