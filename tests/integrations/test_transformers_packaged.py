"""The packaged models on real input: on regard they give what they give on eager, and generate the same text."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from regard import _fetch
from regard.look._model import load_model

pytestmark = pytest.mark.network
CLOSE = 1e-5

TEXTS = {
    "minilm": [
        "The animal didn't cross the street because it was too tired.",
        "A short one.",
        "日本語 and more",
    ],
    "rxnmapper": ["CC(=O)O.NCc1ccccc1>>CC(=O)NCc1ccccc1", "CCO>>CC=O", "OC(=O)c1ccccc1.CN>>CNC(=O)c1ccccc1"],
    "smollm2": [
        "The quick brown fox jumps over the lazy dog. The quick brown",
        "Once upon a time",
        "2 + 2 =",
    ],
}


def run(model, inputs, implementation):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**inputs, output_attentions=True)


def padded(tokenizer, texts, side):
    tokenizer.padding_side = side
    return tokenizer(texts, padding=True, return_tensors="pt")


@pytest.mark.parametrize("name", TEXTS)
def test_states_and_weights_are_those_of_eager(name, calls):
    _fetch.fetch(_fetch.MODELS[name])
    loaded = load_model(name)
    inputs = padded(loaded.tokenizer, TEXTS[name], "left" if name == "smollm2" else "right")
    real = inputs["attention_mask"].bool()
    assert not real.all()
    eager = run(loaded.model, inputs, "eager")
    assert not calls
    ours = run(loaded.model, inputs, "regard")
    assert len(calls) == len(eager.attentions)
    expected, found = eager.last_hidden_state[real], ours.last_hidden_state[real]
    assert (found - expected).norm() / expected.norm() <= CLOSE
    for layer, (theirs, mine) in enumerate(zip(eager.attentions, ours.attentions, strict=True)):
        rows = real[:, None, :].expand(theirs.shape[:3])
        assert (mine[rows] - theirs[rows]).abs().max() <= CLOSE, layer


def test_smollm2_generates_the_same_text(calls):
    _fetch.fetch(_fetch.MODELS["smollm2"])
    tokenizer = load_model("smollm2").tokenizer
    folder = _fetch.model_folder(_fetch.MODELS["smollm2"])
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    inputs = padded(tokenizer, ["The capital of France is", "Once upon a time, there was"], "left")
    texts = {}
    for implementation in ("eager", "regard"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            texts[implementation] = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    assert len(calls) == 6 * model.config.num_hidden_layers
    assert torch.equal(texts["eager"], texts["regard"])
    assert "Paris" in tokenizer.decode(texts["regard"][0])
