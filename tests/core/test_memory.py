"""A callable of yours takes far less than the matrix it never builds: peak process memory in a fresh process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, torch
from regard import attention
torch.set_num_threads(1)
T, grad = int(sys.argv[1]), sys.argv[2] == "grad"
layer = torch.nn.Linear(16, 16)
def score(q, k): return layer(q) @ k.mT
def memory(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024
q, k, v = (torch.randn(1, 1, T, 16, requires_grad=grad) for _ in range(3))
attention(q[:, :, :200], k[:, :, :200], v[:, :, :200], score=score)
open("/proc/self/clear_refs", "w").write("5")
before = memory("VmRSS")
with torch.set_grad_enabled(grad):
    attention(q, k, v, score=score)
print(memory("VmHWM") - before)
"""


def peak(length: int, mode: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(length), mode], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def test_callables_without_gradients() -> None:
    assert peak(8192, "no grad") < 80  # the matrix would be 256 MiB


def test_callables_with_gradients() -> None:
    assert peak(20000, "grad") < 400  # the matrix would be 1526 MiB
