"""What is known of the packaged models is found in them: atoms mapped, heads named, text of any script read."""

import pytest
import torch

from regard import _fetch
from regard.look import Keep, explain
from regard.look._catalogue import catalogue
from regard.look._explain_model import of_model
from regard.look._merge import merged
from regard.look._model import LoadedModel, load_model, record_of
from regard.look._tokens import tokens_of

pytestmark = pytest.mark.network

COUPLING = "CC(=O)O.NCc1ccccc1>>CC(=O)NCc1ccccc1"
# Acetic acid and benzylamine give N-benzylacetamide: which reactant atom (right) each product atom (left) is. Of them
# the acid gives its methyl, its carbonyl carbon and oxygen (its hydroxyl leaves), the amine all of its atoms.
ATOMS = {20: 1, 21: 2, 24: 5, 26: 9, 27: 10, 28: 11, 30: 13, 31: 14, 32: 15, 33: 16, 34: 17}
REPEATED = (
    "The quick brown fox jumps over the lazy dog. Mr Dursley was director of a firm called Grunnings. Then, "
    * 2
)


@pytest.fixture(scope="module")
def rxnmapper() -> LoadedModel:
    _fetch.fetch(_fetch.MODELS["rxnmapper"])
    return load_model("rxnmapper")


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    _fetch.fetch(_fetch.MODELS["smollm2"])
    return load_model("smollm2")


def test_rxnmapper_maps_all_product_atoms_of_an_amide_coupling(rxnmapper):
    record = record_of(rxnmapper, COUPLING)
    site = record.sites[10]
    names = [token.text for token in site.query_tokens]
    arrow = names.index(">>")
    products = [place for place, name in enumerate(names) if place > arrow and name in ("C", "N", "O", "c")]
    assert products == list(ATOMS)
    weights = site.weights[0, 5]
    found = {place: int(weights[place].argmax()) for place in products}
    assert found == ATOMS
    assert all(names[key] == names[query] for query, key in found.items())
    assert min(float(weights[query, key]) for query, key in found.items()) > 0.3


def test_layers_that_are_one_module_are_told_apart(rxnmapper):
    record = record_of(rxnmapper, COUPLING, keep=Keep(weights=True, layers=(10,), heads=(5,)))
    assert [site.layer for site in record.sites] == list(range(12))
    weights = record.sites[10].map(5)
    assert {query: int(weights[query].argmax()) for query in ATOMS} == ATOMS
    assert [number for number, site in enumerate(record.sites) if site.whole is not None] == [10]


def test_tokens_of_a_reaction_are_its_atoms_and_bonds(rxnmapper):
    _, tokens = tokens_of(rxnmapper.tokenizer, "[13CH3]Cl.C[N+](C)%11>>Br")
    shown = [token.text for token in tokens]
    assert shown == ["[CLS]", "[13CH3]", "Cl", ".", "C", "[N+]", "(", "C", ")", "%11", ">>", "Br", "[SEP]"]
    assert [token.special for token in tokens] == [True, *[False] * 11, True]


def test_minilms_previous_token_head(minilm):
    record = record_of(load_model("minilm"), "The animal didn't cross the street because it was too tired.")
    (head,) = [head for head in catalogue(record) if (head.layer, head.head) == (0, 2)]
    assert head.pattern == "previous-token" and head.share > 0.9


def test_smollm2s_induction_heads(smollm2):
    found = catalogue(record_of(smollm2, REPEATED))
    induction = {(head.layer, head.head): head.share for head in found if head.pattern == "induction"}
    assert {(18, 6), (17, 3)} <= set(induction)
    assert induction[18, 6] == max(induction.values()) > 0.6
    assert len(induction) < len(found) / 10
    assert [head.pattern for head in found].count("first-token") > len(found) / 4


def test_smollm2s_induction_heads_are_found_in_top_weights_alone(smollm2):
    record = record_of(smollm2, REPEATED, keep=Keep(topk=4))
    assert not any(site.has_weights for site in record.sites)
    induction = {(head.layer, head.head) for head in catalogue(record) if head.pattern == "induction"}
    assert {(18, 6), (17, 3)} <= induction


def test_smollm2_worked_out_from_the_embeddings_to_the_context(smollm2):
    worked = of_model("The quick brown fox. The quick brown", "smollm2", layer=18, head=6, token="7")
    assert worked.agrees, str(worked)
    names = [step.name for step in worked.steps]
    before = [
        "embeddings",
        "hidden states",
        "projected queries",
        "queries",
        "projected keys",
        "keys",
        "values",
    ]
    assert names[3:10] == before
    assert "turned by its position" in worked["queries"].formula
    assert "head 2 of 3, which 3 heads share" in worked["values"].note
    assert worked["context"].checks[-1].against == "what the model produced"
    weights = worked["weights"].numbers
    assert weights is not None and worked["tokens"].text[int(weights.argsort()[-1])] in ("fox", "The")


def test_a_loaded_model_is_any_model(smollm2):
    inputs = smollm2.tokenizer("Hello world, hello", return_tensors="pt")
    worked = explain(smollm2.model, dict(inputs), layer=3, head=8, token=3, tokenizer=smollm2.tokenizer)
    assert worked.agrees and worked["sentence"].text == "Hello world, hello"


@pytest.mark.parametrize("text", ["日本語は 😀 楽しい", "שלום עולם", "नमस्ते दुनिया", "<b>&amp;\n\tx"])
def test_byte_level_tokens_of_every_script(smollm2, text):
    record = record_of(smollm2, text, keep=Keep(weights=True))
    tokens = record.sites[0].query_tokens
    assert {place for token in tokens for place in range(token.start, token.stop)} == set(range(len(text)))
    assert not any(glyph in token.text for token in tokens for glyph in "ĠĊÃæ×à")
    words = merged(record, "word").sites[5]
    assert words.lengths[0] < len(tokens) or len(tokens) == words.lengths[0]
    torch.testing.assert_close(words.weights.sum(-1), torch.ones(words.weights.shape[:-1]))
