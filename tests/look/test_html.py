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
    return np.frombuffer(zlib.decompress(base64.b64decode(data["weights"])), "<u2")


def test_the_page_carries_every_weight(record):
    data = data_of(html.page(record))
    numbers = weights_of(data)
    for site, head_starts in zip(record.sites, [one["starts"] for one in data["sites"]], strict=True):
        for head, start in enumerate(head_starts):
            map_ = numbers[start : start + 16].reshape(4, 4) / 65535
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
    ("budget", "count", "said"),
    [
        (400, 4, None),
        (100, 2, "Only layer 1 is in this page"),
        (40, 1, "Only layer 1, head 0 is in this page"),
    ],
)
def test_what_does_not_fit_is_left_out_and_said(record, monkeypatch, budget, count, said):
    monkeypatch.setattr(html, "_BUDGET", budget)
    page = html.page(record, 1, 0)
    data = data_of(page)
    assert len(weights_of(data)) == 16 * count
    assert sum(start is not None for site in data["sites"] for start in site["starts"]) == count
    assert (said in page) if said else "in this page:" not in page


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
