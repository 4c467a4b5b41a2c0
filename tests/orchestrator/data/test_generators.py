"""Generators: pure functions of (seed, index), found by name or by import path."""

import subprocess
import sys

import pytest

from orchestrator.data.generators import GENERATORS, Row, largest_digit, resolve_generator
from orchestrator.options.imports import UnknownName, import_function


def test_a_row_depends_on_seed_and_index_alone() -> None:
    assert largest_digit(3, 7) == largest_digit(3, 7)
    rows = {(seed, index): largest_digit(seed, index).prompt for seed in range(4) for index in range(50)}
    assert len({tuple(rows[seed, index] for index in range(50)) for seed in range(4)}) == 4
    assert len({rows[0, index] for index in range(50)}) > 40


def test_the_label_is_the_largest_of_three_digits() -> None:
    for index in range(200):
        row = largest_digit(0, index)
        assert isinstance(row.prompt, str)
        *digits, equals = row.prompt.split()
        assert len(digits) == 3
        assert equals == "="
        assert row.label == max(digits)


def test_every_digit_occurs_in_every_place() -> None:
    prompts = [str(largest_digit(1, index).prompt).split() for index in range(500)]
    for place in range(3):
        assert {words[place] for words in prompts} == set("0123456789")


def test_registered_names_and_import_paths_resolve() -> None:
    assert resolve_generator("largest_digit") is GENERATORS["largest_digit"]
    assert resolve_generator("orchestrator.data.generators:largest_digit") is largest_digit
    assert largest_digit(0, 0) == Row(largest_digit(0, 0).prompt, largest_digit(0, 0).label)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("largest_digits", "did you mean 'largest_digit'"),
        ("nothing like it", "valid: largest_digit"),
        ("orchestrator.generatorz:largest_digit", "no module named 'orchestrator.generatorz'"),
        ("orchestrator.data.generators:largest_digits", "did you mean 'largest_digit'"),
    ],
)
def test_an_unknown_name_is_refused_with_what_would_work(name: str, says: str) -> None:
    with pytest.raises(UnknownName, match=says):
        resolve_generator(name)


def test_an_import_path_has_one_shape() -> None:
    for path in ("orchestrator.data.generators", "orchestrator.data.generators:", ":f", "a-b:c", "a:b:c", "a..b:c"):
        with pytest.raises(UnknownName, match=r"package\.module:function"):
            import_function(path)


def test_listing_names_loads_no_heavy_library() -> None:
    code = (
        "import sys, orchestrator.data.generators, orchestrator.data.tokenizer, orchestrator.data.source;"
        "import orchestrator.rewards.registry;"
        "print([m for m in ('torch', 'transformers', 'ray', 'megatron') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"
