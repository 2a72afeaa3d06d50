"""Looking at attention: watch a model, keep a Record of what it did, and render it."""

from regard.look._doctor_model import Finding, doctor
from regard.look._record import Grid, Record, Site, Sizes, Token
from regard.look._watch import watch
from regard.look._watch_keep import EVERYTHING, Keep
from regard.look.explain import Explanation, Step, explain

__all__ = [
    "EVERYTHING",
    "Explanation",
    "Finding",
    "Grid",
    "Keep",
    "Record",
    "Site",
    "Sizes",
    "Step",
    "Token",
    "doctor",
    "explain",
    "watch",
]
