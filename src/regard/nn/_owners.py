"""Modules that own the parameters of a mechanism and return the core's object when called.

Scores, normalisers and biases of the core own nothing; these do, so that they train, move and save with a model.
Attention modules take either kind for ``score=``, ``normalize=``, ``mask=`` and ``bias=``.

Letters: H query heads, D width of query and key, R the reach of a bias.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from regard import _checks, normalizers, scores
from regard._checks import words, wrong_type, wrong_value
from regard.biases import Bias, Relative
from regard.masks import Mask
from regard.nn import _given
from regard.normalizers import Softmax
from regard.scores import Additive, Bilinear

Where = torch.device | str | None


class Owner(nn.Module):
    """A module that, called without arguments, returns a score, normaliser, mask or bias made of its parameters.

    Subclass it for one of your own: ``forward(self)`` returns the object, and an attention module calls it once a
    call. (Any other module given as ``score=`` or ``normalize=`` is a callable on tiles, as in the core.)
    """

    def __init__(self) -> None:
        super().__init__()
        _given.fitting_state(self)

    def forward(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} is an Owner: define forward(self)")


def current(given: Any) -> Any:
    """What an attention module was given, as the core takes it."""
    return given() if isinstance(given, Owner) else given


_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "score": ("a score", (*scores.BUILT_IN, scores.Modified)),
    "normalize": ("a normaliser", normalizers.BUILT_IN),
    "mask": ("a mask", (Mask,)),
    "bias": ("a bias", (Bias,)),
}


def mechanism(name: str, given: Any) -> Any:
    """A part of a mechanism for a module to hold: an object of the core, a callable, or an Owner of one."""
    said, _ = _KINDS[name]
    if name in ("score", "normalize") and not isinstance(given, scores.Modified):
        if isinstance(given, type) or not callable(given):
            way_out = f"Say {given.__name__}(...), an instance." if isinstance(given, type) else ""
            wrong_type(name, f"{said}, a callable or an nn.Owner", given, way_out)
    one = current(given)
    if any(isinstance(one, kinds) for other, (_, kinds) in _KINDS.items() if other != name):
        owner = "" if one is given else f"{type(given).__name__}, the owner of "
        wrong_type(name, said, words(f"{owner}{type(one).__name__}"))
    return owned(name, given)


def owned(name: str, given: Any) -> Any:
    """Refuse an object or callable that holds tensors in need of a gradient: no module would train, move or save them.

    Looked into: fields of dataclasses; what functions close over, their defaults, what ``partial`` binds; attributes of
    other callables and of what a method is bound to; lists, tuples, dicts. Not modules, which may be owned elsewhere,
    nor globals.
    """
    _look_into(name, given, "", set())
    return given


def _look_into(name: str, given: Any, holder: str, met: set[int]) -> None:
    if isinstance(given, nn.Module) or id(given) in met:
        return
    met.add(id(given))
    for where, inside in _held(given, holder):
        if isinstance(inside, Tensor) and inside.requires_grad:
            what = words(f"{where} with a gradient, which no module owns")
            owners = "nn.AdditiveScore, nn.RelativeBias, nn.Sink, or an nn.Owner of yours"
            way_out = f"Give the module that owns it ({owners})."
            wrong_value(name, "an object without parameters", what, way_out)
        _look_into(name, inside, where, met)


def _held(given: Any, holder: str) -> Iterator[tuple[str, Any]]:
    """What an object holds, each with the words for it."""
    if isinstance(given, type) or isinstance(given, Tensor):
        return
    if dataclasses.is_dataclass(given):
        for part in dataclasses.fields(given):
            yield f"{type(given).__name__}({part.name}=)", getattr(given, part.name)
    elif isinstance(given, (list, tuple, dict)):
        for one in given.values() if isinstance(given, dict) else given:
            yield holder, one
    elif isinstance(given, types.FunctionType):
        yield from _of_function(given)
    elif isinstance(given, types.MethodType):
        yield given.__func__.__qualname__, given.__func__
        if not isinstance(given.__self__, nn.Module):
            yield from _attributes(given.__self__)
    elif isinstance(given, functools.partial):
        for one in (given.func, *given.args, *given.keywords.values()):
            yield "partial(...)", one
    elif callable(given):
        yield from _attributes(given)


def _attributes(given: Any) -> Iterator[tuple[str, Any]]:
    for attribute, one in getattr(given, "__dict__", {}).items():
        yield f"{type(given).__name__}.{attribute}", one


def _of_function(given: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names = given.__code__.co_freevars
    for name, cell in zip(names, given.__closure__ or (), strict=True):
        try:
            yield f"{given.__qualname__} closing over {name}", cell.cell_contents
        except ValueError:  # not filled yet
            continue
    for one in (*(given.__defaults__ or ()), *(given.__kwdefaults__ or {}).values()):
        yield f"{given.__qualname__} with a default", one


def _heads(heads: int | None) -> tuple[int, ...]:
    return () if heads is None else (_given.size("heads", heads),)


class AdditiveScore(Owner):
    """``s = v^T tanh(q + k)`` (Bahdanau et al., 2015): owns v, (D,) or, with ``heads``, (H, D).

    W q and U k of the paper are ``q_proj`` and ``k_proj`` of the attention module. Returns ``scores.Additive``.
    """

    def __init__(self, D: int, heads: int | None = None, *, device: Where = None, dtype: Any = None) -> None:
        super().__init__()
        shape = (*_heads(heads), _given.size("D", D))
        self.v = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """v uniform within 1/sqrt(D), as the weights of a Linear from D to 1."""
        bound = 1 / math.sqrt(self.v.shape[-1])
        nn.init.uniform_(self.v, -bound, bound)

    def forward(self) -> Additive:
        return Additive(self.v)

    def extra_repr(self) -> str:
        return f"v={tuple(self.v.shape)}"


class BilinearScore(Owner):
    """``s = q^T W k`` (Luong's *general*, 2015), unscaled: owns W, (Dq, Dk) or, with ``heads``, (H, Dq, Dk).

    Returns ``scores.Bilinear``.
    """

    def __init__(
        self, Dq: int, Dk: int, heads: int | None = None, *, device: Where = None, dtype: Any = None
    ) -> None:
        super().__init__()
        shape = (*_heads(heads), _given.size("Dq", Dq), _given.size("Dk", Dk))
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W uniform within sqrt(6 / (Dq + Dk)), each head for itself (Glorot and Bengio, 2010)."""
        bound = math.sqrt(6 / sum(self.weight.shape[-2:]))
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self) -> Bilinear:
        return Bilinear(self.weight)

    def extra_repr(self) -> str:
        return f"weight={tuple(self.weight.shape)}"


