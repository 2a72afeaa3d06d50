"""Tokens stand for characters of the text, whatever the script, and never for raw pieces of a vocabulary."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from regard.look._tokens import tokens_of, tokens_of_ids
from tests.models import bert_tokenizer, byte_tokenizer

TEXTS = [
    "the cat sat",
    "日本語 has no blanks",
    "שלום עולם",
    "مرحبا بالعالم",
    "👩\u200d👧 😀!",
    "e\u0301 is two characters",
    "a\tb\n\n  c",
    " ",
]


@pytest.mark.parametrize("text", TEXTS)
def test_every_character_is_in_a_token_and_no_piece_is_raw(text):
    ids, tokens = tokens_of(byte_tokenizer(), text)
    assert [token.id for token in tokens] == ids
    covered = {place for token in tokens for place in range(token.start, token.stop)}
    assert covered == set(range(len(text)))
    shown = "".join(token.text for token in tokens)
    assert not any(character in shown for character in "ĠĊæÃØ×")


@pytest.mark.parametrize("text", TEXTS)
def test_generated_ids_spell_the_same_text_and_the_same_tokens(text):
    tokenizer = byte_tokenizer()
    ids, tokens = tokens_of(tokenizer, text)
    spelled, again = tokens_of_ids(tokenizer, ids)
    assert spelled == text
    assert [token.text for token in again] == [token.text for token in tokens]
    assert [token.stop for token in again] == [token.stop for token in tokens]


def test_the_bytes_of_a_character_after_a_blank_are_numbered_together():
    tokenizer = byte_tokenizer()
    ids, tokens = tokens_of(tokenizer, "a 日b")
    assert [token.text for token in tokens] == ["a", "␣", "日 1/3", "日 2/3", "日 3/3", "b"]
    spelled, again = tokens_of_ids(tokenizer, ids[:4])
    assert spelled == "a \ufffd" and len(again) == 4


def test_a_token_of_the_bytes_of_two_characters_is_one_part_of_both():
    alphabet = {
        character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    crossing = "\u00a5\u00e6"  # the last byte of the first character and the first byte of the second
    model = models.BPE({**alphabet, crossing: len(alphabet)}, [("\u00a5", "\u00e6")])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    ids, tokens = tokens_of(fast, "a日本b")
    assert [token.text for token in tokens] == ["a", "日 1/5", "日 2/5", "日本 3/5", "本 4/5", "本 5/5", "b"]
    assert tokens_of_ids(fast, ids)[0] == "a日本b"


def test_special_tokens_are_those_of_the_frame_and_those_written_by_name():
    tokenizer = bert_tokenizer()
    tokenizer.mask_token = "[MASK]"
    _, tokens = tokens_of(tokenizer, "the [SEP] zzz日 [MASK]")
    assert [(token.text, token.special) for token in tokens if token.special] == [
        ("[CLS]", True),
        ("[SEP]", True),
        ("[SEP]", True),
    ]
    unknown = [token for token in tokens if token.id == tokenizer.unk_token_id]
    assert unknown and not any(token.special for token in unknown)


def test_a_special_token_that_looks_like_markup_is_inert_text():
    tokenizer = bert_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<img src=x onerror=alert(1)>\u202e"]})
    _, tokens = tokens_of(tokenizer, "the <img src=x onerror=alert(1)>\u202e")
    found = next(token for token in tokens if "img" in token.text)
    assert found.special and "\u202e" not in found.text


def test_two_texts_share_one_count_of_characters():
    tokenizer = bert_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    _, tokens = tokens_of(tokenizer, "the cat", "sat on")
    text = "the cat" + "sat on"
    inner = [token for token in tokens if not token.special]
    assert "".join(text[token.start : token.stop] for token in inner) == "thecatsaton"
    assert [token.special for token in tokens].count(True) == 3


def test_the_blank_before_a_text_stands_for_nothing():
    tokenizer = Tokenizer(
        models.Unigram([("<unk>", 0.0), ("\u2581", -1.0), ("a", -1.0), ("b", -1.0)], unk_id=0)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    _, tokens = tokens_of(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"), "a  bz")
    assert [(token.text, token.start, token.stop) for token in tokens] == [
        ("␣", 0, 0),
        ("a", 0, 1),
        ("␣", 1, 2),
        ("␣", 2, 3),
        ("b", 3, 4),
        ("z", 4, 5),
    ]


class Slow:
    is_fast = False


def test_a_tokenizer_without_offsets_is_refused():
    with pytest.raises(ValueError, match="Slow does not say which characters its tokens stand for"):
        tokens_of(Slow(), "text")
