"""What ``plan`` says: the kernel that runs, a reason for each other one, the mask's form, the work of its pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard import _plan, _short, attention, plan
from regard.biases import Alibi
from regard.masks import Causal, Dense, Documents, Padding, Prefix, Rows, Rule, Window
from regard.normalizers import Entmax15, Softmax
from regard.scores import Additive, Dot, Modified

B, H, HKV, TQ, TK, D, DV = 2, 4, 2, 60, 80, 8, 5
Q, K, V = torch.randn(B, H, TQ, D), torch.randn(B, HKV, TK, D), torch.randn(B, HKV, TK, DV)
SMALL = torch.randn(1, 2, 6, 4)
SCATTERED = torch.rand(TQ, TK, generator=torch.Generator().manual_seed(0)) > 0.5
KEEP = torch.rand(B, TK, generator=torch.Generator().manual_seed(1)) > 0.5

CALLS: dict[str, tuple[tuple[Tensor, ...], dict[str, Any], str]] = {
    "small": ((SMALL, SMALL, SMALL), {}, "direct"),
    "small with a mask": ((SMALL, SMALL, SMALL), {"mask": Causal()}, "direct"),
    "small with a bias": ((SMALL, SMALL, SMALL), {"bias": Alibi()}, "native"),
    "small, float64": ((SMALL.double(),) * 3, {"bias": Alibi()}, "reference"),
    "long, float64": ((Q.double(), K.double(), V.double()), {}, "tiled"),
    "grouped": ((Q, K, V), {}, "native"),
    "additive": ((Q, K, V), {"score": Additive(torch.ones(D))}, "native"),
    "entmax": ((Q, K, V), {"normalize": Entmax15()}, "native"),
    "bias": ((Q, K, V), {"bias": Alibi(alignment="upper_left")}, "native"),
    "callable": ((Q, K, V), {"score": lambda q, k: q @ k.mT}, "inline"),
    "normaliser": ((Q, K, V), {"normalize": torch.nn.Softmax(-1)}, "inline"),
    "rule": ((Q, K, V), {"mask": Rule(lambda b, h, q, k: q >= k)}, "inline"),
    "modified": ((Q, K, V), {"score": Modified(Dot(), lambda s, b, h, q, k: s)}, "inline"),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_kernel_that_runs_is_named_and_every_other_one_has_a_reason(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, keywords, kernel = CALLS[name]
    made = plan(*tensors, **keywords)
    names = [each.name for each in _plan.KERNELS]
    assert made.kernel == kernel
    assert set(made.reasons) == set(names) - {kernel} and all(len(text) > 8 for text in made.reasons.values())
    ran = []

    def recorded(each: _plan.Kernel) -> _plan.Kernel:
        def run(call: Any, lse: bool) -> Any:
            ran.append(each.name)
            return each.run(call, lse)

        return each._replace(run=run)

    monkeypatch.setattr(_plan, "KERNELS", tuple(recorded(each) for each in _plan.KERNELS))
    monkeypatch.setattr(_short, "attend", lambda *_: None)
    attention(*tensors, **keywords)
    assert ran == [kernel]


@pytest.mark.parametrize("name", CALLS)
def test_a_forced_kernel_is_the_plan_or_is_refused_with_its_reason(name: str) -> None:
    tensors, keywords, chosen = CALLS[name]
    reasons = plan(*tensors, **keywords).reasons
    for kernel in ("direct", "native", "tiled", "inline", "reference"):
        with _plan.use_kernel(kernel):
            if kernel == chosen or kernel == "reference" or "comes first" in reasons[kernel]:
                assert plan(*tensors, **keywords).kernel == kernel
            else:
                with pytest.raises(ValueError, match="kernel") as caught:
                    attention(*tensors, **keywords)
                assert reasons[kernel] in str(caught.value)


def test_kernels_that_are_forced_nest_and_end() -> None:
    with _plan.use_kernel("tiled"):
        with _plan.use_kernel("reference"):
            assert plan(Q, K, V).kernel == "reference"
        assert plan(Q, K, V).kernel == "tiled"
        with pytest.raises(RuntimeError, match="stop"), _plan.use_kernel("inline"):
            raise RuntimeError("stop")
        assert plan(Q, K, V).kernel == "tiled"
    assert plan(SMALL, SMALL, SMALL).kernel == "direct"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_what_needs_gradients_or_is_in_forward_mode_changes_the_plan() -> None:
    leaf = SMALL.clone().requires_grad_()
    assert "gradient" in plan(leaf, SMALL, SMALL).reasons["direct"]
    with torch.no_grad():
        assert plan(leaf, SMALL, SMALL).kernel == "direct"
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(SMALL, SMALL)
        for mask in (None, Causal()):
            made = plan(dual, SMALL, SMALL, mask)
            assert made.kernel == "reference" and "forward-mode" in made.reasons["tiled"]
            attention(dual, SMALL, SMALL, mask)


FORMS: dict[str, tuple[Any, str]] = {
    "none": (None, "all pairs"),
    "causal": (Causal("lower_right"), "1 run a row"),
    "window": (Window(5, 2, "upper_left"), "1 run a row"),
    "causal and padding": (Causal("lower_right") & Padding(torch.tensor([20, 40])), "1 run a row"),
    "left padding": (Padding(start=torch.tensor([3, 0])), "1 run a row"),
    "documents": (Documents(torch.arange(TQ) // 7, torch.arange(TK) // 9), "1 run a row"),
    "rows": (Rows(torch.arange(TQ), torch.arange(TQ) + 3), "1 run a row"),
    "prefix LM": (Causal("lower_right") | Prefix(9), "2 runs a row"),
    "window or prefix": (Window(4, 0, "lower_right") | Prefix(20), "2 runs a row"),
    "not window": (~Window(4, 4, "upper_left"), "2 runs a row"),
    "nothing": (Window(2, -1, "upper_left") & ~Window(2, -1), ""),
    "three runs": (Window(0, 0, "upper_left") | Prefix(2) | Padding(start=35), "bool tensor"),
    "interleaved documents": (Documents(torch.arange(TQ) % 3, torch.arange(TK) % 3), "bool"),
    "bool": (SCATTERED, "bool tensor with skipped tiles"),
    "not bool": (~Dense(SCATTERED), "bool tensor with skipped tiles"),
    "tokens": (Padding.of(KEEP), "bool keys"),
    "causal and tokens": (Causal("lower_right") & Padding.of(KEEP), "bool keys"),
    "causal and bool": (Causal("lower_right") & Dense(SCATTERED), "bool tensor"),
    "offset a sample": (Causal(offset=torch.tensor([-40, 3])), "1 run a row"),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_form_of_the_mask_and_the_work_of_its_pairs(name: str) -> None:
    mask, form = FORMS[name]
    made = plan(Q, K, V, mask)
    whole = torch.ones(B, H, TQ, TK, dtype=torch.bool)
    if mask is not None:
        mask = Dense(mask) if isinstance(mask, Tensor) else mask
        whole = mask.materialize(TQ, TK, batch=B, heads=H)
    assert form in made.mask
    assert made.pairs == int(whole.sum())
    assert made.flops == 2 * made.pairs * (D + DV)


@settings(max_examples=50)
@given(
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(-15, 15),
    st.integers(-3, 8),
    st.integers(3, 9),
    st.integers(0, 12),
    st.sampled_from(["|", "&", "~", "~|"]),
)
def test_pairs_are_counted_exactly(
    Tq: int, Tk: int, offset: int, left: int, right: int, prefix: int, how: str
) -> None:
    window, first = Window(left, right, offset=offset), Prefix(min(prefix, Tk))
    mask = {"|": window | first, "&": window & first, "~": ~window, "~|": ~window | first}[how]
    q, k = torch.zeros(Tq, 4), torch.zeros(Tk, 4)
    assert plan(q, k, k, mask).pairs == int(mask.materialize(Tq, Tk).sum())


def test_a_rule_is_counted_as_all_pairs_and_says_so() -> None:
    made = plan(Q, K, V, Rule(lambda b, h, q, k: q >= k))
    assert made.pairs == B * H * TQ * TK and "rule" in made.mask


def test_bytes_are_those_of_query_key_value_and_output() -> None:
    for dtype, size in ((torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2)):
        made = plan(Q.to(dtype), K.to(dtype), V.to(dtype))
        expected = Q.numel() + K.numel() + V.numel() + B * H * TQ * DV
        assert made.bytes == expected * size and str(dtype).removeprefix("torch.") in made.shapes


def test_shapes_alone_count() -> None:
    """Tensors on the meta device have no numbers in them."""
    q, k, v = (x.to("meta") for x in (Q, K, V))
    for mask in (None, Causal("lower_right"), Window(3, 0, "upper_left") | Prefix(2)):
        made = plan(q, k, v, mask)
        assert made.kernel == "tiled" and "meta" in made.shapes
        assert made.pairs == plan(Q, K, V, mask).pairs
    assert attention(q, k, v, Causal("lower_right")).shape == (B, H, TQ, DV)


def test_nothing_is_computed_or_drawn() -> None:
    def never(*_: Any) -> Tensor:
        raise AssertionError("plan called a function of the user's")

    state = torch.get_rng_state()
    plan(Q, K, V, Rule(never), score=never, normalize=never, dropout_p=0.0)
    assert torch.equal(torch.get_rng_state(), state)


def test_it_prints_everything() -> None:
    text = str(plan(Q, K, V, Causal("lower_right"), normalize=Softmax(0.0)))
    for part in (
        "B 2, H 4, Hkv 2, Tq 60, Tk 80, D 8, Dv 5",
        "tiled",
        "direct",
        "inline",
        "reference",
        "1 run",
        "FLOPs",
    ):
        assert part in text
    assert max(len(line) for line in text.splitlines()) <= 120


def test_every_kernel_of_the_list_is_told_to_the_doctor() -> None:
    assert [name for name, _, _ in _plan.kernels()] == [kernel.name for kernel in _plan.KERNELS]
    assert all(can and about for _, can, about in _plan.kernels())
