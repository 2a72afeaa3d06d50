"""What is particular to one variant, and the mistakes that each of them names."""

import math

import pytest
import torch

from regard import attention, attention_weights, nn, variants
from regard.masks import Causal, Padding
from tests.variant_formulas import B, D, H, T, dot, draw, softmax, where

# ---------------------------------------------------------------------------- what is particular to one


def test_luong_concat_is_the_paper_s_concat_with_its_matrix_split():
    torch.manual_seed(2)
    query, key, weight, v = draw(B, H, T, 3), draw(B, H, T, 4), draw(D, 7), draw(D)
    pairs = torch.cat(
        [query[..., :, None, :].expand(B, H, T, T, 3), key[..., None, :, :].expand(B, H, T, T, 4)], -1
    )
    expected = softmax(torch.tanh(pairs @ weight.T) @ v)
    halves = query @ weight[:, :3].T, key @ weight[:, 3:].T
    torch.testing.assert_close(attention_weights(*halves, **variants.luong_concat(v)), expected)


def test_linear_concat_cannot_look_at_its_query():
    query, key = draw(B, H, T, D), draw(B, H, T, D)
    weights = attention_weights(query, key, **variants.linear_concat(draw(D), draw(D)))
    assert (weights - weights[:, :, :1]).abs().max() < 1e-12
    assert (weights - weights.roll(1, -1)).abs().max() > 1e-3


def test_t5_buckets_are_those_of_the_released_model():
    from transformers.models.t5.modeling_t5 import T5Attention

    for buckets, reach in ((32, 128), (16, 64), (64, 200), (8, 20)):
        for bidirectional in (True, False):
            distances = torch.arange(-reach, reach + 1)
            table = torch.arange(float(buckets))[:, None]
            ours = variants.t5(table, reach, bidirectional=bidirectional)["bias"].table[0].long()
            theirs = T5Attention._relative_position_bucket(distances, bidirectional, buckets, reach)
            assert torch.equal(ours, theirs)
            beyond = T5Attention._relative_position_bucket(
                torch.tensor([-9999, 9999]), bidirectional, buckets, reach
            )
            assert torch.equal(ours[[0, -1]], beyond)


def test_swin_indexes_rows_and_columns():
    torch.manual_seed(3)
    height, width = 2, 3
    table, query = draw(15, H), draw(B, H, 6, D)
    bias = torch.zeros(H, 6, 6, dtype=torch.float64)
    for i in range(6):
        for j in range(6):
            rows, columns = i // width - j // width + height - 1, i % width - j % width + width - 1
            bias[:, i, j] = table[rows * (2 * width - 1) + columns]
    weights = attention_weights(query, query, **variants.swin(table, height, width))
    torch.testing.assert_close(weights, softmax(dot(query, query) / math.sqrt(D) + bias))


def test_qk_norm_starts_where_the_paper_says():
    assert variants.qk_norm_scale(10) == pytest.approx(math.log2(90))


@pytest.mark.parametrize("shape", [(), (H,), (3, 2, H)])
def test_scores_that_know_their_query_take_every_rank(shape):
    torch.manual_seed(4)
    query, key = draw(*shape, T, D), draw(*shape, T, D)
    table = draw(2 * T + 1, D)
    heads = H if shape else 1
    u, v = draw(heads, D), draw(heads, D)
    for build in (
        lambda x: variants.shaw(x, table),
        lambda x: variants.transformer_xl(x, u, v, table),
    ):
        whole = attention(query, key, key, **build(query))
        flat_q, flat_k = query.reshape(-1, heads, T, D), key.reshape(-1, heads, T, D)
        flat = attention(flat_q, flat_k, flat_k, **build(flat_q))
        torch.testing.assert_close(whole.reshape(flat.shape), flat)


