"""The bench's measured table: its rows, what they are held to, what is saved and what the README shows."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

from bench import __main__ as command
from bench import agree, compiled, linear, measure, report, runner, saved, torch_long
from bench import torch_expressions as plain
from bench.case import TOY, Case, Inputs, Limit, Result, SideFailed, floor, make_inputs, shape, timed_call
from bench.cases import CASES, find
from bench.rows import ROWS, Row

ROWED = [case for case in CASES if isinstance(case, Case) and case.row]
FIRSTS = [next(case for case in ROWED if case.row == row.name) for row in ROWS]
COMPILED = [case for case in ROWED if case.other is compiled.call_prepared]


def case_of(name: str) -> Case:
    found = find(name)
    assert isinstance(found, Case)
    return found


def tiny(**changes: object) -> Case:
    """Plain attention of 1 x 2 x 32 x 8 against itself; `changes` make it another case."""
    case = Case(
        "tiny", "?", shape(1, 2, 32, 8), plain.sdpa, plain.sdpa, "SDPA", truth=plain.sdpa, max_rounds=2
    )
    return dataclasses.replace(case, **changes)


def short(case: Case) -> Case:
    """The case at 512 positions and two heads a key head."""
    at = case.at
    heads = (min(at.H, 2 * at.H // at.Hkv), min(at.Hkv, 2))
    at = at._replace(B=1, H=heads[0], Hkv=heads[1], Tq=min(at.Tq, 512), Tk=min(at.Tk, 512))
    return dataclasses.replace(case, at=at, agree_at=None)


# ---------------------------------------------------------------------------- rows and cases


def test_rows_and_cases_name_each_other() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert {case.row for case in ROWED} == set(names)
    for case in ROWED:
        (limit,) = case.limits
        assert limit.goal is not None and limit.slack == 0.05 and case.timed and case.at
        better = limit.goal > limit.bound if limit.measure == "faster" else limit.goal < limit.bound
        assert better or (case.row == "grid" and limit.goal == 1.0)


# What each row promises: the floors and goals of its cases, in the order of the row's words.
PROMISED = {
    "dense-fp32": [(1.25, 1.5), (1.15, 1.3), (1.1, 1.25)],
    "causal-fp32": [(1.6, 2.0), (2.0, 2.4), (1.35, 1.6)],
    "dense-bf16": [(2.0, 2.6)] * 2,
    "causal-bf16": [(3.5, 4.5), (2.5, 3.0)],
    "dense-fp32-backward": [(1.25, 1.4)] * 2,
    "causal-fp32-backward": [(2.0, 2.5), (1.45, 1.7)],
    "dense-bf16-backward": [(1.6, 2.2)],
    "causal-bf16-backward": [(3.0, 4.0)],
    "decode-fp32": [(3.0, 4.0)] * 6,
    "decode-fp32-folded": [(1.6, 2.3)] * 6,
    "decode-bf16": [(20.0, 35.0)] * 6,
    "decode-bf16-folded": [(2.5, 4.0)] * 6,
    "window-mask": [(15.0, 22.0), (60.0, 100.0)],
    "window-blocks": [(3.0, 4.0)] * 2,
    "window-flex": [(2.0, 3.0)] * 2,
    "window-backward-mask": [(15.0, 22.0)],
    "window-backward-blocks": [(3.0, 4.0)] * 2,
    "documents-mask": [(15.0, 22.0)],
    "documents-loop": [(1.5, 1.8)],
    "wide-value": [(3.0, 5.0)],
    "dropout": [(3.0, 6.0)],
    "relative": [(2.0, 3.0)],
    "softcap": [(2.0, 3.0)],
    "alibi": [(2.0, 3.0)],
    "sink": [(1.3, 1.6)],
    "additive": [(20.0, 50.0)] * 2,
    "additive-train": [(10.0, 25.0)] * 2,
    "additive-compiled": [(6.0, 12.0)] * 2,
    "sparse": [(20.0, 40.0)] * 4,
    "sparse-k": [(6.0, 10.0)] * 4,
    "observe": [(5.0, 8.0)] * 2,
    "observe-plain": [(1.3, 1.15)] * 2,
}


def test_the_promises_are_there() -> None:
    found: dict[str, list[tuple[float, float | None]]] = {}
    for case in ROWED:
        found.setdefault(case.row, []).append((case.limits[0].bound, case.limits[0].goal))
    many = {"grid": (0.95, 1.0), "small": (3.0, 1.0)}
    for row, promise in many.items():
        assert set(found.pop(row)) == {promise}
    assert found == PROMISED
    (grid,) = [row for row in ROWS if row.mean is not None]
    assert grid.name == "grid" and (grid.mean.bound, grid.mean.goal) == (1.3, 1.6)


def test_the_grid_is_where_it_says() -> None:
    def work(case: Case) -> int:
        return case.at.B * case.at.H * case.at.Tq**2 * case.at.D

    grid, small = ([case for case in ROWED if case.row == row] for row in ("grid", "small"))
    assert len(grid) > 100 and all(work(case) >= 2**23 for case in grid)
    assert small and all(work(case) < 2**23 for case in small) and TOY in [case.at for case in small]
    for cases in (grid, small):
        assert {case.dtype for case in cases} == {torch.float32, torch.bfloat16}
    assert {case.at.D for case in grid} == {32, 64, 128}


# ---------------------------------------------------------------------------- both sides are right


@pytest.mark.parametrize("case", [case for case in FIRSTS if case not in COMPILED], ids=lambda case: case.row)
def test_both_sides_are_near_the_truth(case: Case) -> None:
    verdict = agree.check(short(case))
    assert verdict.agrees, verdict


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what the compiler warns of is not ours
@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.name)
def test_compiled_sides_are_near_the_truth(case: Case) -> None:
    verdict = agree.check(short(case))
    assert verdict.agrees, verdict


def test_blocks_and_documents_are_what_the_masks_say() -> None:
    window = short(case_of("window-blocks-4096"))
    inputs = make_inputs(window)
    inputs.prepared = {**plain.window_mask(inputs), **torch_long.block_mask(inputs)}
    torch.testing.assert_close(
        torch_long.sdpa_blocks(inputs), plain.sdpa_masked(inputs), rtol=1e-4, atol=1e-5
    )
    documents = make_inputs(short(case_of("documents-loop")))
    documents.prepared = {**torch_long.document_mask(documents), **torch_long.document_bounds(documents)}
    lengths = [b - a for a, b in documents.prepared["bounds"]]
    assert len(lengths) == 16 and sum(lengths) == 512 and len(set(lengths)) > 3
    torch.testing.assert_close(
        torch_long.sdpa_documents(documents), plain.sdpa_masked(documents), rtol=1e-4, atol=1e-5
    )


def _off(share: float):
    def side(inputs: Inputs) -> Result:
        return plain.sdpa(inputs) * (1 + share)

    return side


def test_ours_is_held_to_the_error_of_the_other() -> None:
    assert agree.check(tiny()).agrees
    assert not agree.check(tiny(ours=_off(3e-6))).agrees
    assert agree.check(tiny(ours=_off(3e-6), error_least=5e-6)).agrees
    # Where the other side is off by more, ours may be off by as much as the case says.
    loose = tiny(ours=_off(3e-6), other=_off(4e-6))
    assert agree.check(loose).agrees and not agree.check(dataclasses.replace(loose, error_times=0.5)).agrees


def test_a_wrong_other_side_is_refused_too() -> None:
    verdict = agree.check(tiny(other=_off(0.5)))
    assert not verdict.agrees and "of the other side" in verdict.where
    outcome = runner.run(tiny(ours=_off(1e-3)), threads=(1,), rounds=1)
    assert (
        "allowed 2x the other's error against float64, or 2.0e-06" in outcome.refused and not outcome.timings
    )
    wrong = tiny(ours=lambda inputs: {"output": plain.sdpa(inputs), "more": inputs.query})
    assert "only one side returned more" in agree.check(wrong).where


def test_gradients_are_held_too() -> None:
    def doubled(inputs: Inputs) -> Result:
        output = plain.sdpa(inputs)
        return 2 * output - output.detach()

    verdict = agree.check(tiny(ours=doubled, backward=True))
    assert not verdict.agrees and verdict.where.startswith("grad of")


# ---------------------------------------------------------------------------- measuring


def test_limits_have_goals_and_a_little_slack() -> None:
    limit = floor(2.0, 3.0)
    assert limit.met(1.901) and not limit.met(1.899)
    assert limit.reaches_goal(3.0) and not limit.reaches_goal(2.99)
    most = Limit("slower", 1.3, 1.15, 0.05)
    assert most.met(1.36) and not most.met(1.37) and most.reaches_goal(1.1) and not most.reaches_goal(1.2)
    assert not Limit("faster", 1.0).reaches_goal(5.0)


def test_a_backward_is_timed_alone() -> None:
    calls: list[str] = []

    def counted(inputs: Inputs) -> Result:
        calls.append("forward")
        return plain.sdpa(inputs)

    case = tiny(ours=counted, backward=True, only_backward=True)
    call = timed_call(case, "ours", make_inputs(case))
    first, second = call(), call()
    assert calls == ["forward"] and len(first) == 3
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_time_beyond_the_other_is_counted_in_toys() -> None:
    def three_more(inputs: Inputs) -> Result:
        for _ in range(8):
            plain.sdpa(inputs)
        return plain.sdpa(inputs)

    at = dataclasses.replace(tiny(), at=TOY, limits=(Limit("extra", 3.0, 1.0, 0.05),), max_rounds=9)
    timing = measure.time_case(dataclasses.replace(at, ours=three_more), threads=1, rounds=9)
    assert 4 < timing.extra < 16
    outcome = runner.run(at, threads=(1,), rounds=5)
    (judged,) = outcome.judged
    assert judged.met and judged.value == outcome.timings[0].extra and "1 thread" in judged.under


def test_what_others_take_of_the_machine_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tick = os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"
    monkeypatch.setattr(measure, "STAT", stat)
    monkeypatch.setattr(measure.time, "process_time", lambda: 2.5)
    stat.write_text(
        f"cpu  {3 * tick} {tick} {2 * tick} {90 * tick} {50 * tick} {tick} 0 0 {7 * tick} 0\ncpu0 1 2\n"
    )
    assert measure._foreign_seconds() == pytest.approx(3 + 1 + 2 + 1 - 2.5)
    monkeypatch.undo()
    seconds = iter(range(0, 10_000, 100))
    monkeypatch.setattr(measure, "_foreign_seconds", lambda: float(next(seconds)))
    timing = measure.time_case(tiny(), threads=1, rounds=2)
    assert timing.noisy and "others were at work" in report.load_note(
        [runner.Outcome(tiny(), timings=[timing])]
    )


def test_a_row_with_a_mean_is_judged_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "ROWS", (Row("r", "", "", floor(1.3, 1.6)),))
    timings = [measure.Timing(1, "thread", 1.0, ratio, 5) for ratio in (1.0, 4.0)]
    outcomes = [runner.Outcome(tiny(row="r"), timings=[timing]) for timing in timings]
    (mean,) = runner.mean_judgements(outcomes)
    assert mean.value == pytest.approx(2.0) and mean.met and "over 2 points" in mean.under
    assert runner.mean_judgements([runner.Outcome(tiny(row="other"), timings=timings[:1])]) == []


def test_a_side_that_cannot_run_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(inputs: Inputs) -> Result:
        raise SideFailed("torch.compile: no compiler here")

    monkeypatch.setattr(command, "CASES", (tiny(other=fails),))
    assert command.main(["--threads", "1", "--rounds", "1", "--check"]) == 1
    assert "refused: torch.compile: no compiler here" in " ".join(capsys.readouterr().out.split())


# ---------------------------------------------------------------------------- what is saved and shown


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for results and a README of their own."""
    monkeypatch.setattr(saved, "RESULTS", tmp_path / "bench.json")
    (tmp_path / "README.md").write_text(
        f"# A\n\n{saved.BEGIN}\nwhat was there before\n{saved.END}\n\nEnd.\n", "utf-8"
    )
    return tmp_path


