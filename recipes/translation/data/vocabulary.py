"""Subwords learned from a corpus, one vocabulary for source and target (byte pairs; Sennrich et al., 2016).

Words are what white space separates; punctuation is apart from letters, so that "earth." and "earth" share theirs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from regard.look._files import write_all

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_MARK = "▁"


class Vocabulary:
    """Text to ids and back; ``digest`` is the sha256 of its file, by which a checkpoint knows it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def train(cls, texts: Iterable[str], size: int) -> Vocabulary:
        """Learn at most ``size`` subwords. Raises ValueError for a size without room for one, and for no text."""
        if size <= len(SPECIAL):
            raise ValueError(f"vocabulary: expected more than {len(SPECIAL)} subwords, got {size}")
        tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[UNK]))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(_MARK), pre_tokenizers.Punctuation(), pre_tokenizers.Digits(True)]
        )
        tokenizer.decoder = decoders.Metaspace(_MARK)
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=list(SPECIAL), min_frequency=2, show_progress=False
        )
        tokenizer.train_from_iterator(map(_unmarked, texts), trainer)
        if tokenizer.get_vocab_size() == len(SPECIAL):
            raise ValueError("vocabulary: expected texts to learn from, got none")
        return cls(tokenizer)

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    @property
    def digest(self) -> str:
        return hashlib.sha256(self._written()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of the subwords of a text, UNK for letters that no text of the training had."""
        return list(self._tokenizer.encode(_unmarked(text), add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; special ones are left out."""
        kept = [token for token in ids if token >= len(SPECIAL)]
        return str(self._tokenizer.decode(kept)).strip()

    def words(self, text: str) -> list[tuple[str, int, int]]:
        """The words of a text, each with its first subword and the one behind its last: places in ``encode(text)``."""
        normal = self._tokenizer.normalizer.normalize_str(_unmarked(text))
        found: list[tuple[str, int, int]] = []
        stop = 0
        for word in normal.split(" ") if normal else []:
            start, stop = stop, stop + len(self.encode(word))
            found.append((word, start, stop))
        return found

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        write_all({path: self._written()})

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read a saved one. Raises ValueError, naming the file, for anything else."""
        try:
            return cls(Tokenizer.from_str(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ValueError(f"cannot read the vocabulary {path}: {error.strerror or error}") from error
        except Exception as error:
            raise ValueError(f"{path}: is no vocabulary of this recipe ({error})") from error

    def _written(self) -> bytes:
        return (str(self._tokenizer.to_str(pretty=False)) + "\n").encode()


def _unmarked(text: str) -> str:
    """The mark of a space, where it is a letter of the text, would be taken for a space inside a word."""
    return text.replace(_MARK, "_")
