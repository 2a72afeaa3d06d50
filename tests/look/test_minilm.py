"""The main job on the real model: what is shown is what the model's own eager attention computes."""

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from regard.look import Keep, watch
from regard.look._model import load_model, record_of
from regard.look._patterns import most_telling

SENTENCE = "The animal didn't cross the street because it was too tired."

pytestmark = pytest.mark.network


def test_all_72_maps_are_those_of_eager_attention(minilm):
    record = record_of(load_model(str(minilm)), SENTENCE)
    eager = AutoModel.from_pretrained(minilm, attn_implementation="eager", local_files_only=True).eval()
    inputs = AutoTokenizer.from_pretrained(minilm, local_files_only=True)(SENTENCE, return_tensors="pt")
    with torch.no_grad():
        expected = eager(**inputs, output_attentions=True).attentions
    maps = 0
    for site, theirs in zip(record.sites, expected, strict=True):
        for head in range(site.heads):
            assert (site.weights[0, head] - theirs[0, head]).abs().max() <= 1e-5
            maps += 1
    assert maps == 72


def test_the_model_is_not_modified_and_answers_the_same_to_the_bit(minilm):
    loaded = load_model(str(minilm))
    inputs = loaded.tokenizer([SENTENCE, "A short one."], padding=True, return_tensors="pt")
    with torch.no_grad():
        plain = loaded.model(**inputs).last_hidden_state
        with watch(loaded.model) as record:
            watched = loaded.model(**inputs).last_hidden_state
    assert loaded.model.config._attn_implementation == "sdpa"
    assert torch.equal(plain, watched)
    assert [site.name for site in record.sites] == [f"encoder.layer.{n}.attention.self" for n in range(6)]


def test_padding_gets_no_weight(minilm):
    loaded = load_model(str(minilm))
    inputs = loaded.tokenizer([SENTENCE, "A short one."], padding=True, return_tensors="pt")
    with torch.no_grad(), watch(loaded.model, Keep(weights=True)) as record:
        loaded.model(**inputs)
    padded = inputs["attention_mask"][1] == 0
    assert padded.any()
    for site in record.sites:
        assert float(site.weights[1][..., padded].abs().max()) == 0.0


def test_it_attends_to_the_animal(minilm):
    record = record_of(load_model("minilm"), SENTENCE)
    words = [token.text for token in record.sites[0].query_tokens]
    assert words == "[CLS] The animal didn ' t cross the street because it was too tired . [SEP]".split()
    layer, head = most_telling(record)
    row = record.sites[layer].weights[0, head, words.index("it")]
    assert words[int(row.argmax())] == "animal"
