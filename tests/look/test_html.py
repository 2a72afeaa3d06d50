import base64
import copy
import hashlib
import html as markup
import re

import numpy as np
import pytest
import torch

from regard.look import Grid, Record, Site, Sizes, Token, _page_pack, html
from regard.look._difference import difference
from regard.look._page_pack import eighths, from_eighths, packed_top
from regard.look._shown import Top
from tests.look.pages import chunk, data_of, map_of, random_record, record_with, top_of


def footer_of(page):
    return markup.unescape(re.sub("<[^>]*>", " ", re.search("<footer>(.*)</footer>", page, re.S)[1]))


def test_the_page_carries_every_weight(record):
    data = data_of(html.page(record))
    for layer, site in enumerate(record.sites):
        for head in range(2):
            found, carried = map_of(data, layer, head)
            assert carried["whole"] and carried["bits"] == 16
            np.testing.assert_allclose(found, site.weights[0, head].numpy(), atol=0.5001 / 65535)


def test_it_opens_where_it_is_told(record):
    assert data_of(html.page(record, 1, 0))["opened"][:2] == [1, 0]
    with pytest.raises(ValueError, match="layer 9: there are 2 layers"):
        html.page(record, 9, 0)
    with pytest.raises(ValueError, match="head 2: there are 2 heads"):
        html.page(record, 0, 2)


def test_nothing_outside_can_be_loaded(record):
    page = html.page(record)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy
    script = re.search(r"<script>(.*)</script>\n</body>", page, re.S)[1]
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    outside = re.sub("http://www.w3.org/2000/svg", "", page)
    assert not re.search(r"(src|href)\s*=\s*[\"']\w+:|url\(|@import|https?:", outside)


def test_what_is_shipped_is_small():
    parts = [html._script(), html._part("look.css"), html._part("page.html")]
    assert sum(len(part.encode()) for part in parts) <= 80_000


def test_text_is_inert(record):
    record.text = "</script><script>alert(1)</script><!-- $policy \u202e"
    record.sites[0].query_tokens = ()
    page = html.page(record)
    assert page.count("<script") == 2 and "<!--" not in page and "\u202e" not in page.split("<script")[0]
    assert "&lt;script&gt;alert(1)" in page and "$policy" in page
    data = data_of(page)
    assert data["tables"][data["sites"][0]["queries"]]["tokens"] is None
    assert data["tables"][data["sites"][0]["keys"]]["tokens"][1][0] == "<b>bold</b>"


@pytest.mark.parametrize(
    ("words", "direction"),
    [("the cat", "ltr"), ("12 مرحبا the", "rtl"), ("שלום", "rtl"), ("猫", "ltr"), ("😀", "ltr")],
)
def test_direction(words, direction):
    page = html.page(record_with(torch.eye(len(words.split()))[None], words.split()))
    assert data_of(page)["tables"][0]["dir"] == direction


def test_many_weights_are_carried_in_eight_bits_with_exact_lists(monkeypatch):
    monkeypatch.setattr(_page_pack, "FINE", 100)
    record = random_record(1, 2, 20, causal=True)
    page = html.page(record, 0, 0)
    found, carried = map_of(data_of(page), 0, 1)
    exact = record.sites[0].weights[0, 1].numpy()
    assert carried["bits"] == 8
    np.testing.assert_allclose(found, exact, atol=0.004)
    weights, keys = top_of(data_of(page), 0, 1)
    np.testing.assert_allclose(weights, np.sort(exact)[:, ::-1][:, :8], atol=0.5001 / 65535)
    assert (keys[weights > 0] == exact.argsort(-1)[:, ::-1][:, :8][weights > 0]).all()
    stated = float(re.search(r"largest error here is (0\.\d+)", footer_of(page))[1])
    worst = max(
        np.abs(map_of(data_of(page), 0, head)[0] - record.sites[0].weights[0, head].numpy()).max()
        for head in (0, 1)
    )
    assert stated == pytest.approx(worst, abs=5e-5) and 0 < stated < 0.004


def test_codes_come_back():
    weights = np.linspace(-1, 1, 999, dtype=np.float32)
    assert np.abs(from_eighths(eighths(weights, True), True) - weights).max() < 0.008
    assert np.abs(from_eighths(eighths(abs(weights), False), False) - abs(weights)).max() < 0.004
    assert from_eighths(eighths(np.zeros(1), True), True) == 0


@pytest.mark.parametrize(("keys", "wide"), [(256, 1), (257, 2), (65537, 3)])
def test_keys_take_the_bytes_they_need(keys, wide):
    packed = packed_top(Top(np.array([[0.5, 0.0]]), np.array([[keys - 1, -1]])), keys, signed=False)
    assert len(packed) == 2 * (wide + 2)
    assert int.from_bytes(packed[0 : 2 * wide : 2], "little") == keys - 1