@pytest.mark.parametrize("lambda_", [0.3, "0-d", "heads"])
def test_differential_attention_is_the_difference_of_two(lambda_):
    torch.manual_seed(6)
    made = {"0-d": lambda: draw(), "heads": lambda: draw(H)}
    lambda_ = made[lambda_]() if isinstance(lambda_, str) else lambda_
    query, key, value = draw(B, 2 * H, T, D), draw(B, 4, T, D), draw(B, 2, T, 2 * D)
    output = variants.differential(query, key, value, Causal(), lambda_=lambda_)
    maps = query.unflatten(1, (H, 2)), key.unflatten(1, (2, 2)).repeat_interleave(2, 1)
    allowed = where(lambda i, j: j <= i)
    first, second = (softmax(dot(maps[0][:, :, n], maps[1][:, :, n]) / math.sqrt(D), allowed) for n in (0, 1))
    factor = lambda_[..., None, None] if isinstance(lambda_, torch.Tensor) else lambda_
    expected = (first - factor * second) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
    leaves = [query, key, value] + ([lambda_] if isinstance(lambda_, torch.Tensor) else [])
    for ours, theirs in zip(
        torch.autograd.grad(output.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "mechanism", [variants.sliding_window(3), variants.alibi(), variants.sparsemax(), variants.distance(D)]
)
def test_modules_take_them(mechanism):
    module = nn.SelfAttention(H * D, H, **mechanism)
    x = torch.randn(B, T, H * D)
    query, key, value = (
        project(x).unflatten(-1, (H, D)).transpose(1, 2)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    expected = module.out_proj(attention(query, key, value, **mechanism).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x), expected)


def test_one_thing_can_be_changed():
    lengths = torch.tensor([3, 7])
    padded = variants.soft_capped().but(mask=Padding(lengths))
    query = draw(B, H, T, D)
    weights = attention_weights(query, query, **padded)
    assert (weights[0, :, :, 3:] == 0).all() and (weights[1, :, :, 3:] > 0).all()


def _summed(gates):
    """The log gates between key and query, added up pair by pair in float64; float32 where j <= i."""
    tokens = gates.shape[-1]
    sums = torch.full((*gates.shape, tokens), -torch.inf, dtype=torch.float64)
    for i in range(tokens):
        for j in range(i + 1):
            sums[..., i, j] = gates[..., j + 1 : i + 1].double().sum(-1)
    return sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["steep", "closed", "one of -1e5"])
def test_forgetting_adds_the_gates_between_key_and_query(kind, dtype):
    torch.manual_seed(7)
    gates = -torch.rand(B, H, 96).to(dtype) * (10 if kind == "steep" else 0.2)
    if kind != "steep":
        gates[..., 40] = -torch.inf if kind == "closed" else -1e5
    query, key, value = (torch.randn(B, H, 96, D).to(dtype) for _ in range(3))
    output = attention(query, key, value, **variants.forgetting(gates))
    scores = dot(query.double(), key.double()) / math.sqrt(D) + _summed(gates)
    expected = softmax(scores) @ value.double()
    close = {"rtol": 1e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 2**-8}
    torch.testing.assert_close(output.double(), expected, **close)


def test_a_closed_gate_blocks_the_pairs_across_it_and_has_finite_gradients():
    torch.manual_seed(8)
    query, gates = draw(B, H, T, D), -torch.rand(B, H, T, dtype=torch.float64)
    gates[..., 3] = -torch.inf
    gates.requires_grad_()
    weights = attention_weights(query, query, **variants.forgetting(gates))
    assert torch.equal(weights > 0, where(lambda i, j: j <= i and not j < 3 <= i).expand_as(weights))
    grad = torch.autograd.grad(weights.square().sum(), gates)[0]
    assert grad.isfinite().all() and (grad[..., 3] == 0).all() and (grad[..., 1] != 0).all()


