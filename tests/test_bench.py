"""The bench: its registry, its refusal to show numbers of sides that disagree, and the limits on memory."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bench import __main__ as command
from bench import agree, measure, report, runner
from bench.case import Case, ImportCase, Inputs, Limit, Result, make_inputs, run_side, shape
from bench.cases import CASES, find
from bench.torch_expressions import entmax15, sdpa, sparsemax

CALLS = [case for case in CASES if isinstance(case, Case)]
# The cases of the README's table have their own file of tests.
OTHERS = [case for case in CALLS if not case.row]
# What the core has promised: the name of the case, what is measured, and the bound.
PROMISED = {
    ("dot", "slower", 1.8),
    ("window", "faster", 8.0),
    ("dot-train", "memory", 150.0),
    ("dot-train-2048", "memory", 75.0),
    ("additive-train", "memory", 300.0),
    ("additive-train-2048", "memory", 150.0),
    ("observe", "memory", 100.0),
    ("call", "slower", 10.0),
    ("import", "seconds", 0.3),
}


def tiny(name: str = "tiny", **changes: object) -> Case:
    """Plain attention of 1 x 2 x 32 x 8 against itself; `changes` make it another case."""
    case = Case(name, "Is it itself?", shape(1, 2, 32, 8), sdpa, sdpa, "SDPA", max_rounds=2)
    return dataclasses.replace(case, **changes)


def shown(outcomes: list[runner.Outcome]) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(report.table(outcomes))
    return out.getvalue()


# ---------------------------------------------------------------------------- the registry


def test_names_are_unique_and_found() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert all(find(name).name == name for name in names)
    with pytest.raises(LookupError, match="no case named 'nope'; there are: dot, "):
        find("nope")


def test_the_promised_limits_are_there() -> None:
    found = {(case.name, limit.measure, float(limit.bound)) for case in CASES for limit in case.limits}
    assert found >= PROMISED


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
def test_every_limit_is_measured(case: Case) -> None:
    measured = dict.fromkeys(("slower", "faster", "extra"), case.timed)
    measured |= {"memory": case.memory, "seconds": False}
    assert all(measured[limit.measure] for limit in case.limits)
    assert case.timed or case.memory
    assert case.question.strip()
    # A peak is computed only where the other side cannot be run, and then it is compared at a smaller shape.
    assert case.other_memory is None or case.agree_at is not None
    assert case.tolerance <= 5e-5 or case.agree is not None


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_the_two_sides_agree_on_short_inputs(case: Case) -> None:
    longest = 512 if case.agree else 300
    at = case.at._replace(Tq=min(case.at.Tq, longest), Tk=min(case.at.Tk, longest))
    if case.other_memory is not None:
        at = at._replace(H=2, Hkv=2, Tq=48, Tk=48)
    verdict = agree.check(dataclasses.replace(case, agree_at=at))
    assert verdict.agrees, verdict


def test_inputs_are_the_same_every_time_and_take_gradients_where_there_is_a_backward() -> None:
    case = find("relative-train")
    assert isinstance(case, Case)
    one, two = make_inputs(case), make_inputs(case)
    assert torch.equal(one.query, two.query) and torch.equal(one.extra["table"], two.extra["table"])
    assert set(one.leaves()) == {"query", "key", "value", "table"}
    assert not make_inputs(tiny()).leaves()
    results = run_side(tiny(backward=True), "ours", make_inputs(tiny(backward=True)))
    assert set(results) == {"output", "grad of query", "grad of key", "grad of value"}


def test_sparsemax_and_entmax_of_the_other_side_solve_their_problem() -> None:
    scores = torch.randn(7, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    for weights, power in ((sparsemax(scores), 1), (entmax15(scores), 2)):
        torch.testing.assert_close(weights.sum(-1), torch.ones(7, dtype=torch.float64))
        tau = scores / power - weights ** (1 / power)
        alive = weights > 0
        spread = tau.masked_fill(~alive, -torch.inf).amax(-1) - tau.masked_fill(~alive, torch.inf).amin(-1)
        assert float(spread.max()) < 1e-9 and not bool(alive.all())


# ---------------------------------------------------------------------------- refusing


def _off(inputs: Inputs) -> Result:
    return sdpa(inputs) + 1e-3


def _not_finite(inputs: Inputs) -> Result:
    output = sdpa(inputs)
    return output.masked_fill(torch.arange(output.shape[-1]) == 3, torch.nan)


def _wrong_gradient(inputs: Inputs) -> Result:
    output = sdpa(inputs)
    return 2 * output - output.detach()


def _more(inputs: Inputs) -> Result:
    return {"output": sdpa(inputs), "lse": inputs.query}


@pytest.mark.parametrize(
    ("ours", "backward", "where"),
    [
        (_off, False, "output"),
        (_not_finite, False, "output"),
        (_wrong_gradient, True, "grad of "),
        (_more, False, "only one side returned lse"),
    ],
)
def test_a_case_that_disagrees_is_refused(ours: object, backward: bool, where: str) -> None:
    case = tiny(ours=ours, backward=backward, limits=(Limit("slower", 1e9),))
    outcome = runner.run(case, threads=(1,), rounds=1)
    assert "the two sides disagree" in outcome.refused and where in outcome.refused
    assert not outcome.timings and not outcome.peaks and not outcome.good
    text = shown([outcome])
    assert "refused" in text and " ms" not in text and " µs" not in text
    assert outcome.as_json()["timings"] == []


def test_a_law_is_held_against_both_sides() -> None:
    case = find("dropout")
    assert isinstance(case, Case)
    small = dataclasses.replace(case, agree_at=case.at._replace(Tq=256, Tk=256))
    assert agree.check(small).agrees
    assert not agree.check(dataclasses.replace(small, ours=sdpa)).agrees
    assert not agree.check(dataclasses.replace(small, other=sdpa)).agrees


def test_a_difference_is_relative_to_the_other_side() -> None:
    other = torch.tensor([3.0, 4.0])
    assert agree.relative_error(other * 1.1, other) == pytest.approx(0.1)
    assert agree.relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert agree.relative_error(other, torch.tensor([3.0, torch.inf])) == torch.inf
    assert agree.relative_error(torch.tensor([3.0, torch.nan]), other) == torch.inf
    assert agree.relative_error(other[:1], other) == torch.inf


# ---------------------------------------------------------------------------- measuring


def test_limits_say_what_they_hold() -> None:
    assert Limit("slower", 1.8).met(1.8) and not Limit("slower", 1.8).met(1.81)
    assert Limit("faster", 8).met(8.0) and not Limit("faster", 8).met(7.9)
    assert Limit("memory", 75).met(75.0) and not Limit("memory", 75).met(76)
    assert str(Limit("faster", 8)) == "at least 8x faster" and str(Limit("seconds", 0.3)) == "at most 0.3 s"


def test_the_slower_side_is_the_slower_one() -> None:
    def twenty(inputs: Inputs) -> Result:
        output = sdpa(inputs)
        for _ in range(19):
            output = sdpa(inputs)
        return output

    threads = torch.get_num_threads()
    timing = measure.time_case(tiny(other=twenty, at=shape(1, 4, 128, 32)), threads=1, rounds=3)
    assert 5 < timing.ratio < 80 and timing.clock == "thread" and timing.rounds == 2
    assert torch.get_num_threads() == threads


def test_a_tiny_case_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    easy = tiny("easy", limits=(Limit("slower", 1000.0),))
    hard = tiny("hard", limits=(Limit("faster", 1000.0),))
    monkeypatch.setattr(command, "CASES", (easy, hard))
    file = tmp_path / "bench.json"
    words = ["--rounds", "2", "--threads", "1,2", "--json", str(file)]
    assert command.main([*words, "--only", "easy", "--check"]) == 0
    written = json.loads(file.read_text("utf-8"))
    (case,) = written["cases"]
    assert written["machine"]["torch"] == torch.__version__
    assert case["name"] == "easy" and case["difference"]["agrees"] and len(case["timings"]) == 2
    assert [timing["threads"] for timing in case["timings"]] == [1, 2]
    assert all(timing["ratio"] == timing["other"] / timing["ours"] for timing in case["timings"])
    assert [limit["met"] for limit in case["limits"]] == [True, True]
    assert command.main([*words, "--check"]) == 1
    assert command.main(words) == 0
    out = capsys.readouterr().out
    assert "met:" in out and "MISSED:" in out and "1 cases with a limit missed" in out
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


def test_a_process_that_fails_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "CASES", (tiny("not in the registry", memory=True),))
    assert command.main(["--threads", "1", "--rounds", "1", "--check"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "refused" in out and "MISSED" not in out


def test_the_list_measures_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run", lambda *_: pytest.fail("measured"))
    assert command.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert all(case.name in out for case in CASES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "nope*"], "no case matches nope*; there are: dot"),
        (["--threads", "x"], "expected thread counts such as 1,2; got 'x'"),
        (["--threads", "0"], "expected thread counts"),
        (["--rounds", "0"], "at least 1; got '0'"),
        (["--json", "/nowhere/at/all/x.json"], "there is no folder /nowhere/at/all"),
    ],
)
def test_wrong_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(words)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------------------- what was promised


def test_the_measured_peak_is_of_the_right_size() -> None:
    case = find("softcap")
    assert isinstance(case, Case)
    one_matrix = 4 * case.at.H * case.at.Tq * case.at.Tk / 2**20
    peak = measure.peak_memory(case, "other", threads=2)
    assert 2 * one_matrix < peak.mib < 6 * one_matrix


@pytest.mark.parametrize("name", ["dot-train-2048", "additive-train-2048", "observe"])
def test_memory_is_linear(name: str) -> None:
    case = find(name)
    assert isinstance(case, Case)
    (limit,) = case.limits
    peak = measure.peak_memory(case, "ours", threads=1)
    assert limit.met(peak.mib), f"{peak.mib:.0f} MiB: {limit}"


def test_what_is_observed_at_8192_is_what_the_weights_say() -> None:
    case = find("observe")
    assert isinstance(case, Case) and case.at.Tq == 8192 and case.tolerance == 1e-5
    assert agree.check(case).agrees


def test_importing_is_quick() -> None:
    case = find("import")
    assert isinstance(case, ImportCase)
    (limit,) = case.limits
    assert limit.met(measure.import_seconds(case, rounds=3))
