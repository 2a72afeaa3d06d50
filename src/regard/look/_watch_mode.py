"""The eye of a watch: a function mode that sees every call of torch and regard, in one thread, and changes none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard import _plan
from regard._attention import attention
from regard._call import prepare
from regard._frame import coordinates
from regard.look._places import Layers, Place, Places
from regard.look._record import Record, Site, Sizes
from regard.look._watch_eager import FOLLOWED, Followed
from regard.look._watch_groups import regroup
from regard.look._watch_keep import Keep
from regard.look._watch_pool import Pool
from regard.look._watch_room import Room
from regard.look._watch_seen import BoundMask, NotSeen, Seen, of_multihead, of_own, of_sdpa
from regard.look._watch_statistics import kept, row_blocks
from regard.look._watch_steps import Run
from regard.look._watch_where import masked_words, where, window
from regard.masks import Causal, Dense
from regard.normalizers import Softmax
from regard.scores import Dot

_CALLS: dict[Any, Callable[..., Seen]] = {
    F.scaled_dot_product_attention: of_sdpa,
    F.multi_head_attention_forward: of_multihead,
    attention: of_own,
}


_HELD = 8


class Watcher(TorchFunctionMode):
    """Sees calls, and keeps of each what was asked for."""

    def __init__(self, record: Record, places: Places, keep: Keep) -> None:
        super().__init__()
        self._record, self._places, self._keep = record, places, keep
        self._layers, self._followed, self._room = Layers(), Followed(places), Room()
        self._runs: dict[str, list[Run]] = {}
        self._copies: dict[Any, Any] = {}
        self._dense: dict[Any, Any] = {}
        self._moved: tuple[int, Tensor] | None = None  # after which forward samples changed places, and how
        self._ordinals: dict[str, tuple[int, int]] = {}  # by module: in which forward it ran last, which call
        self._going_on = -1  # the forward that is known to be a further step
        self.seen: set[str] = set()
        places.when_left = self._followed.module_left

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if torch.compiler.is_compiling():
            return output  # a function that the model compiles: what is traced is the model's own
        seen = _CALLS.get(func) if func in _CALLS else None
        if seen is not None:
            self._catch(lambda: seen(output, *args, **kwargs))
        elif func is torch.Tensor.index_select and not self._places.stack:
            self._note_move(*args[:3])
        elif getattr(func, "__name__", "") in FOLLOWED:
            self._catch_eager(func, args, kwargs, output)
        return output

    # ------------------------------------------------------------------ what is seen

    def _catch_eager(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            seen = self._followed.follow(func, args, kwargs, output)
        if seen is not None:
            self._catch(lambda: seen)

    def _catch(self, look: Callable[[], Seen]) -> None:
        place = self._places.current
        try:
            # Nothing that is computed here is another watch's to see, or any gradient's to pass.
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self._keep_of(look(), place)
        except NotSeen as reason:
            self.note(f"{place.name}: {reason}")
        except (
            TypeError,
            ValueError,
        ) as refusal:  # of regard's checks; the model's own call was made, and goes on
            self.note(f"{place.name}: a call that regard cannot describe: {refusal}")
        self.seen.add(place.name)

    def note(self, note: str) -> None:
        """Say something once."""
        if note not in self._record.notes:
            self._record.notes.append(note)

    def _note_move(self, tensor: Any, dim: Any = None, index: Any = None) -> None:
        """A cache whose samples change places between two steps: beams."""
        if dim == 0 and isinstance(index, Tensor) and index.dim() == 1 and tensor.dim() == 4:
            self._moved = (self._places.forwards, index.detach().cpu().clone())

    # ------------------------------------------------------------------ what is kept

    def _keep_of(self, seen: Seen, place: Place) -> None:
        runs, forward = self._runs.setdefault(place.name, []), self._places.forwards
        ordinal = self._ordinal(place.name, forward)
        run = next((run for run in reversed(runs) if run.ordinal == ordinal), None)
        self._share_mask(seen)
        if seen.implementation == "sdpa":
            regroup(seen, place.module, 0 if run is None else run.site.sizes.H)
        site = self._site(seen, place, run, ordinal)
        shift = (
            None
            if run is None
            else run.shift_of(site, forward, self._going_on == forward, window(seen, place))
        )
        wants = self._keep.wants(site.layer)
        with _plan.without_autocast(self._device(seen)):
            first = None if run is None or shift is None or run.first is None else run.first - shift
            fields, first = kept(seen, self._keep, site.offset, more=wants, pool=shift is None, first=first)
            fields = self._room.moved(fields)
            if self._keep.tensors and wants:
                fields |= self._tensors(seen)
            if run is None or shift is None:
                self._begin(site, fields, runs, Run(site, ordinal, first))
                return
            self._go_on(run, site, seen, fields, shift, wants)

    def _ordinal(self, name: str, forward: int) -> int:
        """Which call of a module this is within one forward: layers may share a module."""
        last, count = self._ordinals.get(name, (forward, -1))
        count = count + 1 if last == forward else 0
        self._ordinals[name] = (forward, count)
        return count

    def _begin(self, site: Site, fields: dict[str, Any], runs: list[Run], run: Run) -> None:
        site.call = len(runs)
        for name, value in fields.items():
            setattr(site, name, value)
        runs.append(run)
        run.add(site, dict(fields), 0, self._places.forwards, None)
        self._record.sites.append(site)

    def _go_on(
        self, run: Run, site: Site, seen: Seen, fields: dict[str, Any], shift: int, wants: bool
    ) -> None:
        forward = self._places.forwards
        if site.kind == "self":
            self._going_on = forward
        moved = self._moved
        before = moved[1] if moved is not None and moved[0] == forward - 1 else None
        if before is not None and len(before) != site.sizes.B:
            before = None
        if self._keep.pool and wants:
            run.pool = run.pool or Pool(
                self._keep.pool, run.steps[0].fields, run.steps[0].Tq, run.steps[0].Tk
            )
            if before is not None:
                run.reorder(before)
            for weights in row_blocks(seen, self._keep):
                run.pool.add(weights, shift, site.lengths[1])
        run.add(site, fields, shift, forward, before)

    def _site(self, seen: Seen, place: Place, run: Run | None, ordinal: int) -> Site:
        sizes = _sizes(seen)
        kind, offset = where(seen, place, (sizes.Tq, sizes.Tk), 0 if run is None else run.rows)
        score, normalize = seen.score, seen.normalize
        return Site(
            name=place.name,
            layer=self._layers.number(f"{place.name}@{ordinal}"),
            kind=kind,
            offset=offset,
            sizes=sizes,
            scale=_kept_number(
                score.factor(sizes.D) if isinstance(score, Dot) else getattr(score, "scale", None)
            ),
            softcap=getattr(score, "softcap", None),
            sink=_kept_number(getattr(normalize, "sink", None)),
            score="dot" if score is None or isinstance(score, Dot) else _name(score),
            normalize="softmax" if isinstance(normalize, Softmax) else _name(normalize),
            causal=seen.causal,
            masked=masked_words(seen),
            implementation=seen.implementation,
            dtype=str(seen.dtype).removeprefix("torch."),
            dropout_p=seen.dropout_p,
        )

    def _device(self, seen: Seen) -> torch.device:
        tensor = seen.query if seen.query is not None else seen.weights
        assert tensor is not None
        return tensor.device

    def _share_mask(self, seen: Seen) -> None:
        """All layers are usually given one mask: it is scanned for runs once."""
        if isinstance(seen.mask, Dense):
            key = _identity(seen.mask.mask)
            if key is not None:
                seen.mask = _remember(self._dense, key, seen.mask)

    def _tensors(self, seen: Seen) -> dict[str, Any]:
        """Copies of what went in and came out."""
        if seen.query is None or seen.key is None or seen.value is None:
            return {}
        output = seen.output if seen.context is None else seen.context()
        found: dict[str, Any] = {
            "query": seen.query.clone(),
            "key": seen.key.clone(),
            "value": seen.value.clone(),
            "output": None if output is None else output.clone(),
            "mask": None,
            "bias": None,
        }
        causal = seen.causal or _is_causal(seen)
        if seen.mask is not None and not causal:
            found["mask"] = self._copy(seen.mask, lambda: self._written(seen, True))
        if seen.bias is not None:
            found["bias"] = self._copy(seen.bias, lambda: self._written(seen, False))
        found["causal"] = causal
        if not isinstance(seen.score, Dot) or not isinstance(seen.normalize, Softmax):
            found["given"] = {"score": seen.score, "normalize": seen.normalize}
        return found

    def _copy(self, source: Any, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that all layers are given is copied once."""
        tensor = source.mask if isinstance(source, Dense) else source
        key = _identity(tensor) if isinstance(tensor, Tensor) else None
        if key is None:
            return make()
        held, copied = _remember(self._copies, key, (source, None))
        made: Tensor = make() if copied is None else copied
        self._copies[key] = (held, made)
        return made

    def _written(self, seen: Seen, mask: bool) -> Tensor:
        """The mask or the bias as a tensor (B|1, H|1, Tq, Tk)."""
        assert seen.query is not None and seen.key is not None
        call = prepare(
            seen.query, seen.key, seen.key[..., :0], seen.mask, seen.score, seen.normalize, seen.bias
        )
        tile = coordinates(call.frame, call.offset, (0, call.frame.Tq), (0, call.frame.Tk))
        if mask:
            assert call.mask is not None
            pairs = call.mask.allowed(tile)
        else:
            assert call.bias is not None
            pairs = call.bias.value(tile)
        return pairs.detach().reshape((1,) * (4 - pairs.dim()) + tuple(pairs.shape)).clone()

    # ------------------------------------------------------------------ the end

    def finish(self) -> None:
        """Write the steps of generations into their sites, and say what ran unseen."""
        for runs in self._runs.values():
            for run in runs:
                run.finish(tuple(self._keep.rows))
        moved = [run for runs in self._runs.values() for run in runs if run.site.slots is not None]
        self._record.runs = moved
        if self._places.others_ran:
            self.note(
                "the model also ran in another thread, which this watch does not see; watch it there too"
            )


