"""What all tests share: the hypothesis profiles (CI=true draws the same examples every time) and the models."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, fetched once. It fails, with fetch's own message, when it cannot be had."""
    from regard import _fetch

    return _fetch.fetch(_fetch.MODELS["minilm"])


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.models import make_bert

    return make_bert(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture(scope="session")
def gpt_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.models import make_gpt

    return make_gpt(tmp_path_factory.mktemp("models") / "tiny-gpt")
