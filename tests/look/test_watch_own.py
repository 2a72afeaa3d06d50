"""regard's own calls are watched as torch's are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regard import attention, nn, watch
from regard.biases import Alibi
from regard.look import EVERYTHING
from regard.masks import Causal, Padding
from regard.scores import Dot


@pytest.mark.parametrize("length", [6, 200])
@pytest.mark.parametrize(
    "described",
    [{}, {"mask": Causal()}, {"mask": Padding(5)}, {"mask": Causal(), "bias": Alibi()}, {"score": Dot(0.3)}],
)
def test_every_layer_is_caught_with_its_weights(
    length: int, described: dict[str, Any], tmp_path: Any
) -> None:
    model = torch.nn.Sequential(nn.SelfAttention(16, 2, **described), nn.SelfAttention(16, 2, **described))
    x = torch.randn(3, length, 16)
    expected = model(x)
    with watch(model, EVERYTHING) as record:
        output = model(x)
    assert torch.equal(output, expected)
    assert [site.name for site in record.sites] == ["0", "1"]
    for site in record.sites:
        assert site.weights.shape == (3, 2, length, length)
        torch.testing.assert_close(site.weights @ site.value, site.output, rtol=1e-5, atol=1e-5)
    record.save(tmp_path / "seen")


def test_other_modes_change_nothing() -> None:
    q = torch.randn(1, 2, 5, 4)
    with torch.device("cpu"):
        assert torch.equal(attention(q, q, q, Causal()), attention(q, q, q, Causal()))
