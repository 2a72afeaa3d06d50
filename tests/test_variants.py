"""Every variant against its paper's formula, outputs and gradients, in float64; alignment; the masks' rules."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import Mechanism, attention, variants
from regard.variants import _catalogue as catalogue
from tests.variant_formulas import CASES, B, D, H, T, draw, inputs


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_formula_of_its_paper_forward_and_backward(name):
    torch.manual_seed(len(name))
    query, key, value, parameters = inputs(name)
    mechanism, weights = CASES[name](query, key, *parameters)
    spread = value.repeat_interleave(H // value.shape[1], 1)
    expected = weights @ spread
    output = attention(query, key, value, **mechanism)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
    leaves = [query, key, value, *parameters]
    direction = torch.randn_like(output)
    wanted = torch.autograd.grad(expected, leaves, direction, retain_graph=True)
    found = torch.autograd.grad(output, leaves, direction)
    for leaf, ours, theirs in zip(["query", "key", "value", *range(9)], found, wanted, strict=False):
        assert theirs.abs().max() > 0 or name == "linear_concat", f"{leaf}: a gradient that cannot fail"
        torch.testing.assert_close(
            ours, theirs, rtol=1e-9, atol=1e-11, msg=lambda m, leaf=leaf: f"{leaf}: {m}"
        )


def test_every_variant_has_a_case_and_a_line_in_the_table():
    listed = [entry.word for section in (*catalogue.SECTIONS, catalogue.SEVERAL) for entry in section.entries]
    functions = set(variants.__all__) - {"qk_norm_scale"}
    assert len(listed) == len(set(listed))
    assert set(listed) == functions
    assert functions - {"differential"} <= set(CASES)
    assert len(functions) >= 24


@pytest.mark.parametrize("name", CASES)
def test_it_has_a_name_a_formula_and_a_paper_with_its_year(name):
    query, key, _, parameters = inputs(name)
    mechanism, _ = CASES[name](query, key, *parameters)
    assert isinstance(mechanism, Mechanism)
    assert mechanism.name and mechanism.formula
    assert any(
        year.isdigit() and len(year) == 4
        for year in mechanism.paper.replace(";", ",").replace(",", " ").split()
    )


def test_names_are_distinct():
    names = [entry.example().name for section in catalogue.SECTIONS for entry in section.entries]
    assert len(names) == len(set(names))


# ---------------------------------------------------------------------------- where queries stand

N = 3  # the last queries of T


def _placed(name, q, **place):
    torch.manual_seed(5)
    r1, r2, table, gates = (draw(*s, positive=True) for s in ((H,), (H,), (H, 5), (B, H, T)))
    buckets, vectors, u, v = draw(8, H), draw(2 * T + 1, D), draw(H, D), draw(H, D)
    build = {
        "causal": lambda: variants.causal(**place),
        "sliding_window": lambda: variants.sliding_window(3, **place),
        "streaming": lambda: variants.streaming(2, 2, **place),
        "dilated_window": lambda: variants.dilated_window(2, 2, **place),
        "strided_sparse": lambda: variants.strided_sparse(3, **place),
        "fixed_sparse": lambda: variants.fixed_sparse(3, 1, **place),
        "alibi": lambda: variants.alibi(**place),
        "relative": lambda: variants.relative(table, **place),
        "t5": lambda: variants.t5(buckets, 6, **place),
        "t5_decoder": lambda: variants.t5(buckets, 6, bidirectional=False, **place),
        "kerple_log": lambda: variants.kerple_log(r1, r2, T, **place),
        "kerple_power": lambda: variants.kerple_power(r1, r2.clamp(max=2), T, **place),
        "forgetting": lambda: variants.forgetting(-gates, **place),
        "shaw": lambda: variants.shaw(q, vectors, **place),
        "transformer_xl": lambda: variants.transformer_xl(q, u, v, vectors, **place),
    }
    return build if name is None else build[name]()


@pytest.mark.parametrize("name", _placed(None, None))
def test_the_last_queries_alone_give_the_last_rows_of_all(name):
    torch.manual_seed(1)
    query, key, value = draw(B, H, T, D), draw(B, H, T, D), draw(B, H, T, 5)
    whole = attention(query, key, value, **_placed(name, query))
    last = query[:, :, -N:]
    some = attention(last, key, value, **_placed(name, last, offset=T - N))
    torch.testing.assert_close(some, whole[:, :, -N:], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", _placed(None, None))
def test_lengths_that_differ_need_an_alignment(name):
    last, key = draw(B, H, N, D), draw(B, H, T, D)
    with pytest.raises(ValueError, match="alignment"):
        attention(last, key, key, **_placed(name, last))


@pytest.mark.parametrize(
    "name", ["causal", "sliding_window", "streaming", "alibi", "kerple_log", "forgetting"]
)
def test_lower_right_is_the_offset_of_the_last_queries(name):
    last, key = draw(B, H, N, D), draw(B, H, T, D)
    one = attention(last, key, key, **_placed(name, last, alignment="lower_right"))
    other = attention(last, key, key, **_placed(name, last, offset=T - N))
    assert torch.equal(one, other)


@given(
    Tq=st.integers(1, 9),
    more=st.integers(0, 9),
    window=st.integers(1, 5),
    sinks=st.integers(0, 1),
    step=st.integers(1, 4),
    data=st.data(),
)
def test_the_masks_are_their_rules_pair_by_pair(Tq, more, window, sinks, step, data):
    Tk = Tq + more
    offset = data.draw(st.integers(0, more))
    summary = data.draw(st.integers(1, step))
    rules = [
        (variants.causal(offset=offset), lambda p, j: j <= p),
        (variants.sliding_window(window, offset=offset), lambda p, j: p - window < j <= p),
        (
            variants.streaming(window, sinks, offset=offset),
            lambda p, j: j <= p and (p - window < j or j < sinks),
        ),
        (
            variants.dilated_window(window, step, offset=offset),
            lambda p, j: p - j in range(0, window * step, step),
        ),
        (
            variants.strided_sparse(step, offset=offset),
            lambda p, j: j <= p and (p - j < step or (p - j) % step == 0),
        ),
        (
            variants.fixed_sparse(step, summary, offset=offset),
            lambda p, j: j <= p and (p // step == j // step or j % step >= step - summary),
        ),
    ]
    for mechanism, rule in rules:
        found = mechanism["mask"].materialize(Tq, Tk)
        expected = [[bool(rule(i + offset, j)) for j in range(Tk)] for i in range(Tq)]
        assert found.tolist() == expected, mechanism.name
