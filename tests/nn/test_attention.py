"""``nn.Attention``: every size free, every mechanism, masks, batches, precision, and its errors."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import regard
import regard.nn as rnn
from regard.biases import Alibi
from regard.masks import Causal, Padding, Prefix, Rule, Window
from regard.normalizers import Sigmoid, Sparsemax
from regard.scores import Cosine, Distance, Dot


def by_hand(module, query, key, value, mask=None, **mechanism):
    """Projections, heads and the definition, written out with (B, T, width) inputs."""

    def heads(x, count):
        B, T, width = x.shape
        return x.reshape(B, T, count, width // count).permute(0, 2, 1, 3)

    q = heads(module.q_proj(query), module.num_heads)
    k = heads(module.k_proj(key), module.num_kv_heads)
    v = heads(module.v_proj(value), module.num_kv_heads)
    weights = regard.attention_weights(q, k, mask, **mechanism)
    context = weights @ v.repeat_interleave(module.num_heads // module.num_kv_heads, 1)
    joined = context.permute(0, 2, 1, 3).flatten(-2)
    return joined if module.out_proj is None else module.out_proj(joined)


sizes = st.integers(1, 4)


@settings(max_examples=60)
@given(
    B=st.integers(0, 3),
    Tq=st.integers(0, 5),
    Tk=st.integers(0, 5),
    groups=sizes,
    kv=st.integers(1, 3),
    D=sizes,
    Dv=sizes,
    embed=sizes,
    kdim=sizes,
    vdim=sizes,
    out=sizes,
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_all_sizes_are_free(B, Tq, Tk, groups, kv, D, Dv, embed, kdim, vdim, out, flags):
    torch.manual_seed(0)
    out_proj, proj_bias = flags
    module = rnn.Attention(
        embed,
        groups * kv,
        head_dim=D,
        v_head_dim=Dv,
        num_kv_heads=kv,
        kdim=kdim,
        vdim=vdim,
        out_dim=out if out_proj else None,
        out_proj=out_proj,
        proj_bias=proj_bias,
        dtype=torch.float64,
    )
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    query, key, value = (
        torch.randn(B, T, width, dtype=torch.float64) for T, width in ((Tq, embed), (Tk, kdim), (Tk, vdim))
    )
    found = module(query, key, value)
    assert found.shape == (B, Tq, out if out_proj else groups * kv * Dv)
    torch.testing.assert_close(found, by_hand(module, query, key, value), rtol=1e-9, atol=1e-9)
    if B:
        torch.testing.assert_close(module(query[0], key[0], value[0]), found[0], rtol=1e-9, atol=1e-9)
    assert (module.q_proj.bias is None) != proj_bias


MECHANISMS = [
    {"score": Cosine(3.0)},
    {"score": Distance(), "normalize": Sparsemax()},
    {"normalize": Sigmoid(-1.0)},
    {"bias": Alibi()},
    {"score": Dot(softcap=2.0), "bias": torch.randn(5, 5, dtype=torch.float64)},
    {"score": lambda q, k: q @ k.transpose(-1, -2) * 0.1},
    {"normalize": lambda s: s.softmax(-1) ** 2},
]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_mechanisms(mechanism):
    torch.manual_seed(1)
    module = rnn.SelfAttention(12, 3, mask=Causal(), **mechanism).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    expected = by_hand(module, x, x, x, Causal(), **mechanism)
    torch.testing.assert_close(module(x), expected, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(expected, by_hand(module, x, x, x))


def test_a_named_mechanism_and_the_flag_of_the_linears():
    mechanism = regard.Mechanism("alibi", bias=Alibi())
    module = rnn.SelfAttention(12, 3, proj_bias=False, **mechanism)
    assert module.q_proj.bias is None and isinstance(module.bias, Alibi)
    assert rnn.SelfAttention(12, 3, bias=False).q_proj.bias is None
    assert rnn.SelfAttention(12, 3, bias=False).bias is None
    assert rnn.SelfAttention(12, 3).q_proj.bias is not None
    with pytest.raises(ValueError, match="proj_bias: expected the same as bias=False, got True"):
        rnn.SelfAttention(12, 3, bias=False, proj_bias=True)


def test_the_masks_of_module_and_call_meet():
    torch.manual_seed(2)
    module = rnn.SelfAttention(12, 3, mask=Window(2, 1)).double()
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    lengths = torch.tensor([4, 6])
    expected = by_hand(module, x, x, x, Window(2, 1) & Padding(lengths))
    for mask in (Padding(lengths), (torch.arange(6) < lengths[:, None])[:, None, None, :]):
        torch.testing.assert_close(module(x, mask), expected)
    rule = Rule(lambda b, h, q, k: (q + k) % 2 == 0)
    torch.testing.assert_close(module(x, rule), by_hand(module, x, x, x, Window(2, 1) & rule))
    assert not torch.allclose(module(x), expected)


def test_more_batch_dimensions_and_unbatched():
    module = rnn.Attention(12, 4, num_kv_heads=2)
    x = torch.randn(3, 2, 5, 12)
    assert torch.allclose(module(x)[2, 1], module(x[2, 1]), atol=1e-6)
    assert module(x[0, 0]).shape == (5, 12)


def test_a_mask_tensor_is_scanned_once_and_may_change(monkeypatch):
    from regard import _runs

    scans, scan = [], _runs.scan
    monkeypatch.setattr(_runs, "scan", lambda mask: scans.append(1) or scan(mask))
    mask = torch.ones(80, 80, dtype=torch.bool).tril()
    module = rnn.SelfAttention(12, 3, mask=mask)
    causal = rnn.SelfAttention(12, 3, mask=Causal())
    causal.load_state_dict(module.state_dict())
    x = torch.randn(2, 80, 12)
    for _ in range(3):
        torch.testing.assert_close(module(x), causal(x))
    assert len(scans) == 1
    module.mask.copy_(torch.ones(80, 80).bool())
    assert not torch.allclose(module(x), causal(x)) and len(scans) == 2


def test_dropout_is_for_training():
    module = rnn.SelfAttention(12, 3, dropout_p=0.5)
    x = torch.randn(2, 5, 12)
    torch.manual_seed(0)
    one = module(x)
    torch.manual_seed(0)
    assert torch.equal(module(x), one) and not torch.equal(module(x), one)
    module.eval()
    assert torch.equal(module(x), module(x)) and not torch.equal(module(x), one)


def test_autocast_and_half_precision():
    module = rnn.SelfAttention(
        32, 4, mask=Causal(), rotary=rnn.RotaryPositions(8), bias=rnn.RelativeBias(4, 3)
    )
    nn.init.normal_(module.bias.table)
    x = torch.randn(2, 9, 32)
    exact = module(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = module(x)
        cast.sum().backward()
    assert cast.dtype == torch.bfloat16 and module.q_proj.weight.grad.dtype == torch.float32
    torch.testing.assert_close(cast.float(), exact, rtol=0.1, atol=0.05)
    half = module.to(torch.bfloat16)(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, rtol=0.1, atol=0.05)


def test_is_traced_whole():
    module = rnn.SelfAttention(
        16, 4, num_kv_heads=2, mask=Causal(), rotary=rnn.RotaryPositions(4), bias=rnn.T5Bias(4, 8, 16)
    )
    nn.init.normal_(module.bias.weight)
    x = torch.randn(2, 9, 16)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    found = compiled(x)
    torch.testing.assert_close(found, module(x))
    found.sum().backward()
    assert module.bias.weight.grad.abs().max() > 0


def test_context_projected_once():
    torch.manual_seed(3)
    module = rnn.CrossAttention(12, 4, context_dim=10, num_kv_heads=2)
    x, context = torch.randn(2, 5, 12), torch.randn(2, 7, 10)
    calls = []
    module.k_proj.register_forward_hook(lambda *_: calls.append(1))
    projected = module.project(context)
    steps = [module(x[:, t : t + 1], projected) for t in range(5)]
    assert len(calls) == 1
    torch.testing.assert_close(torch.cat(steps, 1), module(x, context))
    alone = module(x[0], module.project(context[0]))
    torch.testing.assert_close(alone, module(x, context)[0])
    causal = rnn.CrossAttention(12, 4, context_dim=10, mask=Causal("lower_right"))
    assert causal(x, context).shape == (2, 5, 12)


def test_no_argument_returns_weights():
    for module in (rnn.Attention, rnn.SelfAttention, rnn.CrossAttention):
        names = [
            *inspect.signature(module.forward).parameters,
            *inspect.signature(module.__init__).parameters,
        ]
        assert not [name for name in names if "weights" in name]


def test_repr_says_the_mechanism():
    text = repr(
        rnn.SelfAttention(12, 4, num_kv_heads=2, mask=Causal(), bias=torch.zeros(5, 5), dropout_p=0.1)
    )
    assert (
        "heads=4/2, D=3, Dv=3" in text
        and "Causal" in text
        and "shape (5, 5)" in text
        and "dropout_p=0.1" in text
    )


def test_copies_are_independent():
    import copy
    import pickle

    module = rnn.SelfAttention(12, 3, mask=Causal(), bias=rnn.RelativeBias(3, 2))
    x = torch.randn(1, 4, 12)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x))
        assert other.bias.table is not module.bias.table


X, C = torch.randn(2, 5, 12), torch.randn(2, 7, 10)
ATTENTION = rnn.Attention(12, 3)
CROSS = rnn.CrossAttention(12, 3, context_dim=10)
WIDE = rnn.Attention(12, 3, kdim=10)
TWO = rnn.Attention(12, 3, kdim=10, vdim=9)


def autocast(module, x):
    with torch.autocast("cpu", torch.bfloat16):
        return module(x)


BAD = [
    (
        lambda: rnn.Attention(12, 5),
        "num_heads: expected a divisor of embed_dim = 12, got 5. Or give .*head_dim=",
    ),
    (lambda: rnn.Attention(12, 0), "num_heads: expected 1 or more, got 0"),
    (lambda: rnn.Attention(12.0, 3), "embed_dim: expected a whole number, got 12.0"),
    (lambda: rnn.Attention(-12, 3), "embed_dim: expected 1 or more"),
    (
        lambda: rnn.Attention(12, 4, num_kv_heads=3),
        "num_kv_heads: expected a divisor of num_heads = 4, got 3",
    ),
    (lambda: rnn.Attention(12, 4, head_dim=0), "head_dim: expected 1 or more"),
    (lambda: rnn.Attention(12, 4, out_proj=1), "out_proj: expected True or False"),
    (
        lambda: rnn.Attention(12, 4, out_proj=False, out_dim=8),
        "out_dim: expected num_heads . v_head_dim = 12",
    ),
    (lambda: rnn.Attention(12, 4, dropout_p=1.5), "dropout_p: expected a probability"),
    (lambda: rnn.Attention(12, 4, mask=torch.ones(5, 5)), "mask: expected a bool tensor"),
    (lambda: rnn.Attention(12, 4, mask=nn.Linear(2, 2)), "mask: expected a mask"),
    (lambda: rnn.Attention(12, 4, bias=Causal()), "bias: expected a bias"),
    (lambda: rnn.Attention(12, 4, bias="alibi"), "bias: expected a bias"),
    (
        lambda: rnn.SelfAttention(12, 4, kdim=3),
        "SelfAttention: expected arguments among .*'kdim'.*nn.Attention",
    ),
    (
        lambda: rnn.Attention(12, 4, batch_first=True),
        "^Attention: expected arguments among .*kdim.*'batch_first'.*batch first",
    ),
    (lambda: rnn.Attention(12, 4, add_zero_attn=True), "^Attention: expected .*got 'add_zero_attn'"),
    (lambda: rnn.Attention(12), "^Attention.__init__.. missing .*'num_heads'"),
    (lambda: rnn.EncoderBlock(12, 4, batch_first=True), "^SelfAttention: expected .*'batch_first'"),
    (lambda: rnn.SelfAttention(12, 4, causal=True), "SelfAttention: expected arguments among"),
    (lambda: rnn.CrossAttention(12, 4, context_dim=0), "context_dim: expected 1 or more"),
    (
        lambda: ATTENTION(torch.randn(2, 5, 13)),
        r"query: expected \(B, T, embed_dim\).* embed_dim = 12, got .*\(2, 5, 13\)",
    ),
    (lambda: ATTENTION(torch.randn(12)), "query: expected"),
    (lambda: ATTENTION([1.0]), "query: expected a tensor"),
    (lambda: ATTENTION(X.double()), "query: expected the module's dtype, float32, got a float64.*module.to"),
    (lambda: ATTENTION(X.long()), "query: expected the module's dtype"),
    (lambda: autocast(ATTENTION, X.long()), "query: expected a floating-point tensor"),
    (
        lambda: rnn.StepAttention(12, score=Dot(scale=1)).project(X.long()),
        "states: expected a floating-point",
    ),
    (lambda: ATTENTION(X, torch.randn(3, 7, 12)), "query, key, value: expected batch dimensions"),
    (lambda: ATTENTION(X, torch.randn(7, 12)), "key: expected as many dimensions"),
    (lambda: ATTENTION(X, None, X), "key: expected a key beside the value"),
    (lambda: ATTENTION(X, X, torch.randn(2, 6, 12)), "value: expected as many rows"),
    (lambda: ATTENTION(X, X, cache=rnn.GrowingCache()), "cache: expected self-attention"),
    (lambda: ATTENTION(X, torch.ones(5, 5, dtype=torch.bool)), "key: expected"),
    (lambda: ATTENTION(X, mask=torch.ones(2, 5, 5, dtype=torch.bool)), r"mask.*mask\[:, None\]"),
    (lambda: ATTENTION(X, mask=torch.ones(5, 5, dtype=torch.long)), "mask: expected a bool tensor"),
    (lambda: ATTENTION(X, mask="causal"), "mask: expected a mask"),
    (lambda: WIDE(X), "key: expected an input of width kdim = 10, got None"),
    (lambda: WIDE(X, X), "key: expected .* kdim = 10"),
    (lambda: TWO(X, C), "value: expected an input of width vdim = 9, got None"),
    (lambda: TWO(X, C, C), "value: expected .* vdim = 9"),
    (lambda: CROSS(X, X), "context: expected .* context_dim = 10"),
    (lambda: CROSS(X, None), "context: expected a tensor .*project"),
    (lambda: CROSS(X[0], C), "context: expected as many dimensions"),
    (lambda: CROSS(X[0], CROSS.project(C)), "context: expected one context beside one x"),
    (lambda: CROSS(X, C, Causal()), "Causal: expected an alignment, because Tq != Tk"),
    (lambda: rnn.SelfAttention(12, 3, normalize=Sparsemax), "normalize: .* Say Sparsemax"),
    (lambda: rnn.SelfAttention(12, 3, normalize="softmax"), "normalize: expected .* got 'softmax'"),
    (lambda: rnn.SelfAttention(12, 3, score=rnn.AdditiveScore), "score: .* Say AdditiveScore"),
    (
        lambda: rnn.SelfAttention(12, 3, score=rnn.Sink(3)),
        "score: expected a score, got Sink, the owner of Softmax",
    ),
    (lambda: rnn.SelfAttention(12, 3, score=Sparsemax()), "score: expected a score, got Sparsemax"),
    (
        lambda: rnn.SelfAttention(12, 3, normalize=rnn.AdditiveScore(4)),
        "normalize: expected a normaliser, got Addi",
    ),
    (
        lambda: rnn.SelfAttention(12, 3, mask=rnn.RelativeBias(3, 2)),
        "mask: expected a mask, got RelativeBias, the owner",
    ),
    (
        lambda: rnn.SelfAttention(12, 3, bias=rnn.Sink(3)),
        "bias: expected a bias, got Sink, the owner of Softmax",
    ),
    (lambda: rnn.SelfAttention(12, 3, normalize=rnn.Sink(4))(X), r"Softmax\(sink=\): expected .*\(3,\)"),
    (lambda: rnn.StepAttention(12, score=rnn.Sink(3)), "score: expected a score"),
    (lambda: ATTENTION(X.to_sparse()), "query: expected a dense"),
    (lambda: ATTENTION(X.to("meta")), "query: expected a tensor on cpu, as the module, got one on meta"),
    (lambda: rnn.SelfAttention(12, 3, score=Dot), "score: .* Say Dot"),
    (
        lambda: rnn.SelfAttention(12, 3, score=rnn.AdditiveScore(5))(X),
        r"Additive\(v=\): expected shape \(4,\)",
    ),
    (lambda: rnn.SelfAttention(12, 3, mask=Prefix(9))(X), r"Prefix\(n=\): expected from 0 to Tk = 5"),
    (lambda: rnn.SelfAttention(12, 3)(X, cache=[]), "cache: expected a cache of regard.nn"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_calls(call, message):
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_a_state_dict_of_another_shape_loads_nothing():
    module = nn.Sequential(rnn.SelfAttention(12, 3, bias=rnn.RelativeBias(3, 2)))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    other = nn.Sequential(rnn.SelfAttention(12, 3, bias=rnn.RelativeBias(3, 4)))
    nn.init.normal_(other[0].q_proj.weight)
    message = r"state_dict\['0.bias.table'\]: expected shape \(3, 5\), got \(3, 9\). Build SelfAttention"
    with pytest.raises(ValueError, match=message):
        module.load_state_dict(other.state_dict())
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
