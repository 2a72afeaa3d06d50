"""Writing files so that nobody ever finds half of one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def write_all(contents: Mapping[Path, bytes]) -> None:
    """Write every file next to its place first, then move all of them there. Raises OSError naming the folder."""
    waiting = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in contents}
    try:
        for path, data in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            waiting[path].write_bytes(data)
        for path in contents:
            os.replace(waiting[path], path)
    except OSError as error:
        folder = next(iter(contents)).parent
        raise OSError(
            f"cannot write to {folder}: {error.strerror or error}; name a folder that can be written"
        ) from error
    finally:
        for path in waiting.values():
            if path.exists():
                path.unlink()


def require_writable(folder: Path) -> None:
    """Refuse a folder that could not be written to, before any work is done for it."""
    if folder.exists() and not folder.is_dir():
        raise OSError(f"cannot write to {folder}: it is a file; name a folder")
    nearest = folder.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise OSError(f"cannot write to {folder}: {nearest} cannot be written; name another folder")
