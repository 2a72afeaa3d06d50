"""What people put into their networks: modules that own parameters, heads and caches, on the core.

Inputs are batch first, (B, T, embed_dim), or unbatched, (T, embed_dim). No module returns weights: to look at them
there are ``regard.observe`` and ``regard.watch``.
"""

from regard.nn._attention import Attention as Attention
from regard.nn._attention import CrossAttention as CrossAttention
from regard.nn._attention import SelfAttention as SelfAttention
from regard.nn._blocks import DecoderBlock as DecoderBlock
from regard.nn._blocks import EncoderBlock as EncoderBlock
from regard.nn._blocks import FeedForward as FeedForward
from regard.nn._cache import GrowingCache as GrowingCache
from regard.nn._cache import PreallocatedCache as PreallocatedCache
from regard.nn._cache import RingCache as RingCache
from regard.nn._heads import Context as Context
from regard.nn._owners import AdditiveScore as AdditiveScore
from regard.nn._owners import BilinearScore as BilinearScore
from regard.nn._owners import Owner as Owner
from regard.nn._owners import RelativeBias as RelativeBias
from regard.nn._owners import Sink as Sink
from regard.nn._owners import T5Bias as T5Bias
from regard.nn._positions import LearnedPositions as LearnedPositions
from regard.nn._positions import RotaryPositions as RotaryPositions
from regard.nn._positions import SinusoidalPositions as SinusoidalPositions
from regard.nn._step import Memory as Memory
from regard.nn._step import StepAttention as StepAttention

__all__ = [
    "AdditiveScore",
    "Attention",
    "BilinearScore",
    "Context",
    "CrossAttention",
    "DecoderBlock",
    "EncoderBlock",
    "FeedForward",
    "GrowingCache",
    "LearnedPositions",
    "Memory",
    "Owner",
    "PreallocatedCache",
    "RelativeBias",
    "RingCache",
    "RotaryPositions",
    "SelfAttention",
    "SinusoidalPositions",
    "Sink",
    "StepAttention",
    "T5Bias",
]