def outcome(name: str, ratio: float, foreign: float = 0.0) -> runner.Outcome:
    made = runner.Outcome(case_of(name))
    made.timings = [measure.Timing(n, "", 1.0, ratio + n / 100, 5, foreign) for n in (1, 2)]
    made.judged = runner._judge(case_of(name), made)
    return made


def test_results_are_kept_case_by_case(kept: Path) -> None:
    results, readme = kept / "bench.json", kept / "README.md"
    saved.save([outcome("dense-fp32-128", 1.4), outcome("dense-fp32-512", 1.0)], path=results)
    saved.save([outcome("dense-fp32-2048", 1.2, foreign=0.5)], {"dense-fp32": [2**20, 2**21]}, path=results)
    saved.save([outcome("dense-fp32-128", 1.5)], path=results)
    written = json.loads(results.read_text("utf-8"))
    assert set(written["cases"]) == {f"dense-fp32-{n}" for n in (128, 512, 2048)}
    saved.write_table(results, readme)
    text = readme.read_text("utf-8")
    assert text.startswith("# A\n") and text.endswith("\nEnd.\n") and "what was there" not in text
    (line,) = [line for line in text.splitlines() if "float32 forward, dense" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2] == "1.25 / 1.15 / 1.1 (1.5 / 1.3 / 1.25)"
    assert cells[3] == "1.51 / **1.01** / 1.21"
    assert cells[4] == "1.52 / **1.02** / 1.22 (others were at work)"
    assert cells[5] == "1 / 2"
    saved.write_table(results, readme)
    assert readme.read_text("utf-8") == text


