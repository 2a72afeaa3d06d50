"""The page says what the tests found: its block runs, its tables are the models that were compared."""

import re
from pathlib import Path

from tests.integrations import zoo
from tests.integrations.test_transformers_models import OWN_TENSOR, REFUSES

PAGE = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")


def table(heading):
    """The rows under a heading: first cell to second."""
    rows = PAGE.split(f"| {heading} |")[1].split("\n\n")[0].splitlines()[2:]
    return {name.strip(): said.strip() for _, name, said, _ in (row.split("|") for row in rows)}


def test_the_block_runs():
    found = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(found) == 1
    exec(compile(found[0], "docs/transformers.md", "exec"), {})


def test_the_models_compared_are_those_of_the_tests():
    said = {name: "its own tensor" if name in OWN_TENSOR else "runs" for name in zoo.FAMILIES}
    assert table("compared with eager") == said


def test_the_models_that_never_ask_are_those_of_the_tests():
    said = {name: "KeyError" if name in REFUSES else "as before" for name in zoo.NEVER}
    assert table("never asks") == said
