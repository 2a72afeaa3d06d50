"""Images with their grids, models that read and write, and models in transformers' own cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image

from regard.look import Grid, Record, load_model, merged, record_of, record_of_image
from regard.look._tokens_image import leading
from tests.models import bert_tokenizer

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
IMAGES = {"image_size": 32, "patch_size": 8, **SIZES}


def vit() -> hf.PreTrainedModel:
    return hf.ViTModel(hf.ViTConfig(**{**IMAGES, "image_size": [32, 48]}), add_pooling_layer=False)


def registers() -> hf.PreTrainedModel:
    config = hf.Dinov2WithRegistersConfig(
        image_size=32,
        patch_size=8,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_register_tokens=4,
    )
    return hf.Dinov2WithRegistersModel(config)


def deit() -> hf.PreTrainedModel:
    return hf.DeiTModel(hf.DeiTConfig(**IMAGES), add_pooling_layer=False)


def siglip() -> hf.PreTrainedModel:
    return hf.SiglipVisionModel(hf.SiglipVisionConfig(**IMAGES))


def clip() -> hf.PreTrainedModel:
    return hf.CLIPVisionModel(hf.CLIPVisionConfig(**IMAGES))


GRIDS = {
    "vit": (vit, (32, 48), Grid(4, 6, leading=1), ["[class]"]),
    "dinov2 with registers": (
        registers,
        (32, 32),
        Grid(4, 4, leading=5),
        ["[class]", "[register 1]", "[register 2]", "[register 3]", "[register 4]"],
    ),
    "deit": (deit, (32, 32), Grid(4, 4, leading=2), ["[class]", "[distillation]"]),
    "siglip": (siglip, (32, 32), Grid(4, 4), []),
    "clip": (clip, (32, 32), Grid(4, 4, leading=1), ["[class]"]),
}


def saved(folder: Path, model: hf.PreTrainedModel, size: tuple[int, int]) -> Path:
    torch.manual_seed(0)
    model.save_pretrained(folder)
    hf.ViTImageProcessorPil(size={"height": size[0], "width": size[1]}).save_pretrained(folder)
    return folder


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    pixels = np.zeros((40, 60, 3), dtype=np.uint8)
    pixels[:, :30, 0] = 255
    path = tmp_path / "picture.png"
    Image.fromarray(pixels).save(path)
    return path


@pytest.mark.parametrize("name", GRIDS)
def test_patches_and_what_stands_before_them_are_counted(name: str, tmp_path: Path, picture: Path) -> None:
    make, size, grid, front = GRIDS[name]
    loaded = load_model(str(saved(tmp_path / "model", make(), size)))
    record = record_of_image(loaded, picture)
    patched = [site for site in record.sites if site.lengths == (grid.tokens, grid.tokens)]
    assert len(patched) == 2
    for site in patched:
        assert site.query_grid == site.key_grid == grid
        assert [token.text for token in site.query_tokens if token.special] == front
        assert site.query_tokens[grid.leading].text == "0,0"
        assert site.query_tokens[-1].text == f"{grid.rows - 1},{grid.columns - 1}"
    record.check()
    record.save(tmp_path / "seen")
    again = Record.load(tmp_path / "seen")
    assert again.sites[0].key_grid == grid and torch.equal(again.image, record.image)


def test_the_image_is_the_one_that_the_model_saw(tmp_path: Path, picture: Path) -> None:
    record = record_of_image(load_model(str(saved(tmp_path / "model", vit(), (32, 48)))), picture)
    assert (
        record.image is not None and record.image.shape == (32, 48, 3) and record.image.dtype == torch.uint8
    )
    assert int(record.image[16, 4, 0]) == 255 and int(record.image[16, 44].max()) == 0


def test_a_pooling_head_reads_the_grid(tmp_path: Path, picture: Path) -> None:
    record = record_of_image(load_model(str(saved(tmp_path / "model", siglip(), (32, 32)))), picture)
    (pool,) = [site for site in record.sites if site.lengths == (1, 16)]
    assert pool.key_grid == Grid(4, 4) and pool.query_grid is None
    assert any("have no grid" in note for note in record.notes)


class OddTokens(torch.nn.Module):
    """One more token than can be accounted for."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 8, 8)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.conv(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat([x, x[:, :1]], 1)[:, None]
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def test_a_number_of_tokens_that_does_not_add_up_has_no_grid(tmp_path: Path, picture: Path) -> None:
    loaded = load_model(str(saved(tmp_path / "model", deit(), (32, 32))))
    loaded.model = OddTokens()
    record = record_of_image(loaded, picture)
    assert record.sites[0].query_grid is None and record.sites[0].query_tokens == ()
    assert any("conv made 4 x 4 patches, after 0 other tokens" in note for note in record.notes)
    assert leading(loaded.model, "conv") == []
    assert not loaded.model.conv._forward_hooks


def test_patches_do_not_merge_into_words(tmp_path: Path, picture: Path) -> None:
    record = record_of_image(load_model(str(saved(tmp_path / "model", vit(), (32, 48)))), picture)
    with pytest.raises(ValueError, match="its tokens are patches of an image"):
        merged(record, "word")


