"""Attention of a recurrent decoder: keys projected once; Bahdanau's and Luong's scores against plain torch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import regard.nn as rnn
from regard.masks import Padding
from regard.normalizers import Entmax15, Sigmoid, Softmax, Sparsemax
from regard.scores import Concat, Cosine, Dot

B, TK, DQ, DK, HIDDEN = 3, 6, 5, 7, 4
LENGTHS = torch.tensor([6, 2, 0])


def bahdanau(step, state, states):
    """v^T tanh(W s + U h_j), (B, Tk)."""
    hidden = torch.tanh(step.q_proj(state)[:, None] + step.k_proj(states))
    return hidden @ step.score.v


def luong_general(step, state, states):
    return torch.einsum("bi,ij,btj->bt", state, step.score.weight, states)


def luong_dot(step, state, states):
    return torch.einsum("bi,bti->bt", state, states)


def softmax(scores):
    return scores.softmax(-1)


def sigmoid(scores):
    return scores.sigmoid()


CASES = {
    "additive": (lambda **m: rnn.StepAttention(DQ, DK, hidden_dim=HIDDEN, **m), bahdanau),
    "bilinear": (lambda **m: rnn.StepAttention(DQ, DK, score=rnn.BilinearScore(DQ, DK), **m), luong_general),
    "dot": (lambda **m: rnn.StepAttention(DQ, score=Dot(scale=1), **m), luong_dot),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("normalize", "plain"), [(Softmax(), softmax), (Sigmoid(), sigmoid)])
def test_steps_are_the_papers(case, normalize, plain):
    torch.manual_seed(0)
    make, score = CASES[case]
    step = make(normalize=normalize).double()
    states = torch.randn(B, TK, step.key_dim, dtype=torch.float64, requires_grad=True)
    decoder = torch.randn(B, 4, DQ, dtype=torch.float64, requires_grad=True)
    memory = step.project(states, Padding(LENGTHS))
    seen = torch.arange(TK) < LENGTHS[:, None]
    found, expected = [], []
    for t in range(4):
        found.append(step(decoder[:, t], memory))
        scores = score(step, decoder[:, t], states).masked_fill(~seen, -1e9)
        weights = plain(scores) * seen
        expected.append((weights[:, None] @ states)[:, 0])
        torch.testing.assert_close(step.weights(decoder[:, t], memory), weights)
    found, expected = torch.stack(found, 1), torch.stack(expected, 1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(step(decoder, memory), expected)
    torch.testing.assert_close(step.weights(decoder, memory).sum(-1)[2], torch.zeros(4, dtype=torch.float64))
    leaves = [states, decoder, *step.parameters()]
    upstream = torch.randn_like(expected)
    ours = torch.autograd.grad(found, leaves, upstream, retain_graph=True)
    theirs = torch.autograd.grad(expected, leaves, upstream)
    torch.testing.assert_close(ours, theirs)
    assert all(grad.abs().max() > 0 for grad in ours)


def test_keys_are_projected_once():
    step = rnn.StepAttention(DQ, DK, hidden_dim=HIDDEN, proj_bias=True)
    calls = []
    step.k_proj.register_forward_hook(lambda *_: calls.append(1))
    memory = step.project(torch.randn(B, TK, DK))
    for _ in range(5):
        step(torch.randn(B, DQ), memory)
    assert len(calls) == 1 and step.k_proj.bias is not None


@given(
    normalize=st.sampled_from([Softmax(), Sparsemax(), Entmax15(), Sigmoid(-1.0), lambda s: s.softmax(-1)]),
    score=st.sampled_from(
        [
            None,
            Dot(),
            Cosine(4.0),
            Concat(torch.ones(HIDDEN), torch.ones(HIDDEN)),
            rnn.BilinearScore(HIDDEN, HIDDEN),
        ]
    ),
    length=st.integers(0, TK),
)
def test_padding_is_as_if_it_were_not_there(normalize, score, length):
    torch.manual_seed(1)
    step = rnn.StepAttention(DQ, DK, hidden_dim=HIDDEN, score=score, normalize=normalize)
    states, state = torch.randn(1, TK, DK), torch.randn(1, DQ)
    padded = step(state, step.project(states, Padding(length)))
    short = step(state, step.project(states[:, :length]))
    torch.testing.assert_close(padded, short)
    assert (length == 0) == bool((padded == 0).all())


def test_a_recurrent_decoder_learns_to_look_back():
    """A GRU that must name the first token of its input: only attention carries it there."""
    torch.manual_seed(0)
    table, encoder = nn.Embedding(8, 12), nn.GRU(12, 12, batch_first=True)
    step, out = rnn.StepAttention(12, hidden_dim=16), nn.Linear(12, 8)
    parameters = [p for m in (table, encoder, step, out) for p in m.parameters()]
    optimiser = torch.optim.Adam(parameters, lr=0.02)
    losses = []
    for _ in range(60):
        tokens = torch.randint(8, (32, 7))
        states, last = encoder(table(tokens))
        loss = nn.functional.cross_entropy(out(step(last[0], step.project(states))), tokens[:, 0])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


STEP = rnn.StepAttention(DQ, DK, hidden_dim=HIDDEN)
MEMORY = STEP.project(torch.randn(B, TK, DK))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rnn.StepAttention(DQ, DK), "hidden_dim: expected a width for the additive score, got None"),
        (
            lambda: rnn.StepAttention(DQ, DK, score=Dot(), proj_bias=True),
            "proj_bias: expected False without hidden_dim",
        ),
        (lambda: rnn.StepAttention(0, hidden_dim=3), "query_dim: expected 1 or more"),
        (lambda: STEP.project(torch.randn(B, TK, DQ)), "states: expected .* key_dim = 7"),
        (lambda: STEP.project(torch.randn(TK, DK)), r"states: expected \(B, Tk, 7\)"),
        (lambda: STEP(torch.randn(B, DK), MEMORY), "state: expected .* query_dim = 5"),
        (lambda: STEP(torch.randn(2, DQ), MEMORY), r"state: expected \(B, 5\).*a memory of 3 samples"),
        (lambda: STEP(torch.randn(B, 1, 1, DQ), MEMORY), "state: expected"),
        (lambda: STEP(torch.randn(DQ), MEMORY), "state: expected"),
        (lambda: STEP(torch.randn(B, DQ), MEMORY.key), "memory: expected what project"),
        (lambda: STEP(torch.randn(B, DQ).double(), MEMORY), "state: expected the module's dtype"),
        (
            lambda: rnn.StepAttention(DQ, DK, score=Dot())(torch.randn(B, DQ), MEMORY),
            "key: expected the query's width, 5",
        ),
        (
            lambda: STEP(torch.randn(B, DQ), STEP.project(torch.randn(B, TK, DK), Padding(9))),
            "from 0 to Tk = 6",
        ),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
