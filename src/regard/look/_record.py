"""What was seen: one Site for each place of attention, and the Record that holds them, saves and loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard.look import _record_statistics
from regard.look._files import write_all

if TYPE_CHECKING:
    from regard.look.figure import Figure


@dataclass(frozen=True)
class Token:
    """One token: the characters `text[start:stop]` that it stands for, and what to show for it."""

    text: str
    start: int = 0
    stop: int = 0
    special: bool = False
    id: int | None = None


@dataclass(frozen=True)
class Grid:
    """The tokens of an image: `leading` of another kind first (class, registers), then rows x columns, row by row."""

    rows: int
    columns: int
    leading: int = 0
    trailing: int = 0

    @property
    def tokens(self) -> int:
        """How many tokens there are in all."""
        return self.leading + self.rows * self.columns + self.trailing


class Sizes(NamedTuple):
    """B samples, H query heads, Hkv key heads, Tq queries, Tk keys, D and Dv widths (0 where they were not seen)."""

    B: int
    H: int
    Hkv: int
    Tq: int
    Tk: int
    D: int = 0
    Dv: int = 0


class Tensors(NamedTuple):
    """What went into a call, query (B, H, Tq, D), key (B, Hkv, Tk, D), value (B, Hkv, Tk, Dv), and what came out."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor


