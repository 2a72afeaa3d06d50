"""The description of a mechanism: what ``attention(q, k, v, **mechanism)`` is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from regard import _checks

_KEYWORDS = ("score", "normalize", "mask", "bias")


class Mechanism(Mapping[str, Any]):
    """A small frozen mapping of ``score``, ``normalize``, ``mask`` and ``bias``, with a name, a formula and a paper.

    ``attention(q, k, v, **m)``, ``observe(q, k, v, **m)`` and ``plan(q, k, v, **m)`` take it; ``m.but(mask=Causal())``
    is the same mechanism with one thing changed; ``print(m)`` shows it. Only what was given is in the mapping.

    >>> from regard.normalizers import Sparsemax
    >>> sparse = Mechanism("sparse", formula="w = sparsemax(q k / sqrt(D))", normalize=Sparsemax())
    >>> list(sparse)
    ['normalize']
    """

    __slots__ = ("_given", "formula", "name", "paper")

    name: str
    formula: str
    paper: str
    _given: dict[str, Any]

    def __init__(self, name: str, *, formula: str = "", paper: str = "", **given: Any) -> None:
        for keyword in given:
            if keyword not in _KEYWORDS:
                _checks.wrong_value("Mechanism", f"keywords among {', '.join(_KEYWORDS)}", keyword)
        for attribute, text in (("name", name), ("formula", formula), ("paper", paper)):
            if not isinstance(text, str):
                _checks.wrong_type(f"Mechanism({attribute}=)", "text", text)
            object.__setattr__(self, attribute, text)
        object.__setattr__(self, "_given", {key: given[key] for key in _KEYWORDS if key in given})

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"Mechanism is frozen; say mechanism.but({name}=...) for another one")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("Mechanism is frozen; nothing can be taken out of it")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.name, self.formula, self.paper, self._given)

    def __getitem__(self, keyword: str) -> Any:
        return self._given[keyword]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def but(self, **changes: Any) -> Mechanism:
        """The same mechanism with some of score, normalize, mask, bias replaced."""
        return Mechanism(self.name, formula=self.formula, paper=self.paper, **{**self._given, **changes})

    def __repr__(self) -> str:
        inside = "".join(f", {keyword}={value!r}" for keyword, value in self._given.items())
        return f"Mechanism({self.name!r}{inside})"

    def __str__(self) -> str:
        lines = [self.name]
        lines += [f"  {self.formula}"] if self.formula else []
        lines += [f"  {keyword} = {value!r}" for keyword, value in self._given.items()]
        lines += [f"  {self.paper}"] if self.paper else []
        return "\n".join(lines)


def _rebuilt(name: str, formula: str, paper: str, given: dict[str, Any]) -> Mechanism:
    return Mechanism(name, formula=formula, paper=paper, **given)
