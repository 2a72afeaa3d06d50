"""The two studies: their measures against plain formulas, and pages that hold nothing but the commands' numbers."""

import json
import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from regard.look._model import load_model
from studies import chart, files
from studies.context import __main__ as context
from studies.context import measure as context_measure
from studies.context import page as context_page
from studies.context.measure import Seen
from studies.context.sentences import WORDS, Use
from studies.scaling import measure as scaling
from studies.scaling import page as scaling_page
from studies.scaling import train, trained

ROOT = Path(__file__).parents[1]
SAVED = ROOT / "docs" / "studies"


def saved(name):
    return json.loads((SAVED / f"{name}.json").read_text(encoding="utf-8"))


# ---------------------------------------------------------------------------- pages


@pytest.mark.parametrize(("name", "page"), [("scaling", scaling_page), ("context", context_page)])
def test_the_saved_page_and_plots_are_made_of_the_saved_numbers(name, page):
    for file, text in page.contents(saved(name)).items():
        assert (SAVED / file).read_text(encoding="utf-8") == text, f"write it with: python -m studies.{name}"


def test_the_page_of_scaling_says_what_its_numbers_say():
    found = saved("scaling")
    rows = found["random"]
    for row in rows:
        assert row["unscaled"]["variance"] == pytest.approx(row["d_k"], rel=0.15)
        assert row["scaled"]["variance"] == pytest.approx(1, rel=0.15)
        assert row["unscaled"]["gradient"] > row["scaled"]["gradient"]
    assert rows[-1]["unscaled"]["typical_gradient"] < rows[-1]["scaled"]["typical_gradient"] / 4
    assert rows[-1]["unscaled"]["jacobian"] < rows[-1]["scaled"]["jacobian"] / 4
    assert rows[0]["unscaled"]["jacobian"] > rows[0]["scaled"]["jacobian"]
    never = float("inf")
    for optimizer in ("sgd", "adam"):
        runs = [row for row in found["trained"] if row["optimizer"] == optimizer]

        def steps(row, side):
            return sorted(never if step is None else step for step in row[side]["reached"])[1]

        assert steps(runs[-1], "scaled") <= steps(runs[1], "scaled")
        for row in runs[2:]:
            assert steps(row, "scaled") < steps(row, "unscaled")
    assert all(row["scaled"]["variance"] > 1.5 for row in found["minilm"])


def test_the_page_of_context_says_what_its_numbers_say():
    found = saved("context")
    shown, hidden = found["shown"], found["hidden"]
    assert shown["other_sense"][-1] > 10 * shown["other_word"][-1]
    assert shown["nearest"][0] < 0.5 and shown["nearest"][1] > 0.8 and shown["nearest"][-1] > 0.9
    gap, left = (kind["same_sense"][-1] - kind["other_sense"][-1] for kind in (shown, hidden))
    assert 0 < left < gap / 4
    assert hidden["nearest"][-1] < shown["nearest"][-1] - 0.2
    assert max(row["special"] for row in found["attention"]) > 0.7


def test_a_page_is_broken_at_120_and_tables_and_code_stay():
    text = (
        "# Title\n\n"
        + "word " * 60
        + "\n- item "
        + "word " * 40
        + "\n- two\n\n| a | b |\n\n```sh\na  b\n```\n"
    )
    lines = files.wrapped(text).splitlines()
    assert max(len(line) for line in lines) <= 120
    assert "| a | b |" in lines and "a  b" in lines and "- two" in lines
    assert " ".join(files.wrapped(text).split()) == " ".join(text.split())


def test_a_quick_page_says_so():
    assert "A quick run" in context_page.contents(saved("context"), quick=True)["context.md"]
    assert "A quick run" not in context_page.contents(saved("context"))["context.md"]