@dataclass(repr=False, eq=False)
class Site:
    """One place of attention in a model: one call, or the calls of one module over a `generate()`, stitched together.

    What it was. `name` the path of the module; `layer` its number among those of that kind, in the order they
    ran; `call` counts the calls of one module (0 is the first); `kind` "self" or "cross"; `sizes`; `scale`, a number
    or (H,); `softcap`; `sink`, a number or (H,); `score` and `normalize` by name ("dot", "softmax"); `causal` torch's
    `is_causal` (upper left); `masked` the mask in words; `implementation` what ran: "sdpa", "regard", "eager" or
    "multi_head_attention_forward"; `dtype` of the query; `offset` where query 0 stands among the keys (an int or
    (B,)), None where queries and keys are not positions of one text.

    What was kept, each where it was asked for (`Keep`). `statistics`: name -> (B, H, Tq) in float32, `received` (B,
    H, Tk), see `statistic`. `top_weights`, `top_keys` (B, H, Tq, k): weight 0 and key -1 where a row sees fewer.
    `pooled`, `pooled_max` (B, n, rows, columns) over cells of `cell` (queries, keys): the mean over the rows of a
    cell of their weight in it, and the largest weight in it. `rows` and `row_weights` (B, n, len(rows), Tk). `whole`
    (B, n, Tq, Tk), the weights. n counts `heads_kept`, which is None where all heads were kept. `query` (B, H, Tq,
    D), `key` (B, Hkv, Tk, D), `value` (B, Hkv, Tk, Dv), `output` (B, H, Tq, Dv), `mask` (bool, True = may attend) and
    `bias` (added to the scores). Weights are before dropout, which `dropout_p` tells of.

    Of a stitched site: `steps`, the number of queries of each step, and `slots` (B, steps), the sample of each step
    that its rows come from (beams). `query_tokens`, `key_tokens`, `query_grid`, `key_grid`: what the positions stand
    for.
    """

    name: str
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    output: Tensor | None = None
    scale: float | Tensor | None = None
    kind: str = "self"
    call: int = 0
    mask: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = False
    dropout_p: float = 0.0
    query_tokens: tuple[Token, ...] = ()
    key_tokens: tuple[Token, ...] = ()
    _: KW_ONLY
    layer: int = 0
    sizes: Sizes = Sizes(0, 0, 0, 0, 0)
    softcap: float | None = None
    sink: float | Tensor | None = None
    score: str = "dot"
    normalize: str = "softmax"
    masked: str = ""
    implementation: str = ""
    dtype: str = ""
    offset: int | Tensor | None = None
    statistics: dict[str, Tensor] = field(default_factory=dict)
    top_weights: Tensor | None = None
    top_keys: Tensor | None = None
    pooled: Tensor | None = None
    pooled_max: Tensor | None = None
    cell: tuple[int, int] = (1, 1)
    rows: tuple[int, ...] = ()
    row_weights: Tensor | None = None
    whole: Tensor | None = None
    heads_kept: tuple[int, ...] | None = None
    steps: tuple[int, ...] = ()
    slots: Tensor | None = None
    query_grid: Grid | None = None
    key_grid: Grid | None = None
    # The keywords of the call as they were given, while the model is there; a file has the names above instead.
    given: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.query is not None and self.key is not None and self.sizes == (0,) * 7:
            self.sizes = _sizes(self.query, self.key, self.value)
            if self.offset is None and self.kind == "self":
                self.offset = 0 if self.causal else self.sizes.Tk - self.sizes.Tq
            self.dtype = self.dtype or str(self.query.dtype).removeprefix("torch.")

    def __repr__(self) -> str:
        queries, keys = self.lengths
        held = (*_HELD, *(["statistics"] if self.statistics else []))
        kept = ", ".join(name for name in held if getattr(self, name) is not None) or "nothing"
        ran = f" by {self.implementation}" if self.implementation else ""
        return f"<Site {self.title}: {self.kind}{ran}, {self.heads} heads, {queries} x {keys}; kept: {kept}>"

    @property
    def heads(self) -> int:
        """H."""
        if self.query is None:
            return self.sizes.H
        return int(self.query.shape[-3]) if self.query.dim() > 2 else 1

    @property
    def lengths(self) -> tuple[int, int]:
        """(Tq, Tk)."""
        if self.query is None or self.key is None:
            return self.sizes.Tq, self.sizes.Tk
        return int(self.query.shape[-2]), int(self.key.shape[-2])

    @property
    def title(self) -> str:
        """The name, and which of its calls this is."""
        return self.name if self.call == 0 else f"{self.name} (call {self.call + 1})"

    @property
    def score_unknown(self) -> bool:
        """Whether only the weights were seen, and not how they came about."""
        return self.score == "dot" and self.scale is None

    @property
    def tensors(self) -> Tensors:
        """Query, key, value and output. Raises ValueError where they were not kept."""
        if self.query is None or self.key is None or self.value is None or self.output is None:
            raise ValueError(
                f"{self.title}: its query, key, value and output were not kept; watch with keep=Keep(tensors=True)"
            )
        return Tensors(self.query, self.key, self.value, self.output)

    @property
    def mechanism(self) -> dict[str, Any]:
        """The keywords that describe this call: `attention(site.query, site.key, site.value, **site.mechanism)`.

        Raises ValueError for a score or normaliser of the user's own in a record that was loaded from a file.
        """
        from regard.masks import Causal
        from regard.normalizers import Softmax
        from regard.scores import Dot

        mask = Causal("upper_left") if self.causal else self.mask
        if self.given is not None:
            return {"mask": mask, "bias": self.bias, **self.given}
        if (self.score, self.normalize) != ("dot", "softmax"):
            raise ValueError(
                f"{self.title}: its score ({self.score}) and normaliser ({self.normalize}) are not in a record's file; "
                "what was kept of its weights is. Watch the model again to compute with them"
            )
        score = Dot(scale=self.scale, softcap=self.softcap)
        return {"score": score, "normalize": Softmax(self.sink), "mask": mask, "bias": self.bias}

    # ------------------------------------------------------------------ weights

    @property
    def has_weights(self) -> bool:
        """Whether `weights` can be given: they were kept, or what they are computed from was."""
        return "weights" in self.__dict__ or self._kept_whole or self._computable

    @property
    def _kept_whole(self) -> bool:
        return self.whole is not None and self.heads_kept is None

    @property
    def _computable(self) -> bool:
        known = self.given is not None or (self.score, self.normalize, self.scale is None) == (
            "dot",
            "softmax",
            False,
        )
        return self.query is not None and self.key is not None and known and not self.steps

    @cached_property
    def weights(self) -> Tensor:
        """(B, H, Tq, Tk), before dropout: as they were kept, else computed from query and key.

        Raises ValueError where neither was kept.
        """
        if self._kept_whole:
            assert self.whole is not None
            return self.whole
        if not self._computable:
            raise ValueError(
                f"{self.title}: its weights were not kept; watch with keep=Keep(weights=True), "
                "or keep=Keep(tensors=True) to compute them later"
            )
        from regard import attention_weights

        assert self.query is not None and self.key is not None
        with torch.no_grad():
            return attention_weights(self.query, self.key, **self.mechanism)

    def map(self, head: int, sample: int = 0) -> Tensor:
        """(Tq, Tk): the weights of one head. Raises ValueError where they were not kept, or there is no such head."""
        if self.whole is not None and self.heads_kept is not None and head in self.heads_kept:
            return self.whole[sample, self.heads_kept.index(head)]
        if not 0 <= head < self.heads:
            raise ValueError(f"{self.title}: it has heads 0 to {self.heads - 1}; got head {head}")
        return self._four()[sample, head]

    def _four(self) -> Tensor:
        """The weights, (B, H, Tq, Tk) whatever a site made by hand holds."""
        weights = self.weights
        if weights.dim() < 4:
            return weights[(None,) * (4 - weights.dim())]
        return weights.flatten(0, -4)

    def statistic(self, name: str) -> Tensor:
        """(B, H, Tq) in float32; "received" is (B, H, Tk). As it was kept, else computed from the weights.

        "lse" log-sum-exp of the scores; "max" the largest weight; "entropy" -sum_j w_ij log w_ij, in nats; "received"
        sum_i w_ij; "mass" sum_j w_ij (1, less beside a sink, 0 in an empty row); "first" the weight of the first key
        that the sample may see; "self" and "previous" of the query's own key and the one before it; "distance" the mean
        of |p - j| in tokens (these three where positions are known). Other names are the groups that were asked for.
        Raises ValueError for what was neither kept nor can be computed.
        """
        if name in self.statistics:
            return self.statistics[name]
        known = name in _record_statistics.STATISTICS and name != "lse"
        positioned = self.offset is not None or name not in _record_statistics.POSITIONED
        if not known or not positioned or not self.has_weights:
            kept = ", ".join(self.statistics) or "none"
            raise ValueError(f"{self.title}: there is no statistic {name!r} of it; kept: {kept}")
        return _record_statistics.of_weights(self._four(), self.offset, (name,))[name]

    def check(self) -> None:
        """Raise ValueError where tokens, grids or what was kept disagree with the site's lengths."""
        from regard.look import _record_check

        _record_check.check(self)


