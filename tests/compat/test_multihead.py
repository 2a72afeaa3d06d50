"""compat.MultiheadAttention against torch.nn.MultiheadAttention: the same numbers, the same doors."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import compat
from tests.compat.twins import twins

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
        # With keys of its own and no weights torch's hint hides those keys: tested by itself below.
        contradiction = (made["add_bias_kv"] or made["add_zero_attn"]) and not given["need_weights"]
        given["is_causal"] = pick.random() < 0.7 and not contradiction
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


def test_the_draw_reaches_every_argument() -> None:
    seen: dict[str, set[Any]] = {}
    for seed in range(CONFIGURATIONS):
        made, given, inputs, dtype, mode = draw(seed)
        facts = {
            **made,
            "mode": mode,
            "tensors": (len(inputs), inputs[0].ndim),
            "is_causal": given.get("is_causal"),
        }
        facts |= {name: given[name] for name in ("need_weights", "average_attn_weights")}
        for name in ("attn_mask", "key_padding_mask"):
            mask = given.get(name)
            facts[name] = mask if mask is None else (mask.ndim, mask.dtype, bool(torch.isfinite(mask).all()))
        for name, fact in facts.items():
            seen.setdefault(name, set()).add(fact)
    for name in (
        "bias",
        "add_bias_kv",
        "add_zero_attn",
        "batch_first",
        "need_weights",
        "average_attn_weights",
    ):
        assert seen[name] == {True, False}
    assert seen["mode"] == {"train", "eval"} and seen["dropout"] == {0.0, 0.5, 1.0}
    assert seen["is_causal"] == {True, False, None} and len(seen["kdim"]) > 5 and len(seen["vdim"]) > 5
    assert seen["tensors"] == set(itertools.product((1, 2, 3), (2, 3)))
    floats = {
        (n, d, finite) for n in (2, 3) for d in (torch.float32, torch.float64) for finite in (True, False)
    }
    assert floats | {None, (2, torch.bool, True), (3, torch.bool, True)} <= seen["attn_mask"]
    assert {(n, d, f) for n in (1, 2) for _, d, f in floats} | {(1, torch.bool, True)} <= seen[
        "key_padding_mask"
    ]


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


# ---------------------------------------------------------------------------- doors


def test_first_values_and_names_are_torchs() -> None:
    for made in ({}, {"add_bias_kv": True}, {"kdim": 5, "vdim": 3}, {"bias": False}):
        torch.manual_seed(7)
        theirs = nn.MultiheadAttention(8, 2, **made)
        torch.manual_seed(7)
        ours = compat.MultiheadAttention(8, 2, **made)
        assert isinstance(ours, nn.MultiheadAttention)
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[name], tensor), name


@pytest.mark.parametrize("made", [{}, {"kdim": 5, "vdim": 3}, {"add_bias_kv": True, "bias": False}])
def test_state_dicts_load_both_ways(made: dict[str, Any]) -> None:
    theirs, ours = nn.MultiheadAttention(8, 2, **made), compat.MultiheadAttention(8, 2, **made)
    other = nn.MultiheadAttention(8, 2, **made)
    ours.load_state_dict(theirs.state_dict())
    other.load_state_dict(ours.state_dict())
    x, y, z = (
        torch.randn(4, 3, 8),
        torch.randn(5, 3, made.get("kdim", 8)),
        torch.randn(5, 3, made.get("vdim", 8)),
    )
    for got in (ours(x, y, z), other(x, y, z)):
        for one, two in zip(got, theirs(x, y, z), strict=True):
            torch.testing.assert_close(one, two, atol=1e-6, rtol=0)


def test_a_state_dict_of_another_shape_is_refused_by_name() -> None:
    ours = compat.MultiheadAttention(12, 2)
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(ValueError, match=r"state_dict\['in_proj_weight'\]: expected shape \(36, 12\).*24, 8"):
        ours.load_state_dict(nn.MultiheadAttention(8, 2).state_dict())
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_of_refuses_what_computes_its_parameters() -> None:
    from torch.nn.utils import parametrizations, prune

    for parametrize in (
        lambda module: parametrizations.weight_norm(module, "in_proj_weight"),
        lambda module: parametrizations.spectral_norm(module, "in_proj_weight"),
        lambda module: prune.random_unstructured(module, "in_proj_weight", 0.5),
    ):
        module = nn.MultiheadAttention(8, 2)
        parametrize(module)
        with pytest.raises(ValueError, match="holds its parameters itself.*in_proj_weight"):
            compat.MultiheadAttention.of(module)


def test_of_keeps_the_parametrization_of_the_output_projection() -> None:
    from torch.nn.utils import parametrizations

    theirs = nn.MultiheadAttention(8, 2)
    parametrizations.weight_norm(theirs.out_proj)
    x = torch.randn(4, 2, 8)
    torch.testing.assert_close(compat.MultiheadAttention.of(theirs)(x, x, x), theirs(x, x, x))


def test_of_shares_parameters_and_settings() -> None:
    theirs = nn.MultiheadAttention(
        8, 4, 0.3, add_bias_kv=True, add_zero_attn=True, batch_first=True, dtype=torch.float64
    )
    ours = compat.MultiheadAttention.of(theirs.eval())
    assert dict(ours.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
    assert all(one is two for one, two in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert (ours.training, ours.dropout, ours.add_zero_attn, ours.batch_first) == (False, 0.3, True, True)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(ours(x, x, x)[0], theirs(x, x, x)[0], atol=1e-12, rtol=0)


def test_copies_and_pickles_run() -> None:
    ours = compat.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    for made in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(made(x, x, x)[0], ours(x, x, x)[0])
        assert made._qkv_same_embed_dim is False


# ---------------------------------------------------------------------------- weights, dropout, empty rows


@pytest.mark.parametrize("more", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_asking_for_weights_does_not_change_the_output(more: dict[str, bool]) -> None:
    module = compat.MultiheadAttention(8, 2, 0.5, batch_first=True, **more)
    x, closed = torch.randn(2, 5, 8), torch.rand(5, 5) < 0.5
    for training in (True, False):
        module.train(training)
        torch.manual_seed(3)
        asked = module(x, x, x, attn_mask=closed)[0]
        torch.manual_seed(3)
        assert torch.equal(module(x, x, x, attn_mask=closed, need_weights=False)[0], asked)


def test_weights_are_those_before_dropout() -> None:
    theirs, ours = twins(embed_dim=8, num_heads=2, dropout=0.9)
    x = torch.randn(6, 2, 8)
    expected = theirs.eval()(x, x, x, average_attn_weights=False)[1]
    got = ours.train()(x, x, x, average_attn_weights=False)[1]
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


def test_dropout_drops_weights_as_often_as_it_says() -> None:
    torch.manual_seed(0)
    module = compat.MultiheadAttention(16, 1, 0.25, bias=False)
    nn.init.eye_(module.out_proj.weight)
    module.in_proj_weight.data.copy_(torch.cat([torch.zeros(32, 16), torch.eye(16)]))
    query, value = torch.randn(400, 1, 16), torch.eye(16)[:, None]
    with torch.no_grad():
        output = module(query, value, value)[0]
        dropped = float((output == 0).float().mean())
        kept = output[output != 0]
        assert abs(dropped - 0.25) < 0.02
        torch.testing.assert_close(kept, torch.full_like(kept, 1 / 16 / 0.75))
        module.dropout = 1.0
        assert not module(query, value, value)[0].any()
        assert module.eval()(query, value, value)[0].all()


# ---------------------------------------------------------------------------- dtypes, tracing


def test_transforms_and_second_derivatives() -> None:
    theirs, ours = twins(embed_dim=8, num_heads=2, dtype=torch.float64, add_bias_kv=True)
    x = torch.randn(4, 2, 8, dtype=torch.float64)

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return module(x, x, x, need_weights=False)[0].sin().sum()

    def curve(module: nn.Module) -> Tensor:
        y = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss(module, y), y, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), y)[0]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        torch.testing.assert_close(curve(ours), curve(theirs), atol=1e-11, rtol=0)
    slope = torch.func.grad(lambda x: loss(ours, x))(x)
    torch.testing.assert_close(slope, torch.func.grad(lambda x: loss(theirs, x))(x), atol=1e-12, rtol=0)
    many = torch.randn(3, 4, 2, 8, dtype=torch.float64)
    got = torch.vmap(lambda x: ours(x, x, x, need_weights=False)[0])(many)
    torch.testing.assert_close(got, torch.stack([theirs(x, x, x)[0] for x in many]), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    theirs, ours = twins(embed_dim=16, num_heads=2, dtype=dtype, add_bias_kv=True)
    x = torch.randn(6, 2, 16, dtype=dtype)
    for one, two in zip(ours(x, x, x), theirs(x, x, x), strict=True):
        assert one.dtype == two.dtype == dtype
        torch.testing.assert_close(one, two, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("need_weights", [True, False])
def test_autocast_gives_torchs_dtypes(need_weights: bool) -> None:
    theirs, ours = twins(embed_dim=16, num_heads=2, add_bias_kv=True)
    x, mask = torch.randn(6, 2, 16), torch.randn(6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        got = ours(x, x, x, attn_mask=mask, need_weights=need_weights)
        expected = theirs(x, x, x, attn_mask=mask, need_weights=need_weights)
    for one, two in zip(got, expected, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            assert one.dtype == two.dtype
            torch.testing.assert_close(one, two, atol=2e-2, rtol=2e-2)


def test_traces_whole() -> None:
    ours = compat.MultiheadAttention(8, 2, batch_first=True)
    x, closed = torch.randn(2, 5, 8), torch.ones(5, 5, dtype=torch.bool).triu(1)
    pads = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    traced = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for given in ({}, {"need_weights": False}):
        got = traced(x, x, x, attn_mask=closed, key_padding_mask=pads, **given)
        for one, two in zip(
            got, ours(x, x, x, attn_mask=closed, key_padding_mask=pads, **given), strict=True
        ):
            assert (one is None) == (two is None)
            if one is not None:
                torch.testing.assert_close(one, two, atol=1e-6, rtol=0)
    torch._dynamo.reset()
