"""Caches: decoding by any chunks equals the full pass; append, reorder, crop and reset; errors change nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import regard
import regard.nn as rnn
from regard.biases import Alibi
from regard.masks import Causal, Documents, Padding, Prefix, Rows, Rule, Window
from regard.normalizers import Sparsemax
from regard.scores import Dot, Modified

T, H, D, E, LEFT = 13, 4, 6, 12, 3
torch.manual_seed(11)
X = torch.randn(3, T, E, dtype=torch.float64)
STARTS = torch.tensor([0, 4, 9])
HOLES = torch.rand(3, T) > 0.3
KEEP = torch.rand(T, T) > 0.2
WIDE_BIAS = torch.randn(H, T, T, dtype=torch.float64)
IDS = torch.tensor([[0] * 5 + [1] * 8, [2] * 13, [1] * 2 + [5] * 3 + [9] * 8])


def odd_keys(b, h, q, k):
    return (k % 2 == 1) | (q == k)


def tilt(score, b, h, q, k):
    return score + 0.1 * q * (k % 3) + 0.05 * h


BIASES = {
    "none": lambda: None,
    "alibi": Alibi,
    "relative": lambda: rnn.RelativeBias(H, 4),
    "T5": lambda: rnn.T5Bias(H, 8, 16, False),
    "alibi + tensor": lambda: Alibi() + WIDE_BIAS[None],
    "tensor": lambda: WIDE_BIAS[None],
    "a row for all": lambda: WIDE_BIAS[None, :, :1],
}
MASKS = {
    "none": None,
    "left padding": Padding(start=STARTS),
    "tokenizer": Padding.of(HOLES),
    "tensor": KEEP,
    "documents": Documents(IDS),
    "rule": Rule(odd_keys),
    "rows": Rows(torch.arange(T) // 2, torch.tensor([[5 + b] * T for b in range(3)])),
    "not padding": ~Padding(STARTS),
    "prefix or rule": Prefix(STARTS) | Rule(odd_keys),
}
MECHANISMS = {
    "dot": {},
    "rotary": {"rotary": rnn.RotaryPositions(4)},
    "interleaved": {"rotary": rnn.RotaryPositions(6, pairing="interleaved")},
    "additive": {"score": lambda: rnn.AdditiveScore(D, H)},
    "modified": {"score": lambda: Modified(Dot(), tilt)},
    "sparsemax": {"normalize": Sparsemax()},
    "sink": {"normalize": lambda: rnn.Sink(H)},
    "grouped": {"num_kv_heads": 2},
}


def module_of(bias, mechanism, mask):
    made = {
        name: value() if type(value) is type(module_of) else value
        for name, value in MECHANISMS[mechanism].items()
    }
    torch.manual_seed(5)
    module = rnn.SelfAttention(
        E, H, head_dim=D, v_head_dim=5, mask=mask, bias=BIASES[bias](), **made
    ).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.requires_grad_(False)


def decode(module, cache, sizes, x=X, mask=None):
    parts, start = [], 0
    for n in sizes:
        parts.append(module(x[:, start : start + n], mask, cache=cache))
        start += n
    assert start == x.shape[1] == cache.length
    return torch.cat(parts, 1)


@st.composite
def chunks(draw):
    sizes = []
    while sum(sizes) < T:
        sizes.append(draw(st.integers(0, T - sum(sizes))))
    return sizes


some_chunks = st.one_of(st.just([1] * T), st.just([T]), chunks())


@settings(max_examples=150)
@given(
    sizes=some_chunks,
    bias=st.sampled_from(sorted(BIASES)),
    mechanism=st.sampled_from(sorted(MECHANISMS)),
    mask=st.sampled_from(sorted(MASKS)),
    kind=st.sampled_from(["growing", "preallocated", "ring"]),
    windowed=st.booleans(),
)
def test_any_chunks_equal_the_full_pass(sizes, bias, mechanism, mask, kind, windowed):
    cache = {
        "growing": rnn.GrowingCache,
        "preallocated": lambda: rnn.PreallocatedCache(T),
        "ring": lambda: rnn.RingCache(LEFT),
    }[kind]()
    own = Causal() & Window(LEFT, None) if kind == "ring" or windowed else Causal()
    module = module_of(bias, mechanism, own)
    full = module(X, MASKS[mask])
    torch.testing.assert_close(decode(module, cache, sizes, mask=MASKS[mask]), full, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mask", sorted(MASKS))
@pytest.mark.parametrize("bias", sorted(BIASES))
def test_the_parts_of_the_property_matter(mask, bias):
    """Each mask and bias above changes the full pass, so that the property could fail for it."""
    module, plain = module_of(bias, "dot", Causal()), module_of("none", "dot", Causal())
    if (mask, bias) != ("none", "none"):
        assert not torch.allclose(module(X, MASKS[mask]), plain(X))


@pytest.mark.parametrize("sizes", [[1] * T, [5, 5, 3], [T], [2, 9, 2]])
@pytest.mark.parametrize("left", [0, 1, LEFT, 40])
def test_ring_of_every_size(left, sizes):
    """Chunks larger than the window, a window of the query alone, a window that never fills."""
    module = module_of("alibi", "rotary", Window(left, 0))
    found = decode(module, rnn.RingCache(left), sizes)
    torch.testing.assert_close(found, module(X), rtol=1e-9, atol=1e-9)


def test_left_padded_batch_equals_each_sample_alone():
    """Rotary and ALiBi see distances alone, so a padded sample gives what it gives without its padding."""
    module = module_of("alibi", "rotary", Causal() & Window(LEFT, None))
    found = decode(module, rnn.RingCache(LEFT), [6, 1, 1, 5], mask=Padding(start=STARTS))
    for b, start in enumerate(STARTS.tolist()):
        alone = decode(module, rnn.GrowingCache(), [1] * (T - start), X[b : b + 1, start:])
        torch.testing.assert_close(found[b, start:], alone[0], rtol=1e-9, atol=1e-9)
    assert torch.equal(found[2, :9], module.out_proj(torch.zeros(9, H * 5, dtype=torch.float64)))


def test_through_the_core_alone():
    """append gives what attention takes: keys in position order, and the offset of the first query."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, T, 5, dtype=torch.float64) for heads in (4, 2, 2))
    mask = Window(LEFT, 0)
    full = regard.attention(q, k, v, mask, bias=Alibi())
    cache = rnn.RingCache(LEFT)
    for start, stop in ((0, 1), (1, 8), (8, 9), (9, 13)):
        keys, values, offset = cache.append(k[..., start:stop, :], v[..., start:stop, :])
        low = max(0, start - LEFT)
        assert torch.equal(keys, k[..., low:stop, :]) and torch.equal(values, v[..., low:stop, :])
        assert offset == start - low
        found = regard.attention(
            q[..., start:stop, :], keys, values, Window(LEFT, 0, offset=offset), bias=Alibi()
        )
        torch.testing.assert_close(found, full[..., start:stop, :])


