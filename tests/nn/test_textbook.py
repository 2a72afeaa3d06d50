"""The three textbook modules through ``nn.Attention``, against plain torch written here: outputs and gradients."""

import math

import pytest
import torch
from torch import nn

import regard.nn as rnn
from regard.masks import Causal


class OneHeadSelf(nn.Module):
    """x (B, T, D): q, k, v Linears, softmax(q k^T / sqrt(D)) v, no output projection."""

    def __init__(self, D):
        super().__init__()
        self.q = nn.Linear(D, D, bias=False)
        self.k = nn.Linear(D, D, bias=False)
        self.v = nn.Linear(D, D, bias=False)
        self.D = D

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(1, 2) / math.sqrt(self.D)
        return scores.softmax(-1) @ self.v(x)


class OneHeadCross(OneHeadSelf):
    """x_dec (B, Tq, D) against x_enc (B, Tk, D)."""

    def forward(self, x_dec, x_enc):
        scores = self.q(x_dec) @ self.k(x_enc).transpose(1, 2) / math.sqrt(self.D)
        return scores.softmax(-1) @ self.v(x_enc)


class MultiHead(nn.Module):
    """x (B, T, D), H heads: q, k, v, out Linears with bias, scale sqrt(D / H)."""

    def __init__(self, D, heads):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))
        self.D, self.heads = D, heads

    def forward(self, x, causal=False):
        B, T, D = x.shape
        q, k, v = (f(x).reshape(B, T, self.heads, -1).permute(0, 2, 1, 3) for f in (self.q, self.k, self.v))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(D / self.heads)
        if causal:
            scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
        context = torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)
        return self.out(context.permute(0, 2, 1, 3).reshape(B, T, D))


def loaded(ours, plain):
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "out_proj"}
    state = {}
    for name, tensor in plain.state_dict().items():
        first, last = name.split(".")
        state[f"{names[first]}.{last}"] = tensor
    ours.load_state_dict(state)
    return ours, {names[name]: module for name, module in plain.named_children()}


def compare(ours, plain, children, inputs, keywords=None):
    plain_inputs = [x.clone().requires_grad_() for x in inputs]
    our_inputs = [x.clone().requires_grad_() for x in inputs]
    expected = plain(*plain_inputs, **(keywords or {}))
    found = ours(*our_inputs)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    found.backward(upstream)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for ours_x, plain_x in zip(our_inputs, plain_inputs, strict=True):
        torch.testing.assert_close(ours_x.grad, plain_x.grad, rtol=1e-11, atol=1e-12)
    for name, child in children.items():
        for part, parameter in child.named_parameters():
            grad = getattr(getattr(ours, name), part).grad
            torch.testing.assert_close(grad, parameter.grad, rtol=1e-11, atol=1e-12)
    assert any(parameter.grad.abs().max() > 1e-3 for parameter in plain.parameters())


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(7)


def test_one_head_self_attention():
    plain = OneHeadSelf(24).double()
    ours = rnn.SelfAttention(24, 1, out_proj=False, bias=False, dtype=torch.float64)
    assert sorted(ours.state_dict()) == ["k_proj.weight", "q_proj.weight", "v_proj.weight"]
    compare(*_pair(ours, plain), [torch.randn(3, 7, 24, dtype=torch.float64)])


def test_one_head_cross_attention():
    plain = OneHeadCross(24).double()
    ours = rnn.CrossAttention(24, 1, out_proj=False, bias=False, dtype=torch.float64)
    inputs = [torch.randn(3, T, 24, dtype=torch.float64) for T in (5, 9)]
    compare(*_pair(ours, plain), inputs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [1, 4, 6])
def test_multi_head(heads, causal):
    plain = MultiHead(24, heads).double()
    ours = rnn.Attention(24, heads, mask=Causal() if causal else None, dtype=torch.float64)
    compare(*_pair(ours, plain), [torch.randn(2, 8, 24, dtype=torch.float64)], {"causal": causal})


def test_equal_inputs_make_cross_attention_self_attention():
    cross = rnn.CrossAttention(24, 1, out_proj=False, bias=False)
    own = rnn.SelfAttention(24, 1, out_proj=False, bias=False)
    own.load_state_dict(cross.state_dict())
    x = torch.randn(2, 6, 24)
    assert torch.equal(cross(x, x), own(x))


def _pair(ours, plain):
    ours, children = loaded(ours, plain)
    return ours, plain, children
