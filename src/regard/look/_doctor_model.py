"""Every place of attention in a model: what computes it, what a watch sees there, and how to see more."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

_NAMED = re.compile("attention|attn", re.IGNORECASE)
_WRITTEN = re.compile(r"softmax\(|\.softmax\b|Softmax\(")
_KERNELS = {
    "flash_attn_": "flash-attn",
    "flash_attention_": "flash-attn",
    "memory_efficient_attention": "xformers",
    "flex_attention(": "FlexAttention",
}
_CALLS = ("scaled_dot_product_attention", "multi_head_attention_forward(", "ALL_ATTENTION_FUNCTIONS")
_DISPATCH = ("ALL_ATTENTION_FUNCTIONS", "attention_interface")


@dataclass(frozen=True)
class Finding:
    """One place of attention: the path and class of its module, the implementation, and what `watch` sees there.

    `seen` is "everything" (statistics, weights, query, key, value), "weights" (those and what follows from them),
    "nothing", or "unknown"; `why` says how that comes, `fix` is the one line that changes it ("" where none is needed).
    """

    name: str
    module: str
    implementation: str
    seen: str
    why: str
    fix: str = ""


def doctor(model: nn.Module, inputs: Mapping[str, Any] | None = None) -> list[Finding]:
    """Look a model over: one finding for each of its attention modules, in their order.

    With `inputs`, keyword arguments of the model's forward, it is also run once, watched, without gradients: what was
    seen then is what stands in the findings. Raises TypeError for something that is no `nn.Module`; a model without
    attention gives no findings.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"doctor(model): model must be a torch.nn.Module; got {type(model).__name__}")
    found = [finding(model, name, module) for name, module in attention_modules(model)]
    return found if inputs is None else _tried(model, inputs, found)


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that compute attention themselves, by path."""
    for name, module in model.named_modules():
        if _attends(module):
            yield name or type(model).__name__, module


def _attends(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention) or _own(module):
        return True
    if type(module).__module__.startswith("torch.nn."):
        return False
    source = _source_of(module)
    named = bool(_NAMED.search(type(module).__name__))
    if any(word in source for word in _CALLS):
        return True
    if not named or any(_attends(part) for part in module.modules() if part is not module):
        return False  # a container of what attends
    return not source or any(word in source for word in _KERNELS) or bool(_WRITTEN.search(source))


def _own(module: nn.Module) -> bool:
    from regard.compat import MultiheadAttention
    from regard.nn._heads import Heads
    from regard.nn._step import StepAttention

    return isinstance(module, (Heads, StepAttention, MultiheadAttention))


def _source_of(module: nn.Module) -> str:
    kind: Any = type(module)
    return _source(kind)


@cache
def _source(kind: Any) -> str:
    """The source of a class and its bases, up to torch's own; "" where there is none."""
    found = []
    for part in kind.__mro__:
        if (
            part.__module__.startswith(("torch.", "builtins", "transformers.modeling_utils"))
            or part is object
        ):
            continue
        try:
            found.append(inspect.getsource(part))
        except (OSError, TypeError):  # written in C, or typed at a prompt
            continue
    return "\n".join(found)


# ---------------------------------------------------------------------------- one module


def finding(model: nn.Module, name: str, module: nn.Module) -> Finding:
    """What there is to say of one attention module, from its class and its weights."""
    implementation, seen, why, fix = _verdict(model, module)
    compiler = _compiler(model, name)
    if compiler:
        seen, why = "nothing", f"{compiler} runs it inside a graph"
        fix = "watch(compiled._orig_mod), or do not compile it"
    elif any(parameter.device.type == "meta" for parameter in module.parameters()):
        seen, why = "nothing", "its weights are on the meta device, where there are no numbers"
        fix = "load the model's weights"
    return Finding(name, type(module).__name__, implementation, seen, why, fix)


