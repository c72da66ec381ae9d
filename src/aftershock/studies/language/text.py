"""Texts as token sequences: a file, or a dataset of the Hugging Face hub."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor

from ...errors import InvalidFile, InvalidInput
from ...extras import install
from .models import Encode, safe

DATASETS = {  # the paper's three, as the hub has them
    "wikitext-103": "Salesforce/wikitext:wikitext-103-raw-v1",
    "openwebtext": "Skylion007/openwebtext",
    "codeparrot": "codeparrot/codeparrot-clean",
}
COLUMNS = ("text", "content")  # of a dataset's rows
SCRIPT = "scripts are no longer supported"  # what `datasets` says, from version 4 on, of one that comes as a program
PARQUET = "refs/convert/parquet"  # where the hub keeps a dataset's rows beside it, a folder for each configuration
BLOCK = 2**18  # characters that are encoded at once


@dataclass(frozen=True)
class TextSource:
    """A domain: its name in tables, a file or a dataset's name (`OWNER/NAME` or `OWNER/NAME:CONFIGURATION`), and a
    digest of the file ("" for a dataset)."""

    name: str
    place: str
    digest: str


def find_text(word: str) -> TextSource:
    """A text from `PLACE` or `NAME=PLACE`."""
    named, _, place = word.rpartition("=")
    path = Path(place).expanduser()
    if path.is_file():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return TextSource(safe(named or path.stem), str(path.absolute()), digest)
    if path.is_dir():
        raise InvalidFile(f"{place} is a folder; a text is one UTF-8 file: name the file in it")
    choices = f"give a UTF-8 file, one of {', '.join(DATASETS)}, or a dataset as OWNER/NAME or OWNER/NAME:CONFIGURATION"
    if path.suffix == ".txt":
        raise InvalidFile(f"there is no text file {place}; {choices}")
    dataset = DATASETS.get(place, place)
    if "/" not in dataset:
        raise InvalidInput(f"there is no text {place!r}: {choices}")
    return TextSource(safe(named or place.rpartition("/")[2].partition(":")[0]), dataset, "")


def require_text(source: TextSource) -> None:
    """Refuse a dataset that cannot be had: reads its first row."""
    if not Path(source.place).is_file():
        next(_rows(source.place))


def token_sequences(source: TextSource, encode: Encode, count: int, length: int) -> Int64[Tensor, "sequence token"]:
    """The first `count` stretches of `length` tokens of the text."""
    ids: list[int] = []
    for block in _blocks(_pieces(source)):
        for some in encode([block]):
            ids += some
        if len(ids) >= count * length:
            return torch.tensor(ids[: count * length]).view(count, length)
    raise InvalidInput(
        f"the text {source.name} is too short: it has {len(ids):,} tokens, and {count:,} sequences of {length} tokens "
        f"need {count * length:,}; give a longer text"
    )


def _pieces(source: TextSource) -> Iterator[str]:
    path = Path(source.place)
    if path.is_file():
        try:
            with path.open(encoding="utf-8") as lines:
                yield from lines
        except UnicodeDecodeError as error:
            raise InvalidFile(f"{path} is not a UTF-8 text ({error})") from error
    else:
        yield from _rows(source.place)


def _rows(place: str) -> Iterator[str]:
    """Documents of a dataset's training split, streamed."""
    name, _, configuration = place.partition(":")
    try:
        import datasets  # noqa: F401
    except ImportError as error:
        raise InvalidInput(
            f"the dataset {name} needs the package datasets: {install('language')}; or give a file"
        ) from error
    try:
        rows = _streamed(name, configuration or None)
        first = next(rows)
    except Exception as error:  # no network, no such dataset: each has its own class
        raise InvalidInput(
            f"the dataset {name} cannot be read ({type(error).__name__}: {error}); try again, or give a file"
        ) from error
    column = next((c for c in COLUMNS if c in first), None)
    if column is None:
        raise InvalidInput(f"the dataset {name} has no column {' or '.join(COLUMNS)}; it has {', '.join(first)}")
    yield first[column]
    for row in rows:
        yield row[column]


def _streamed(name: str, configuration: str | None) -> Iterator[dict[str, str]]:
    """A dataset's rows; of one that comes as a program, such as openwebtext, those that the hub keeps as parquet."""
    from datasets import load_dataset

    try:
        return iter(load_dataset(name, configuration, split="train", streaming=True))
    except RuntimeError as error:
        if SCRIPT not in str(error):
            raise
    return iter(load_dataset(name, data_dir=configuration, revision=PARQUET, split="train", streaming=True))


def _blocks(pieces: Iterable[str]) -> Iterator[str]:
    """Pieces joined to blocks of at least `BLOCK` characters, and what is left."""
    waiting: list[str] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= BLOCK:
            yield "".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield "".join(waiting)
