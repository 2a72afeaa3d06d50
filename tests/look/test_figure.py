import base64
import struct
import sys
import xml.etree.ElementTree as ET
import zlib

import numpy as np
import pytest
import torch

from regard.look import Record, Site, Sizes
from regard.look._difference import difference
from regard.look._figure_png import coloured, png
from regard.look._ramps import SIGNED, WEIGHT
from regard.look.figure import figure
from tests.look.pages import record_with

SVG = "{http://www.w3.org/2000/svg}"


def pixels_of(data):
    """(height, width, 3) of a PNG without filters, as ours are."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    at, packed = 8, b""
    while at < len(data):
        size, name = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(name + body)
        packed += body if name == b"IDAT" else b""
        at += size + 12
    rows = np.frombuffer(zlib.decompress(packed), "u1").reshape(height, 1 + 3 * width)
    assert (rows[:, 0] == 0).all()
    return rows[:, 1:].reshape(height, width, 3)


def map_of(drawn):
    address = ET.fromstring(drawn.svg).find(f"{SVG}image").get("href")
    return pixels_of(base64.b64decode(address.removeprefix("data:image/png;base64,")))


def words_of(drawn):
    return [node.text for node in ET.fromstring(drawn.svg).iter(f"{SVG}text")]


def test_a_head_is_drawn_with_its_names(record):
    drawn = figure(record, 0, 0)
    assert {"[CLS]", "<b>bold</b>", "日本", "[SEP]"} <= set(words_of(drawn))
    assert words_of(drawn)[0].startswith("Layer 0, head 0: looks at")
    cells = map_of(drawn)[11::22, 11::22]
    assert cells.shape == (4, 4, 3)
    assert (cells[np.eye(4, dtype=bool)] == WEIGHT["light"][-1]).all()
    assert (cells[~np.eye(4, dtype=bool)] == WEIGHT["light"][0]).all()


def test_it_asks_for_nothing_and_is_well_formed(record):
    record.text = "</svg><script>alert(1)</script> & \x01\ud800"
    record.model = '"><image href="http://example.org/x"/>'
    drawn = figure(record, 1, 1)
    root = ET.fromstring(drawn.svg)
    assert {node.tag.removeprefix(SVG) for node in root.iter()} == {"svg", "rect", "text", "image"}
    assert all(node.get("href").startswith("data:image/png;") for node in root.iter(f"{SVG}image"))


def test_schemes(record):
    assert (map_of(figure(record, 0, 0, scheme="dark"))[0, 0] == WEIGHT["dark"][-1]).all()
    with pytest.raises(ValueError, match="expected 'light' or 'dark'; got 'sepia'"):
        figure(record, scheme="sepia")


def test_all_heads(record):
    drawn = figure(record, overview=True)
    assert len(list(ET.fromstring(drawn.svg).iter(f"{SVG}image"))) == 4 + 1
    assert "toy: 2 layers, 2 heads, 4 tokens" in words_of(drawn)


def test_long_sides_carry_positions_and_blocks_are_said():
    weights = torch.zeros(1, 1500, 1500)
    weights[0, 1400, 3] = 1.0
    drawn = figure(record_with(weights))
    assert {"500", "1,000"} <= set(words_of(drawn)) and "w1" not in words_of(drawn)
    assert "each cell is the largest" in " ".join(words_of(drawn))
    cells = map_of(drawn)
    assert cells.shape[:2] == (750, 750) and (cells[700, 1] == WEIGHT["light"][-1]).all()


def test_text_stays_inside():
    words = ["a" * 40, "日本語の長い言葉です" * 3, "مرحبا", "x"]
    drawn = figure(record_with(torch.eye(4)[None], words))
    assert "aaaaaaaaaaaaaaa…" in words_of(drawn)
    for node in ET.fromstring(drawn.svg).iter(f"{SVG}text"):
        if node.get("x") is not None:
            assert 0 <= float(node.get("x")) <= drawn.width and 0 <= float(node.get("y")) <= drawn.height


def test_a_difference_has_two_colours(record):
    other = Record([Site("layer.0", sizes=Sizes(1, 2, 2, 4, 4), whole=torch.full((1, 2, 4, 4), 0.25))])
    one = Record([record.sites[0]])
    drawn = figure(difference(one, other), 0, 0)
    cells = map_of(drawn)[11::22, 11::22].astype(int)
    assert cells[0, 0, 0] > cells[0, 0, 2] and cells[0, 1, 0] < cells[0, 1, 2]
    assert "−1" in words_of(drawn)


def test_png_is_the_drawing(record, tmp_path):
    drawn = figure(record, 0, 0)
    data = drawn.png(scale=1)
    assert struct.unpack(">II", data[16:24]) == (drawn.width, drawn.height)
    assert struct.unpack(">II", drawn.png()[16:24]) == (2 * drawn.width, 2 * drawn.height)
    assert drawn.save(tmp_path / "a.png").read_bytes() == drawn.png()
    assert drawn.save(tmp_path / "a.svg").read_text(encoding="utf-8") == drawn.svg == drawn._repr_svg_()


def test_what_cannot_be_saved(record, tmp_path, monkeypatch):
    drawn = figure(record, 0, 0)
    with pytest.raises(ValueError, match=r"a figure is .svg or .png"):
        drawn.save(tmp_path / "a.gif")
    for scale in (0, -1, 1e9, float("nan")):
        with pytest.raises(ValueError, match="expected a positive scale"):
            drawn.png(scale)
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(ValueError, match=r"pip install 'regard\[figures\]'"):
        drawn.png()
    with pytest.raises(OSError, match="cannot write"):
        drawn.save("/proc/nowhere/a.svg")


def test_weights_that_were_not_kept():
    site = Site("layer.0", sizes=Sizes(1, 1, 1, 5, 5), statistics={"max": torch.ones(1, 1, 5)})
    with pytest.raises(ValueError, match="its weights were not kept"):
        figure(Record([site]))
    with pytest.raises(ValueError, match="holds no attention"):
        figure(Record())


@pytest.mark.parametrize("length", [0, 1])
def test_hardly_any_tokens(length):
    assert ET.fromstring(figure(record_with(torch.ones(1, length, length))).svg) is not None


def test_colours_rise_in_lightness_for_every_eye():
    """Also for eyes without one kind of cone (Viénot, Brettel and Mollon, 1999: what red- and green-blind eyes see)."""
    blind = {
        "none": np.eye(3),
        "red": np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]]),
        "green": np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]),
    }
    for scheme, ramps in (("light", (WEIGHT, SIGNED)), ("dark", (WEIGHT, SIGNED))):
        plain = coloured(np.linspace(0, 1, 64)[None] ** 2, ramps[0][scheme])[0]
        halves = coloured(np.linspace(0, 1, 64)[None] ** 2 * -1, ramps[1][scheme], signed=True)[0]
        for colours in (plain, halves):
            for matrix in blind.values():
                linear = (colours / 255) ** 2.2 @ matrix.T
                lightness = linear @ np.array([0.2126, 0.7152, 0.0722])
                steps = np.diff(lightness) * (-1 if scheme == "light" else 1)
                assert (steps > -1e-3).all() and abs(lightness[-1] - lightness[0]) > 0.4


def test_png_writes_any_size():
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 3), dtype=np.uint8)
    assert (pixels_of(png(pixels)) == pixels).all()


def test_a_record_draws_itself(record):
    assert record.figure(0, 1, scheme="dark") == figure(record, 0, 1, scheme="dark")
    assert record.figure(overview=True).svg == figure(record, overview=True).svg
