"""From YAML and flags to a configuration: what is accepted, and how each mistake is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from orchestrator.config import Config
from orchestrator.options import yaml_values
from orchestrator.options.fields import OPTIONS
from orchestrator.options.help import train_help
from orchestrator.options.load import load, resolve, to_yaml
from orchestrator.options.problems import ConfigError, Problem


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problems(path: Path | None, *flags: str) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load(path, flags)
    return caught.value.problems


def test_flags_win_over_the_file_and_the_file_over_defaults(written: Any) -> None:
    path = written("train:\n  lr: 1e-4\n  min_lr: 1e-6\nrun:\n  seed: 3\n")
    config = load(path, ["--train.lr", "1e-3"])
    assert (config.train.lr, config.train.min_lr, config.run.seed) == (1e-3, 1e-6, 3)
    assert config.train.weight_decay == Config().train.weight_decay


def test_an_empty_file_and_empty_sections_are_defaults(written: Any) -> None:
    assert load(written(""), []) == Config()
    assert load(written("# nothing yet\ntrain:\n  # lr: 1\nrun:\n"), []) == Config()


def test_part_of_a_section_keeps_the_defaults_of_its_owner(written: Any) -> None:
    path = written("eval:\n  sampling:\n    top_p: 0.9\n")
    assert load(path, []).eval.sampling.temperature == 0.0
    assert load(None, ["--eval.sampling.top_p", "0.9"]).eval.sampling.temperature == 0.0


def test_every_mistake_is_named_with_its_place_and_the_nearest_valid_name(written: Any) -> None:
    path = written("trian:\n  lr: 1\ntrain:\n  lrr: 1\n  num_workers: two\nloop:\n  mode: asynch\n")
    found = {p.key: p for p in problems(path, "--rollout.temprature", "1", "--run.seed", "-1")}
    assert set(found) == {"trian", "train.lrr", "train.num_workers", "loop.mode", "rollout.temprature", "run.seed"}
    for key, where, said in [
        ("trian", f"{path}:1", "did you mean train?"),
        ("train.lrr", f"{path}:4", "did you mean train.lr?"),
        ("train.num_workers", f"{path}:5", "given 'two' (text); accepted: a whole number of at least 1"),
        ("loop.mode", f"{path}:7", "accepted: `sync` or `async` or `fully_async`; did you mean async?"),
        ("rollout.temprature", "--rollout.temprature", "did you mean rollout.temperature?"),
        ("run.seed", "--run.seed", "given -1 (a number); accepted: a whole number of at least 0"),
    ]:
        assert found[key].where == where
        assert said in found[key].message


def test_an_option_in_the_wrong_section_is_found_where_it_belongs(written: Any) -> None:
    (problem,) = problems(written("lr: 1\n"))
    assert "did you mean train.lr or critic.lr?" in problem.message


def test_a_flag_without_its_section_is_found_where_it_belongs() -> None:
    (problem,) = problems(None, "--rollout-batch-size", "8")
    assert "did you mean rollout.rollout_batch_size?" in problem.message


@pytest.mark.parametrize("flag", ["--train.l", "--train.num_work", "--tr.lr", "--lr", "--train.num-workers", "--train"])
def test_an_abbreviated_or_incomplete_flag_is_refused(flag: str) -> None:
    (problem,) = problems(None, flag, "1")
    assert problem.where == flag


def test_what_is_not_a_flag_or_lacks_its_value_is_refused() -> None:
    assert [p.key for p in problems(None, "stray", "--train.lr", "--run.seed", "1", "2")] == [
        "stray", "train.lr", "run.seed",
    ]  # fmt: skip


BOOLEANS = [o.dotted for o in OPTIONS.values() if o.type is bool and o.path[:2] != ("eval", "data")]


@pytest.mark.parametrize("name", BOOLEANS)
def test_each_boolean_can_be_switched_on_and_off(name: str) -> None:
    section, key = name.split(".")

    def value(*flags: str) -> object:
        return vars(vars(load(None, flags))[section])[key]

    assert value() == OPTIONS[(section, key)].default
    assert value(f"--{name}") is value(f"--{name}", "true") is value(f"--{name}=true") is True
    assert value(f"--no-{name}") is value(f"--{name}", "false") is False
    assert "true or false" in problems(None, f"--{name}", "yes")[0].message


@pytest.mark.parametrize("word", ["no", "on", "yes", "off", "True1"])
def test_yaml_1_1_booleans_are_text(written: Any, word: str) -> None:
    (problem,) = problems(written(f"data:\n  shuffle: {word}\n"))
    assert "accepted: true or false" in problem.message
    assert load(written(f"run:\n  name: {word}\n"), []).run.name == word


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("1e-5", 1e-5), ("1E-5", 1e-5), ("1.e-5", 1e-5), (".5", 0.5), ("1e5", 1e5), ("1", 1)],
        *[("true", True), ("null", None), ("~", None), ("", None), ('"1e5"', "1e5"), ("'true'", "true")],
        *[("no", "no"), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"), ("0x1f", "0x1f"), ("[a]", ["a"])],
    ],
)
def test_scalars_are_those_of_yaml_1_2(written: Any, text: str, value: object) -> None:
    given = load(written(f"train:\n  megatron:\n    key: {text}\n"), []).train.megatron["key"]
    assert given == value
    assert type(given) is type(value)
    if text:
        given = load(None, [f"--train.megatron.key={text}"]).train.megatron["key"]
        assert given == value
        assert type(given) is type(value)


TRICKY = [
    "null",
    "true",
    "1e5",
    "",
    "[a]",
    "größer ∞ 漢",
    "no",
    "--x",
    '"quoted"',
    "None",
    "a: b",
    "# c",
    "12",
    " pad ",
]


@pytest.mark.parametrize("text", TRICKY)
def test_text_survives_flags_and_yaml(written: Any, text: str) -> None:
    # As a flag `null` is none and quotes go away; in quotes of their own both stay.
    flag = {"null": '"null"', '"quoted"': '"\\"quoted\\""'}.get(text, text)
    config = load(None, [f"--data.path={flag}"])
    assert config.data.path == text
    assert load(written(to_yaml(config)), []) == config


def test_none_survives_flags_and_yaml(written: Any) -> None:
    path = written("data:\n  path: x\n")
    config = load(path, ["--data.path", "null"])
    assert config.data.path is None
    assert load(written(to_yaml(config)), []) == config


def test_unquoted_numbers_are_not_text(written: Any) -> None:
    (problem,) = problems(written("run:\n  name: 1e5\n"))
    assert "quotes" in problem.message
    (problem,) = problems(written('train:\n  lr: "1e-5"\n'))
    assert "quotes" in problem.message


@pytest.mark.parametrize("value", ["nan", ".nan", "inf", ".inf"])
def test_numbers_are_finite(value: str) -> None:
    assert problems(None, "--train.lr", value)[0].key == "train.lr"


def test_lists_are_several_values_or_one_yaml_list(written: Any) -> None:
    for flags in (["--rollout.stop_token_ids", "1", "2"], ["--rollout.stop_token_ids", "[1, 2]"]):
        assert load(None, flags).rollout.stop_token_ids == (1, 2)
    assert load(None, ["--rollout.stop", "a b", "true"]).rollout.stop == ("a b", "true")
    assert load(written("rollout:\n  stop_token_ids: [1, 2]\n"), []).rollout.stop_token_ids == (1, 2)
    assert "a list of whole numbers" in problems(None, "--rollout.stop_token_ids", "x")[0].message


def test_keys_that_are_passed_through_can_be_nested_and_need_a_name(written: Any) -> None:
    path = written("model:\n  config: {model_type: qwen3, rope_parameters: {rope_theta: 1}}\n")
    config = load(path, ["--model.config.rope_parameters.rope_type", "linear", "--model.config.hidden_size", "64"])
    assert config.model.config == {
        "model_type": "qwen3",
        "rope_parameters": {"rope_theta": 1, "rope_type": "linear"},
        "hidden_size": 64,
    }
    assert "names no key" in problems(None, "--train.megatron.", "1")[0].message
    assert Config().train.megatron == {}


def test_a_section_that_is_off_comes_on_with_its_first_key_and_goes_off_with_null(written: Any) -> None:
    config = load(None, ["--eval.data.path", "x.jsonl"])
    assert config.eval.data is not None
    assert config.eval.data.shuffle is True
    assert load(written(to_yaml(config)), ["--eval.data", "null"]).eval.data is None


def test_a_later_flag_wins() -> None:
    assert load(None, ["--run.seed", "1", "--run.seed", "2"]).run.seed == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train: [1\n", "line"),
        ("- a\n", "sections"),
        ("a: &a\n  b: *a\n", "contains itself"),
        ("? [a]\n: 1\n", "a key must be text"),
        ("train: 3\n", "accepted: a section"),
        ("run:\n  seed: 1\n  seed: 2\n", "given twice"),
        ("run: !!python/object:os.system {}\n", "is not YAML"),
    ],
)
def test_files_that_make_no_sense_are_refused(written: Any, text: str, said: str) -> None:
    assert said in str(problems(written(text))[0])


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    assert "absent.yaml" in str(problems(tmp_path / "absent.yaml")[0])
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "binary.yaml" in str(problems(tmp_path / "binary.yaml")[0])


def test_origins_tell_where_a_key_was_given(written: Any) -> None:
    path = written("run:\n  seed: 1\n")
    resolved = resolve(path, ["--train.lr", "1"])
    assert resolved.located(Problem("run.seed", "")).where == f"{path}:2"
    assert resolved.located(Problem("train.lr", "")).where == "--train.lr"
    assert resolved.located(Problem("train.min_lr", "")).where == ""


def test_resolving_does_not_share_defaults_between_configurations() -> None:
    load(None, ["--train.megatron.a", "1"])
    assert load(None, []) == Config()


def test_no_option_can_be_changed_once_it_is_resolved() -> None:
    config = load(None, [])
    for section in (config, *(getattr(config, name) for name in Config.model_fields)):
        for name in type(section).model_fields:
            with pytest.raises(ValidationError, match="Instance is frozen"):
                setattr(section, name, None)
    assert config == Config()


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(TRICKY),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(value=values)
def test_yaml_that_is_written_reads_back_equal(value: Any) -> None:
    assert yaml_values.read_value(yaml_values.write({"x": value})) == {"x": value}


def test_help_lists_every_option_with_what_it_accepts() -> None:
    text = train_help()
    for option in OPTIONS.values():
        if option.section is None:
            assert f"--{option.dotted}" in text
    assert "--loop.mode  (`sync` or `async` or `fully_async`; default sync)" in text
    assert "--eval.sampling.temperature  (a number of at least 0; default 0.0)" in text
