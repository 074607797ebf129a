"""`ferry report`: the page of a run is one well-formed file with its numbers in it, whatever the run."""
import json
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from support import ferry_json, refuse, run_ok


def write_run(folder, steps, spans=(), lines=()):
    folder.mkdir(exist_ok=True)
    text = [json.dumps({"step": step, "time": 1.7e9 + 2 * step, "data": data}) for step, data in steps]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in [*text, *lines]))
    for rank in {span["rank"] for span in spans}:
        (folder / "timeline").mkdir(exist_ok=True)
        (folder / "timeline" / f"timeline_rank{rank}.jsonl").write_text("".join(json.dumps(s) + "\n" for s in spans if s["rank"] == rank))
    return folder


def page_of(folder):
    """The page as XML; nothing of it comes from elsewhere, and every coordinate is a number."""
    text = (folder / "report.html").read_text()
    assert not re.search(r"<script|<link|<img|@import|url\(|https?://(?!www\.w3\.org/1999/xhtml)", text)
    for attribute in re.findall(r' (?:x|y|x1|x2|y1|y2|cx|cy|width|height|d)="([^"]*)"', text):
        assert re.fullmatch(r"[-MLZ0-9. ]*|device-width.*", attribute), attribute
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def score(n):
    return 0.1 * (n % 4)