_HELD = ("query", "key", "value", "output", "mask", "bias", "top_weights", "pooled", "row_weights", "whole")


def _sizes(query: Tensor, key: Tensor, value: Tensor | None) -> Sizes:
    B = 1
    for size in query.shape[:-3]:
        B *= int(size)
    H, Hkv = (int(tensor.shape[-3]) if tensor.dim() > 2 else 1 for tensor in (query, key))
    Dv = 0 if value is None else int(value.shape[-1])
    return Sizes(B, H, Hkv, int(query.shape[-2]), int(key.shape[-2]), int(query.shape[-1]), Dv)


@dataclass
class Record:
    """The places of attention of one watched run, in the order they ran, with the text and the tokens they are about.

    `notes` say what could not be seen, and why. `image` is (height, width, 3) in uint8, for models that see.
    """

    sites: list[Site] = field(default_factory=list)
    text: str = ""
    model: str = ""
    notes: list[str] = field(default_factory=list)
    image: Tensor | None = None
    # The steps of generations whose beams changed places, as long as the record is in memory.
    runs: list[Any] = field(default_factory=list, repr=False, compare=False)

    @property
    def lengths(self) -> set[int]:
        """Of the sides of all sites: how many tokens they have."""
        return {length for site in self.sites for length in site.lengths}

    def label(self, tokens: Sequence[Token], grid: Grid | None = None) -> None:
        """Give every site the tokens of the text (and their grid), on each side whose length is theirs.

        Raises ValueError where no side of any site is as long as the table.
        """
        table = tuple(tokens)
        if self.sites and len(table) not in self.lengths:
            there = " or ".join(map(str, sorted(self.lengths)))
            raise ValueError(
                f"label(tokens): expected a token for each query or key of some site, {there} of them; "
                f"got {len(table)}. What a generation wrote last was never read: leave it out"
            )
        for site in self.sites:
            query_length, key_length = site.lengths
            if query_length == len(table):
                site.query_tokens, site.query_grid = table, grid
            if key_length == len(table):
                site.key_tokens, site.key_grid = table, grid

    def follow(self, beam_indices: Tensor) -> None:
        """Let the samples of a generation with beams be the sequences that it returned, not the beams it ended with.

        beam_indices (N, steps): the beam that each token of each sequence came from, -1 after its end, as transformers'
        `generate(num_beams=..., return_dict_in_generate=True, output_scores=True).beam_indices` gives them. Pooled
        maps, which are of the last beams, are dropped. Raises ValueError where there was no such generation, or fewer
        steps in it.
        """
        from regard.look import _watch_steps

        _watch_steps.follow(self.runs, beam_indices)

    def check(self) -> None:
        """Raise ValueError where the tokens or the numbers of a site disagree with its lengths."""
        for site in self.sites:
            site.check()

    def figure(
        self,
        layer: int | None = None,
        head: int | None = None,
        *,
        overview: bool = False,
        scheme: str = "light",
    ) -> Figure:
        """One head (by default the most telling), or all of them, as a figure: `.svg`, `.png()`, `.save(path)`.

        See `regard.look.figure.figure`, which this calls. Raises ValueError for what the record does not hold.
        """
        from regard.look.figure import figure

        return figure(self, layer, head, overview=overview, scheme=scheme)

    def _repr_html_(self) -> str | None:
        """The page in a frame, for notebooks; None (so that the plain words are shown) for a record of nothing."""
        from regard.look import html

        return html.notebook(self) if self.sites else None

    def save(self, path: str | Path) -> tuple[Path, Path]:
        """Write `path`.npz (numbers) and `path`.json (everything else), both or none. Raises OSError, ValueError."""
        contents = self.files(path)
        write_all(contents)
        npz, described = contents
        return npz, described

    def files(self, path: str | Path) -> dict[Path, bytes]:
        """The two files that `save` writes, as bytes."""
        from regard.look import _record_file

        return _record_file.pack(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Record:
        """Read what `save` wrote. Raises OSError for a missing file, ValueError for one that is not such a record."""
        from regard.look import _record_file

        return _record_file.unpack(path)
