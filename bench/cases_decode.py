"""Cases of the caches: decoding 512 tokens one by one, beside the attention of the same steps alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from regard import attention, nn
from regard.masks import Causal, Window

from .case import Case, Inputs, Limit, Result, Shape, shape

TOKENS = 512
LEFT = 127
Make = Callable[[], nn.GrowingCache | nn.PreallocatedCache | nn.RingCache]


def cached(make: Make) -> Callable[[Inputs], Result]:
    """A cache and the core: append the keys of a token, attend to what comes back."""

    def call(inputs: Inputs) -> Result:
        cache, outputs = make(), []
        for query, key, value in _tokens(inputs):
            keys, values, _ = cache.append(key, value)
            outputs.append(attention(query, keys, values))
        return torch.cat(outputs, 2)

    return call


def alone(left: int = TOKENS) -> Callable[[Inputs], Result]:
    """The attention of each step on slices of keys that are all there from the start."""

    def call(inputs: Inputs) -> Result:
        outputs = []
        for t, (query, _, _) in enumerate(_tokens(inputs)):
            seen = slice(max(0, t - left), t + 1)
            outputs.append(attention(query, inputs.key[:, :, seen], inputs.value[:, :, seen]))
        return torch.cat(outputs, 2)

    return call


def _tokens(inputs: Inputs) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    return list(zip(inputs.query.split(1, 2), inputs.key.split(1, 2), inputs.value.split(1, 2), strict=True))


@lru_cache(1)
def _module(width: int, heads: int) -> nn.SelfAttention:
    torch.manual_seed(0)
    return nn.SelfAttention(width, heads, mask=Causal() & Window(TOKENS, None)).requires_grad_(False)


def _inputs_of(inputs: Inputs) -> tuple[nn.SelfAttention, torch.Tensor]:
    x = inputs.query.transpose(1, 2).flatten(2)
    return _module(x.shape[-1], inputs.shape.H), x


def module_cached(inputs: Inputs) -> Result:
    module, x = _inputs_of(inputs)
    cache = nn.GrowingCache()
    return torch.cat([module(token, cache=cache) for token in x.split(1, 1)], 1)


def module_alone(inputs: Inputs) -> Result:
    """The same projections a token, and the attention of the step; keys and values are there already."""
    module, x = _inputs_of(inputs)
    H = inputs.shape.H
    key, value = (f(x).unflatten(-1, (H, -1)).transpose(1, 2) for f in (module.k_proj, module.v_proj))
    outputs = []
    assert module.out_proj is not None
    for t, token in enumerate(x.split(1, 1)):
        module.k_proj(token), module.v_proj(token)
        query = module.q_proj(token).unflatten(-1, (H, -1)).transpose(1, 2)
        context = attention(query, key[:, :, : t + 1], value[:, :, : t + 1])
        outputs.append(module.out_proj(context.transpose(1, 2).flatten(2)))
    return torch.cat(outputs, 1)


SMALL = shape(1, 8, TOKENS, 64)
MEDIUM = shape(1, 16, TOKENS, 64)
LARGE = shape(1, 32, TOKENS, 128, Hkv=8)


def _case(
    name: str, question: str, ours: Callable[[Inputs], Result], other: Callable[[Inputs], Result], at: Shape
) -> Case:
    return Case(
        name=name,
        question=question,
        at=at,
        ours=ours,
        other=other,
        other_name="attention of the steps alone",
        max_rounds=7,
        limits=(Limit("slower", 1.3),),
    )


CASES = (
    _case(
        "decode-growing",
        f"{TOKENS} tokens one by one, GrowingCache: what does the cache add? Heads as in an 8-billion model.",
        cached(nn.GrowingCache),
        alone(),
        LARGE,
    ),
    _case(
        "decode-preallocated",
        f"The same with PreallocatedCache({TOKENS}).",
        cached(lambda: nn.PreallocatedCache(TOKENS)),
        alone(),
        LARGE,
    ),
    _case(
        "decode-ring",
        f"The same with RingCache({LEFT}) under a window of {LEFT + 1}.",
        cached(lambda: nn.RingCache(LEFT)),
        alone(LEFT),
        LARGE,
    ),
    _case(
        "decode-growing-small",
        "GrowingCache in a small layer, where a call's fixed costs weigh most.",
        cached(nn.GrowingCache),
        alone(),
        SMALL,
    ),
    _case(
        "decode-module",
        "nn.SelfAttention with a cache, beside its projections and the attention of the steps alone.",
        module_cached,
        module_alone,
        MEDIUM,
    ),
)
