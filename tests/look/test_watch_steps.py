"""A generation is one site a module: a row for each token, the keys of the last step, beams followed."""

import pytest
import torch
import transformers as hf
from torch import nn

from regard.integrations.transformers import register
from regard.look import EVERYTHING, Keep, Record, watch
from regard.look._record_statistics import STATISTICS, of_weights
from regard.look._watch_statistics import pooled

SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 24, "num_key_value_heads": 2, "max_position_embeddings": 64}
SMALL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.4}
ALL = Keep(topk=3, pool=4, rows=(0, 4, -1), weights=True, tensors=True)
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


@pytest.fixture(scope="module", autouse=True)
def registered():
    register()


def llama(implementation="sdpa", **more):
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, **more)).eval()
    model.set_attn_implementation(implementation)
    return model


def generate(model, ids=IDS, keep=ALL, **how):
    how = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids), **how}
    plain = model.generate(ids, **how)
    with watch(model, keep) as record:
        output = model.generate(ids, **how)
    if isinstance(plain, torch.Tensor):
        assert torch.equal(plain, output)
    assert record.notes == []
    return record, output


def agrees(site):
    """What was kept of the steps is what the stitched weights say."""
    site.check()
    expected = of_weights(site.whole, site.offset, STATISTICS)
    for name, tensor in expected.items():
        torch.testing.assert_close(site.statistics[name], tensor, rtol=3e-4, atol=3e-4, msg=name)
    top = site.whole.topk(site.top_weights.shape[-1], -1).values
    torch.testing.assert_close(site.top_weights, top, rtol=1e-5, atol=1e-5)
    there = site.whole.gather(-1, site.top_keys.long().clamp(min=0))
    torch.testing.assert_close(
        there.masked_fill(site.top_keys < 0, 0), site.top_weights, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(site.row_weights, site.whole[:, :, list(site.rows)], rtol=1e-5, atol=1e-6)


def mixed(site):
    return site.whole @ site.value.repeat_interleave(site.heads // site.value.shape[1], 1)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "regard"])
@pytest.mark.parametrize("more", [{}, {"cache_implementation": "static"}], ids=["growing", "static"])
def test_rows_are_those_of_one_forward(implementation, more):
    model = llama(implementation)
    record, output = generate(model, **more)
    assert [site.name for site in record.sites] == [f"model.layers.{n}.self_attn" for n in range(2)]
    with torch.no_grad(), watch(model, EVERYTHING) as whole:
        model(output[:, :-1])
    for site, one in zip(record.sites, whole.sites, strict=True):
        assert (site.kind, site.offset, site.steps, site.slots) == ("self", 0, (4, 1, 1, 1, 1), None)
        seen = one.weights.shape[-1]
        torch.testing.assert_close(site.weights[..., :seen], one.weights, rtol=1e-4, atol=1e-5)
        assert float(site.weights[..., seen:].abs().sum()) == 0.0
        agrees(site)
        assert site.rows == (0, 4, 7)
        torch.testing.assert_close(mixed(site), site.output, rtol=1e-4, atol=1e-5)
        from regard import attention

        again = attention(site.query, site.key, site.value, **site.mechanism)
        torch.testing.assert_close(again, site.output, rtol=1e-4, atol=1e-5)
        grown = pooled(site.whole, 4) if site.lengths == (8, 8) else None
        if grown is not None:
            assert site.cell == grown["cell"]
            torch.testing.assert_close(site.pooled, grown["pooled"], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(site.pooled_max, grown["pooled_max"], rtol=1e-4, atol=1e-5)


def test_left_padding():
    ids, mask = IDS.clone(), torch.ones(2, 4, dtype=torch.long)
    ids[1, :2], mask[1, :2] = 0, 0
    record, _ = generate(llama(), ids, attention_mask=mask)
    for site in record.sites:
        assert float(site.whole[1, :, 2:, :2].abs().max()) == 0.0
        agrees(site)


@pytest.mark.parametrize("prompt", [2, 4, 9])
def test_a_sliding_window_keeps_its_own_keys(prompt):
    torch.manual_seed(0)
    ids = torch.randint(3, 40, (2, prompt))
    model = hf.MistralForCausalLM(hf.MistralConfig(**SMALL, sliding_window=4)).eval()
    record, output = generate(model, ids, max_new_tokens=6)
    with torch.no_grad(), watch(model, EVERYTHING) as whole:
        model(output[:, :-1])
    for site, one in zip(record.sites, whole.sites, strict=True):
        assert site.steps == (prompt, 1, 1, 1, 1, 1)
        torch.testing.assert_close(site.weights, one.weights, rtol=1e-4, atol=1e-5)
        agrees(site)


def test_greedy_twice_is_two_sites_a_module():
    model = llama()
    with watch(model, ALL) as record:
        for _ in range(2):
            model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=3, do_sample=False)
    assert [(site.layer, site.call) for site in record.sites] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    for first, second in zip(record.sites[:2], record.sites[2:], strict=True):
        assert torch.equal(first.whole, second.whole) and first.steps == second.steps == (4, 1, 1)


def test_a_prompt_in_chunks():
    model, ids = llama(), torch.randint(3, 40, (1, 9))
    with torch.no_grad(), watch(model, EVERYTHING) as whole:
        model(ids)
    cache = hf.DynamicCache(config=model.config)
    with torch.no_grad(), watch(model, ALL) as record:
        for part in ids.split(4, 1):
            model(part, cache=cache, use_cache=True)
    for site, one in zip(record.sites, whole.sites, strict=True):
        assert site.steps == (4, 4, 1)
        torch.testing.assert_close(site.weights, one.weights, rtol=1e-4, atol=1e-5)
        agrees(site)
        grown = pooled(site.whole, 4)
        assert site.cell[0] * 4 >= 9 and site.pooled.sum() > 0
        torch.testing.assert_close(
            site.pooled.sum(-1), torch.ones_like(site.pooled.sum(-1)), rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(site.pooled_max.amax((2, 3)), grown["pooled_max"].amax((2, 3)))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_beams_are_followed(implementation):
    model = llama(implementation)
    how = {"num_beams": 3, "return_dict_in_generate": True, "output_scores": True, "num_return_sequences": 2}
    record, output = generate(model, keep=ALL, max_new_tokens=6, **how)
    last = [site.weights.clone() for site in record.sites]
    for site in record.sites:
        assert site.slots.shape == (6, 6) and site.sizes.B == 6
        agrees(site)
        torch.testing.assert_close(mixed(site), site.output, rtol=1e-4, atol=1e-5)
    record.follow(output.beam_indices)
    with torch.no_grad(), watch(model, EVERYTHING) as whole:
        model(output.sequences[:, :-1])
    for site, one, before in zip(record.sites, whole.sites, last, strict=True):
        assert site.sizes.B == 4 and site.weights.shape[0] == 4 != before.shape[0]
        torch.testing.assert_close(site.weights, one.weights, rtol=1e-4, atol=1e-5)
        agrees(site)


def test_beam_indices_that_do_not_fit_are_refused(tmp_path):
    model = llama()
    record, _ = generate(model, num_beams=2, keep=Keep())
    assert record.sites[0].slots is not None
    with pytest.raises(ValueError, match=r"follow\(beam_indices\): expected whole numbers below 4"):
        record.follow(torch.zeros(2, 9, dtype=torch.long))
    record.save(tmp_path / "x")
    with pytest.raises(ValueError, match="no generation with beams is in this record"):
        Record.load(tmp_path / "x").follow(torch.zeros(2, 2, dtype=torch.long))


@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_translator_has_three_kinds_of_sites(num_beams):
    torch.manual_seed(0)
    config = hf.BartConfig(
        vocab_size=40,
        d_model=16,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        init_std=0.4,
        forced_eos_token_id=None,
        eos_token_id=None,
    )
    model = hf.BartForConditionalGeneration(config).eval()
    record, output = generate(model, num_beams=num_beams, max_new_tokens=4)
    found = [(site.name, site.kind, site.lengths) for site in record.sites]
    prefix = "model.decoder.layers"
    tall = output.shape[1] - 1
    assert found == [
        ("model.encoder.layers.0.self_attn", "self", (4, 4)),
        (f"{prefix}.0.self_attn", "self", (tall, tall)),
        (f"{prefix}.0.encoder_attn", "cross", (tall, 4)),
        (f"{prefix}.1.self_attn", "self", (tall, tall)),
        (f"{prefix}.1.encoder_attn", "cross", (tall, 4)),
    ]
    for site in record.sites[1:]:
        agrees(site)
    if num_beams == 1:
        with torch.no_grad(), watch(model, EVERYTHING) as whole:
            model(input_ids=IDS, decoder_input_ids=output[:, :-1])
        for site, one in zip(record.sites, whole.sites, strict=True):
            torch.testing.assert_close(site.weights, one.weights, rtol=1e-4, atol=1e-5)


def test_steps_of_ones_own_module_with_a_cache():
    from regard.masks import Causal
    from regard.nn import GrowingCache, SelfAttention

    torch.manual_seed(0)
    module = SelfAttention(8, 2, mask=Causal()).eval()
    x, cache = torch.randn(1, 6, 8), GrowingCache()
    with torch.no_grad(), watch(module, EVERYTHING) as whole:
        module(x)
    with torch.no_grad(), watch(module, ALL) as record:
        for part in x.split(2, 1):
            module(part, cache=cache)
    (site,) = record.sites
    assert site.steps == (2, 2, 2)
    torch.testing.assert_close(site.weights, whole.sites[0].weights)
    agrees(site)


def test_forwards_of_their_own_are_not_stitched():
    class One(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    model = One()
    with watch(model) as record:
        for length in (3, 1, 1, 4):
            model(torch.randn(1, 1, length, 4))
    assert [(site.call, site.lengths, site.steps) for site in record.sites] == [
        (0, (3, 3), ()),
        (1, (1, 1), ()),
        (2, (1, 1), ()),
        (3, (4, 4), ()),
    ]


def test_layers_that_share_a_module_are_told_apart():
    from regard.masks import Causal
    from regard.nn import GrowingCache, SelfAttention

    class Shared(nn.Module):
        """Two layers with the same weights, each with a cache of its own."""

        def __init__(self):
            super().__init__()
            self.attention = SelfAttention(8, 2, mask=Causal())

        def forward(self, x, caches):
            for cache in caches:
                x = x + self.attention(x, cache=cache)
            return x

    torch.manual_seed(0)
    model, x = Shared().eval(), torch.randn(1, 5, 8)
    with torch.no_grad(), watch(model, EVERYTHING) as whole:
        model(x, [GrowingCache(), GrowingCache()])
    caches = [GrowingCache(), GrowingCache()]
    with torch.no_grad(), watch(model, ALL) as record:
        for part in x.split(1, 1):
            model(part, caches)
    assert [(site.call, site.steps) for site in record.sites] == [(0, (1,) * 5), (1, (1,) * 5)]
    for site, one in zip(record.sites, whole.sites, strict=True):
        torch.testing.assert_close(site.weights, one.weights, rtol=1e-4, atol=1e-5)
        agrees(site)


def test_a_ring_of_keys():
    from regard.masks import Window
    from regard.nn import RingCache, SelfAttention

    torch.manual_seed(0)
    module = SelfAttention(8, 2, mask=Window(2, 0)).eval()
    x, cache = torch.randn(1, 9, 8), RingCache(2)
    with torch.no_grad(), watch(module, EVERYTHING) as whole:
        module(x)
    with torch.no_grad(), watch(module, ALL) as record:
        for part in x.split([3, 1, 2, 1, 1, 1], 1):
            module(part, cache=cache)
    (site,) = record.sites
    assert site.steps == (3, 1, 2, 1, 1, 1)
    torch.testing.assert_close(site.weights, whole.sites[0].weights, rtol=1e-4, atol=1e-5)
    agrees(site)


def test_after_tokens_were_taken_back_another_site_begins():
    model, ids = llama(), torch.randint(3, 40, (1, 9))
    cache = hf.DynamicCache(config=model.config)
    with torch.no_grad(), watch(model, ALL) as record:
        model(ids[:, :7], cache=cache, use_cache=True)
        cache.crop(-2)
        model(ids[:, 5:6], cache=cache, use_cache=True)
        model(ids[:, 6:], cache=cache, use_cache=True)
    found = [(site.call, site.offset, site.lengths, site.steps) for site in record.sites if site.layer == 0]
    assert found == [(0, 0, (7, 7), ()), (1, 5, (1, 6), ()), (2, 6, (3, 9), ())]
