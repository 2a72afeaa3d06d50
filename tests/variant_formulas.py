"""The variants' formulas as their papers give them, in plain torch: the independent side of test_variants.py.

Nothing here is made of regard but the mechanisms that are compared.
"""

import math

import torch

from regard import variants

B, H, T, D = 2, 4, 7, 6


def draw(*shape, positive=False):
    numbers = torch.randn(shape, dtype=torch.float64)
    return (numbers.abs() + 0.2 if positive else numbers).requires_grad_()


def dot(q, k):
    return torch.einsum("bhid,bhjd->bhij", q, k)


def scaled(q, k):
    return dot(q, k) / math.sqrt(D)


def where(rule):
    """A rule of (query, key) as a bool tensor (T, T), pair by pair."""
    return torch.tensor([[bool(rule(i, j)) for j in range(T)] for i in range(T)])


def softmax(scores, allowed=None):
    if allowed is not None:
        scores = torch.where(allowed, scores, -torch.inf)
    shares = torch.exp(scores - scores.amax(-1, keepdim=True))
    return shares / shares.sum(-1, keepdim=True)


def away():
    return (torch.arange(T)[:, None] - torch.arange(T)).abs().double()


def sort_sparsemax(scores):
    """Martins and Astudillo's algorithm 1, by sorting."""
    ordered = scores.sort(-1, descending=True).values
    sums = ordered.cumsum(-1)
    place = torch.arange(1, scores.shape[-1] + 1)
    size = (1 + place * ordered > sums).sum(-1, keepdim=True)
    tau = (sums.gather(-1, size - 1) - 1) / size
    return (scores - tau).clamp(min=0)


def solve_entmax(scores, alpha):
    """tau by bisection, then one Newton step with gradient: implicit differentiation of sum_j w_j = 1."""
    power = alpha - 1
    x = scores * power
    low, high = x.detach().amax(-1, keepdim=True) - 1, x.detach().amax(-1, keepdim=True)
    for _ in range(80):
        tau = (low + high) / 2
        more = ((x.detach() - tau).clamp(min=0) ** (1 / power.detach())).sum(-1, keepdim=True) > 1
        low, high = torch.where(more, tau, low), torch.where(more, high, tau)
    inside = x.detach() > low
    gap = torch.where(inside, x - low, 1.0)
    slope = (torch.where(inside, gap.detach() ** (1 / power.detach() - 1), 0.0) / power.detach()).sum(
        -1, keepdim=True
    )
    tau = low + (torch.where(inside, gap ** (1 / power), 0.0).sum(-1, keepdim=True) - 1) / slope
    return torch.where(inside, torch.where(inside, x - tau, 1.0) ** (1 / power), 0.0)


# Each case: name -> function (query, key, *parameters) -> (mechanism, weights by the paper's formula).
CASES, PARAMETERS, KEY_HEADS = {}, {}, {}


def case(*shapes, positive=False, key_heads=H, name=None):
    def add(function):
        label = name or function.__name__
        CASES[label] = function
        PARAMETERS[label] = (shapes, positive)
        KEY_HEADS[label] = key_heads
        return function

    return add


@case()
def scaled_dot(q, k):
    return variants.scaled_dot(), softmax(scaled(q, k))


@case((D,))
def bahdanau(q, k, v):
    hidden = torch.tanh(q[:, :, :, None, :] + k[:, :, None, :, :])
    return variants.bahdanau(v), softmax((hidden * v).sum(-1))


@case()
def luong_dot(q, k):
    return variants.luong_dot(), softmax(dot(q, k))


@case((H, D, D))
def luong_general(q, k, weight):
    scores = torch.einsum("bhid,hde,bhje->bhij", q, weight, k)
    return variants.luong_general(weight), softmax(scores)


@case((H, D))
def luong_concat(q, k, v):
    hidden = torch.tanh(q[:, :, :, None, :] + k[:, :, None, :, :])
    return variants.luong_concat(v), softmax(torch.einsum("bhijd,hd->bhij", hidden, v))


@case((D,), (D,))
def linear_concat(q, k, w_query, w_key):
    return variants.linear_concat(w_query, w_key), softmax(
        (q @ w_query)[..., None] + (k @ w_key)[..., None, :]
    )


@case((D,), (D,))
def graph(q, k, w_query, w_key):
    neighbours = where(lambda i, j: i == j or (i * j) % 3 == 1)
    raw = (q @ w_query)[..., None] + (k @ w_key)[..., None, :]
    leaky = torch.where(raw > 0, raw, 0.2 * raw)
    return variants.graph(w_query, w_key, neighbours), softmax(leaky, neighbours)


@case((D,))
def graph_v2(q, k, a):
    raw = q[:, :, :, None, :] + k[:, :, None, :, :]
    return variants.graph_v2(a), softmax((torch.where(raw > 0, raw, 0.2 * raw) * a).sum(-1))