def test_beams():
    module = module_of("relative", "rotary", Causal())
    order = torch.tensor([2, 0, 0, 1])
    for cache in (rnn.GrowingCache(), rnn.PreallocatedCache(T)):
        module(X[:, :6], cache=cache)
        cache.reorder(order)
        later = X[:, 6:9][order.flip(0)]
        found = module(later, cache=cache)
        expected = module(torch.cat([X[order][:, :6], later], 1))[:, 6:]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    ring = rnn.RingCache(2)
    windowed = module_of("relative", "rotary", Window(2, 0))
    windowed(X[:, :6], cache=ring)
    ring.reorder(order[:2])
    expected = windowed(torch.cat([X[order[:2]][:, :6], X[:2, 6:8]], 1))[:, 6:]
    torch.testing.assert_close(windowed(X[:2, 6:8], cache=ring), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n", [0, 1, 5, 9])
@pytest.mark.parametrize("make", [rnn.GrowingCache, lambda: rnn.PreallocatedCache(T)])
def test_crop_takes_back(make, n):
    module = module_of("alibi", "rotary", Causal())
    cache = make()
    module(X[:, :9].flip(0), cache=cache)
    cache.crop(n)
    assert cache.length == n
    found = module(X[:, n:], cache=cache)
    expected = module(torch.cat([X[:, :n].flip(0), X[:, n:]], 1))[:, n:]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_crop_of_a_ring():
    """Back over the last append always; further while the window's keys are held; else an error, or n = 0."""
    module = module_of("none", "rotary", Window(LEFT, 0))
    cache = rnn.RingCache(LEFT)
    long = torch.randn(1, 200, E, dtype=torch.float64)
    full = module(long)
    for start in range(0, 190, 5):
        module(long[:, start : start + 5], cache=cache)
        cache.crop(start + 2)
        found = module(long[:, start + 2 : start + 5], cache=cache)
        torch.testing.assert_close(found, full[:, start + 2 : start + 5], rtol=1e-9, atol=1e-9)
    with pytest.raises(
        ValueError, match=r"n: expected from \d+ to 190: older ones were let go, got 3"
    ) as raised:
        cache.crop(3)
    assert cache.length == 190
    least = int(str(raised.value).split("from ")[1].split()[0])
    with pytest.raises(ValueError, match="let go"):
        cache.crop(least - 1)
    cache.crop(least)
    found = module(long[:, least : least + 4], cache=cache)
    torch.testing.assert_close(found, full[:, least : least + 4], rtol=1e-9, atol=1e-9)
    cache.crop(0)
    torch.testing.assert_close(module(long[:, :4], cache=cache), full[:, :4])


def test_reset_starts_afresh_with_another_batch():
    for cache in (rnn.GrowingCache(), rnn.PreallocatedCache(T), rnn.RingCache(LEFT)):
        cache.append(torch.zeros(2, 1, 4, 3), torch.zeros(2, 1, 4, 5))
        cache.reset()
        assert cache.length == 0
        keys, values, offset = cache.append(torch.ones(5, 2, 3, 7), torch.ones(5, 2, 3, 1))
        assert keys.shape == (5, 2, 3, 7) and values.shape == (5, 2, 3, 1) and offset == 0
        assert bool((keys == 1).all()) and cache.length == 3


def one(n=1, batch=2, width=4):
    return torch.randn(batch, 2, n, width), torch.randn(batch, 2, n, width)


def test_a_step_copies_the_new_position_alone():
    """Rooms: a thousand steps move what is held a handful of times, never in a preallocated cache."""
    for cache, most in ((rnn.GrowingCache(), 5), (rnn.PreallocatedCache(1000), 1), (rnn.RingCache(100), 11)):
        places = []
        for _ in range(1000):
            keys, _, _ = cache.append(*one())
            places.append(keys.untyped_storage().data_ptr())
        moves = sum(a != b for a, b in zip(places, places[1:], strict=False))
        assert moves < most, (cache, moves)
        assert cache.length == 1000


def test_a_ring_stays_small_and_a_preallocated_room_is_kept():
    ring = rnn.RingCache(10)
    ring.append(*one(5000))
    for _ in range(100):
        ring.append(*one())
        assert ring.capacity <= 64
    wide = rnn.RingCache(10**9)
    wide.append(*one(5))
    assert wide.capacity <= 64
    room = rnn.PreallocatedCache(50)
    keys, _, _ = room.append(*one(50))
    place = keys.data_ptr()
    room.reset()
    assert room.append(*one(3))[0].data_ptr() == place and room.capacity == 50


def test_what_was_handed_out_stays():
    for cache in (rnn.GrowingCache(), rnn.PreallocatedCache(600), rnn.RingCache(7)):
        given = [cache.append(*one(n % 5)) for n in range(200)]
        again = [(k.clone(), v.clone()) for k, v, _ in given]
        for _ in range(100):
            cache.append(*one())
        for (keys, values, _), (same, also) in zip(given, again, strict=True):
            assert torch.equal(keys, same) and torch.equal(values, also)


def test_modes_can_change_between_steps():
    module = module_of("alibi", "rotary", Causal())
    for cache in (rnn.GrowingCache(), rnn.PreallocatedCache(T), rnn.RingCache(T)):
        own = module if not isinstance(cache, rnn.RingCache) else module_of("alibi", "rotary", Window(T, 0))
        with torch.inference_mode():
            first = own(X[:, :5], cache=cache)
            cache.reorder(torch.arange(3))
        with torch.no_grad():
            second = own(X[:, 5:9], cache=cache)
        third = own(X[:, 9:], cache=cache)
        torch.testing.assert_close(torch.cat([first.clone(), second, third], 1), own(X), rtol=1e-9, atol=1e-9)


def test_unbatched_decoding():
    module = module_of("alibi", "grouped", Causal())
    cache = rnn.GrowingCache()
    found = torch.cat([module(X[0, t : t + 1], cache=cache) for t in range(T)])
    torch.testing.assert_close(found, module(X[0]), rtol=1e-9, atol=1e-9)


def test_autocast_decoding():
    module = module_of("alibi", "rotary", Causal()).float()
    cache = rnn.GrowingCache()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = decode(module, cache, [4, 1, 8], X.float())
        torch.testing.assert_close(found, module(X.float()), rtol=0.05, atol=0.3)


def test_compiled_decoding_compiles_a_bounded_number_of_times():
    from torch._dynamo.testing import CompileCounter

    module = module_of("relative", "rotary", Causal())
    counter = CompileCounter()
    compiled = torch.compile(module, backend=counter)
    found = decode(compiled, rnn.PreallocatedCache(T), [1] * T)
    torch.testing.assert_close(found, module(X), rtol=1e-9, atol=1e-9)
    assert 1 <= counter.frame_count <= 3


# ---------------------------------------------------------------------------- errors


def facts(cache):
    state = cache._state
    held = (
        None
        if state.key is None
        else (state.key[..., : state.stop, :].clone(), state.value[..., : state.stop, :].clone())
    )
    return cache.length, held


def unchanged(cache, before):
    length, held = facts(cache)
    assert length == before[0]
    assert (held is None) == (before[1] is None)
    if held is not None:
        assert torch.equal(held[0], before[1][0]) and torch.equal(held[1], before[1][1])


K, V = one(3)
BAD = [
    (
        lambda c: c.append(*one(batch=3)),
        r"key: expected \(2, 2, n, 4\) in float32 .* as the cache holds, got .*\(3, 2, 1, 4\).*reset",
    ),
    (lambda c: c.append(*one(width=5)), "key: expected"),
    (lambda c: c.append(K, V[..., :3]), "value: expected .* as the cache holds"),
    (lambda c: c.append(K.double(), V.double()), "key: expected .* in float32"),
    (lambda c: c.append(K, V.double()), "value: expected the key's dtype"),
    (lambda c: c.append(K, V[:, :, :2]), "value: expected batch, heads and T as the key has"),
    (lambda c: c.append(K[0, 0], V[0, 0]), r"key: expected \(.batch, heads, T, D\)"),
    (lambda c: c.append(K.long(), V.long()), "key: expected a floating-point tensor"),
    (lambda c: c.append(None, V), "key: expected a floating-point tensor"),
    (
        lambda c: c.append(K.clone().requires_grad_(), V),
        "key: expected a tensor that needs no gradient.*no_grad",
    ),
    (lambda c: c.append(K, V.clone().requires_grad_()), "value: expected a tensor that needs no gradient"),
    (lambda c: c.reorder(torch.tensor([0, 2])), "index: expected samples from 0 to 1, got 0 to 2"),
    (lambda c: c.reorder(torch.tensor([-1, 0])), "index: expected samples from 0 to 1, got -1 to 0"),
    (lambda c: c.reorder(torch.tensor([0.0, 1.0])), "index: expected an integer tensor"),
    (lambda c: c.reorder(torch.tensor([True, False])), "index: expected an integer tensor"),
    (lambda c: c.reorder(torch.tensor(0)), "index: expected an integer tensor"),
    (lambda c: c.reorder([1, 0]), "index: expected an integer tensor"),
    (lambda c: c.crop(-1), "n: expected from 0 to 4 positions, as many as the cache holds, got -1"),
    (lambda c: c.crop(5), "n: expected from 0 to 4"),
    (lambda c: c.crop(1.0), "n: expected a whole number"),
    (lambda c: c.crop(True), "n: expected a whole number"),
]


@pytest.mark.parametrize(
    "make", [rnn.GrowingCache, lambda: rnn.PreallocatedCache(6), lambda: rnn.RingCache(5)]
)
@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_calls_change_nothing(make, call, message):
    cache = make()
    cache.append(*one(4))
    before = facts(cache)
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        call(cache)
    assert "\n" not in str(raised.value)
    unchanged(cache, before)


def test_append_behind_the_end():
    cache = rnn.PreallocatedCache(6)
    cache.append(*one(4))
    before = facts(cache)
    with pytest.raises(
        ValueError, match=r"append: expected at most 2 more of 6 positions, got 3, with 4 held. crop"
    ):
        cache.append(*one(3))
    unchanged(cache, before)
    cache.append(*one(2))
    with pytest.raises(ValueError, match="at most 6 more of 6 positions, got 7"):
        rnn.PreallocatedCache(6).append(*one(7))


def test_bad_caches():
    for make, message in (
        (lambda: rnn.PreallocatedCache(0), "length: expected 1 or more, got 0"),
        (lambda: rnn.PreallocatedCache(2.5), "length: expected a whole number"),
        (lambda: rnn.RingCache(-1), "left: expected 0 or more"),
        (
            lambda: rnn.GrowingCache().reorder(torch.tensor([0])),
            "reorder: expected a cache that holds something",
        ),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            make()
    flat = rnn.GrowingCache()
    flat.append(K[0], V[0])
    with pytest.raises(ValueError, match="reorder: expected keys with a batch dimension"):
        flat.reorder(torch.tensor([0]))


@pytest.mark.parametrize(
    "mask", [Causal(), Window(LEFT + 1, 0), Window(0, 0) | Causal(), Window(None, 0), None]
)
def test_a_ring_needs_a_mask_within_it(mask):
    module = module_of("none", "dot", mask)
    cache = rnn.RingCache(LEFT)
    with pytest.raises(ValueError, match=r"cache: expected for RingCache\(3\) a mask with Window\(3, ...\)"):
        module(X, cache=cache)
    assert cache.length == 0
    module(X, Window(LEFT, 0), cache=cache)


@pytest.mark.parametrize(
    "make", [rnn.GrowingCache, lambda: rnn.PreallocatedCache(T), lambda: rnn.RingCache(LEFT)]
)
def test_an_attention_that_fails_leaves_its_cache(make):
    module = module_of("none", "dot", Window(LEFT, 0))
    cache = make()
    first = module(X[:, :5], cache=cache)
    before = facts(cache)
    wrong = torch.ones(1, 1, 4, 2, dtype=torch.bool)
    for mask, message in ((wrong, "mask"), (Causal("upper_left"), "one alignment"), ("x", "mask")):
        with pytest.raises((ValueError, TypeError), match=message):
            module(X[:, 5:9], mask, cache=cache)
        unchanged(cache, before)
    with pytest.raises(ValueError, match="as the cache holds"):
        module(X[:2, 5:9], cache=cache)
    unchanged(cache, before)
    rest = module(X[:, 5:], cache=cache)
    torch.testing.assert_close(torch.cat([first, rest], 1), module(X), rtol=1e-9, atol=1e-9)


def test_training_through_a_cache_is_refused():
    module = rnn.SelfAttention(E, H, mask=Causal())
    cache = rnn.GrowingCache()
    with pytest.raises(ValueError, match="needs no gradient"):
        module(X.float(), cache=cache)
    assert cache.length == 0
