import json
import shutil

import pytest
import torch

from regard.look import _model_run, watch
from regard.look._model import load_model, record_of, tokens_of, visible
from regard.look._record import Token


def test_a_local_folder_is_loaded_as_transformers_makes_it(bert_folder):
    loaded = load_model(str(bert_folder))
    assert loaded.name == "tiny-bert"
    assert loaded.model.config._attn_implementation == "sdpa" and not loaded.model.training


def test_tokens_are_the_characters_of_the_text(bert_folder):
    text = "the cat, 日本語 <b>!"
    _, tokens = tokens_of(load_model(str(bert_folder)).tokenizer, text)
    assert tokens[0].text == "[CLS]" and tokens[0].special and tokens[-1].text == "[SEP]"
    inner = tokens[1:-1]
    assert not any(token.special for token in inner)
    assert all(token.text == text[token.start : token.stop] for token in inner)
    assert "".join(token.text for token in inner) == text.replace(" ", "")


def test_bytes_of_one_character_are_numbered_and_blanks_are_seen(gpt_folder):
    _, tokens = tokens_of(load_model(str(gpt_folder)).tokenizer, "cat 😀\n")
    shown = [token.text for token in tokens]
    assert [text for text in shown if text.startswith("😀")] == ["😀 1/4", "😀 2/4", "😀 3/4", "😀 4/4"]
    assert shown[-1] == "⏎" and "Ġ" not in "".join(shown)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", "the"),
        (" ", "␣"),
        ("\n", "⏎"),
        ("\t\n", "⇥⏎"),
        ("\x1b[31m", "<001B>[31m"),
        ("\u202eabc", "<202E>abc"),
        ("👩\u200d👧", "👩\u200d👧"),
        ("\u200fسلام", "\u200fسلام"),
        ("e\u0301", "e\u0301"),
        ("\x00", "<0000>"),
        ("\u200d", "<200D>"),
        ("", ""),
    ],
)
def test_visible(text, shown):
    assert visible(text) == shown


def test_a_causal_model_looks_back_only(gpt_folder):
    record = record_of(load_model(str(gpt_folder)), "the cat sat")
    assert [site.name for site in record.sites] == ["h.0.attn", "h.1.attn"]
    for site in record.sites:
        assert float(site.weights.triu(1).abs().max()) == 0.0
        torch.testing.assert_close(site.weights.sum(-1), torch.ones(site.weights.shape[:-1]))


def test_the_record_is_of_the_text(bert_folder):
    record = record_of(load_model(str(bert_folder)), "the cat")
    assert record.text == "the cat" and record.model == "tiny-bert"
    for site in record.sites:
        assert [token.text for token in site.query_tokens] == ["[CLS]", "the", "cat", "[SEP]"]
        assert site.key_tokens == site.query_tokens and isinstance(site.key_tokens[0], Token)


def test_an_eager_model_shows_its_own_weights(bert_folder):
    loaded = load_model(str(bert_folder))
    plain = record_of(loaded, "the cat")
    loaded.model.set_attn_implementation("eager")
    eager = record_of(loaded, "the cat")
    assert [site.implementation for site in eager.sites] == ["eager"] * 2
    for site, other in zip(eager.sites, plain.sites, strict=True):
        torch.testing.assert_close(site.weights, other.weights, rtol=1e-5, atol=1e-6)


def test_a_model_without_attention_is_refused(bert_folder):
    loaded = load_model(str(bert_folder))
    loaded.model.encoder.layer = torch.nn.ModuleList()
    with pytest.raises(ValueError, match="no attention was seen in tiny-bert"):
        record_of(loaded, "the cat")


@pytest.fixture
def broken(bert_folder, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(bert_folder, folder)
    return folder


def test_no_such_folder():
    with pytest.raises(ValueError, match="no model folder 'nowhere', nor a packaged model.*minilm"):
        load_model("nowhere")


def test_a_file_is_no_folder(broken):
    with pytest.raises(ValueError, match="must be a folder"):
        load_model(str(broken / "config.json"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_folder_without_a_needed_file(broken, name):
    (broken / name).unlink()
    with pytest.raises(ValueError, match=f"has no {name}"):
        load_model(str(broken))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\x00\xff" * 40])
def test_a_folder_with_a_broken_file(broken, name, content):
    (broken / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"(model|tokenizer) in .* could not be loaded"):
        load_model(str(broken))


def test_weights_that_do_not_fit_the_config(broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match="do not fit its config.json.*random numbers"):
        load_model(str(broken))


def test_a_model_that_was_not_fetched(monkeypatch, tmp_path):
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="fetch it once with: regard fetch minilm"):
        load_model("minilm")


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_an_empty_text(bert_folder, text):
    with pytest.raises(ValueError, match="the text is empty"):
        record_of(load_model(str(bert_folder)), text)


def test_a_text_longer_than_the_model_reads(bert_folder):
    with pytest.raises(ValueError, match="42 tokens long, and tiny-bert reads at most 40"):
        record_of(load_model(str(bert_folder)), "cat " * 40)


def test_a_text_whose_maps_would_fill_the_memory_is_pooled(gpt_folder, monkeypatch):
    monkeypatch.setattr(_model_run, "WEIGHT_BYTES", 4 * 2 * 2 * 6**2)
    loaded = load_model(str(gpt_folder))
    short, long = (record_of(loaded, text) for text in ("the", "the cat sat on a mat"))
    assert all(site.whole is not None or site.query is not None for site in short.sites)
    assert all(site.whole is None and site.query is None for site in long.sites)
    assert all(site.top_weights is not None and site.pooled is not None for site in long.sites)
    assert any("would take too much memory" in note for note in long.notes) and not short.notes


def test_nothing_is_left_on_the_model(bert_folder):
    loaded = load_model(str(bert_folder))
    record_of(loaded, "the cat")
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in loaded.model.modules())
    with watch(loaded.model) as record:
        pass
    assert record.sites == []


def test_the_weight_on_special_tokens_and_separators_is_counted(bert_folder):
    record = record_of(load_model(str(bert_folder)), "the cat, sat.")
    tokens = record.sites[0].key_tokens
    special = torch.tensor([token.special for token in tokens])
    apart = torch.tensor(
        [place > 0 and token.text in (",", ".", "[SEP]") for place, token in enumerate(tokens)]
    )
    assert special.sum() == 2 and apart.sum() >= 1
    for site in record.sites:
        torch.testing.assert_close(site.statistic("special"), site.weights[..., special].sum(-1))
        torch.testing.assert_close(site.statistic("separators"), site.weights[..., apart].sum(-1))
