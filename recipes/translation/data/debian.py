"""Packages of a Debian distribution as a source of data: downloaded by apt, checked, unpacked, never installed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from regard._fetch import FetchError, cache_folder


@dataclass(frozen=True)
class Deb:
    """A package, its version and the sha256 of its file."""

    name: str
    version: str
    sha256: str


def data_folder() -> Path:
    """Where the corpora live: `data` in regard's cache folder (`REGARD_CACHE`)."""
    return cache_folder() / "data"


@contextmanager
def workspace(target: Path) -> Iterator[Path]:
    """A folder beside `target` to make it in; it is gone in the end, whatever happens."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise FetchError(f"cannot write in {target.parent}: {error.strerror or error}") from error
    try:
        yield work
    except OSError as error:
        raise FetchError(f"{target}: {error.strerror or error}; nothing was kept") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def unpacked(work: Path, pinned: Sequence[Deb], tools: Sequence[str] = ()) -> Path:
    """The files of some packages in one folder of `work`.

    pinned: data, whose bytes are checked. tools: programs of this machine's own architecture and release, which apt
    checks by its distribution's signature. Raises FetchError for: no apt, no network, a version that is no longer
    there, another sha256.
    """
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise FetchError(
                f"these data come from Debian's packages, and there is no {program} here; fetch them on a Debian or "
                f"Ubuntu machine and copy {data_folder()}"
            )
    options = _private_lists(work)
    wanted = [f"{deb.name}={deb.version}" for deb in pinned] + list(tools)
    debs = work / "debs"
    debs.mkdir()
    _run(["apt-get", *options, "download", *wanted], debs)
    for deb in pinned:
        _check(deb, debs)
    root = work / "root"
    for file in sorted(debs.glob("*.deb")):
        _run(["dpkg-deb", "-x", str(file), str(root)], work)
    return root


def _private_lists(work: Path) -> list[str]:
    """An index of our own, so that nothing of the machine is changed and nobody needs to be root."""
    (work / "lists" / "partial").mkdir(parents=True)
    (work / "cache" / "archives" / "partial").mkdir(parents=True)
    options = ["-o", f"Dir::State::lists={work / 'lists'}", "-o", f"Dir::Cache={work / 'cache'}"]
    if os.geteuid() == 0:  # apt would fetch as a user who may not write here
        options += ["-o", "APT::Sandbox::User=root"]
    _run(["apt-get", *options, "-qq", "update"], work)
    return options


def _check(deb: Deb, debs: Path) -> None:
    found = list(debs.glob(f"{deb.name}_*.deb"))
    if len(found) != 1:
        raise FetchError(f"apt gave {len(found)} files for {deb.name}={deb.version}, expected one")
    digest = hashlib.sha256(found[0].read_bytes()).hexdigest()
    if digest != deb.sha256:
        raise FetchError(
            f"{deb.name}={deb.version} has another content than expected (sha256 {digest}, expected {deb.sha256}); "
            "nothing was kept"
        )


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith(("E:", "W:", "dpkg"))]
        said = lines[0] if lines else done.stderr.strip()[-200:]
        raise FetchError(
            f"{' '.join(command[:1])} could not get the data ({said}). Is there a network, and does this release still "
            "have these versions?"
        )
