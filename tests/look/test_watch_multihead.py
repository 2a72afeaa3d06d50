"""torch's multi-head attention, looked into: per head, whatever it is given, as it would have said itself."""

import pytest
import torch
from torch import nn

from regard.look import EVERYTHING, Keep, watch

CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])


def told(module, *args, **kwargs):
    """The module's own weights of each head."""
    with torch.no_grad():
        return module(*args, **{**kwargs, "need_weights": True, "average_attn_weights": False})[1]


CASES = {
    "plain": ({}, {}),
    "batch first": ({"batch_first": True}, {}),
    "causal": ({}, {"attn_mask": CAUSAL}),
    "causal, hinted": ({}, {"attn_mask": CAUSAL, "is_causal": True}),
    "float mask": ({}, {"attn_mask": torch.randn(5, 5)}),
    "mask by head": ({}, {"attn_mask": torch.randn(4, 5, 5)}),
    "padding": ({"batch_first": True}, {"key_padding_mask": PADDING}),
    "padding, float": ({}, {"key_padding_mask": torch.zeros(2, 5).masked_fill(PADDING, -torch.inf)}),
    "both": ({}, {"key_padding_mask": PADDING, "attn_mask": CAUSAL}),
    "zero attention": ({"add_zero_attn": True}, {"attn_mask": CAUSAL}),
    "learned key": ({"add_bias_kv": True}, {"attn_mask": CAUSAL, "key_padding_mask": PADDING}),
    "learned and zero": ({"add_bias_kv": True, "add_zero_attn": True}, {}),
    "no bias": ({"bias": False}, {}),
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("made, how", CASES.values(), ids=CASES)
def test_self_attention(made, how, need_weights):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, **made).eval()
    x = torch.randn((2, 5, 8) if made.get("batch_first") else (5, 2, 8))
    if how.get("is_causal") and need_weights is False and module.bias_k is None:
        expected = told(module, x, x, x, attn_mask=how["attn_mask"])
    else:
        expected = told(module, x, x, x, **how)
    plain = module(x, x, x, need_weights=need_weights, **how)[0]
    with watch(module, EVERYTHING) as record:
        output = module(x, x, x, need_weights=need_weights, **how)[0]
    assert torch.equal(output, plain)
    (site,) = record.sites
    assert (site.kind, site.implementation) == ("self", "multi_head_attention_forward")
    # The zero key takes weight and has value 0: it is a sink, and no key of its own.
    keys = expected.shape[-1] - bool(made.get("add_zero_attn"))
    torch.testing.assert_close(site.weights, expected[..., :keys], rtol=1e-5, atol=1e-6)
    assert site.query.shape == (2, 2, 5, 4)
    if not made.get("add_zero_attn"):
        torch.testing.assert_close(site.weights @ site.value, site.output, rtol=1e-4, atol=1e-5)
    joined = site.output.permute(2, 0, 1, 3).flatten(2)
    again = module.out_proj(joined)
    torch.testing.assert_close(again.transpose(0, 1) if module.batch_first else again, output)


def test_cross_attention_of_other_widths():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, kdim=6, vdim=3).eval()
    x, key, value = torch.randn(5, 2, 8), torch.randn(7, 2, 6), torch.randn(7, 2, 3)
    expected = told(module, x, key, value)
    with watch(module, EVERYTHING) as record:
        module(x, key, value)
    (site,) = record.sites
    assert (site.kind, site.offset, site.lengths) == ("cross", None, (5, 7))
    torch.testing.assert_close(site.weights, expected)
    assert "distance" not in site.statistics and "first" in site.statistics


def test_one_sample_without_a_batch():
    module = nn.MultiheadAttention(8, 2).eval()
    x = torch.randn(5, 8)
    with watch(module, EVERYTHING) as record:
        module(x, x, x, key_padding_mask=torch.tensor([False] * 4 + [True]))
    (site,) = record.sites
    assert site.sizes[:5] == (1, 2, 2, 5, 5)
    assert float(site.weights[..., 4].abs().max()) == 0.0
    assert site.output is not None


def test_dropout_is_said_and_the_context_is_not_guessed():
    module = nn.MultiheadAttention(8, 2, dropout=0.5)
    x = torch.randn(5, 2, 8)
    torch.manual_seed(1)
    plain = module(x, x, x)[0]
    torch.manual_seed(1)
    with watch(module, EVERYTHING) as record:
        assert torch.equal(module(x, x, x)[0], plain)
    assert record.sites[0].dropout_p == 0.5 and record.sites[0].output is None
    torch.testing.assert_close(record.sites[0].weights.sum(-1), torch.ones(2, 2, 5))


def test_torchs_layers_and_a_whole_transformer():
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 2, 1, 16, batch_first=True).eval()
    source, target = torch.randn(2, 6, 8), torch.randn(2, 4, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            plain = model(source, target, tgt_mask=mask)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    with torch.no_grad(), watch(model, Keep(weights=True)) as record:
        output = model(source, target, tgt_mask=mask)
    assert torch.equal(output, plain)
    assert [(site.name, site.kind, site.lengths, site.layer) for site in record.sites] == [
        ("encoder.layers.0.self_attn", "self", (6, 6), 0),
        ("encoder.layers.1.self_attn", "self", (6, 6), 1),
        ("decoder.layers.0.self_attn", "self", (4, 4), 0),
        ("decoder.layers.0.multihead_attn", "cross", (4, 6), 0),
    ]
    assert float(record.sites[2].weights.triu(1).abs().max()) == 0.0
    assert len(record.notes) == 1 and "fused encoder path" in record.notes[0]


def test_long_input_stays_linear():
    module = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(1, 3000, 8)
    with torch.no_grad(), watch(module) as record:
        module(x, x, x, need_weights=False)
    site = record.sites[0]
    assert not site.has_weights
    held = sum(tensor.untyped_storage().nbytes() for tensor in site.statistics.values())
    assert held <= 64 * 2 * 3000
