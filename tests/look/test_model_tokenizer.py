"""A folder without a tokenizer is refused: the one that transformers makes up knows no word."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from regard.look._model import load_model


def test_a_folder_without_a_tokenizer(bert_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bert_folder, folder)
    for name in ("tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(ValueError, match="tokenizer"):
        load_model(str(folder))