@case((H,))
def cosine(q, k, scale):
    lengths = q.square().sum(-1).sqrt()[..., :, None] * k.square().sum(-1).sqrt()[..., None, :]
    return variants.cosine(scale), softmax(scale[:, None, None] * dot(q, k) / lengths)


@case(())
def qk_norm(q, k, g):
    lengths = q.square().sum(-1).sqrt()[..., :, None] * k.square().sum(-1).sqrt()[..., None, :]
    return variants.qk_norm(g), softmax(g * dot(q, k) / lengths)


@case()
def distance(q, k):
    squared = (q[:, :, :, None, :] - k[:, :, None, :, :]).square().sum(-1)
    return variants.distance(D), softmax(-squared / math.sqrt(D))


@case()
def soft_capped(q, k):
    return variants.soft_capped(2.0), softmax(2 * torch.tanh(scaled(q, k) / 2))


@case(key_heads=1)
def multi_query(q, k):
    return variants.multi_query(), softmax(torch.einsum("bhid,bjd->bhij", q, k[:, 0]) / math.sqrt(D))


@case(key_heads=2)
def grouped_query(q, k):
    heads = [q[:, h] @ k[:, h // 2].mT for h in range(H)]
    return variants.grouped_query(), softmax(torch.stack(heads, 1) / math.sqrt(D))


@case((H,))
def sink(q, k, logits):
    grown = torch.exp(scaled(q, k))
    return variants.sink(logits), grown / (grown.sum(-1, keepdim=True) + logits.exp()[:, None, None])


@case()
def off_by_one(q, k):
    grown = torch.exp(scaled(q, k))
    return variants.off_by_one(), grown / (1 + grown.sum(-1, keepdim=True))


@case()
def sparsemax(q, k):
    return variants.sparsemax(), sort_sparsemax(scaled(q, k))


@case()
def entmax15(q, k):
    return variants.entmax15(), solve_entmax(scaled(q, k), torch.tensor(1.5, dtype=torch.float64))


@case((H,), positive=True)
def entmax(q, k, above):
    return variants.entmax(1 + above), solve_entmax(scaled(q, k), 1 + above[:, None, None])


@case()
def sigmoid(q, k):
    return variants.sigmoid(T), 1 / (1 + T * torch.exp(-scaled(q, k)))


@case()
def relu(q, k):
    return variants.relu(D, T), scaled(q, k).clamp(min=0) / T


@case()
def squared_relu(q, k):
    return variants.squared_relu(T), (dot(q, k) / T).clamp(min=0) ** 2


@case()
def top_k(q, k):
    scores = scaled(q, k)
    rank = (scores[..., None, :] > scores[..., :, None]).sum(-1)
    return variants.top_k(3), softmax(scores, rank < 3)


@case()
def causal(q, k):
    return variants.causal(), softmax(scaled(q, k), where(lambda i, j: j <= i))


@case()
def bidirectional(q, k):
    real = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 1, 1]])
    return variants.bidirectional(real), softmax(scaled(q, k), real[:, None, None, :] == 1)


@case()
def cross(q, k):
    real = torch.arange(T) < torch.tensor([3, 5])[:, None]
    return variants.cross(real), softmax(scaled(q, k), real[:, None, None, :])


@case()
def prefix_lm(q, k):
    allowed = torch.stack([where(lambda i, j, n=n: j <= i or j < n) for n in (2, 4)])[:, None]
    return variants.prefix_lm(torch.tensor([2, 4])), softmax(scaled(q, k), allowed)


@case()
def packed_documents(q, k):
    ids = [0, 0, 0, 1, 1, 2, 2]
    allowed = where(lambda i, j: j <= i and ids[i] == ids[j])
    return variants.packed_documents(torch.tensor(ids)), softmax(scaled(q, k), allowed)


@case()
def sliding_window(q, k):
    return variants.sliding_window(3), softmax(scaled(q, k), where(lambda i, j: i - 3 < j <= i))


@case()
def streaming(q, k):
    return variants.streaming(2, 2), softmax(
        scaled(q, k), where(lambda i, j: j <= i and (j > i - 2 or j < 2))
    )


@case()
def longformer(q, k):
    chosen = torch.tensor([[1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 1, 0]]) == 1
    near = where(lambda i, j: abs(i - j) <= 1)
    allowed = near | chosen[:, None, None, :] | chosen[:, None, :, None]
    return variants.longformer(1, chosen), softmax(scaled(q, k), allowed)


@case()
def dilated_window(q, k):
    return variants.dilated_window(3, 2), softmax(scaled(q, k), where(lambda i, j: i - j in (0, 2, 4)))


@case()
def strided_sparse(q, k):
    allowed = where(lambda i, j: j <= i and (i - j <= 3 or (i - j) % 3 == 0))
    return variants.strided_sparse(3), softmax(scaled(q, k), allowed)


