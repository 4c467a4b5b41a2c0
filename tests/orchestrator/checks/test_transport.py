from pathlib import Path

import pytest

from orchestrator.checks.configuration import problems
from tests.orchestrator.valid_config import with_flags

DISK = ("--weights.transport", "disk")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (DISK, "needed by weights.transport disk"),
        ((*DISK, "--weights.directory", "there"), "'there' is relative"),
        (("--weights.directory", "/there"), "weights.transport is distributed"),
    ],
)
def test_files_need_a_place_that_everyone_calls_by_the_same_name(
    tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    assert words in {p.key: p.message for p in problems(with_flags(tmp_path, *flags))}["weights.directory"]


def test_an_absolute_directory_passes(tmp_path: Path) -> None:
    assert problems(with_flags(tmp_path, *DISK, "--weights.directory", "/shared/weights")) == ()
