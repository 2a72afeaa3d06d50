"""torch's own doors: the same names, signatures, defaults and polarities, on regard's kernels."""

from regard.compat._multihead import MultiheadAttention as MultiheadAttention
from regard.compat._nested import nested_attention as nested_attention
from regard.compat._sdpa import scaled_dot_product_attention as scaled_dot_product_attention

__all__ = ["MultiheadAttention", "nested_attention", "scaled_dot_product_attention"]
