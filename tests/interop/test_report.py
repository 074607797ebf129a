"""`ferry report`: the page of a run is one well-formed file with its numbers in it, whatever the run."""
import json
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from support import ferry, ferry_json, run_ok


def write_run(folder, steps, spans=(), lines=()):
    folder.mkdir(exist_ok=True)
    text = [json.dumps({"step": step, "time": 1.7e9 + 2 * step, "data": data}) for step, data in steps]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in [*text, *lines]))
    for rank in {span["rank"] for span in spans}:
        (folder / f"timeline_rank{rank}.jsonl").write_text("".join(json.dumps(s) + "\n" for s in spans if s["rank"] == rank))
    return folder


def page_of(folder):
    """The page as XML; nothing of it comes from elsewhere, and every coordinate is a number."""
    text = (folder / "report.html").read_text()
    assert not re.search(r"<script|<link|<img|@import|url\(|https?://(?!www\.w3\.org/1999/xhtml)", text)
    for attribute in re.findall(r' (?:x|y|x1|x2|y1|y2|cx|cy|width|height|d)="([^"]*)"', text):
        assert re.fullmatch(r"[-MLZ0-9. ]*|device-width.*", attribute), attribute
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def texts(element):
    return " ".join("".join(element.itertext()).split())


def every(page, tag, of_class=None):
    found = page.iter("{http://www.w3.org/1999/xhtml}" + tag)
    return [one for one in found if of_class is None or of_class in one.get("class", "").split()]


def titles(page):
    return [texts(caption.find("{http://www.w3.org/1999/xhtml}b")) for caption in every(page, "figcaption")]


def test_curves_hold_every_value(work):
    losses = {step: 2 + math.sin(step) for step in range(1, 31)}
    run = write_run(work / "run", [(step, {"train/loss": loss, "train/lr": 1e-5, "other/thing": -step} | ({"val/loss": 2.5} if step == 30 else {}))
                                   for step, loss in losses.items()])
    done = run_ok("report", run)
    assert "steps    30, 4 metrics" in done.stdout and f"page     {run}/report.html" in done.stdout
    page = page_of(run)
    assert titles(page) == ["Loss", "Learning rate", "other/thing"]
    columns = [texts(title) for title in every(every(page, "figure")[0], "title")]
    assert len(columns) == 30
    for step, loss in losses.items():
        assert f"step {step} training: {loss:.6g}" in columns[step - 1]
    assert "validation: 2.5" in columns[29]
    # The curve itself: higher losses lie higher, by the same scale.
    dots = [float(dot.get("cy")) for dot in every(every(page, "figure")[0], "circle", "c0")]
    spread = (max(dots) - min(dots)) / (max(losses.values()) - min(losses.values()))
    for dot, loss in zip(dots, losses.values(), strict=True):
        assert abs((dot - min(dots)) - (max(losses.values()) - loss) * spread) < 0.2


def test_json_summarises_each_metric(work):
    run = write_run(work / "run", [(1, {"a": 3}), (2, {"a": None}), (4, {"a": -1, "b": None}), (3, {"a": 4})], lines=['{"step": 5, "da'])
    report = ferry_json("report", run / "metrics.jsonl")
    assert report["last_step"] == 4 and report["unreadable_lines"] == 1
    assert report["metrics"] == {"a": {"steps": 4, "not_finite": 1, "first": 3.0, "last": -1.0, "least": -1.0, "mean": 2.0, "most": 4.0},
                                 "b": {"steps": 1, "not_finite": 1}}
    page = texts(page_of(run))
    assert "a is not finite in 1 of 4 steps, at step 2 first." in page
    assert "1 lines of the file are no metrics." in page


def test_timeline_has_a_lane_for_each_rank(work):
    spans = [dict(name=name, start=100 + start, end=100 + end, rank=rank, step=step)
             for step in (1, 2) for rank in (0, 1, 10)
             for name, start, end in [("step", 0, 1), ("forward", 0.1, 0.4), ("backward <b>", 0.4, 0.9)]]
    run = write_run(work / "run", [(1, {}), (2, {})], spans)
    run_ok("report", run, "--step", 1, "--output", run / "report.html")
    page = page_of(run)
    (svg,) = every(page, "svg", "timeline")
    assert "Step 1, rank by rank" in texts(page)
    assert [texts(label) for label in every(svg, "text", "layer")] == ["rank 0", "rank 1", "rank 10"]
    drawn = every(svg, "g", "span")
    assert len(drawn) == 9
    rectangles = [every(span, "rect")[0] for span in drawn[:3]]
    outer, forward, backward = ({key: float(one.get(key)) for key in ("x", "y", "width")} for one in rectangles)
    assert forward["y"] == backward["y"] > outer["y"]
    assert abs((forward["x"] - outer["x"]) / outer["width"] - 0.1) < 0.01 and abs(backward["width"] / outer["width"] - 0.5) < 0.01
    assert texts(every(drawn[2], "title")[0]) == "backward <b> 500 ms, from 400 ms on"
    assert "frame" in drawn[0].get("class") and "frame" not in drawn[1].get("class")


@pytest.mark.parametrize("data", [{}, {"train/loss": 0}, {"train/loss": None}, {"train/loss": 1e300, "train/grad_norm": 1e-300}, {"x" * 500: -1e-9},
                                  {"train/grad_norm": -1, "<&\"'>\u0001": 5}], ids=lambda data: str(data)[:30])
@pytest.mark.parametrize("steps", [1, 2, 1500])
def test_any_run_makes_a_page(work, data, steps):
    run = write_run(work / "run", [(step, data if step % 3 else {}) for step in range(1, steps + 1)])
    run_ok("report", run, "--quiet")
    page_of(run)


def test_the_configuration_of_the_run_is_shown(work):
    run = write_run(work / "run", [(1, {})])
    (run / "config.toml").write_text('[model]\npath = "a<b>&c"\n')
    run_ok("report", run)
    (text,) = every(page_of(run), "pre")
    assert text.text == '[model]\npath = "a<b>&c"\n'


def test_the_file_logger_of_verl_is_read(work):
    (work / "log.jsonl").write_text('{"step": 1, "data": {"actor/pg_loss": 0.5, "critic/score/mean": 0.25}}\n')
    run_ok("report", work / "log.jsonl")
    assert titles(page_of(work)) == ["Score", "Policy loss"]


def test_a_run_without_metrics_is_an_error(work):
    assert "holds no metrics.jsonl" in run_ok("report", work, code=2).stderr
    assert "none" in run_ok("report", work / "none", code=2).stderr
    run = write_run(work / "run", [(1, {})])
    assert "--step 7" in run_ok("report", run, "--step", 7, code=2).stderr
    assert not (run / "report.html").exists()
    (run / "metrics.jsonl").write_bytes(bytes(range(256)) * 4)
    assert ferry("report", run).returncode == 0
    page_of(run)