def _is_causal(seen: Seen) -> bool:
    """Whether a mask is no more than torch's `is_causal`: for such no tensor is written."""
    mask = seen.mask.inner if isinstance(seen.mask, BoundMask) else seen.mask
    return isinstance(mask, Causal) and _upper_left(mask, seen)


def _upper_left(mask: Causal, seen: Seen) -> bool:
    if mask.offset is not None:
        return isinstance(mask.offset, int) and mask.offset == 0
    assert seen.query is not None and seen.key is not None
    return mask.alignment == "upper_left" or seen.query.shape[2] == seen.key.shape[2]


def _sizes(seen: Seen) -> Sizes:
    if seen.query is not None and seen.key is not None:
        B, H, Tq, D = seen.query.shape
        Dv = 0 if seen.value is None else int(seen.value.shape[-1])
        return Sizes(B, H, int(seen.key.shape[1]), Tq, int(seen.key.shape[2]), D, Dv)
    assert seen.weights is not None
    B, H, Tq, Tk = seen.weights.shape
    return Sizes(B, H, H, Tq, Tk, 0, 0 if seen.value is None else int(seen.value.shape[-1]))


def _kept_number(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return float(value) if value.dim() == 0 else value.detach().clone()


def _name(described: Any) -> str:
    return str(getattr(described, "__name__", type(described).__name__))


def _identity(tensor: Tensor) -> Any:
    """What a tensor is as long as nobody writes into it; None where writing is not counted."""
    if tensor.is_inference():
        return None
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor._version


def _remember(held: dict[Any, Any], key: Any, value: Any) -> Any:
    """What is held under a key: the value, if there was none. A handful is held, with their memory."""
    if key not in held and len(held) >= _HELD:
        del held[next(iter(held))]
    return held.setdefault(key, value)
