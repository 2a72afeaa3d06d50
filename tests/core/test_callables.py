"""Your own functions as score, normaliser, rule or change of a score: linear memory, gradients into their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import attention, attention_weights, attention_with_lse, observe
from regard._plan import use_kernel
from regard.biases import Relative
from regard.kernels import inline
from regard.masks import Causal, Padding, Prefix, Rule, Window
from regard.normalizers import Entmax15, Softmax
from regard.scores import Additive, Dot, Modified

B, H, HKV, T, D = 2, 4, 2, 40, 8


def randn(seed: int, *shape: int) -> Tensor:
    made = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_()


Q, K, V = randn(1, B, H, T, D), randn(2, B, HKV, T, D), randn(3, B, HKV, T, D)
SPREAD_K, SPREAD_V = K.repeat_interleave(2, 1), V.repeat_interleave(2, 1)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several blocks even at these sizes, where whole matrices would do."""
    monkeypatch.setattr(inline, "_BUDGET", B * H * T * 7)
    with use_kernel("inline"):
        yield


def same(output: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(output, expected)
    for one, other in zip(
        torch.autograd.grad(output.cos().sum(), leaves, retain_graph=True),
        torch.autograd.grad(expected.cos().sum(), leaves, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


# ------------------------------------------------------------------ each kind beside its whole-matrix expression


def test_a_score_is_given_as_many_key_heads_as_query_heads() -> None:
    seen = set()

    def score(query: Tensor, key: Tensor) -> Tensor:
        seen.add((query.shape[1], key.shape[1]))
        return -torch.cdist(query, key, p=1.0)

    output = attention(Q, K, V, score=score)
    assert seen == {(H, H)}
    same(output, torch.softmax(-torch.cdist(Q, SPREAD_K, p=1.0), -1) @ SPREAD_V, [Q, K, V])


def test_a_score_that_closes_over_a_linear_layer() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(2 * D, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def score(query: Tensor, key: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(query[..., :, None, :].shape, key[..., None, :, :].shape)
        both = torch.cat([query[..., :, None, :].expand(shape), key[..., None, :, :].expand(shape)], -1)
        return layer(both)[..., 0]

    expected = torch.softmax(score(Q, SPREAD_K).masked_fill(~_triangle(), -torch.inf), -1) @ SPREAD_V
    same(attention(Q, K, V, Causal(), score=score), expected, [Q, K, V, *layer.parameters()])


def _triangle() -> Tensor:
    return torch.ones(T, T).tril().bool()


def test_such_a_score_is_trained_and_its_loss_falls() -> None:
    torch.manual_seed(1)
    layer = nn.Linear(D, D, bias=False).double()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    q, k, v = (x.detach() for x in (Q, K, V))
    goal = attention(q, k, v, Causal(), score=lambda a, b: (a @ randn(9, D, D).detach()) @ b.mT)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (attention(q, k, v, Causal(), score=lambda a, b: layer(a) @ b.mT) - goal).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4


def test_a_normalizer_sees_whole_rows_with_blocked_keys_at_minus_infinity() -> None:
    sharp = randn(4, 1)

    def normalize(scores: Tensor) -> Tensor:
        assert scores.shape[-1] == T and bool((scores == -torch.inf).any())
        return torch.softmax(scores, -1) * sharp.exp()

    blocked = torch.zeros(T, T).bool()
    blocked[:, 5] = True
    expected = torch.softmax((Q @ SPREAD_K.mT / D**0.5).masked_fill(blocked, -torch.inf), -1) * sharp.exp()
    same(attention(Q, K, V, ~blocked, normalize=normalize), expected @ SPREAD_V, [Q, K, V, sharp])


def test_empty_rows_do_not_reach_a_normalizer_and_blocked_keys_get_no_weight() -> None:
    def normalize(scores: Tensor) -> Tensor:
        assert not bool((scores == -torch.inf).all(-1).any())
        return torch.ones_like(scores)

    output = attention(Q, K, V, Window(None, -1), normalize=normalize)
    expected = torch.ones(T, T, dtype=Q.dtype).tril(-1) @ SPREAD_V
    torch.testing.assert_close(output, expected)
    assert not output[:, :, 0].any()


def test_a_module_is_a_normalizer_and_a_score() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(D, dtype=torch.float64))

        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return query @ self.weight @ key.mT

    module = Learned()
    output = attention(Q, K, V, score=module, normalize=nn.Softmax(-1))
    same(output, torch.softmax(Q @ SPREAD_K.mT, -1) @ SPREAD_V, [Q, K, V])
    attention(Q, K, V, score=module, normalize=nn.Softmax(-1)).sum().backward()
    assert module.weight.grad is not None and bool(module.weight.grad.any())


def test_a_rule_with_captured_tensors() -> None:
    ids = torch.tensor([0] * 13 + [1] * 7 + [2] * 20)
    reach = torch.tensor([1, 5, 40, 2])

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (ids[q] == ids[k]) & ((q - k).abs() <= reach[h]) & (k <= q + b)

    i, j = torch.arange(T)[:, None], torch.arange(T)
    whole = (ids[:, None] == ids) & ((i - j).abs() <= reach[:, None, None])
    whole = whole & torch.stack([j <= i, j <= i + 1])[:, None]
    expected = torch.softmax((Q @ SPREAD_K.mT / D**0.5).masked_fill(~whole, -torch.inf), -1) @ SPREAD_V
    same(attention(Q, K, V, Rule(rule)), expected, [Q, K, V])
    both = Rule(rule) & Padding(30) | ~Rule(rule) & Prefix(2)
    assert torch.equal(both.materialize(T, T, batch=B, heads=H), whole & (j < 30) | ~whole & (j < 2))


MODS: dict[str, Any] = {
    "bias": lambda s, b, h, q, k: s + TABLE[h, (q - k).clamp(-3, 3) + 3],
    "alibi": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(),
    "soft-cap": lambda s, b, h, q, k: 2.0 * torch.tanh(s / 2.0),
    "mask": lambda s, b, h, q, k: torch.where(q >= k, s, -torch.inf),
    "a number a sample": lambda s, b, h, q, k: s * OWN[b],
    "no score at all": lambda s, b, h, q, k: OWN[b] - (q - k).abs(),
}
TABLE, SLOPES, OWN = randn(5, H, 7), randn(6, H), randn(7, B)


@pytest.mark.parametrize("name", MODS)
def test_score_mods_of_flex_attention(name: str) -> None:
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    i, j = torch.arange(T)[:, None], torch.arange(T)
    raw = Q @ SPREAD_K.mT / D**0.5
    expected = torch.softmax(MODS[name](raw, b, h, i, j).expand(B, H, T, T), -1) @ SPREAD_V
    captured = {"bias": [TABLE], "alibi": [SLOPES]}.get(
        name, [OWN] if "OWN" in MODS[name].__code__.co_names else []
    )
    read = [V] if name == "no score at all" else [Q, K, V]
    same(attention(Q, K, V, score=Modified(Dot(), MODS[name])), expected, [*read, *captured])


def test_a_row_that_a_score_mod_empties_is_an_empty_row() -> None:
    mod = Modified(Dot(), lambda s, b, h, q, k: s.masked_fill(q == 3, -torch.inf))
    output, lse = attention_with_lse(Q, K, V, score=mod)
    assert not output[:, :, 3].any() and bool((lse[:, :, 3] == -torch.inf).all())
    grads = torch.autograd.grad(output.sum(), (Q, K, V))
    assert all(torch.isfinite(grad).all() for grad in grads) and not grads[0][:, :, 3].any()


def test_changes_of_changes_of_built_ins_and_of_callables() -> None:
    twice = Modified(Modified(Additive(TABLE[0, :1].expand(D)), MODS["bias"]), MODS["alibi"])
    plain = Modified(
        lambda q, k: torch.tanh(q[..., None, :] + k[..., None, :, :]).sum(-1) * TABLE[0, 0], MODS["bias"]
    )
    raw = torch.tanh(Q[..., None, :] + SPREAD_K[..., None, :, :]).sum(-1) * TABLE[0, 0]
    h, i, j = torch.arange(H)[:, None, None], torch.arange(T)[:, None], torch.arange(T)
    once = MODS["bias"](raw, 0, h, i, j)
    for score, s in ((twice, MODS["alibi"](once, 0, h, i, j)), (plain, once)):
        same(attention(Q, K, V, score=score), torch.softmax(s, -1) @ SPREAD_V, [Q, K, V, TABLE])


def test_everything_of_your_own_beside_built_ins() -> None:
    def score(query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT * SLOPES.exp()[:, None, None]

    i, j = torch.arange(T)[:, None], torch.arange(T)
    allowed = (j <= i) & ((i + j) % 3 != 0)
    table = torch.cat([TABLE[0], TABLE[0, :2]])
    s = Q @ SPREAD_K.mT * SLOPES.exp()[:, None, None] + table[(j - i).clamp(-4, 4) + 4]
    weights = Entmax15()(s.masked_fill(~allowed, -torch.inf).masked_fill(~allowed.any(-1, keepdim=True), 0.0))
    weights = weights.masked_fill(~allowed, 0.0)
    output = attention(
        Q,
        K,
        V,
        Causal() & Rule(lambda b, h, q, k: (q + k) % 3 != 0),
        score=score,
        normalize=Entmax15(),
        bias=Relative(table),
    )
    same(output, weights @ SPREAD_V, [Q, K, V, SLOPES, TABLE])


def test_the_second_derivative_goes_through_your_own_functions() -> None:
    scale = randn(8, 1)
    small = [x[:1, :2, :3, :2].detach().requires_grad_() for x in (Q, SPREAD_K, SPREAD_V)]

    def ours(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return attention(q, k, v, Causal(), score=lambda a, b: (a @ b.mT) * scale)

    assert torch.autograd.gradgradcheck(ours, (*small, scale), fast_mode=True)


def test_lower_precisions_are_scored_in_float32() -> None:
    seen = set()

    def score(query: Tensor, key: Tensor) -> Tensor:
        seen.update((query.dtype, key.dtype))
        return query @ key.mT

    output = attention(Q.bfloat16(), K.bfloat16(), V.bfloat16(), score=score)
    assert seen == {torch.float32} and output.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(Q.float(), K.float(), V.float(), score=score).dtype == torch.bfloat16
    assert seen == {torch.float32}


def test_a_callable_is_observed_like_a_built_in() -> None:
    own = observe(Q, K, V, Causal(), score=lambda q, k: q @ k.mT / D**0.5, topk=2, pool=5)
    built_in = observe(Q, K, V, Causal(), topk=2, pool=5)
    for name in ("output", "lse", "max", "entropy", "received", "top_weights", "pooled", "pooled_max"):
        torch.testing.assert_close(getattr(own, name), getattr(built_in, name))
    assert torch.equal(own.top_keys, built_in.top_keys)


# ------------------------------------------------------------------ linear memory


@pytest.mark.parametrize("what", ["score", "normalize", "rule", "score_mod"])
def test_at_length_2048_no_function_sees_the_whole_matrix(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the blocks of the library
    long, elements, rows = 2048, [], []

    def see(x: Tensor) -> Tensor:
        elements.append(x.numel())
        rows.append(x.shape[-2])
        return x

    scale = torch.ones((), requires_grad=True)
    keywords: dict[str, Any] = {
        "score": {"score": lambda q, k: see(q @ k.mT) * scale},
        "normalize": {"normalize": lambda s: torch.softmax(see(s) * scale, -1)},
        "rule": {"mask": Rule(lambda b, h, q, k: see(k <= q)), "score": Dot(scale)},
        "score_mod": {"score": Modified(Dot(), lambda s, b, h, q, k: see(s) * scale)},
    }[what]
    q = torch.randn(1, 2, long, 8, requires_grad=True)
    output = attention(q, q, q, **keywords)
    forward = len(elements)
    assert forward >= 8 and max(rows) <= 256
    torch.autograd.grad(output.sum(), (q, scale))
    assert len(elements) == 2 * forward  # each block once more, and no more
    assert max(elements) <= 2 * long * long // 8
    observe(q, q, q, **keywords)
    assert max(elements) <= 2 * long * long // 8


def test_blocks_that_a_mask_empties_are_not_given_to_a_function() -> None:
    seen = []

    def score(query: Tensor, key: Tensor) -> Tensor:
        seen.append(query.shape[-2] * key.shape[-2])
        return query @ key.mT

    attention(Q, K, V, Window(3, 0), score=score)
    assert sum(seen) < T * T / 2


def test_a_subclass_that_changes_a_built_in_is_a_callable() -> None:
    class Doubled(Softmax):
        def __call__(self, scores: Tensor, /) -> Tensor:
            return 2 * super().__call__(scores)

    torch.testing.assert_close(attention(Q, K, V, normalize=Doubled()), 2 * attention(Q, K, V))


# ------------------------------------------------------------------ wrong results

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "score None": (
        {"score": lambda q, k: None},
        TypeError,
        r"score\(query, key\): .*floating-point.* got None",
    ),
    "score short": (
        {"score": lambda q, k: (q @ k.mT)[..., :-1]},
        ValueError,
        r"score\(query, key\): .*shape",
    ),
    "score int": (
        {"score": lambda q, k: (q @ k.mT).long()},
        TypeError,
        r"score\(query, key\): .*got a int64",
    ),
    "score pair": ({"score": lambda q, k: (q, k)}, TypeError, r"score\(query, key\): .*got tuple"),
    "normalizer None": ({"normalize": lambda s: None}, TypeError, r"normalize\(scores\): .*got None"),
    "normalizer summed": ({"normalize": lambda s: s.sum(-1)}, ValueError, r"normalize\(scores\): .*shape"),
    "normalizer bool": ({"normalize": lambda s: s > 0}, TypeError, r"normalize\(scores\): .*got a bool"),
    "mod None": ({"score": Modified(Dot(), lambda s, b, h, q, k: None)}, TypeError, r"score_mod.*got None"),
    "mod number": ({"score": Modified(Dot(), lambda s, b, h, q, k: 1.0)}, TypeError, r"score_mod.*got 1\.0"),
    "mod shape": (
        {"score": Modified(Dot(), lambda s, b, h, q, k: s.new_zeros(3, 3))},
        ValueError,
        r"score_mod.*\(3, 3\)",
    ),
    "rule scores": ({"mask": Rule(lambda b, h, q, k: q - k)}, TypeError, r"Rule.*bool tensor.*int64"),
}


@pytest.mark.parametrize("kernel", ["inline", "reference"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_results_are_named(name: str, kernel: str) -> None:
    keywords, error, message = WRONG[name]
    with use_kernel(kernel), pytest.raises(error, match=message):
        attention(Q, K, V, **keywords)
    with pytest.raises(error, match=message):
        attention_weights(Q, K, **keywords)
    with pytest.raises(error, match=message):
        observe(Q, K, V, **keywords)


def test_an_error_of_your_own_comes_through_as_it_is() -> None:
    class Mine(Exception):
        pass

    def score(query: Tensor, key: Tensor) -> Tensor:
        raise Mine("not today")

    with pytest.raises(Mine, match="not today"):
        attention(Q, K, V, score=score)