@pytest.mark.parametrize("lambda_", [0.3, torch.tensor(0.3)])
def test_differential_attention_under_autocast_is_of_one_dtype(lambda_):
    query, value = torch.randn(B, 2 * H, T, D), torch.randn(B, H, T, D)
    with torch.autocast("cpu", torch.bfloat16):
        assert variants.differential(query, query, value, lambda_=lambda_).dtype == torch.bfloat16


@pytest.mark.parametrize("build", [variants.kerple_log, variants.kerple_power])
def test_decays_in_float16_reach_far(build):
    ones = torch.ones(H, dtype=torch.float16)
    table = build(ones, ones, 70000)["bias"].table
    expected = math.log(70001) if build is variants.kerple_log else 70000.0
    assert table[0, 0].item() == pytest.approx(-expected, rel=1e-6) and table.isfinite().all()


@pytest.mark.parametrize("keys", [0, 2, 4, 6])
def test_streaming_takes_fewer_keys_than_sinks(keys):
    mask = variants.streaming(2, 4)["mask"].materialize(keys, keys)
    assert torch.equal(mask, torch.ones(keys, keys, dtype=torch.bool).tril())


def test_a_score_of_one_sample_is_taken_by_all_it_is_broadcast_to():
    torch.manual_seed(9)
    query, key, table = draw(1, H, T, D), draw(3, H, T, D), draw(5, D)
    got = attention(query, key, key, **variants.shaw(query, table))
    whole = query.expand(3, -1, -1, -1)
    torch.testing.assert_close(got, attention(whole, key, key, **variants.shaw(whole, table)))


# ---------------------------------------------------------------------------- mistakes

QUERY = torch.randn(B, H, T, D)