def write_samples(folder, steps, count=8, **more):
    folder.mkdir(parents=True)
    for step in steps:
        rows = [{"input": f"prompt {step}-{n}", "output": f"answer {n}", "gts": f"truth {n}", "score": score(n), "step": step} | more for n in range(count)]
        (folder / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def texts(element):
    return " ".join("".join(element.itertext()).split())


def every(page, tag, of_class=None):
    found = page.iter("{http://www.w3.org/1999/xhtml}" + tag)
    return [one for one in found if of_class is None or of_class in one.get("class", "").split()]


def titles(page):
    return [texts(caption.find("{http://www.w3.org/1999/xhtml}b")) for caption in every(page, "figcaption")]


def pointers(figure, of_class="over-steps"):
    (svg,) = every(figure, "svg", of_class)
    return [texts(title) for title in every(svg, "title")]


def test_curves_hold_every_value(work):
    losses = {step: 2 + math.sin(step) for step in range(1, 31)}
    run = write_run(work / "run", [(step, {"train/loss": loss, "train/lr": 1e-5, "other/thing": -step} | ({"val/loss": 2.5} if step == 30 else {}))
                                   for step, loss in losses.items()])
    done = run_ok("report", run)
    assert "steps    30, 4 metrics" in done.stdout and f"page     {run}/report.html" in done.stdout
    page = page_of(run)
    assert titles(page) == ["Loss", "Learning rate", "other/thing"]
    columns = pointers(every(page, "figure")[0])
    assert len(columns) == 30
    for step, loss in losses.items():
        assert f"step {step} training: {loss:.6g}" in columns[step - 1]
    assert "validation: 2.5" in columns[29]
    # The curve itself: higher losses lie higher, by the same scale.
    dots = [float(dot.get("cy")) for dot in every(every(page, "svg", "over-steps")[0], "circle", "c0")]
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


def test_programs_beside_a_rank_have_a_lane_of_their_own(work):
    spans = [dict(name=name, start=100 + start, end=100 + end, rank=rank, step=1)
             for rank in (0, 1) for name, start, end in [("gen", 0, 1), *([("tool/search", .1 * n, .1 * n + .25) for n in range(7)] if rank else [])]]
    run = write_run(work / "run", [(1, {})], spans)
    run_ok("report", run)
    (svg,) = every(page_of(run), "svg", "timeline")
    assert [texts(label) for label in every(svg, "text", "layer")] == ["rank 0", "rank 1", "programs"]
    tops = [float(every(span, "rect")[0].get("y")) for span in every(svg, "g", "span")[2:]]
    assert tops == tops[:3] + tops[:3] + tops[:1] and len(set(tops)) == 3  # a row is taken again as soon as it is free
    assert "tool/search 875 ms" in texts(page_of(run))


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
    assert "metrics.jsonl: holds no metrics" in run_ok("report", run, code=2).stderr
    assert not (run / "report.html").exists()


# ------------------------------------------------------------------------------------------ reinforcement learning

PHASES = ["gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights", "testing", "save_checkpoint"]


def rl_step(step):
    """A line of metrics as verl writes it."""
    data = {f"critic/{name}/{statistic}": value for name in ("score", "rewards", "advantages", "returns")
            for statistic, value in (("mean", step / 40), ("max", 1), ("min", 0))}
    data |= {f"response_length/{name}": 10 for name in ("mean", "max", "min", "clip_ratio")}
    data |= {"actor/ppo_kl": 1e-4, "actor/kl_loss": 0.01 * step, "actor/entropy": 1 / step, "actor/pg_clipfrac": 0.01, "actor/pg_clipfrac_lower": 0}
    if step % 5 == 0:
        data |= {"val-core/a/b/acc/mean@4": step / 20, "val-core/a/b/acc/best@4/mean": 1, "val-core/a/b/acc/best@4/std": 0.1,
                 "val-aux/a/b/acc/worst@4/mean": 0, "val-aux/a/b/acc/best@2/mean": 0.5, "val-aux/a/b/reward/mean@4": 0.25, "val-core/c/reward/mean@1": 0.75}
    return data


def test_the_curves_of_reinforcement_learning(work):
    run = write_run(work / "run", [(step, rl_step(step)) for step in range(1, 21)])
    run_ok("report", run)
    page = page_of(run)
    assert titles(page) == ["Validation: a/b/acc", "Validation: c/reward mean@1", "Score", "KL divergence", "Share of tokens clipped", "Entropy",
                            "Response length", "Share of answers cut off at the limit", "critic/advantages", "critic/returns", "critic/rewards",
                            "Validation: a/b/reward mean@4"]
    points = pointers(every(page, "figure")[0])
    assert points == [f"step {step} mean@4: {step / 20:g} best@4: 1 worst@4: 0" for step in (5, 10, 15, 20)]
    assert "1mean@4 of a/b/acc, 0.25 at first" in [texts(tile) for tile in every(page, "div", "tile")]


def test_the_phases_of_a_step_are_told_apart(work):
    spans = [dict(name="step", start=100, end=100 + len(PHASES), rank=0, step=1)]
    for i, phase in enumerate(PHASES):
        spans.append(dict(name=phase, start=100 + i, end=101 + i, rank=0, step=1))
        spans.append(dict(name="inner", start=100 + i, end=100.5 + i, rank=0, step=1))
    run = write_run(work / "run", [(1, {})], spans)
    run_ok("report", run)
    drawn = {texts(every(span, "title")[0]).split()[0]: span.get("class") for span in every(page_of(run), "g", "span")}
    assert list(drawn) == ["step", "gen", "inner", *PHASES[1:]]
    assert drawn.pop("step") == "span frame" and len(set(drawn.values())) == len(drawn)


def steps_of(page):
    """{step: [(score, prompt, answer, truth)]} of the samples that a page shows, in its order."""
    shown = {}
    for label, step in zip(every(every(page, "div", "steps")[0], "label"), every(page, "div", "step"), strict=True):
        shown[int(texts(label))] = [(float(texts(every(one, "span", "score")[0])), *map(texts, every(one, "pre")[:3])) for one in every(step, "details")]
    return shown


def test_samples_can_be_read(work):
    run = write_run(work / "run", [(step, {}) for step in (1, 2)])
    write_samples(run / "rollouts", [1, 2], acc=0.5)
    assert f"samples  {run}/rollouts, 2 steps" in run_ok("report", run).stdout
    page = page_of(run)
    shown = steps_of(page)
    assert list(shown) == [1, 2]
    for step, rows in shown.items():
        assert rows == [(pytest.approx(score(n)), f"prompt {step}-{n}", f"answer {n}", f"truth {n}") for n in (3, 7, 2, 6, 1, 5, 0, 4)]
    assert "Step 2: 8 answers, mean score 0.15: 2 × 0.3, 2 × 0.2, 2 × 0.1, 2 × 0." in texts(page)
    # A style sheet alone does it: who opens the page picks the step and the order.
    assert [(one.get("id"), one.get("checked")) for one in every(page, "input")] == [
        ("Samples--rollouts-best", "checked"), ("Samples--rollouts-worst", None), ("Samples--rollouts-logged", None),
        ("Samples--rollouts-step-1", None), ("Samples--rollouts-step-2", "checked")]
    assert [one.get("style") for one in every(page, "details")[:3]] == ["--row: 3", "--row: 7", "--row: 2"]


def test_what_is_left_out_of_many_samples_is_said(work):
    run = write_run(work / "run", [(1, {})])
    write_samples(run / "validations", range(0, 500, 5), count=40)
    lines = [{"input": "x" * 5000 + "ü" * 5000, "output": "</pre>\u0001\uffff]]>", "gts": ["a", 1], "score": None, "extra": {"b": "<"}}]
    (run / "validations/495.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "not JSON\n")
    (work / "more").mkdir()
    (work / "more/7.jsonl").write_text("")
    report = ferry_json("report", run, "--samples", work / "more")
    assert report["samples"] == [{"folder": f"{run}/validations", "steps": 100}, {"folder": f"{work}/more", "steps": 1}]
    page = page_of(run)
    labels = [int(texts(label)) for label in every(every(page, "div", "steps")[0], "label")]
    assert len(labels) == 21 and labels[0] == 0 and labels[-1] == 495 and labels == sorted(labels)
    first, *_, last = every(page, "div", "step")[:21]
    assert "Step 0: 40 answers" in texts(first) and "20 of them are shown" in texts(first)
    assert len(every(first, "details")) == 20
    assert [texts(one) for one in every(first, "span", "score")] == ["0.3"] * 5 + ["0.2"] * 5 + ["0.1"] * 5 + ["0"] * 5
    assert texts(every(last, "span", "score")[0]) == "none" and "12,000 bytes are left out here" in texts(last)
    assert '["a",1]' in texts(last) and "</pre>??]]>" in texts(last)
    assert "21 of 100 steps are here; 1 lines are no answers" in texts(page)
    assert "Step 7: 0 answers, without a score" in texts(page)
    assert "--samples" in run_ok("report", run, "--samples", work, code=2).stderr
    # A step that is asked for is there.
    assert 35 not in labels
    run_ok("report", run, "--step", 35)
    assert "Step 35: 40 answers" in texts(page_of(run))
    assert "--step 36" in run_ok("report", run, "--step", 36, code=2).stderr


def tool_call(expression, **answer):
    return {"question": {"session": 1, "name": "calculator", "arguments": {"expression": expression}}, "answer": answer}


def action(text, **answer):
    return {"question": {"session": 1, "method": "step", "action": text}, "answer": answer}


SESSIONS = [  # the answer, its exchanges, and what is read of it
    ("I ask.[17*3] told 51 behind <it>.", [tool_call("17*3", content="51", reward=.5)],
     [("model", "", "I ask.[17*3] told"), ("calculator", '{"expression":"17*3"}, reward 0.5', "51"), ("model", "", "behind <it>.")]),
    ("left go on right", [{"question": {"session": 1, "method": "reset"}, "answer": {"observation": "left go"}}, action("left", observation="go on"),
                          action("right", observation="well", reward=1, done=True)],
     [("model", "", "left"), ("environment", "", "go on"), ("model", "", "right"), ("environment", "reward 1, done", "well")]),
    ("a Error executing tool 'calculator': no", [tool_call("9", error="no"), tool_call("8", content="unheard")],
     [("model", "", "a"), ("calculator", '{"expression":"9"}, error', "Error executing tool 'calculator': no"), ("calculator", '{"expression":"8"}', "unheard")]),
    ("at once", [], None),
]


def test_answers_are_read_turn_by_turn(work):
    run = write_run(work / "run", [(1, {}), (2, {})])
    for step in (1, 2):
        (run / "rollouts").mkdir(exist_ok=True)
        rows = [{"input": "p", "output": output, "gts": None, "score": -n, "step": step} for n, (output, _, _) in enumerate(SESSIONS)]
        (run / f"rollouts/{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "sessions").mkdir()
    journal = [json.dumps({"session": n, "exchanges": exchanges}) + "\n" for n, (_, exchanges, _) in enumerate(SESSIONS)]
    (run / "sessions/1.jsonl").write_text("".join(journal))
    (run / "sessions/2.jsonl").write_text("".join(journal[1:]))  # of other answers
    run_ok("report", run)
    first, second = every(page_of(run), "div", "step")
    for details, (output, _, turns) in zip(every(first, "details"), SESSIONS, strict=True):
        found = [(texts(every(turn, "b")[0]), texts(every(turn, "span")[0]), texts(every(turn, "pre")[0])) for turn in every(details, "li")]
        assert found == (turns or [])
        if turns is None: assert texts(every(details, "pre")[1]) == output
    assert not every(second, "li")


def test_one_curve_of_several_runs_is_a_picture(work):
    for seed in range(3):
        write_run(work / f"seed{seed}", [(step, {"val-core/a/acc/mean@1": (step + seed) / 30}) for step in range(0, 21, 5)])
    runs = [work / f"seed{seed}" for seed in range(3)]
    run_ok("report", *runs, "--curve", "val-core/a/acc/mean@1", "--svg", work / "out.svg")
    text = (work / "out.svg").read_text()
    assert not re.search(r"<script|<image|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", text)
    svg = ElementTree.fromstring(text)
    words = [texts(one) for one in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert words[:4] == ["val-core/a/acc/mean@1", "seed0", "seed1", "seed2"] and words[-1] == "step"
    dots = {colour: [float(dot.get("cy")) for dot in svg.iter("{http://www.w3.org/2000/svg}circle") if dot.get("class") == f"dot {colour}"]
            for colour in ("c0", "c1", "c2")}
    assert all(len(heights) == 5 and heights == sorted(heights, reverse=True) for heights in dots.values())
    assert all(low > middle > high for low, middle, high in zip(*dots.values()))


def test_a_curve_over_seconds_has_each_run_begin_at_its_first_metrics(work):
    for name, begin, pace in (("slow", 1000, 20), ("fast", 5000, 10)):
        (work / name).mkdir()
        (work / name / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "time": begin + pace * step, "data": {"x": step}}) + "\n" for step in range(6)))
    run_ok("report", work / "slow", work / "fast", "--curve", "x", "--svg", work / "out.svg", "--over", "seconds")
    svg = ElementTree.fromstring((work / "out.svg").read_text())
    words = [texts(one) for one in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert words[-1] == "second" and "100" in words
    dots = {colour: [float(dot.get("cx")) for dot in svg.iter("{http://www.w3.org/2000/svg}circle") if dot.get("class") == f"dot {colour}"]
            for colour in ("c0", "c1")}
    assert dots["c0"][0] == dots["c1"][0] and dots["c0"][1] == dots["c1"][2] and dots["c0"][2] == dots["c1"][4]
    (work / "slow/metrics.jsonl").write_text(json.dumps({"step": 1, "data": {"x": 1}}) + "\n")  # of verl
    said = run_ok("report", work / "slow", "--curve", "x", "--svg", work / "out.svg", "--over", "seconds", code=2).stderr
    assert "says of no step when it was" in said


def test_a_page_has_its_curves_over_the_wall_clock(work):
    """Steps of unlike length; validation at some of them."""
    run, times = work / "run", [0, 40, 60, 400, 420]
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "time": 1.7e9 + time, "data": {"train/loss": step} | ({"val/loss": 9} if step == 3 else {})})
                                               + "\n" for step, time in enumerate(times)))
    run_ok("report", run)
    page = page_of(run)
    assert [(one.get("id"), one.get("checked")) for one in every(page, "input")] == [("axis-steps", "checked"), ("axis-time", None)]
    assert texts(every(page, "p", "axes")[0]) == "over stepsminutes"
    (figure,) = every(page, "figure")
    assert pointers(figure, "over-time") == ["minute 0 training: 0", "minute 0.6667 training: 1", "minute 1 training: 2", "minute 6.667 training: 3 validation: 9",
                                             "minute 7 training: 4"]
    places = {name: [float(dot.get("cx")) for dot in every(every(figure, "svg", name)[0], "circle", "c0")] for name in ("over-steps", "over-time")}
    for name, expected in (("over-steps", [0, .25, .5, .75, 1]), ("over-time", [time / 420 for time in times])):
        first, *_, last = places[name]
        assert [(place - first) / (last - first) for place in places[name]] == pytest.approx(expected, abs=2e-3)
    # A log without times, and one whose clock went back, have no such axis.
    for lines in ([{"step": 1, "data": {"x": 1}}, {"step": 2, "data": {"x": 2}}], [{"step": 1, "time": 9, "data": {"x": 1}}, {"step": 2, "time": 8, "data": {"x": 2}}]):
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        run_ok("report", run)
        assert not every(page_of(run), "input") and not every(page_of(run), "svg", "over-time") and len(every(page_of(run), "figure")) == 1


