"""compat.MultiheadAttention against torch.nn.MultiheadAttention: the same numbers, the same doors."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import compat

CONFIGURATIONS = 560
PORTIONS = 8


def draw(seed: int) -> tuple[dict[str, Any], dict[str, Any], list[Tensor], torch.dtype, str]:
    """Constructor arguments, forward arguments, inputs, dtype and mode of one configuration."""
    pick = random.Random(seed)
    torch.manual_seed(seed)
    dtype = pick.choice((torch.float32, torch.float64))
    heads = pick.choice((1, 2, 3, 4))
    E = heads * pick.choice((1, 2, 5, 8))
    B, Tq, Tk = pick.randint(1, 3), pick.randint(1, 7), pick.randint(1, 7)
    kind = pick.choice(("self", "self", "key is value", "all differ", "copies"))
    split = kind == "all differ" and pick.random() < 0.6
    made = {
        "embed_dim": E,
        "num_heads": heads,
        "bias": pick.random() < 0.6,
        "add_bias_kv": pick.random() < 0.4,
        "add_zero_attn": pick.random() < 0.4,
        "kdim": pick.choice((E, E + 3)) if split else None,
        "vdim": pick.choice((E + 1, 2)) if split else None,
        "batch_first": pick.random() < 0.5,
        "dtype": dtype,
    }
    mode = pick.choice(("train", "eval"))
    made["dropout"] = pick.choice((0.0, 0.5, 1.0)) if mode == "eval" else 0.0
    batched = pick.random() < 0.75
    B = B if batched else 1
    if kind in ("self", "copies"):
        Tk = Tq

    def tokens(T: int, width: int) -> Tensor:
        shape = (T, width) if not batched else (B, T, width) if made["batch_first"] else (T, B, width)
        return torch.randn(shape, dtype=dtype)

    query = tokens(Tq, E)
    if kind == "self":
        inputs = [query]
    elif kind == "key is value":
        inputs = [query, tokens(Tk, E)]
    else:
        inputs = [query, tokens(Tk, made["kdim"] or E), tokens(Tk, made["vdim"] or E)]
    given: dict[str, Any] = {"need_weights": pick.random() < 0.6, "average_attn_weights": pick.random() < 0.5}
    form = pick.choice((torch.bool, dtype))
    always = torch.arange(Tk) == pick.randrange(Tk)  # one key that everybody sees: no row is empty

    def mask(shape: tuple[int, ...]) -> Tensor:
        closed = (torch.rand(shape) < 0.4) & ~always
        if form == torch.bool:
            return closed
        numbers = torch.randn(shape, dtype=dtype) * pick.choice((0.0, 1.0))
        return numbers.masked_fill(closed, -torch.inf)

    if pick.random() < 0.5:
        given["key_padding_mask"] = mask((B, Tk) if batched else (Tk,))
    masked = pick.choice(("none", "2-D", "3-D", "causal"))
    if masked == "causal" and Tq <= Tk + 1 and "key_padding_mask" not in given:
        causal = torch.ones(Tq, Tk, dtype=torch.bool).triu(1)
        given["attn_mask"] = (
            causal if form == torch.bool else torch.zeros(Tq, Tk, dtype=dtype).masked_fill(causal, -torch.inf)
        )
        # torch refuses the hint where it is to make weights of keys that it added itself
        given["is_causal"] = pick.random() < 0.7 and not (made["add_bias_kv"] or made["add_zero_attn"])
    elif masked in ("2-D", "3-D"):
        given["attn_mask"] = mask((Tq, Tk) if masked == "2-D" else (B * heads, Tq, Tk))
    return made, given, inputs, dtype, mode


def run(module: nn.Module, given: dict[str, Any], inputs: list[Tensor], seed: int) -> dict[str, Tensor]:
    """Output, weights and every gradient, of one loss on output and weights."""
    fresh = [x.clone().requires_grad_() for x in inputs]
    q, k, v = (fresh * 3)[:3] if len(fresh) == 1 else (fresh[0], fresh[1], fresh[-1])
    masks = {
        name: x.clone().requires_grad_()
        if isinstance(x, Tensor) and x.is_floating_point() and torch.isfinite(x).all()
        else x
        for name, x in given.items()
    }
    output, weights = module(q, k, v, **masks)
    torch.manual_seed(seed)
    loss = (output * torch.randn(output.shape, dtype=output.dtype)).sum()
    found = {"output": output.detach()}
    if weights is not None:
        loss = loss + (weights * torch.randn(weights.shape, dtype=weights.dtype)).sum()
        found["weights"] = weights.detach()
    loss.backward()
    found |= {f"input {n}": x.grad for n, x in enumerate(fresh)}
    found |= {name: p.grad for name, p in module.named_parameters()}
    found |= {name: x.grad for name, x in masks.items() if isinstance(x, Tensor) and x.requires_grad}
    return found


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], limit: float, what: object) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        got = ours[name]
        assert (got is None) == (expected is None), (name, what)
        if expected is None:
            continue
        assert got.shape == expected.shape and got.dtype == expected.dtype, (name, what)
        assert expected.isfinite().all(), (name, what)
        scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        error = float((got - expected).abs().max()) / scale if expected.numel() else 0.0
        assert error <= limit, (name, error, what)


@pytest.mark.parametrize("portion", range(PORTIONS))
def test_equals_torch_over_every_argument(portion: int) -> None:
    each = CONFIGURATIONS // PORTIONS
    for seed in range(portion * each, (portion + 1) * each):
        made, given, inputs, dtype, mode = draw(seed)
        theirs = nn.MultiheadAttention(**made)
        ours = compat.MultiheadAttention(**made)
        for name, parameter in theirs.named_parameters():
            if "bias" in name:  # torch begins with zeros here, which hide mistakes
                nn.init.normal_(parameter, std=0.2)
        ours.load_state_dict(theirs.state_dict())
        for module in (theirs, ours):
            module.train(mode == "train")
        limit = 1e-6 if dtype == torch.float32 else 1e-12
        assert_equal(
            run(ours, given, inputs, seed), run(theirs, given, inputs, seed), limit, (seed, made, given)
        )
