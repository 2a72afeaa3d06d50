"""The named mechanisms of the literature: each a function that returns a ``Mechanism``, to be given to ``attention``.

>>> import torch
>>> from regard import attention, variants
>>> query = key = value = torch.randn(1, 4, 16, 8)
>>> attention(query, key, value, **variants.sliding_window(4)).shape
torch.Size([1, 4, 16, 8])

``differential`` is more than one attention: it is called in ``attention``'s place. ``regard variants`` prints them all.
"""

from regard.variants._masked import bidirectional as bidirectional
from regard.variants._masked import causal as causal
from regard.variants._masked import chunked as chunked
from regard.variants._masked import cross as cross
from regard.variants._masked import dilated_window as dilated_window
from regard.variants._masked import fixed_sparse as fixed_sparse
from regard.variants._masked import local_blocks as local_blocks
from regard.variants._masked import longformer as longformer
from regard.variants._masked import packed_documents as packed_documents
from regard.variants._masked import prefix_lm as prefix_lm
from regard.variants._masked import sliding_window as sliding_window
from regard.variants._masked import streaming as streaming
from regard.variants._masked import strided_sparse as strided_sparse
from regard.variants._normalized import entmax as entmax
from regard.variants._normalized import entmax15 as entmax15
from regard.variants._normalized import off_by_one as off_by_one
from regard.variants._normalized import relu as relu
from regard.variants._normalized import sigmoid as sigmoid
from regard.variants._normalized import sink as sink
from regard.variants._normalized import sparsemax as sparsemax
from regard.variants._normalized import squared_relu as squared_relu
from regard.variants._normalized import top_k as top_k
from regard.variants._positioned import alibi as alibi
from regard.variants._positioned import forgetting as forgetting
from regard.variants._positioned import kerple_log as kerple_log
from regard.variants._positioned import kerple_power as kerple_power
from regard.variants._positioned import relative as relative
from regard.variants._positioned import shaw as shaw
from regard.variants._positioned import swin as swin
from regard.variants._positioned import t5 as t5
from regard.variants._positioned import transformer_xl as transformer_xl
from regard.variants._scored import bahdanau as bahdanau
from regard.variants._scored import cosine as cosine
from regard.variants._scored import distance as distance
from regard.variants._scored import graph as graph
from regard.variants._scored import graph_v2 as graph_v2
from regard.variants._scored import grouped_query as grouped_query
from regard.variants._scored import linear_concat as linear_concat
from regard.variants._scored import luong_concat as luong_concat
from regard.variants._scored import luong_dot as luong_dot
from regard.variants._scored import luong_general as luong_general
from regard.variants._scored import multi_query as multi_query
from regard.variants._scored import qk_norm as qk_norm
from regard.variants._scored import qk_norm_scale as qk_norm_scale
from regard.variants._scored import scaled_dot as scaled_dot
from regard.variants._scored import soft_capped as soft_capped
from regard.variants._several import differential as differential

__all__ = [
    "alibi",
    "bahdanau",
    "bidirectional",
    "causal",
    "chunked",
    "cosine",
    "cross",
    "differential",
    "dilated_window",
    "distance",
    "entmax",
    "entmax15",
    "fixed_sparse",
    "forgetting",
    "graph",
    "graph_v2",
    "grouped_query",
    "kerple_log",
    "kerple_power",
    "linear_concat",
    "local_blocks",
    "longformer",
    "luong_concat",
    "luong_dot",
    "luong_general",
    "multi_query",
    "off_by_one",
    "packed_documents",
    "prefix_lm",
    "qk_norm",
    "qk_norm_scale",
    "relative",
    "relu",
    "scaled_dot",
    "shaw",
    "sigmoid",
    "sink",
    "sliding_window",
    "soft_capped",
    "sparsemax",
    "squared_relu",
    "streaming",
    "strided_sparse",
    "swin",
    "t5",
    "top_k",
    "transformer_xl",
]
