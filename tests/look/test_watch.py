import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from regard import look
from regard.look import EVERYTHING


class SelfAttention(nn.Module):
    def __init__(self, heads=2, kv_heads=2, width=4, **keywords):
        super().__init__()
        self.heads, self.kv_heads, self.width, self.keywords = heads, kv_heads, width, keywords
        self.project = nn.Linear(6, (heads + 2 * kv_heads) * width)

    def forward(self, x, encoder_hidden_states=None):
        rows = self.project(x).unflatten(-1, (-1, self.width)).transpose(-3, -2)
        query, key, value = rows.split([self.heads, self.kv_heads, self.kv_heads], dim=-3)
        if encoder_hidden_states is not None:
            other = self.project(encoder_hidden_states).unflatten(-1, (-1, self.width)).transpose(-3, -2)
            _, key, value = other.split([self.heads, self.kv_heads, self.kv_heads], dim=-3)
        return F.scaled_dot_product_attention(query, key, value, **self.keywords)


class Two(nn.Module):
    def __init__(self, **keywords):
        super().__init__()
        self.first = SelfAttention(**keywords)
        self.inner = nn.ModuleDict({"second": SelfAttention(**keywords)})

    def forward(self, x):
        return self.first(x).sum() + self.inner["second"](x).sum()


def hooks_of(model):
    return [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()]


@pytest.fixture
def x():
    return torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))


def test_sites_have_the_names_of_their_modules_in_the_order_of_the_calls(x):
    model = Two()
    with look.watch(model, EVERYTHING) as record:
        model(x)
        model(x)
    assert [site.name for site in record.sites] == ["first", "inner.second"] * 2
    assert [site.call for site in record.sites] == [0, 0, 1, 1]
    assert record.sites[2].title == "first (call 2)"
    assert record.model == "Two" and record.notes == []


def test_the_output_is_the_same_to_the_bit_and_dropout_draws_the_same(x):
    model = SelfAttention(dropout_p=0.5)
    torch.manual_seed(3)
    plain = model(x)
    torch.manual_seed(3)
    with look.watch(model, EVERYTHING) as record:
        watched = model(x)
    assert torch.equal(plain, watched)
    assert torch.equal(record.sites[0].output, plain)
    assert record.sites[0].dropout_p == 0.5


def test_gradients_pass_through_a_watched_model(x):
    model = SelfAttention()
    model(x).sum().backward()
    plain = model.project.weight.grad.clone()
    model.project.weight.grad = None
    with look.watch(model, EVERYTHING) as record:
        model(x).sum().backward()
    assert torch.equal(model.project.weight.grad, plain)
    assert not record.sites[0].query.requires_grad


def test_hooks_and_modes_are_gone_afterwards_also_after_an_exception(x):
    model = Two()
    before, modes = hooks_of(model), len(_get_current_function_mode_stack())
    with look.watch(model):
        model(x)
        assert hooks_of(model) != before
    assert hooks_of(model) == before
    with pytest.raises(ZeroDivisionError), look.watch(model):
        raise ZeroDivisionError
    assert hooks_of(model) == before
    assert len(_get_current_function_mode_stack()) == modes


def test_a_model_that_fails_half_way_leaves_the_names_right(x):
    model = Two()
    with look.watch(model, EVERYTHING) as record:
        with pytest.raises(RuntimeError):
            model(x[..., :3])
        model(x)
        F.scaled_dot_product_attention(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4))
    assert [site.name for site in record.sites] == ["first", "inner.second", "(outside the model)"]


