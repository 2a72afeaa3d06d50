"""Models of many families give on regard what they give on eager: outputs, gradients, weights."""

import contextlib

import pytest
import torch
from transformers.utils import logging

from regard import _runs
from regard._frame import Frame
from regard._plan import use_kernel
from regard.integrations.transformers_tensor import MaskTensor
from tests.integrations import zoo

logging.set_verbosity_error()
CLOSE = 1e-5
# Rounding each parameter of it anew (6e-8) moves eager's own gradient by 1e-5: its experts are ill-conditioned.
GRADIENTS_CLOSE = {"gpt-oss": 3e-5}
SITES = {"T5": 6, "Marian": 6, "BART": 6, "Whisper": 6, "DETR": 6, "CLIP": 4, "Pegasus": 6}
SITES |= {"DistilBERT": 2, "GPT-J": 2, "OPT": 2, "SigLIP": 2, "Wav2Vec2": 2}
OWN_TENSOR = {"BEiT", "Swin"}  # they build a bias of their own and call it attention_mask
REFUSES = {"Falcon", "GPT-Neo"}  # they look their attention up in a table of their own


def run(model, inputs, real, implementation):
    """Outputs on real positions, the gradients of all parameters, and the weights."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    given = model(**inputs, output_attentions=True)
    parts = {"": given, "text": given.get("text_model_output"), "vision": given.get("vision_model_output")}
    weights = {
        f"{part} {name}": found
        for part, held in parts.items()
        for name, found in (held or {}).items()
        if "attentions" in name and found
    }
    outputs = {}
    for name, found in given.items():
        if torch.is_tensor(found) and found.is_floating_point():
            if real is None:
                outputs[name] = found
            elif found.shape[:2] == real.shape and found.ndim == 3:
                outputs[name] = found[real]
    direction = torch.Generator().manual_seed(5)
    sum((out * torch.randn(out.shape, generator=direction)).sum() for out in outputs.values()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return outputs, gradients, weights


def difference(one, two):
    return ((one - two).norm() / two.norm()).item()


@pytest.mark.parametrize("kernel", ["chosen", "tiled"])
@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_outputs_gradients_and_weights_are_those_of_eager(name, kernel, calls):
    """On the kernel that small calls take, and on the one that long inputs take."""
    model, inputs, real = zoo.make(name)
    outputs, gradients, weights = run(model, inputs, real, "eager")
    assert not calls
    with use_kernel("tiled") if kernel == "tiled" else contextlib.nullcontext():
        found, found_gradients, found_weights = run(model, inputs, real, "regard")

    assert len(calls) == SITES.get(name, 3)
    assert outputs and found.keys() == outputs.keys()
    for key, expected in outputs.items():
        assert difference(found[key], expected) <= CLOSE, key

    assert gradients and found_gradients.keys() == gradients.keys()
    everything = torch.cat([g.flatten() for g in gradients.values()])
    close = GRADIENTS_CLOSE.get(name, CLOSE)
    assert difference(torch.cat([g.flatten() for g in found_gradients.values()]), everything) <= close
    typical = everything.norm() / len(gradients) ** 0.5
    for key, expected in gradients.items():
        # A key bias has gradient 0 but for rounding: each is measured by a tenth of a typical one at least.
        error = (found_gradients[key] - expected).norm() / torch.maximum(expected.norm(), typical / 10)
        assert error <= close, key

    assert weights and found_weights.keys() == weights.keys()
    for key, expected in weights.items():
        assert len(found_weights[key]) == len(expected)
        of_encoder = "encoder_attentions" in key or key.startswith("text")
        rows = inputs["attention_mask"].bool() if of_encoder and "attention_mask" in inputs else real
        for layer, other in zip(found_weights[key], expected, strict=True):
            assert layer.shape == other.shape
            if rows is not None and layer.shape[:1] + layer.shape[2:3] == rows.shape:
                layer, other = layer.transpose(1, 2)[rows], other.transpose(1, 2)[rows]
            assert difference(layer, other) <= CLOSE, key


@pytest.mark.parametrize("name", sorted(zoo.FAMILIES.keys() - OWN_TENSOR))
def test_masks_arrive_as_runs(name, calls):
    model, inputs, _ = zoo.make(name)
    model.set_attn_implementation("regard")
    with torch.no_grad():
        model(**inputs)
    for _, mask, _ in calls:
        assert mask is None or isinstance(mask, MaskTensor)
        if mask is not None and mask.mask is not None:
            B, _, Tq, Tk = mask.shape
            frame = Frame((B,), 4, B, 4, 4, Tq, Tk, mask.device)
            visible = _runs.lower(mask.mask.bind(frame), frame, 0)
            assert visible.runs is not None or visible.dense is None or visible.dense.shape[-2] == 1


@pytest.mark.parametrize("name", zoo.NEVER)
def test_models_that_never_ask_compute_what_they_always_did(name, calls):
    model, inputs, _ = zoo.make(name)
    with torch.no_grad():
        before = next(iter(model(**inputs).values()))
        try:
            other = type(model)._from_config(model.config, attn_implementation="regard").eval()
        except KeyError:
            assert name in REFUSES
        else:
            assert name not in REFUSES
            other.load_state_dict(model.state_dict())
            assert torch.equal(next(iter(other(**inputs).values())), before)
    assert not calls


def test_longt5_asks_everywhere_but_in_its_local_encoder(calls):
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4}
    model = zoo._named(
        "LongT5ForConditionalGeneration", **sizes, pad_token_id=0, decoder_start_token_id=0, local_radius=3
    ).eval()
    model, inputs, real = zoo.translator(model)
    expected = run(model, inputs, real, "eager")[0]["logits"]
    found = run(model, inputs, real, "regard")[0]["logits"]
    assert difference(found, expected) <= CLOSE
    assert [type(module).__name__ for module, _, _ in calls] == ["LongT5Attention"] * 4


def test_weights_are_made_only_when_asked_for(calls, monkeypatch):
    from regard.integrations import transformers_call

    model, inputs, _ = zoo.make("GPT-2")
    model.set_attn_implementation("regard")
    made = []
    weigh = transformers_call.attention_weights
    monkeypatch.setattr(
        transformers_call, "attention_weights", lambda *a, **k: made.append(1) or weigh(*a, **k)
    )
    assert model(**inputs).attentions is None and not made
    assert len(model(**inputs, output_attentions=True).attentions) == len(made) == 3


def test_the_weights_have_a_gradient():
    model, inputs, _ = zoo.make("BERT")
    gradients = []
    for implementation in ("eager", "regard"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        weights = model(**inputs, output_attentions=True).attentions[1]
        weights[:, :, 0].square().sum().backward()
        gradients.append(model.encoder.layer[1].attention.self.query.weight.grad.clone())
    assert difference(gradients[1], gradients[0]) <= CLOSE


def test_mixing_implementations_in_one_model():
    model, inputs, real = zoo.make("CLIP")
    model.set_attn_implementation("eager")
    expected = model(**inputs).logits_per_text
    model.set_attn_implementation({"text_config": "regard", "vision_config": "eager"})
    assert model.text_model.config._attn_implementation == "regard"
    assert difference(model(**inputs).logits_per_text, expected) <= CLOSE
