"""Sequences of tokens: the data set that the training loop reads, in the place of ImageDataset."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitmods.data.augment import Ints
from vitmods.data.batch import Batch
from vitmods.data.dataset import Split, SplitDataset
from vitmods.data.loading import facts, parse_size, problems, stop_on_problems
from vitmods.data.multilabel import with_target
from vitmods.data.read import digest
from vitmods.data.records import Inputs, Source, printable
from vitmods.data.rng import permutation
from vitmods.data.sources import open_source
from vitmods.data.splits import SplitOptions, make_splits
from vitmods.data.store import Index
from vitmods.data.threads import in_order
from vitmods.util.errors import UserError

PADDING = 0
"""The token that fills shorter sequences of a batch up."""


@dataclass(frozen=True)
class TokenStore:
    """The sequences of a split; `index` as of stored images."""

    sequences: list[NDArray[np.int16]]
    index: Index

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(sequence) for sequence in self.sequences], dtype=np.int64)


@dataclass(frozen=True)
class SequenceDataset(SplitDataset):
    """A data set of sequences, of which the model reads the first `longest` tokens.

    Shorter sequences of a batch are filled up with PADDING. Their order is a function of seed and epoch, and
    nothing else is random.
    """

    name: str
    classes: tuple[str, ...]
    splits: dict[str, Split]
    longest: int
    vocabulary: tuple[str, ...]
    facts: dict[str, Any]
    workers: int = 0
    rank: int = 0
    world_size: int = 1
    class_map: tuple[int, ...] | None = field(default=None, init=False)
    target: str = field(default="class", init=False)

    def samples(self, n: int) -> list[tuple[str, NDArray[np.uint8]]]:
        """Sequences are not drawn."""
        return []

    def steps_per_epoch(self, batch_size: int) -> int:
        """Whole batches of the training sequences. UserError without a train split."""
        if "train" not in self.splits:
            raise UserError(f"{self.name} lacks sequences to train on.")
        return len(self.splits["train"]) // batch_size

    def train_batches(self, *, seed: int, epoch: int, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on."""
        steps = self.steps_per_epoch(batch_size)
        order = permutation(seed, epoch, len(self.splits["train"]))

        def make(number: int) -> Batch:
            batch = order[number * batch_size : (number + 1) * batch_size]
            return self._batch("train", batch[self.rank :: self.world_size])

        return in_order(make, range(start, steps), self.workers)

    def eval_batches(self, split: str, batch_size: int) -> Iterator[Batch]:
        """All sequences of a split in order."""
        n = len(self.split(split))

        def make(start: int) -> Batch:
            return self._batch(split, np.arange(start, min(start + batch_size, n)))

        return in_order(make, range(0, n, batch_size), self.workers)

    def _batch(self, split: str, index: Ints) -> Batch:
        part = self.splits[split]
        tokens = padded_together([part.store.sequences[i][: self.longest] for i in index.tolist()])
        return Batch(tokens, torch.from_numpy(part.labels[index]), torch.from_numpy(index))


def padded_together(sequences: list[NDArray[Any]]) -> torch.Tensor:
    """Sequences as one batch, int64 (B, T), filled up with PADDING."""
    tokens = torch.full((len(sequences), max(map(len, sequences))), PADDING)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = torch.from_numpy(sequence.astype(np.int64))
    return tokens


@dataclass(frozen=True)
class Tokens(Inputs):
    """Sequences of tokens: `fetch` gives whole numbers (T,), word i of the vocabulary being token i + 1.

    base, recipe: the model and the recipe that suit them.
    """

    vocabulary: tuple[str, ...]
    base: str
    recipe: str
    title = "sequences of tokens"
    task = "sequence_classification"

    def recommend(self, source: Source) -> tuple[str, tuple[int, int], str, int]:
        """Read whole sequences."""
        return self.base, (1, longest_of(source)), self.recipe, len(self.vocabulary) + 1

    def summarize(self, source: Source, options: SplitOptions) -> dict[str, Any]:
        """With vocabulary and lengths."""
        return read_splits(source, longest_of(source), options)[1]


