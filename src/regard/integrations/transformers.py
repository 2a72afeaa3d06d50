"""transformers: ``register()``, and every model that dispatches its attention can run on regard.

    from regard.integrations.transformers import register

    register()
    model = AutoModel.from_pretrained(folder, attn_implementation="regard")

What a model's attention means stays what it was: scale, soft-cap, sink, position bias, grouped heads, dropout, masks.
Masks travel as runs of keys, not as Tq x Tk tensors; ``output_attentions=True`` in a call gives the weights.
docs/transformers.md lists the models that were compared with eager, and those that never ask.
"""

from __future__ import annotations

import importlib
import re

__all__ = ["NAME", "OLDEST", "register"]

NAME = "regard"
OLDEST = (5, 24)


def register() -> None:
    """Add ``attn_implementation="regard"`` to transformers, both its attention and its mask functions.

    Calling it again changes nothing. Raises ImportError, which says what to install, where transformers is absent or
    older than the versions this was tested with.
    """
    _require()
    call = importlib.import_module("regard.integrations.transformers_call")
    masks = importlib.import_module("regard.integrations.transformers_masks")
    transformers = importlib.import_module("transformers")
    transformers.AttentionInterface.register(NAME, call.attend)
    transformers.AttentionMaskInterface.register(NAME, masks.make_mask)


def _require() -> None:
    oldest = ".".join(str(part) for part in OLDEST)
    way_out = f"Install it with: pip install 'transformers>={oldest},<{OLDEST[0] + 1}'"
    try:
        version = str(importlib.import_module("transformers").__version__)
    except ImportError as error:
        message = (
            f"regard.integrations.transformers: expected transformers {oldest} or newer, got none. {way_out}"
        )
        raise ImportError(message) from error
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < OLDEST:
        raise ImportError(
            f"regard.integrations.transformers: expected transformers {oldest} or newer, got {version}. {way_out}"
        )
