"""One call of the attention function: arguments, masks of every form, and what is refused."""

import math

import pytest
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from regard import attention, attention_weights
from regard.integrations.transformers import NAME, register
from regard.integrations.transformers_call import attend
from regard.integrations.transformers_tensor import MaskTensor
from regard.masks import Causal
from regard.normalizers import Softmax
from regard.scores import Dot

B, H, HKV, T, D = 2, 4, 2, 6, 8
LEAST = torch.finfo(torch.float32).min


class Module(nn.Module):
    def __init__(self, is_causal=None):
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


@pytest.fixture
def qkv():
    torch.manual_seed(0)
    return torch.randn(B, H, T, D), torch.randn(B, HKV, T, D), torch.randn(B, HKV, T, 5)


def by_hand(q, k, v, *, scale=D**-0.5, softcap=None, add=None, sink=None):
    """Eager attention, written out: (B, T, H, Dv) and weights."""
    k, v = (x.repeat_interleave(H // HKV, 1) for x in (k, v))
    scores = q @ k.mT * scale
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = scores if add is None else scores + add
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(B, H, T, 1)], -1)
    weights = scores.softmax(-1)
    weights = weights if sink is None else weights[..., :-1]
    return (weights @ v).transpose(1, 2), weights


def close(one, two):
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


