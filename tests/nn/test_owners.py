"""Modules that own parameters: what they return, and that they train, move, save and load."""

import functools
import io

import pytest
import torch
from torch import nn

import regard
import regard.nn as rnn
from regard.biases import Alibi, Relative
from regard.masks import Causal, Rule
from regard.normalizers import Entmax, Softmax
from regard.scores import Additive, Bilinear, Dot, Modified
from regard.variants import graph_v2

D, H = 8, 4


class Slopes(rnn.Owner):
    """One of a user's own."""

    def __init__(self):
        super().__init__()
        self.slopes = nn.Parameter(torch.full((H,), 0.3))

    def forward(self):
        return Alibi(self.slopes)


class Alpha(rnn.Owner):
    def __init__(self):
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(1.5))

    def forward(self):
        return Entmax(self.alpha)


CASES = {
    "additive": (lambda: rnn.AdditiveScore(D), "score", Additive),
    "additive, a head each": (lambda: rnn.AdditiveScore(D, H), "score", Additive),
    "bilinear": (lambda: rnn.BilinearScore(D, D), "score", Bilinear),
    "bilinear, a head each": (lambda: rnn.BilinearScore(D, D, heads=H), "score", Bilinear),
    "relative": (lambda: rnn.RelativeBias(H, 3), "bias", Relative),
    "T5": (lambda: rnn.T5Bias(H, 8, 16, True), "bias", Relative),
    "T5, one direction": (lambda: rnn.T5Bias(H, 8, 16, False), "bias", Relative),
    "sink": (lambda: rnn.Sink(H), "normalize", Softmax),
    "own bias": (Slopes, "bias", Alibi),
    "own normaliser": (Alpha, "normalize", Entmax),
}
each = pytest.mark.parametrize("case", CASES)


@each
def test_trains_moves_saves_and_loads(case):
    torch.manual_seed(0)
    make, keyword, kind = CASES[case]
    module = rnn.SelfAttention(32, H, mask=Causal(), **{keyword: make()})
    owner = getattr(module, keyword)
    assert isinstance(owner(), kind)
    names = [name for name, _ in module.named_parameters() if name.startswith(keyword + ".")]
    assert len(names) == 1
    x = torch.randn(2, 9, 32)

    before = dict(module.named_parameters())[names[0]].detach().clone()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.5)
    target = torch.randn(2, 9, 32)
    losses = []
    for _ in range(2):
        optimiser.zero_grad()
        loss = (module(x) - target).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimiser.step()
    own = dict(module.named_parameters())[names[0]]
    assert losses[1] < losses[0]
    assert own.grad.shape == own.shape and not torch.equal(own.detach(), before)

    saved = io.BytesIO()
    torch.save(module.state_dict(), saved)
    saved.seek(0)
    other = rnn.SelfAttention(32, H, mask=Causal(), **{keyword: make()})
    assert not torch.allclose(other(x), module(x))
    other.load_state_dict(torch.load(saved, weights_only=True))
    assert torch.equal(other(x), module(x))

    wide = other.double()
    assert dict(wide.named_parameters())[names[0]].dtype == torch.float64
    torch.testing.assert_close(wide(x.double()).float(), module(x), rtol=1e-4, atol=1e-5)
    assert {p.device.type for p in wide.to("meta").parameters()} == {"meta"}


@each
def test_an_owner_is_what_it_returns(case):
    """The module with an owner gives what ``regard.attention`` gives with the object that it returns."""
    torch.manual_seed(1)
    make, keyword, _ = CASES[case]
    module = rnn.SelfAttention(32, H, mask=Causal(), **{keyword: make()}).double()
    for parameter in getattr(module, keyword).parameters():
        nn.init.uniform_(parameter, 1.1, 1.9)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    q, k, v = (
        f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (module.q_proj, module.k_proj, module.v_proj)
    )
    context = regard.attention(q, k, v, Causal(), **{keyword: getattr(module, keyword)()})
    expected = module.out_proj(context.transpose(1, 2).flatten(-2))
    assert torch.equal(module(x), expected)
    plain = rnn.SelfAttention(32, H, mask=Causal()).double()
    plain.load_state_dict(
        {name: t for name, t in module.state_dict().items() if not name.startswith(keyword)}
    )
    if keyword != "score" or "additive" not in case:
        assert not torch.allclose(plain(x), expected)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "reach"), [(32, 128), (8, 16), (16, 20), (12, 100)])
