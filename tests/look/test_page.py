"""The page in a real browser: it asks for nothing, says nothing on the console, and shows what the record holds."""

from pathlib import Path

import pytest
import torch

from regard.look import Grid, Record, Site, Sizes, Token
from tests.look.pages import random_record, record_with

GOLDEN = Path(__file__).parent / "golden"
NONE = {"light": [255, 255, 255], "dark": [24, 28, 33]}
ALL = {"light": [8, 34, 88], "dark": [238, 247, 255]}


@pytest.mark.parametrize(("scheme", "ground"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 27)")])
def test_it_is_quiet_and_drawn_in_both_schemes(opened, record, scheme, ground):
    one = opened(record, scheme, layer=0, head=0)
    assert one.quiet()
    assert one.page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
    assert one.cell(2, 2) == ALL[scheme] and one.cell(2, 1) == NONE[scheme]


def test_the_scheme_can_change_while_it_is_open(opened, record):
    one = opened(record, "light", layer=0, head=0)
    one.page.emulate_media(color_scheme="dark")
    for _ in range(100):
        if one.cell(2, 2) == ALL["dark"]:
            break
        one.page.wait_for_timeout(30)
    assert one.cell(2, 2) == ALL["dark"] and one.cell(2, 1) == NONE["dark"]


def test_hostile_text_stays_text(opened, record):
    attack = "<script>alert(1)</script><img src=x onerror=alert(2)><a href='javascript:alert(3)'>"
    record.text = attack
    record.notes = [attack]
    record.model = attack
    record.sites[0].name = attack
    record.label([Token("[CLS]", special=True), Token(attack), Token("<!--"), Token("]]>")])
    one = opened(record, layer=0, head=0)
    assert one.quiet()
    assert one.text(".text") == attack and attack in one.text("footer") and attack in one.text("#head-facts")
    assert one.page.locator("#tokens span").nth(1).inner_text() == attack
    assert one.page.locator("img, a, script:not([type]) ~ script").count() == 0


def test_all_heads_can_be_chosen_by_click_and_by_keyboard(opened, record):
    one = opened(record, layer=0, head=0)
    canvas = one.page.locator("#heads")
    # The first map stands 30 pixels from the left, 18 from the top; one more is 76 further.
    canvas.click(position={"x": 30 + 76 + 10, "y": 18 + 10})
    one.until("#head-title", "Layer 0, head 1: looks at the token before")
    assert one.pixel("#heads", 30 + 5, 18 + 5) == ALL["light"]
    canvas.focus()
    one.page.keyboard.press("ArrowDown")
    one.until("#head-title", "Layer 1, head 1")
    one.page.keyboard.press("ArrowLeft")
    one.until("#head-title", "Layer 1, head 0: rests on the first token")
    one.until("#live", "Layer 1, head 0: rests on the first token")
    one.page.select_option("#layer", "0")
    one.until("#head-title", "Layer 0, head 0")
    one.page.select_option("#head", "1")
    one.until("#head-title", "Layer 0, head 1")
    assert one.quiet()


def test_the_catalogue_is_sorted_filtered_and_leads_to_a_head(opened, record):
    one = opened(record, layer=0, head=0)
    heads = lambda: [row[0] for row in one.rows("#catalogue")]  # noqa: E731
    assert heads() == ["0.0", "0.1", "1.0", "1.1"]
    one.page.get_by_role("button", name="eff. keys").click()
    assert heads()[0] == "1.1" and one.rows("#catalogue")[0][2] == "4.0"
    assert one.page.locator("#catalogue th[aria-sort=descending]").inner_text().startswith("eff. keys")
    one.page.get_by_role("button", name="eff. keys").click()
    assert heads()[-1] == "1.1"
    one.page.select_option("#kind", "same-token")
    assert heads() == ["0.0"] and one.text("#catalogue-count") == "1–1 of 1 heads"
    one.page.select_option("#kind", "")
    one.page.get_by_role("button", name="Layer 1, head 1").click()
    one.until("#head-title", "Layer 1, head 1")
    assert one.page.locator("#catalogue tr.chosen th").inner_text() == "1.1"


def test_a_long_catalogue_is_turned_page_by_page(opened):
    one = opened(random_record(5, 10, 3, causal=False))
    assert one.text("#catalogue-count") == "1–40 of 50 heads" and len(one.rows("#catalogue")) == 40
    one.page.get_by_role("button", name="Next").click()
    assert one.rows("#catalogue")[0][0] == "4.0" and one.page.locator("#catalogue-on").is_disabled()


def test_a_token_shows_what_it_attends_to_and_what_attends_to_it(opened, record):
    one = opened(record, layer=0, head=1)
    one.page.locator("#tokens span").nth(3).click()
    one.until("#said", "[SEP] → 日本: 1.000")
    assert one.table("#attends") == [("日本", "1.000")]
    assert one.table("#attended") == [("[CLS]", "1.000")]
    assert one.text("#mass") == "0.0% of this token's weight is on special tokens."
    chosen = one.page.locator("#tokens [aria-selected=true]")
    assert chosen.inner_text() == "[SEP]" and chosen.get_attribute("id") == "tokens-3"
    assert one.page.locator("#tokens").get_attribute("aria-activedescendant") == "tokens-3"
    shades = [
        node.evaluate("node => getComputedStyle(node).backgroundColor")
        for node in one.page.locator("#tokens span").all()
    ]
    assert shades == ["rgb(255, 255, 255)", "rgb(255, 255, 255)", "rgb(8, 34, 88)", "rgb(255, 255, 255)"]
    one.page.select_option("#side", "key")
    one.until("#said", "[CLS] → [SEP]: 1.000")
    assert (
        one.page.locator("#tokens span").nth(0).evaluate("node => getComputedStyle(node).backgroundColor")
        == "rgb(8, 34, 88)"
    )


def test_the_keyboard_walks_the_tokens(opened, record):
    one = opened(record, layer=0, head=0)
    one.page.locator("#tokens").focus()
    for key, said in (
        ("Home", "[CLS] →"),
        ("ArrowRight", "<b>bold</b> →"),
        ("End", "[SEP] →"),
        ("ArrowUp", "日本 →"),
    ):
        one.page.keyboard.press(key)
        one.until("#said", said)
    one.until("#live", "日本 → 日本: 1.000")


def test_the_keyboard_walks_the_map(opened, record):
    one = opened(record, layer=1, head=1)
    one.page.locator("#tokens span").nth(0).click()
    one.until("#said", "[CLS] →")
    one.page.locator("#weights").focus()
    one.page.keyboard.press("ArrowDown")
    one.until("#said", "<b>bold</b> → ")
    one.page.keyboard.press("ArrowRight")
    one.page.keyboard.press("ArrowRight")
    one.until("#said", "<b>bold</b> → <b>bold</b>: 0.250")
    assert one.page.evaluate("document.activeElement.id") == "weights"


def test_pointing_at_a_cell_reads_it_and_a_click_chooses_it(opened, record):
    one = opened(record, layer=1, head=1)
    box = one.page.locator("#weights").bounding_box()
    place = {"x": box["width"] * 0.6, "y": box["height"] * 0.1}
    one.page.locator("#weights").hover(position=place)
    assert one.text("#said") == "[CLS] → 日本: 0.250"
    one.page.locator("#weights").click(position=place)
    one.until("#tokens [aria-selected=true]", "[CLS]")
    assert one.text(".row-labels .chosen") == "[CLS]" and one.text(".column-labels .chosen") == "日本"


def test_special_tokens_can_be_set_apart(opened, record):
    record.sites[0].__dict__["weights"] = torch.tensor([0.5, 0.1, 0.3, 0.1]).expand(1, 2, 4, 4)
    one = opened(record, layer=0, head=0)
    assert one.text("#mass") == "60.0% of this token's weight is on special tokens."
    one.page.get_by_label("Set special tokens apart").check()
    one.until(
        "#mass", "60.0% of this token's weight was on special tokens; what is left is shown as the whole."
    )
    assert one.table("#attends") == [("日本", "0.750"), ("<b>bold</b>", "0.250")]
    assert one.cell(0, 0) == NONE["light"] and one.cell(0, 1) == [122, 164, 213]


def test_the_address_holds_the_view(opened, record):
    one = opened(record, layer=0, head=0)
    one.page.locator("#tokens span").nth(2).click()
    one.page.select_option("#head", "1")
    one.until("#head-title", "head 1")
    address = one.page.url[one.page.url.index("#") :]
    assert address == "#layer=0&head=1&token=2"
    other = opened(record, address="#layer=1&head=1&token=3&side=key&apart=1")
    assert other.text("#head-title").startswith("Layer 1, head 1")
    assert other.page.locator("#tokens [aria-selected=true]").inner_text() == "[SEP]"
    assert other.page.locator("#side").input_value() == "key" and other.page.locator("#apart").is_checked()
    other.page.evaluate("location.hash = '#layer=0&head=1&token=1'")
    other.until("#head-title", "Layer 0, head 1")
    assert other.quiet()


@pytest.mark.parametrize(
    "address", ["#layer=99&head=99&token=999", "#layer=-1&token=x&zoom=a.b", "#<img src=x>", "#%"]
)
def test_an_address_from_elsewhere_does_no_harm(opened, record, address):
    one = opened(record, address=address)
    assert one.quiet() and one.text("#head-title").startswith("Layer ")


def test_arabic_runs_from_the_right(opened):
    one = opened(record_with(torch.eye(4)[None], ["مرحبا", "بال", "عا", "لم"]))
    boxes = [chip.bounding_box()["x"] for chip in one.page.locator("#tokens span").all()]
    assert boxes == sorted(boxes, reverse=True)
    assert one.page.evaluate("getComputedStyle(document.querySelector('.text')).direction") == "rtl"
    one.page.locator("#tokens").focus()
    one.page.keyboard.press("Home")
    one.page.keyboard.press("ArrowLeft")
    one.until("#said", "بال → بال: 1.000")
    assert one.quiet()


def test_cross_attention_has_two_lists(opened):
    record = record_with(torch.tensor([0.2, 0.8]).expand(1, 4, 2).contiguous(), ["un", "deux"], kind="cross")
    record.sites[0].query_tokens = tuple(Token(word) for word in "abcd")
    one = opened(record)
    assert one.page.locator("#keys span").all_inner_texts() == ["un", "deux"]
    assert one.table("#attends")[0] == ("deux", "0.800") and not one.page.locator("#attended").is_visible()
    one.page.locator("#keys span").nth(0).click()
    one.until("#said", "→ un: 0.200")
    assert one.table("#attended")[0][1] == "0.200" and not one.page.locator("#attends").is_visible()
    assert one.page.locator("#tokens span").first.get_attribute("style") is not None
    assert one.quiet()


def test_heads_that_were_left_out_say_so(opened, record):
    one = opened(record, layer=1, head=0, budget=10)
    assert "all 4 heads: the numbers of the catalogue" in one.text("footer")
    assert one.text("#said") == "Only the numbers of this head are in this page."
    assert one.quiet()


def test_a_long_text_is_blocks_lists_and_needles(opened):
    length = 2500
    record = record_with(torch.zeros(1, 1, 1))
    tokens = [Token(f"word{number}", 9 * number, 9 * number + 8) for number in range(length)]
    site = Site("layer.0", sizes=Sizes(1, 1, 1, length, length, 1, 1), scale=1.0, offset=0)
    site.pooled, site.pooled_max, site.cell = (
        torch.full((1, 1, 25, 25), 0.04),
        torch.eye(25)[None, None],
        (100, 100),
    )
    site.top_keys = torch.arange(length).reshape(1, 1, length, 1).to(torch.int32)
    site.top_weights = torch.full((1, 1, length, 1), 0.5)
    site.top_keys[0, 0, 2400] = 17
    record = Record([site], text=" ".join(f"{token.text:8}" for token in tokens), model="long")
    record.label(tokens)
    one = opened(record)
    assert one.quiet() and one.page.evaluate("document.querySelectorAll('*').length") < 2000
    assert "2500 x 2500 weights are pooled to 25 x 25 blocks." in one.text("#map-hint")
    assert one.cell(24, 24, 25) == ALL["light"] and one.cell(24, 0, 25) == NONE["light"]
    assert "word2400" in one.text("#needles li") and "0.500, 2383 tokens apart" in one.text("#needles li")
    one.page.get_by_role("button", name="Next needle").click()
    one.until("#said", "word2400 → word17: 0.500")
    assert one.page.locator("#tokens [aria-selected=true]").inner_text() == "word2400"
    inside = "(node) => node.offsetTop - node.parentNode.scrollTop"
    assert 0 <= one.page.locator("#tokens [aria-selected=true]").evaluate(inside) < 240
    one.page.get_by_label("Find").fill("word120")
    one.page.keyboard.press("Enter")
    one.until("#said", "word120 → word120: 0.500")
    one.page.select_option("#pool", "mean")
    one.until("#map-hint", "pooled")
    assert one.cell(24, 24, 25) != ALL["light"]
    one.page.get_by_role("button", name="Later").first.click()
    assert one.text("#tokens-span") == "240–479 of 2500"


def test_zoom_shows_single_cells(opened):
    weights = torch.zeros(1, 700, 700)
    weights[0, 500, 100] = 1.0
    one = opened(record_with(weights), address="#layer=0&head=0&token=500")
    assert "Cells share a pixel" in one.text("#map-hint")
    box = one.page.locator("#weights").bounding_box()
    assert one.pixel("#weights", box["width"] * 100.5 / 700, box["height"] * 500.5 / 700) != NONE["light"]
    one.page.locator("#weights").focus()
    for _ in range(4):
        one.page.keyboard.press("+")
    one.until(".row-labels", "w500")
    assert "zoom=4" in one.page.url
    one.page.keyboard.press("-")
    one.page.get_by_role("button", name="Zoom out").click()
    assert one.quiet()


def test_an_image_is_lit_by_its_patches(opened):
    weights = torch.zeros(1, 5, 5)
    weights[0, :, 4] = 1.0
    record = record_with(weights, ["[CLS]", "1,1", "1,2", "2,1", "2,2"])
    record.sites[0].query_grid = record.sites[0].key_grid = Grid(2, 2, leading=1)
    record.image = torch.full((8, 8, 3), 200, dtype=torch.uint8)
    one = opened(record, address="#layer=0&head=0&token=0")
    box = one.page.locator("#picture").bounding_box()
    assert one.pixel("#picture", box["width"] * 0.75, box["height"] * 0.75) == [200, 200, 200]
    assert max(one.pixel("#picture", box["width"] * 0.25, box["height"] * 0.25)) < 80
    assert "the brightest patch has 1.000" in one.text("#picture-hint")
    one.page.locator("#picture").click(position={"x": box["width"] * 0.75, "y": box["height"] * 0.25})
    one.until("#said", "1,2 → 2,2: 1.000")
    one.page.locator("#picture").focus()
    one.page.keyboard.press("ArrowDown")
    one.until("#said", "2,2 → 2,2: 1.000")
    assert one.quiet()


def test_a_difference_is_drawn_in_two_colours(opened):
    site = Site(
        "layer.0", sizes=Sizes(1, 1, 1, 2, 2, 1, 1), whole=torch.tensor([[[[1.0, -1.0], [0.0, 0.25]]]])
    )
    one = opened(Record([site]), address="#layer=0&head=0&token=0")
    assert (
        one.cell(0, 0, 2) == [8, 34, 88]
        and one.cell(0, 1, 2) == [124, 45, 0]
        and one.cell(1, 0, 2) == [255, 255, 255]
    )
    assert one.table("#attends") == [("0", "+1.000"), ("1", "-1.000")]
    assert one.text("#scale-low") == "−1" and one.quiet()
