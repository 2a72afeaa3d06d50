"""Both models: steps are the whole pass, padding changes nothing, and the weights are those that made the logits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from recipes.translation.batches import sources, targets
from recipes.translation.model import build, describe, record
from recipes.translation.rnn import RnnSizes

V = 23
RNN: dict[str, Any] = {"kind": "rnn", "vocabulary": V, "width": 16}
TRANSFORMER: dict[str, Any] = {
    "kind": "transformer",
    "vocabulary": V,
    "width": 16,
    "heads": 2,
    "hidden": 32,
    "layers": 2,
}
SCORED = [{**RNN, "attention": score} for score in ("dot", "bilinear", "additive", "concat")]
MODELS = [
    {**RNN, "attention": "none"},
    {**RNN, "attention": "none", "cell": "lstm", "layers": 2},
    *SCORED,
    {**RNN, "normalize": "sparsemax"},
    {**RNN, "normalize": "entmax", "cell": "lstm"},
    {**RNN, "input_feeding": True, "layers": 2},
    *(
        {**TRANSFORMER, "norm": norm, "positions": positions}
        for norm, positions in itertools.product(("pre", "post"), ("sinusoidal", "learned", "rotary"))
    ),
]
ATTENDING = [described for described in MODELS if described.get("attention") != "none"]


def name(described: dict[str, Any]) -> str:
    return "-".join(str(part) for part in described.values() if isinstance(part, (str, bool)))


def made(described: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return build(described).eval()


def drawn(seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    torch.manual_seed(seed)
    lengths = ((7, 5), (3, 6), (1, 1))
    pairs = [(torch.randint(4, V, (a,)).tolist(), torch.randint(4, V, (b,)).tolist()) for a, b in lengths]
    return [source for source, _ in pairs], [target for _, target in pairs]


@pytest.mark.parametrize("described", MODELS, ids=name)
@torch.no_grad()
def test_steps_give_what_the_whole_pass_gives(described: dict[str, Any]) -> None:
    model = made(described)
    from_, to = drawn()
    source, lengths = sources(from_)
    target_in, _ = targets(to)
    whole = model(source, lengths, target_in)
    state = model.start(model.encode(source, lengths))
    for t in range(target_in.shape[1]):
        logits, state = model.step(target_in[:, t], state)
        torch.testing.assert_close(logits, whole[:, t], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("described", MODELS, ids=name)
@torch.no_grad()
def test_a_sentence_is_the_same_alone_and_in_a_padded_batch(described: dict[str, Any]) -> None:
    model = made(described)
    from_, to = drawn()
    together = model(*sources(from_), targets(to)[0])
    for place, (one, other) in enumerate(zip(from_, to, strict=True)):
        alone = model(*sources([one]), targets([other])[0])
        torch.testing.assert_close(together[place : place + 1, : len(other) + 1], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("described", ATTENDING, ids=name)
def test_cross_weights_are_distributions_over_the_source(described: dict[str, Any]) -> None:
    model = made(described)
    from_, to = drawn()
    source, lengths = sources(from_)
    weights = model.cross(source, lengths, targets(to)[0])
    layers, heads = (2, 2) if described["kind"] == "transformer" else (1, 1)
    assert weights.shape == (layers, 3, heads, 7, 8)
    torch.testing.assert_close(weights.sum(-1), torch.ones(layers, 3, heads, 7))
    for place, length in enumerate(lengths.tolist()):
        assert not weights[:, place, :, :, length:].any()


@torch.no_grad()
def test_additive_weights_are_those_of_the_formula() -> None:
    model = made(RNN)
    from_, to = drawn()
    source, lengths = sources(from_[:1])
    target_in = targets(to[:1])[0]
    weights = model.cross(source, lengths, target_in)[0, 0, 0]
    states, _ = model.encoder(model.embedding(source))
    read = model.encode(source, lengths)
    queries, _ = model.decoder(model.embedding(target_in), model.start(read).hidden)
    attention = model.attention
    sums = attention.q_proj(queries)[0][:, None] + attention.k_proj(states)[0][None]
    expected = (sums.tanh() @ attention.score.v).softmax(-1)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)


def test_only_the_linear_concat_looks_at_the_same_words_at_every_step() -> None:
    from_, to = drawn()
    for described in SCORED:
        weights = made(described).cross(*sources(from_[:1]), targets(to[:1])[0])[0, 0, 0]
        spread = float((weights - weights[:1]).abs().max())
        assert (spread < 1e-6) == (described["attention"] == "concat"), described


def test_keys_are_projected_once_a_sentence() -> None:
    model = made(RNN)
    calls = []
    model.attention.k_proj.register_forward_hook(lambda *_: calls.append(1))
    from recipes.translation import decode

    decode.beam(model, *sources(drawn()[0]), width=3, limit=6)
    assert len(calls) == 1


@pytest.mark.parametrize("described", [RNN, TRANSFORMER], ids=name)
def test_a_record_holds_the_cross_attention_and_leaves_the_model_training(described: dict[str, Any]) -> None:
    model = made(described).train()
    from_, to = drawn()
    seen = record(model, *sources(from_), targets(to)[0])
    assert model.training
    assert [site.kind for site in seen.sites].count("cross") == (1 if described is RNN else 2)


@pytest.mark.parametrize("described", ATTENDING, ids=name)
def test_a_translation_as_long_as_its_source_has_cross_weights_too(described: dict[str, Any]) -> None:
    source, lengths = sources([[5, 6, 7]])
    weights = made(described).cross(source, lengths, targets([[8, 9, 8]])[0])
    longer = made(described).cross(source, lengths, targets([[8, 9, 8, 9]])[0])
    torch.testing.assert_close(weights, longer[..., :4, :], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("described", [{**RNN, "cell": "lstm", "input_feeding": True}, TRANSFORMER], ids=name)
def test_mixed_precision_is_near_and_learns(described: dict[str, Any]) -> None:
    model = made(described)
    from_, to = drawn()
    given = *sources(from_), targets(to)[0]
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(*given)
    assert logits.dtype == torch.bfloat16
    exact = model(*given)
    assert float((logits.float() - exact).detach().norm() / exact.detach().norm()) < 0.03
    logits.float().square().sum().backward()
    assert all(one.grad.isfinite().all() for one in model.parameters() if one.grad is not None)


@pytest.mark.parametrize("described", [RNN, {**RNN, "attention": "concat"}, TRANSFORMER], ids=name)
def test_every_parameter_learns(described: dict[str, Any]) -> None:
    model = made(described).train()
    from_, to = drawn()
    model(*sources(from_), targets(to)[0]).log_softmax(-1).square().sum().backward()
    still = {
        name for name, one in model.named_parameters() if one.grad is None or one.grad.abs().max() < 1e-5
    }
    # What is added to all keys alike moves no weight of a softmax: a key's bias, and the concat's term of the query.
    alike = {name for name in still if name.endswith("k_proj.bias") or name == "attention.score.w_query"}
    assert still == alike


def test_a_description_builds_the_same_model() -> None:
    for described in MODELS:
        model = build(described)
        assert describe(build(describe(model))) == describe(model)


def test_a_model_without_attention_has_no_weights_to_show() -> None:
    with pytest.raises(ValueError, match="trained without one"):
        made({**RNN, "attention": "none"}).cross(*sources([[5]]), targets([[5]])[0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "cnn"}, "kind: expected one of rnn, transformer"),
        ({**RNN, "attention": "cosine"}, "attention: expected one of none, dot"),
        ({**RNN, "attention": "none", "normalize": "entmax"}, "nothing to normalise"),
        ({**RNN, "width": 15}, "even number"),
        ({**RNN, "layers": 0}, "layers: expected a whole number from 1"),
        ({**RNN, "dropout": 1.0}, "dropout: expected a share"),
        ({**RNN, "heads": 4}, "rnn: expected sizes among"),
        ({**TRANSFORMER, "heads": 3}, "heads: expected a divisor"),
        ({**TRANSFORMER, "norm": "middle"}, "norm: expected one of pre, post"),
    ],
)
def test_sizes_that_cannot_be_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(wrong)


def test_sizes_are_compared_by_value() -> None:
    assert RnnSizes(vocabulary=V) == RnnSizes(vocabulary=V, width=256)
