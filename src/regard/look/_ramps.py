"""The colours of weights, one definition for terminal, page and figures.

Each ramp rises in lightness from end to end (the signed ones from the middle outwards), so that it reads the same to
colour-blind eyes and in grey; signed ramps run between blue and orange, which no common colour blindness confuses.
"""

from __future__ import annotations

Colour = tuple[int, int, int]

WEIGHT: dict[str, tuple[Colour, ...]] = {
    "light": ((255, 255, 255), (178, 205, 236), (66, 122, 190), (8, 34, 88)),
    "dark": ((24, 28, 33), (35, 74, 122), (88, 153, 214), (238, 247, 255)),
}
_ORANGE = {
    "light": ((124, 45, 0), (214, 117, 40), (250, 214, 176)),
    "dark": ((255, 222, 184), (224, 136, 56), (122, 64, 14)),
}
SIGNED: dict[str, tuple[Colour, ...]] = {scheme: (*_ORANGE[scheme], *WEIGHT[scheme]) for scheme in WEIGHT}
# Viridis (Smith and van der Walt, 2015) at five places, for terminals whose ground is not known.
TERMINAL: tuple[Colour, ...] = (
    (68, 1, 84),
    (59, 82, 139),
    (33, 145, 140),
    (94, 201, 98),
    (253, 231, 37),
)


def colour(ramp: tuple[Colour, ...], place: float) -> Colour:
    """The colour at `place` (0 to 1) of a ramp, between its steps."""
    along = min(1.0, max(0.0, place)) * (len(ramp) - 1)
    low = min(int(along), len(ramp) - 2)
    part = along - low
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(ramp[low], ramp[low + 1], strict=True))
    return red, green, blue


def of_weight(weight: float, ramp: tuple[Colour, ...]) -> Colour:
    """The colour of a weight: its square root along the ramp, so that small weights show."""
    return colour(ramp, max(0.0, weight) ** 0.5)


def of_signed(share: float, ramp: tuple[Colour, ...]) -> Colour:
    """The colour of a difference in [-1, 1]."""
    size = min(1.0, abs(share)) ** 0.5
    return colour(ramp, (1 - size if share < 0 else 1 + size) / 2)
