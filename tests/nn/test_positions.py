"""Positions: the formulas, given positions, precision far out, and what rotary is for."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard
import regard.nn as rnn


def sinusoid(position, width, base=10_000.0):
    row = []
    for column in range(width):
        angle = position / base ** ((column - column % 2) / width)
        row.append(math.cos(angle) if column % 2 else math.sin(angle))
    return row


@pytest.mark.parametrize("width", [1, 7, 8])
def test_sinusoidal_is_the_papers(width):
    layer = rnn.SinusoidalPositions(width)
    expected = torch.tensor([sinusoid(p, width) for p in range(5, 9)], dtype=torch.float64)
    x = torch.randn(2, 4, width, dtype=torch.float64)
    torch.testing.assert_close(layer(x, offset=5), x + expected, rtol=0, atol=1e-12)
    given_ones = torch.tensor([[5, 6, 7, 8], [8, 5, 5, 6]])
    found = layer(x, given_ones)
    torch.testing.assert_close(found[0], x[0] + expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1], x[1] + expected[[3, 0, 0, 1]], rtol=0, atol=1e-12)
    assert layer(x.float()[0]).shape == (4, width) and not list(layer.parameters())


def test_learned_positions_train_and_are_bounded():
    layer = rnn.LearnedPositions(6, 4)
    x = torch.randn(2, 3, 4)
    out = layer(x, torch.tensor([[0, 1, 5], [5, 5, 2]]))
    assert torch.equal(out[1] - x[1], (x[1] + layer.weight[[5, 5, 2]]) - x[1])
    out.sum().backward()
    assert layer.weight.grad[:, 0].tolist() == [1, 1, 1, 0, 0, 3]
    assert torch.equal(layer(x, offset=3)[0], x[0] + layer.weight[3:])
    for bad in (
        {"offset": 4},
        {"positions": torch.tensor([0, 1, 6])},
        {"positions": torch.tensor([0, -1, 2])},
    ):
        with pytest.raises(ValueError, match="positions: expected from 0 to 5"):
            layer(x, **bad)


def turned(row, position, width, base, pairing):
    """Rotary by complex numbers: pair (a, b) times e^(i angle)."""
    out = list(row)
    for i in range(width // 2):
        one, two = (i, i + width // 2) if pairing == "halves" else (2 * i, 2 * i + 1)
        z = complex(row[one], row[two]) * complex(
            math.cos(position * base ** (-2 * i / width)), math.sin(position * base ** (-2 * i / width))
        )
        out[one], out[two] = z.real, z.imag
    return out


@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
@pytest.mark.parametrize(("width", "D"), [(8, 8), (4, 8), (2, 5)])
def test_rotary_is_the_papers(pairing, width, D):
    layer = rnn.RotaryPositions(width, base=500.0, pairing=pairing)
    x = torch.randn(2, 3, 4, D, dtype=torch.float64)
    places = torch.tensor([[0, 1, 2, 3], [7, -2, 1000, 3]])
    found = layer(x, places)
    for b in range(2):
        for h in range(3):
            for t in range(4):
                row = turned(x[b, h, t].tolist(), places[b, t].item(), width, 500.0, pairing)
                torch.testing.assert_close(
                    found[b, h, t], torch.tensor(row, dtype=torch.float64), rtol=0, atol=1e-11
                )
    assert torch.equal(found[0], layer(x[0])) and torch.equal(found[0, 0], layer(x[0, 0]))
    assert torch.equal(layer(x[0], torch.tensor([3, 4, 5, 6])), layer(x[0], offset=3))
    assert torch.equal(found[..., width:], x[..., width:])


def test_rotary_halves_is_llamas():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    q, k = torch.randn(2, 4, 6, 16), torch.randn(2, 4, 6, 16)
    cos, sin = LlamaRotaryEmbedding(config)(q, torch.arange(6)[None])
    theirs = apply_rotary_pos_emb(q, k, cos, sin)
    ours = rnn.RotaryPositions(16)
    torch.testing.assert_close((ours(q), ours(k)), theirs, rtol=0, atol=2e-6)


def test_rotary_halves_and_interleaved_are_one_up_to_the_order_of_columns():
    x = torch.randn(2, 3, 5, 8)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    halves, interleaved = rnn.RotaryPositions(8), rnn.RotaryPositions(8, pairing="interleaved")
    torch.testing.assert_close(halves(x)[..., order], interleaved(x[..., order]))


@given(
    shift=st.integers(-500, 500),
    pairing=st.sampled_from(["halves", "interleaved"]),
    width=st.sampled_from([2, 6, 8]),
)
def test_scores_of_turned_rows_depend_on_the_distance_alone(shift, pairing, width):
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, 5, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    layer = rnn.RotaryPositions(width, pairing=pairing)
    here = layer(q) @ layer(k).mT
    there = layer(q, offset=shift) @ layer(k, offset=shift).mT
    torch.testing.assert_close(here, there, rtol=0, atol=1e-9)
    assert not torch.allclose(layer(q) @ k.mT, here)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_angles_stay_exact_far_out_and_in_every_dtype(dtype):
    """In float32 alone the angle at a million would be off by 0.03; in bfloat16 by hundreds."""
    x = torch.randn(1, 1, 64).to(dtype)
    layer = rnn.RotaryPositions(64).to(dtype)
    found = layer(x, torch.tensor([1_000_003]))
    expected = torch.tensor(turned(x[0, 0].tolist(), 1_000_003, 64, 1e4, "halves"), dtype=torch.float64)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found[0, 0].double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps
    )


def test_rotary_gradient_turns_back():
    x = torch.randn(1, 2, 4, 8, dtype=torch.float64, requires_grad=True)
    layer = rnn.RotaryPositions(6, pairing="interleaved")
    assert torch.autograd.gradcheck(layer, (x,))
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x)
    torch.testing.assert_close(grad, 2 * x)


def test_rotary_in_attention_is_rotary_before_attention():
    torch.manual_seed(0)
    rotary = rnn.RotaryPositions(4, pairing="interleaved")
    module = rnn.CrossAttention(16, 2, context_dim=12, rotary=rotary).double()
    x, context = torch.randn(2, 3, 16, dtype=torch.float64), torch.randn(2, 5, 12, dtype=torch.float64)
    at, context_at = torch.tensor([[3, 1, 4], [1, 5, 9]]), torch.tensor([2, 6, 5, 3, 5])
    q = rotary(module.q_proj(x).unflatten(-1, (2, 8)).transpose(1, 2), at)
    k = rotary(module.k_proj(context).unflatten(-1, (2, 8)).transpose(1, 2), context_at)
    v = module.v_proj(context).unflatten(-1, (2, 8)).transpose(1, 2)
    expected = module.out_proj(regard.attention(q, k, v).transpose(1, 2).flatten(-2))
    assert torch.equal(module(x, context, positions=at, context_positions=context_at), expected)
    projected = module.project(context, positions=context_at)
    assert torch.equal(module(x, projected, positions=at), expected)
    assert not torch.allclose(module(x, context), expected)


X = torch.randn(2, 3, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rnn.RotaryPositions(7), "width: expected an even number.*got 7"),
        (lambda: rnn.RotaryPositions(8, pairing="llama"), 'pairing: expected "halves" or "interleaved"'),
        (lambda: rnn.RotaryPositions(8, base=1.0), "base: expected a finite number above 1"),
        (lambda: rnn.RotaryPositions(8, base="1"), "base: expected a number"),
        (lambda: rnn.RotaryPositions(8)(X[..., :6]), "x: expected .* D at least 8"),
        (lambda: rnn.RotaryPositions(8)(X.long()), "x: expected a floating-point tensor"),
        (lambda: rnn.RotaryPositions(8)(X, torch.zeros(3)), "positions: expected an integer tensor"),
        (lambda: rnn.RotaryPositions(8)(X, torch.arange(4)), r"positions: expected shape \(3,\)"),
        (
            lambda: rnn.RotaryPositions(8)(X, torch.arange(3), offset=2),
            "positions: expected positions or an offset",
        ),
        (lambda: rnn.RotaryPositions(8)(X, offset=1.5), "offset: expected a whole number"),
        (lambda: rnn.SinusoidalPositions(4)(X), "x: expected .*width = 4"),
        (lambda: rnn.LearnedPositions(4, 8)(X[0, 0]), "x: expected"),
        (lambda: rnn.SinusoidalPositions(8)(X.long()), "x: expected a floating-point tensor .*int64"),
        (lambda: rnn.SinusoidalPositions(8)(X > 0), "x: expected a floating-point tensor .*bool"),
        (lambda: rnn.LearnedPositions(4, 8)(X.int()), "x: expected a floating-point tensor .*int32"),
        (lambda: rnn.LearnedPositions(4, 8)(X > 0), "x: expected a floating-point tensor .*bool"),
        (lambda: rnn.SinusoidalPositions(8)(X.to(torch.complex64)), "x: expected a floating-point tensor"),
        (lambda: rnn.SinusoidalPositions(8).table(X[0, 0]), "positions: expected an integer tensor"),
        (lambda: rnn.SinusoidalPositions(8).table(X[0, 0] > 0), "positions: expected an integer tensor"),
        (
            lambda: rnn.SelfAttention(8, 2, rotary=rnn.RotaryPositions(6)),
            "rotary: expected a width of at most head_dim = 4",
        ),
        (
            lambda: rnn.SelfAttention(8, 2, rotary=rnn.SinusoidalPositions(4)),
            "rotary: expected nn.RotaryPositions",
        ),
        (
            lambda: rnn.SelfAttention(8, 2)(X, positions=torch.arange(3)),
            "positions: expected none without rotary",
        ),
    ],
)
def test_bad_positions(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
