"""Blocks: torch's own layers with their weights, pre- and post-norm; decoding; options; errors."""

import pytest
import torch
from torch import nn

import regard.nn as rnn
from regard.masks import Causal, Padding, Window
from regard.normalizers import Sparsemax
from regard.scores import Cosine

E, H, HIDDEN = 16, 4, 24
LENGTHS = torch.tensor([7, 3])
PAD = torch.arange(7) >= LENGTHS[:, None]  # torch's polarity: True is padding


def attention_state(theirs, prefix, ours):
    """torch packs q, k, v into one matrix."""
    state = {}
    for kind in ("weight", "bias"):
        packed = getattr(theirs, f"in_proj_{kind}")
        for name, part in zip(("q_proj", "k_proj", "v_proj"), packed.chunk(3), strict=True):
            state[f"{prefix}{name}.{kind}"] = part
        state[f"{prefix}out_proj.{kind}"] = getattr(theirs.out_proj, kind)
    return state


def load(ours, theirs):
    state = attention_state(theirs.self_attn, "attention.", ours)
    if hasattr(theirs, "multihead_attn"):
        state |= attention_state(theirs.multihead_attn, "cross_attention.", ours)
    names = {
        "linear1": "feed_forward.up",
        "linear2": "feed_forward.down",
        "norm1": "norm1",
        "norm2": "norm2",
        "norm3": "norm3",
    }
    for name, own in names.items():
        if hasattr(theirs, name):
            state |= {f"{own}.{kind}": getattr(getattr(theirs, name), kind) for kind in ("weight", "bias")}
    ours.load_state_dict(state)


def compare(ours, theirs, inputs):
    ours_in, theirs_in = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    found, expected = ours(*ours_in), theirs(*theirs_in)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    upstream = torch.randn_like(expected)
    found.backward(upstream)
    expected.backward(upstream)
    for a, b in zip(ours_in, theirs_in, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-11)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def theirs_of(kind, pre_norm, activation):
    layer = kind(E, H, HIDDEN, 0.0, activation, batch_first=True, norm_first=pre_norm, dtype=torch.float64)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


options = pytest.mark.parametrize(
    ("pre_norm", "name", "function"),
    [(True, "gelu", nn.functional.gelu), (False, "relu", nn.functional.relu)],
)


@options
def test_encoder_is_torchs(pre_norm, name, function):
    theirs = theirs_of(nn.TransformerEncoderLayer, pre_norm, name)
    ours = rnn.EncoderBlock(
        E, H, hidden_dim=HIDDEN, activation=function, pre_norm=pre_norm, dtype=torch.float64
    )
    load(ours, theirs)
    x = torch.randn(2, 7, E, dtype=torch.float64)
    compare(ours, theirs, [x])
    compare(
        lambda x: ours(x, Padding(LENGTHS)),
        lambda x: theirs(x, src_key_padding_mask=PAD),
        [x],
    )
    torch.testing.assert_close(ours(x[0]), ours(x)[0])


@options
def test_decoder_is_torchs(pre_norm, name, function):
    theirs = theirs_of(nn.TransformerDecoderLayer, pre_norm, name)
    ours = rnn.DecoderBlock(
        E, H, hidden_dim=HIDDEN, activation=function, pre_norm=pre_norm, dtype=torch.float64
    )
    load(ours, theirs)
    x, context = torch.randn(2, 5, E, dtype=torch.float64), torch.randn(2, 7, E, dtype=torch.float64)
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    compare(
        lambda x, c: ours(x, c, context_mask=Padding(LENGTHS)),
        lambda x, c: theirs(x, c, tgt_mask=later, memory_key_padding_mask=PAD),
        [x, context],
    )


def test_a_decoder_only_model_decodes():
    """Two blocks, a cache each, tokens one by one and in chunks: the full pass."""
    blocks = (
        nn.ModuleList(
            rnn.EncoderBlock(
                E,
                H,
                num_kv_heads=2,
                mask=Causal() & Window(4, 0),
                rotary=rnn.RotaryPositions(4),
                norm=nn.RMSNorm,
            )
            for _ in range(2)
        )
        .double()
        .requires_grad_(False)
    )
    x = torch.randn(2, 11, E, dtype=torch.float64)
    full = x
    for block in blocks:
        full = block(full)
    for sizes in ([1] * 11, [4, 1, 6]):
        caches = [rnn.RingCache(4), rnn.GrowingCache()]
        parts, start = [], 0
        for n in sizes:
            y = x[:, start : start + n]
            for block, cache in zip(blocks, caches, strict=True):
                y = block(y, cache=cache)
            parts.append(y)
            start += n
        torch.testing.assert_close(torch.cat(parts, 1), full)


