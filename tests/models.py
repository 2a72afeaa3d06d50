"""Small models with random weights, made on the spot in the folders that transformers writes."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, PreTrainedTokenizerFast

CORPUS = ["the cat sat on the mat", "the dog didn't cross the street because it was tired", "日本語 مرحبا 😀"]


def bert_tokenizer() -> PreTrainedTokenizerFast:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special))
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]"
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["the cat sat"], trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet)
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def make_bert(folder: Path) -> Path:
    """A BERT of 2 layers and 3 heads, WordPiece, 40 positions."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=120, max_position_embeddings=40, **sizes)).save_pretrained(folder)
    bert_tokenizer().save_pretrained(folder)
    return folder


def make_gpt(folder: Path) -> Path:
    """A GPT-2 of 2 layers and 2 heads, byte-level BPE: causal."""
    torch.manual_seed(0)
    GPT2Model(GPT2Config(vocab_size=270, n_positions=64, n_embd=16, n_layer=2, n_head=2)).save_pretrained(
        folder
    )
    byte_tokenizer().save_pretrained(folder)
    return folder