def _verdict(model: nn.Module, module: nn.Module) -> tuple[str, str, str, str]:
    if isinstance(module, nn.MultiheadAttention):
        why = "heads are projected again from its weights"
        return "multi_head_attention_forward", "everything", why, ""
    if _own(module):
        return "regard", "everything", "it calls regard.attention", ""
    source = _source_of(module)
    chosen = _chosen(model, module)
    if chosen is not None and any(word in source for word in _DISPATCH):
        return _dispatched(chosen)
    for sign, library in _KERNELS.items():
        if sign in source and "scaled_dot_product_attention" not in source and not _WRITTEN.search(source):
            fix = "use a version of the module that calls F.scaled_dot_product_attention"
            return library, "nothing", f"it calls a kernel of {library}, which hands out no weights", fix
    if "multi_head_attention_forward" in source:
        return (
            "multi_head_attention_forward",
            "everything",
            "it calls torch's function, which is looked into",
            "",
        )
    if "scaled_dot_product_attention" in source:
        return "sdpa", "everything", "it calls F.scaled_dot_product_attention", ""
    if _WRITTEN.search(source):
        why = "it writes softmax(query key^T) value out itself, and is followed where that is its form"
        return "eager", "weights", why, "doctor(model, inputs) runs it once and says what was seen"
    why = "its source cannot be read"
    return "unknown", "unknown", why, "doctor(model, inputs) runs it once and says what was seen"


def _chosen(model: nn.Module, module: nn.Module) -> str | None:
    """transformers' choice of implementation for a module, None outside transformers."""
    for part in (module, model):
        config = getattr(part, "config", None)
        chosen = getattr(config, "_attn_implementation", None)
        if isinstance(chosen, str):
            return chosen
    return None


def _dispatched(chosen: str) -> tuple[str, str, str, str]:
    if chosen == "sdpa":
        return chosen, "everything", "transformers calls F.scaled_dot_product_attention for it", ""
    if chosen == "regard":
        return chosen, "everything", "transformers calls regard.attention for it", ""
    if chosen == "eager":
        return chosen, "everything", "transformers writes it out, and it is followed", ""
    why = f"the kernel that transformers calls for {chosen!r} hands out no weights"
    return chosen, "nothing", why, 'model.set_attn_implementation("sdpa")'


def _compiler(model: nn.Module, name: str) -> str:
    """What compiled a module, or one that it is part of; "" where nothing did."""
    part: nn.Module | None = model
    for step in name.split("."):
        if part is None or compiled(part):
            break
        part = dict(part.named_children()).get(step)
    return "" if part is None else compiled(part)


def compiled(module: nn.Module) -> str:
    """What took a module's forward into a graph: "torch.compile", "TorchScript", or "" where nothing did."""
    frames = sys.modules.get("torch._dynamo.eval_frame")  # where it was never imported, nothing was compiled
    if frames is not None and isinstance(module, frames.OptimizedModule):
        return "torch.compile"
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript"
    return "torch.compile" if getattr(module, "_compiled_call_impl", None) is not None else ""


# ---------------------------------------------------------------------------- a trial


def _tried(model: nn.Module, inputs: Mapping[str, Any], found: list[Finding]) -> list[Finding]:
    from regard.look._watch import watch
    from regard.look._watch_keep import Keep

    if any(finding.seen == "nothing" and "graph" in finding.why for finding in found):
        return found
    with torch.no_grad(), watch(model, keep=Keep(statistics=("max",))) as record:
        model(**inputs)
    sites = {site.name: site for site in record.sites}
    told = [_after(finding, sites.pop(finding.name, None), record.notes) for finding in found]
    for name, site in sites.items():
        seen = "weights" if site.score_unknown else "everything"
        told.append(
            Finding(name, _class_at(model, name), site.implementation, seen, "it was seen when it ran")
        )
    return told


def _after(finding: Finding, site: Any, notes: Sequence[str]) -> Finding:
    name, module, implementation = finding.name, finding.module, finding.implementation
    if site is None:
        if finding.seen == "nothing":
            return finding
        own = [note for note in notes if note.startswith((f"{name}: ", f"{name} ("))]
        why = own[0].split(": ", 1)[-1] if own else "it did not run on these inputs"
        return Finding(name, module, implementation, "nothing", why)
    seen = "weights" if site.score_unknown else "everything"
    why = (
        "it was seen when it ran"
        if seen == "everything"
        else "its weights were seen when it ran, its scores not"
    )
    return Finding(name, module, site.implementation, seen, why)


def _class_at(model: nn.Module, name: str) -> str:
    module = dict(model.named_modules()).get(name, model)
    return type(module).__name__