def test_what_does_not_fit_becomes_blocks_and_the_page_says_so(monkeypatch):
    monkeypatch.setattr(_page_pack, "FINE", 100)
    monkeypatch.setattr(_page_pack, "SMALL", 10)
    record = random_record(2, 3, 60, causal=False)
    whole = len(html.page(record, 1, 2))
    page = html.page(record, 1, 2, budget=23_000)
    forms = [[head["map"]["whole"] for head in site["heads"]] for site in data_of(page)["sites"]]
    assert forms[1][2] and forms[1] != [False] * 3 and forms[0] == [False] * 3
    assert len(page) < whole
    assert "layer 1: every weight" in footer_of(page) and "layer 0: blocks" in footer_of(page)
    blocks, carried = map_of(data_of(page), 0, 0)
    exact = record.sites[0].weights[0, 0].reshape(10, 6, 10, 6)
    assert (carried["tall"], carried["wide"], blocks.shape) == (6, 6, (10, 10))
    np.testing.assert_allclose(blocks, exact.amax((1, 3)).numpy(), atol=0.004)
    means = (np.frombuffer(chunk(data_of(page), carried["mean"]), "u1") / 255) ** 2
    np.testing.assert_allclose(means.reshape(10, 10), exact.mean((1, 3)).numpy(), atol=0.004)


def test_a_small_budget_leaves_pictures_and_says_so(record):
    page = html.page(record, 1, 0, budget=10)
    data = data_of(page)
    assert all(head["map"] is None for site in data["sites"] for head in site["heads"])
    assert len(chunk(data, data["thumbs"])) == 4 * 16
    assert "all 4 heads: the numbers of the catalogue" in footer_of(
        page
    ) and "larger than 1e-05 MB" in footer_of(page)


def test_a_long_record_without_weights_is_carried_as_blocks_and_lists():
    length = 3000
    site = Site("layer.0", sizes=Sizes(1, 1, 1, length, length, 8, 8), scale=1.0, offset=0)
    site.pooled = torch.full((1, 1, 10, 10), 0.1)
    site.pooled_max = torch.eye(10)[None, None]
    site.cell = (300, 300)
    site.top_keys = torch.tensor([2999, -1]).expand(1, 1, length, 2).to(torch.int32)
    site.top_weights = torch.tensor([0.25, 0.0]).expand(1, 1, length, 2)
    site.statistics = {
        "entropy": torch.full((1, 1, length), 2.0).log(),
        "first": torch.full((1, 1, length), 0.125),
    }
    page = html.page(Record([site], text="x"))
    data = data_of(page)
    blocks, carried = map_of(data, 0, 0)
    assert not carried["whole"] and (carried["tall"], carried["wide"]) == (300, 300)
    assert (blocks == np.eye(10)).all()
    weights, keys = top_of(data, 0, 0)
    assert (
        np.allclose(weights[:, 0], 0.25, atol=1e-5)
        and (keys[:, 0] == 2999).all()
        and (weights[:, 1] == 0).all()
    )
    columns = [column["title"] for column in data["columns"]]
    cells = dict(zip(columns, data["sites"][0]["heads"][0]["cells"], strict=True))
    assert cells["eff. keys"] == pytest.approx(2.0) and cells["first"] == 0.125
    assert "maps of more than 2,048 tokens are not carried whole" in footer_of(page)
    assert "larger than" not in footer_of(page)


def test_a_long_record_of_queries_and_keys_is_looked_over():
    record = record_with(torch.zeros(1, 2100, 2100))
    del record.sites[0].__dict__["weights"]
    data = data_of(html.page(record))
    _, carried = map_of(data, 0, 0)
    assert not carried["whole"] and carried["rows"] <= 1024
    assert data["sites"][0]["heads"][0]["top"]["k"] == 8


def test_statistics_alone_make_a_page_that_says_what_it_has_not():
    site = Site("layer.0", sizes=Sizes(1, 2, 2, 5, 5, 8, 8), statistics={"max": torch.full((1, 2, 5), 0.5)})
    page = html.page(Record([site]))
    assert data_of(page)["sites"][0]["heads"][0]["map"] is None
    assert [column["title"] for column in data_of(page)["columns"]] == ["kind", "largest"]


def test_honesty(record):
    record.sites[0].implementation = "sdpa"
    record.notes = ["<i>a note</i>"]
    said = footer_of(html.page(record))
    assert "sdpa, float32 (1 layer); not recorded, float32 (1 layer)" in said
    assert "every weight in 16 bits: the largest error is" in said and "all 4 heads: every weight" in said
    assert "<i>a note</i>" in said and "no explanation" in said


