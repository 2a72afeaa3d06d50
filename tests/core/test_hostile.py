"""Hostile calls: each ends in one clear TypeError or ValueError, never in a crash, and never in a number."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import (
    Mechanism,
    attention,
    attention_weights,
    attention_with_lse,
    merge,
    observe,
    plan,
)
from regard._plan import use_kernel
from regard.biases import Alibi, Relative
from regard.masks import Causal, Dense, Documents, Padding, Prefix, Rows, Rule, Window
from regard.normalizers import Entmax, Relu, Sigmoid, Softmax
from regard.scores import Additive, Bilinear, Concat, Cosine, Distance, Dot, Modified

B, H, TQ, TK, D = 2, 4, 5, 7, 8
NAN, INF, HUGE = float("nan"), float("inf"), 10**400


def zeros(*shape: int, **keywords: Any) -> Tensor:
    return torch.zeros(shape, **keywords)


Q, K, V = torch.randn(B, H, TQ, D), torch.randn(B, H, TK, D), torch.randn(B, H, TK, D)
S = K[:, :, :TQ]  # a key as long as the query
BOOL = torch.ones(TQ, TK, dtype=torch.bool)
OUT, LSE = zeros(B, H, TQ, D), zeros(B, H, TQ)


def call(mask: Any = None, **keywords: Any) -> Tensor:
    return attention(Q, K, V, mask, **keywords)


def sparse(x: Tensor) -> Tensor:
    return x.to_sparse()


def meta(x: Tensor) -> Tensor:
    return x.to("meta")


# (what is wrong, the call, TypeError or ValueError, and what the message says: the argument, what came or the way out)
HOSTILE: list[tuple[str, Callable[[], Any], type[Exception], tuple[str, ...]]] = [
    # ---- query, key, value
    ("a list", lambda: attention([[1.0]], K, V), TypeError, ("query", "a tensor", "list")),
    ("a numpy array", lambda: attention(Q, K.numpy(), V), TypeError, ("key", "a tensor", "ndarray")),
    ("no value", lambda: attention(Q, K, None), TypeError, ("value", "a tensor", "None")),
    ("no value to observe", lambda: observe(Q, K, None), TypeError, ("value", "a tensor", "None")),
    ("no key", lambda: attention_weights(Q, None), TypeError, ("key", "a tensor", "None")),
    ("a sparse query", lambda: attention(sparse(Q), K, V), TypeError, ("query", "dense", "sparse")),
    (
        "a nested query",
        lambda: attention(torch.nested.nested_tensor([zeros(2, 3)], layout=torch.jagged), K, V),
        TypeError,
        ("query", "dense", "nested"),
    ),
    ("integers", lambda: attention(Q.long(), K.long(), V.long()), TypeError, ("floating-point", "int64")),
    ("bools", lambda: attention(Q > 0, K > 0, V > 0), TypeError, ("floating-point", "bool")),
    (
        "complex numbers",
        lambda: attention(Q + 0j, K + 0j, V + 0j),
        TypeError,
        ("floating-point", "complex64"),
    ),
    ("two dtypes", lambda: attention(Q, K.double(), V), TypeError, ("one floating-point dtype", "float64")),
    (
        "float8",
        lambda: attention(*(x.to(torch.float8_e4m3fn) for x in (Q, K, V))),
        TypeError,
        ("floating-point dtype", "float8"),
    ),
    (
        "two devices",
        lambda: attention(meta(Q), K, V),
        ValueError,
        ("one device", "meta, cpu, cpu"),
    ),
    ("one dimension", lambda: attention(Q[0, 0, 0], K[0, 0, 0], V[0, 0, 0]), ValueError, ("(T, D)", "(8,)")),
    (
        "no dimension",
        lambda: attention(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1.0)),
        ValueError,
        ("(T, D)", "()"),
    ),
    ("ranks that differ", lambda: attention(Q, K[0], V[0]), ValueError, ("as many dimensions", "(4, 7, 8)")),
    (
        "widths that differ",
        lambda: attention(Q, K[..., :5], V),
        ValueError,
        ("key", "width, 8", "5", "Bilinear"),
    ),
    ("value too long", lambda: attention(Q, S, V), ValueError, ("value", "rows", "5", "(2, 4, 7, 8)")),
    ("value too short", lambda: attention(Q, K, V[:, :, :6]), ValueError, ("value", "rows", "7")),
    ("batches that differ", lambda: attention(Q, K[:1].expand(3, -1, -1, -1), V), ValueError, ("batch", "1")),
    (
        "heads that do not divide",
        lambda: attention(Q, K[:, :3], V[:, :3]),
        ValueError,
        ("heads", "multiple", "4 and 3"),
    ),
    (
        "heads behind the length",
        lambda: attention(Q.mT.contiguous(), K.transpose(1, 2), V.transpose(1, 2)),
        ValueError,
        ("heads", "multiple", "transpose(1, 2)"),
    ),
    ("more key heads", lambda: attention(Q[:, :2], K, V), ValueError, ("heads", "multiple", "2 and 4")),
    ("key and value heads", lambda: attention(Q, K[:, :2], V[:, :1]), ValueError, ("value", "heads", "2")),
    ("no key heads", lambda: attention(Q, K[:, :0], V[:, :0]), ValueError, ("heads", "multiple", "4 and 0")),
    (
        "grouped heads in 3-D",
        lambda: attention(Q[0], K[0, :2], V[0, :2]),
        ValueError,
        ("heads", "batch dimension", "query[None]"),
    ),
    # ---- masks
    (
        "an integer mask",
        lambda: call(BOOL.long()),
        TypeError,
        ("mask", "True means may attend", "mask.bool()"),
    ),
    ("a float mask", lambda: call(zeros(TQ, TK)), TypeError, ("mask", "bool", "bias=")),
    ("a text mask", lambda: call("causal"), TypeError, ("mask", "regard.masks", "'causal'")),
    ("a number mask", lambda: call(True), TypeError, ("mask", "regard.masks", "True")),
    ("a list mask", lambda: call([[True]]), TypeError, ("mask", "bool tensor", "list")),
    ("a numpy mask", lambda: call(BOOL.numpy()), TypeError, ("mask", "bool tensor", "ndarray")),
    ("a mask's class", lambda: call(Causal), TypeError, ("mask", "regard.masks", "Causal")),
    ("a mechanism as mask", lambda: call(Mechanism("x")), TypeError, ("mask", "regard.masks", "Mechanism")),
    (
        "a 3-D mask beside 4-D tensors",
        lambda: call(BOOL.expand(B, TQ, TK)),
        ValueError,
        ("mask", "mask[:, None]", "mask[None]"),
    ),
    ("a 5-D mask", lambda: call(BOOL.expand(1, B, H, TQ, TK)), ValueError, ("mask", "as many dimensions")),
    ("a mask too wide", lambda: call(BOOL[:, :6]), ValueError, ("mask", "broadcasts", "(5, 6)")),
    ("a mask a sample", lambda: call(zeros(B, TK).bool()), ValueError, ("mask", "broadcasts", "(2, 7)")),
    ("a sparse mask", lambda: call(sparse(BOOL)), TypeError, ("mask", "dense")),
    ("a mask elsewhere", lambda: call(meta(BOOL)), ValueError, ("mask", "on cpu", "on meta", ".to(")),
    ("and", lambda: Causal() and Prefix(1), TypeError, ("mask", "truth value", "&")),
    ("a mask & a number", lambda: Causal() & 3, TypeError, ("mask", "regard.masks", "3")),
    ("a mask | nothing", lambda: Causal() | None, TypeError, ("mask", "regard.masks", "None")),
    ("a mask & a float tensor", lambda: Causal() & zeros(TQ, TK), TypeError, ("mask", "bool", "bias=")),
    # ---- alignment
    (
        "no alignment",
        lambda: call(Causal()),
        ValueError,
        ("Causal", "alignment", "Tq = 5, Tk = 7", "lower_right"),
    ),
    ("a window without", lambda: call(Window(2, 2)), ValueError, ("Window", "alignment", "upper_left")),
    ("a bias without", lambda: call(bias=Alibi()), ValueError, ("Alibi", "alignment", "offset=n")),
    ("a table without", lambda: call(bias=Relative(zeros(3))), ValueError, ("Relative", "alignment")),
    (
        "two alignments",
        lambda: call(Causal("upper_left") & Window(1, 1, "lower_right")),
        ValueError,
        ("offset", "one alignment", "2 different"),
    ),
    (
        "mask and bias disagree",
        lambda: call(Causal(offset=1), bias=Alibi(offset=2)),
        ValueError,
        ("offset", "one alignment", "Give it to one"),
    ),
    ("alignment twice", lambda: Causal("upper_left", offset=1), ValueError, ("Causal(offset=)", "both")),
    ("an unknown alignment", lambda: Causal("bottom_right"), ValueError, ("lower_right", "'bottom_right'")),
    ("a number as alignment", lambda: Causal(2), TypeError, ("Causal(alignment)", "2", "offset=")),
    ("True as alignment", lambda: Causal(True), TypeError, ("Causal(alignment)", "True")),
    ("a float offset", lambda: Causal(offset=1.0), TypeError, ("Causal(offset=)", "an int", "1.0")),
    ("a float tensor offset", lambda: Causal(offset=zeros(2)), TypeError, ("Causal(offset=)", "float32")),
    (
        "offsets of another batch",
        lambda: call(Causal(offset=torch.zeros(3, dtype=torch.long))),
        ValueError,
        ("Causal(offset=)", "(2,)", "(3,)"),
    ),
    ("an offset beyond all", lambda: call(Causal(offset=2**70)), ValueError, ("Causal(offset=)",)),
    ("an offset that wraps", lambda: call(Causal(offset=2**63 - 1)), ValueError, ("Causal(offset=)",)),
    # ---- windows, padding, prefix, documents, rows, rules
    ("an empty window", lambda: Window(-3, 2), ValueError, ("Window", "can hold a key", "left=-3, right=2")),
    ("a float window", lambda: Window(2.0, 0), TypeError, ("Window(left=)", "an int or None", "2.0")),
    ("a bool window", lambda: Window(1, True), TypeError, ("Window(right=)", "an int or None", "True")),
    ("a tensor window", lambda: Window(torch.tensor(2)), TypeError, ("Window(left=)", "an int or None")),
    ("a window beyond all", lambda: call(Window(2**70, 0, "upper_left")), ValueError, ("Window(left=)",)),
    ("a window that wraps", lambda: call(Window(2**63, 0, "upper_left")), ValueError, ("Window(left=)",)),
    ("no padding", lambda: Padding(), ValueError, ("Padding", "lengths", "Padding.of")),
    ("padding twice", lambda: Padding(3, stop=4), ValueError, ("Padding", "both")),
    ("lengths beyond Tk", lambda: call(Padding(8)), ValueError, ("Padding(lengths=)", "Tk = 7", "8")),
    (
        "lengths beyond Tk in a tensor",
        lambda: call(Padding(torch.tensor([7, 8]))),
        ValueError,
        ("Padding(lengths=)", "Tk = 7", "8"),
    ),
    ("negative lengths", lambda: Padding(-1), ValueError, ("Padding(lengths=)", "-1")),
    (
        "negative stops",
        lambda: call(Padding(stop=torch.tensor([-1, 2]))),
        ValueError,
        ("Padding(stop=)", "-1"),
    ),
    ("float lengths", lambda: Padding(zeros(2)), TypeError, ("Padding(lengths=)", "integer tensor")),
    ("a mask as lengths", lambda: Padding(zeros(2, 7).bool()), TypeError, ("Padding.of(mask)", "bool")),
    (
        "lengths of another batch",
        lambda: call(Padding(torch.tensor([1, 2, 3]))),
        ValueError,
        ("Padding(lengths=)", "(2,)", "(3,)"),
    ),
    (
        "sparse lengths",
        lambda: call(Padding(sparse(torch.tensor([1, 2])))),
        TypeError,
        ("Padding(lengths=)", "dense"),
    ),
    (
        "a tokenizer's mask of another length",
        lambda: call(Padding.of(torch.ones(B, 6))),
        ValueError,
        ("Padding.of", "(2, 7)", "(2, 6)"),
    ),
    ("an additive mask", lambda: Padding.of(torch.full((2, 7), -1e9)), ValueError, ("Padding.of", "bias=")),
    ("NaN as mask", lambda: Padding.of(torch.full((2, 7), NAN)), ValueError, ("Padding.of", "0 and 1")),
    ("a list as mask", lambda: Padding.of([[1, 0]]), TypeError, ("Padding.of", "list")),
    ("complex mask", lambda: Padding.of(torch.ones(2, 7) + 0j), TypeError, ("Padding.of", "complex64")),
    ("a sparse one", lambda: Padding.of(sparse(torch.ones(2, 7))), TypeError, ("Padding.of", "dense")),
    ("a prefix beyond Tk", lambda: call(Prefix(8)), ValueError, ("Prefix(n=)", "Tk = 7", "8")),
    ("a float prefix", lambda: Prefix(2.5), TypeError, ("Prefix(n=)", "2.5")),
    ("a negative prefix", lambda: Prefix(-2), ValueError, ("Prefix(n=)", "-2")),
    ("float ids", lambda: Documents(zeros(5)), TypeError, ("Documents(query_ids=)", "integer tensor")),
    ("no ids", lambda: Documents(None), TypeError, ("Documents(query_ids=)", "integer tensor", "None")),
    ("a list of ids", lambda: Documents([0, 1]), TypeError, ("Documents(query_ids=)", "integer tensor")),
    (
        "ids of the queries alone",
        lambda: call(Documents(torch.zeros(TQ, dtype=torch.long))),
        ValueError,
        ("Documents(query_ids=)", "Tq != Tk", "Documents(query_ids, key_ids)"),
    ),
    (
        "key ids of another length",
        lambda: call(Documents(torch.zeros(TQ, dtype=torch.long), torch.zeros(TQ, dtype=torch.long))),
        ValueError,
        ("Documents(key_ids=)", "(7,)", "(5,)"),
    ),
    ("no edges", lambda: Rows(), ValueError, ("Rows", "start, stop")),
    ("float edges", lambda: Rows(zeros(5)), TypeError, ("Rows(start=)", "integer tensor")),
    ("a number as edge", lambda: Rows(stop=3), TypeError, ("Rows(stop=)", "integer tensor", "3")),
    (
        "edges of another length",
        lambda: call(Rows(torch.zeros(TK, dtype=torch.long))),
        ValueError,
        ("Rows(start=)", "(5,)", "(7,)"),
    ),
    ("a rule that is none", lambda: Rule(None), TypeError, ("Rule", "callable", "None")),
    ("a rule of floats", lambda: call(Rule(lambda b, h, q, k: q * 1.0)), TypeError, ("Rule", "bool tensor")),
    ("a rule of one bool", lambda: call(Rule(lambda b, h, q, k: True)), TypeError, ("Rule", "bool tensor")),
    ("a rule of nothing", lambda: call(Rule(lambda b, h, q, k: None)), TypeError, ("Rule", "None")),
    (
        "a rule of another shape",
        lambda: call(Rule(lambda b, h, q, k: zeros(9, 9).bool())),
        ValueError,
        ("Rule", "(9, 9)"),
    ),
    (
        "a rule of five dimensions",
        lambda: call(Rule(lambda b, h, q, k: zeros(1, B, H, TQ, TK).bool())),
        ValueError,
        ("Rule", "(1, 2, 4, 5, 7)"),
    ),
    (
        "a negative length",
        lambda: Causal("upper_left").materialize(-1, 5),
        ValueError,
        ("materialize", "0 or more", "-1"),
    ),
    (
        "a float length",
        lambda: Causal().materialize(3.5, 3.5),
        TypeError,
        ("materialize", "whole numbers", "3.5"),
    ),
    (
        "a negative batch",
        lambda: Prefix(1).materialize(3, 3, batch=-1),
        ValueError,
        ("materialize", "0 or more", "-1"),
    ),
    (
        "a text batch",
        lambda: Prefix(1).materialize(3, 3, batch="ab"),
        TypeError,
        ("materialize", "whole numbers", "'a'"),
    ),
    (
        "negative heads",
        lambda: Prefix(1).materialize(3, 3, heads=-2),
        ValueError,
        ("materialize", "0 or more", "-2"),
    ),
    # ---- biases
    ("a bool bias", lambda: call(bias=BOOL), TypeError, ("bias", "floating-point", "mask=")),
    ("an integer bias", lambda: call(bias=BOOL.long()), TypeError, ("bias", "floating-point", "int64")),
    ("a number bias", lambda: call(bias=0.5), TypeError, ("bias", "regard.biases", "0.5")),
    ("a bias' class", lambda: call(bias=Alibi), TypeError, ("bias", "regard.biases")),
    ("a mask as bias", lambda: call(bias=Causal("upper_left")), TypeError, ("bias", "regard.biases")),
    (
        "a 3-D bias beside 4-D tensors",
        lambda: call(bias=zeros(H, TQ, TK)),
        ValueError,
        ("bias", "bias[:, None]", "bias[None]"),
    ),
    ("a bias too long", lambda: call(bias=zeros(TQ, 8)), ValueError, ("bias", "broadcasts", "(5, 8)")),
    ("a sparse bias", lambda: call(bias=sparse(zeros(TQ, TK))), TypeError, ("bias", "dense")),
    ("a bias elsewhere", lambda: call(bias=meta(zeros(TQ, TK))), ValueError, ("bias", "on meta", ".to(")),
    ("a bias + a number", lambda: Alibi() + 3, TypeError, ("bias", "regard.biases", "3")),
    ("a list of slopes", lambda: Alibi([0.5]), TypeError, ("Alibi(slopes=)", "a number or a tensor")),
    ("slopes of NaN", lambda: Alibi(NAN), ValueError, ("Alibi(slopes=)", "finite", "nan")),
    (
        "slopes of other heads",
        lambda: call(bias=Alibi(zeros(3), "upper_left")),
        ValueError,
        ("Alibi(slopes=)", "(4,)", "(3,)"),
    ),
    ("an even table", lambda: Relative(zeros(4)), ValueError, ("Relative(table)", "(2R + 1,)", "(4,)")),
    ("an empty table", lambda: Relative(zeros(0)), ValueError, ("Relative(table)", "odd")),
    ("a 3-D table", lambda: Relative(zeros(1, 4, 3)), ValueError, ("Relative(table)", "(1, 4, 3)")),
    ("an integer table", lambda: Relative(zeros(3).long()), TypeError, ("Relative(table)", "floating-point")),
    (
        "a table of other heads",
        lambda: call(bias=Relative(zeros(3, 5), "upper_left")),
        ValueError,
        ("Relative(table)", "(4, 2R + 1)", "(3, 5)"),
    ),
    # ---- scores
    ("a score's name", lambda: call(score="dot"), TypeError, ("score", "callable", "'dot'")),
    ("a score's class", lambda: call(score=Dot), TypeError, ("score", "Say Dot(...)", "instance")),
    ("no score", lambda: call(score=None), TypeError, ("score", "callable", "None")),
    ("a normaliser as score", lambda: call(score=Mechanism("x")), TypeError, ("score", "Mechanism")),
    ("a scale of NaN", lambda: Dot(NAN), ValueError, ("Dot(scale=)", "finite", "nan")),
    ("an infinite scale", lambda: Cosine(-INF), ValueError, ("Cosine(scale=)", "finite", "-inf")),
    ("a scale of text", lambda: Dot("1"), TypeError, ("Dot(scale=)", "a number or a tensor", "'1'")),
    ("a bool scale", lambda: Distance(True), TypeError, ("Distance(scale=)", "a number", "True")),
    ("a complex scale", lambda: Dot(1j), TypeError, ("Dot(scale=)", "a number")),
    ("a scale beyond floats", lambda: call(score=Dot(HUGE)), ValueError, ("Dot(scale=)", "finite")),
    (
        "a tensor scale with NaN",
        lambda: Dot(torch.tensor([1.0, NAN])),
        ValueError,
        ("Dot(scale=)", "finite", "NaN"),
    ),
    ("an integer tensor scale", lambda: Dot(torch.tensor(2)), TypeError, ("Dot(scale=)", "floating-point")),
    ("a 2-D scale", lambda: Dot(zeros(B, H)), ValueError, ("Dot(scale=)", "(H,)", "(2, 4)")),
    ("scales of other heads", lambda: call(score=Dot(zeros(3))), ValueError, ("Dot(scale=)", "(4,)", "(3,)")),
    ("a sparse scale", lambda: call(score=Dot(sparse(torch.ones(H)))), TypeError, ("Dot(scale=)", "dense")),
    ("a scale elsewhere", lambda: call(score=Dot(meta(zeros(H)))), ValueError, ("Dot(scale=)", "on meta")),
    ("a soft-cap of 0", lambda: Dot(softcap=0), ValueError, ("Dot(softcap=)", "positive", "0")),
    ("a negative soft-cap", lambda: Dot(softcap=-5.0), ValueError, ("Dot(softcap=)", "positive", "-5.0")),
    ("an infinite soft-cap", lambda: Dot(softcap=INF), ValueError, ("Dot(softcap=)", "finite", "inf")),
    ("a soft-cap of NaN", lambda: Dot(softcap=NAN), ValueError, ("Dot(softcap=)", "nan")),
    ("a tensor soft-cap", lambda: Dot(softcap=zeros(1)), TypeError, ("Dot(softcap=)", "number")),
    (
        "a soft-cap beyond floats",
        lambda: call(score=Dot(softcap=HUGE)),
        ValueError,
        ("Dot(softcap=)", "finite"),
    ),
    ("no weight", lambda: Bilinear(None), TypeError, ("Bilinear(weight=)", "tensor", "None")),
    ("a weight of one dimension", lambda: Bilinear(zeros(8)), ValueError, ("Bilinear(weight=)", "2 or 3")),
    (
        "a weight of other widths",
        lambda: call(score=Bilinear(zeros(8, 9))),
        ValueError,
        ("Bilinear(weight=)", "(8, 8)", "(8, 9)"),
    ),
    (
        "a weight of other heads",
        lambda: call(score=Bilinear(zeros(2, 8, 8))),
        ValueError,
        ("Bilinear(weight=)", "(4, 8, 8)", "(2, 8, 8)"),
    ),
    (
        "v of another width",
        lambda: call(score=Additive(zeros(7))),
        ValueError,
        ("Additive(v=)", "(8,)", "(7,)"),
    ),
    ("v of integers", lambda: Additive(torch.ones(8).long()), TypeError, ("Additive(v=)", "floating-point")),
    (
        "half a concat",
        lambda: call(score=Concat(zeros(8), zeros(16))),
        ValueError,
        ("Concat(w_key=)", "(8,)", "(16,)"),
    ),
    ("modified by nothing", lambda: Modified(Dot(), None), TypeError, ("Modified", "score_mod", "None")),
    (
        "modified nothing",
        lambda: Modified(None, lambda s, *at: s),
        TypeError,
        ("Modified", "score(query, key)"),
    ),
    (
        "modified class",
        lambda: call(score=Modified(Dot, lambda s, *at: s)),
        TypeError,
        ("score", "Say Dot(...)"),
    ),
    # ---- normalisers and dropout
    (
        "a normaliser's name",
        lambda: call(normalize="softmax"),
        TypeError,
        ("normalize", "callable", "'softmax'"),
    ),
    ("a normaliser's class", lambda: call(normalize=Relu), TypeError, ("normalize", "Say Relu(...)")),
    ("no normaliser", lambda: call(normalize=None), TypeError, ("normalize", "callable", "None")),
    ("alpha of 1", lambda: Entmax(1), ValueError, ("Entmax(alpha=)", "alpha > 1", "Softmax()")),
    ("alpha below 1", lambda: Entmax(0.5), ValueError, ("Entmax(alpha=)", "alpha > 1", "0.5")),
    ("one alpha below 1", lambda: Entmax(torch.tensor([1.5, 0.9])), ValueError, ("Entmax(alpha=)", "0.8999")),
    ("alpha of NaN", lambda: Entmax(NAN), ValueError, ("Entmax(alpha=)", "finite")),
    ("no alpha", lambda: Entmax(None), TypeError, ("Entmax(alpha=)", "None")),
    (
        "alphas of other heads",
        lambda: call(normalize=Entmax(torch.full((3,), 1.5))),
        ValueError,
        ("(4,)", "(3,)"),
    ),
    ("an infinite sink", lambda: Softmax(sink=INF), ValueError, ("Softmax(sink=)", "finite")),
    ("a sink beyond floats", lambda: call(normalize=Softmax(HUGE)), ValueError, ("Softmax(sink=)", "finite")),
    (
        "sinks of other heads",
        lambda: call(normalize=Softmax(zeros(5))),
        ValueError,
        ("Softmax(sink=)", "(4,)"),
    ),
    ("a text bias", lambda: Sigmoid("b"), TypeError, ("Sigmoid(bias=)", "a number or a tensor", "'b'")),
    ("dropout above 1", lambda: call(dropout_p=1.5), ValueError, ("dropout_p", "from 0 to 1", "1.5")),
    ("dropout below 0", lambda: call(dropout_p=-0.1), ValueError, ("dropout_p", "from 0 to 1", "-0.1")),
    ("dropout of NaN", lambda: call(dropout_p=NAN), ValueError, ("dropout_p", "from 0 to 1", "nan")),
    ("dropout of text", lambda: call(dropout_p="0.1"), TypeError, ("dropout_p", "a number", "'0.1'")),
    ("dropout of empty text", lambda: call(dropout_p=""), TypeError, ("dropout_p", "a number", "''")),
    ("no dropout", lambda: call(dropout_p=None), TypeError, ("dropout_p", "a number", "None")),
    ("dropout False", lambda: call(dropout_p=False), TypeError, ("dropout_p", "a number", "False")),
    ("dropout True", lambda: call(dropout_p=True), TypeError, ("dropout_p", "a number", "True")),
    ("a tensor dropout", lambda: call(dropout_p=torch.tensor(0.1)), TypeError, ("dropout_p", "a number")),
    # ---- the other functions
    (
        "lse without softmax",
        lambda: attention_with_lse(Q, K, V, normalize=Sigmoid()),
        ValueError,
        ("normalize", "Softmax", "log-sum-exp"),
    ),
    (
        "an unknown statistic",
        lambda: observe(Q, K, V, statistics=("lse", "mean")),
        ValueError,
        ("'mean'", "lse, max"),
    ),
    ("a statistic alone", lambda: observe(Q, K, V, statistics="lse"), TypeError, ("statistics", "sequence")),
    (
        "no statistics",
        lambda: observe(Q, K, V, statistics=None),
        TypeError,
        ("statistics", "sequence", "None"),
    ),
    (
        "statistics of lists",
        lambda: observe(Q, K, V, statistics=[["lse"]]),
        (TypeError, ValueError),
        ("statistics",),
    ),
    ("negative topk", lambda: observe(Q, K, V, topk=-1), ValueError, ("topk", "0 or more", "-1")),
    ("a float topk", lambda: observe(Q, K, V, topk=2.0), TypeError, ("topk", "whole number", "2.0")),
    ("a bool topk", lambda: observe(Q, K, V, topk=True), TypeError, ("topk", "whole number", "True")),
    ("negative pool", lambda: observe(Q, K, V, pool=-8), ValueError, ("pool", "0 or more", "-8")),
    ("a pair as pool", lambda: observe(Q, K, V, pool=(8, 8)), TypeError, ("pool", "whole number", "tuple")),
    ("plan of text", lambda: plan(Q, K, "v"), TypeError, ("value", "a tensor", "'v'")),
    ("plan of a bad mask", lambda: plan(meta(Q), meta(K), meta(V), BOOL), ValueError, ("mask", "on meta")),
    ("no pieces", lambda: merge([], []), ValueError, ("merge", "at least one")),
    ("pieces of nothing", lambda: merge(None, None), TypeError, ("merge", "sequences")),
    ("a piece alone", lambda: merge(OUT, LSE), TypeError, ("merge", "sequences", "merge([out], [lse])")),
    ("more outputs than lses", lambda: merge([OUT, OUT], [LSE]), ValueError, ("merge", "2 and 1")),
    (
        "lse of another shape",
        lambda: merge([OUT], [LSE[:1]]),
        ValueError,
        ("merge", "one shape", "(1, 4, 5)"),
    ),
    (
        "pieces of two shapes",
        lambda: merge([OUT, OUT[:1]], [LSE, LSE[:1]]),
        ValueError,
        ("merge", "one shape"),
    ),
    ("lists as pieces", lambda: merge([[1.0]], [[0.0]]), TypeError, ("merge", "tensors", "list")),
    ("integer pieces", lambda: merge([OUT.long()], [LSE]), TypeError, ("merge", "floating-point", "int64")),
    ("pieces apart", lambda: merge([OUT, meta(OUT)], [LSE, meta(LSE)]), ValueError, ("merge", "one device")),
    ("a sink of other heads", lambda: merge([OUT], [LSE], sink=zeros(3)), ValueError, ("merge", "(3,)")),
    ("a sink of NaN", lambda: merge([OUT], [LSE], sink=NAN), ValueError, ("merge(sink=)", "finite", "nan")),
    ("an unknown keyword", lambda: Mechanism("x", scores=Dot()), ValueError, ("Mechanism", "'scores'")),
    ("a mechanism without a name", lambda: Mechanism(None), TypeError, ("Mechanism(name=)", "text", "None")),
    ("an unknown kernel", lambda: use_kernel("fast").__enter__(), ValueError, ("kernel", "tiled", "'fast'")),
]


@pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning")
@pytest.mark.parametrize("wrong", HOSTILE, ids=[row[0] for row in HOSTILE])
def test_hostile_calls(wrong: tuple[str, Callable[[], Any], Any, tuple[str, ...]]) -> None:
    _, make, error, fragments = wrong
    with pytest.raises(error) as caught:
        make()
    message = str(caught.value)
    for fragment in fragments:
        assert fragment in message
    assert len(message) < 400 and "\n" not in message


def test_the_table_is_long_and_says_each_thing_once() -> None:
    names = [row[0] for row in HOSTILE]
    assert len(names) >= 60 and len(set(names)) == len(names)


SAME_CHECKS = {
    "attention": lambda **keywords: attention(Q, K, V, **keywords),
    "attention_with_lse": lambda **keywords: attention_with_lse(Q, K, V, **keywords),
    "attention_weights": lambda **keywords: attention_weights(Q, K, **keywords),
    "observe": lambda **keywords: observe(Q, K, V, **keywords),
    "plan": lambda **keywords: plan(Q, K, V, **keywords),
}


@pytest.mark.parametrize("name", SAME_CHECKS)
@pytest.mark.parametrize(
    "keywords",
    [
        {"mask": BOOL.long()},
        {"mask": Causal()},
        {"bias": BOOL},
        {"score": Dot},
        {"normalize": Softmax},
        {"score": Additive(zeros(3))},
        {"mask": Padding(99)},
    ],
    ids=["mask", "alignment", "bias", "score", "normalize", "v", "padding"],
)
def test_every_public_function_refuses_the_same_things(name: str, keywords: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)) as of_attention:
        attention(Q, K, V, **keywords)
    expected = str(of_attention.value)
    if name == "attention_with_lse" and "normalize" in keywords:
        expected = "normalize: expected Softmax"
    with pytest.raises((TypeError, ValueError), match=re.escape(expected)):
        SAME_CHECKS[name](**keywords)


# ------------------------------------------------------------------ circumstances: each gives what a plain call gives


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


LONG = randn(2, 3, 80, 8)
TRIANGLE = torch.ones(80, 80).tril().bool()


@pytest.mark.parametrize(
    "mask", [Causal(), Dense(TRIANGLE), Padding.of(TRIANGLE[40:42])], ids=["causal", "bool", "keys"]
)
def test_inference_mode(mask: Any) -> None:
    expected = attention(LONG, LONG, LONG, mask)
    with torch.inference_mode():
        inside = LONG + 0.0
        assert torch.equal(attention(inside, inside, inside, mask), expected)
        assert torch.equal(observe(inside, inside, inside, mask, topk=2, pool=4).output, expected)


def test_a_mask_made_in_inference_mode() -> None:
    with torch.inference_mode():
        made = TRIANGLE.clone()
        inside = attention(LONG, LONG, LONG, made)
        kept = attention(LONG, LONG, LONG, Dense(made))
    outside = attention(LONG, LONG, LONG, made)
    expected = attention(LONG, LONG, LONG, TRIANGLE)
    assert torch.equal(inside, expected) and torch.equal(kept, expected) and torch.equal(outside, expected)


def test_an_inference_mask_that_is_changed_in_place() -> None:
    with torch.inference_mode():
        made = Dense(TRIANGLE.clone())
        attention(LONG, LONG, LONG, made)
        made.mask.copy_(TRIANGLE.mT)
        assert torch.equal(attention(LONG, LONG, LONG, made), attention(LONG, LONG, LONG, TRIANGLE.mT))


@pytest.mark.parametrize("shape", [(80, 80), (1, 3, 80, 80), (2, 1, 1, 80, 80), (1, 4, 1, 80, 80)], ids=str)
def test_a_mask_that_is_changed_in_place(shape: tuple[int, ...]) -> None:
    x = randn(2, 3, 80, 8) if len(shape) < 5 else randn(2, 4, 3, 80, 8)
    tensor = TRIANGLE.expand(shape).clone()
    mask = Dense(tensor)
    assert torch.equal(attention(x, x, x, mask), attention(x, x, x, Causal()))
    tensor.copy_(TRIANGLE.mT.expand(shape))
    assert torch.equal(attention(x, x, x, mask), attention(x, x, x, Window(0, None)))


def test_one_mask_beside_tensors_of_several_shapes() -> None:
    mask = Dense(TRIANGLE)
    for shape in ((80, 8), (3, 80, 8), (2, 3, 80, 8), (2, 2, 3, 80, 8), (1, 3, 80, 8)):
        x = randn(*shape)
        assert torch.equal(attention(x, x, x, mask), attention(x, x, x, Causal()))


def test_deterministic_mode() -> None:
    x, table = LONG.clone().requires_grad_(), randn(5).requires_grad_()

    def run() -> list[Tensor]:
        output = attention(x, x, x, Dense(TRIANGLE), bias=Relative(table), normalize=Entmax(1.4))
        seen = observe(x, x, x, Causal(), topk=3, pool=5)
        return [output, *torch.autograd.grad(output.sum(), (x, table)), seen.pooled, seen.pooled_max]

    expected = run()
    torch.use_deterministic_algorithms(True)
    try:
        found = run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_threads_that_call_at_once() -> None:
    mask, table = Dense(TRIANGLE), randn(5).requires_grad_()
    inputs = [randn(2, 3, 80, 8), randn(3, 80, 8), randn(80, 8), randn(2, 2, 3, 80, 8)]

    def run(x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        with use_kernel("tiled"):
            output = attention(x, x, x, mask, bias=Relative(table))
        return [output, *torch.autograd.grad(output.sum(), (x, table))]

    expected = [run(x) for x in inputs]
    mask.found.clear()
    found: dict[int, list[Tensor]] = {}
    barrier = threading.Barrier(8)

    def work(n: int) -> None:
        barrier.wait()
        for _ in range(5):
            found[n] = run(inputs[n % 4])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == 8
    for n, results in found.items():
        assert all(torch.equal(one, other) for one, other in zip(results, expected[n % 4], strict=True))


COPIED = {
    "causal": Causal("lower_right"),
    "and": Window(3, 1) & Padding(torch.tensor([60, 80])),
    "not": ~Dense(TRIANGLE) | Prefix(2),
    "documents": Documents(torch.arange(80) // 9) & Padding.of(TRIANGLE[50:52]),
}


@pytest.mark.parametrize("name", COPIED)
@pytest.mark.parametrize("way", ["deepcopy", "copy", "pickle"])
def test_masks_are_copied_and_pickled(name: str, way: str) -> None:
    mask = COPIED[name]
    expected = attention(LONG, LONG, LONG, mask)
    made = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}[
        way
    ](mask)
    assert torch.equal(attention(LONG, LONG, LONG, made), expected)


def test_expanded_and_overlapping_memory() -> None:
    line = torch.randn(700)
    views = [
        line[:80].view(1, 1, 80, 1).expand(2, 3, 80, 8),
        line.as_strided((2, 3, 80, 8), (3, 5, 7, 1)),
        line[:1].expand(2, 3, 80, 8),
        randn(2, 3, 80, 16)[..., ::2],
        randn(2, 8, 80, 3).transpose(1, 3),
        randn(2, 3, 80, 8).to(memory_format=torch.channels_last),
        randn(8, 80, 3, 2).permute(3, 2, 1, 0),
    ]
    for view in views:
        plain = view.contiguous().clone()
        for score in (Dot(), Additive(torch.linspace(-1, 1, 8)), Distance()):
            torch.testing.assert_close(
                attention(view, view, view, Causal(), score=score),
                attention(plain, plain, plain, Causal(), score=score),
            )


def test_a_view_of_a_leaf_gets_its_gradient() -> None:
    whole = randn(2, 80, 3, 24).requires_grad_()
    q, k, v = whole.transpose(1, 2).split(8, -1)
    output = attention(q, k, v, Causal())
    (grad,) = torch.autograd.grad(output.cos().sum(), whole)
    parts = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(attention(*parts, Causal()).cos().sum(), parts)
    torch.testing.assert_close(grad, torch.cat(expected, -1).transpose(1, 2))


def test_an_in_place_change_between_forward_and_backward_is_torchs_own_error() -> None:
    x = LONG.clone().requires_grad_()
    changed = x * 1.0
    output = attention(changed, x, x, Causal())
    changed.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


SIZES = {"B": 2, "H": 3, "Tq": 4, "Tk": 5, "D": 6, "Dv": 7}
WORDS = {
    "dot": {"score": Dot(softcap=2.0)},
    "concat": {"score": lambda D: Concat(torch.ones(D), torch.ones(D))},
    "bilinear": {"score": lambda D: Bilinear(torch.ones(D, D))},
    "additive": {"score": lambda D: Additive(torch.ones(D))},
    "cosine": {"score": Cosine()},
    "distance": {"score": Distance()},
    "callable": {"score": lambda D: lambda q, k: q @ k.mT},
    "sink": {"normalize": Softmax(0.0)},
    "entmax": {"normalize": Entmax(1.5)},
    "sigmoid": {"normalize": Sigmoid()},
    "alibi": {"bias": Alibi(alignment="lower_right")},
    "relative": {"bias": Relative(torch.ones(3), "lower_right"), "mask": Causal("lower_right")},
    "window or prefix": {"mask": Window(1, 0, "lower_right") | Prefix(0)},
    "rule": {"mask": Rule(lambda b, h, i, j: i >= j)},
}


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize(
    "names", [("B",), ("H",), ("Tq",), ("Tk",), ("D",), ("Dv",), ("Tq", "Tk"), tuple(SIZES)], ids="".join
)
def test_empty_tensors_of_every_kind(names: tuple[str, ...], word: str) -> None:
    n = SIZES | dict.fromkeys(names, 0)
    keywords: dict[str, Any] = dict(WORDS[word])
    if callable(keywords.get("score")) and not isinstance(keywords["score"], (Dot, Cosine, Distance)):
        keywords["score"] = keywords["score"](n["D"])
    q, k, v = (
        torch.ones(n["B"], n["H"], n[length], n[width], requires_grad=True)
        for length, width in (("Tq", "D"), ("Tk", "D"), ("Tk", "Dv"))
    )
    for kernel in ("reference", "tiled", "inline", None):
        if kernel == "tiled" and word in ("callable", "rule"):
            continue
        with use_kernel(kernel) if kernel else contextlib.nullcontext():
            output = attention(q, k, v, **keywords, dropout_p=0.1)
        assert output.shape == (n["B"], n["H"], n["Tq"], n["Dv"])
        assert bool(torch.isfinite(output).all()) and (n["Tk"] or not output.any())
        grads = torch.autograd.grad(output.sum(), (q, k, v))
        assert all(
            grad.shape == x.shape and torch.isfinite(grad).all()
            for grad, x in zip(grads, (q, k, v), strict=True)
        )
    assert attention_weights(q, k, **keywords).shape == (n["B"], n["H"], n["Tq"], n["Tk"])
    seen = observe(q, k, v, **keywords, topk=2, pool=3)
    assert seen.received.shape == (n["B"], n["H"], n["Tk"]) and seen.max.shape == (n["B"], n["H"], n["Tq"])
    assert plan(q, k, v, **keywords).pairs <= n["B"] * n["H"] * n["Tq"] * n["Tk"]
