"""The contracts of CONTRACTS.md, held by every kernel: a new kernel joins by one line of KERNELS."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard import attention, attention_weights, attention_with_lse, merge, observe
from regard._plan import use_kernel
from regard.masks import Causal, Dense, Documents, Padding, Prefix, Rows, Rule, Window
from regard.normalizers import Relu, Sigmoid, Softmax
from regard.scores import Additive, Distance, Dot
from tests.core import cases

KERNELS = ("reference", "tiled", "inline")
COMBINATIONS = [
    *[(score, "softmax", "causal", "none") for score in cases.SCORES],
    *[("dot", normalize, "offset a sample", "none") for normalize in cases.NORMALIZERS],
    *[("dot scale", "softmax", mask, "none") for mask in cases.MASKS],
    *[("dot", "softmax", "none", bias) for bias in cases.BIASES],
    ("additive a head", "entmax a head", "window or prefix", "per key and relative"),
    ("dot scale a head, soft-cap", "softmax sink", "causal and documents", "alibi"),
    ("distance", "sparsemax", "dense a head", "relative"),
    ("cosine", "sigmoid", "tokens", "tensor"),
]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(kernel: str, *arguments: Any, **keywords: Any) -> Tensor:
    with use_kernel(kernel):
        return attention(*arguments, **keywords)


def gradients(output: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    upstream = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).sin().view(output.shape)
    found = torch.autograd.grad(output, leaves, upstream, allow_unused=True)
    return [
        torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)
    ]


def close(one: Tensor, other: Tensor, bound: float = 1e-11) -> None:
    assert one.shape == other.shape
    torch.testing.assert_close(one, other, rtol=bound, atol=bound, equal_nan=True)


# ------------------------------------------------------------------ 1. definition


@pytest.mark.parametrize("names", COMBINATIONS, ids=" / ".join)
def test_a_kernel_is_the_definition_outputs_and_gradients(kernel: str, names: tuple[str, ...]) -> None:
    found = []
    for name in ("reference", kernel):
        case, (q, k, v) = cases.make(*names), cases.inputs()
        output = run(name, q, k, v, **case.keywords)
        found.append([output, *gradients(output, [q, k, v, *case.learned])])
    for expected, got in zip(*found, strict=True):
        close(got, expected, 1e-9)


@pytest.mark.parametrize("p", [0.4, 1.0])
def test_dropout_drops_the_same_pairs_on_every_kernel(kernel: str, p: float) -> None:
    q, k, v = cases.inputs()
    torch.manual_seed(5)
    expected = run("reference", q, k, v, dropout_p=p)
    torch.manual_seed(5)
    output = run(kernel, q, k, v, dropout_p=p)
    close(output, expected)
    for one, other in zip(gradients(output, [q, k, v]), gradients(expected, [q, k, v]), strict=True):
        close(one, other)


# ------------------------------------------------------------------ 2, 3. masks and alignment


def test_true_means_may_attend(kernel: str) -> None:
    q, k, v = cases.inputs()
    mask = torch.zeros(cases.TQ, cases.TK, dtype=torch.bool)
    mask[:, 4] = True
    expected = v.repeat_interleave(2, 1)[:, :, 4:5].expand(-1, -1, cases.TQ, -1)
    close(run(kernel, q, k, v, mask), expected)


@pytest.mark.parametrize("offset", [0, 2, -3, 40, -40])
def test_offset_shifts_the_diagonal(kernel: str, offset: int) -> None:
    q, k, v = cases.inputs()
    i, j = torch.arange(cases.TQ)[:, None], torch.arange(cases.TK)
    close(run(kernel, q, k, v, Causal(offset=offset)), run(kernel, q, k, v, j <= i + offset))


def test_upper_left_is_0_and_lower_right_is_the_difference(kernel: str) -> None:
    q, k, v = cases.inputs()
    for name, offset in (("upper_left", 0), ("lower_right", cases.TK - cases.TQ)):
        close(run(kernel, q, k, v, Causal(name)), run(kernel, q, k, v, Causal(offset=offset)))


def test_a_window_is_inclusive_at_both_ends(kernel: str) -> None:
    q, k, v = cases.inputs()
    i, j = torch.arange(cases.TQ)[:, None], torch.arange(cases.TK)
    for left, right in ((3, 0), (0, 0), (2, 2), (None, 1), (1, None), (-1, 4), (3, -2)):
        inside = torch.ones(cases.TQ, cases.TK, dtype=torch.bool)
        if left is not None:
            inside &= j >= i - left
        if right is not None:
            inside &= j <= i + right
        close(run(kernel, q, k, v, Window(left, right, "upper_left")), run(kernel, q, k, v, inside))


# ------------------------------------------------------------------ 4. empty rows


@pytest.mark.parametrize("normalize", cases.NORMALIZERS)
def test_a_row_that_may_attend_to_nothing_is_zero(kernel: str, normalize: str) -> None:
    case, (q, k, v) = cases.make("dot", normalize, "none", "none"), cases.inputs()
    mask = torch.ones(cases.TQ, cases.TK, dtype=torch.bool)
    mask[2], mask[5] = False, False
    output = run(kernel, q, k, v, mask, **_without_mask(case))
    assert torch.equal(output[:, :, [2, 5]], torch.zeros_like(output[:, :, [2, 5]]))
    grads = gradients(output, [q, k, v, *case.learned])
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert not grads[0][:, :, [2, 5]].any()


def _without_mask(case: cases.Case) -> dict[str, Any]:
    return {name: value for name, value in case.keywords.items() if name != "mask"}


@pytest.mark.parametrize("normalize", cases.NORMALIZERS)
def test_no_keys_at_all_gives_zeros(kernel: str, normalize: str) -> None:
    case, (q, k, v) = cases.make("dot", normalize, "none", "none"), cases.inputs()
    output = run(kernel, q, k[:, :, :0], v[:, :, :0], **_without_mask(case))
    assert torch.equal(output, torch.zeros(cases.B, cases.H, cases.TQ, cases.DV, dtype=torch.float64))
    (grad,) = torch.autograd.grad(output.sum(), q)
    assert not grad.any()


def test_a_row_emptied_by_a_bias_is_an_empty_row(kernel: str) -> None:
    q, k, v = cases.inputs()
    bias = torch.zeros(cases.TQ, cases.TK, dtype=torch.float64)
    bias[3] = -torch.inf
    bias[0, 1] = -torch.inf
    bias.requires_grad_()
    with use_kernel(kernel):
        output, lse = attention_with_lse(q, k, v, bias=bias)
    assert not output[:, :, 3].any() and bool((lse[:, :, 3] == -torch.inf).all())
    open_lse = lse[:, :, [0, 1, 2, 4, 5, 6]]
    grads = torch.autograd.grad(output.sum() + open_lse.sum(), [q, k, v, bias])
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert not grads[3][3].any() and grads[3][0, 1] == 0


def test_an_empty_row_has_lse_minus_infinity_and_a_sink_changes_nothing(kernel: str) -> None:
    q, k, v = cases.inputs()
    for normalize in (Softmax(), Softmax(0.3)):
        with use_kernel(kernel):
            output, lse = attention_with_lse(q, k, v, Causal(offset=-3), normalize=normalize)
        assert bool((lse[:, :, :3] == -torch.inf).all()) and bool(torch.isfinite(lse[:, :, 3:]).all())
        assert not output[:, :, :3].any()


# ------------------------------------------------------------------ 5. nothing leaks


POISON = [torch.nan, torch.inf, -torch.inf, 1e300]


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("score", ["dot", "bilinear", "cosine", "additive", "distance", "concat"])
def test_a_blocked_pair_carries_nothing(kernel: str, score: str, poison: float) -> None:
    """Key and value 6 are seen from nowhere, query row 1 sees nothing: what is in them must not show anywhere."""
    results = []
    for value in (0.5, poison):
        case, (q, k, v) = cases.make(score, "softmax", "none", "none"), cases.inputs()
        with torch.no_grad():
            k[:, :, 6], v[:, :, 6], q[:, :, 1] = value, value, value
        mask = torch.ones(cases.TQ, cases.TK, dtype=torch.bool)
        mask[:, 6], mask[1] = False, False
        output = run(kernel, q, k, v, mask, **_without_mask(case))
        results.append([output, *gradients(output, [q, k, v, *case.learned])])
    for clean, poisoned in zip(*results, strict=True):
        assert torch.isfinite(poisoned).all()
        close(poisoned, clean, 1e-12)


@pytest.mark.parametrize("normalize", ["softmax", "softmax sink", "sparsemax", "entmax15", "entmax"])
@pytest.mark.parametrize("what", ["key", "value", "query"])
def test_only_the_rows_that_see_it_are_not_finite(kernel: str, normalize: str, what: str) -> None:
    case, (q, k, v) = cases.make("dot", normalize, "none", "none"), cases.inputs()
    clean = run(kernel, q, k, v, Causal("upper_left"), **_without_mask(case)).detach()
    with torch.no_grad():
        {"key": k, "value": v, "query": q}[what][:, :, 4] = torch.nan
    output = run(kernel, q, k, v, Causal("upper_left"), **_without_mask(case))
    hit = torch.tensor([row == 4 if what == "query" else row >= 4 for row in range(cases.TQ)])
    close(output[:, :, ~hit], clean[:, :, ~hit], 1e-12)
    if what != "value" or normalize.startswith("softmax"):
        assert not torch.isfinite(output[:, :, hit]).any()
    if what == "key":
        (grad,) = gradients(output[:, :, ~hit], [q])
        assert torch.isfinite(grad[:, :, ~hit]).all()


def test_an_infinite_key_shows_even_where_its_score_is_minus_infinity(kernel: str) -> None:
    q, k, v = torch.ones(1, 1, 3, 2), torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2)
    k[0, 0, 2] = -torch.inf
    assert run(kernel, q, k, v).isnan().all()


def test_a_row_that_overflows_reaches_no_key_that_it_may_not_see(kernel: str) -> None:
    q, k, v = cases.inputs()
    with torch.no_grad():
        q[:, :, 5], k[:, :, 2] = 1e200, 1e200
    output = run(kernel, q, k, v, Causal("upper_left"))
    grads = gradients(output, [q, k, v])
    assert not torch.isfinite(output[:, :, 5]).any()
    assert torch.isfinite(grads[1][:, :, 6:]).all() and torch.isfinite(grads[2][:, :, 6:]).all()


@pytest.mark.parametrize("normalize", ["softmax", "sigmoid", "relu", "sparsemax"])
def test_a_bias_of_minus_infinity_blocks_a_pair_whose_score_overflows(kernel: str, normalize: str) -> None:
    case, (q, k, v) = cases.make("dot", normalize, "none", "none"), cases.inputs()
    bias = torch.zeros(cases.TQ, cases.TK, dtype=torch.float64)
    bias[2, 3] = -torch.inf
    with torch.no_grad():
        q[:, :, 2], k[:, :, 3] = 1e200, 1e200
    allowed = bias == 0
    rows = [0, 1, 2]
    by_bias = run(kernel, q[:, :, rows], k, v, bias=bias[rows], **_without(case, "bias", "mask"))
    by_mask = run(kernel, q[:, :, rows], k, v, allowed[rows], **_without(case, "mask"))
    close(by_bias[:, :, 2], by_mask[:, :, 2])


def _without(case: cases.Case, *names: str) -> dict[str, Any]:
    return {name: value for name, value in case.keywords.items() if name not in names}


def test_distances_keep_their_digits_far_from_the_origin(kernel: str) -> None:
    """Clusters of queries and keys, far apart: differences are small where the numbers are large."""
    generator = torch.Generator().manual_seed(0)
    center = (torch.randn(8, 1, 8, generator=generator) * 1e4).expand(8, 8, 8).reshape(64, 8)
    base = [center + torch.randn(64, 8, generator=generator) for _ in range(2)] + [
        torch.randn(64, 8, generator=generator)
    ]
    found = []
    for dtype in (torch.float32, torch.float64):
        q, k, v = (x.to(dtype)[None, None].requires_grad_() for x in base)
        output = run(kernel, q, k, v, score=Distance())
        found.append([output, *torch.autograd.grad(output.square().sum(), (q, k, v))])
    for got, exact in zip(*found, strict=True):
        assert (got - exact).norm() <= 4e-6 * exact.norm()


# ------------------------------------------------------------------ 6, 7. grouped heads, widths, scales


def test_grouped_heads_read_key_head_h_over_groups(kernel: str) -> None:
    q, k, v = cases.inputs()
    groups = cases.H // cases.HKV
    spread = run(kernel, q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
    close(run(kernel, q, k, v), spread)


@pytest.mark.parametrize("scale", [0, -0.7, 2, torch.tensor(0.3), torch.tensor([0.1, -1.0, 0.0, 2.0])])
def test_any_finite_scale_is_taken_as_it_is(kernel: str, scale: Any) -> None:
    q, k, v = cases.inputs(grouped=False)
    factor = scale.double()[:, None, None] if isinstance(scale, Tensor) and scale.ndim else scale
    expected = torch.softmax(q @ k.mT * factor, -1) @ v
    close(run(kernel, q, k, v, score=Dot(scale)), expected, 1e-7 if isinstance(scale, Tensor) else 1e-11)


# ------------------------------------------------------------------ 10, 11. looking, bits, inputs


@pytest.mark.parametrize("mask", ["none", "causal", "dense a head"])
def test_looking_changes_no_bit(kernel: str, mask: str) -> None:
    case, (q, k, v) = cases.make("dot", "softmax", mask, "relative"), cases.inputs()
    with use_kernel(kernel):
        torch.manual_seed(3)
        expected = attention(q, k, v, **case.keywords, dropout_p=0.2)
        torch.manual_seed(3)
        seen = observe(q, k, v, **case.keywords, dropout_p=0.2, topk=2, pool=3)
    assert torch.equal(seen.output, expected)


def test_the_same_inputs_give_the_same_bits_and_are_never_written(kernel: str) -> None:
    case, (q, k, v) = (
        cases.make("dot scale", "softmax sink", "dense a head", "per key and relative"),
        cases.inputs(),
    )
    before = [x.detach().clone() for x in (q, k, v, *case.learned)]
    runs = []
    for _ in range(2):
        output = run(kernel, q, k, v, **case.keywords)
        runs.append([output, *gradients(output, [q, k, v, *case.learned])])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(before, (q, k, v, *case.learned), strict=True))


# ------------------------------------------------------------------ 12. pieces merge


@pytest.mark.parametrize("sink", [None, 0.4])
def test_pieces_merge_with_gradients_through_output_and_lse(kernel: str, sink: float | None) -> None:
    q, k, v = cases.inputs()
    mask = torch.rand(cases.TQ, cases.TK, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[4] = False
    with use_kernel(kernel):
        whole = attention_with_lse(q, k, v, mask, normalize=Softmax(sink))
        cuts = [slice(0, 4), slice(4, 4), slice(4, cases.TK)]
        pieces = [attention_with_lse(q, k[:, :, cut], v[:, :, cut], mask[:, cut]) for cut in cuts]
    merged = merge([piece[0] for piece in pieces], [piece[1] for piece in pieces], sink)
    close(merged[0], whole[0])
    close(merged[1], whole[1])
    alive = torch.tensor([row != 4 for row in range(cases.TQ)])
    grads = [
        torch.autograd.grad(output.sin().sum() + lse[:, :, alive].cos().sum(), [q, k, v])
        for output, lse in (whole, merged)
    ]
    for one, other in zip(*grads, strict=True):
        close(one, other)


# ------------------------------------------------------------------ zero lengths, strides, leading dimensions


@pytest.mark.parametrize("shape", ["Tq", "D", "Dv", "B", "H"])
@pytest.mark.parametrize("normalize", [Softmax(), Relu()])
def test_zero_sizes(kernel: str, shape: str, normalize: Any) -> None:
    sizes = {"B": 2, "H": 2, "Tq": 3, "Tk": 4, "D": 5, "Dv": 6} | {shape: 0}
    q = torch.randn(sizes["B"], sizes["H"], sizes["Tq"], sizes["D"], requires_grad=True)
    k = torch.randn(sizes["B"], sizes["H"], sizes["Tk"], sizes["D"], requires_grad=True)
    v = torch.randn(sizes["B"], sizes["H"], sizes["Tk"], sizes["Dv"], requires_grad=True)
    output = run(kernel, q, k, v, Window(2, 2, "upper_left"), normalize=normalize)
    assert output.shape == (sizes["B"], sizes["H"], sizes["Tq"], sizes["Dv"])
    output.sum().backward()
    assert all(x.grad is not None and torch.isfinite(x.grad).all() for x in (q, k, v))


def test_any_strides_and_leading_dimensions(kernel: str) -> None:
    q = torch.randn(2, 7, 3, 4, 5).permute(0, 2, 3, 1, 4)
    k = torch.randn(1, 3, 9, 4, 5).transpose(2, 3)
    v = torch.randn(2, 1, 4, 9, 12)[..., ::2]
    assert q.shape[:3] == (2, 3, 4)
    expected = torch.softmax(q @ k.mT / 5**0.5, -1) @ v
    close(run(kernel, q, k, v), expected, 2e-6)


@pytest.mark.parametrize("rank", [2, 3])
def test_fewer_dimensions(kernel: str, rank: int) -> None:
    q, k, v = (torch.randn(*[3][: rank - 2], length, 4) for length in (5, 6, 6))
    mask = torch.rand(5, 6) > 0.3
    mask[:, 0] = True
    expected = torch.softmax((q @ k.mT / 2).masked_fill(~mask, -torch.inf), -1) @ v
    close(run(kernel, q, k, v, mask), expected, 2e-6)


# ------------------------------------------------------------------ skipping


def test_keys_that_a_mask_empties_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.kernels import _stages

    seen = []
    original = _stages.score

    def counting(problem: Any, q: Tensor, k: Tensor, *rest: Any, **more: Any) -> Any:
        seen.append(q.shape[0] * q.shape[1] * k.shape[1])
        return original(problem, q, k, *rest, **more)

    monkeypatch.setattr(_stages, "score", counting)
    T = 2048
    q = torch.randn(1, 1, T, 8)
    scattered = torch.zeros(T, T, dtype=torch.bool)
    scattered[:, ::512] = True
    ids = torch.arange(T) // 128
    limits = {
        "causal": (Causal(), 0.6),
        "window": (Window(63, 0), 0.1),
        "window or prefix": (Window(63, 0) | Prefix(8), 0.1),
        "documents": (Documents(ids) & Causal(), 0.2),
        "padding": (Padding(torch.tensor([256])), 0.13),
        "rows": (Rows(torch.full((T,), 100), torch.full((T,), 164)), 0.04),
        "scattered bool": (Dense(scattered), 0.13),
        "causal bool": (Dense(torch.ones(T, T, dtype=torch.bool).tril()), 0.6),
    }
    for name, (mask, limit) in limits.items():
        seen.clear()
        run("tiled", q, q, q, mask)
        assert 0 < sum(seen) <= limit * T * T, name


def test_weights_agree_with_the_output_of_every_kernel(kernel: str) -> None:
    q, k, v = cases.inputs(grouped=False)
    score = Additive(torch.randn(cases.D, dtype=torch.float64))
    rule = Rule(lambda b, h, i, j: (i + j) % 3 != 0)
    for keywords in ({"mask": Causal("lower_right")}, {"score": score}, {"normalize": Sigmoid(-1.0)}):
        close(run(kernel, q, k, v, **keywords), attention_weights(q, k, **keywords) @ v)
    with use_kernel("inline"):
        close(attention(q, k, v, rule), attention_weights(q, k, rule) @ v)


# ------------------------------------------------------------------ direct: few pairs, no gradients


@pytest.mark.parametrize("mask", cases.MASKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_direct_is_the_definition_or_hands_over(mask: str, dtype: torch.dtype) -> None:
    case = cases.make("dot", "softmax", mask, "none")
    q, k, v = (x.detach().to(dtype) for x in cases.inputs(grouped=False))
    bound = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    for poison in (None, torch.nan, torch.inf):
        if poison is not None:
            k[0, 1, 3], v[1, 2, 5] = poison, poison
        close(run("direct", q, k, v, **case.keywords), run("reference", q, k, v, **case.keywords), bound)


@pytest.mark.parametrize("mask", [Prefix(3), Padding(4), Padding(start=2, stop=5), Prefix(0), ~Prefix(2)])
def test_direct_takes_masks_that_are_the_same_for_every_row(mask: Any) -> None:
    q, k, v = (x.detach() for x in cases.inputs(grouped=False))
    close(run("direct", q, k, v, mask), run("reference", q, k, v, mask))


def test_direct_is_chosen_for_small_calls_and_only_those() -> None:
    from regard import plan

    q = torch.randn(1, 2, 20, 8)
    assert plan(q, q, q, Causal()).kernel == "direct"
    wide = torch.randn(1, 2, 200, 8)
    assert plan(wide, wide, wide, Causal()).kernel != "direct"
    assert plan(q.requires_grad_(), q, q).kernel != "direct"
