"""The blocks of docs/modules.md run in order, in one namespace."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "modules.md"


def test_the_page_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    namespace = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
    assert namespace["looked"].shape == (2, 5) and namespace["y"].shape == (2, 10, 64)


def test_the_page_names_every_module():
    import regard.nn

    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in regard.nn.__all__ if name not in text] == []
