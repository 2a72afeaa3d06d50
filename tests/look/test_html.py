import base64
import json
import re
import zlib

import numpy as np
import pytest
import torch

from regard.look import Record, Site, html


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="record">(.*?)</script>', page, re.S)[1])


def weights_of(data):
    packed = np.frombuffer(
        zlib.decompress(base64.b64decode(data["weights"])), "<u2" if data["bits"] == 16 else "u1"
    )
    return packed / 65535 if data["bits"] == 16 else (packed / 255) ** 2


def test_the_page_carries_every_weight(record):
    data = data_of(html.page(record))
    numbers = weights_of(data)
    for site, head_starts in zip(record.sites, [one["starts"] for one in data["sites"]], strict=True):
        for head, start in enumerate(head_starts):
            map_ = numbers[start : start + 16].reshape(4, 4)
            np.testing.assert_allclose(map_, site.weights[0, head].numpy(), atol=0.5001 / 65535)


def test_it_opens_where_it_is_told(record):
    data = data_of(html.page(record, 1, 0))
    assert (data["layer"], data["head"]) == (1, 0)
    with pytest.raises(ValueError, match="--layer 9"):
        html.page(record, 9, 0)


def test_nothing_outside_can_be_loaded(record):
    page = html.page(record)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?:", page)


def test_text_is_inert(record):
    record.text = "</script><script>alert(1)</script><!-- $policy \u202e"
    record.sites[0].query_tokens = ()
    page = html.page(record)
    assert page.count("<script") == 2 and "<!--" not in page and "\u202e" not in page
    assert "&lt;script&gt;alert(1)" in page and "$policy" in page
    assert [token["text"] for token in data_of(page)["sites"][0]["queries"]] == ["0", "1", "2", "3"]
    assert data_of(page)["sites"][0]["keys"][1]["text"] == "<b>bold</b>"


@pytest.mark.parametrize(
    ("text", "direction"),
    [("the cat", "ltr"), ("12 مرحبا the", "rtl"), ("שלום", "rtl"), ("猫", "ltr"), ("😀", "ltr")],
)
def test_direction(record, text, direction):
    record.text = text
    assert f'id="tokens" class="tokens" dir="{direction}"' in html.page(record)


@pytest.mark.parametrize(
    ("budget", "count", "bits", "said"),
    [
        (128, 4, 16, "to within 1/65535"),
        (127, 4, 8, "to within 0.004"),
        (63, 1, 16, "Only layer 0 is in this page: all 4 maps"),
    ],
)
def test_what_does_not_fit_is_left_out_and_said(record, monkeypatch, budget, count, bits, said):
    first, second = record.sites
    second.query, record.sites = torch.zeros(1, 3, 4, 2), [first, second]
    first.query, first.__dict__["weights"] = torch.zeros(1, 1, 4, 2), torch.full((1, 1, 4, 4), 0.3)
    second.__dict__["weights"] = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(html, "_BUDGET", budget)
    page = html.page(record, 0, 0)
    data = data_of(page)
    assert (data["bits"], len(weights_of(data))) == (bits, 16 * count)
    assert [start is not None for site in data["sites"] for start in site["starts"]].count(True) == count
    assert said in page and ("Only layer" in page) == (count < 4)
    np.testing.assert_allclose(weights_of(data)[:16], 0.3, atol=0.004 if bits == 8 else 1e-5)


def test_a_record_of_nothing():
    with pytest.raises(ValueError, match="holds no attention"):
        html.page(Record())


def test_cross_attention_has_both_sides(record):
    site = record.sites[0]
    record.sites = [
        Site("x", site.query, site.key[:, :, :2], site.value[:, :, :2], site.output, 1.0, kind="cross")
    ]
    record.sites[0].__dict__["weights"] = torch.full((1, 2, 4, 2), 0.5)
    described = data_of(html.page(record))["sites"][0]
    assert described["cross"] and (len(described["queries"]), len(described["keys"])) == (4, 2)