def test_files_are_written_all_or_none(tmp_path):
    with pytest.raises(TypeError):
        files.write(tmp_path, {"a.md": "text", "b.md": None})
    assert list(tmp_path.iterdir()) == []
    files.write(tmp_path / "new", {"a.md": "text", "b.md": "more"})
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a.md", "b.md"]


# ---------------------------------------------------------------------------- charts


def panel(**changes):
    lines = [chart.Line("one & two", [1, 10, 100], [0.0, 0.5, 1.0])]
    return chart.Panel(**{"title": "<t>", "x_label": "x", "lines": lines, "low": 0.0, "high": 1.0, **changes})


def points(svg):
    (line,) = [part for part in ElementTree.fromstring(svg).iter() if part.tag.endswith("polyline")]
    return [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]


def test_a_chart_is_xml_and_its_points_are_where_the_axes_say():
    left, right = chart.LEFT, chart.WIDTH - chart.RIGHT
    bottom, top = chart.HEIGHT - chart.BOTTOM, chart.TOP
    (x0, y0), (x1, y1), (x2, y2) = points(chart.svg([panel(log_x=True)], 1, "a & b"))
    assert (x0, x2, y0, y2) == (left, right, bottom, top)
    assert (x1, y1) == ((left + right) / 2, (bottom + top) / 2)
    (_, _), (x1, _), (_, _) = points(chart.svg([panel()], 1, "linear"))
    assert x1 == pytest.approx(left + 9 / 99 * (right - left), abs=0.1)


def test_what_lies_outside_is_drawn_at_the_edge():
    lines = [chart.Line("one", [1, 2], [-5.0, 7.0])]
    (_, low), (_, high) = points(chart.svg([panel(lines=lines)], 1, "edges"))
    assert (low, high) == (chart.HEIGHT - chart.BOTTOM, chart.TOP)


def test_ticks():
    assert chart._ticks(0, 6, False) == [0, 1, 2, 3, 4, 5, 6]
    assert chart._ticks(0.0, 1.0, False) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert chart._ticks(4, 1024, True) == [4, 16, 64, 256, 1024]
    assert chart._ticks(0.1, 10000, True) == pytest.approx([0.1, 1, 10, 100, 1000, 10000])


# ---------------------------------------------------------------------------- scaling


@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_the_figures_are_their_formulas(scale):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, T, 5, dtype=torch.float64) for T in (4, 6, 6))
    found = scaling.figures(query, key, value, scale, seed=3)
    factor = 5**-0.5 if scale is None else scale
    scores = factor * query[0, 0] @ key[0, 0].T
    weights = torch.softmax(scores, -1)
    assert found["variance"] == pytest.approx(float(scores.var(-1).mean()))
    assert found["entropy"] == pytest.approx(float(-(weights * weights.log()).sum(-1).mean()) / math.log(6))
    assert found["largest"] == pytest.approx(float(weights.amax(-1).mean()))
    jacobians = [torch.autograd.functional.jacobian(lambda s: torch.softmax(s, -1), row) for row in scores]
    assert found["jacobian"] == pytest.approx(float(torch.stack([j.norm() for j in jacobians]).median()))
    upstream = torch.randn(1, 1, 4, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)[0, 0]
    rows = [factor * (j @ (value[0, 0] @ g)) @ key[0, 0] for j, g in zip(jacobians, upstream, strict=True)]
    squares = torch.stack(rows).square()
    assert found["gradient"] == pytest.approx(float(squares.mean().sqrt()))
    assert found["typical_gradient"] == pytest.approx(float(squares.mean(-1).median().sqrt()))


def test_measuring_leaves_its_tensors_alone():
    query, key, value = (torch.randn(1, 1, 3, 4, dtype=torch.float64) for _ in range(3))
    scaling.both(query, key, value)
    assert not query.requires_grad and query.grad is None


def test_the_task_can_be_solved_by_looking_the_query_up():
    batch = train.draw(50, torch.Generator().manual_seed(0))
    assert all(len(set(row)) == train.LENGTH for row in batch.keys.tolist())
    for keys, classes, query, target in zip(*vars(batch).values(), strict=True):
        assert classes[keys == query] == target


