"""What a watch cannot do, it says in one sentence; and whatever happens, nothing of it stays behind."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from regard.look import EVERYTHING, Keep, doctor, watch


class Attention(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.project, self.dropout = nn.Linear(8, 24), dropout

    def forward(self, x):
        query, key, value = self.project(x)[:, None].chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)


class ByHand(nn.Module):
    """The attention of every tutorial."""

    def __init__(self):
        super().__init__()
        self.project, self.dropout = nn.Linear(8, 24), nn.Dropout(0.3)

    def forward(self, x, mask=None):
        query, key, value = (
            part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.project(x).chunk(3, -1)
        )
        scores = query @ key.transpose(-2, -1) / 4**0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        weights = self.dropout(torch.softmax(scores, dim=-1))
        return (weights @ value).transpose(1, 2).flatten(2)


X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


def left_behind(model):
    """Everything a watch could leave: hooks, modes, attributes, replaced functions."""
    return (
        [
            (
                len(part._forward_hooks),
                len(part._forward_pre_hooks),
                len(part._forward_hooks_always_called),
                len(part._forward_pre_hooks_with_kwargs),
                sorted(vars(part)),
                type(part),
            )
            for part in model.modules()
        ],
        len(_get_current_function_mode_stack()),
        (len(modules._global_forward_hooks), len(modules._global_forward_pre_hooks)),
        (
            F.scaled_dot_product_attention,
            F.multi_head_attention_forward,
            F.softmax,
            torch.matmul,
            nn.Module.__call__,
        ),
    )


@pytest.mark.parametrize("model", [Attention(), ByHand(), nn.MultiheadAttention(8, 2, batch_first=True)])
@pytest.mark.parametrize("keep", [None, EVERYTHING])
def test_nothing_is_left_behind(model, keep):
    inputs = (X,) * (3 if isinstance(model, nn.MultiheadAttention) else 1)
    before = left_behind(model)
    with watch(model, keep):
        model(*inputs)
    assert left_behind(model) == before
    with pytest.raises(ZeroDivisionError), watch(model, keep):
        model(*inputs)
        raise ZeroDivisionError
    assert left_behind(model) == before
    with watch(model, keep), pytest.raises((RuntimeError, AssertionError)):
        model(*(x[..., :3] for x in inputs))
    assert left_behind(model) == before


def test_attention_by_hand():
    model = ByHand()
    mask = torch.ones(5, 5).tril()
    for training in (False, True):
        model.train(training)
        torch.manual_seed(1)
        expected = model(X, mask)
        torch.manual_seed(1)
        with watch(model, EVERYTHING) as record:
            output = model(X, mask)
        assert torch.equal(output, expected)
        (site,) = record.sites
        assert (site.implementation, site.name, site.kind, site.scale) == ("eager", "ByHand", "self", 0.5)
        assert site.dropout_p == (0.3 if training else 0.0) and record.notes == []
        assert float(site.weights.triu(1).abs().max()) == 0.0
        torch.testing.assert_close(site.weights.sum(-1), torch.ones(2, 2, 5))
        from regard import attention_weights

        again = attention_weights(site.query, site.key, **site.mechanism)
        torch.testing.assert_close(again, site.weights)
        torch.testing.assert_close(
            site.statistics["lse"].exp() * site.weights.amax(-1),
            ((site.query @ site.key.mT / 2).masked_fill(mask == 0, -torch.inf).amax(-1).exp()),
        )


@pytest.mark.parametrize(
    "write",
    [
        lambda q, k, v: torch.einsum(
            "bhqk,bkhd->bqhd", torch.einsum("bqhd,bkhd->bhqk", q, k).mul(0.5).softmax(-1), v
        ).transpose(1, 2),
        lambda q, k, v: torch.bmm(F.softmax(torch.bmm(flat(q), flat(k).mT) * 0.5, dim=2), flat(v)).reshape(
            2, 3, 5, 4
        ),
        lambda q, k, v: (
            torch.baddbmm(torch.zeros(1), flat(q), flat(k).mT, beta=0, alpha=0.5)
            .view(2, 3, 5, 5)
            .softmax(-1)
            .matmul(v.transpose(1, 2))
        ),
        lambda q, k, v: nn.Softmax(-1)((0.5 * q.transpose(1, 2)) @ k.transpose(1, 2).mT) @ v.transpose(1, 2),
        lambda q, k, v: (
            torch.where(
                torch.ones(5, 5) > 0, q.transpose(1, 2) @ k.transpose(1, 2).mT / torch.tensor(2.0), -1e9
            )
            .softmax(-1)
            .to(v.dtype)
            @ v.transpose(1, 2)
        ),
    ],
    ids=["einsum", "bmm", "baddbmm", "module, scaled query", "where"],
)
def test_many_hands(write):
    class Hand(nn.Module):
        def forward(self, q, k, v):
            return write(q, k, v)

    q, k, v = torch.randn(3, 2, 5, 3, 4)
    with watch(Hand(), EVERYTHING) as record:
        output = Hand.forward(None, q, k, v)
    (site,) = record.sites
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), scale=0.5)
    torch.testing.assert_close(output, expected)
    weights = (q.transpose(1, 2) @ k.transpose(1, 2).mT * 0.5).softmax(-1)
    torch.testing.assert_close(site.weights.reshape(weights.shape), weights)
    assert not site.score_unknown
    torch.testing.assert_close((site.weights @ site.value).reshape(expected.shape), expected)


def flat(x):
    return x.transpose(1, 2).flatten(0, 1)


def test_what_is_no_attention_is_not_taken_for_it():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x):
            gates = self.layer(x).softmax(-1)
            return gates.sum(-1), (x @ x.mT).tanh()

    model = Classifier()
    with watch(model) as record:
        model(X)
    assert record.sites == []
    assert record.notes == [
        "no attention was seen in Classifier; regard.look.doctor(model) says of each module why"
    ]
    assert doctor(model) == []


def test_a_watch_is_used_once():
    one = watch(Attention())
    with one as record, pytest.raises(RuntimeError, match="this watch is open already; call watch"), one:
        pass
    assert record.sites == [] and record.notes == []
    with pytest.raises(RuntimeError, match="this watch was used already and is closed; call watch"), one:
        pass


def test_after_the_block_nothing_is_seen():
    model = Attention()
    with watch(model) as record:
        model(X)
    model(X)
    assert len(record.sites) == 1


@pytest.mark.parametrize("given, said", [(3, "look.Keep"), ("weights", "got str"), (Keep, "got type")])
def test_keep_is_a_keep(given, said):
    with pytest.raises(TypeError, match=said):
        watch(Attention(), given)


def test_nested_watches_of_different_parts():
    model = nn.Sequential(Attention(), nn.Flatten(1, 2), Attention())
    with watch(model) as outer:
        with watch(model[2], EVERYTHING) as inner:
            model(X)
        model(X)
    assert [site.name for site in outer.sites] == ["0", "2", "0", "2"]
    # What ran outside the part that is watched is seen too, and named so.
    assert [site.name for site in inner.sites] == ["(outside the model)", "Attention"]
    for mine, theirs in zip(outer.sites[:2], inner.sites, strict=True):
        assert all(torch.equal(mine.statistics[name], theirs.statistics[name]) for name in mine.statistics)


def test_watches_closed_out_of_order_leave_nothing():
    model, before = Attention(), left_behind(Attention())
    first, second = watch(model), watch(model)
    with first, second:
        model(X)
    assert left_behind(model)[1:] == before[1:]


def test_two_threads_each_see_their_own():
    model, start = Attention(), threading.Barrier(2)
    seen = {}

    def look(length):
        with torch.no_grad(), watch(model) as record:
            start.wait()
            for _ in range(20):
                model(X[:, :length])
            start.wait()
        seen[length] = record

    threads = [threading.Thread(target=look, args=(length,)) for length in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for length, record in seen.items():
        assert [site.lengths for site in record.sites] == [(length, length)] * 20
        assert {site.name for site in record.sites} == {"Attention"}
    assert left_behind(model) == left_behind(Attention())


def test_another_thread_is_named():
    model = Attention()
    with watch(model) as record:
        other = threading.Thread(target=lambda: model(X))
        other.start()
        other.join()
    assert record.sites == []
    assert any("also ran in another thread" in note for note in record.notes)


def test_a_compiled_model_is_refused():
    model = Attention()
    compiled = torch.compile(model, backend="eager")
    for given in (compiled, nn.Sequential(compiled)):
        with pytest.raises(ValueError, match=r"compiled by torch.compile, .*compiled\._orig_mod"):
            watch(given)
    assert {finding.seen for finding in doctor(nn.Sequential(compiled))} == {"nothing"}
    with watch(compiled._orig_mod) as record:
        model(X)
    assert len(record.sites) == 1


def test_a_model_on_the_meta_device():
    model = Attention().to("meta")
    with watch(model) as record:
        model(X.to("meta"))
    assert record.sites == []
    assert any(
        "ran on the meta device, where there are no numbers; load the weights" in note
        for note in record.notes
    )
    (finding,) = doctor(model)
    assert (finding.seen, finding.fix) == ("nothing", "load the model's weights")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_vmap_and_nested_tensors_are_named():
    model = Attention()
    jagged = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(5, 4)], layout=torch.jagged)

    class Jagged(nn.Module):
        def forward(self, x):
            x = x.unflatten(-1, (2, 2)).transpose(1, 2)
            return F.scaled_dot_product_attention(x, x, x)

    with sdpa_kernel(SDPBackend.MATH), torch.no_grad(), watch(model) as record:
        torch.func.vmap(model)(X[:, None])
    assert record.sites == [] and any("inside vmap" in note for note in record.notes)
    with torch.no_grad(), watch(Jagged()) as record:
        Jagged()(jagged)
    assert record.sites == [] and any("nested tensors" in note for note in record.notes)


def test_gradients_are_the_same():
    for model in (Attention(0.2), ByHand()):
        grads = []
        for watched in (False, True):
            torch.manual_seed(2)
            model.zero_grad()
            if watched:
                with watch(model, EVERYTHING) as record:
                    model(X).square().sum().backward()
            else:
                model(X).square().sum().backward()
            grads.append([parameter.grad.clone() for parameter in model.parameters()])
        assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))
        kept = [value for value in vars(record.sites[0]).values() if isinstance(value, torch.Tensor)]
        assert kept and not any(tensor.requires_grad for tensor in kept)


def test_numbers_that_are_not_finite_are_looked_at_too():
    model = Attention()
    x = X.clone()
    x[0, 0, 0] = torch.nan
    with torch.no_grad(), watch(model, Keep(topk=2, pool=2, weights=True)) as record:
        output = model(x)
    assert bool(output[0].isnan().all()) and bool(output[1].isfinite().all())
    entropy = record.sites[0].statistics["entropy"]
    assert bool(entropy[0].isnan().all()) and bool(entropy[1].isfinite().all())


def test_a_function_that_the_model_compiles_runs_as_it_would():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.run = torch.compile(F.scaled_dot_product_attention, backend="eager")

        def forward(self, x):
            return self.run(x, x, x)

    model = Attention()
    expected = model(X[:, None])
    with watch(model) as record:
        output = model(X[:, None])
    assert torch.equal(output, expected)
    assert record.sites or any(
        "(Attention) ran, and its attention was not seen" in note for note in record.notes
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_for_gradients_is_no_second_call(reentrant):
    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Attention()

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=reentrant)

    model = Saving()
    with watch(model) as record:
        model(X.clone().requires_grad_()).sum().backward()
    assert [(site.name, site.call) for site in record.sites] == [("part", 0)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_by_hand_in_other_precisions(dtype):
    model = ByHand().eval()
    with torch.no_grad(), torch.autocast("cpu", dtype), watch(model, EVERYTHING) as record:
        cast = model(X)
    half = ByHand().eval().to(dtype)
    half.load_state_dict(model.state_dict())
    with torch.no_grad(), watch(half, EVERYTHING) as second:
        half(X.to(dtype))
    assert cast.dtype == dtype
    for site in (*record.sites, *second.sites):
        assert site.dtype == str(dtype).removeprefix("torch.") and not site.score_unknown
        torch.testing.assert_close(site.weights.float().sum(-1), torch.ones(2, 2, 5), rtol=1e-2, atol=1e-2)
    double = ByHand().eval().double()
    with torch.no_grad(), watch(double, EVERYTHING) as third:
        double(X.double())
    assert third.sites[0].weights.dtype == torch.float64 and not third.sites[0].score_unknown


def test_a_call_that_regard_would_refuse_goes_on():
    class Wild(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, scale=float("inf"))

    with watch(Wild()) as record:
        output = Wild()(X[:, None])
    assert torch.equal(
        output.isnan(), F.scaled_dot_product_attention(*(X[:, None],) * 3, scale=torch.inf).isnan()
    )
    assert record.sites == []
    assert any(
        "a call that regard cannot describe: Dot(scale=): expected a finite number" in n for n in record.notes
    )
