"""The compiled library: built, loaded beside torch's threads, chosen by name, and missed in a sentence."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regard import attention
from regard._plan import use_kernel
from regard.kernels import _library

ROOT = Path(__file__).resolve().parents[2]
NO_KERNEL, NO_VARIANT = 1, 2


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch):
    """The library as it is without anybody's wishes; the copy that was in use is in use again afterwards."""
    for name in ("REGARD_NATIVE", "REGARD_ISA"):
        monkeypatch.delenv(name, raising=False)
    found = _library._load()
    assert isinstance(found, _library.Library), f"scripts/build --native: {found}"
    before = found.variant
    yield found
    found.select(before)


def python(code: str, **environment: str) -> str:
    """What a fresh Python prints."""
    clean = {k: v for k, v in os.environ.items() if k not in ("REGARD_NATIVE", "REGARD_ISA")}
    words = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", code]
    done = subprocess.run(
        words,
        env={**clean, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---------------------------------------------------------------------------- what is there


def test_every_copy_computes(built: _library.Library) -> None:
    assert built.variants and set(built.variants) <= set(built.compiled)
    q, k, v = (torch.randn(2, 3, length, 24) for length in (70, 33, 33))
    expected = torch.softmax(q @ k.mT / 24**0.5, -1) @ v
    before = torch.get_num_threads()
    for name in built.variants:
        built.select(name)
        assert built.variant == name
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with use_kernel("native"):
                torch.testing.assert_close(attention(q, k, v), expected)
    torch.set_num_threads(before)


def test_the_wide_code_is_compiled_for_tests_and_never_chosen(built: _library.Library) -> None:
    if "v3" in built.compiled:
        assert built.compiled[:2] == ("v4", "v3") and "wide" in built.variants
    said = python("from regard.kernels import _library; print(_library.describe())")
    assert said.split()[0] in built.variants and said.split()[0] != "wide" and str(built.path) in said
    assert all(name in said for name in built.compiled)


def test_calls_release_the_interpreter_and_nothing_else_is_exported(built: _library.Library) -> None:
    assert isinstance(built.handle, ctypes.CDLL) and not isinstance(built.handle, ctypes.PyDLL)
    for name in built.compiled:
        with pytest.raises(AttributeError):
            built.handle[f"regard_kernels_{name}"]


def test_a_kernel_that_is_not_there_is_a_status(built: _library.Library) -> None:
    assert [built.call(which, b"") for which in (-1, 1 << 20)] == [NO_KERNEL, NO_KERNEL]


def test_one_openmp_runtime_is_loaded_and_one_team_works() -> None:
    code = """
import os, torch
from regard import attention
from regard._plan import use_kernel
torch.set_num_threads(2)
a = torch.randn(1, 8, 400, 64)
(a @ a.mT).softmax(-1)
before = len(os.listdir("/proc/self/task"))
with use_kernel("native"):
    attention(a, a, a)
assert len(os.listdir("/proc/self/task")) == before
print(*{line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.split()[-1]})
"""
    runtimes = python(code).split()
    assert len(runtimes) == 1 and "torch" in runtimes[0], runtimes


def test_loading_leaves_small_numbers_alone() -> None:
    """A library linked with -ffast-math would make the processor round denormal numbers to zero."""
    assert (
        python("import torch, regard.kernels._library; print(float(torch.tensor(1e-40) * 1) > 0)") == "True\n"
    )


# ---------------------------------------------------------------------------- what is asked for


def test_what_the_environment_asks_for(built: _library.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in built.variants:
        monkeypatch.setenv("REGARD_ISA", name)
        found = _library._load()
        assert isinstance(found, _library.Library) and found.variant == name
    monkeypatch.setenv("REGARD_NATIVE", "0")
    monkeypatch.setenv("REGARD_ISA", "nonsense")
    assert _library._load() == "REGARD_NATIVE=0 leaves it out"


@pytest.mark.parametrize("native", ["yes", "2", "off"])
def test_a_wrong_switch_is_an_error(native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_NATIVE", native)
    found = _library._load()
    assert isinstance(found, ValueError) and "REGARD_NATIVE: expected 0 (plain torch)" in str(found)
    assert f"got {native!r}" in str(found)
    monkeypatch.setattr(_library, "_found", found)
    with pytest.raises(ValueError, match="REGARD_NATIVE"):
        _library.library()


def test_a_copy_that_cannot_run_is_an_error(built: _library.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    there = "REGARD_ISA: expected one of " + ", ".join(built.variants)
    for name in {"v9", *(set(built.compiled) - set(built.variants))}:
        monkeypatch.setenv("REGARD_ISA", name)
        found = _library._load()
        assert isinstance(found, ValueError) and str(found).startswith(f"{there}, got "), found
        assert name in str(found) and ("does not run" in str(found)) == (name in built.compiled)
    with pytest.raises(ValueError, match="REGARD_ISA: expected one of"):
        built.select("v9")


def test_the_command_line_says_it_without_a_traceback() -> None:
    code = "from regard import cli; cli.main(['doctor'])"
    words = [sys.executable, "-c", code]
    environment = {**os.environ, "REGARD_ISA": "v9", "REGARD_NATIVE": "1"}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "REGARD_ISA: expected one of" in done.stderr
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------------------- what is missing


@pytest.fixture
def nobody_asks(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("REGARD_NATIVE", "REGARD_ISA", "REGARD_LIBRARY"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_missing_library_is_a_sentence(nobody_asks: pytest.MonkeyPatch) -> None:
    nobody_asks.setattr(_library, "NAME", "_absent.so")
    found = _library._load()
    assert (
        isinstance(found, str) and "there is no _absent.so in" in found and "scripts/build --native" in found
    )
    nobody_asks.setattr(_library, "_found", found)
    assert _library.library() is None and _library.reason() == found
    assert _library.describe() == f"no: {found}; every kernel is plain torch"
    nobody_asks.setenv("REGARD_NATIVE", "1")
    insisted = _library._load()
    assert isinstance(insisted, ValueError) and found in str(insisted)
    assert str(insisted).startswith("REGARD_NATIVE: expected a compiled library, got 1, but ")


def test_a_library_of_other_sources_is_left_out(
    nobody_asks: pytest.MonkeyPatch, built: _library.Library
) -> None:
    nobody_asks.setattr(_library, "ABI", _library.ABI + 1)
    found = _library._open(built.path)
    assert isinstance(found, str) and f"interface {_library.ABI - 1}, not {_library.ABI}" in found


def test_what_is_no_library_is_named(nobody_asks: pytest.MonkeyPatch, tmp_path: Path) -> None:
    absent, garbage = tmp_path / "absent.so", tmp_path / "garbage.so"
    garbage.write_bytes(b"not a library")
    for path, said in (
        (absent, "there is no absent.so"),
        (garbage, "does not load"),
        (tmp_path, "there is no "),
    ):
        nobody_asks.setenv("REGARD_LIBRARY", str(path))
        found = _library._load()
        assert isinstance(found, ValueError) and said in str(found)
        assert str(found).startswith(f"REGARD_LIBRARY: expected a compiled library, got {path}, but ")
    other = tmp_path / "other.so"
    _compile(other, "int nothing() { return 0; }")
    found = _library._open(other)
    assert isinstance(found, str) and f"{other} does not load" in found


def test_a_library_without_a_copy_for_this_processor(tmp_path: Path) -> None:
    library = tmp_path / "future.so"
    table = '#include "regard.h"\nextern "C" const RegardKernels regard_kernels_future = {};'
    _compile(library, table, "-DREGARD_VARIANTS=REGARD_VARIANT(future)", str(ROOT / "csrc/dispatch.cpp"))
    assert _library._open(library) == "none of its kernels (future) runs on this processor"
    handle = ctypes.CDLL(str(library))
    assert handle.regard_call(0, None) == NO_VARIANT


def _compile(library: Path, source: str, *more: str) -> None:
    file = library.with_suffix(".cpp")
    file.write_text(source, "utf-8")
    compiler = os.environ.get("CXX", "c++")
    words = [
        compiler,
        "-std=c++17",
        "-shared",
        "-fPIC",
        f"-I{ROOT / 'csrc'}",
        *more,
        str(file),
        "-o",
        str(library),
    ]
    clean = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    subprocess.run(words, env=clean, check=True)


# ---------------------------------------------------------------------------- the sources


def test_the_sources_stay_small_and_know_no_torch() -> None:
    files = [file for file in (ROOT / "csrc").iterdir() if file.is_file()]
    texts = {file.name: file.read_text("utf-8") for file in files}
    assert {"kernels.cpp", "dispatch.cpp", "regard.h"} <= set(texts)
    lines = [line for text in texts.values() for line in text.splitlines()]
    assert len(lines) <= 3000 and max(map(len, lines)) <= 120
    assert not any("<torch" in text or "<ATen" in text or "<c10" in text for text in texts.values())
