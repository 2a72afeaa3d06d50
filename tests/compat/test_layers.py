"""compat.MultiheadAttention inside torch's own encoder and decoder layers: torch's numbers, and it really runs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import compat
from regard.compat import _multihead

E, H, B, T, S = 16, 2, 3, 5, 6
MODES: dict[str, Callable[[], Any]] = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def replaced(model: nn.Module) -> nn.Module:
    """A copy of a model of torch's, each of its attention modules one of ours."""
    model = copy.deepcopy(model)
    for part in list(model.modules()):
        for name in ("self_attn", "multihead_attn"):
            if isinstance(getattr(part, name, None), nn.MultiheadAttention):
                setattr(part, name, compat.MultiheadAttention.of(getattr(part, name)))
    return model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How often our kernels were called, as a list that grows."""
    made: list[int] = []
    real = _multihead.attention

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        made.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(_multihead, "attention", counted)
    yield made


def tokens(batch_first: bool, length: int = T) -> Tensor:
    return torch.randn((B, length, E) if batch_first else (length, B, E), dtype=torch.float64)


PADS = torch.tensor([[False] * 3 + [True] * 2, [False] * 5, [False] + [True] * 4])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
GIVEN: list[dict[str, Any]] = [
    {},
    {"src_key_padding_mask": PADS},
    {"src_mask": CAUSAL},
    {"src_mask": CAUSAL, "is_causal": True},
    {"src_mask": CAUSAL == -torch.inf, "src_key_padding_mask": PADS},
]


def gradients(model: nn.Module, output: Tensor) -> list[Tensor]:
    # what lies behind a sample's end means nothing; torch's fused path leaves other numbers there
    return list(torch.autograd.grad(output.sin().sum(), list(model.parameters())))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_layer_gives_torchs_numbers(
    mode: str, batch_first: bool, norm_first: bool, calls: list[int]
) -> None:
    layer = nn.TransformerEncoderLayer(
        E, H, 32, 0.0, batch_first=batch_first, norm_first=norm_first, dtype=torch.float64
    )
    ours = replaced(layer)
    for training in (True, False):
        layer.train(training)
        ours.train(training)
        for given in GIVEN:
            x = tokens(batch_first)
            calls.clear()
            with MODES[mode]():
                got, expected = ours(x, **given), layer(x, **given)
            assert len(calls) == 1, (training, given)
            torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
            if mode == "grad":
                for one, two in zip(gradients(ours, got), gradients(layer, expected), strict=True):
                    torch.testing.assert_close(one, two, atol=1e-11, rtol=0)


def test_torch_would_have_taken_its_fused_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same layer with torch's module takes it: the count above is not of something that ran anyway."""
    taken: list[int] = []
    real = torch._transformer_encoder_layer_fwd

    def counted(*args: Any) -> Tensor:
        taken.append(1)
        return real(*args)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    layer = nn.TransformerEncoderLayer(E, H, 32, 0.0, batch_first=True, dtype=torch.float64).eval()
    ours = replaced(layer)
    x = tokens(True)
    with torch.no_grad():
        layer(x)
        assert len(taken) == 1
        ours(x)
        assert len(taken) == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("mode", MODES)
def test_a_stack_that_packs_padded_samples(mode: str, calls: list[int]) -> None:
    """In eval mode torch's stack hands its layers nested tensors, decided before ours were put in."""
    layer = nn.TransformerEncoderLayer(E, H, 32, 0.0, batch_first=True, dtype=torch.float64)
    stack = nn.TransformerEncoder(layer, 2).eval()
    ours = replaced(stack)
    x = tokens(True)
    with MODES[mode]():
        got, expected = ours(x, src_key_padding_mask=PADS), stack(x, src_key_padding_mask=PADS)
    assert len(calls) == 2
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
    if mode == "no_grad":
        assert not got[PADS].any()


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_a_decoder_layer_gives_torchs_numbers(mode: str, batch_first: bool, calls: list[int]) -> None:
    layer = nn.TransformerDecoderLayer(E, H, 32, 0.0, batch_first=batch_first, dtype=torch.float64)
    ours = replaced(layer)
    memory_pads = torch.arange(S) >= torch.tensor([6, 2, 4])[:, None]
    givens: list[dict[str, Any]] = [
        {},
        {"tgt_mask": CAUSAL, "tgt_is_causal": True},
        {
            "tgt_mask": CAUSAL == -torch.inf,
            "tgt_key_padding_mask": PADS,
            "memory_key_padding_mask": memory_pads,
        },
        {"memory_mask": torch.randn(T, S, dtype=torch.float64)},
    ]
    for training in (True, False):
        layer.train(training)
        ours.train(training)
        for given in givens:
            x, memory = tokens(batch_first), tokens(batch_first, S)
            calls.clear()
            with MODES[mode]():
                got, expected = ours(x, memory, **given), layer(x, memory, **given)
            assert len(calls) == 2
            torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
            if mode == "grad":
                for one, two in zip(gradients(ours, got), gradients(layer, expected), strict=True):
                    torch.testing.assert_close(one, two, atol=1e-11, rtol=0)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_a_whole_transformer_trains_to_the_same_numbers(calls: list[int]) -> None:
    model = nn.Transformer(E, H, 2, 2, 32, 0.0, batch_first=True, dtype=torch.float64)
    ours = replaced(model)
    x, y = tokens(True, S), tokens(True)
    for each in (model, ours):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            each(x, y, tgt_mask=CAUSAL, tgt_is_causal=True).square().mean().backward()
            optimizer.step()
    assert len(calls) == 3 * 6
    for (name, one), (_, two) in zip(ours.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-12, rtol=0, msg=name)
