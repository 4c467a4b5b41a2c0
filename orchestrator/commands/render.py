"""`slotwise render`: the manifests of a run for KubeRay, and their check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from orchestrator.checks import configuration, surroundings
from orchestrator.commands.command_line import parser
from orchestrator.exit_codes import ExitCode
from orchestrator.kuberay import checking
from orchestrator.kuberay.checking import Schemas
from orchestrator.kuberay.kustomize import FILE, KustomizeError, build
from orchestrator.options.load import resolve
from orchestrator.options.problems import ConfigError, Problem

OVERLAYS = Path(__file__).parents[2] / "deploy" / "kuberay" / "overlays"
_ABOUT = """Print the manifests that run CONFIG.yaml on KubeRay: slotwise render CONFIG.yaml | kubectl apply -f -
Options of `slotwise train` may follow. With --check and no CONFIG.yaml: check every overlay."""


def main(arguments: list[str]) -> int:
    command_line = parser("render", _ABOUT)
    command_line.add_argument("config", type=Path, metavar="CONFIG.yaml", nargs="?")
    command_line.add_argument("--overlay", default="gpu", help="dev, gpu, kueue, volcano or a folder (default: gpu)")
    command_line.add_argument("--image", help="of all pods (default: the overlay's)")
    command_line.add_argument("--check", action="store_true", help="print what is wrong instead of the manifests")
    command_line.add_argument(
        "--crds",
        type=Path,
        help="check against these custom resources too: a folder, or a file from `kubectl get crd -o yaml`",
    )
    options, flags = command_line.parse_known_args(arguments)
    schemas = _schemas(options.crds)
    if options.config is None:
        if not options.check or flags:
            raise ConfigError([Problem("CONFIG.yaml", "is needed, unless --check is to look at every overlay")])
        named = {path.parent.name: path.parent for path in sorted(OVERLAYS.glob(f"*/{FILE}"))}
        for name, folder in named.items():
            _say(name, checking.problems(_built(folder), schemas))
        print(f"{', '.join(named)}: nothing wrong{_how(options.crds)}")
        return ExitCode.DONE
    manifests = _filled(options.config, flags, _folder(options.overlay), options.image)
    _say(options.overlay, checking.problems(manifests, schemas))
    if options.check:
        print(f"{options.config} with {options.overlay}: nothing wrong{_how(options.crds)}")
    else:
        print(yaml.safe_dump_all(manifests, sort_keys=False, allow_unicode=True), end="")
    return ExitCode.DONE


def _filled(path: Path, flags: list[str], overlay: Path, image: str | None) -> list[Any]:
    resolved = resolve(path, flags)
    found = (*configuration.problems(resolved.config), *surroundings.thrown_away(resolved.config))
    if found:
        raise ConfigError([resolved.located(problem) for problem in found])
    from orchestrator.kuberay.fill import fill
    from orchestrator.placement import bundles

    return fill(_built(overlay), resolved.config, bundles(resolved.config), image)


def _folder(overlay: str) -> Path:
    folder = OVERLAYS / overlay if "/" not in overlay else Path(overlay)
    if not (folder / FILE).is_file():
        there = ", ".join(sorted(path.parent.name for path in OVERLAYS.glob(f"*/{FILE}"))) or "none; use a checkout"
        raise ConfigError([Problem("--overlay", f"{folder} holds no {FILE}; overlays: {there}")])
    return folder


def _built(folder: Path) -> list[Any]:
    try:
        return build(folder)
    except KustomizeError as error:
        raise ConfigError([Problem("--overlay", str(error))]) from error


def _schemas(path: Path | None) -> Schemas | None:
    if path is None:
        return None
    try:
        from orchestrator.kuberay.schema import Schema, load_crds
    except ImportError as error:
        raise ConfigError([Problem("--crds", f'{error}; pip install "slotwise[check]"')]) from error
    try:
        return {kind: Schema(structural) for kind, structural in load_crds(path).items()}
    except KustomizeError as error:
        raise ConfigError([Problem("--crds", str(error))]) from error


def _say(name: str, found: list[str]) -> None:
    if found:
        raise ConfigError([Problem(name, problem) for problem in found])


def _how(crds: Path | None) -> str:
    return "" if crds is not None else " by the rules; give --crds to check against the cluster's schemas too"