def test_t5_buckets_are_those_of_t5(bidirectional, buckets, reach):
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-3 * reach, 3 * reach + 1)
    theirs = T5Attention._relative_position_bucket(
        distance, bidirectional=bidirectional, num_buckets=buckets, max_distance=reach
    )
    bias = rnn.T5Bias(2, buckets, reach, bidirectional)
    nn.init.normal_(bias.weight)
    table = bias().table
    ours = table[:, distance.clamp(-reach, reach) + reach]
    assert torch.equal(ours, bias.weight.T[:, theirs])
    assert len(theirs.unique()) == (buckets if not bidirectional else len(bias.buckets.unique()))


def test_a_shared_owner_is_one_parameter():
    """T5 shares its bias among layers."""
    bias = rnn.RelativeBias(H, 3)
    layers = nn.Sequential(*(rnn.SelfAttention(32, H, bias=bias) for _ in range(3)))
    assert sum(p is bias.table for p in layers.parameters()) == 1
    layers(torch.randn(1, 6, 32)).sum().backward()
    assert bias.table.grad is not None and bias.table.grad.abs().max() > 0


def test_mechanism_with_owners():
    mechanism = regard.Mechanism("learned", score=rnn.AdditiveScore(D), bias=rnn.RelativeBias(H, 2))
    module = rnn.SelfAttention(32, H, **mechanism)
    assert {"score.v", "bias.table"} <= set(module.state_dict())
    assert module(torch.randn(2, 4, 32)).shape == (2, 4, 32)


def test_a_module_that_is_a_score():
    """Any other module is a callable on tiles: trained through the attention."""

    class Scorer(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Linear(D, 3, bias=False)

        def forward(self, query, key):
            return self.down(query) @ self.down(key).transpose(-1, -2)

    module = rnn.SelfAttention(32, H, score=Scorer())
    assert "score.down.weight" in module.state_dict()
    module(torch.randn(2, 4, 32)).square().sum().backward()
    assert module.score.down.weight.grad.abs().max() > 0


W = nn.Parameter(torch.randn(D, D))


def bilinear(query, key, weight=None):
    return (query if weight is None else query @ weight) @ key.transpose(-1, -2)


def closing_over(held):
    def score(query, key):
        weight = held[0] if isinstance(held, list) else held["w"] if isinstance(held, dict) else held
        return bilinear(query, key, weight)

    return score


def wrapped(function):
    return lambda query, key: function(query, key)


class Bound:
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, query, key):
        return bilinear(query, key, self.weight)

    def score(self, query, key):
        return bilinear(query, key, self.weight)


def callables(weight):
    return [
        closing_over(weight),
        closing_over([weight]),
        closing_over({"w": weight}),
        wrapped(closing_over(weight)),
        wrapped(wrapped(functools.partial(bilinear, weight=weight))),
        functools.partial(bilinear, weight=weight),
        lambda query, key, weight=weight: bilinear(query, key, weight),
        Bound(weight),
        Bound(weight).score,
        Modified(Dot(), lambda s, b, h, q, k: s + weight[h, 0]),
    ]


@pytest.mark.parametrize("which", range(len(callables(W))))
def test_callables_that_hold_a_parameter_are_refused(which):
    message = "score: expected an object without parameters, got .* with a gradient, which no module owns"
    with pytest.raises(ValueError, match=message):
        rnn.SelfAttention(32, H, score=callables(W)[which])
    with pytest.raises(ValueError, match=message):
        rnn.StepAttention(D, score=callables(W)[which])
    given = callables(W.detach())[which]  # a constant may be closed over
    assert rnn.SelfAttention(32, H, score=given)(torch.randn(1, 3, 32)).shape == (1, 3, 32)


