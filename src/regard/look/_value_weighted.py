"""How much each key contributes to the output: its weight times the size of its value."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.look._record import Site


def value_weighted(site: Site, projection: Tensor | None = None) -> Tensor:
    """(B, H, Tq, Tk) in float32 or better: ``|w_ij v_j|``, the norm of what key j adds to the context of query i.

    With `projection`, the weight of the module's output Linear (out, H Dv), it is ``|w_ij W_h v_j|``, what head h
    adds to the module's output. A large weight on a value of nearly zero adds nothing, and does not show here.
    (Kobayashi et al., Attention is Not Only a Weight, 2020.) Rows do not sum to 1. Raises ValueError where the values
    or weights were not kept, or the projection does not fit.
    """
    if site.value is None:
        raise ValueError(f"{site.title}: its values were not kept; watch with keep=Keep(tensors=True)")
    value = site.value.detach()
    value = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    B, Hkv, Tk, Dv = value.shape
    H = site.heads
    if projection is None:
        norms = value.norm(dim=-1).repeat_interleave(H // Hkv, dim=1)
    else:
        if projection.dim() != 2 or projection.shape[1] != H * Dv:
            raise ValueError(
                f"value_weighted(projection=): expected (out, H Dv) = (out, {H * Dv}); got {tuple(projection.shape)}"
            )
        # |W v|^2 = v^T (W^T W) v: no tensor of (H, Tk, out) is made.
        parts = projection.detach().to(value.dtype).reshape(-1, H, Dv)
        gram = torch.einsum("ohd,ohe->hde", parts, parts)
        heads = value.repeat_interleave(H // Hkv, dim=1)
        norms = torch.einsum("bhtd,hde,bhte->bht", heads, gram, heads).clamp(min=0).sqrt()
    weighted: Tensor = site.weights.to(norms.dtype) * norms[:, :, None, :]
    return weighted