CAUSAL = torch.full((T, T), LEAST).triu(1)[None, None]
ARGUMENTS = {
    "scale": ({"scaling": 0.3}, {"scale": 0.3}),
    "scale zero": ({"scaling": 0.0}, {"scale": 0.0}),
    "softcap": ({"scaling": 2.0, "softcap": 1.5}, {"scale": 2.0, "softcap": 1.5}),
    "sink": ({"s_aux": torch.arange(4.0)}, {"sink": torch.arange(4.0)}),
    "bias": ({"position_bias": torch.ones(1, H, T, T).triu()}, {"add": torch.ones(T, T).triu()}),
    "everything": (
        {"scaling": 2.0, "softcap": 1.5, "s_aux": torch.ones(4), "position_bias": torch.eye(T)[None, None]},
        {"scale": 2.0, "softcap": 1.5, "sink": torch.ones(4), "add": torch.eye(T)},
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("masked", ["none", "added", "bool", "runs"])
def test_arguments_mean_what_they_mean_in_eager(qkv, name, masked):
    said, meant = ARGUMENTS[name]
    if masked != "none":
        meant = meant | {"add": CAUSAL + meant.get("add", 0.0)}
    mask = {
        "none": None,
        "added": CAUSAL,
        "bool": CAUSAL == 0,
        "runs": MaskTensor(Causal(), (B, 1, T, T), torch.float32, torch.device("cpu")),
    }[masked]
    output, weights = attend(Module(), *qkv, mask, **said, output_attentions=True)
    expected, expected_weights = by_hand(*qkv, **meant)
    assert output.shape == (B, T, H, 5) and output.is_contiguous()
    close(output, expected)
    close(weights, expected_weights)


def test_sinks_and_biases_get_their_gradients(qkv):
    found = []
    for function in (attend, None):
        sink, bias = torch.ones(H, requires_grad=True), torch.zeros(1, H, T, T, requires_grad=True)
        if function is None:
            output, _ = by_hand(*qkv, sink=sink, add=bias + CAUSAL)
        else:
            output, _ = attend(Module(), *qkv, CAUSAL, s_aux=sink, position_bias=bias)
        output.square().sum().backward()
        found.append((sink.grad, bias.grad))
    close(found[0], found[1])


@pytest.mark.parametrize(
    ("module", "said", "causal"),
    [
        (Module(True), {}, True),
        (Module(False), {}, False),
        (Module(), {}, False),
        (Module(True), {"is_causal": False}, False),
        (Module(False), {"is_causal": True}, True),
        (None, {"is_causal": True}, True),
        (None, {}, False),
    ],
)
def test_no_mask_is_causal_where_the_call_or_the_module_says_so(qkv, module, said, causal):
    output, weights = attend(module, *qkv, None, **said)
    assert weights is None
    close(output, by_hand(*qkv, add=CAUSAL if causal else None)[0])


def test_a_mask_settles_what_may_meet(qkv):
    """is_causal beside a mask is what other implementations ignore, too."""
    everything = MaskTensor(None, (B, 1, T, T), torch.float32, torch.device("cpu"))
    close(attend(Module(True), *qkv, everything, is_causal=True)[0], by_hand(*qkv)[0])


def test_one_query_without_a_mask_sees_all_keys(qkv):
    q, k, v = qkv
    output, _ = attend(Module(True), q[:, :, -1:], k, v, None)
    close(output[:, 0], by_hand(*qkv)[0][:, -1])


def test_a_mask_that_a_model_changed_counts_as_it_is_now(qkv):
    mask = MaskTensor(Causal(), (B, 1, T, T), torch.float32, torch.device("cpu"))
    mask[:, :, :, 0] = LEAST
    mask[:, :, 0, 1] = 0.0
    added = CAUSAL.expand(B, 1, T, T).clone()
    added[:, :, :, 0] = LEAST
    added[:, :, 0, 1] = 0.0
    close(attend(Module(), *qkv, mask)[0], by_hand(*qkv, add=added)[0])


def test_dropout_only_while_training(qkv):
    module = Module()
    module.eval()
    close(attend(module, *qkv, None, dropout=0.5)[0], by_hand(*qkv)[0])
    module.train()
    torch.manual_seed(1)
    dropped, weights = attend(module, *qkv, None, dropout=0.5, output_attentions=True)
    torch.manual_seed(1)
    assert torch.equal(dropped, attention(*qkv, dropout_p=0.5).transpose(1, 2))
    assert not torch.allclose(dropped, by_hand(*qkv)[0])
    close(weights, by_hand(*qkv)[1])


def test_it_is_regard_to_the_bit(qkv):
    q, k, v = qkv
    mechanism = {"mask": Causal(), "score": Dot(0.3, 2.0), "normalize": Softmax(torch.ones(H))}
    mask = MaskTensor(Causal(), (B, 1, T, T), torch.float32, torch.device("cpu"))
    said = {"scaling": 0.3, "softcap": 2.0, "s_aux": torch.ones(H), "output_attentions": True}
    output, weights = attend(Module(), *qkv, mask, **said)
    assert torch.equal(output, attention(q, k, v, **mechanism).transpose(1, 2))
    assert torch.equal(weights, attention_weights(q, k, **mechanism))


# ---------------------------------------------------------------------------- what is refused

REFUSED = {
    "list": ([[1]], {}, r"attention_mask: expected a bool tensor .*got list"),
    "integers": (torch.ones(B, 1, T, T, dtype=torch.long), {}, r"attention_mask: expected .*int64 tensor"),
    "two dimensions": (torch.ones(B, T), {}, r"attention_mask: expected .*\(2, 6\)"),
    "three dimensions": (torch.ones(B, T, T), {}, r"attention_mask: expected .*\(2, 6, 6\)"),
    "too many keys": (torch.zeros(B, 1, T, T + 1), {}, r"broadcasts to \(..., 6, 6\).*\(2, 1, 6, 7\)"),
    "too few queries": (torch.zeros(B, 1, T - 1, T), {}, r"broadcasts to \(..., 6, 6\).*\(2, 1, 5, 6\)"),
    "another batch": (torch.ones(B + 1, 1, T, T) > 0, {}, r"mask: expected"),
    "runs of another length": (
        MaskTensor(Causal(), (B, 1, T + 2, T + 2), torch.float32, torch.device("cpu")),
        {},
        r"broadcasts to \(..., 6, 6\).*\(2, 1, 8, 8\)",
    ),
    "packed": (None, {"cu_seq_lens_q": torch.tensor([0, 2, 6])}, r"None with cu_seq_lens_q"),
    "window": (None, {"sliding_window": 3, "is_causal": True}, r"a window of 3 counts, got None with Tk = 6"),
    "indices": (
        CAUSAL,
        {"indices": torch.ones(2)},
        r"indices: expected None: the keys that an indexer chose",
    ),
    "block indices": (CAUSAL, {"block_indices": torch.ones(2)}, r"block_indices: expected None"),
    "sinks by query": (
        CAUSAL,
        {"sinks": torch.ones(B, H, T, 1)},
        r"sinks: expected None: a sink for each query",
    ),
    "head mask": (CAUSAL, {"head_mask": torch.ones(H)}, r"head_mask: expected None"),
    "NaN scale": (CAUSAL, {"scaling": math.nan}, r"Dot\(scale=\): expected a finite number"),
    "softcap zero": (CAUSAL, {"softcap": 0.0}, r"Dot\(softcap=\): expected a positive finite number"),
    "sink shape": (CAUSAL, {"s_aux": torch.ones(H + 1)}, r"sink"),
    "bias shape": (CAUSAL, {"position_bias": torch.ones(1, H + 1, T, T)}, r"bias: expected"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_take_is_refused(qkv, name):
    mask, said, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        attend(Module(), *qkv, mask, **said)


def test_a_causal_module_without_a_mask_must_have_as_many_queries_as_keys(qkv):
    q, k, v = qkv
    with pytest.raises(ValueError, match="a mask where Tq != Tk, got None with Tq = 5, Tk = 6"):
        attend(Module(True), q[:, :, 1:], k, v, None)


def test_five_dimensions_are_refused(qkv):
    with pytest.raises(ValueError, match=r"query: expected \(B, H, Tq, D\)"):
        attend(Module(), *(x[None] for x in qkv), None)


# ---------------------------------------------------------------------------- registering


def test_registering_twice_is_harmless():
    before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    register()
    register()
    assert before == (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)
    assert AttentionInterface._global_mapping[NAME] is attend
