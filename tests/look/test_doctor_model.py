"""doctor(model): every place of attention, what computes it, what can be seen there, and the line that fixes it."""

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from regard import nn as regard_nn
from regard.integrations.transformers import register
from regard.look import Finding, doctor, watch

BERT = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT |= {"intermediate_size": 16}


def bert(**choice):
    return hf.BertModel(hf.BertConfig(**BERT), **choice).eval()


@pytest.mark.parametrize(
    "implementation, seen, fix",
    [
        ("sdpa", "everything", ""),
        ("eager", "everything", ""),
        ("regard", "everything", ""),
        ("flex_attention", "nothing", 'model.set_attn_implementation("sdpa")'),
        ("kernels-community/flash-attn", "nothing", 'model.set_attn_implementation("sdpa")'),
    ],
)
def test_transformers_by_its_choice(implementation, seen, fix):
    register()
    model = bert()
    for part in model.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation_internal = implementation
    found = doctor(model)
    assert [finding.name for finding in found] == [f"encoder.layer.{n}.attention.self" for n in range(2)]
    for finding in found:
        assert (finding.module, finding.implementation) == ("BertSelfAttention", implementation)
        assert (finding.seen, finding.fix) == (seen, fix)


def test_a_mixed_model_and_what_it_says_when_it_runs():
    class Hand(nn.Module):
        def forward(self, x):
            return torch.softmax(x @ x.mT, -1) @ x

    class Kernel(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    class FlashAttention(nn.Module):
        def forward(self, x):
            return flash_attn_func(x, x, x) if x is None else x  # noqa: F821

    class HandAttention(Hand):
        def forward(self, x):
            return torch.softmax(x @ x.mT, -1) @ x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(
                [nn.MultiheadAttention(8, 2), regard_nn.SelfAttention(8, 2), Kernel(), HandAttention()]
            )
            self.flash, self.never = FlashAttention(), Kernel()

        def forward(self, x):
            x = self.parts[0](x, x, x)[0]
            for part in self.parts[1:]:
                x = part(x)
            return self.flash(x)

    model = Model().eval()
    short = [(finding.name, finding.implementation, finding.seen) for finding in doctor(model)]
    assert short == [
        ("parts.0", "multi_head_attention_forward", "everything"),
        ("parts.1", "regard", "everything"),
        ("parts.2", "sdpa", "everything"),
        ("parts.3", "eager", "weights"),
        ("flash", "flash-attn", "nothing"),
        ("never", "sdpa", "everything"),
    ]
    ran = {finding.name: finding for finding in doctor(model, {"x": torch.randn(3, 4, 8)})}
    assert [finding.seen for finding in ran.values()] == ["everything"] * 4 + ["nothing"] * 2
    assert "hands out no weights" in ran["flash"].why and ran["flash"].fix
    assert ran["never"].why == "it did not run on these inputs"
    with watch(model) as record:
        model(torch.randn(3, 4, 8))
    (note,) = record.notes
    assert note.startswith(
        "flash (FlashAttention) ran, and its attention was not seen: it calls a kernel of flash-attn"
    )


def test_a_place_that_no_source_told_of_is_found_by_running():
    class Odd(nn.Module):
        def forward(self, x):
            return (x @ x.mT).softmax(-1) @ x

    model = nn.Sequential(nn.Linear(8, 8), Odd())
    assert doctor(model) == []
    (finding,) = doctor(model, {"input": torch.randn(2, 4, 8)})
    assert finding == Finding("1", "Odd", "eager", "everything", "it was seen when it ran")


def test_only_modules():
    with pytest.raises(TypeError, match=r"doctor\(model\): model must be a torch.nn.Module; got dict"):
        doctor({})


def test_the_model_is_left_as_it_was():
    model = bert()
    before = [len(part._forward_hooks) for part in model.modules()]
    doctor(model, {"input_ids": torch.tensor([[1, 2, 3]])})
    assert [len(part._forward_hooks) for part in model.modules()] == before
