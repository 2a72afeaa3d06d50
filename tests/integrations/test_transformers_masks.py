"""The masks that regard makes of transformers' descriptions allow exactly the pairs that transformers' own do."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import masking_utils as hf

from regard import _runs
from regard._frame import Frame
from regard.integrations.transformers_masks import make_mask
from regard.integrations.transformers_tensor import MaskTensor
from regard.masks import Causal, Dense, Rows, walk

LEAST = torch.finfo(torch.float32).min


@st.composite
def descriptions(draw):
    """What transformers says about a mask: sizes, offsets, a function of its own, padding."""
    B, Tq, past = draw(st.integers(1, 3)), draw(st.integers(1, 7)), draw(st.integers(0, 6))
    cropped = draw(st.integers(0, past))
    spare = draw(st.integers(0, 3))
    Tk = past - cropped + Tq + spare
    random = torch.Generator().manual_seed(draw(st.integers(0, 999)))

    def ids(low, high, width):
        return torch.randint(low, high, (B, width), generator=random)

    attention_mask = None
    padded = draw(st.sampled_from(["none", "ones", "left", "right", "holes"]))
    if padded != "none":
        length = past + Tq + draw(st.integers(0, spare))
        at, cut = torch.arange(length), ids(0, length + 1, 1)
        rules = {"ones": at >= 0, "left": at >= cut, "right": at < cut, "holes": ids(0, 2, length) > 0}
        attention_mask = rules[padded].expand(B, length)
    size = draw(st.integers(1, 9))
    start = ids(0, 4, 1)[:, 0]
    functions = {
        "causal": hf.causal_mask_function,
        "bidirectional": hf.bidirectional_mask_function,
        "sliding": hf.sliding_window_causal_mask_function(size),
        "around": hf.sliding_window_bidirectional_mask_function(size),
        "chunked": hf.chunked_causal_mask_function(size, start),
    }
    blocks = hf.blockwise_overlay(ids(-1, 3, past + Tq + Tk))
    functions["blocks"] = hf.or_masks(hf.causal_mask_function, blocks)
    functions["sliding blocks"] = hf.or_masks(functions["sliding"], blocks)
    functions["own"] = hf.and_masks(hf.causal_mask_function, lambda b, h, q, k: (q + k + b) % 3 != 1)
    name = draw(st.sampled_from(list(functions)))
    return name, {
        "batch_size": B,
        "q_length": Tq,
        "kv_length": Tk,
        "q_offset": past,
        "kv_offset": cropped,
        "mask_function": functions[name],
        "attention_mask": attention_mask,
        "use_vmap": name == "own" and draw(st.booleans()),
    }


def allowed(**description):
    return hf.sdpa_mask(**description, allow_is_causal_skip=False)


@given(descriptions())
@settings(max_examples=300)
def test_the_same_pairs_as_transformers(described):
    name, description = described
    mask = make_mask(**description)
    expected = allowed(**description)
    assert isinstance(mask, MaskTensor) and mask.shape == expected.shape
    assert torch.equal(mask.allowed(), expected)
    assert any(isinstance(part, Dense) for part in walk(mask.mask)) == (name == "own")


@given(descriptions())
@settings(max_examples=60)
def test_written_out_it_is_the_mask_of_eager(described):
    _, description = described
    expected = hf.eager_mask(**description, dtype=torch.float32)
    mask = make_mask(**description)
    assert torch.equal(mask + 0, expected)
    assert torch.equal(mask[:, :, :, 1:], expected[:, :, :, 1:])


def test_packed_sequences_are_documents():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]])
    ids = hf.find_packed_sequence_indices(positions)
    for inner in (hf.causal_mask_function, hf.sliding_window_causal_mask_function(2)):
        function = hf.and_masks(
            hf.remap_positions_for_packed_sequence(inner, positions), hf.packed_sequence_mask_function(ids)
        )
        description = {"batch_size": 2, "q_length": 6, "kv_length": 6, "mask_function": function}
        mask = make_mask(**description)
        assert torch.equal(mask.allowed(), allowed(**description))
        assert not any(isinstance(part, Dense) for part in walk(mask.mask))


@pytest.mark.parametrize("remapped_alone", [True, False])
def test_positions_that_do_not_stand_for_rows_are_evaluated(remapped_alone):
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    chunks = hf.chunked_causal_mask_function(2, torch.tensor([1]))
    inner = hf.causal_mask_function if remapped_alone else chunks
    function = hf.remap_positions_for_packed_sequence(inner, positions)
    if not remapped_alone:
        ids = hf.find_packed_sequence_indices(positions)
        function = hf.and_masks(function, hf.packed_sequence_mask_function(ids))
    description = {"batch_size": 1, "q_length": 6, "kv_length": 6, "mask_function": function}
    mask = make_mask(**description)
    assert torch.equal(mask.allowed(), allowed(**description))
    assert isinstance(mask.mask, Dense)


@pytest.mark.parametrize(
    "function",
    [
        hf.causal_mask_function,
        hf.sliding_window_causal_mask_function(512),
        hf.sliding_window_bidirectional_mask_function(512),
        hf.chunked_causal_mask_function(512, torch.zeros(2, dtype=torch.long)),
    ],
)
def test_a_mask_of_200_000_tokens_is_small(function):
    """Written out it would be 80 GB."""
    T = 200_000
    real = torch.ones(2, T, dtype=torch.long)
    real[0, :1000] = 0
    mask = make_mask(2, T, T, mask_function=function, attention_mask=real)
    assert mask.shape == (2, 1, T, T)
    frame = Frame((2,), 4, 2, 1, 1, T, T, torch.device("cpu"))
    visible = _runs.lower(mask.mask.bind(frame), frame, 0)
    assert visible.dense is None and len(visible.runs) == 1
    rows = [part for part in walk(mask.mask) if isinstance(part, Rows)]
    assert all(edge.numel() <= 2 * T for part in rows for edge in (part.start, part.stop))


def test_a_decoding_step_that_sees_all_keys_has_no_mask_left():
    assert make_mask(2, 1, 9, q_offset=8).mask is None
    window = hf.sliding_window_causal_mask_function(9)
    assert make_mask(2, 1, 9, q_offset=8, mask_function=window).mask is None
    assert make_mask(2, 1, 9, q_offset=7).mask is not None
    assert make_mask(2, 1, 10, q_offset=9, mask_function=window).mask is not None


def test_a_compiled_decoding_step_takes_a_plain_tensor():
    mask = make_mask(2, 1, 9, q_offset=torch.tensor(4), allow_is_causal_skip=False)
    assert type(mask) is torch.Tensor
    assert torch.equal(mask == 0, torch.arange(9).expand(2, 1, 1, 9) <= 4)


def test_no_mask_is_none():
    for function in (hf.causal_mask_function, hf.bidirectional_mask_function):
        skips = {"allow_is_causal_skip": True, "allow_is_bidirectional_skip": True}
        assert isinstance(make_mask(1, 4, 4, mask_function=function, **skips), MaskTensor)


def test_a_padding_mask_of_another_shape_is_refused():
    with pytest.raises(
        ValueError, match=r"attention_mask: expected \(B, Tk\), or .* got a bool tensor of shape"
    ):
        make_mask(1, 4, 4, attention_mask=torch.ones(1, 4, 4, dtype=torch.bool))


# ---------------------------------------------------------------------------- what models do with masks


@pytest.fixture
def mask():
    return MaskTensor(Causal(offset=2), (2, 1, 3, 5), torch.float32, torch.device("cpu"))


@pytest.fixture
def expected():
    later = torch.arange(5) > torch.arange(3)[:, None] + 2
    return torch.zeros(2, 1, 3, 5).masked_fill(later, LEAST)


KEEPING = {
    "detach": lambda m: m.detach(),
    "clone": lambda m: m.clone(),
    "contiguous": lambda m: m.contiguous(),
    "to the same": lambda m: m.to(device="cpu", dtype=torch.float32),
    "all of it": lambda m: m[:, :, :, :5],
    "more than all": lambda m: m[:, :, :3, :99],
    "the same view": lambda m: m.view(2, 1, 3, 5),
    "expand to itself": lambda m: m.expand(2, -1, 3, 5),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("name", KEEPING)
def test_handing_on_keeps_the_mask(mask, expected, name):
    kept = KEEPING[name](mask)
    assert isinstance(kept, MaskTensor) and kept.mask is mask.mask
    assert torch.equal(kept.written(), expected)


CHANGING = {
    "slice of keys": lambda m: m[:, :, :, :3],
    "slice from": lambda m: m[..., 1:],
    "every other": lambda m: m[..., ::2],
    "a row": lambda m: m[:, :, -1:, :],
    "no heads": lambda m: m[:, 0],
    "index": lambda m: m[torch.tensor([1, 0, 1])],
    "add": lambda m: m + torch.ones(2, 4, 3, 5),
    "added": lambda m: torch.ones(2, 4, 3, 5) + m,
    "heads": lambda m: m.expand(2, 4, 3, 5),
    "flat": lambda m: m.view(2, 15),
    "repeat": lambda m: m.repeat(2, 1, 1, 1),
    "cat": lambda m: torch.cat([m, m], -1),
    "compare": lambda m: m < 0,
    "where": lambda m: torch.where(m < 0, 1.0, 2.0),
    "fill": lambda m: m.masked_fill(m < 0, -1.0),
    "half": lambda m: m.to(torch.float64),
    "bool": lambda m: m.bool(),
    "transpose": lambda m: m.transpose(2, 3),
    "softmax": lambda m: (torch.ones(2, 1, 3, 5) + m).softmax(-1),
    "minimum": lambda m: torch.minimum(m, torch.zeros(())),
}


@pytest.mark.parametrize("name", CHANGING)
def test_any_other_operation_is_that_of_the_tensor_it_stands_for(mask, expected, name):
    found = CHANGING[name](mask)
    assert type(found) is torch.Tensor
    assert torch.equal(found, CHANGING[name](expected))


WRITING = {
    "add_": lambda m: m.add_(1.0),
    "item": lambda m: m.__setitem__((..., 0), 3.0),
    "part": lambda m: m[:, :, 1].fill_(2.0),
    "copy_": lambda m: m.copy_(torch.ones(5)),
    "a view": lambda m: m.detach().mul_(0.5),
    "a view of a view": lambda m: m.view(2, 3, 5)[0].zero_(),
    "out": lambda m: torch.add(torch.ones(2, 1, 3, 5), 1.0, out=m),
}


@pytest.mark.parametrize("name", WRITING)
@pytest.mark.parametrize("inference", ["never", "later", "always"])
def test_what_a_model_writes_into_it_counts(mask, expected, name, inference):
    with torch.inference_mode(inference == "always"):
        mask, expected = mask._copy(), expected.clone()
        view = mask.detach()
    with torch.inference_mode(inference != "never"):
        WRITING[name](mask)
        WRITING[name](expected)
        assert torch.equal(mask + 0, expected)
        assert torch.equal(view + 0, expected)
        assert mask.changed() and view.changed()


def test_a_copy_does_not_see_what_is_written_later(mask, expected):
    early, late = mask.clone(), None
    mask.add_(1.0)
    late = mask.clone()
    mask.add_(1.0)
    assert torch.equal(early + 0, expected) and not early.changed()
    assert torch.equal(late + 0, expected + 1) and late.changed()


def test_adding_it_in_place_leaves_it_as_it_is(mask, expected):
    assert torch.equal(torch.ones(2, 4, 3, 5).add_(mask), 1 + expected.expand(2, 4, 3, 5))
    assert torch.equal(mask.written(), expected) and not mask.changed()


def test_it_prints_and_pickles(mask, expected):
    assert "MaskTensor(Causal" in repr(mask) and "(2, 1, 3, 5)" in repr(mask)
    assert torch.equal(pickle.loads(pickle.dumps(mask)), expected)
