"""docs/record.md: its code runs, and its table of thresholds is the one in force."""

import re
from pathlib import Path

import pytest

from regard.look._catalogue import NEAR, THRESHOLDS

PAGE = (Path(__file__).parents[2] / "docs" / "record.md").read_text("utf-8")


@pytest.mark.network
def test_the_code_of_the_page_runs(minilm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for body in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(body, namespace)
    assert {path.name for path in tmp_path.iterdir()} == {
        "attention.npz",
        "attention.json",
        "weights.csv",
        "heads.csv",
    }
    shown = capsys.readouterr().out
    assert "each layer passes on 50% of its input" in shown and "'distance'" in shown


def test_the_thresholds_of_the_page():
    rows = re.findall(r"^\| ([\w-]+) \|.*\| (\d+) % \|$", PAGE, re.MULTILINE)
    assert {name: int(share) / 100 for name, share in rows} == THRESHOLDS
    assert [name for name, _ in rows] == list(THRESHOLDS)
    assert f"at most {NEAR} away, where at least {4 * (2 * NEAR + 1)} tokens" in PAGE
