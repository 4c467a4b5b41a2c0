"""What ranks do in the tests of models and layouts; run by `gang_processes.run_gang`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt import GPTModel

from state.digest import digest_pieces
from state.digest_records import PieceDigest
from tests.workers.gang_processes import Place
from workers.config import ModelConfig
from workers.megatron import parallel
from workers.megatron.cpu import redirect
from workers.megatron.hf_layout import GptWeights
from workers.megatron.model import build, load_hf_config, padded_vocab_size
from workers.megatron.parallel import Coordinates, Layout

LAYOUTS = {
    "one": Layout(1),
    "tp2": Layout(2, tp=2),
    "pp2": Layout(2, pp=2),
    "dp2": Layout(2),
    "tp2pp2": Layout(4, tp=2, pp=2),
}


@contextmanager
def gang(place: Place, layout: Layout, seed: int = 0) -> Iterator[Coordinates]:
    """The redirect and Megatron's groups, for the length of a `with`."""
    with redirect():
        at = parallel.initialise(place.rank, layout, place.init_method, seed, "cpu", timeout_s=60)
        try:
            yield at
        finally:
            parallel.shutdown()


@dataclass(frozen=True)
class Held:
    """What one rank holds of one model, in values. `local_elements` counts parameters without vocabulary padding."""

    at: Coordinates
    pieces: tuple[PieceDigest, ...]
    local_elements: int


def held(place: Place, layout: Layout, models: dict[str, ModelConfig], seed: int) -> dict[str, Held]:
    """Every model, random from `seed`."""
    with gang(place, layout) as at:
        return {
            name: hold(at, layout, build(load_hf_config(model), layout, model, {}, seed=seed))
            for name, model in models.items()
        }


def hold(at: Coordinates, layout: Layout, gpt: GPTModel) -> Held:
    weights = GptWeights(gpt)
    vocab, hidden = weights.hf_config.vocab_size, weights.hf_config.hidden_size
    local_vocab = padded_vocab_size(vocab, layout.tp) // layout.tp
    padding_rows = local_vocab - max(0, min(local_vocab, vocab - at.tp * local_vocab))
    tables = sum("word_embeddings" in name or "output_layer" in name for name in weights.tensors())
    elements = sum(tensor.numel() for tensor in weights.tensors().values())
    return Held(at, digest_pieces(weights.pieces()).pieces, elements - padding_rows * hidden * tables)


def on_one_rank(place: Place, function: Any, model: ModelConfig, *args: Any) -> Any:
    """`function(gpt, *args)` on a model of one rank."""
    with gang(place, Layout(1)):
        return function(build(load_hf_config(model), Layout(1), model, {}, seed=0), *args)