def test_what_was_caught_is_a_copy(x):
    model = SelfAttention()
    with torch.no_grad(), look.watch(model, EVERYTHING) as record:
        model(x)
        kept = record.sites[0].query.clone()
        model.project.weight.zero_()
        x.zero_()
    assert torch.equal(record.sites[0].query, kept)


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"scale": 0.3},
        {"is_causal": True},
        {"attn_mask": torch.tensor([[True, False, True, True, False]]).expand(5, 5)},
        {"attn_mask": torch.arange(25.0).reshape(5, 5).sin()},
        {"attn_mask": torch.arange(50.0).reshape(2, 1, 5, 5).sin() > 0, "scale": 1.0},
        {"heads": 4, "kv_heads": 2, "enable_gqa": True},
    ],
    ids=["plain", "scale", "causal", "bool mask", "float mask", "4-D mask", "grouped"],
)
def test_the_weights_explain_the_output(x, keywords):
    model = SelfAttention(**keywords)
    with look.watch(model, EVERYTHING) as record:
        output = model(x)
    site = record.sites[0]
    repeats = site.heads // site.value.shape[1]
    again = site.weights @ site.value.repeat_interleave(repeats, dim=1)
    torch.testing.assert_close(again, output.detach(), atol=1e-6, rtol=1e-5)
    assert site.weights.shape == (2, site.heads, 5, 5)


def test_one_mask_given_to_every_layer_is_copied_once(x):
    mask = torch.ones(5, 5, dtype=torch.bool)
    model = Two(attn_mask=mask)
    with look.watch(model, EVERYTHING) as record:
        model(x)
    first, second = (site.mask for site in record.sites)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr() != mask.data_ptr()


def test_a_mask_that_changes_between_calls_is_kept_as_it_was(x):
    mask = torch.ones(5, 5, dtype=torch.bool)
    model = SelfAttention(attn_mask=mask)
    with look.watch(model, EVERYTHING) as record:
        model(x)
        mask[:, 2] = False
        model(x)
    assert bool(record.sites[0].mask.all()) and not bool(record.sites[1].mask.all())


def test_inference_mode(x):
    model = SelfAttention(attn_mask=torch.ones(5, 5, dtype=torch.bool))
    with torch.inference_mode(), look.watch(model, EVERYTHING) as record:
        model(x)
    assert record.sites[0].weights.shape == (2, 2, 5, 5)


def test_cross_attention_is_told_by_the_other_sequence(x):
    model = SelfAttention()
    with look.watch(model, EVERYTHING) as record:
        model(x)
        model(x, encoder_hidden_states=x[:, :3])
    assert [site.kind for site in record.sites] == ["self", "cross"]
    assert record.sites[1].lengths == (5, 3) and record.sites[1].weights.shape[-1] == 3


def test_a_recurrent_decoders_attention_is_cross_attention_at_any_lengths(x):
    from regard.nn import StepAttention

    step = StepAttention(x.shape[-1], hidden_dim=4)
    memory = step.project(x)
    with look.watch(step, EVERYTHING) as record:
        step(x, memory)
        step(x[:, 0], memory)
    assert [site.kind for site in record.sites] == ["cross", "cross"]


def test_two_watches_at_once_both_see(x):
    model = SelfAttention()
    with look.watch(model, EVERYTHING) as outer, look.watch(model, EVERYTHING) as inner:
        model(x)
    assert len(outer.sites) == len(inner.sites) == 1
    assert torch.equal(outer.sites[0].weights, inner.sites[0].weights)


def test_torchs_fused_path_is_named():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with look.watch(model) as record:
        model(torch.randn(1, 3, 8))
    assert [site.name for site in record.sites] == ["self_attn"]
    assert any("fused encoder path stands down while the model is watched" in note for note in record.notes)


def test_only_modules_can_be_watched():
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module; got int"), look.watch(3):
        pass


def test_a_module_that_runs_as_several_layers_is_numbered_as_them():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

        def forward(self, x):
            for _ in range(3):
                x = self.attention(x, x, x)[0]
            return x

    model = Shared()
    with look.watch(model, look.Keep(weights=True, layers=(1,))) as record:
        for _ in range(2):
            model(torch.randn(1, 4, 6))
    assert [(site.layer, site.call) for site in record.sites] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (0, 3),
        (1, 4),
        (2, 5),
    ]
    assert [site.whole is not None for site in record.sites] == [False, True, False] * 2