def test_many_points_are_a_range_and_a_mean(kept: Path) -> None:
    names = [case.name for case in ROWED if case.row == "grid"][:4]
    ratios = (0.5, 1.0, 2.0, 4.0)
    made = [outcome(name, ratio - 0.01) for name, ratio in zip(names, ratios, strict=True)]
    saved.save(made, path=kept / "bench.json")
    text = saved.table(saved.read(kept / "bench.json"))
    assert "| 0.50 to 4.00, mean 1.41; met at 3 of 4 |" in text


def test_a_refused_case_is_shown_as_refused(kept: Path) -> None:
    grid = [case.name for case in ROWED if case.row == "grid"][:2]
    made = [outcome("dense-fp32-128", 1.4), outcome(grid[0], 0.99)]
    made += [runner.Outcome(case_of(name), refused="wrong") for name in ("dense-fp32-512", grid[1])]
    saved.save(made, path=kept / "bench.json")
    text = saved.table(saved.read(kept / "bench.json"))
    assert "| 1.41 / refused / - |" in text and "met at 1 of 1, 1 refused |" in text


def test_another_machine_is_not_mixed_in(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = kept / "bench.json"
    saved.save([outcome("dense-fp32-128", 1.4)], path=results)
    before = results.read_text("utf-8")
    monkeypatch.setattr(report, "_processor", lambda: "Another One")
    with pytest.raises(saved.NotSaved, match="measured with processor .* this is Another One: remove it"):
        saved.save([outcome("dense-fp32-512", 1.4)], path=results)
    assert results.read_text("utf-8") == before


def test_a_page_without_a_place_and_no_results_are_said(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(saved.NotSaved, match="expected measured results, got none"):
        saved.write_table(kept / "absent.json", kept / "README.md")
    saved.save([outcome("dense-fp32-128", 1.4)], path=kept / "bench.json")
    (kept / "README.md").write_text("# A\n", "utf-8")
    with pytest.raises(saved.NotSaved, match="expected one line"):
        saved.write_table(kept / "bench.json", kept / "README.md")


def test_saving_is_a_switch(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "CASES", (tiny(name="kept"),))
    words = ["--threads", "1", "--rounds", "1"]
    assert command.main(words) == 0 and not saved.RESULTS.exists()
    assert command.main([*words, "--save"]) == 0
    assert set(json.loads(saved.RESULTS.read_text("utf-8"))["cases"]) == {"kept"}


def test_the_readme_shows_what_was_saved(tmp_path: Path) -> None:
    copy = tmp_path / "README.md"
    text = saved.README.read_text("utf-8")
    copy.write_text(text, "utf-8")
    saved.write_table(saved.RESULTS, copy)
    assert copy.read_text("utf-8") == text


# ---------------------------------------------------------------------------- memory


def test_every_row_has_its_memory_measured() -> None:
    named = [name for rows, _ in linear.mechanisms() for name in rows]
    assert sorted(named) == sorted(row.name for row in ROWS)
    for _, case in linear.mechanisms():
        one, two = (linear.at_length(case, n).at for n in linear.LENGTHS)
        assert (one.Tk, two.Tk) == linear.LENGTHS and one.Hkv == 1 and one.Tq in (1, 4096)


def test_memory_of_every_row_is_linear() -> None:
    """One matrix of 8192 x 8192 floats is 256 MiB: nothing comes near it, and twice the length takes twice at most."""
    mib = {name: [peak / 2**20 for peak in peaks] for name, peaks in measure.linear_memory(1).items()}
    assert set(mib) == {row.name for row in ROWS}
    grown = {name: peaks for name, peaks in mib.items() if peaks[1] > 2.2 * peaks[0] + 16 or peaks[1] > 80}
    assert not grown, grown
