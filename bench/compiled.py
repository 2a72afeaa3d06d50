"""The other sides that torch.compile builds: FlexAttention, and an expression compiled as it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .case import Inputs, Side, SideFailed
from .torch_expressions import SOFTCAP, WINDOW_LEFT

Made = dict[str, Any]


def compiled(call: Side) -> Callable[[Inputs], Made]:
    """`prepare` of a case: compiles an expression for the threads of the moment, outside the clock."""

    def prepare(inputs: Inputs) -> Made:
        import torch._inductor.config as inductor

        # Inductor writes the number of threads into its code: the same code must not serve another number.
        torch._dynamo.reset()
        inductor.cpp.threads = torch.get_num_threads()
        made = torch.compile(call, dynamic=False)
        try:
            with torch.set_grad_enabled(inputs.query.requires_grad):
                made(inputs)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise SideFailed(f"torch.compile: {str(error).strip().splitlines()[0]}") from error
        return {"call": made}

    return prepare


def call_prepared(inputs: Inputs) -> Tensor:
    """The expression that `compiled` made."""
    result: Tensor = inputs.prepared["call"](inputs)
    return result


Modification = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def flex(
    mask_mod: Any, score_mod: Callable[[Inputs], Modification] | None = None
) -> Callable[[Inputs], Made]:
    """`prepare` of a case: compiled FlexAttention with its block mask, both made outside the clock."""

    def prepare(inputs: Inputs) -> Made:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        at = inputs.shape
        blocks = create_block_mask(mask_mod, None, None, at.Tq, at.Tk, device="cpu") if mask_mod else None
        modified = score_mod(inputs) if score_mod else None

        def call(inputs: Inputs) -> Tensor:
            result = flex_attention(inputs.query, inputs.key, inputs.value, modified, blocks)
            assert isinstance(result, Tensor)
            return result

        return compiled(call)(inputs)

    return prepare


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i - j <= WINDOW_LEFT)


def softcap(inputs: Inputs) -> Modification:
    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    return modify


def alibi(inputs: Inputs) -> Modification:
    """Slopes 2^(-8/H), 2^(-16/H), ... for H a power of two (Press et al., 2022)."""
    H = inputs.shape.H
    slopes = torch.tensor([2.0 ** (-8.0 * (h + 1) / H) for h in range(H)])

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * (i - j).abs()

    return modify
