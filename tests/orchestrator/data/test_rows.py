"""Rows by number: slices as Python's, and the same rows from every kind of storage."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.checks import configuration, surroundings
from orchestrator.checks.surroundings import Surroundings
from orchestrator.config import Config, DataConfig
from orchestrator.data.path import DataPathError, parse
from orchestrator.data.rows import DATASET_STATE, DataError, open_rows
from orchestrator.resume.fingerprints import fingerprints
from tests.orchestrator.valid_config import with_flags

TABLE = [{"prompt": f"{index} =", "label": str(index), "level": index % 3} for index in range(10)]
number = st.none() | st.integers(-13, 13)


def jsonl(directory: Path, table: list[dict[str, Any]] = TABLE) -> Path:
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in table))
    return path


def parquet(directory: Path, table: list[dict[str, Any]] = TABLE) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: the extra `parquet`")
    from pyarrow import parquet

    path = directory / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(table), path, row_group_size=3)
    return path


def dataset(directory: Path, table: list[dict[str, Any]] = TABLE) -> Path:
    """What `Dataset.save_to_disk` writes: Arrow streams, and a file that names them in order."""
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: the extra `parquet`")
    path = directory / "rows"
    path.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table[:4], table[4:]), strict=True):
        rows = pyarrow.Table.from_pylist(part)
        with pyarrow.OSFile(str(path / name), "wb") as sink, pyarrow.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows, max_chunksize=2)
    (path / DATASET_STATE).write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return path


def read(path: str | Path, **config: Any) -> list[tuple[Any, Any, dict[str, Any]]]:
    rows = open_rows(DataConfig(path=str(path), **config), 0)
    assert rows.size is not None
    return [(row.prompt, row.label, dict(row.metadata)) for row in map(rows.row, range(rows.size))]


@pytest.mark.parametrize("store", [jsonl, parquet, dataset])
@pytest.mark.parametrize("selected", ["", "@[-3:]", "@[8:1:-2]"])
def test_every_kind_of_storage_gives_the_same_rows(
    tmp_path: Path, store: Callable[[Path], Path], selected: str
) -> None:
    expected = {"": TABLE, "@[-3:]": TABLE[-3:], "@[8:1:-2]": TABLE[8:1:-2]}[selected]
    found = read(f"{store(tmp_path)}{selected}")
    assert found == [(row["prompt"], row["label"], {"level": row["level"]}) for row in expected]


@given(start=number, stop=number, step=st.none() | st.sampled_from([1, 2, 3, -1, -2, 20]), spaces=st.booleans())
def test_a_slice_of_rows_is_pythons_slice_of_a_list(
    tmp_path_factory: pytest.TempPathFactory, start: int | None, stop: int | None, step: int | None, spaces: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "sliced.jsonl"
    if not path.exists():
        jsonl(path.parent).rename(path)
    parts = ["" if part is None else str(part) for part in (start, stop, step)]
    text = f"{path}@[{(' : ' if spaces else ':').join(parts if step is not None else parts[:2])}]"
    expected = [row["prompt"] for row in TABLE[start:stop:step]]
    if expected:
        assert [prompt for prompt, _, _ in read(text)] == expected
    else:
        with pytest.raises(DataError, match="selects none of its 10"):
            read(text)


@pytest.mark.parametrize(
    ("selected", "expected"),
    [("[-2:]", TABLE[-2:]), ("[:-1]", TABLE[:-1]), ("[1:3]", TABLE[1:3]), ("[::4]", TABLE[::4])],
)
def test_slices_that_users_write(tmp_path: Path, selected: str, expected: list[dict[str, Any]]) -> None:
    assert [prompt for prompt, _, _ in read(f"{jsonl(tmp_path)}@{selected}")] == [row["prompt"] for row in expected]


def test_a_slice_of_nothing_is_said_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl has no rows: @\[5:2\] selects none of its 10"):
        read(f"{jsonl(tmp_path)}@[5:2]")


@pytest.mark.parametrize("text", ["a@[3]", "a@[]", "a@[1:2:3:4]", "a@[x:]", "a@[1.5:]", "a@[::0]", "a@[1 2:]"])
def test_what_is_no_slice_is_refused_before_anything_starts(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataPathError, match=r"@\["):
        parse(text)
    config = with_flags(tmp_path, "--data.path", text, "--data.generator", "null")
    here = Surroundings(False, True)
    assert [p.key for p in (*configuration.problems(config), *surroundings.problems(config, here))] == ["data.path"]


@pytest.mark.parametrize("text", ["a", "a@b", "a@b.jsonl", "a[1:2]", "a@[1:2].jsonl"])
def test_a_name_may_hold_what_begins_a_slice(text: str) -> None:
    assert parse(text) == parse(text).__class__(Path(text))


def test_another_slice_is_other_data_and_another_spelling_is_not(tmp_path: Path) -> None:
    path = jsonl(tmp_path)

    def both(text: str) -> tuple[str, str]:
        config = with_flags(tmp_path, "--data.path", text, "--data.generator", "null")
        return open_rows(config.data, 0).fingerprint, fingerprints(config)["data"]

    assert both(f"{path}@[1:3]") == both(f"{path}@[ +1 : 3 ]")
    whole, first, second = both(str(path)), both(f"{path}@[1:3]"), both(f"{path}@[1:4]")
    assert len({*whole, *first, *second}) == 6
    assert "@[1:3](" in first[1]


@pytest.mark.parametrize("store", [parquet, dataset])
def test_chat_messages_come_out_of_columns_as_from_json(tmp_path: Path, store: Callable[..., Path]) -> None:
    messages = [{"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}]
    table = [{"prompt": messages, "label": None, "tags": ["a"]}] * 5
    assert read(store(tmp_path, table)) == [(messages, None, {"tags": ["a"]})] * 5


@pytest.mark.parametrize("store", [jsonl, parquet, dataset])
def test_the_fingerprint_is_of_the_content(tmp_path: Path, store: Callable[..., Path]) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    one, same, other = (
        open_rows(DataConfig(path=str(store(tmp_path / name, table))), 0).fingerprint
        for name, table in (("a", TABLE), ("b", TABLE), ("c", TABLE[::-1]))
    )
    assert one == same
    assert one != other


@pytest.mark.parametrize("store", [parquet, dataset])
def test_a_row_that_is_none_is_named_when_it_is_read(tmp_path: Path, store: Callable[..., Path]) -> None:
    path = store(tmp_path, [*TABLE, {"prompt": None, "label": "1", "level": 0}])
    rows = open_rows(DataConfig(path=str(path)), 0)
    with pytest.raises(DataError, match=r"row 10: 'prompt' is NoneType"):
        rows.row(10)
    with pytest.raises(DataError, match=r"row 0: no key 'question' \(data.input_key\) among: prompt, label, level"):
        read(path, input_key="question")


def test_a_label_that_was_asked_for_and_no_row_has_is_named_with_what_there_is(tmp_path: Path) -> None:
    unlabelled = jsonl(tmp_path, [{"prompt": "1", "answer": "2"}])
    assert read(unlabelled) == [("1", None, {"answer": "2"})]
    with pytest.raises(DataError, match=r"data\.label_key 'answr': no row of .*; the first has: prompt, answer"):
        read(unlabelled, label_key="answr")


def test_a_directory_that_is_no_dataset_is_said_with_what_would_be(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"without state\.json: expected a JSONL or Parquet file, or .*save_to_disk"):
        read(tmp_path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=f"several splits; name one: {tmp_path}/train, {tmp_path}/test"):
        read(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"splits": 3}', "[" * 9999])
def test_a_damaged_list_of_splits_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "dataset_dict.json").write_text(content)
    with pytest.raises(DataError, match=r"dataset_dict\.json .* not that of a saved Hugging Face Dataset"):
        read(tmp_path)


@pytest.mark.parametrize("state", ['{"_data_files": ', "{}", '{"_data_files": [3]}'])
def test_a_damaged_dataset_directory_is_named(tmp_path: Path, state: str) -> None:
    (tmp_path / DATASET_STATE).write_text(state)
    with pytest.raises(DataError, match=r"state\.json is not that of a saved Hugging Face Dataset"):
        read(tmp_path)


def test_a_dataset_with_an_index_file_is_not_read_in_another_order(tmp_path: Path) -> None:
    path = dataset(tmp_path)
    state = json.loads((path / DATASET_STATE).read_text())
    (path / DATASET_STATE).write_text(json.dumps(state | {"_indices_data_files": [{"filename": "indices.arrow"}]}))
    with pytest.raises(DataError, match="flatten_indices"):
        read(path)


def test_files_that_are_cut_short_are_named(tmp_path: Path) -> None:
    cut = parquet(tmp_path)
    cut.write_bytes(cut.read_bytes()[:100])
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read"):
        read(cut)
    with pytest.raises(DataError, match=r"absent\.parquet: No such file"):
        read(tmp_path / "absent.parquet")


def test_without_pyarrow_columns_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def problems(path: Path) -> dict[str, str]:
        flags = ("--data.path", f"{path}@[:2]", "--data.generator", "null")
        config: Config = with_flags(tmp_path, *flags)
        return {p.key: p.message for p in surroundings.problems(config, Surroundings(False, True))}

    (tmp_path / "rows.parquet").touch()
    (tmp_path / "dataset").mkdir()
    monkeypatch.setattr("orchestrator.checks.surroundings.find_spec", lambda name: None)
    for name in ("rows.parquet", "dataset"):
        assert 'pip install "slotwise[parquet]"' in problems(tmp_path / name)["data.path"]
    assert problems(jsonl(tmp_path)) == {}
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r'pip install "slotwise\[parquet\]"'):
        read(tmp_path / "rows.parquet")
