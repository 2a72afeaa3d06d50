"""The compiled part: finds it, loads it, says why it is not there. Nothing else imports the compiled library.

The library is one file with a plain C interface (csrc/), loaded by ctypes after torch, whose OpenMP runtime it shares.
The environment is read once, for tests and for people who compare: ``REGARD_NATIVE=0`` leaves the library out,
``REGARD_NATIVE=1`` insists on it, ``REGARD_ISA=v3`` picks a copy of the kernels, ``REGARD_LIBRARY=PATH`` another build.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from regard import _checks

ABI = 7
NAME = "_native.dylib" if sys.platform == "darwin" else "_native.so"
OK = 0


@dataclass(frozen=True)
class Library:
    """A loaded library. compiled: the copies of the kernels in it; variants: those that run here, best first."""

    path: Path
    compiled: tuple[str, ...]
    variants: tuple[str, ...]
    handle: ctypes.CDLL

    @property
    def variant(self) -> str:
        """The copy in use."""
        return _text(self.handle.regard_selected())

    def select(self, name: str) -> None:
        """Use another copy from now on, in every thread. Raises ValueError where it does not run here."""
        if self.handle.regard_select(name.encode()) != OK:
            _checks.wrong_value("REGARD_ISA", "one of " + ", ".join(self.variants), name)

    def call(self, which: int, arguments: bytes) -> int:
        """Run kernel number `which` on its packed struct and return its status. Other Python threads run meanwhile."""
        status: int = self.handle.regard_call(which, arguments)
        return status


def library() -> Library | None:
    """The library, or None: `reason` says why. Raises ValueError where the environment asks for what is not there."""
    if isinstance(_found, ValueError):
        raise _found
    return _found if isinstance(_found, Library) else None


def reason() -> str:
    """Why there is no library, in a sentence; empty where there is one."""
    return "" if isinstance(_found, Library) else str(_found)


def threads() -> int:
    """How many threads a kernel may use: torch's number, and one in a forked child, which has no team of threads."""
    return 1 if _forked else torch.get_num_threads()


def describe() -> str:
    """The library, the copy in use and the others, or why there is none: a line for `regard doctor`."""
    found = library()
    if found is None:
        return f"no: {reason()}; every kernel is plain torch"
    idle = [f"{name} does not run here" for name in found.compiled if name not in found.variants]
    spare = [name for name in found.variants if name != found.variant]
    others = ([f"also {', '.join(spare)}"] if spare else []) + idle
    return f"{found.variant}" + (f" ({'; '.join(others)})" if others else "") + f", {found.path}"


def _text(raw: bytes) -> str:
    return raw.decode()


def _load() -> Library | str | ValueError:
    """The library, a sentence that says why there is none, or the error to raise whenever it is asked for."""
    wanted = os.environ.get("REGARD_NATIVE", "")
    isa, path = os.environ.get("REGARD_ISA", ""), os.environ.get("REGARD_LIBRARY", "")
    try:
        if wanted not in ("", "0", "1"):
            _checks.wrong_value(
                "REGARD_NATIVE", "0 (plain torch), 1 (compiled, or an error) or nothing", wanted
            )
        if wanted == "0":
            return "REGARD_NATIVE=0 leaves it out"
        found = _open(Path(path) if path else Path(__file__).with_name(NAME))
        if isinstance(found, Library):
            if isa and isa not in found.variants:
                _impossible(found, isa)
            if isa:
                found.select(isa)
            return found
        for name, value in (("REGARD_LIBRARY", path), ("REGARD_ISA", isa), ("REGARD_NATIVE", wanted)):
            if value:
                _checks.wrong_value(name, "a compiled library", _checks.words(f"{value}, but {found}"))
    except ValueError as error:
        return error
    return found


def _impossible(found: Library, isa: str) -> None:
    expected = "one of " + ", ".join(found.variants)
    there = isa in found.compiled
    came = _checks.words(f"{isa}, which this processor does not run" if there else isa)
    _checks.wrong_value("REGARD_ISA", expected, came)


def _open(path: Path) -> Library | str:
    if not path.is_file():
        return f"there is no {path.name} in {path.parent} (in a checkout, scripts/build --native makes it)"
    try:
        handle = ctypes.CDLL(str(path))
        _declare(handle)
    except (OSError, AttributeError) as error:
        return f"{path} does not load: {error}"
    if (abi := handle.regard_abi()) != ABI:
        return (
            f"{path} is of other sources (interface {abi}, not {ABI}): scripts/build --native builds it anew"
        )
    compiled, variants = (
        tuple(_text(names).split()) for names in (handle.regard_compiled(), handle.regard_variants())
    )
    if not variants:
        return f"none of its kernels ({', '.join(compiled)}) runs on this processor"
    return Library(path, compiled, variants, handle)


def _declare(handle: ctypes.CDLL) -> None:
    for name in ("regard_compiled", "regard_variants", "regard_selected"):
        getattr(handle, name).restype = ctypes.c_char_p
        getattr(handle, name).argtypes = ()
    handle.regard_abi.restype = ctypes.c_int32
    handle.regard_abi.argtypes = ()
    handle.regard_select.restype = ctypes.c_int32
    handle.regard_select.argtypes = (ctypes.c_char_p,)
    handle.regard_call.restype = ctypes.c_int32
    handle.regard_call.argtypes = (ctypes.c_int32, ctypes.c_void_p)


def _after_fork() -> None:
    global _forked, unsettled
    _forked = unsettled = True


def settle() -> None:
    """The first call in a forked child: torch computes on one thread from here on, as the kernels do.

    Torch's own operations would wait for the parent's threads too, for ever.
    """
    global unsettled
    unsettled = False
    torch.set_num_threads(1)


# The parent's threads do not exist in a child, and its OpenMP runtime would wait for them for ever.
_forked = unsettled = False
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
_found: Library | str | ValueError = _load()
