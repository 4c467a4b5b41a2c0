"""Slots can be told apart by who sees fewer colours."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from numpy.typing import NDArray

from orchestrator.inspector.server import STATIC

SLOTS = ("actor", "stepping", "ref", "teacher", "old_actor", "critic", "poisoned")
# Linear RGB to what is seen of it: Machado, Oliveira and Fernandes (2009), at full severity.
SEEN = {
    "all colours": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                            [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                              [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                            [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.95047, 1.0, 1.08883])
TOLD_APART = 13.0
"""Distance in CIELAB: of 2.3 a difference is just noticed between neighbours; lanes are small and apart."""


def lab(colour: str, seen: NDArray[np.float64]) -> NDArray[np.float64]:
    values = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    relative = TO_XYZ @ np.clip(seen @ linear, 0, 1) / WHITE
    x, y, z = np.where(relative > 0.008856, np.cbrt(relative), 7.787 * relative + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eyes", SEEN)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_two_slots_look_alike(scheme: str, eyes: str) -> None:
    light, dark, *_ = (STATIC / "page.css").read_text().split("@media (prefers-color-scheme: dark)")
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", dark if scheme == "dark" else light))
    near = [
        (a, b, round(float(distance), 1))
        for a, b in itertools.combinations(SLOTS, 2)
        if (distance := np.linalg.norm(lab(colours[a], SEEN[eyes]) - lab(colours[b], SEEN[eyes]))) < TOLD_APART
    ]
    assert near == []