def test_several_runs_are_compared_on_one_page(work):
    for name, pace, more in (("sync", 20, {"val-core/a/acc/mean@1": .5}), ("async", 10, {"perf/trainer/idle_ratio": 0.25})):
        write_run(work / name, [(step, {"critic/score/mean": step / (8 if name == "sync" else 16)} | (more if step % 2 == 0 else {})) for step in range(5)])
        lines = [json.loads(line) | {"time": 1e9 + pace * step} for step, line in enumerate((work / name / "metrics.jsonl").read_text().splitlines())]
        (work / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "expected --output" in run_ok("report", work / "sync", work / "async", code=2).stderr
    assert "are of one" in run_ok("report", work / "sync", work / "async", "--json", "-o", work / "report.html", code=2).stderr
    run_ok("report", work / "sync", work / "async", "--output", work / "report.html")
    page = page_of(work)
    assert titles(page) == ["Validation: a/acc mean@1", "Score: mean", "perf/trainer/idle_ratio"]
    validation, score, idle = every(page, "figure")
    assert pointers(score) == [f"step {step} sync: {step / 8:g} async: {step / 16:g}" for step in range(5)]
    # Over time each keeps its value until its next step; the one of half the pace has less time.
    assert pointers(score, "over-time") == ["second 0 sync: 0 async: 0", "second 20 sync: 0.125 async: 0.125", "second 40 sync: 0.25 async: 0.25",
                                            "second 60 sync: 0.375 async: 0.25", "second 80 sync: 0.5 async: 0.25"]
    # A run has its colour also where it is alone.
    assert texts(every(idle, "figcaption")[0]).endswith("async 0.25") and every(idle, "circle", "c1") and not every(idle, "circle", "c0")
    cells = {texts(row[0]): [texts(cell) for cell in row[1:]] for row in map(list, every(every(page, "table", "numbers")[0], "tr"))}
    assert cells == {"metric": ["sync", "async"], "critic/score/mean": ["0.5", "0.25"], "perf/trainer/idle_ratio": ["", "0.25"], "val-core/a/acc/mean@1": ["0.5", ""]}


@pytest.mark.parametrize("content", [b"\0\xff" * 300, b'{"a": 1}\n', b"not JSON\nnor this\n"], ids=["bytes", "another object", "text"])
def test_a_file_without_metrics_is_an_error(content, work):
    (work / "metrics.jsonl").write_bytes(content)
    refuse("report", work / "metrics.jsonl", words=["metrics.jsonl: holds no metrics"])
    refuse("watch", work / "metrics.jsonl", words=["metrics.jsonl: holds no metrics"])
    assert not (work / "report.html").exists()


def test_a_run_that_has_just_begun_has_an_empty_page(work):
    (work / "metrics.jsonl").touch()
    run_ok("report", work)


def test_a_curve_that_a_run_lacks_is_an_error(work):
    (work / "a").mkdir()
    run, other = write_run(work / "a/run", [(1, {"x": 1})]), write_run(work / "run", [(1, {"y": 1, "x": None})])
    done = run_ok("report", run, other, "--curve", "x", "--svg", work / "out.svg", code=2)
    assert f"{other}/metrics.jsonl: has no value of x" in done.stderr and not (work / "out.svg").exists()
    assert "--svg" in run_ok("report", run, "--curve", "x", code=2).stderr
    # Folders of one name are told apart by their paths.
    write_run(other, [(1, {"x": 2})])
    run_ok("report", run, other, "--curve", "x", "--svg", work / "out.svg")
    assert str(run) in (work / "out.svg").read_text()
