import pytest
import torch

from regard.look._assert import assert_attention_close


def copy_of(record, tmp_path):
    record.save(tmp_path / "golden")
    return type(record).load(tmp_path / "golden")


def test_the_same_attention_passes(record, tmp_path):
    golden = copy_of(record, tmp_path)
    assert_attention_close(record, golden)
    assert_attention_close(record, tmp_path / "golden.npz")
    assert_attention_close(golden, record)


def test_a_small_difference_passes_and_a_larger_one_is_shown(record, tmp_path):
    golden = copy_of(record, tmp_path)
    weights = record.sites[1].weights
    weights[0, 0, 2, 0] += 5e-4
    assert_attention_close(record, golden)
    weights[0, 0, 2, 1] += 0.25
    said = "1 of 32 numbers differ, most at sample 0, head 0, query 2 '日本', key 1 '<b>bold</b>'"
    with pytest.raises(AssertionError, match=f"layer.1: weights: {said}: 0.25 where it was 0"):
        assert_attention_close(record, golden)
    assert_attention_close(record, golden, atol=0.3)


def test_nan_is_no_close_number(record, tmp_path):
    golden = copy_of(record, tmp_path)
    record.sites[0].weights[0, 0, 0, 0] = float("nan")
    with pytest.raises(AssertionError, match="nan where it was 1"):
        assert_attention_close(record, golden)


def test_sites_and_tokens_must_be_the_same(record, tmp_path):
    golden = copy_of(record, tmp_path)
    record.sites[0].query_tokens = record.sites[0].query_tokens[:2] + record.sites[0].query_tokens[:2]
    with pytest.raises(AssertionError, match="layer.0: query tokens: token 2 is '.CLS.' where it was '日本'"):
        assert_attention_close(record, golden)
    record.sites.pop()
    with pytest.raises(AssertionError, match="1 sites where there were 2.*missing: layer.1; new: none"):
        assert_attention_close(record, golden)


def test_what_the_golden_record_kept_must_be_there(record, tmp_path):
    golden = copy_of(record, tmp_path)
    site = golden.sites[0]
    site.statistics = {"entropy": site.statistic("entropy")}
    assert_attention_close(record, golden)
    record.sites[0].statistics = {"entropy": site.statistics["entropy"] + 1}
    with pytest.raises(AssertionError, match="layer.0: entropy: 8 of 8 numbers differ"):
        assert_attention_close(record, golden)
    record.sites[0].statistics = {}
    record.sites[0].query = record.sites[0].key = None
    del record.sites[0].__dict__["weights"]
    with pytest.raises(
        AssertionError, match="entropy was not kept; watch it as the golden record was watched"
    ):
        assert_attention_close(record, golden)


def test_a_golden_record_that_is_not_there(record, tmp_path):
    with pytest.raises(
        FileNotFoundError, match="no golden record at .*make it once, from a run that is right"
    ):
        assert_attention_close(record, tmp_path / "none")


@pytest.mark.parametrize("options", [{"atol": -1.0}, {"rtol": float("nan")}])
def test_tolerances_are_numbers(record, options):
    with pytest.raises(ValueError, match="expected a number of at least 0"):
        assert_attention_close(record, record, **options)


def test_shapes_are_compared_first(record, tmp_path):
    golden = copy_of(record, tmp_path)
    golden.sites[0].statistics = {"entropy": torch.zeros(1, 2, 5)}
    with pytest.raises(AssertionError, match=r"entropy of shape \(1, 2, 4\) where it was \(1, 2, 5\)"):
        assert_attention_close(record, golden)


def test_top_weights_are_those_of_the_same_keys(record, tmp_path):
    for site in record.sites:
        top = site.weights.topk(2, -1)
        site.top_weights, site.top_keys = top.values, top.indices.int()
        site.query = site.key = None
        del site.__dict__["weights"]
    golden = copy_of(record, tmp_path)
    assert_attention_close(record, golden)
    record.sites[1].top_keys = record.sites[1].top_keys.clone()
    record.sites[1].top_keys[0, 0, 1] = torch.tensor([3, 1])
    with pytest.raises(
        AssertionError, match="layer.1: top_weights: 1 of 16 numbers differ, most at .*: 0 where it was 1"
    ):
        assert_attention_close(record, golden)
