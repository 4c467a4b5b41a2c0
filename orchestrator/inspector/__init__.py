"""Seeing which weights are live, on every rank and engine: a page, served by the run or from its journals alone."""
