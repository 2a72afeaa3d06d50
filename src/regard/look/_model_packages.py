"""Models that come in another form than a transformers folder: read once, when they are fetched, and written as one."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import torch

# One token of a reaction in SMILES (Weininger, 1988): a bracket atom, an atom of the organic subset, aromatic atoms, a
# bond, a branch, a ring closure, the dot between molecules, the arrow between reactants and products.
_SMILES = r"\[[^\]]+\]|Br|Cl|[BCNOSPFI]|[bcnosp]|[()]|\.|=|#|-|\+|\\|/|:|~|@|\?|>>|>|\*|\$|%[0-9]{2}|[0-9]"

# What of the old config.json describes the architecture; the rest spoke to a generator of text.
_ALBERT = (
    "embedding_size",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "inner_group_num",
    "intermediate_size",
    "layer_norm_eps",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_groups",
    "num_hidden_layers",
    "pad_token_id",
    "type_vocab_size",
    "vocab_size",
)


def _quiet() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def from_gguf(file: Path, folder: Path) -> None:
    """Write a quantised GGUF model as a transformers folder in float32, its tokenizer beside it.

    Every quantised weight is scale x number + offset; written out in float32 it loses nothing, and loads a hundred
    times faster.
    """
    transformers = _quiet()
    source = {"gguf_file": file.name, "local_files_only": True}
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting of transformers silences
        read = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
    config = read.config
    del config.quantization_config
    plain = type(read)(config)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(folder)


def from_smiles_albert(unpacked: Path, folder: Path) -> None:
    """Write an ALBERT over SMILES (config.json, pytorch_model.bin, vocab.txt) as a transformers folder."""
    transformers = _quiet()
    given = json.loads((unpacked / "config.json").read_bytes())
    config = transformers.AlbertConfig(**{name: given[name] for name in _ALBERT})
    model = transformers.AlbertForMaskedLM(config)
    weights = torch.load(unpacked / "pytorch_model.bin", map_location="cpu", weights_only=True)
    wanted = model.state_dict()
    model.load_state_dict({name: weights[name] for name in wanted})
    model.save_pretrained(folder)
    smiles_tokenizer(unpacked / "vocab.txt").save_pretrained(folder)


def smiles_tokenizer(vocabulary: Path) -> Any:
    """A tokenizer of reactions in SMILES that knows which characters each token stands for."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    transformers = _quiet()
    words = vocabulary.read_text(encoding="utf-8").splitlines()
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(_SMILES), "isolated")]
    )
    ends = [(name, ids[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    names = {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
    special = {f"{name}_token": token for name, token in names.items()}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
