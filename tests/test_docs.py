"""What the documents say is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator.cli import _COMMANDS
from orchestrator.config import Config
from state.config import Frozen
from state.lifecycle import mermaid

REPO = Path(__file__).parents[1]
DOCUMENTS = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]


def options(section: type[Frozen], prefix: str = "") -> set[str]:
    """Dotted names of all sections and options."""
    names = set()
    for name, field in section.model_fields.items():
        names.add(prefix + name)
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, Frozen):
                names |= options(kind, f"{prefix}{name}.")
    return names


def test_the_diagrams_are_those_of_the_machine() -> None:
    assert (REPO / "docs" / "state.mmd").read_text() == mermaid()
    assert f"```mermaid\n{mermaid()}```" in (REPO / "README.md").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_exists(document: Path) -> None:
    for command in re.findall(r"^(?:\$ )?slotwise (\w+)", document.read_text(), flags=re.MULTILINE):
        assert command in _COMMANDS


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        assert target.startswith("http") or (document.parent / target).exists(), target


def test_every_option_in_the_table_of_flags_exists() -> None:
    table = (REPO / "docs" / "configuration.md").read_text()
    ours = re.findall(r"^\|[^|]*\| `([a-z_]+\.[a-z_.]+)`", table, flags=re.MULTILINE)
    assert len(ours) > 30
    assert set(ours) <= options(Config), set(ours) - options(Config)


def test_every_make_target_in_the_readme_exists() -> None:
    makefile = (REPO / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)", (REPO / "README.md").read_text(), flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
