"""The worked example of any model: how queries, keys and values came about is found and computed again."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import regard
from regard.look import EVERYTHING, Keep, explain, watch
from regard.look._explain_model import of_model, worked
from regard.look._explain_trace import traced
from regard.nn import RotaryPositions
from tests.integrations import zoo
from tests.look.explained import tensors
from tests.models import byte_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 270,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
WIDER = {**GROUPED, "head_dim": 16}


def gpt2() -> Any:
    config = hf.GPT2Config(vocab_size=270, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    return hf.GPT2Model(config)


def falcon() -> Any:
    sizes = {
        name: SIZES[name]
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    }
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = hf.FalconConfig(**sizes, **ends, new_decoder_architecture=True, num_kv_heads=2)
    return hf.FalconModel(config)


def t5() -> Any:
    return hf.T5EncoderModel(
        hf.T5Config(vocab_size=270, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    )


def opt() -> Any:
    sizes = {
        name: value for name, value in SIZES.items() if name not in ("intermediate_size", "initializer_range")
    }
    return hf.OPTModel(hf.OPTConfig(**sizes, ffn_dim=48, word_embed_proj_dim=32))


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "bert": (lambda: hf.BertModel(hf.BertConfig(**SIZES)), "q"),
    "albert, whose layers are one module": (
        lambda: hf.AlbertModel(hf.AlbertConfig(**SIZES, embedding_size=16)),
        "q",
    ),
    "gpt2, fused": (gpt2, "q"),
    "llama, rotary, grouped": (lambda: hf.LlamaModel(hf.LlamaConfig(**GROUPED)), "pt"),
    "qwen3, norms of heads": (lambda: hf.Qwen3Model(hf.Qwen3Config(**WIDER)), "pnt"),
    "gemma2, soft-caps, windows": (lambda: hf.Gemma2Model(hf.Gemma2Config(**WIDER, sliding_window=4)), "pt"),
    "gemma3, two rotary tables": (
        lambda: hf.Gemma3TextModel(hf.Gemma3TextConfig(**WIDER, sliding_window=4)),
        "pnt",
    ),
    "gpt-neox, fused by heads, part turned": (
        lambda: hf.GPTNeoXModel(hf.GPTNeoXConfig(**SIZES, rotary_pct=0.5)),
        "pt",
    ),
    "phi3, fused, grouped": (lambda: hf.Phi3Model(hf.Phi3Config(**GROUPED)), "pt"),
    "cohere, neighbours turned": (lambda: hf.CohereModel(hf.CohereConfig(**GROUPED)), "pt"),
    "opt, scaled before": (opt, "ps"),
    "t5, bias of positions": (t5, "q"),
}
NAMES = {
    "q": ["queries"],
    "pt": ["projected queries", "queries"],
    "pnt": ["projected queries", "normed queries", "queries"],
    "ps": ["projected queries", "queries"],
}


@pytest.mark.parametrize("name", MODELS)
def test_queries_keys_and_values_are_followed_back_and_checked(name: str) -> None:
    torch.manual_seed(0)
    make, kind = MODELS[name]
    model = make().eval()
    ids = torch.randint(3, 270, (2, 7))
    worked = explain(model, {"input_ids": ids}, layer=1, head=3, token=5, sample=1)
    assert worked.agrees, str(worked)
    names = [step.name for step in worked.steps if step.name.endswith("queries")]
    assert names == NAMES[kind]
    for step in worked.steps:
        if step.name not in ("hidden states", "bias", "context of every head"):
            assert step.checks, step.name
    assert worked["context"].checks[-1].against == "what the model produced"
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_falcon_whose_key_heads_are_written_out() -> None:
    torch.manual_seed(0)
    worked = explain(falcon().eval(), {"input_ids": torch.randint(3, 270, (1, 7))}, layer=0, head=3, token=5)
    assert worked.agrees and worked["values"].checks, str(worked)
    assert "head 1 of 2, which 2 heads share" in worked["values"].note


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kdim", [None, 12])
def test_torchs_own_module(first: bool, kdim: int | None) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(32, 4, batch_first=first, kdim=kdim, vdim=kdim).eval()

    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = module

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.attend(x, y, y, need_weights=False)[0]

    x, y = torch.randn(2, 5, 32), torch.randn(2, 7, kdim or 32)
    inputs = (x, y) if first else (x.transpose(0, 1), y.transpose(0, 1))
    worked = explain(Cross().eval(), inputs, layer=0, head=2, token=3, sample=1)
    assert worked.agrees, str(worked)
    assert all(
        "attend.in_proj" in worked[name].note and worked[name].checks
        for name in ("queries", "keys", "values")
    )
    assert "hidden states of the other side" in [step.name for step in worked.steps]


def test_a_wrong_projection_is_not_taken_for_the_right_one() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.q(x) + 1, self.k(x), self.v(x)
            heads = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in (query, key, value))
            return nn.functional.scaled_dot_product_attention(*heads)

    torch.manual_seed(0)
    worked = explain(Odd(), torch.randn(1, 5, 8), layer=0, head=1, token=2, tokens="a b c d e".split())
    assert worked.agrees
    assert "was not found" in worked["queries"].note and not worked["queries"].checks
    assert "part of k (8, 8)" in worked["keys"].note and worked["keys"].checks
    assert worked["weights"].columns == ("a", "b", "c", "d", "e")


def test_a_tokenizer_names_the_tokens() -> None:
    torch.manual_seed(0)
    tokenizer, model = byte_tokenizer(), gpt2().eval()
    inputs = tokenizer("the cat 日", return_tensors="pt")
    worked = explain(
        model, {"input_ids": inputs["input_ids"]}, layer=0, head=0, token="日 2/3", tokenizer=tokenizer
    )
    assert worked["sentence"].text == "the cat 日" and worked["embeddings"].checks
    assert worked.token == [*worked["tokens"].text].index("日 2/3")


def test_layer_head_and_token_are_chosen_where_none_are_given() -> None:
    torch.manual_seed(0)
    worked = explain(gpt2().eval(), {"input_ids": torch.randint(3, 270, (1, 9))})
    assert worked.agrees and worked.token is not None
    every = explain(gpt2().eval(), {"input_ids": torch.randint(3, 270, (1, 9))}, layer=0, head=0, token="all")
    assert every.agrees and every.token is None


def test_bfloat16() -> None:
    torch.manual_seed(0)
    model = hf.LlamaModel(hf.LlamaConfig(**GROUPED)).to(torch.bfloat16).eval()
    worked = explain(model, {"input_ids": torch.randint(3, 270, (1, 7))}, layer=1, head=3, token=5)
    assert worked.agrees, str(worked)
    assert worked["queries"].checks and worked["projected keys"].checks


class Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"layer": 2}, ValueError, "there are 2 layers, counted from 0"),
        ({"head": 4}, ValueError, "there are 4 heads, counted from 0"),
        ({"layer": 0, "head": 0, "token": 9}, ValueError, "there are 9 tokens, counted from 0; give 0 to 8"),
        (
            {"layer": 0, "head": 0, "sample": 1},
            ValueError,
            r"explain\(sample=\): there are 1, counted from 0; got 1",
        ),
        ({"tokenizer": byte_tokenizer(), "sample": 1}, ValueError, r"explain\(sample=\): there are 1"),
        ({"score": None}, TypeError, "a model has its own value, mechanism and stages; leave them out"),
        ({"tokens": list("abcdefghi"), "layer": 0, "head": 0, "token": "z"}, ValueError, "no such token"),
        ({"tokens": ["a"]}, ValueError, r"label\(tokens\): expected a token for each .* 9 of them; got 1"),
    ],
)
def test_what_is_refused(options: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        explain(gpt2().eval(), {"input_ids": torch.randint(3, 270, (1, 9))}, **options)


def test_what_belongs_to_models_is_refused_elsewhere() -> None:
    rows = torch.zeros(2, 2)
    with pytest.raises(TypeError, match="belong to explain"):
        explain(rows, rows, rows, layer=0)
    with pytest.raises(TypeError, match="expected an int, counted from 0; got 'a'"):
        explain(rows, rows, rows, token="a")
    with pytest.raises(ValueError, match="no attention was seen in Nothing"):
        explain(Nothing(), rows)
    with pytest.raises(ValueError, match="have no ids of tokens"):
        explain(nn.TransformerEncoderLayer(8, 2, 8).eval(), torch.zeros(3, 1, 8), tokenizer=byte_tokenizer())


def test_a_mistake_inside_the_model_leaves_no_hooks() -> None:
    model = gpt2().eval()
    with pytest.raises(IndexError):
        explain(model, {"input_ids": torch.full((1, 3), 999)})
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize(
    "family",
    ["Llama 4", "Whisper", "Marian", "Swin", "Wav2Vec2", "gpt-oss", "BigBird", "BLOOM", "GPT-J", "RoFormer"],
)
def test_every_site_of_other_families(family: str) -> None:
    """Rotary tables of several kinds, cross-attention, windows of an image, sounds, sinks, hand-written attention."""
    model, inputs, _ = zoo.make(family)
    with torch.no_grad(), traced(model) as trace, watch(model, keep=Keep(tensors=True)) as record:
        model(**inputs)
    for number, site in enumerate(record.sites):
        made = worked(
            family, model, record, trace, number, site.heads - 1, site.lengths[0] - 1, site.sizes.B - 1
        )
        assert made.agrees, str(made)
        assert all(made[name].checks for name in ("queries", "keys", "values")), site.name
    assert len(record.sites) >= 2


def test_regards_own_rotary_positions_and_modules_of_other_kinds() -> None:
    class Shift(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.roll(1, -1)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
            self.turn, self.shift = RotaryPositions(4), Shift()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = (
                layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v)
            )
            return regard.attention(self.turn(query), self.turn(key), self.shift(value))

    torch.manual_seed(0)
    made = explain(Own(), torch.randn(2, 6, 16), layer=0, head=1, token=4)
    assert made.agrees, str(made)
    assert [step.name for step in made.steps][1:7] == [
        "projected queries",
        "queries",
        "projected keys",
        "keys",
        "projected values",
        "values",
    ]
    assert made["queries"].checks and "by turn, a RotaryPositions" in made["keys"].note
    assert made["values"].formula == "v_j = module(v_j')" and not made["values"].checks


def test_a_watched_model(bert_folder: Path) -> None:
    worked = of_model("the cat sat", str(bert_folder), layer=1, head=2, token="cat")
    assert worked.agrees, str(worked)
    assert worked["context"].checks[-1].against == "what the model produced"
    assert "what the model produced" in str(worked).splitlines()[-1]
    names = [step.name for step in worked.steps]
    assert names[:8] == [
        "sentence",
        "tokens",
        "ids",
        "embeddings",
        "hidden states",
        "queries",
        "keys",
        "values",
    ]
    assert all(worked[name].checks for name in ("embeddings", "queries", "keys", "values"))
    assert "encoder.layer.1.attention.self.query" in worked["queries"].note


def test_a_causal_model_whose_projections_are_fused(gpt_folder: Path) -> None:
    worked = of_model("the cat", str(gpt_folder), layer=0, head=1, token="1")
    assert worked.agrees, str(worked)
    assert "part of h.0.attn.c_attn (48, 16)" in worked["queries"].note
    assert all(worked[name].checks for name in ("queries", "keys", "values"))
    masked = worked["masked"].numbers
    assert masked is not None and bool((masked[2:] == -math.inf).all()) and bool(masked[:2].isfinite().all())


def test_explaining_a_model_leaves_no_hooks(bert_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.look import _explain_model, _model

    loaded = _model.load_model(str(bert_folder))
    monkeypatch.setattr(_explain_model, "load_model", lambda _: loaded)
    of_model("the cat", "tiny", layer=0, head=0, token="0")
    assert all(
        not module._forward_hooks and not module._forward_pre_hooks for module in loaded.model.modules()
    )


def test_a_site_of_a_module_of_your_own() -> None:
    class Cross(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, y, y, scale=0.7)

    query, key, _ = tensors()
    module = Cross()
    with watch(module, keep=EVERYTHING) as record:
        module(query, key.repeat_interleave(2, 1))
    worked = explain(record.sites[0], token=4, head=1, sample=1)
    assert worked.agrees and worked["scaled"].formula == "0.7 s_ij"
