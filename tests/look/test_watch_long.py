"""Long inputs: statistics in linear memory, in about the time that the attention itself takes."""

import threading
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.look import Keep, watch
from regard.look._record_statistics import STATISTICS


class Call(nn.Module):
    def forward(self, *args, **kwargs):
        return F.scaled_dot_product_attention(*args, **kwargs)


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def peak_of(run):
    """The most memory that was resident while something ran, beyond what was before."""
    before, most, done = resident(), [0], threading.Event()

    def poll():
        while not done.is_set():
            most[0] = max(most[0], resident())
            time.sleep(0.002)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        result = run()
    finally:
        done.set()
        thread.join()
    return result, max(most[0], resident()) - before


def test_memory_is_linear():
    """Weights of 4 heads over 4,096 tokens would be 256 MiB; their statistics, top-8 included, are 1.6 MiB."""
    made = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 4, 4096, 32, generator=made), torch.randn(1, 2, 4096, 32, generator=made)

    def run(keep):
        with torch.no_grad(), watch(Call(), keep) as record:
            Call.forward(None, query[:, :, :64], key, key, enable_gqa=True)
            Call.forward(None, query, key, key, is_causal=True, enable_gqa=True)
        return record.sites[-1]

    run(Keep())
    site, peak = peak_of(lambda: run(Keep(topk=8, pool=64, rows=(-1,), heads=(1,))))
    assert peak < 64 * 2**20
    held = [*site.statistics.values(), site.top_weights, site.top_keys]
    assert sum(tensor.numel() * tensor.element_size() for tensor in held) <= (64 + 64) * 4 * 4096
    assert set(site.statistics) == set(STATISTICS)
    # What is known of such a map without looking at it: causal, and rows that sum to 1.
    torch.testing.assert_close(site.statistics["mass"], torch.ones(1, 4, 4096))
    torch.testing.assert_close(site.pooled.sum(-1), torch.ones(1, 1, 64), rtol=1e-5, atol=1e-5)
    assert float(site.pooled.triu(1).abs().max()) == 0.0
    assert bool((site.top_keys <= torch.arange(4096)[:, None]).all())
    rows = torch.tensor([0, 7, 4095])
    scores = query[:, :, rows] @ key.repeat_interleave(2, 1).mT / 32**0.5
    weights = scores.masked_fill(torch.arange(4096) > rows[:, None], -torch.inf).softmax(-1)
    torch.testing.assert_close(site.row_weights[:, 0], weights[:, 1, -1:], rtol=1e-5, atol=1e-6)
    for name, expected in {
        "max": weights.amax(-1),
        "entropy": torch.special.entr(weights).sum(-1),
        "first": weights[..., 0],
        "self": weights.gather(-1, rows[None, None, :, None].expand(1, 4, 3, 1))[..., 0],
        "distance": (weights * (rows[:, None] - torch.arange(4096)).abs()).sum(-1),
    }.items():
        torch.testing.assert_close(
            site.statistics[name][:, :, rows], expected, rtol=1e-3, atol=1e-4, msg=name
        )


@pytest.mark.slow
def test_one_head_of_32768_tokens():
    made = torch.Generator().manual_seed(0)
    query = torch.randn(1, 1, 32768, 64, generator=made)

    def run():
        with torch.no_grad(), watch(Call(), Keep(topk=8, pool=512)) as record:
            Call.forward(None, query, query, query, is_causal=True)
        return record.sites[0]

    site, peak = peak_of(run)
    assert peak < 500 * 2**20
    torch.testing.assert_close(site.statistics["mass"], torch.ones(1, 1, 32768))
    # A random query is most like itself.
    assert float((site.top_keys[0, 0, :, 0] == torch.arange(32768)).float().mean()) > 0.9


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.network
@pytest.mark.slow
def test_smollm2_over_a_real_text(one_thread):
    """Two of its layers over 8,192 tokens of these pages, interleaved, on the thread's own time."""
    from regard.look._model import load_model

    loaded = load_model("smollm2")
    model = getattr(loaded.model, "model", loaded.model)
    model.layers = model.layers[:2]
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    ids = loaded.tokenizer("\n".join(page.read_text() for page in pages))["input_ids"][:8192]
    assert len(ids) == 8192
    inputs = {"input_ids": torch.tensor([ids]), "use_cache": False}

    def run(keep):
        start = time.thread_time()
        with torch.no_grad():
            if keep is None:
                return model(**inputs), time.thread_time() - start
            with watch(model, keep) as record:
                model(**inputs)
        return record, time.thread_time() - start

    rounds = [(run(None)[1], *run(Keep(topk=8))[::-1]) for _ in range(3)]
    ratios = sorted(watched / plain for plain, watched, _ in rounds)
    record = rounds[-1][2]
    assert ratios[1] <= 2.0, ratios
    assert [site.sizes[:5] for site in record.sites] == [(1, 9, 3, 8192, 8192)] * 2
    _, plain = peak_of(lambda: run(None)[1])
    _, watched = peak_of(lambda: run(Keep(topk=8))[0])
    assert watched - plain <= 500 * 2**20
