"""`regard doctor`: what is installed, and which kernels can run here and why the others cannot."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from regard import _fetch
from regard.kernels import _library


def show(*, as_json: bool = False) -> None:
    """Print the findings, one a line, or as JSON: a list of {"what", "found"}."""
    if as_json:
        print(json.dumps([{"what": name, "found": found} for name, found in findings()], indent=1))
        return
    for name, found in findings():
        print(f"{name:<14}{found}")


def findings() -> Iterator[tuple[str, str]]:
    """(what, what was found) for versions, threads, devices, packaged models and every kernel."""
    for name in ("regard", "torch", "numpy", "transformers", "safetensors"):
        yield name, _version(name)
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "threads", f"{torch.get_num_threads()} (torch.set_num_threads changes it)"
    yield "compiled", _library.describe()
    yield "devices", ", ".join(_devices())
    for package in _fetch.MODELS.values():
        here = _fetch.is_fetched(package)
        yield (
            "model",
            f"{package.name}: "
            + (str(_fetch.model_folder(package)) if here else f"regard fetch {package.name}"),
        )
    yield from _kernels()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed (pip install 'regard[models]')"


def _devices() -> list[str]:
    found = ["cpu"]
    found += [
        f"cuda:{number} {torch.cuda.get_device_name(number)}" for number in range(torch.cuda.device_count())
    ]
    return found + (["mps"] if torch.backends.mps.is_available() else [])


def _kernels() -> Iterator[tuple[str, str]]:
    from regard import _plan

    for name, available, reason in _plan.kernels():
        yield (
            "kernel",
            f"{name}: {'can run' if available else 'cannot run'}" + (f" ({reason})" if reason else ""),
        )
