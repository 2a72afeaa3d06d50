"""regard: attention that you can describe, run and look at."""

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
from regard.look import watch as watch
from regard.mechanism import Mechanism as Mechanism

__all__ = [
    "Mechanism",
    "Observation",
    "attention",
    "attention_weights",
    "attention_with_lse",
    "biases",
    "masks",
    "merge",
    "normalizers",
    "observe",
    "plan",
    "scores",
    "watch",
]
__version__ = "0.1.0"
