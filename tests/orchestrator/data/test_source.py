"""The data source: an order that survives a restart, over-long prompts left out, ids made once."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from orchestrator.config import DataConfig
from orchestrator.data.source import DataError, DataSource
from orchestrator.data.tokenizer import TokenizerError, decode_response, load_tokenizer
from state.errors import ResumeError
from workers.config import ModelConfig

TOKENIZER = AutoTokenizer.from_pretrained(Path(__file__).parents[3] / "examples" / "quickstart")


def write_rows(path: Path, prompts: list[Any], **extra: Any) -> str:
    path.write_text("".join(json.dumps({"prompt": prompt, "label": "1", **extra}) + "\n" for prompt in prompts))
    return str(path)


def numbers(count: int) -> list[str]:
    return [" ".join(str(index).zfill(2)) for index in range(count)]


def source(path: str, *, seed: int = 0, **config: Any) -> DataSource:
    return DataSource(DataConfig(path=path, **config), TOKENIZER, seed)


def test_rows_of_a_file_become_prompts_in_order(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ["3 7 1 =", "2 ="], origin="here")
    first, second = source(path, shuffle=False).next(2)
    assert (first.group_id, first.text, first.ids, first.label) == (0, "3 7 1 =", (5, 9, 3, 12), "1")
    assert second.group_id == 1
    assert second.metadata == {"origin": "here"}


def test_keys_are_chosen_by_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1 =", "answer": 0}\n\n')
    (prompt,) = source(str(tmp_path / "rows.jsonl"), input_key="question", label_key="answer").next(1)
    assert (prompt.text, prompt.label) == ("1 =", 0)


def test_the_file_is_read_again_as_often_as_a_batch_needs(tmp_path: Path) -> None:
    data = source(write_rows(tmp_path / "rows.jsonl", numbers(3)), shuffle=False)
    assert [prompt.text for prompt in data.next(8)] == (numbers(3) * 3)[:8]
    assert data.cursor.epoch == 2
    assert data.cursor.position == 2


def test_each_epoch_has_an_order_of_its_own_from_the_seed(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", numbers(20))
    data, same, other = source(path), source(path), source(path, seed=1)
    epochs = [[prompt.text for prompt in data.next(20)] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == numbers(20)
    assert [prompt.text for prompt in same.next(20)] == epochs[0]
    assert [prompt.text for prompt in other.next(20)] != epochs[0]


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 9), batch=st.integers(1, 5), before=st.integers(0, 8), too_long=st.sets(st.integers(1, 8)))
def test_continuing_gives_the_sequence_of_a_source_never_interrupted(
    tmp_path_factory: pytest.TempPathFactory, size: int, batch: int, before: int, too_long: set[int]
) -> None:
    prompts = [f"{text} + + + +" if index in too_long else text for index, text in enumerate(numbers(size))]
    path = write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", prompts)
    whole, until = source(path, max_prompt_len=4), source(path, max_prompt_len=4)
    expected = [prompt for _ in range(before + 4) for prompt in whole.next(batch)]
    got = [prompt for _ in range(before) for prompt in until.next(batch)]
    after = source(path, max_prompt_len=4)
    after.restore(json.loads(json.dumps(until.state())))
    got += [prompt for _ in range(4) for prompt in after.next(batch)]
    assert got == expected
    assert [prompt.group_id for prompt in got] == list(range(len(got)))
    assert after.cursor == whole.cursor


def test_over_long_prompts_are_left_out_and_counted_in_unchanged_order(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ["1 1", "1 1 1", "1 1 1 1", "", "2"])
    data = source(path, shuffle=False, max_prompt_len=3)
    assert [prompt.text for prompt in data.next(3)] == ["1 1", "1 1 1", "2"]
    assert data.cursor.left_out == 2


@pytest.mark.parametrize("shuffle", [False, True])
def test_all_prompts_over_long_is_an_error(tmp_path: Path, shuffle: bool) -> None:
    data = source(write_rows(tmp_path / "rows.jsonl", ["1 1 1", "2 2 2"]), shuffle=shuffle, max_prompt_len=2)
    with pytest.raises(DataError, match="max_prompt_len=2"):
        data.next(1)


def test_the_first_prompts_are_at_most_one_pass_over_a_file(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [*numbers(3), "1 1 1"])
    data = source(path, shuffle=False, max_prompt_len=2)
    assert [prompt.text for prompt in data.first(2)] == numbers(2)
    assert [prompt.text for prompt in source(path, shuffle=False, max_prompt_len=2).first(99)] == numbers(3)
    with pytest.raises(DataError, match="max_prompt_len=1"):
        source(path, max_prompt_len=1).first(99)
    assert len(DataSource(DataConfig(generator="largest_digit"), TOKENIZER, 0).first(5)) == 5


def test_one_usable_prompt_is_found_wherever_the_order_puts_it(tmp_path: Path) -> None:
    data = source(write_rows(tmp_path / "rows.jsonl", ["1", *["2 2 2"] * 6]), max_prompt_len=2)
    assert [prompt.text for prompt in data.next(30)] == ["1"] * 30


def test_an_endless_generator_with_no_usable_prompt_is_an_error() -> None:
    data = DataSource(DataConfig(generator="largest_digit", max_prompt_len=2), TOKENIZER, 0)
    with pytest.raises(DataError, match="max_prompt_len=2"):
        data.next(1)


def test_a_generator_continues_from_its_cursor() -> None:
    config = DataConfig(generator="largest_digit")
    whole, after = DataSource(config, TOKENIZER, 5), DataSource(config, TOKENIZER, 5)
    expected = whole.next(7)
    part = DataSource(config, TOKENIZER, 5)
    part.next(3)
    after.restore(part.state())
    assert after.next(4) == expected[3:]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"prompt": "1"}\n{"prompt": "2', "rows.jsonl:2 is not JSON"),
        ('{"prompt": "\\ud800"}\n', "rows.jsonl:1 is not JSON: .* hex escape"),
        ("[" * 9999 + "\n", "rows.jsonl:1 is not JSON: recursion limit exceeded"),
        ('{"promt": "1"}\n', "rows.jsonl:1: no key 'prompt' .*promt"),
        ('["1"]\n', "rows.jsonl:1: no key 'prompt'"),
        ('{"prompt": 3}\n', "is int; expected text"),
        ("\n", "has no rows"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(DataError, match=says):
        source(str(tmp_path / "rows.jsonl"))


def test_a_missing_file_and_a_missing_choice_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.jsonl: No such file"):
        source(str(tmp_path / "absent.jsonl"))
    for config in (DataConfig(), DataConfig(path="a", generator="largest_digit")):
        with pytest.raises(DataError, match=r"one of data\.path and data\.generator"):
            DataSource(config, TOKENIZER, 0)


def test_a_cursor_of_other_data_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", numbers(4))
    state = source(path).state()
    others = [
        source(write_rows(tmp_path / "other.jsonl", numbers(5))),
        source(path, seed=1),
        source(path, shuffle=False),
        source(path, max_prompt_len=3),
        DataSource(DataConfig(generator="largest_digit"), TOKENIZER, 0),
    ]
    for other in others:
        with pytest.raises(ResumeError, match=f"{state['fingerprint']}.*{other.fingerprint}.*weights_only"):
            other.restore(state)


def test_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[3] / "examples" / "quickstart")
    path = write_rows(
        tmp_path / "rows.jsonl", ["3", [{"role": "user", "content": "4"}, {"role": "user", "content": "5"}]]
    )
    config = DataConfig(path=path, shuffle=False, apply_chat_template=True)
    with pytest.raises(TokenizerError, match="no chat template"):
        DataSource(config, tokenizer, 0).next(1)
    with pytest.raises(TokenizerError, match="apply_chat_template"):
        DataSource(DataConfig(path=path, shuffle=False), tokenizer, 0).next(2)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '- ' + m.content + ' ' }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    assert [prompt.text for prompt in DataSource(config, tokenizer, 0).next(2)] == ["- 3 =", "- 4 - 5 ="]


def test_a_tokenizer_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"model\.tokenizer"):
        load_tokenizer(ModelConfig())
    with pytest.raises(TokenizerError, match=str(tmp_path)):
        load_tokenizer(ModelConfig(tokenizer=str(tmp_path)))


def test_the_token_that_ended_a_response_is_not_shown_and_others_are() -> None:
    assert decode_response(TOKENIZER, (5, 1)) == "3"
    assert decode_response(TOKENIZER, (0, 5, 1)) == "<pad> 3"
    assert decode_response(TOKENIZER, (1,)) == ""
    assert decode_response(TOKENIZER, ()) == ""
