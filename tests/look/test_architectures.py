"""Other people's models: what watch catches under sdpa is what the same model says of itself under eager attention."""

import pytest
import torch
import transformers as hf

from regard.look import Keep, watch

SMALL = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 32}
BART = {"vocab_size": 50, "d_model": 24, "encoder_layers": 2, "decoder_layers": 1}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}

MODELS = {
    "bert": lambda: hf.BertModel(hf.BertConfig(**SMALL)),
    "roberta": lambda: hf.RobertaModel(hf.RobertaConfig(**SMALL)),
    "distilbert": lambda: hf.DistilBertModel(
        hf.DistilBertConfig(vocab_size=50, dim=24, n_layers=2, n_heads=4)
    ),
    "albert": lambda: hf.AlbertModel(hf.AlbertConfig(**SMALL, embedding_size=16)),
    "gpt2": lambda: hf.GPT2Model(hf.GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4)),
    "llama, grouped heads": lambda: hf.LlamaModel(hf.LlamaConfig(**GROUPED)),
    "mistral, sliding window": lambda: hf.MistralModel(hf.MistralConfig(**GROUPED, sliding_window=3)),
    "qwen3, head_dim": lambda: hf.Qwen3Model(hf.Qwen3Config(**GROUPED, head_dim=10)),
    "t5 encoder, bias": lambda: hf.T5EncoderModel(
        hf.T5Config(vocab_size=50, d_model=24, d_kv=6, d_ff=32, num_layers=2, num_heads=4)
    ),
    "bart encoder": lambda: hf.BartModel(hf.BartConfig(**BART)).get_encoder(),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_maps_are_the_models_own(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    # Random weights attend to everything alike: larger projections make the maps differ from one another.
    for part in model.modules():
        if isinstance(part, torch.nn.Linear):
            part.weight.data.mul_(8.0)
    ids = torch.arange(16).reshape(2, 8) + 3
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 6:] = 0
    with torch.no_grad(), watch(model, Keep(weights=True)) as record:
        watched = model(input_ids=ids, attention_mask=mask).last_hidden_state
    with torch.no_grad():
        plain = model(input_ids=ids, attention_mask=mask).last_hidden_state
        model.set_attn_implementation("eager")
        theirs = model(input_ids=ids, attention_mask=mask, output_attentions=True).attentions
    assert torch.equal(watched, plain)
    assert len(record.sites) == len(theirs) == 2
    for site, expected in zip(record.sites, theirs, strict=True):
        seen = mask.bool()[:, None, :, None].expand_as(expected)
        torch.testing.assert_close(site.weights[seen], expected[seen], atol=1e-5, rtol=0)
        assert float(expected[0].std()) > 0.02


def test_a_translator_has_three_kinds_of_sites():
    torch.manual_seed(0)
    model = hf.BartModel(hf.BartConfig(**BART)).eval()
    with torch.no_grad(), watch(model, Keep(weights=True)) as record:
        model(input_ids=torch.tensor([[5, 6, 7, 8]]), decoder_input_ids=torch.tensor([[2, 9]]))
    found = [(site.name, site.kind, site.lengths) for site in record.sites]
    assert found == [
        ("encoder.layers.0.self_attn", "self", (4, 4)),
        ("encoder.layers.1.self_attn", "self", (4, 4)),
        ("decoder.layers.0.self_attn", "self", (2, 2)),
        ("decoder.layers.0.encoder_attn", "cross", (2, 4)),
    ]
    assert float(record.sites[2].weights[0, :, 0, 1].abs().max()) == 0.0