def test_the_small_model_learns_and_the_same_seed_gives_the_same_run():
    run = train.train(16, None, 0, optimizer="sgd", steps=40, every=20)
    again = train.train(16, None, 0, optimizer="sgd", steps=40, every=20)
    assert run.curve == again.curve
    assert run.curve[0][1] < 0.2 and run.curve[-1][1] > 0.8
    assert [step for step, _ in run.curve] == [0, 20, 40]


def test_queries_and_keys_start_with_entries_of_variance_1():
    batch = train.draw(400, torch.Generator().manual_seed(1))
    query, key, _ = train.Lookup(64, None, 0).heads(batch)
    assert float(query.detach().var()) == pytest.approx(1, rel=0.1)
    assert float(key.detach().var()) == pytest.approx(1, rel=0.1)


def test_without_the_model_the_page_says_what_was_left_out(monkeypatch):
    monkeypatch.setattr(trained._fetch, "is_fetched", lambda package: False)
    assert trained.minilm() is None
    found = saved("scaling") | {"minilm": None}
    assert "Left out: all-MiniLM-L6-v2" in scaling_page.contents(found)["scaling.md"]


# ---------------------------------------------------------------------------- context


def seen(word, sense, *vectors, weights=((0.5, 0.25, 0.125, 0.125),)):
    use = Use("the word cue end", ("cue",))
    tokens, special = ["[CLS]", "word", "cue", "end"], [True, False, False, False]
    layers = torch.tensor([weights] * (len(vectors) - 1), dtype=torch.float64)
    return Seen(word, sense, use, 1, tokens, special, torch.tensor(vectors, dtype=torch.float64), layers)


def test_cosines_are_split_by_sense_and_word():
    uses = [
        seen("a", "one", (1.0, 0.0), (1.0, 0.0)),
        seen("a", "one", (0.0, 2.0), (3.0, 0.0)),
        seen("a", "two", (1.0, 0.0), (0.0, 1.0)),
        seen("a", "two", (0.0, 1.0), (0.0, 1.0)),
        seen("b", "one", (-1.0, 0.0), (-1.0, 0.0)),
        seen("b", "one", (-1.0, 0.0), (-1.0, 0.0)),
    ]
    found = context_measure.by_depth(uses)
    assert found["same_sense"] == pytest.approx([1 / 3, 1.0])
    assert found["other_sense"] == pytest.approx([0.5, 0.0])
    assert found["other_word"] == pytest.approx([-0.5, -0.5])
    assert found["nearest"] == pytest.approx([1 / 3, 1.0])
    assert context_measure.steps(uses[1:2]) == pytest.approx([0.0])
    assert context_measure.steps(uses[:1]) == pytest.approx([1.0])


def test_shares_and_heads():
    weights = ((0.5, 0.25, 0.125, 0.125), (0.1, 0.2, 0.7, 0.0))
    use = seen("a", "one", (1.0,), (1.0,), weights=weights)
    (row,) = context_measure.shares([use])
    assert row == pytest.approx(
        {"itself": 0.225, "cues": 0.4125, "special": 0.3, "rest": 0.0625, "evenly": 0.25}
    )
    assert context_measure.heads([use]).tolist() == [pytest.approx([0.125, 0.7])]
    assert context_measure.most_attended(use, 0, 1, 2) == [("cue", 0.7), ("word", 0.2)]


