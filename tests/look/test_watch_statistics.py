"""What a watch keeps without the weights is what the weights say."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard import attention, attention_weights, attention_with_lse, biases, masks, normalizers, scores, watch
from regard.look import Keep
from regard.look._record_statistics import STATISTICS, of_weights
from regard.look._watch_statistics import pooled

ALL = Keep(topk=3, pool=4, rows=(0, -1, 3), weights=True, tensors=True)


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def seen(function, *args, keep=ALL, **kwargs):
    model = Call(function)
    expected = model(*args, **kwargs)
    with watch(model, keep) as record:
        output = model(*args, **kwargs)
    assert torch.equal(output, expected)
    assert record.notes == []
    (site,) = record.sites
    return site


def agrees(site, near=2e-6):
    """Everything that was kept beside the weights, from the weights."""
    weights = site.whole
    expected = of_weights(weights, site.offset, STATISTICS)
    assert set(expected) == set(site.statistics) - {"lse"}
    for name, tensor in expected.items():
        mine = site.statistics[name]
        assert mine.dtype == torch.float32 and mine.untyped_storage().nbytes() <= 4 * mine.numel()
        wide = near * 200 if name == "distance" else near * 10
        torch.testing.assert_close(
            mine, tensor, rtol=wide, atol=wide, msg=lambda said, name=name: f"{name}: {said}"
        )
    top = weights.float().topk(site.top_weights.shape[-1], -1).values
    torch.testing.assert_close(site.top_weights, top, rtol=near * 10, atol=near * 10)
    at = site.top_keys.long()
    assert bool(((at == -1) == (site.top_weights == 0)).all())
    there = weights.float().gather(-1, at.clamp(min=0))
    torch.testing.assert_close(there.masked_fill(at < 0, 0), site.top_weights, rtol=near * 10, atol=near * 10)
    rows = sorted(
        {row % weights.shape[2] for row in (0, -1, 3) if -weights.shape[2] <= row < weights.shape[2]}
    )
    assert site.rows == tuple(rows)
    torch.testing.assert_close(site.row_weights, weights[:, :, rows].float(), rtol=near, atol=near)
    for name, tensor in pooled(weights, 4).items():
        torch.testing.assert_close(getattr(site, name), tensor, rtol=near * 10, atol=near * 10)
    site.check()


def tensors(H=4, Hkv=2, Tq=7, Tk=7, D=8, B=2, dtype=torch.float32):
    made = torch.Generator().manual_seed(0)
    shapes = ((B, H, Tq, D), (B, Hkv, Tk, D), (B, Hkv, Tk, D + 1))
    return [torch.randn(shape, generator=made, dtype=torch.float64).to(dtype) for shape in shapes]


HALF = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
BOOL = torch.randn(2, 1, 7, 7, generator=torch.Generator().manual_seed(2)) > 0
FLOAT = torch.randn(2, 4, 7, 7, generator=torch.Generator().manual_seed(3))
HOLES = torch.tensor([[0, 0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 0, 0]])

OWN = {
    "plain": {},
    "causal": {"mask": masks.Causal()},
    "window": {"mask": masks.Window(2, 1)},
    "window ahead": {"mask": masks.Window(-1, 3)},
    "padding": {"mask": masks.Padding(torch.tensor([4, 0]))},
    "left padding, causal": {"mask": masks.Padding.of(HOLES) & masks.Causal()},
    "documents": {"mask": masks.Documents(torch.tensor([0, 0, 0, 1, 1, 2, 2]))},
    "prefix": {"mask": masks.Causal() | masks.Prefix(3)},
    "bool": {"mask": BOOL},
    "not": {"mask": ~masks.Window(1, 1)},
    "rule": {"mask": masks.Rule(lambda b, h, q, k: (q + k + h) % 2 == 0)},
    "rows": {"mask": masks.Rows(torch.arange(7) // 2, torch.arange(7))},
    "alibi": {"bias": biases.Alibi(), "mask": masks.Causal()},
    "relative": {"bias": biases.Relative(torch.randn(4, 9))},
    "float": {"bias": FLOAT},
    "float -inf": {"bias": FLOAT.masked_fill(FLOAT < 0, -torch.inf)},
    "both": {"bias": biases.Alibi() + FLOAT, "mask": BOOL},
    "scale by head": {"score": scores.Dot(torch.tensor([0.0, 1.0, -1.0, 3.0]))},
    "softcap": {"score": scores.Dot(softcap=2.0), "mask": masks.Causal()},
    "sink": {"normalize": normalizers.Softmax(torch.tensor([0.0, 1.0, 2.0, -3.0])), "mask": masks.Causal()},
    "bilinear": {"score": scores.Bilinear(torch.eye(8) + 0.1)},
    "concat": {"score": scores.Concat(HALF, HALF * 2)},
    "additive": {"score": scores.Additive(HALF), "mask": masks.Causal()},
    "cosine": {"score": scores.Cosine(3.0), "mask": masks.Window(2, 2)},
    "distance": {"score": scores.Distance(0.1)},
    "modified": {
        "score": scores.Modified(scores.Dot(), lambda s, b, h, q, k: s + 0.1 * (q - k) * (h + 1)),
        "mask": masks.Causal(),
    },
    "callable": {"score": lambda q, k: (q @ k.mT) / 5},
    "sparsemax": {"normalize": normalizers.Sparsemax(), "mask": masks.Causal()},
    "entmax": {"normalize": normalizers.Entmax15()},
    "sigmoid": {"normalize": normalizers.Sigmoid(-1.0), "mask": BOOL},
    "relu": {"normalize": normalizers.Relu(), "score": scores.Dot(0.5)},
    "own normaliser": {"normalize": lambda s: s.softmax(-1) ** 2},
}


@pytest.mark.parametrize("described", OWN.values(), ids=OWN)
def test_regards_own_calls(described):
    q, k, v = tensors()
    site = seen(attention, q, k, v, **described)
    agrees(site)
    expected = attention_weights(q, k, **described)
    torch.testing.assert_close(site.whole, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(site.output, attention(q, k, v, **described))
    assert (site.kind, site.offset, site.implementation) == ("self", 0, "regard")
    again = attention(site.query, site.key, site.value, **site.mechanism)
    torch.testing.assert_close(again, site.output, rtol=1e-5, atol=1e-5)
    if isinstance(described.get("normalize", normalizers.Softmax()), normalizers.Softmax):
        lse = attention_with_lse(q, k, v, **described)[1]
        torch.testing.assert_close(site.statistics["lse"], lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(7, 8), (4, 7, 8), (2, 3, 4, 7, 8)], ids=["T D", "H T D", "5-D"])
@pytest.mark.parametrize("mask", [None, masks.Causal(), masks.Window(3, 0), masks.Padding(5)])
def test_ranks(shape, mask):
    x = torch.randn(shape)
    agrees(seen(attention, x, x, x, mask))
    site = seen(F.scaled_dot_product_attention, x, x, x)
    agrees(site)
    assert tuple(site.query.shape) == tuple(site.sizes[i] for i in (0, 1, 3, 5))


SDPA = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.7},
    "bool": {"attn_mask": BOOL},
    "bool 2-D": {"attn_mask": BOOL[0, 0]},
    "float": {"attn_mask": FLOAT},
    "float least": {"attn_mask": torch.zeros(2, 1, 7, 7).masked_fill(~BOOL, -1e9)},
    "keys": {"attn_mask": HOLES.bool()[:, None, None]},
    "grouped": {"enable_gqa": True},
    "dropout": {"dropout_p": 0.0},
}


@pytest.mark.parametrize("how", SDPA.values(), ids=SDPA)
def test_torchs_calls(how):
    q, k, v = tensors(Hkv=2 if "enable_gqa" in how else 4)
    site = seen(F.scaled_dot_product_attention, q, k, v, **how)
    agrees(site)
    values = site.value.repeat_interleave(4 // site.sizes.Hkv, 1)
    torch.testing.assert_close(site.whole @ values, site.output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    q, k, v = tensors(Hkv=4, dtype=dtype)
    site = seen(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    assert site.dtype == str(dtype).removeprefix("torch.")
    assert site.whole.dtype == dtype
    exact = of_weights(attention_weights(q.double(), k.double(), masks.Causal()), 0, STATISTICS)
    for name, tensor in exact.items():
        torch.testing.assert_close(site.statistics[name], tensor, rtol=3e-5, atol=3e-5)


def test_autocast_counts_as_the_model_saw_it():
    q, k, v = tensors(Hkv=4)
    with torch.autocast("cpu", torch.bfloat16):
        site = seen(F.scaled_dot_product_attention, q, k, v)
    assert site.dtype == "bfloat16"
    weights = attention_weights(q.bfloat16().double(), k.bfloat16().double())
    torch.testing.assert_close(site.statistics["max"], weights.amax(-1).float(), rtol=1e-5, atol=1e-5)


def test_the_default_keeps_statistics_and_nothing_else():
    q, k, v = tensors()
    site = seen(attention, q, k, v, masks.Causal(), keep=None)
    assert set(site.statistics) == set(STATISTICS)
    kept = [value for value in vars(site).values() if isinstance(value, torch.Tensor)]
    assert kept == [] and not site.has_weights
    assert sum(t.numel() * t.element_size() for t in site.statistics.values()) <= 64 * 2 * 4 * 7


def test_heads_layers_and_groups_are_chosen():
    q, k, v = tensors()
    special = torch.tensor([True, False, False, False, False, False, True])
    keep = Keep(
        pool=3,
        rows=(1,),
        weights=True,
        tensors=True,
        heads=(2,),
        groups={"special": special, "no": special[:3]},
    )
    site = seen(attention, q, k, v, keep=keep)
    assert site.heads_kept == (2,) and site.whole.shape == (2, 1, 7, 7)
    weights = attention_weights(q, k)
    torch.testing.assert_close(site.map(2, 1), weights[1, 2])
    torch.testing.assert_close(site.row_weights[:, 0], weights[:, 2, 1:2])
    torch.testing.assert_close(site.pooled, pooled(weights[:, 2:3], 3)["pooled"])
    torch.testing.assert_close(site.statistics["special"], weights[..., 0] + weights[..., 6])
    assert "no" not in site.statistics
    elsewhere = seen(
        attention, q, k, v, keep=Keep(pool=3, rows=(1,), weights=True, tensors=True, layers=(4,))
    )
    assert (
        elsewhere.whole is None
        and elsewhere.query is None
        and elsewhere.pooled is None
        and elsewhere.rows == ()
    )


@pytest.mark.parametrize("Tq, Tk", [(0, 5), (5, 0), (1, 1), (1, 6), (6, 1)])
def test_odd_lengths(Tq, Tk):
    q, k, v = tensors(Hkv=4, Tq=Tq, Tk=Tk)
    site = seen(F.scaled_dot_product_attention, q, k, v)
    agrees(site)
    assert site.lengths == (Tq, Tk)


@pytest.mark.parametrize(
    "given, error, said",
    [
        ({"statistics": ("entropy", "colour")}, ValueError, "statistics: expected names among lse, max"),
        ({"statistics": "max"}, TypeError, "statistics: expected a sequence of names"),
        ({"topk": -1}, ValueError, r"Keep\(topk=\): expected 0 or more, got -1"),
        ({"pool": 2.5}, TypeError, r"Keep\(pool=\): expected a whole number"),
        ({"weights": 1}, TypeError, r"Keep\(weights=\): expected True or False"),
        ({"rows": 3}, TypeError, r"Keep\(rows=\): expected a sequence of whole numbers"),
        ({"heads": (0, -1)}, ValueError, r"Keep\(heads=\): expected numbers counted from 0, got -1"),
        ({"layers": ("0",)}, TypeError, r"Keep\(layers=\): expected whole numbers"),
        ({"groups": {"x": torch.ones(3)}}, TypeError, r"Keep\(groups=\): expected bool tensors"),
        ({"groups": {"x": torch.ones(1, 1, 3) > 0}}, ValueError, r"Keep\(groups=\): expected bool tensors"),
        ({"groups": {"max": torch.ones(3) > 0}}, ValueError, "a name that no statistic has"),
    ],
)
def test_what_cannot_be_kept_is_refused(given, error, said):
    with pytest.raises(error, match=said):
        Keep(**given)
