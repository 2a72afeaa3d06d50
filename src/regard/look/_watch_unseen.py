"""What a watch says it cannot see."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from regard.look import _doctor_model


def compiled_parts(model: nn.Module) -> str:
    """The compiled modules of a model in words, "" where there is none."""
    found = [(name or "one", _doctor_model.compiled(module)) for name, module in model.named_modules()]
    names = [f"{name} compiled by {compiler}" for name, compiler in found if compiler]
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{names[0]}{more}" if names else ""


def on_meta(model: nn.Module) -> bool:
    """Whether the model's parameters are on the meta device."""
    return any(parameter.device.type == "meta" for parameter in model.parameters())


def standing_down(model: nn.Module) -> list[str]:
    """A note on the layers of torch that run another way while they are watched."""
    names = [
        name or "the model"
        for name, part in model.named_modules()
        if isinstance(part, nn.TransformerEncoderLayer) and not part.training
    ]
    if not names:
        return []
    return [
        f"torch's fused encoder path stands down while {', '.join(names)} is watched: compare outputs with that path "
        "disabled (torch.backends.mha.set_fastpath_enabled(False))"
    ]


def unseen(model: nn.Module, ran: set[str], seen: set[str]) -> Iterator[str]:
    """A note for each attention module that ran, and in which no call of attention was seen."""
    for name, module in _doctor_model.attention_modules(model):
        inside = any(one == name or one.startswith(name + ".") for one in seen)
        if name not in ran or inside or (name == type(model).__name__ and seen):
            continue
        found = _doctor_model.finding(model, name, module)
        fix = f"; {found.fix}" if found.seen == "nothing" else ""
        why = found.why if found.seen == "nothing" else "no call that a watch can follow"
        yield f"{name} ({found.module}) ran, and its attention was not seen: {why}{fix}"