def test_a_word_is_seen_in_a_model_and_its_cues_can_be_hidden(bert_folder):
    loaded = load_model(str(bert_folder))
    use = Use("the cat sat on the mat", ("mat",))
    shown, hidden = (
        context_measure.look(loaded, "cat", "animal", use, hide_cues=hide) for hide in (False, True)
    )
    assert shown.vectors.shape == (3, 24) and shown.weights.shape == (2, 3, 8)
    assert shown.tokens[shown.place] == "cat" and [shown.tokens[cue] for cue in shown.cues] == ["mat"]
    assert torch.equal(shown.vectors[0], hidden.vectors[0])
    assert (shown.vectors[1] - hidden.vectors[1]).abs().max() > 1e-4
    assert (shown.weights[:, :, shown.cues] > 0).all() and (hidden.weights[:, :, hidden.cues] == 0).all()
    assert torch.allclose(hidden.weights.sum(-1), torch.ones(2, 3, dtype=torch.float64))


@pytest.mark.parametrize(
    "use",
    [Use("the dog sat on the mat", ()), Use("the cat sat on the cat", ()), Use("the cat sat", ("mat",))],
)
def test_a_sentence_without_its_word_or_cue_is_refused(bert_folder, use):
    with pytest.raises(ValueError, match="expected each of cat.*to be one token of tiny-bert"):
        context_measure.look(load_model(str(bert_folder)), "cat", "animal", use)


def test_every_sense_has_four_sentences_with_cues_in_them():
    for word, senses in WORDS.items():
        assert len(senses) == 2
        for uses in senses.values():
            assert len(uses) == 4
            for sentence, cues in uses:
                words = sentence.lower().replace(".", "").replace(",", "").split()
                assert words.count(word) == 1 and set(cues) <= set(words) and word not in cues and cues


# ---------------------------------------------------------------------------- commands


def run(name, *arguments, **environment):
    command = [sys.executable, "-m", f"studies.{name}", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)


def test_without_the_model_the_command_says_how_to_get_it(tmp_path):
    done = run("context", "--out", str(tmp_path / "out"), XDG_CACHE_HOME=str(tmp_path / "empty"))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "studies: the model minilm is not here yet; fetch it once with: regard fetch minilm\n"
    )
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_folder_s_place_is_named_before_the_study_runs(tmp_path):
    (tmp_path / "taken").write_text("mine")
    for out in ("taken", "taken/below"):
        done = run("scaling", "--quick", "--out", str(tmp_path / out))
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr == (
            f"studies: --out: expected a folder, or a name for a new one; {tmp_path / 'taken'} is a file\n"
        )
    assert (tmp_path / "taken").read_text() == "mine"


def test_the_command_of_scaling_writes_its_files(tmp_path):
    done = run("scaling", "--quick", "--out", str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "empty"))
    assert done.returncode == 0, done.stderr
    names = ["scaling-random.svg", "scaling-trained.svg", "scaling.json", "scaling.md"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert "A quick run" in (tmp_path / "scaling.md").read_text(encoding="utf-8")


@pytest.mark.network
def test_the_saved_numbers_of_context_are_the_model_s(minilm):
    found = json.loads(files.numbers(context.found_in(load_model("minilm"), list(WORDS))))
    expected = saved("context")
    assert found["model"] == expected["model"] and found["uses"] == expected["uses"] == 32
    for kind in ("shown", "hidden"):
        for name, values in expected[kind].items():
            assert found[kind][name] == pytest.approx(values, abs=1e-3)
    for ours, theirs in zip(found["attention"], expected["attention"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.network
def test_the_saved_numbers_of_scaling_are_the_model_s(minilm):
    for ours, theirs in zip(trained.minilm(), saved("scaling")["minilm"], strict=True):
        for side in ("scaled", "unscaled"):
            assert ours[side] == pytest.approx(theirs[side], rel=1e-2, abs=1e-4)


def test_the_saved_numbers_of_random_projections_are_what_is_measured():
    found = saved("scaling")
    settings = found["settings"]
    widths = settings["random_widths"][:3]
    measured = scaling.random_projections(widths, settings["keys"], settings["queries"], settings["seeds"][0])
    for ours, theirs in zip(measured, found["random"], strict=False):
        for side in ("scaled", "unscaled"):
            assert ours[side] == pytest.approx(theirs[side], rel=1e-3)