def test_a_record_of_nothing():
    with pytest.raises(ValueError, match="holds no attention"):
        html.page(Record())


def test_tokens_that_disagree_are_refused(record):
    record.sites[1].key_tokens = (Token("one"),)
    with pytest.raises(ValueError, match="1"):
        html.page(record)


def test_cross_attention_has_both_sides():
    record = record_with(torch.full((2, 4, 2), 0.5), ["un", "deux"], kind="cross")
    data = data_of(html.page(record))
    [site] = data["sites"]
    assert site["cross"] and [data["tables"][site[side]]["length"] for side in ("queries", "keys")] == [4, 2]


def test_an_image_and_its_grid():
    record = record_with(torch.full((1, 7, 7), 1 / 7))
    record.image = torch.arange(2 * 3 * 3, dtype=torch.uint8).reshape(2, 3, 3)
    record.sites[0].query_grid = record.sites[0].key_grid = Grid(2, 3, leading=1)
    data = data_of(html.page(record))
    grid = data["tables"][0]["grid"]
    assert (grid["rows"], grid["columns"], grid["first"]) == (2, 3, 1)
    assert (grid["image"]["width"], grid["image"]["height"]) == (3, 2)
    assert chunk(data, grid["image"]["chunk"]) == bytes(range(18))


def test_a_difference_keeps_its_sign():
    site = Site(
        "layer.0", sizes=Sizes(1, 1, 1, 2, 2, 1, 1), whole=torch.tensor([[[[0.5, -0.5], [0.0, 0.25]]]])
    )
    page = html.page(Record([site]))
    data = data_of(page)
    codes = np.frombuffer(chunk(data, data["sites"][0]["heads"][0]["map"]["chunk"]), "<i2")
    assert data["signed"] and np.allclose(codes / 32767, [0.5, -0.5, 0, 0.25], atol=1e-4)
    assert "differences of weights" in footer_of(page)


@pytest.mark.parametrize("length", [0, 1])
def test_hardly_any_tokens(length):
    data = data_of(html.page(record_with(torch.ones(1, length, length))))
    assert data["tables"][0]["length"] == length


def test_a_notebook_gets_the_page_in_a_frame(record):
    frame = html.notebook(record, height=300)
    inner = markup.unescape(re.search(r'srcdoc="([^"]*)"', frame)[1])
    assert inner == html.page(record) and "height: 300px" in frame


@pytest.mark.parametrize("causal", [True, False])
def test_sizes(causal):
    page = html.page(random_record(12, 12, 256, causal=causal))
    assert len(page.encode()) <= (6_000_000 if causal else 10_000_000)


def test_two_records_compared(record):
    other = copy.deepcopy(record)
    other.sites[1].__dict__["weights"] = torch.eye(4).expand(1, 2, 4, 4)
    page = html.page(difference(record, other))
    data = data_of(page)
    assert data["signed"] and data["opened"][0] == 1 and "Attention, compared" in page
    changed = [head["cells"][0] for site in data["sites"] for head in site["heads"]]
    assert changed == ["hardly changed"] * 2 + ["changed much"] * 2
    assert [column["title"] for column in data["columns"]] == [
        "kind",
        "distance",
        "largest gain",
        "largest loss",
    ]
    assert data["sites"][1]["heads"][1]["cells"][2:] == [0.75, 0.25]


def test_a_record_shows_itself_in_a_notebook(record):
    assert record._repr_html_() == html.notebook(record)
    assert Record()._repr_html_() is None


def test_long_weights_that_were_kept_are_shown_as_blocks():
    length = 2100
    site = Site("layer.0", sizes=Sizes(1, 2, 2, length, length), heads_kept=(1,), offset=0)
    site.whole = torch.eye(length)[None, None]
    data = data_of(html.page(Record([site]), 0, 1))
    blocks, carried = map_of(data, 0, 1)
    assert (carried["whole"], carried["tall"]) == (False, 3) and blocks[5, 5] == 1 and blocks[5, 6] == 0
    assert top_of(data, 0, 1)[1][2000, 0] == 2000
    assert data["sites"][0]["heads"][0]["map"] is None


def test_weights_that_are_no_numbers_are_said():
    weights = torch.full((1, 3, 3), 0.25)
    weights[0, 1] = torch.nan
    page = html.page(record_with(weights))
    assert (map_of(data_of(page), 0, 0)[0][1] == 0).all()
    assert "in 1 head some weights are NaN or infinite; they are drawn as 0" in footer_of(page)


def test_halves_of_characters_can_be_written():
    record = record_with(torch.eye(2)[None], ["\ud800", "b"])
    assert "\ufffd" in html.page(record).encode().decode()
