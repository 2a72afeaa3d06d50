"""The rows of the README's measured table: what a group of cases answers together."""

from __future__ import annotations

from dataclasses import dataclass

from .case import Limit


@dataclass(frozen=True)
class Row:
    """`text` and `against` are the row's words; `mean` is what the geometric mean over its cases is held to."""

    name: str
    text: str
    against: str
    mean: Limit | None = None


ROWS = (
    Row("dense-fp32", "float32 forward, dense, n = 128 / 512 / 2048", "SDPA"),
    Row("causal-fp32", "float32 forward, causal, n = 128 / 512 / 2048", "SDPA"),
    Row("dense-bf16", "bfloat16 forward, dense, n = 512 / 2048", "SDPA"),
    Row("causal-bf16", "bfloat16 forward, causal, n = 512 / 2048", "SDPA"),
    Row("dense-fp32-backward", "float32 backward, dense, n = 512 / 2048", "SDPA's backward"),
    Row("causal-fp32-backward", "float32 backward, causal, n = 512 / 2048", "SDPA's backward"),
    Row("dense-bf16-backward", "bfloat16 backward, dense, n = 512", "SDPA's backward"),
    Row("causal-bf16-backward", "bfloat16 backward, causal, n = 512", "SDPA's backward"),
    Row(
        "grid",
        "every point of at least 2^23 multiply-adds: D 32 to 128, dense and causal, float32 and bfloat16, forward",
        "SDPA",
        Limit("faster", 1.3, 1.6, 0.05),
    ),
    Row("small", "smaller points: time beyond SDPA's, in calls of SDPA on (1, 1, 6, 24)", "SDPA"),
    Row(
        "decode-fp32",
        "decode, 1 query, 32/8 heads, 1k / 4k / 32k keys, D 64 then 128, float32",
        "SDPA, enable_gqa",
    ),
    Row("decode-fp32-folded", "the same", "SDPA, heads folded into rows"),
    Row("decode-bf16", "the same, bfloat16", "SDPA, enable_gqa"),
    Row("decode-bf16-folded", "the same, bfloat16", "SDPA, heads folded into rows"),
    Row("window-mask", "`Window(255, 0)` forward, n = 4096 / 16384", "SDPA, bool mask"),
    Row("window-blocks", "the same", "SDPA on blocks of 256 queries and 512 keys"),
    Row("window-flex", "the same", "compiled FlexAttention"),
    Row("window-backward-mask", "`Window(255, 0)` backward, n = 4096", "SDPA's backward, bool mask"),
    Row(
        "window-backward-blocks",
        "`Window(255, 0)` backward, n = 4096 / 16384",
        "SDPA's backward on the blocks",
    ),
    Row("documents-mask", "16 documents, causal, n = 4096, forward", "SDPA, bool mask"),
    Row("documents-loop", "the same", "SDPA, a Python loop over the documents"),
    Row("wide-value", "D = 64, Dv = 128, forward", "SDPA"),
    Row("dropout", "dropout 0.1, forward", "SDPA"),
    Row("relative", "learned relative bias, forward + backward", "SDPA, gathered bias"),
    Row("softcap", "soft-cap 30, causal, forward", "compiled FlexAttention"),
    Row("alibi", "ALiBi, causal, forward", "compiled FlexAttention"),
    Row("sink", "a sink a head, forward", "SDPA, one more zero key and value, bias column"),
    Row("additive", "additive score, D = 128, forward, n = 512 / 2048", "broadcast tanh(q + k)"),
    Row(
        "additive-train",
        "additive score, D = 128, forward + backward, n = 512 / 1024",
        "broadcast tanh(q + k)",
    ),
    Row(
        "additive-compiled",
        "additive score, D = 128, n = 512: forward / forward + backward",
        "torch.compile of it",
    ),
    Row(
        "sparse", "sparsemax / entmax 1.5, forward + backward, n = 1024 then 2048", "PyPI entmax and matmuls"
    ),
    Row("sparse-k", "the same", "PyPI entmax with k=, and matmuls"),
    Row("observe", "`observe`: all statistics, top 8, a map of 256 x 256, n = 2048 / 8192", "explicit torch"),
    Row("observe-plain", "the same, as a share of the plain forward's time (at most)", "our own `attention`"),
)