MISTAKES = {
    "a window of nothing": (lambda: variants.sliding_window(0), "sliding_window.window=.*1 or more"),
    "a window that is no number": (
        lambda: variants.sliding_window(2.5),
        "sliding_window.window=.*whole number",
    ),
    "a window that is a truth value": (lambda: variants.sliding_window(True), "whole number"),
    "sinks below 0": (lambda: variants.streaming(4, -1), "streaming.sinks=.*0 or more"),
    "a step of 0": (lambda: variants.dilated_window(2, 0), "dilated_window.step="),
    "an offset that is a tensor": (
        lambda: variants.strided_sparse(2, offset=torch.tensor(1)),
        "strided_sparse.offset=.*whole number",
    ),
    "a summary beyond its block": (lambda: variants.fixed_sparse(3, 4), "fixed_sparse.summary=.*from 1 to"),
    "global tokens by number": (
        lambda: variants.longformer(1, torch.tensor([0])),
        "longformer.is_global=.*bool",
    ),
    "one global truth": (
        lambda: variants.longformer(1, torch.tensor(True)),
        r"longformer.is_global=.*\(T,\)",
    ),
    "no keys": (lambda: variants.sigmoid(0), "sigmoid.length="),
    "no width": (lambda: variants.relu(0, 3), "relu.width="),
    "no key to keep": (lambda: variants.top_k(0), "top_k.k="),
    "too short for QK-norm": (lambda: variants.qk_norm_scale(1), "2 or more"),
    "a table of one dimension": (lambda: variants.t5(torch.randn(32)), r"t5.buckets=.*\(N, H\)"),
    "a table of integers": (lambda: variants.t5(torch.ones(32, 4, dtype=torch.int64)), "floating-point"),
    "too few buckets": (lambda: variants.t5(torch.randn(2, H)), "t5: expected 4 buckets or more"),
    "a reach within the exact": (lambda: variants.t5(torch.randn(32, H), 8), "reach beyond the 8"),
    "a reach that is a float": (lambda: variants.t5(torch.randn(32, H), 8.5), "t5.reach="),
    "no sink": (lambda: variants.sink(None), "sink.logits="),
    "no soft-cap": (lambda: variants.soft_capped(None), "soft_capped.softcap="),
    "a soft-cap below 0": (lambda: variants.soft_capped(-1.0), "softcap.*positive"),
    "a slope in words": (lambda: variants.graph_v2(torch.ones(D), slope="steep"), "graph_v2.slope="),
    "another number of heads": (
        lambda: variants.kerple_log(torch.ones(2), torch.ones(3), 4),
        "as many heads",
    ),
    "a decay that grows": (lambda: variants.kerple_log(-torch.ones(2), torch.ones(2), 4), "numbers above 0"),
    "a NaN decay": (lambda: variants.kerple_power(torch.full((2,), torch.nan), torch.ones(2), 4), "above 0"),
    "a power beyond 2": (lambda: variants.kerple_power(torch.ones(2), 3 * torch.ones(2), 4), "up to 2"),
    "a table for another window": (lambda: variants.swin(torch.randn(25, H), 2, 2), "9 rows for a window"),
    "gates that are a list": (lambda: variants.forgetting([1.0]), "forgetting.log_gates="),
    "an even number of distances": (
        lambda: variants.shaw(QUERY, torch.randn(4, D)),
        "odd number of distances",
    ),
    "vectors of another width": (lambda: variants.shaw(QUERY, torch.randn(5, D + 1)), f"of width {D}"),
    "a bias of the query in one dimension": (
        lambda: variants.transformer_xl(QUERY, torch.randn(D), torch.randn(H, D), torch.randn(5, D)),
        r"transformer_xl.u=.*\(H, D\)",
    ),
    "a bias of the query for other heads": (
        lambda: variants.transformer_xl(QUERY, torch.randn(3, D), torch.randn(H, D), torch.randn(5, D)),
        r"transformer_xl.u=.*\(4, 6\)",
    ),
    "a table for other heads": (lambda: variants.shaw(QUERY, torch.randn(3, 5, D)), "one table a head"),
    "a query that is a list": (lambda: variants.shaw([1.0], torch.randn(5, D)), "shaw.query="),
    "an odd number of heads": (
        lambda: variants.differential(QUERY[:, :3], QUERY[:, :3], QUERY[:, :1], lambda_=0.5),
        "even number of heads",
    ),
    "lambda for other heads": (
        lambda: variants.differential(QUERY, QUERY, QUERY[:, :2], lambda_=torch.ones(3)),
        r"lambda_=.*\(2,\)",
    ),
    "gates for other keys": (
        lambda: attention(QUERY, QUERY, QUERY, **variants.forgetting(torch.zeros(B, H, 1))),
        "forgetting.log_gates=.*a gate a key, 7",
    ),
    "gates for other heads": (
        lambda: attention(QUERY, QUERY, QUERY, **variants.forgetting(torch.zeros(B, 3, T))),
        "log_gates: expected a shape that broadcasts",
    ),
    "a shorter query": (
        lambda: attention(QUERY, QUERY, QUERY, **variants.shaw(QUERY[:, :, :3], torch.randn(5, D))),
        "shaw.query=.*the query of the call",
    ),
    "a longer query": (
        lambda: attention(QUERY[:, :, :3], QUERY, QUERY, **variants.shaw(QUERY, torch.randn(5, D), offset=4)),
        "shaw.query=.*the query of the call",
    ),
    "a query of another batch": (
        lambda: attention(
            QUERY[:1],
            QUERY[:1],
            QUERY[:1],
            **variants.transformer_xl(QUERY, torch.ones(H, D), torch.ones(H, D), torch.ones(5, D)),
        ),
        "transformer_xl.query=.*the query of the call",
    ),
    "a vector of another width": (
        lambda: attention(QUERY, QUERY, QUERY, **variants.graph_v2(torch.randn(4))),
        "graph_v2.a=.*width 6",
    ),
    "a device that is none": (lambda: variants.chunked(2, 5, "cuda:7x"), "chunked.device=.*cuda:7x"),
    "lambda that is NaN": (
        lambda: variants.differential(QUERY, QUERY, QUERY[:, :2], lambda_=math.nan),
        "finite number",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake):
    call, message = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError), match=message):
        call()
