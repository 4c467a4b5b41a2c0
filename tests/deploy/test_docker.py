"""The image is small where it can be, runs as nobody special, and holds what is copied into it and no more."""

from __future__ import annotations

import fnmatch
import re
import shlex
from pathlib import Path

import pytest
import yaml

from orchestrator.jobs import submission
from orchestrator.jobs.submission import EXCLUDES
from orchestrator.options.load import load
from tests.deploy.manifests import REPO
from tests.orchestrator.valid_config import write

DOCKERFILE = REPO / "deploy" / "docker" / "Dockerfile"
KNOWN = {"ARG", "FROM", "ENV", "RUN", "COPY", "WORKDIR", "USER", "ENTRYPOINT", "CMD"}

Instruction = tuple[str, str]


def instructions(text: str) -> list[Instruction]:
    """`(RUN, ...)`, continued lines joined, comments left out."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    found = (line.strip().partition(" ") for line in lines.replace("\\\n", " ").splitlines() if line.strip())
    return [(name, rest.strip()) for name, _, rest in found]


def problems(text: str, ignored: str) -> list[str]:
    found: list[str] = []
    all_of = instructions(text)
    names = [name for name, _ in all_of]
    last_stage = all_of[len(names) - names[::-1].index("FROM") - 1 :]
    defaults = dict(rest.partition("=")[::2] for name, rest in all_of if name == "ARG")
    stages: set[str] = set()
    copied = [rest for name, rest in all_of if name == "COPY" and "--from=" not in rest]
    for name, rest in all_of:
        if name not in KNOWN:
            found.append(f"{name} is not an instruction that is used here")
        if name == "FROM":
            image = re.sub(r"\$\{(\w+)\}", lambda m: defaults[m.group(1)].strip('"'), rest.split()[0])
            if ":" not in image or image.endswith(":latest"):
                found.append(f"{image} is not pinned")
            stages |= {rest.split()[-1]} if " AS " in rest else set()
        if name in ("ARG", "ENV") and re.search(r"KEY|TOKEN|SECRET|PASSWORD", rest):
            found.append(f"{name} {rest} holds a credential")
        if name == "RUN" and "apt-get install" in rest:
            for needed in ("apt-get update", "--no-install-recommends", "--yes", "rm -rf /var/lib/apt/lists"):
                if needed not in rest:
                    found.append(f"apt-get without {needed}")
        if name == "RUN" and re.search(r"\bsudo\b|\bcurl\b.*\|", rest):
            found.append(f"RUN {rest}")
        if name == "COPY" and "--from=" in rest and re.findall(r"--from=(\S+)", rest)[0] not in stages:
            found.append(f"COPY {rest}: there is no such stage")
        if name in ("ENTRYPOINT", "CMD") and not rest.startswith("["):
            found.append(f"{name} in shell form, which does not pass signals on")
        if name == "WORKDIR" and not rest.startswith("/"):
            found.append(f"WORKDIR {rest} is relative")
    for source in (word for rest in copied for word in shlex.split(rest)[:-1]):
        if not (REPO / source).exists():
            found.append(f"COPY {source}: is not there")
        if f"!{source}" not in ignored.splitlines():
            found.append(f"COPY {source}: is left out by the ignore file")
    pip = [index for index, (name, rest) in enumerate(all_of) if name == "RUN" and "requirements.lock" in rest]
    source_copied = [index for index, (name, rest) in enumerate(all_of) if name == "COPY" and rest.startswith("state")]
    if not pip or not source_copied or pip[0] > source_copied[0]:
        found.append("the source is copied before the packages are installed")
    if "PIP_NO_CACHE_DIR=1" not in text and "--no-cache-dir" not in text:
        found.append("pip keeps its cache")
    users = [rest for name, rest in last_stage if name == "USER"]
    if not users or users[-1].split(":")[0] in ("root", "0"):
        found.append("runs as root")
    elif not users[-1].split(":")[0].isdigit():
        found.append("USER by name, which runAsNonRoot cannot judge")
    return found


def test_nothing_is_wrong_with_it() -> None:
    assert problems(DOCKERFILE.read_text(), Path(f"{DOCKERFILE}.dockerignore").read_text()) == []


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("python:3.11-slim-bookworm", "python", "is not pinned"),
        ("python:3.11-slim-bookworm", "python:latest", "is not pinned"),
        ("USER 1000:1000\n", "", "runs as root"),
        ("USER 1000:1000", "USER root", "runs as root"),
        ("USER 1000:1000", "USER slotwise", "by name"),
        (" --no-install-recommends", "", "apt-get without --no-install-recommends"),
        ("    && rm -rf /var/lib/apt/lists/* \\\n", "", "apt-get without rm"),
        ('CMD ["slotwise", "doctor"]', "CMD slotwise doctor", "shell form"),
        ("PIP_NO_CACHE_DIR=1 ", "", "keeps its cache"),
        ("COPY examples", "COPY example", "COPY example: is not there"),
        ("COPY examples", "COPY docs", "left out by the ignore file"),
        ("--from=environment /opt/venv", "--from=builder /opt/venv", "no such stage"),
        ('ARG PIP_ARGS=""', 'ARG PIP_ARGS=""\nARG HF_TOKEN', "holds a credential"),
        ("WORKDIR /opt/slotwise", "WORKDIR slotwise", "is relative"),
        ("COPY requirements.lock /tmp", "COPY state /opt/slotwise/state\nCOPY requirements.lock /tmp", "before the"),
    ],
)
def test_what_would_be_wrong_is_found(before: str, after: str, said: str) -> None:
    text = DOCKERFILE.read_text()
    assert before in text
    found = problems(text.replace(before, after), Path(f"{DOCKERFILE}.dockerignore").read_text())
    assert [problem for problem in found if said in problem], found


def test_every_package_of_the_project_is_in_the_image() -> None:
    copied = [rest for name, rest in instructions(DOCKERFILE.read_text()) if name == "COPY"]
    packages = {path.parent.name for path in REPO.glob("*/__init__.py")} - {"tests"}
    assert {"state", "workers", "orchestrator"} <= packages
    assert {package for package in packages if not any(rest.startswith(f"{package} ") for rest in copied)} == set()


def test_the_pods_run_as_the_user_of_the_image() -> None:
    job = yaml.safe_load((REPO / "deploy" / "kuberay" / "base" / "rayjob.yaml").read_text())
    security = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["securityContext"]
    assert f"USER {security['runAsUser']}:{security['runAsGroup']}" in DOCKERFILE.read_text()


def test_image_manifest_and_lock_have_one_ray() -> None:
    job = yaml.safe_load((REPO / "deploy" / "kuberay" / "base" / "rayjob.yaml").read_text())
    pinned = [line for line in (REPO / "requirements.lock").read_text().splitlines() if line.startswith("ray==")]
    assert pinned == [f"ray=={job['spec']['rayClusterSpec']['rayVersion']}"]


def test_the_runtime_environment_for_rays_own_command_is_the_one_of_submit(tmp_path: Path) -> None:
    written = yaml.safe_load((REPO / "deploy" / "ray-job" / "runtime-env.yaml").read_text())
    config = load(write(tmp_path), ["--run.dir", "/shared/runs/test"])
    asked = submission.submission(config, tmp_path / "valid.yaml", [], tmp_path)
    assert asked.runtime_env == {"working_dir": str(tmp_path), **written}


def test_what_is_uploaded_leaves_out_what_no_job_needs() -> None:
    for name in (".git", ".venv", ".venv-3.12", "runs", "tests"):
        assert any(fnmatch.fnmatch(f"/{name}", pattern) for pattern in EXCLUDES), name
    for name in ("state", "workers", "orchestrator", "examples"):
        assert not any(fnmatch.fnmatch(f"/{name}", pattern) for pattern in EXCLUDES), name
