"""Calls that torch broadcasts over heads are caught whole, and weigh what torch weighed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import watch
from regard.look import EVERYTHING


class Calls(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, **how)


@pytest.mark.parametrize(
    "query, key, how",
    [
        ((4, 5, 4), (2, 5, 4), {"enable_gqa": True}),
        ((2, 1, 5, 4), (2, 4, 5, 4), {}),
        ((2, 4, 5, 4), (2, 1, 5, 4), {}),
        ((5, 4), (7, 4), {}),
    ],
)
def test_weights_give_the_output(
    query: tuple[int, ...], key: tuple[int, ...], how: dict[str, Any], tmp_path: Any
) -> None:
    model, q, k, v = Calls(), torch.randn(query), torch.randn(key), torch.randn(key)
    with watch(model, EVERYTHING) as record:
        output = model(q, k, v, **how)
    (site,) = record.sites
    value = site.value
    assert value is not None
    if site.weights.dim() > 2:
        value = value.repeat_interleave(site.weights.shape[-3] // value.shape[-3], dim=-3)
    torch.testing.assert_close((site.weights @ value).reshape(output.shape), output)
    record.save(tmp_path / "record")


def test_other_dimensions_are_noted_and_the_rest_is_kept() -> None:
    model = Calls()
    with watch(model, EVERYTHING) as record:
        model(torch.randn(2, 3, 5, 4), torch.randn(5, 4), torch.randn(5, 4))
        model(torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4))
    assert len(record.sites) == 1
    assert any("differ in dimensions" in note for note in record.notes)