@case()
def fixed_sparse(q, k):
    allowed = where(lambda i, j: j <= i and (i // 3 == j // 3 or j in (2, 5)))
    return variants.fixed_sparse(3, 1), softmax(scaled(q, k), allowed)


@case()
def local_blocks(q, k):
    return variants.local_blocks(3, T), softmax(scaled(q, k), where(lambda i, j: i // 3 == j // 3))


@case()
def chunked(q, k):
    return variants.chunked(3, T), softmax(scaled(q, k), where(lambda i, j: i // 3 == j // 3 and j <= i))


@case()
def alibi(q, k):
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256], dtype=torch.float64)
    scores = scaled(q, k) - slopes[:, None, None] * away()
    return variants.alibi(), softmax(scores, where(lambda i, j: j <= i))


@case((H, 5))
def relative(q, k, table):
    index = torch.tensor([[max(-2, min(2, j - i)) + 2 for j in range(T)] for i in range(T)])
    return variants.relative(table), softmax(scaled(q, k) + table[:, index])


@case((8, H))
def t5(q, k, buckets):
    bucket = {
        0: 0,
        1: 1,
        2: 2,
        3: 2,
        4: 3,
        5: 3,
        6: 3,
    }  # 4 a side, 2 of them exact, 4 and more in the last of reach 6
    index = torch.tensor([[bucket[abs(i - j)] + 4 * (j > i) for j in range(T)] for i in range(T)])
    return variants.t5(buckets, 6), softmax(dot(q, k) + buckets[index].permute(2, 0, 1))


@case((6, H))
def t5_decoder(q, k, buckets):
    bucket = [0, 1, 2, 3, 3, 4, 5]  # 3 exact; log(d / 3) / log(2) * 3 of 3: 4 -> 1.245, 5 -> 2.2, 6 -> 3
    bucket = [
        d if d < 3 else min(5, 3 + int(math.log(d / 3) / math.log(6 / 3) * 3)) for d in range(len(bucket))
    ]
    index = torch.tensor([[bucket[max(0, i - j)] for j in range(T)] for i in range(T)])
    scores = dot(q, k) + buckets[index].permute(2, 0, 1)
    return variants.t5(buckets, 6, bidirectional=False), softmax(scores, where(lambda i, j: j <= i))


@case((H,), (H,), positive=True)
def kerple_log(q, k, r1, r2):
    scores = scaled(q, k) - r1[:, None, None] * torch.log(1 + r2[:, None, None] * away())
    return variants.kerple_log(r1, r2, T - 1), softmax(scores, where(lambda i, j: j <= i))


@case((H,), (H,), positive=True)
def kerple_power(q, k, r1, r2):
    r2 = 2 * torch.sigmoid(r2)
    decay = torch.exp(r2[:, None, None] * torch.log(away() + (away() == 0))) * (away() > 0)
    scores = scaled(q, k) - r1[:, None, None] * decay
    return variants.kerple_power(r1, r2, T - 1), softmax(scores, where(lambda i, j: j <= i))


@case((13, H), name="swin")
def swin_strip(q, k, table):
    bias = torch.stack([torch.stack([table[i - j + T - 1] for j in range(T)]) for i in range(T)])
    return variants.swin(table, 1, T), softmax(scaled(q, k) + bias.permute(2, 0, 1))


@case((B, H, T))
def forgetting(q, k, gates):
    logs = torch.nn.functional.logsigmoid(gates)
    sums = [[logs[..., j + 1 : i + 1].sum(-1) for j in range(T)] for i in range(T)]
    decay = torch.stack([torch.stack(row, -1) for row in sums], -2)
    return variants.forgetting(logs), softmax(scaled(q, k) + decay, where(lambda i, j: j <= i))


@case((5, D))
def shaw(q, k, table):
    index = torch.tensor([[max(-2, min(2, j - i)) + 2 for j in range(T)] for i in range(T)])
    keys = k[:, :, None] + table[index]
    return variants.shaw(q, table), softmax((q[:, :, :, None] * keys).sum(-1) / math.sqrt(D))


@case((H, D), (H, D), (H, 2 * T - 1, D))
def transformer_xl(q, k, u, v, table):
    index = torch.tensor([[j - i + T - 1 for j in range(T)] for i in range(T)])
    content = torch.einsum("bhid,bhjd->bhij", q + u[:, None], k)
    place = torch.einsum("bhid,hijd->bhij", q + v[:, None], table[:, index])
    scores = (content + place) / math.sqrt(D)
    return variants.transformer_xl(q, u, v, table), softmax(scores, where(lambda i, j: j <= i))


def inputs(name):
    shapes, positive = PARAMETERS[name]
    key = draw(B, KEY_HEADS[name], T, D)
    return (
        draw(B, H, T, D),
        key,
        draw(B, KEY_HEADS[name], T, 5),
        [draw(*s, positive=positive) for s in shapes],
    )
