"""The blocks of docs/watch.md run in order, and its tables name what there is."""

import dataclasses
import re
from pathlib import Path

from regard.look import Keep
from regard.look._record_statistics import STATISTICS

PAGE = Path(__file__).parents[2] / "docs" / "watch.md"


def test_the_page_runs(capsys):
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    namespace = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "0 self sdpa causal" and said[1] == "(3, 1, 1, 1)"
    assert namespace["entropy"].shape == (1, 4, 10) and namespace["weights"].shape == (1, 4, 10, 10)
    assert namespace["record"].sites[0].sizes.B == 1
    assert [line.split()[:3] for line in said[2:]] == [
        [f"model.layers.{n}.self_attn", "sdpa", "everything"] for n in range(2)
    ]


def test_the_page_names_everything_that_can_be_kept():
    text = PAGE.read_text(encoding="utf-8")
    assert [field.name for field in dataclasses.fields(Keep) if f"`{field.name}=" not in text] == []
    assert [name for name in STATISTICS if f"`{name}`" not in text] == []
