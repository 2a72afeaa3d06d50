"""Reading a page back, and records to make pages of."""

import base64
import json
import re
import zlib

import numpy as np
import torch

from regard.look import Record, Site, Token


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="record">(.*?)</script>', page, re.S)[1])


def chunk(data, number):
    return zlib.decompress(base64.b64decode(data["chunks"][number]))


def map_of(data, layer, head):
    """The map of a head as the page carries it, and how it is carried."""
    carried = data["sites"][layer]["heads"][head]["map"]
    packed = np.frombuffer(chunk(data, carried["chunk"]), "u1" if carried["bits"] == 8 else "<u2")
    values = (packed / 255) ** 2 if carried["bits"] == 8 else packed / 65535
    return values.reshape(carried["rows"], carried["columns"]), carried


def top_of(data, layer, head):
    """(weights, keys) of a head's list of largest weights as the page carries it, each (Tq, k)."""
    site = data["sites"][layer]
    top, rows = site["heads"][head]["top"], data["tables"][site["queries"]]["length"]
    planes = np.frombuffer(chunk(data, top["chunk"]), "u1").reshape(-1, rows, top["k"]).astype(int)
    keys = sum(planes[place] << 8 * place for place in range(len(planes) - 2))
    return (planes[-2] + (planes[-1] << 8)) / 65535, keys


def record_with(weights, words=None, **site):
    """A record of one layer with the given weights (H, Tq, Tk)."""
    heads, queries, keys = weights.shape
    made = Site(
        "layer.0",
        torch.zeros(1, heads, queries, 1),
        torch.zeros(1, heads, keys, 1),
        torch.zeros(1, heads, keys, 1),
        scale=1.0,
        **site,
    )
    made.__dict__["weights"] = weights[None]
    words = words or [f"w{number}" for number in range(keys)]
    text, tokens, start = " ".join(words), [], 0
    for word in words:
        tokens.append(Token(word, start, start + len(word)))
        start += len(word) + 1
    record = Record([made], text=text, model="toy")
    record.label(tokens)
    return record


def random_record(layers, heads, length, *, causal):
    """Seeded random attention, causal or not, whose weights differ by orders of magnitude."""
    draw = torch.Generator().manual_seed(0)
    sites = []
    for layer in range(layers):
        scores = torch.randn(heads, length, length, generator=draw) * 1.5
        if causal:
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        [site] = record_with(scores.softmax(-1), causal=causal).sites
        site.layer = layer
        sites.append(site)
    return Record(sites, text=record_with(torch.zeros(1, length, length)).text, model="random")
