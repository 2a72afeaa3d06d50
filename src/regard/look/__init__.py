"""Looking at attention: watch a model, keep a Record of what it did, analyse it and render it."""

from regard.look._assert import assert_attention_close
from regard.look._catalogue import Head, catalogue
from regard.look._difference import Difference, SiteDifference, difference
from regard.look._doctor_model import Finding, doctor
from regard.look._export import export
from regard.look._merge import merge_weights, merged
from regard.look._model import LoadedModel, load_model
from regard.look._model_run import record_of, record_of_image
from regard.look._record import Grid, Record, Site, Sizes, Token
from regard.look._rollout import Rollout, rollout
from regard.look._tokens import tokens_of, tokens_of_ids
from regard.look._value_weighted import value_weighted
from regard.look._watch import watch
from regard.look._watch_keep import EVERYTHING, Keep
from regard.look.explain import Explanation, Step, explain

__all__ = [
    "EVERYTHING",
    "Difference",
    "Explanation",
    "Finding",
    "Grid",
    "Head",
    "Keep",
    "LoadedModel",
    "Record",
    "Rollout",
    "Site",
    "SiteDifference",
    "Sizes",
    "Step",
    "Token",
    "assert_attention_close",
    "catalogue",
    "difference",
    "doctor",
    "explain",
    "export",
    "load_model",
    "merge_weights",
    "merged",
    "record_of",
    "record_of_image",
    "rollout",
    "tokens_of",
    "tokens_of_ids",
    "value_weighted",
    "watch",
]
