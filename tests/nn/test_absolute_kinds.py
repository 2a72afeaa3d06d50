"""A kind of mask that counts keys from position 0, unknown behind a ring, is refused; a growing cache takes it."""

from __future__ import annotations

import pytest
import torch

from regard import nn, variants
from regard.masks import Window


def test_sinks_behind_caches() -> None:
    streaming = variants.streaming(2, 4)
    layer = nn.SelfAttention(16, 2, **streaming).eval()
    x = torch.randn(1, 12, 16)
    with torch.no_grad():
        cache = nn.GrowingCache()
        steps = torch.cat([layer(x[:, i : i + 1], cache=cache) for i in range(12)], 1)
        torch.testing.assert_close(steps, layer(x), rtol=1e-5, atol=1e-5)
        ringed = nn.SelfAttention(16, 2, mask=streaming["mask"] & Window(3, 0)).eval()
        ring = nn.RingCache(3)
        with pytest.raises(ValueError, match="ring"):
            for i in range(12):
                ringed(x[:, i : i + 1], cache=ring)