def test_images_that_are_none(tmp_path: Path, picture: Path, bert_folder: Path) -> None:
    loaded = load_model(str(saved(tmp_path / "model", vit(), (32, 48))))
    text = tmp_path / "text.png"
    text.write_text("no image")
    with pytest.raises(
        ValueError, match="text.png is not an image that can be read; give a PNG or JPEG file"
    ):
        record_of_image(loaded, text)
    picture.write_bytes(picture.read_bytes()[:60])
    with pytest.raises(ValueError, match="picture.png"):
        record_of_image(loaded, picture)
    with pytest.raises(ValueError, match="cannot read the image .*none.png: No such file"):
        record_of_image(loaded, tmp_path / "none.png")
    with pytest.raises(ValueError, match="cannot read the image"):
        record_of_image(loaded, tmp_path)
    with pytest.raises(
        ValueError,
        match="has no tokenizer: a text says nothing to it. See it with: regard look --model",
    ):
        record_of(loaded, "the cat")
    with pytest.raises(ValueError, match="reads text, and has no image processor"):
        record_of_image(load_model(str(bert_folder)), picture)


def test_a_broken_image_processor(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", vit(), (32, 48))
    (folder / "preprocessor_config.json").write_text("{")
    with pytest.raises(ValueError, match="image processor in .* could not be loaded"):
        load_model(str(folder))


def test_a_model_of_both_takes_either(tmp_path: Path, picture: Path) -> None:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
    ends = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    text = {**sizes, **ends, "vocab_size": 120, "max_position_embeddings": 16}
    config = hf.CLIPConfig(
        text_config=text, vision_config={**sizes, "image_size": 32, "patch_size": 8}, projection_dim=8
    )
    folder = saved(tmp_path / "both", hf.CLIPModel(config), (32, 32))
    bert_tokenizer().save_pretrained(folder)
    loaded = load_model(str(folder))
    seen = record_of_image(loaded, picture)
    assert [site.query_grid for site in seen.sites] == [Grid(4, 4, leading=1)] * 2
    read = record_of(loaded, "the cat")
    assert [token.text for token in read.sites[0].query_tokens] == [
        "[CLS]",
        "the",
        "cat",
        "[SEP]",
    ] and not read.notes
    with pytest.raises(ValueError, match="reads at most 16; shorten it"):
        record_of(loaded, "the cat " * 9)


def test_an_image_of_too_many_patches_is_pooled(
    tmp_path: Path, picture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.look._model_run.WEIGHT_BYTES", 1000)
    record = record_of_image(load_model(str(saved(tmp_path / "model", vit(), (32, 48)))), picture)
    assert all(site.whole is None and site.pooled is not None for site in record.sites)
    assert any("maps pooled to" in note for note in record.notes)


# ---------------------------------------------------------------------------- reading and writing


@pytest.fixture
def translator(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = hf.T5Config(
        vocab_size=120, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=3, decoder_start_token_id=0
    )
    hf.T5Model(config).save_pretrained(tmp_path / "model")
    bert_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_model_that_reads_and_writes(translator: Path) -> None:
    record = record_of(load_model(str(translator)), "the cat sat", target="the dog")
    record.check()
    read, written = ["[CLS]", "the", "cat", "sat", "[SEP]"], ["[PAD]", "[CLS]", "the", "dog", "[SEP]"]
    assert [site.kind for site in record.sites] == ["self", "self", "self", "cross", "self", "cross"]
    for site in record.sites:
        reads = site.name.startswith("encoder")
        assert [token.text for token in site.query_tokens] == (read if reads else written)
        assert [token.text for token in site.key_tokens] == (
            read if reads or site.kind == "cross" else written
        )
    assert record.text == "the cat sat\nthe dog"
    words = [token for token in record.sites[3].query_tokens if not token.special]
    assert [record.text[token.start : token.stop] for token in words] == ["the", "dog"]


def test_sides_of_one_length_keep_their_own_names(translator: Path) -> None:
    loaded = load_model(str(translator))
    record = record_of(loaded, "the cat sat on", target="the cat sat")
    cross = next(site for site in record.sites if site.kind == "cross")
    assert cross.lengths == (6, 6)
    assert cross.query_tokens[0].text == "[PAD]" and cross.key_tokens[0].text == "[CLS]"


def test_without_a_target_only_the_reading_half_runs(translator: Path) -> None:
    record = record_of(load_model(str(translator)), "the cat sat")
    assert len(record.sites) == 2 and any("only the half that reads" in note for note in record.notes)


def test_targets_that_are_refused(translator: Path, bert_folder: Path) -> None:
    with pytest.raises(ValueError, match="the target is empty"):
        record_of(load_model(str(translator)), "the cat", target=" ")
    with pytest.raises(ValueError, match="does not read one text and write another; leave out the target"):
        record_of(load_model(str(bert_folder)), "the cat", target="sat")
    loaded = load_model(str(translator))
    loaded.model.config.decoder_start_token_id = None
    with pytest.raises(ValueError, match="names no decoder_start_token_id"):
        record_of(loaded, "the cat", target="sat")


# ---------------------------------------------------------------------------- names


def test_a_name_in_transformers_own_cache(
    tmp_path: Path, bert_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    commit = "0" * 40
    home = tmp_path / "models--someone--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    (home / "snapshots").mkdir()
    (home / "snapshots" / commit).symlink_to(bert_folder, target_is_directory=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))
    loaded = load_model("someone/tiny")
    assert loaded.name == "someone/tiny" and len(record_of(loaded, "the cat").sites) == 2
    with pytest.raises(ValueError, match="nor one in transformers' cache on this machine"):
        load_model("someone/else")
