"""Rows of prompts by number: of a JSONL file, a Parquet file, a Hugging Face dataset directory, or a generator.

A file is JSONL unless its name ends in `.parquet`; a directory is what `Dataset.save_to_disk` wrote. Parquet and
dataset directories need pyarrow (`pip install "slotwise[parquet]"`), which is imported on use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from orchestrator.config import DataConfig
from orchestrator.data.generators import Generator, Row, resolve_generator
from orchestrator.data.path import DataPath, parse
from state.errors import SlotwiseError
from state.stored import Malformed, Stored, parse_json, parse_object
from state.stored import parse as parse_stored

DATASET_STATE = "state.json"
_DATASET_SPLITS = "dataset_dict.json"


class DataError(SlotwiseError):
    """The data cannot be read, or is empty after leaving out over-long prompts."""


class Rows(Protocol):
    """Random access to rows. `size` is None when they never end."""

    fingerprint: str

    @property
    def size(self) -> int | None: ...

    def row(self, index: int) -> Row: ...

    def where(self, index: int) -> str:
        """For people: the place of a row."""
        ...


def open_rows(config: DataConfig, seed: int) -> Rows:
    """Raises `DataError` for data that cannot be read, naming the file and, in it, the line or row."""
    if (config.path is None) == (config.generator is None):
        raise DataError("set one of data.path and data.generator")
    if config.generator is not None:
        return GeneratedRows(config.generator, seed)
    assert config.path is not None
    return StoredRows(parse(config.path), config.input_key, config.label_key)


class GeneratedRows:
    """The endless rows of a generator at one seed."""

    def __init__(self, name: str, seed: int) -> None:
        self._generator: Generator = resolve_generator(name)
        self._name, self._seed = name, seed
        self.fingerprint = f"{name}/{seed}"

    @property
    def size(self) -> int | None:
        return None

    def row(self, index: int) -> Row:
        return self._generator(self._seed, index)

    def where(self, index: int) -> str:
        return f"row {index} of {self._name} (seed {self._seed})"


class StoredRows:
    """The rows that `at` selects, of the bytes that stand there now."""

    def __init__(self, at: DataPath, input_key: str, label_key: str) -> None:
        self._at, self._input_key, self._label_key = at, input_key, label_key
        try:
            table = _open(at.path)
        except OSError as error:
            raise DataError(f"data.path {at.path}: {error.strerror or error}") from error
        self._table = table
        self._selected = range(len(table)) if at.rows is None else range(len(table))[at.rows]
        if not self._selected:
            of = f": {at.suffix} selects none of its {len(table)}" if len(table) else ""
            raise DataError(f"data.path {at.path} has no rows{of}")
        digest = hashlib.sha256(f"{input_key} {label_key} {at.suffix}".encode())
        for chunk in table.content():
            digest.update(chunk)
        self.fingerprint = digest.hexdigest()[:16]
        if table.small:
            labelled = [self._row(index).label is not None for index in self._selected]
            if label_key != DataConfig.model_fields["label_key"].default and not any(labelled):
                first = ", ".join(table.value(self._selected[0]))
                raise DataError(f"data.label_key {label_key!r}: no row of {at.path} has one; the first has: {first}")

    @property
    def size(self) -> int | None:
        return len(self._selected)

    def row(self, index: int) -> Row:
        return self._row(self._selected[index])

    def where(self, index: int) -> str:
        return self._table.where(self._selected[index])

    def _row(self, index: int) -> Row:
        return _as_row(self._table.value(index), self._table.where(index), self._input_key, self._label_key)


class _Table(Protocol):
    """All rows of one file or directory. `small`: cheap enough to look at every row before the first is used."""

    small: bool

    def __len__(self) -> int: ...

    def value(self, index: int) -> Any: ...

    def where(self, index: int) -> str:
        """For people: the place of a row."""
        ...

    def content(self) -> Iterator[bytes]:
        """All bytes that the rows are made of."""
        ...


class _JsonLines:
    small = True

    def __init__(self, path: Path) -> None:
        self._path, self._content = path, path.read_bytes()
        self._lines = [
            (number, line) for number, line in enumerate(self._content.split(b"\n"), start=1) if line.strip()
        ]

    def __len__(self) -> int:
        return len(self._lines)

    def value(self, index: int) -> Any:
        try:
            return parse_json(self._lines[index][1])
        except Malformed as error:
            raise DataError(f"{self.where(index)} {error}") from error

    def where(self, index: int) -> str:
        return f"{self._path}:{self._lines[index][0]}"

    def content(self) -> Iterator[bytes]:
        yield self._content


class _Arrow:
    """Columns, row by row. Dataset directories are mapped into memory, not read."""

    small = False

    def __init__(self, path: Path, table: Any, files: Sequence[Path]) -> None:
        self._path, self._table, self._files = path, table, files

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def value(self, index: int) -> Any:
        return self._table.slice(index, 1).to_pylist()[0]

    def where(self, index: int) -> str:
        return f"{self._path} row {index}"

    def content(self) -> Iterator[bytes]:
        for file in self._files:
            with file.open("rb") as opened:
                while chunk := opened.read(1 << 20):
                    yield chunk


def _open(path: Path) -> _Table:
    if path.is_dir():
        return _dataset(path)
    if path.suffix != ".parquet":
        return _JsonLines(path)
    path.stat()
    return _arrow(path, [path], _read_parquet)


def _dataset(path: Path) -> _Arrow:
    """A directory of `Dataset.save_to_disk`: `state.json` names Arrow files in the streaming format."""
    if (path / _DATASET_SPLITS).is_file():
        raise DataError(f"data.path {path} holds several splits; name one: {', '.join(_splits(path))}")
    if not (path / DATASET_STATE).is_file():
        raise DataError(
            f"data.path {path} is a directory without {DATASET_STATE}: expected a JSONL or Parquet file, or a "
            "directory that a Hugging Face Dataset was saved to with save_to_disk"
        )
    try:
        state: Mapping[str, Any] = parse_object((path / DATASET_STATE).read_bytes())
        files = [path / entry["filename"] for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path / DATASET_STATE} is not that of a saved Hugging Face Dataset: {error!r}") from error
    if state.get("_indices_data_files"):
        raise DataError(f"data.path {path} selects rows by an index file: save it anew after Dataset.flatten_indices()")
    return _arrow(path, files, _read_streams)


class _Splits(Stored):
    splits: list[str]


def _splits(path: Path) -> list[str]:
    try:
        return [f"{path}/{split}" for split in parse_stored(_Splits, (path / _DATASET_SPLITS).read_bytes()).splits]
    except Malformed as error:
        raise DataError(f"{path / _DATASET_SPLITS} {error}: it is not that of a saved Hugging Face Dataset") from error


def _arrow(path: Path, files: Sequence[Path], read: Callable[[Sequence[Path]], Any]) -> _Arrow:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f'data.path {path} needs the package pyarrow: pip install "slotwise[parquet]"') from error
    try:
        return _Arrow(path, read(files), files)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"data.path {path} cannot be read: {error}") from error


def _read_parquet(files: Sequence[Path]) -> Any:
    from pyarrow import parquet

    return parquet.read_table(files[0])


def _read_streams(files: Sequence[Path]) -> Any:
    import pyarrow

    return pyarrow.concat_tables(pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))).read_all() for file in files)


def _as_row(value: Any, where: str, input_key: str, label_key: str) -> Row:
    if not isinstance(value, dict) or input_key not in value:
        known = ", ".join(value) if isinstance(value, dict) else type(value).__name__
        raise DataError(f"{where}: no key {input_key!r} (data.input_key) among: {known}")
    prompt = value[input_key]
    if not isinstance(prompt, str | list):
        raise DataError(f"{where}: {input_key!r} is {type(prompt).__name__}; expected text or a list of messages")
    metadata = {key: entry for key, entry in value.items() if key not in (input_key, label_key)}
    return Row(prompt=prompt, label=value.get(label_key), metadata=metadata)
