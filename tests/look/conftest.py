"""Small models made on the spot, in the folders that transformers writes; and the fetched one."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, PreTrainedTokenizerFast

from regard import _fetch
from regard.look import Record, Site, Token

CORPUS = ["the cat sat on the mat", "the dog didn't cross the street because it was tired", "日本語 مرحبا 😀"]


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, fetched once. It fails, with fetch's own message, when it cannot be had."""
    return _fetch.fetch(_fetch.MODELS["minilm"])


def _bert_tokenizer() -> PreTrainedTokenizerFast:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special))
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]"
    )


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["the cat sat"], trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet)
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of 2 layers and 3 heads with random weights, WordPiece, 40 positions."""
    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=120, max_position_embeddings=40, **sizes)).save_pretrained(folder)
    _bert_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def gpt_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of 2 layers and 2 heads with random weights, byte-level BPE: causal."""
    folder = tmp_path_factory.mktemp("models") / "tiny-gpt"
    torch.manual_seed(0)
    GPT2Model(GPT2Config(vocab_size=270, n_positions=64, n_embd=16, n_layer=2, n_head=2)).save_pretrained(
        folder
    )
    _byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def record() -> Record:
    """Two layers of two heads over four tokens, with weights that can be read: each head looks at one place.

    Layer 0: head 0 at the token itself, head 1 at the token before. Layer 1: head 0 at the first token, head 1 at all.
    """
    words = ("[CLS]", "<b>bold</b>", "日本", "[SEP]")
    tokens = tuple(Token(word, special=word.startswith("["), id=number) for number, word in enumerate(words))
    first = torch.zeros(4, 4)
    first[:, 0] = 1.0
    maps = [[torch.eye(4), torch.eye(4).roll(1, dims=0)], [first, torch.full((4, 4), 0.25)]]
    sites = []
    for number, pair in enumerate(maps):
        rows = torch.arange(16.0).reshape(1, 2, 4, 2)
        site = Site(
            f"layer.{number}",
            rows,
            rows + 1,
            rows + 2,
            rows + 3,
            scale=0.5,
            query_tokens=tokens,
            key_tokens=tokens,
        )
        site.__dict__["weights"] = torch.stack(pair)[None]
        sites.append(site)
    return Record(sites, text="<b>bold</b> 日本", model="toy", notes=["a note & more"])
