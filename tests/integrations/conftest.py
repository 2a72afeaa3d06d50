"""The implementation under test, registered, and a watch on what models call it with."""

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AttentionInterface

from regard.integrations.transformers import NAME, register


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    register()


@pytest.fixture
def calls() -> Iterator[list[tuple[Any, Any, dict[str, Any]]]]:
    """(module, attention_mask, keyword arguments) of every call that reaches regard."""
    attend = AttentionInterface._global_mapping[NAME]
    seen: list[tuple[Any, Any, dict[str, Any]]] = []

    def watched(module, query, key, value, attention_mask, **keywords):
        seen.append((module, attention_mask, keywords))
        return attend(module, query, key, value, attention_mask, **keywords)

    AttentionInterface.register(NAME, watched)
    try:
        yield seen
    finally:
        AttentionInterface.register(NAME, attend)
