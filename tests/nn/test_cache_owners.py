"""A cache and its layer: copies are separate, another layer is refused, layers that learn may decode, tensors reach."""

import copy
import pickle

import pytest
import torch
from torch import nn

import regard.nn as rnn
from regard.masks import Causal, Dense, Documents, Padding, Rows, Window

E, H, T = 16, 2, 10
torch.manual_seed(3)
X = torch.randn(1, T, E)
MAKE = [rnn.GrowingCache, lambda: rnn.PreallocatedCache(T), lambda: rnn.RingCache(3)]
COPIES = [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))]


def layer(**options):
    torch.manual_seed(7)
    return rnn.SelfAttention(E, H, **{"mask": Window(3, 0), **options}).requires_grad_(False)


# ---------------------------------------------------------------------------- copies


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("inference", [False, True])
def test_a_copy_has_rooms_of_its_own(make, copied, inference):
    module, cache = layer(), make()
    first = module(X[:, :4], cache=cache)
    with torch.inference_mode(inference):
        twin = copied(cache)
    assert type(twin) is type(cache) and twin.length == 4 and twin.capacity == cache.capacity
    held = cache.append(*torch.ones(2, 1, H, 1, 8))
    kept = held[0].clone()
    rest = module(X[:, 4:], cache=twin)
    assert torch.equal(held[0], kept) and cache.length == 5 and twin.length == T
    torch.testing.assert_close(torch.cat([first, rest], 1), module(X))
    cache.reset()
    assert twin.length == T


def test_an_empty_cache_is_copied_and_one_copied_twice_is_one():
    cache = rnn.RingCache(3)
    one, other = copy.deepcopy([cache, cache])
    assert one is other and one is not cache and one.left == 3
    layer()(X[:, :2], cache=copy.copy(cache))
    assert cache.length == 0


# ---------------------------------------------------------------------------- one layer


@pytest.mark.parametrize("make", MAKE)
def test_another_layer_is_refused(make):
    first, second, cache = layer(), layer(), make()
    first(X[:, :5], cache=cache)
    with pytest.raises(
        ValueError, match="cache: expected a cache of this layer.*5 positions.*one cache for each"
    ):
        second(X[:, 5:], cache=cache)
    assert cache.length == 5
    first(X[:, 5:6], cache=cache)
    second(X[:, 6:7], cache=copy.copy(cache))
    cache.reset()
    second(X[:, :1], cache=cache)
    with pytest.raises(ValueError, match="cache of this layer"):
        first(X[:, 1:2], cache=cache)


def test_two_blocks_need_two_caches():
    blocks = [rnn.EncoderBlock(E, H, mask=Causal()).requires_grad_(False) for _ in range(2)]
    cache = rnn.GrowingCache()
    x = blocks[0](X, cache=cache)
    with pytest.raises(ValueError, match="cache of this layer"):
        blocks[1](x, cache=cache)
    assert cache.length == T


def test_a_first_call_that_fails_and_a_layer_that_is_gone_own_nothing():
    cache = rnn.GrowingCache()
    with pytest.raises(ValueError, match="bias"):
        layer(bias=torch.zeros(7, 7))(X[:, :8], cache=cache)
    gone = layer()
    gone(X[:, :2], cache=cache)
    del gone
    assert layer()(X[:, 2:], cache=cache).shape == (1, T - 2, E)


# ---------------------------------------------------------------------------- layers that learn


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("part", ["q_proj.weight", "out_proj.weight", "bias.table", "score.v"])
def test_what_needs_no_cached_gradient_learns_through_a_cache(make, part):
    module = layer(bias=rnn.RelativeBias(H, 4), score=rnn.AdditiveScore(8)).double()
    weight = module.get_parameter(part).requires_grad_()
    nn.init.normal_(weight)
    x = X.double()
    full = torch.autograd.grad(module(x).square().sum(), weight)[0]
    cache = make()
    steps = torch.cat([module(x[:, t : t + 1], cache=cache) for t in range(T)], 1)
    cache.reset()
    found = torch.autograd.grad(steps.square().sum(), weight)[0]
    torch.testing.assert_close(found, full)
    assert full.abs().max() > 0


# ---------------------------------------------------------------------------- tensors of positions

SHORT = [
    ({"bias": torch.randn(1, 2, 9, 10)}, None, "bias: expected 10 rows or more, got .*9, 10"),
    ({"bias": torch.randn(1, 2, 10, 9)}, None, "bias: expected 10 keys or more"),
    ({"bias": torch.randn(9)}, None, "bias: expected 10 keys or more"),
    ({"mask": Causal() & Dense(torch.ones(9, 10, dtype=torch.bool))}, None, "mask: expected 10 rows or more"),
    ({"mask": Causal() & ~Dense(torch.zeros(10, 9, dtype=torch.bool))}, None, "mask: expected 10 keys"),
    ({}, torch.ones(9, 10, dtype=torch.bool), "mask: expected 10 rows or more"),
    ({}, Padding.of(torch.ones(1, 9)), "Padding.of: expected 10 keys or more"),
    ({}, Documents(torch.zeros(9, dtype=torch.long)), r"Documents\(query_ids=\): expected 10 keys or more"),
    ({}, Documents(torch.zeros(9).long(), torch.zeros(10).long()), r"\(query_ids=\): expected 10 rows"),
    ({}, Documents(torch.zeros(10).long(), torch.zeros(9).long()), r"\(key_ids=\): expected 10 keys"),
    ({}, Rows(stop=torch.full((9,), 10)), r"Rows\(stop=\): expected 10 rows or more"),
    ({}, Rows(start=torch.zeros(9).long()), r"Rows\(start=\): expected 10 rows or more"),
]


@pytest.mark.parametrize(("options", "mask", "message"), SHORT)
@pytest.mark.parametrize("cut", [8, 5])
def test_a_tensor_that_ends_before_the_call_is_refused(options, mask, message, cut):
    module = layer(**{"mask": Causal(), **options})
    cache = rnn.GrowingCache()
    module(X[:, :cut], mask, cache=cache)
    with pytest.raises(ValueError, match=message + ".*from position 0 on"):
        module(X[:, cut:], mask, cache=cache)
    assert cache.length == cut


def test_one_row_for_all_still_broadcasts():
    bias = torch.randn(1, 2, 1, T)
    module, cache = layer(mask=Causal(), bias=bias), rnn.GrowingCache()
    steps = [module(part, cache=cache) for part in X.split([8, 2], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), module(X))
