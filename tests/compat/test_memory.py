"""compat.MultiheadAttention without weights at T = 4096: memory stays linear in every form of the masks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# torch makes (B H, T, T) of such masks: 256 MiB in float32. One copy as bool is 64 MiB.
T, E, H = 4096, 32, 4
MOST_MIB = 60

CHILD = """
import ctypes, gc, json, sys
import torch
from regard import compat
torch.set_num_threads(1)
torch.manual_seed(0)
T, E, H = (int(n) for n in sys.argv[1:])
causal = torch.ones(T, T, dtype=torch.bool).triu_(1)
pads = torch.arange(T)[None] >= T - 100
holes = torch.rand(1, T) < 0.3
floats = torch.zeros(T, T).masked_fill_(causal, -torch.inf)
heads = causal.expand(H, T, T).clone()
i, j = torch.arange(T)[:, None], torch.arange(T)
two = (j > i) | ((j < i - 99) & (j >= 5))
scattered = torch.empty(H, T, T, dtype=torch.bool).random_()
FORMS = {
    "padding": {"key_padding_mask": pads},
    "holes": {"key_padding_mask": holes},
    "causal": {"attn_mask": causal},
    "causal in floats": {"attn_mask": floats},
    "causal hint": {"attn_mask": causal, "is_causal": True},
    "causal and padding": {"attn_mask": causal, "key_padding_mask": pads},
    "one a head": {"attn_mask": heads},
    "scattered, one a head": {"attn_mask": scattered},
    "scattered and holes": {"attn_mask": scattered, "key_padding_mask": holes},
    "two runs and two of keys": {"attn_mask": two, "key_padding_mask": pads | (torch.arange(T) % 3000 < 50)},
    "added": {"attn_mask": floats.nan_to_num(neginf=-1.0)},
}
TRAINED = ("padding", "causal", "scattered, one a head")
module = compat.MultiheadAttention(E, H, batch_first=True)
x = torch.randn(1, T, E)

def run(x, given, train):
    with torch.set_grad_enabled(train):
        output = module(x, x, x, need_weights=False, **given)[0]
    if train:
        output.sum().backward()

def field(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))

def peak(given, train):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = field("VmRSS")
    run(x, given, train)
    return (field("VmHWM") - before) / 1024

run(x[:, :64], {}, True)
found = {name: peak(given, False) for name, given in FORMS.items()}
found |= {name + ", with gradients": peak(FORMS[name], True) for name in TRAINED}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def peaks() -> dict[str, float]:
    """Peak memory in MiB above what stood before, of every form, measured in a process of its own."""
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    # Every tensor is mapped by itself: the peak is what is held, not what the allocator keeps in pieces.
    environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    command = [sys.executable, "-c", CHILD, str(T), str(E), str(H)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_memory_is_linear_in_every_form(peaks: dict[str, float]) -> None:
    assert len(peaks) == 14
    assert {name: mib for name, mib in peaks.items() if mib > MOST_MIB} == {}