def test_a_mechanism_that_closes_over_a_parameter_is_owned_by_an_owner():
    class GATv2(rnn.Owner):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.randn(D))

        def forward(self):
            return graph_v2(self.a)["score"]

    with pytest.raises(ValueError, match="graph_v2.<locals>.score closing over a with a gradient.*nn.Owner"):
        rnn.SelfAttention(32, H, **graph_v2(nn.Parameter(torch.randn(D))))
    with pytest.raises(ValueError, match="normalize: expected an object without parameters"):
        rnn.SelfAttention(32, H, normalize=lambda scores, weight=W: scores.softmax(-1) * weight[0, 0])
    with pytest.raises(ValueError, match="mask: expected an object without parameters"):
        rnn.SelfAttention(32, H, mask=Causal() & Rule(lambda b, h, q, k, w=W: w[h, 0] > q - k))
    module = rnn.SelfAttention(32, H, score=GATv2())
    module(torch.randn(2, 4, 32)).square().sum().backward()
    assert module.get_parameter("score.a").grad.abs().max() > 0


def test_a_callable_that_holds_itself_or_a_module_is_taken():
    inner = nn.Linear(D, D)
    table = {}

    def score(query, key):
        assert table["me"] is score
        return bilinear(inner(query), key)

    table["me"] = score
    assert rnn.SelfAttention(32, H, score=score)(torch.randn(1, 3, 32)).shape == (1, 3, 32)


@pytest.mark.parametrize(
    ("keyword", "given"),
    [
        ("score", Additive(nn.Parameter(torch.randn(D)))),
        ("score", Dot(scale=torch.tensor(1.0, requires_grad=True))),
        ("normalize", Softmax(nn.Parameter(torch.zeros(H)))),
        ("bias", Relative(nn.Parameter(torch.zeros(5)))),
        ("bias", Alibi() + Relative(nn.Parameter(torch.zeros(5)))),
    ],
)
def test_parameters_that_no_module_owns_are_refused(keyword, given):
    with pytest.raises(ValueError, match=f"{keyword}: expected an object without parameters.*nn.Owner"):
        rnn.SelfAttention(32, H, **{keyword: given})


def test_tensors_as_mask_and_bias_move_with_the_module():
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    bias = torch.randn(6, 6)
    module = rnn.SelfAttention(32, H, mask=mask, bias=bias)
    assert module.double().bias.dtype == torch.float64 and module.mask.dtype == torch.bool
    assert "mask" not in module.state_dict() and "bias" not in module.state_dict()
    with pytest.raises(
        ValueError, match="bias: expected a tensor without a gradient, or a torch.nn.Parameter"
    ):
        rnn.SelfAttention(32, H, bias=bias.clone().requires_grad_())
    learned = rnn.SelfAttention(32, H, bias=nn.Parameter(bias))
    assert "bias" in dict(learned.named_parameters())
    learned(torch.randn(1, 6, 32)).sum().backward()
    assert learned.bias.grad is not None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rnn.AdditiveScore(0), "D: expected 1 or more, got 0"),
        (lambda: rnn.AdditiveScore(8, heads=2.0), "heads: expected a whole number, got 2.0"),
        (lambda: rnn.BilinearScore(8, -1), "Dk: expected 1 or more"),
        (lambda: rnn.RelativeBias(2, -1), "reach: expected 0 or more"),
        (lambda: rnn.RelativeBias(2, 3, alignment="left"), "RelativeBias"),
        (lambda: rnn.T5Bias(2, 7, 16), "buckets: expected an even number, got 7"),
        (lambda: rnn.T5Bias(2, 8, 2), "reach: expected 3 or more, got 2"),
        (lambda: rnn.T5Bias(2, 8, 16, bidirectional=1), "bidirectional: expected True or False, got 1"),
        (lambda: rnn.Sink(True), "heads: expected a whole number, got True"),
    ],
)
def test_bad_sizes(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_an_owner_without_forward_says_so():
    class Nothing(rnn.Owner):
        pass

    with pytest.raises(NotImplementedError, match="Nothing is an Owner: define forward"):
        rnn.SelfAttention(32, H, bias=Nothing())(torch.randn(1, 3, 32))
