"""What tests of the worked example share."""

import torch


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """B 2, H 4, Hkv 2, Tq 5, Tk 7, D 6, Dv 3."""
    drawn = generator()
    sizes = ((2, 4, 5, 6), (2, 2, 7, 6), (2, 2, 7, 3))
    query, key, value = (torch.randn(*size, generator=drawn).to(dtype) for size in sizes)
    return query, key, value