class RelativeBias(Owner):
    """A learned bias by distance, ``table[h, clip(j - p, -R, R) + R]``: owns the table, (H, 2R + 1), zeros at first.

    R is the ``reach``; ``alignment`` is that of ``masks.Causal`` (a cache tells its own). Returns ``biases.Relative``.
    Distances clipped: Shaw et al., 2018; added to the score: Raffel et al., 2020.
    """

    def __init__(
        self,
        heads: int,
        reach: int,
        *,
        alignment: str | None = None,
        device: Where = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        _checks.alignment("RelativeBias", alignment, None)
        self.alignment = alignment
        shape = (_given.size("heads", heads), 2 * _given.size("reach", reach, least=0) + 1)
        self.table = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Zeros: at first position adds nothing."""
        nn.init.zeros_(self.table)

    def forward(self) -> Relative:
        return Relative(self.table, self.alignment)

    def extra_repr(self) -> str:
        return f"heads={self.table.shape[0]}, reach={self.table.shape[1] // 2}"


def t5_buckets(buckets: int, reach: int, bidirectional: bool) -> Tensor:
    """The bucket of each distance j - p from -reach to reach: (2 reach + 1,), as T5 computes it, in float32."""
    distance = torch.arange(-reach, reach + 1)
    first = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        first = (distance > 0) * buckets
        steps = distance.abs()
    else:
        steps = (-distance).clamp(min=0)
    exact = buckets // 2
    along = torch.log(steps.clamp(min=1).float() / exact) / math.log(reach / exact)
    far = exact + (along * (buckets - exact)).long()
    return first + torch.where(steps < exact, steps, far.clamp(max=buckets - 1))


class T5Bias(Owner):
    """T5's bias: distances share log-spaced buckets (Raffel et al., 2020). Owns ``weight`` (buckets, H), zeros first.

    Distances up to a quarter (``bidirectional``) or half of the buckets have one each, those up to ``reach`` (T5's
    ``max_distance``, 128) share the rest on a log scale, those beyond share the last. ``bidirectional=False`` gives all
    keys behind the query the bucket of distance 0, for use under a causal mask. Returns ``biases.Relative``, the
    buckets expanded to one number a distance. ``weight`` has the shape of T5's ``relative_attention_bias.weight``.
    """

    buckets: Tensor

    def __init__(
        self,
        heads: int,
        buckets: int = 32,
        reach: int = 128,
        bidirectional: bool = True,
        *,
        alignment: str | None = None,
        device: Where = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        _checks.alignment("T5Bias", alignment, None)
        self.alignment = alignment
        self.bidirectional = _given.flag("bidirectional", bidirectional)
        least = 4 if bidirectional else 2
        if _given.size("buckets", buckets, least) % 2:
            wrong_value("buckets", "an even number", buckets)
        exact = buckets // least
        _given.size("reach", reach, exact + 1)
        self.reach = reach
        shape = (buckets, _given.size("heads", heads))
        self.weight = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))
        index = t5_buckets(buckets, reach, bidirectional).to(device)
        self.register_buffer("buckets", index, persistent=False)

    def reset_parameters(self) -> None:
        """Zeros: at first position adds nothing."""
        nn.init.zeros_(self.weight)

    def forward(self) -> Relative:
        return Relative(self.weight[self.buckets].T, self.alignment)

    def extra_repr(self) -> str:
        buckets, heads = self.weight.shape
        return f"heads={heads}, buckets={buckets}, reach={self.reach}, bidirectional={self.bidirectional}"


class Sink(Owner):
    """Softmax with a learned sink a head, ``w_j = exp(s_j) / (exp(sink_h) + sum_k exp(s_k))``: owns sink (H,), zeros.

    Zeros are softmax-off-by-one (Miller, 2023); learned sinks: gpt-oss (2025). Returns ``normalizers.Softmax``.
    """

    def __init__(self, heads: int, *, device: Where = None, dtype: Any = None) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.zeros(_given.size("heads", heads), device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Zeros."""
        nn.init.zeros_(self.sink)

    def forward(self) -> Softmax:
        return Softmax(self.sink)

    def extra_repr(self) -> str:
        return f"heads={self.sink.shape[0]}"
