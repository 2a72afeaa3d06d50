"""All variants with what an example of each is made of: the data of ``regard variants`` and of the page in the docs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import _plan, variants
from regard._call import prepare
from regard.mechanism import Mechanism
from regard.normalizers import Softmax
from regard.scores import Dot

B, H, T, D = 2, 4, 8, 16


class Entry(NamedTuple):
    """A variant: the function, an example of it for query (B, H, T, D), and how many key heads the example has."""

    function: Callable[..., Any]
    example: Callable[[], Mechanism]
    key_heads: int = H

    @property
    def word(self) -> str:
        """What the function is called."""
        return self.function.__name__

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """A query, key and value that the example takes."""
        return _ones(B, H, T, D), _ones(B, self.key_heads, T, D), _ones(B, self.key_heads, T, D)


class Section(NamedTuple):
    title: str
    entries: tuple[Entry, ...]


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def _ids() -> Tensor:
    return torch.arange(T) // 4


def _first() -> Tensor:
    return torch.arange(T) == 0


SECTIONS = (
    Section(
        "How a query is scored against a key",
        (
            Entry(variants.scaled_dot, variants.scaled_dot),
            Entry(variants.bahdanau, lambda: variants.bahdanau(_ones(D))),
            Entry(variants.luong_dot, variants.luong_dot),
            Entry(variants.luong_general, lambda: variants.luong_general(_ones(D, D))),
            Entry(variants.luong_concat, lambda: variants.luong_concat(_ones(D))),
            Entry(variants.linear_concat, lambda: variants.linear_concat(_ones(D), _ones(D))),
            Entry(variants.cosine, variants.cosine),
            Entry(variants.qk_norm, lambda: variants.qk_norm(_ones(H))),
            Entry(variants.distance, lambda: variants.distance(D)),
            Entry(variants.soft_capped, variants.soft_capped),
            Entry(variants.multi_query, variants.multi_query, 1),
            Entry(variants.grouped_query, variants.grouped_query, 2),
            Entry(variants.graph, lambda: variants.graph(_ones(D), _ones(D))),
            Entry(variants.graph_v2, lambda: variants.graph_v2(_ones(D))),
        ),
    ),
    Section(
        "How scores become weights",
        (
            Entry(variants.sink, lambda: variants.sink(_ones(H))),
            Entry(variants.off_by_one, variants.off_by_one),
            Entry(variants.sparsemax, variants.sparsemax),
            Entry(variants.entmax15, variants.entmax15),
            Entry(variants.entmax, lambda: variants.entmax(1.3 * _ones(H))),
            Entry(variants.sigmoid, lambda: variants.sigmoid(T)),
            Entry(variants.relu, lambda: variants.relu(D, T)),
            Entry(variants.squared_relu, lambda: variants.squared_relu(T)),
            Entry(variants.top_k, lambda: variants.top_k(2)),
        ),
    ),
    Section(
        "Which pairs may meet",
        (
            Entry(variants.causal, variants.causal),
            Entry(variants.bidirectional, lambda: variants.bidirectional(_ids() == 0)),
            Entry(variants.cross, variants.cross),
            Entry(variants.prefix_lm, lambda: variants.prefix_lm(2)),
            Entry(variants.packed_documents, lambda: variants.packed_documents(_ids())),
            Entry(variants.sliding_window, lambda: variants.sliding_window(3)),
            Entry(variants.streaming, lambda: variants.streaming(3, 2)),
            Entry(variants.longformer, lambda: variants.longformer(1, _first())),
            Entry(variants.dilated_window, lambda: variants.dilated_window(2, 2)),
            Entry(variants.strided_sparse, lambda: variants.strided_sparse(3)),
            Entry(variants.fixed_sparse, lambda: variants.fixed_sparse(3, 1)),
            Entry(variants.local_blocks, lambda: variants.local_blocks(4, T)),
            Entry(variants.chunked, lambda: variants.chunked(4, T)),
        ),
    ),
    Section(
        "What position adds",
        (
            Entry(variants.alibi, variants.alibi),
            Entry(variants.relative, lambda: variants.relative(_ones(H, 5))),
            Entry(variants.t5, lambda: variants.t5(_ones(32, H))),
            Entry(variants.kerple_log, lambda: variants.kerple_log(_ones(H), _ones(H), T)),
            Entry(variants.kerple_power, lambda: variants.kerple_power(_ones(H), _ones(H), T)),
            Entry(variants.swin, lambda: variants.swin(_ones(21, H), 2, 4)),
            Entry(variants.forgetting, lambda: variants.forgetting(-_ones(B, H, T))),
            Entry(variants.shaw, lambda: variants.shaw(_ones(B, H, T, D), _ones(5, D))),
            Entry(
                variants.transformer_xl,
                lambda: variants.transformer_xl(
                    _ones(B, H, T, D), _ones(H, D), _ones(H, D), _ones(2 * T + 1, D)
                ),
            ),
        ),
    ),
)

# What is more than one attention is described as the others are; the description is of one of its parts.
SEVERAL = Section(
    "More than one attention, called in attention's place",
    (
        Entry(
            variants.differential,
            lambda: Mechanism(
                "differential",
                formula="output = (softmax(s_1) - lambda softmax(s_2)) v",
                paper="Ye et al., 2024",
            ),
        ),
    ),
)


def kernels_for(entry: Entry) -> dict[str, str | None]:
    """Every kernel of the library, and why it does not take the entry's example (None: it does)."""
    given: dict[str, Any] = {"mask": None, "score": Dot(), "normalize": Softmax(), "bias": None}
    call = prepare(*entry.tensors(), **{**given, **entry.example()})
    return {kernel.name: kernel.refuses(call) for kernel in _plan.KERNELS}


def find(word: str) -> Entry:
    """The entry of this name. Raises ValueError that names what there is."""
    entries = [entry for section in (*SECTIONS, SEVERAL) for entry in section.entries]
    for entry in entries:
        if entry.word == word:
            return entry
    names = ", ".join(sorted(entry.word for entry in entries))
    raise ValueError(f"there is no variant {word!r}; there are: {names}")
