"""torch's two masks of ``nn.MultiheadAttention`` (True = blocked, floating point = added) as a mask and a bias.

Nothing of size Tq x Tk is written: runs are searched for in pieces of rows, and what has none is read as it lies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard import _runs
from regard._checks import FLOATS, can_look, words, wrong_type, wrong_value
from regard.masks import Dense, Mask, Not, Padding, Rows

_PAIRS_AT_ONCE = 1 << 20
_WORTH_A_SCAN = 4096


class Sizes(NamedTuple):
    B: int
    H: int
    Tq: int
    Tk: int
    batched: bool


def checked(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, sizes: Sizes, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """attn_mask as (B|1, H|1, Tq, Tk), key_padding_mask as (B, 1, 1, Tk), both as they lie in memory."""
    B, H, Tq, Tk, batched = sizes
    if attn_mask is not None:
        tensor("attn_mask", attn_mask, "True = blocked", device)
        if tuple(attn_mask.shape) not in ((Tq, Tk), (B * H, Tq, Tk)):
            wrong_value("attn_mask", f"shape {(Tq, Tk)} or {(B * H, Tq, Tk)} (samples x heads)", attn_mask)
        attn_mask = attn_mask[None, None] if attn_mask.ndim == 2 else attn_mask.unflatten(0, (B, H))
    if key_padding_mask is not None:
        tensor("key_padding_mask", key_padding_mask, "True = blocked", device)
        expected = (B, Tk) if batched else (Tk,)
        if tuple(key_padding_mask.shape) != expected:
            wrong_value("key_padding_mask", f"shape {expected}", key_padding_mask)
        key_padding_mask = key_padding_mask.reshape(B, 1, 1, Tk)
    return attn_mask, key_padding_mask


def tensor(name: str, mask: object, true: str, device: torch.device) -> None:
    """Checks a mask that is bool or added: its type, layout and device."""
    expected = f"a bool ({true}) or floating-point (added) tensor"
    if not isinstance(mask, Tensor) or mask.dtype not in (torch.bool, *FLOATS):
        wrong_type(name, expected, mask, f"Say {name}.bool()." if isinstance(mask, Tensor) else "")
    if mask.layout != torch.strided or mask.is_nested:
        wrong_type(
            name, "a dense (strided) tensor", words("a sparse or nested one"), f"Say {name}.to_dense()."
        )
    if mask.device != device:
        wrong_value(name, f"a tensor on {device}", words(f"one on {mask.device}"))


def lowered(attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> tuple[Mask | None, Tensor | None]:
    """Masks of torch's (as ``checked`` gives them) as a mask and a bias of ours."""
    if attn_mask is None:
        pairs, bias, slim = None, None, True
    else:
        pairs, bias, slim = _pairs(attn_mask)
    if key_padding_mask is None:
        return pairs, bias
    keys = _blocked_keys(key_padding_mask)
    if keys is None:
        return pairs, key_padding_mask if bias is None else bias + key_padding_mask
    if not slim:
        # What is more than two runs a row would be written out, pair by pair; as -inf the keys stay one row.
        return pairs, torch.zeros(keys.shape, device=keys.device).masked_fill_(keys, -torch.inf)
    kept = Padding.of(~keys[:, 0, 0])
    return (kept if pairs is None else pairs & kept), bias


def _blocked_keys(mask: Tensor) -> Tensor | None:
    """Which keys a padding mask blocks, where it does nothing else; None for one that must be added."""
    if mask.dtype == torch.bool:
        return mask
    if mask.requires_grad or not can_look(mask):
        return None
    closed = mask == -torch.inf
    return closed if bool((closed | (mask == 0)).all()) else None


def _pairs(mask: Tensor) -> tuple[Mask | None, Tensor | None, bool]:
    """A mask (B|1, H|1, Tq, Tk) as a mask or a bias, and whether a mask of keys may be combined with it cheaply."""
    runs = _found(mask) if can_look(mask) and mask.numel() >= _WORTH_A_SCAN else None
    if runs is not None:
        return runs, None, isinstance(runs, Rows)
    if mask.dtype != torch.bool:
        return None, mask, True
    return Not(Dense(mask)), None, mask.numel() < _WORTH_A_SCAN


def _found(mask: Tensor) -> Mask | None:
    """The runs of keys that a mask leaves open; None where it has none or does more than block."""
    if mask.requires_grad:
        return None
    # Start and stop of two runs a row. One room for all, so that pieces leave nothing behind between their scratch.
    edges = torch.zeros(4, *mask.shape[:3], dtype=torch.int64)
    row, most = 0, 1
    for piece in mask.split(max(1, _PAIRS_AT_ONCE // mask[:, :, :1].numel()), dim=2):
        closed = piece if piece.dtype == torch.bool else piece == -torch.inf
        if closed is not piece and not bool((closed | (piece == 0)).all()):
            return None
        runs = _runs.scan(~closed).runs
        if runs is None:
            return None
        rows = slice(row, row + piece.shape[2])
        for n, run in enumerate(runs):
            edges[2 * n, :, :, rows] = 0 if run.start is None else run.start
            edges[2 * n + 1, :, :, rows] = mask.shape[3] if run.stop is None else run.stop
        row, most = rows.stop, max(most, len(runs))
    start, stop, again, end = edges if mask.shape[:2] != (1, 1) else edges[:, 0, 0]
    return Rows(start, stop) if most == 1 else Rows(start, stop) | Rows(again, end)


def added(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, dtype: torch.dtype, more: int
) -> Tensor | None:
    """Both masks as one tensor to add to the scores, with ``more`` keys behind that all may see."""
    total: Tensor | None = None
    for mask in (attn_mask, key_padding_mask):
        if mask is not None:
            one = mask
            if mask.dtype == torch.bool:
                one = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -torch.inf)
            total = one if total is None else total + one
    return total if total is None or not more else torch.nn.functional.pad(total, (0, more))
