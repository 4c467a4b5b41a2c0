"""`slotwise convert`: between Hugging Face directories and native checkpoints."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator import hf_files
from orchestrator.commands.command_line import parser
from orchestrator.exit_codes import ExitCode
from orchestrator.options.problems import ConfigError, Problem
from state import checkpoints


def main(arguments: list[str]) -> int:
    command_line = parser(
        "convert", "Hugging Face directory -> native `release` checkpoint; a native checkpoint -> back."
    )
    command_line.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="a Hugging Face directory, or a native checkpoint: the directory with the tracker, or one iteration in it",
    )
    command_line.add_argument("out", type=Path, metavar="OUT", help="a new directory, of the other kind")
    options = command_line.parse_args(arguments)
    source, out = options.source, options.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError([Problem("OUT", f"{out} is there already; name a new directory")])
    if not source.is_dir():
        raise ConfigError([Problem("SOURCE", f"{source} is not a directory")])
    hf_files.read(source / "config.json", "SOURCE")
    with _quiet():
        from workers.megatron.lean_import import lean_import

        with lean_import(compiler=False):
            from workers.megatron import convert
            from workers.megatron.model import UnsupportedModel

        try:
            convert.convert(source, out)
        except UnsupportedModel as error:
            raise ConfigError([Problem("SOURCE", f"{source}: {error}")]) from error
    if checkpoints.inspect(out).has_release:
        print(f"wrote {out}, a native checkpoint: weights alone. Start from it with --checkpoint.load {out}")
    else:
        flags = f"--model.hf_checkpoint {out} --model.megatron_to_hf_mode bridge"
        print(f"wrote {out}, a Hugging Face directory. Serve it, or start from it with {flags}")
    return ExitCode.DONE


@contextmanager
def _quiet() -> Iterator[None]:
    """What libraries say while they load and work is no news to whoever converts."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
