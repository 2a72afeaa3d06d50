"""Other people's models, all families: what is watched is what the model says of itself, whatever runs it."""

import pytest
import torch
from transformers.utils import logging

from regard.integrations.transformers import register
from regard.look import Keep, doctor, watch
from tests.integrations import zoo

logging.set_verbosity_error()
# Local windows of their own layout: no softmax(query key^T) value to follow. doctor says so.
UNSEEN = {"Longformer"}
NO_SDPA = {"Gemma 2", "gpt-oss", "DETR"}


@pytest.fixture(scope="module", autouse=True)
def registered():
    register()


def own_weights(model, inputs):
    given = model(**inputs, output_attentions=True)
    parts = [given, given.get("text_model_output"), given.get("vision_model_output")]
    held = [(name, found) for part in parts for name, found in (part or {}).items() if "attentions" in name]
    return [layer for _, found in held for layer in found or () if layer is not None]


def watched(model, inputs):
    with torch.no_grad():
        plain = model(**inputs)
        with watch(model, Keep(weights=True, tensors=True)) as record:
            output = model(**inputs)
    for name, tensor in plain.items():
        if torch.is_tensor(tensor):
            assert torch.equal(tensor, output[name]), name
    assert record.notes == []
    return record.sites


def padded_rows(site, inputs):
    """Rows of padding, (B, Tq): what they attend to is nobody's business, and differs."""
    for name in ("attention_mask", "decoder_attention_mask"):
        real = inputs.get(name)
        if real is not None and real.dim() == 2 and real.shape == (site.sizes.B, site.sizes.Tq):
            return ~real.bool()
    return torch.zeros(site.sizes.B, site.sizes.Tq, dtype=torch.bool)


def same_maps(site, expected, inputs, near=2e-5):
    rows = ~padded_rows(site, inputs)
    assert site.weights.shape == expected.shape
    one, two = (weights.transpose(1, 2)[rows] for weights in (site.weights, expected))
    torch.testing.assert_close(one, two, rtol=near, atol=near)


def computes_its_output(site):
    value = site.value.repeat_interleave(site.heads // site.value.shape[1], 1)
    torch.testing.assert_close(site.whole @ value, site.output, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_every_family_under_every_implementation(name):
    model, inputs, _ = zoo.make(name)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = own_weights(model, inputs)
    eager = [site for site in watched(model, inputs) if site.implementation == "eager"]
    assert own and all(any(w.shape == s.whole.shape and torch.equal(w, s.whole) for s in eager) for w in own)
    for implementation in ("regard",) if name in NO_SDPA else ("sdpa", "regard"):
        model.set_attn_implementation(implementation)
        sites = watched(model, inputs)
        found = doctor(model)
        assert {finding.seen for finding in found} == {"everything"}
        assert {finding.name for finding in found} == {site.name for site in sites}
        mine = [site for site in sites if site.implementation == implementation]
        for site, other in zip(mine, eager, strict=True):
            assert (site.name, site.kind, site.layer, site.offset) == (
                other.name,
                other.kind,
                other.layer,
                other.offset,
            )
            assert site.sizes == other.sizes
            same_maps(site, other.whole, inputs)
            computes_its_output(site)
    for site in eager:
        computes_its_output(site)
        assert not site.score_unknown


@pytest.mark.parametrize("name", sorted(zoo.NEVER.keys() - UNSEEN))
def test_families_that_write_their_attention_out(name):
    model, inputs, _ = zoo.make(name)
    with torch.no_grad():
        own = own_weights(model, inputs)
    sites = watched(model, inputs)
    assert sites and {finding.name for finding in doctor(model)} >= {site.name for site in sites}
    for site in sites:
        computes_its_output(site)
        assert not site.score_unknown
    if sites[0].implementation == "eager":
        assert len(own) == len(sites)
        assert all(torch.equal(weights, site.whole) for weights, site in zip(own, sites, strict=True))


def test_one_that_cannot_be_followed_is_named():
    model, inputs, _ = zoo.make("Longformer")
    with torch.no_grad(), watch(model) as record:
        model(**inputs)
    assert record.sites == []
    for layer in range(3):
        place = f"encoder.layer.{layer}.attention.self (LongformerSelfAttention)"
        assert any(note.startswith(place + " ran, and its attention was not seen") for note in record.notes)
    assert any("no attention was seen in LongformerModel" in note for note in record.notes)
    assert {finding.seen for finding in doctor(model, inputs)} == {"nothing"}
