"""regard: attention that you can describe, run and look at."""

import importlib
from typing import TYPE_CHECKING, Any

from regard import biases as biases
from regard import masks as masks
from regard import normalizers as normalizers
from regard import scores as scores
from regard._attention import attention as attention
from regard._attention import attention_weights as attention_weights
from regard._attention import attention_with_lse as attention_with_lse
from regard._attention import merge as merge
from regard._attention import plan as plan
from regard._observe import Observation as Observation
from regard._observe import observe as observe
from regard._varlen import varlen_attention as varlen_attention
from regard.mechanism import Mechanism as Mechanism

if TYPE_CHECKING:
    from regard import compat as compat
    from regard import look as look
    from regard import nn as nn
    from regard import variants as variants
    from regard.look import watch as watch

__all__ = [
    "Mechanism",
    "Observation",
    "attention",
    "attention_weights",
    "attention_with_lse",
    "biases",
    "compat",
    "look",
    "masks",
    "merge",
    "nn",
    "normalizers",
    "observe",
    "plan",
    "scores",
    "variants",
    "varlen_attention",
    "watch",
]
__version__ = "0.1.0"

# Loaded when first asked for: they bring modules and renderers that a call of attention does not need.
_ROOMS = ("compat", "look", "nn", "variants")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"regard.{name}")
    if name == "watch":
        return importlib.import_module("regard.look").watch
    raise AttributeError(f"module 'regard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