def test_an_encoder_decoder_decodes_with_its_context_projected_once():
    block = rnn.DecoderBlock(
        E, H, context_dim=10, cross={"score": Cosine(5.0), "num_kv_heads": 1}, bias=rnn.RelativeBias(H, 3)
    )
    block = block.double().requires_grad_(False)
    nn.init.normal_(block.attention.bias.table)
    x, context = torch.randn(2, 6, E, dtype=torch.float64), torch.randn(2, 7, 10, dtype=torch.float64)
    full = block(x, context, context_mask=Padding(LENGTHS))
    calls = []
    block.cross_attention.k_proj.register_forward_hook(lambda *_: calls.append(1))
    cache, projected = rnn.GrowingCache(), block.cross_attention.project(context)
    steps = [block(x[:, t : t + 1], projected, context_mask=Padding(LENGTHS), cache=cache) for t in range(6)]
    torch.testing.assert_close(torch.cat(steps, 1), full)
    assert len(calls) == 1 and block.cross_attention.num_kv_heads == 1


def test_options_reach_the_attention():
    block = rnn.EncoderBlock(E, H, normalize=Sparsemax(), bias=False, dropout_p=0.5, head_dim=3)
    assert isinstance(block.attention.normalize, Sparsemax) and block.attention.head_dim == 3
    assert block.attention.q_proj.bias is None and block.feed_forward.up.bias is None
    assert block.attention.dropout_p == block.dropout.p == block.feed_forward.dropout.p == 0.5
    x = torch.randn(1, 4, E)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))
    decoder = rnn.DecoderBlock(E, H, proj_bias=False, head_dim=3, mask=None)
    assert decoder.cross_attention.q_proj.bias is None and decoder.cross_attention.head_dim == 3
    assert decoder.attention.mask is None and isinstance(rnn.DecoderBlock(E, H).attention.mask, Causal)


def test_blocks_train():
    block = rnn.DecoderBlock(E, H, hidden_dim=32, bias=rnn.T5Bias(H, 8, 16, False), dropout_p=0.1)
    optimiser = torch.optim.Adam(block.parameters(), lr=0.01)
    x, context, target = torch.randn(4, 6, E), torch.randn(4, 5, E), torch.randn(4, 6, E)
    losses = []
    for _ in range(40):
        loss = (block(x, context) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in block.parameters())
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def test_a_block_that_fails_behind_its_attention_leaves_the_cache():
    class Fails(nn.Module):
        def forward(self, x):
            raise RuntimeError("out of luck")

    block = rnn.EncoderBlock(E, H, mask=Causal()).requires_grad_(False)
    cache = rnn.GrowingCache()
    x = torch.randn(2, 5, E)
    first = block(x[:, :3], cache=cache)
    whole, block.feed_forward = block.feed_forward, Fails()
    with pytest.raises(RuntimeError, match="out of luck"):
        block(x[:, 3:], cache=cache)
    assert cache.length == 3
    block.feed_forward = whole
    torch.testing.assert_close(torch.cat([first, block(x[:, 3:], cache=cache)], 1), block(x))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rnn.EncoderBlock(E, H, out_dim=3), "options: expected none of out_proj and out_dim"),
        (lambda: rnn.EncoderBlock(E, H, out_proj=False), "options: expected none of out_proj and out_dim"),
        (lambda: rnn.DecoderBlock(E, H, cross={"out_dim": 3}), "options: expected none of out_proj"),
        (lambda: rnn.DecoderBlock(E, H, cross=Causal()), "cross: expected a mapping"),
        (lambda: rnn.DecoderBlock(E, H, cross={"kdim": 4}), "CrossAttention: expected arguments among"),
        (lambda: rnn.EncoderBlock(E, H, pre_norm="post"), "pre_norm: expected True or False"),
        (lambda: rnn.EncoderBlock(E, H, norm="layer"), "norm: expected a class or function"),
        (
            lambda: rnn.EncoderBlock(E, H, norm=lambda width: width),
            "norm: expected a function that returns a module",
        ),
        (lambda: rnn.EncoderBlock(E, H, activation="gelu"), "activation: expected a function"),
        (lambda: rnn.EncoderBlock(E, H, activation=nn.GELU), "activation: expected a function"),
        (lambda: rnn.EncoderBlock(E, H, hidden_dim=0), "hidden_dim: expected 1 or more"),
        (lambda: rnn.EncoderBlock(E, H, dropout_p=-0.1), "dropout_p: expected a probability"),
        (lambda: rnn.EncoderBlock(E, H)(torch.randn(2, 3, E + 1)), "x: expected .* embed_dim = 16"),
        (lambda: rnn.DecoderBlock(E, H)(torch.randn(2, 3, E), torch.randn(2, 3, E - 1)), "context: expected"),
        (lambda: rnn.FeedForward(E)(torch.randn(E - 1)), "x: expected"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
