"""Training: what a killed run goes on to, what two processes train to, and what is left when the disk is full."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from recipes.translation import checkpoint, decode
from recipes.translation.batches import Plan, collate, sources
from recipes.translation.model import build, describe
from recipes.translation.training import Budget, Recipe, Training
from tests.recipes import tiny

ROOT = Path(__file__).parents[2]
KNOWN = tiny.Letters()


COMMAND = (
    "train --data letters --width 16 --vocabulary 40 --tokens 120 --every 5 --warmup 10 --rate 3e-3 --steps 30 "
    "--device cpu --threads 1 --resume"
).split()


def ran(folder: Path, *options: object, kill_at: int = 0, processes: int = 1) -> int:
    """Run the command, under torchrun for several processes; its exit code."""
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    start = [sys.executable, "-m", *(launch if processes > 1 else []), "tests.recipes.tiny"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KILL_AT": str(kill_at)}
    command = [*start, *COMMAND, "--out", str(folder), *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 or kill_at, done.stderr
    return done.returncode


def losses(folder: Path) -> list[list[str]]:
    """All but the seconds, which no two runs share."""
    with (folder / "losses.csv").open(encoding="utf-8") as file:
        return [row[:-1] for row in csv.reader(file)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    place = checkpoint.newest(folder, "last")
    assert place is not None
    return load_file(place / "model.safetensors")


def test_killed_in_an_epoch_and_resumed_ends_with_the_same_losses_and_weights(tmp_path: Path) -> None:
    killed = 13
    ran(tmp_path / "whole")
    assert ran(tmp_path / "broken", kill_at=killed) == -signal.SIGKILL
    assert checkpoint.newest(tmp_path / "broken", "last").name == f"last-{killed // 5 * 5:08}"
    ran(tmp_path / "broken")
    whole = losses(tmp_path / "whole")
    assert losses(tmp_path / "broken") == whole
    assert [row[:2] for row in whole[2:4]] == [["10", "1"], ["15", "1"]]  # so that step 13 is inside an epoch
    assert len(whole) == 7
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "broken")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_two_processes_train_to_what_one_does(tmp_path: Path) -> None:
    ran(tmp_path / "one", "--dropout", 0, "--steps", 15)
    ran(tmp_path / "two", "--dropout", 0, "--steps", 15, processes=2)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-5)
    for first, second in zip(losses(tmp_path / "one")[1:], losses(tmp_path / "two")[1:], strict=True):
        assert [float(cell) for cell in second] == pytest.approx([float(cell) for cell in first], rel=1e-4)


def training(folder: Path, model: torch.nn.Module, **recipe: object) -> Training:
    config = {"model": describe(model), "data": "letters", "vocabulary": KNOWN.digest}
    made = Recipe(**{"tokens": 400, "every": 50, "warmup": 30, "rate": 8e-3, "smoothing": 0.0, **recipe})
    return Training(
        model,
        tiny.pairs(1500, longest=4),
        tiny.pairs(30, seed=1, longest=4),
        folder,
        made,
        config,
        KNOWN,
        Accelerator(cpu=True),
    )


@pytest.mark.parametrize("kind", ["rnn", "transformer"])
def test_a_small_model_learns_the_letters(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    sizes = {
        "width": 32,
        "dropout": 0.0,
        **({"heads": 2, "layers": 1, "hidden": 64} if kind != "rnn" else {}),
    }
    model = build({"kind": kind, "vocabulary": len(KNOWN), **sizes})
    at = training(tmp_path, model, rate=8e-3 if kind == "rnn" else 4e-3).run(Budget(epochs=11))
    assert at.best < 0.5
    held_out = tiny.pairs(50, seed=2, longest=4)
    written = decode.greedy(model.eval(), *sources([source for source, _ in held_out]), 10)
    assert sum(one == target for one, (_, target) in zip(written, held_out, strict=True)) >= 35
    assert "<svg" in (tmp_path / "losses.svg").read_text(encoding="utf-8")


def test_early_stopping_keeps_the_best_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build({"kind": "rnn", "vocabulary": len(KNOWN), "width": 16, "dropout": 0.0})
    # At this rate the first look is the best one: what comes behind diverges.
    run = training(tmp_path, model, every=2, rate=3.0, warmup=4, clip=1e6)
    at = run.run(Budget(patience=3))
    assert at.worse == 3 and at.step == at.best_step + 6
    assert checkpoint.newest(tmp_path, "best").name == f"best-{at.best_step:08}"


def small(tmp_path: Path) -> tuple[torch.nn.Module, dict]:
    model = build({"kind": "rnn", "vocabulary": len(KNOWN), "width": 16})
    return model, {"model": describe(model), "vocabulary": KNOWN.digest}


def test_a_full_disk_leaves_the_old_checkpoint_and_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = small(tmp_path)
    checkpoint.save(tmp_path, "last", 5, model, config, KNOWN, {"step": 5})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def full(path: Path, content: bytes) -> None:
        if path.name == "training.pt":
            raise OSError(28, "No space left on device")
        path.write_bytes(content)

    monkeypatch.setattr(checkpoint, "_write", full)
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.save(tmp_path, "last", 10, model, config, KNOWN, {"step": 10})
    assert "No space left on device; last-00000005, the one before it, is whole" in str(caught.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_older_checkpoint_goes_when_the_newer_is_there(tmp_path: Path) -> None:
    model, config = small(tmp_path)
    for step in (5, 10, 10):
        checkpoint.save(tmp_path, "last", step, model, config, KNOWN)
    assert [path.name for path in tmp_path.iterdir()] == ["last-00000010"]


def test_a_folder_without_a_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(checkpoint.CheckpointError, match="holds no checkpoint; train one first"):
        checkpoint.load_model(tmp_path)
    with pytest.raises(checkpoint.CheckpointError, match="is not there"):
        checkpoint.load_model(tmp_path / "nowhere")


def test_a_checkpoint_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    model, config = small(tmp_path)
    place = checkpoint.save(tmp_path, "last", 5, model, config, KNOWN)
    with pytest.raises(checkpoint.CheckpointError, match="another vocabulary"):
        checkpoint.same_vocabulary(place, checkpoint.load_config(place), tiny.Letters("xyz"))


@pytest.mark.parametrize("damage", ["cut", "sizes"])
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, damage: str) -> None:
    model, config = small(tmp_path)
    place = checkpoint.save(tmp_path, "last", 5, model, config, KNOWN)
    if damage == "cut":
        path = place / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        expected = "cannot read"
    else:
        model = build({"kind": "rnn", "vocabulary": len(KNOWN), "width": 18})
        expected = "does not fit the sizes"
    with pytest.raises(checkpoint.CheckpointError, match=expected):
        checkpoint.load_weights(model, place)


def test_batches_hold_every_pair_once_within_the_tokens_and_follow_the_seed() -> None:
    made = tiny.pairs(103)
    plan = Plan(made, 120, 7)
    batches = plan.epoch(3)
    assert sorted(place for batch in batches for place in batch) == list(range(103))
    for batch in batches:
        held = collate([made[place] for place in batch])
        assert held.source.numel() + held.target_in.numel() <= 120
    assert batches == Plan(made, 120, 7).epoch(3)
    assert batches != plan.epoch(4) and batches != Plan(made, 120, 8).epoch(3)


def test_shares_of_processes_are_the_batch_and_one_without_a_share_counts_nothing() -> None:
    made = tiny.pairs(5)
    plan = Plan(made, 100, 1)
    shares = [plan.batch([0, 1, 2], rank, 2) for rank in (0, 1)]
    assert [len(batch.source) for batch, _, _ in shares] == [2, 1]
    assert sum(batch.tokens for batch, _, _ in shares) == shares[0][1] == shares[1][1]
    assert [counts for _, _, counts in (plan.batch([4], rank, 2) for rank in (0, 1))] == [True, False]


def test_the_rate_rises_and_falls() -> None:
    root = Recipe(rate=1.0, warmup=10)
    assert [root.rate_at(step) for step in (1, 10, 40)] == [0.1, 1.0, 0.5]
    line = Recipe(rate=1.0, warmup=10, schedule="linear", steps=109)
    assert [line.rate_at(step) for step in (5, 10, 60, 110)] == pytest.approx([0.5, 1.0, 0.5, 0.0])
    with pytest.raises(ValueError, match="say --steps"):
        Recipe(schedule="linear")
