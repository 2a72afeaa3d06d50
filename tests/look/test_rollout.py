import pytest
import torch

from regard.look import Record, Site
from regard.look._rollout import rollout
from regard.look._value_weighted import value_weighted


def site(length, heads=2, seed=0, kind="self", keys=None):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, heads, length, 4, generator=generator)
    other = torch.randn(2, 1, length if keys is None else keys, 4, generator=generator)
    return Site(f"layer.{seed}", query, other, other * 2, query, scale=0.5, kind=kind)


def test_rollout_is_the_product_of_the_layers():
    record = Record([site(5, seed=1), site(5, seed=2)])
    found = rollout(record)
    parts = [0.5 * torch.eye(5) + 0.5 * each.weights.mean(1) for each in record.sites]
    torch.testing.assert_close(found.weights[0], parts[0])
    torch.testing.assert_close(found.weights[1], parts[1] @ parts[0])
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(2, 2, 5))
    assert found.sites == ("layer.1", "layer.2") and "50% of its input" in found.assumption


def test_all_residual_is_the_identity_and_none_is_attention_alone():
    record = Record([site(4, seed=1)])
    assert torch.equal(rollout(record, residual=1.0).weights[0], torch.eye(4).expand(2, 4, 4))
    torch.testing.assert_close(
        rollout(record, residual=0.0, heads=(1,)).weights[0], record.sites[0].weights[:, 1]
    )


def test_cross_attention_is_left_out_and_sites_can_be_chosen():
    record = Record(
        [site(4, seed=1), site(4, seed=2, kind="cross", keys=6), site(4, seed=3), site(7, seed=4)]
    )
    with pytest.raises(
        ValueError, match="as many queries as keys; these are of 4 x 4, 7 x 7. Choose some with sites="
    ):
        rollout(record)
    assert rollout(record, sites=(0, 2)).weights.shape == (2, 2, 4, 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"residual": 1.5}, "share from 0 to 1; got 1.5"),
        ({"heads": (2,)}, "has heads 0 to 1"),
        ({"heads": ()}, "has heads 0 to 1"),
        ({"sites": (3,)}, "there are 1 sites, counted from 0; got 3"),
    ],
)
def test_what_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        rollout(Record([site(4)]), **options)


def test_nothing_to_go_through():
    with pytest.raises(ValueError, match="no self-attention in this record"):
        rollout(Record([]))


def test_value_weighted_maps_are_norms_of_what_is_added():
    one = site(5, heads=4)
    found = value_weighted(one)
    added = one.weights[..., None] * one.value.expand(2, 4, 5, 4)[:, :, None]
    torch.testing.assert_close(found, added.norm(dim=-1))
    projection = torch.randn(3, 16, generator=torch.Generator().manual_seed(9))
    through = torch.einsum("ohd,bhqkd->bhqko", projection.reshape(3, 4, 4), added)
    torch.testing.assert_close(value_weighted(one, projection), through.norm(dim=-1), rtol=1e-4, atol=1e-5)


def test_value_weighted_says_what_it_needs():
    one = site(5)
    with pytest.raises(ValueError, match=r"expected \(out, H Dv\) = \(out, 8\); got \(3, 7\)"):
        value_weighted(one, torch.zeros(3, 7))
    one.value = None
    with pytest.raises(ValueError, match="values were not kept; watch with"):
        value_weighted(one)