def load_sequences(
    spec: str | Path,
    *,
    img_size: int | Sequence[int],
    in_chans: int,
    workers: int = 0,
    target: str = "class",
    train_on_all: bool = False,
    **split: Any,
) -> SequenceDataset:
    """Find a data set of sequences of tokens and return it ready to train on.

    img_size: (1, T) to read T tokens of a sequence. in_chans: the tokens of the model, those of the vocabulary and
    padding. target: "class". Other arguments and errors are those of `vitmods.data.load`.
    """
    options, source = SplitOptions(**split), with_target(open_source(spec), target)
    if not isinstance(source.inputs, Tokens):
        raise UserError(f"{printable(source.spec)} does not hold sequences of tokens, which this task reads.")
    (rows, longest), tokens = parse_size(img_size), len(source.inputs.vocabulary) + 1
    if rows != 1:
        raise UserError(f"img_size of sequences is 1 and how many tokens are read, not {rows} and {longest}.")
    if in_chans != tokens:
        raise UserError(
            f"{printable(source.spec)} has {tokens} tokens with padding, not {in_chans}: set in_chans to it."
        )
    splits, summary = read_splits(source, longest, options, train_on_all)
    stop_on_problems(summary.pop("problems"), [], source.spec)
    return SequenceDataset(source.name, source.classes, splits, longest, source.inputs.vocabulary, summary, workers)


def read_splits(
    source: Source, longest: int, options: SplitOptions, train_on_all: bool = False
) -> tuple[dict[str, Split], dict[str, Any]]:
    """The splits and their summary, with its problems."""
    assert isinstance(source.inputs, Tokens)
    records, origin = make_splits(source, options, train_on_all=train_on_all)
    splits = {}
    for name, part in records.items():
        sequences = [np.asarray(part.fetch(int(key)), dtype=np.int16) for key in part.keys]
        digests = np.frombuffer(b"".join(map(digest, sequences)), dtype=np.uint8).reshape(-1, 16)
        store = TokenStore(sequences, Index(np.arange(len(sequences)), digests))
        splits[name] = Split(name, part.ids, part.labels, store)
    summary = facts(source, records, splits, origin)
    counts = {name: int((split.store.lengths > longest).sum()) for name, split in splits.items()}
    if cut := ", ".join(f"{count:,} of {len(splits[name]):,} in {name}" for name, count in counts.items() if count):
        summary["warnings"].append(f"Sequences longer than {longest:,} tokens are cut to that length: {cut}.")
    lengths = np.concatenate([split.store.lengths for split in splits.values()])
    ends = {"shortest": lengths.min(), "median": np.median(lengths), "longest": lengths.max()} if len(lengths) else {}
    return splits, summary | {
        "vocabulary": list(source.inputs.vocabulary),
        "lengths": {name: int(value) for name, value in ends.items()},
        "problems": problems(source, splits, options.group_by, train_on_all),
    }


def longest_of(source: Source) -> int:
    """The number of tokens in the longest sequence of a source."""
    return max(len(part.fetch(int(key))) for part in source.splits.values() for key in part.keys)  # type: ignore[arg-type]


def encode(text: str, vocabulary: tuple[str, ...], where: str) -> NDArray[np.int64]:
    """The tokens of a text, word i of the vocabulary being token i + 1; parentheses, which only group, are left out.

    Raises:
        UserError: naming `where`, an unknown word, or no word at all.
    """
    numbers = {word: i for i, word in enumerate(vocabulary, 1)}
    words = text.replace("(", " ").replace(")", " ").split()
    for word in words:
        if word not in numbers:
            raise UserError(f"{where}: {printable(word)!r} is not a token. Tokens are {' '.join(vocabulary)}.")
    if not words:
        raise UserError(f"{where}: tokens are missing.")
    return np.array([numbers[word] for word in words], dtype=np.int64)
