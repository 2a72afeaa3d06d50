"""Looking at attention: watch a model, keep a Record of what it did, and render it."""

from regard.look._record import Record, Site, Token
from regard.look._watch import watch
from regard.look.explain import Explanation, Step, explain

__all__ = ["Explanation", "Record", "Site", "Step", "Token", "explain", "watch"]
