"""Rewards: the rules beside verl's own functions, and programs that answer, hang, end and talk nonsense."""
import functools
import importlib.util
import json
import random
import re
import subprocess
import sys
import time

import pytest

from support import FERRY, PEERS, ROOT

TOOL = FERRY.parent.parent / "tests/reward_tool"


def verl(name):
    spec = importlib.util.spec_from_file_location(name, PEERS / f"verl091/verl/utils/reward_score/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gsm8k, math_reward, math_dapo, search = (verl(name) for name in ("gsm8k", "math_reward", "math_dapo", "search_r1_like_qa_em"))


def ask(questions, *arguments):
    lines = "".join(json.dumps(q) + "\n" for q in questions)
    done = subprocess.run([TOOL, *map(str, arguments)], input=lines, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


# ------------------------------------------------------------------------------------------------------------ rules

PIECES = ["1", "2", "72", "0.5", ".5", "-3", "1,000", "1/2", "-1/2", "01/2", "1/2/3", "\\frac12", "\\frac{1}{2}", "\\frac1{72}", "\\frac1", "\\frac",
          "\\tfrac34", "\\dfrac{3}{4}", "\\sqrt2", "\\sqrt{2}", "\\sqrt", "x", "x=5", "k = 7", "abc=7", "\\left(3, 4\\right)", "90^\\circ",
          "90^{\\circ}", "\\$5", "50\\%", "50\\\\%", "3\\text{ cm}", "3\\text{ a}\\text{ b}", "\\text{yes}", "\\textbf{3}", "\\overline{AB}", "$", "$5$",
          " ", "\n", "\t", ".", ",", "{", "}", "{.5}", " .25", "\\!", "\\\\", "\\ ", "an apple", "a ", "square", "units", "km", "\\mbox{3}",
          "\\text{and}", "\\mathrm{th}", "\\dots", "{,}", '"', "é", "日本", "²", "𝟙", "\u00a0", "\u2003", "\\boxed{7}", "\\fbox{3}", "\\boxed 4", "####",
          "#### 5", "#### -1,234.", "#### $6", "##### 8", "Answer: 12", "answer :\n 7\n", "ANSWER\u00a0:9", "Anſwer: 3", "Answer:", "Answer: \n \n"]


def some_text(most):
    return "".join(random.choice(PIECES) for _ in range(random.randint(0, most)))


def some_solution():
    ending = random.choice(["{}", "So \\boxed{{{}}}", "\\boxed{{{}}} done.", "\\boxed {}$ and", "\\fbox{{{}}}", "Answer: {}", "Answer: $\\boxed{{{}}}$.\n",
                            "#### {}", "The answer is\n#### {}\n", "Answer:{}\n\n  ", "\\boxed{{{}"])
    return some_text(6) + "x" * random.choice([0, 0, 90, 290]) + ending.format(some_text(3)) + random.choice(["", "", some_text(2)])


def corpus(count):
    """A solution, and a truth that is often what stands in it."""
    random.seed(17)
    for _ in range(count):
        solution = some_solution()
        truths = [some_text(2), *re.findall(r"\\boxed\{([^{}]*)\}|Answer: *([^\n]+)|#### (\S+)", solution)]
        truth = random.choice(truths)
        yield solution, truth if isinstance(truth, str) else max(truth, key=len)


def silently(function, *arguments):
    """verl's MATH prints what it raised."""
    import contextlib
    import io
    with contextlib.redirect_stdout(io.StringIO()):
        return function(*arguments)


def test_rules():
    cases = list(corpus(20000))
    sources = [("openai/gsm8k", gsm8k.compute_score), ("lighteval/MATH", math_reward.compute_score), ("math_dapo", math_dapo.compute_score)]
    for source, compute_score in sources:
        mine = ask([{"data_source": source, "solution_str": s, "ground_truth": t} for s, t in cases], "rules")
        right = 0
        for (solution, truth), answer in zip(cases, mine, strict=True):
            theirs = silently(compute_score, solution, truth)
            theirs = theirs if isinstance(theirs, dict) else {"score": theirs}
            assert answer == theirs, (source, solution, truth)
            right += theirs["score"] > 0
        assert 100 < right < len(cases) / 2, (source, right)


WORDS = ["a", "an", "the", "A", "The", "AN", "a_n", "the-", "Nile", "NILE", "nile.", "\u00c4rger", "\u00e4rger", "a\u0308rger", "\u0130zmir", "\u03a3\u039f\u03a6\u039f\u03a3",
         "\u03c3\u03bf\u03c6\u03bf\u03c2", "\u03c3\u03bf\u03c6\u03bf\u03c3", "A\u03a3'", "\u03a3", "1/2", "$5", "3,000", "U.S.", "o'clock", "\u65e5\u672c", "\u00b2", "\u00bd", "\u2019s", "\u1e9e", "\ufb01",
         "\u212a", "'", "_", "`", "\U0001f600", "a\u200db"]
SPACES = [" ", " ", "  ", "\n", "\t", "\u00a0", "\u2003", "\x1c", "\u200b", "-", ",", ""]


def some_words(most):
    return "".join(random.choice(SPACES) + random.choice(WORDS) for _ in range(random.randint(0, most)))


def answers_of_searches(count):
    """A solution, and targets of which often one is what stands in it, said otherwise."""
    random.seed(19)
    for _ in range(count):
        said = some_words(4)
        again = random.choice([said, said.lower(), said.upper(), f"the {said}.", " ".join(said.split()), some_words(4)])
        solution = random.choice(["<answer>{}</answer>", "<think>x</think>\n<answer>\n{}\n</answer>.", "<answer>{}", "{}</answer>", "{}",
                                  "<answer>no</answer> <answer>{}</answer>", "<answer><answer>{}</answer></answer>"]).format(said)
        solution += random.choice(["", "", "</answer>" * random.randint(8, 12), "<answer>" * random.randint(8, 12), "<answer>" + some_words(2) + "</answer>"])
        yield solution, {"target": random.choice([again, [again], [some_words(2), again], [again, again], []])}


def test_searched_answers():
    cases = list(answers_of_searches(10000))
    mine = ask([{"data_source": "searchR1_nq", "solution_str": s, "ground_truth": t} for s, t in cases], "rules")
    for (solution, truth), answer in zip(cases, mine, strict=True):
        assert answer == {"score": silently(search.compute_score, solution, truth)}, (solution, truth)
    assert {0, 0.25, 1} == {answer["score"] for answer in mine}


SAME = [r"1/2 0.5 \frac{1}{2} \frac12 .5 \frac{2}{4} 2/4 50\%", r"2\sqrt{3} \sqrt{12} 2sqrt(3) \frac{6}{\sqrt{3}} 3.464 2\cdot\sqrt{3} 2*3^0.5 12^{1/2}",
        r"36 36.0 36^\circ 36^{\circ} +36 3.6e1 6^2 6*6 36\text{cm} 36\text{units} 36degrees", r"3/2 1.5 \frac{3}{2} 1\frac{1}{2}",
        r"2\pi 2pi \pi\cdot2 6.28 \pi+\pi 4\pi/2 \frac{4\pi}{2}", r"x+y y+x", r"2x+1 1+2x 2(x+1)-1 x+x+1 2*x+1 2x1+1", r"x^2-1 (x-1)(x+1) -1+x^2 x*x-1",
        r"(1,2) \left(1,2\right) (1.0,2) [1,2] (2/2,2)", r"1,000 1000 1{,}000 1,\!000 1000.0 1_000 1e3 1,000,000,000", r"\text{(A)} (A) A a", r"ab ba a*b a(b) ln",
        r"4\sqrt{2} \frac{8}{\sqrt{2}} \sqrt{32} 5.657", r"\frac{12\sqrt{3}}{5} 12\sqrt{3}/5 2.4\sqrt{3} \frac{12}{5}\sqrt{3}", r"\infty inf \sqrt \frac{1} None"]
LATEX = ["\\tfrac 1 2", "\\sqrt { 12 }", "\\sqrt[3]{8}", "\\pi r^2", "x^10", "45 degrees", "12 \\text{cm}^2", "3 inches", "$5$", "\\mathrm{cm}", "3 million", "007", "*", "+",
         "- ", "/", "^", "(", ")", "[", "]", ", ", ",\\!", "\\;", "\\angle", "\\triangle ABC", "\\theta", " or ", " and ", "!", "e", "i", "\\sin", "\\{", "\\}",
         "\\pm 2", "1 1/2", "=", ":", "|x|", "\\mbox{a b}", "3.000000001"]


def answers_of_geometry(count):
    random.seed(23)
    for _ in range(count):
        some, others = (random.choice(SAME).split() for _ in range(2))
        said = random.choice([random.choice(some), random.choice(some) + random.choice(["", " ", "+1", "^2"]), "".join(random.choices(PIECES + LATEX, k=3))])
        truth = random.choice([*random.sample(some, 2), random.choice(others), said, said.lower(), said.replace(" ", ""), said.replace("\\", "")])
        form = random.choice(["\\boxed{{{}}}", "<think>a\nb</think>\n so \\boxed{{{}}}.", "\\boxed{{1}} \\boxed{{{}}}", "{}", "\\boxed{{{}", "</think><think>\\boxed{{{}}}",
                              " <think></think>\\boxed{{ {} }}"])
        yield form.format(said), truth


def test_geometry():
    """Values are compared by numbers here, and by sympy in mathruler, which verl's function asks."""
    geo3k, cases = verl("geo3k"), list(answers_of_geometry(4000))
    mine = ask([{"data_source": "hiyouga/geometry3k", "solution_str": s, "ground_truth": t} for s, t in cases], "rules")
    for (solution, truth), answer in zip(cases, mine, strict=True):
        assert answer["score"] == pytest.approx(silently(geo3k.compute_score, solution, truth)), (solution, truth)
    assert sum(answer["score"] > 0.5 for answer in mine) > len(cases) / 4


@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_gsm8k_methods(method):
    cases = list(corpus(3000))
    mine = ask([{"method": method, "solution_str": s, "ground_truth": t} for s, t in cases], "rules")
    for (solution, truth), answer in zip(cases, mine, strict=True):
        assert answer == gsm8k.compute_score(solution, truth, method, format_score=0.25, score=2), (solution, truth)
    assert {0, 0.25, 2} == set(mine)


def test_names_of_data():
    names = ["openai/gsm8k", "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math_dapo", "math", "math_dapo_reasoning",
             "aime2024", "hiyouga/geometry3k", "numina_olympiads", "elsewhere"]
    *known, numina, unknown = ask([{"data_source": n, "solution_str": "Answer: 1\n#### 1 \\boxed{1}", "ground_truth": "1"} for n in names], "rules")
    assert [a["score"] for a in known] == [1] * 8 + [0.9]
    assert unknown["kind"] == "usage" and "no rule scores data_source elsewhere" in unknown["error"] and "--reward-command" in unknown["error"]
    assert "no rule scores data_source numina_olympiads" in numina["error"] and "name the data math_verify" in numina["error"]


def test_format():
    pattern = r"<think>[\s\S]*?</think>\s*<answer>[\s\S]*?</answer>\s*"
    texts = ["<think>a\nb</think>\n<answer>7</answer>\n", "<think></think><answer></answer>", "so: <think>a</think><answer>7</answer>",
             "<think>a</think><answer>7</answer> indeed", "<answer>7</answer>", ""]
    mine = ask([{"pattern": pattern, "solution_str": t} for t in texts], "rules")
    assert mine == [1 if re.fullmatch(pattern, t) else 0 for t in texts] == [1, 1, 0, 0, 0, 0]
    bad, = ask([{"pattern": "(", "solution_str": ""}], "rules")
    assert bad["kind"] == "usage"


# --------------------------------------------------------------------------------------------------------- programs


@functools.cache
def example(number=0):
    """A Python program of docs/training/rewards.md."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs/training/rewards.md").read_text(), re.DOTALL)[number]


def program(work, text, name="reward.py"):
    (work / name).write_text(text)
    return f"{sys.executable} {work / name}"


def requests(*solutions):
    return [{"data_source": "sums", "solution_str": s, "ground_truth": "7", "extra_info": {"index": i}} for i, s in enumerate(solutions)]


LOOP = """import json, os, sys, time
state = {state!r}
def times():
    open(state, "a").write("x")
    return os.path.getsize(state)
for line in sys.stdin:
    q = json.loads(line)
    answer = {{"id": q["id"], "score": len(q["solution_str"])}}
    {body}
    print(json.dumps(answer), flush=True)
"""


def loop(work, body):
    return program(work, LOOP.format(state=str(work / "state"), body=body))


def test_the_example_of_the_manual(work):
    assert len(example().strip().splitlines()) == 5
    one, two = ask([requests("it is 7", "it is 8"), requests("7")], "command", program(work, example()), 20)
    assert one["scores"] == [{"score": 1}, {"score": 0}] and two["scores"] == [{"score": 1}]
    assert one["restarts"] == two["restarts"] == 0


def test_verls_own_function_is_a_program(work):
    """The manual's, with what verl's function imports of verl: numina_* have no rule here."""
    utils = work / "verl/utils"
    utils.mkdir(parents=True)
    for path, text in (("__init__.py", ""), ("utils/__init__.py", ""), ("utils/metric.py", "Metric = object")):
        (work / "verl" / path).write_text(text)
    for name in ("reward_score", "import_utils.py", "py_functional.py"):
        (utils / name).symlink_to(PEERS / "verl091/verl/utils" / name)
    asked = [("numina_olympiads", "the answer is \\boxed{\\frac{1}{2}}", "0.5"), ("numina_cn_k12", "\\boxed{3}", "4"), ("math_dapo", "Answer: 7", "7")]
    done, = ask([[{"data_source": source, "solution_str": said, "ground_truth": truth, "extra_info": {}} for source, said, truth in asked]],
                "command", program(work, example(1)), 50)
    assert [one["score"] for one in done["scores"]] == [1, 0, 1] and done["scores"][2]["acc"] == 1


def test_what_a_program_is_given_and_may_say(work):
    """All that was asked comes as it was; answers come in any order, with more beside the score."""
    body = "import threading; threading.Timer((5 - len(q['solution_str'])) / 10, lambda a=answer | {'kept': q['ground_truth'] == '7', 'note': q['extra_info'], " \
           "'said': q['solution_str'], 'acc': 0.5}: print(json.dumps(a), flush=True)).start(); continue"
    done, = ask([requests("日本\n\"", "", "abcde")], "command", loop(work, body), 20)
    assert [s["score"] for s in done["scores"]] == [4, 0, 5]
    assert done["scores"][0] == {"score": 4, "kept": 1, "acc": 0.5, "said": "日本\n\"", "note": '{"index":0}'}


def test_long_answers_do_not_block(work):
    """Megabytes both ways, more than pipes hold."""
    done, = ask([requests(*["x" * 300_000] * 12)], "command", loop(work, "answer['said'] = q['solution_str']"), 20)
    assert [s["score"] for s in done["scores"]] == [300_000] * 12


@pytest.mark.parametrize("trouble", ["sys.exit(3)", "os.kill(os.getpid(), 9)", "time.sleep(1000)"])
def test_a_program_that_fails_once_is_asked_again(work, trouble):
    done, = ask([requests("a", "bb", "ccc")], "command", loop(work, f"if len(q['solution_str']) == 2 and times() == 1: {trouble}"), 1)
    assert [s["score"] for s in done["scores"]] == [1, 2, 3] and done["restarts"] == 1


@pytest.mark.parametrize("trouble,said", [("sys.exit(3)", r"ended \(exit status 3\), 3 times in a row"),
                                          ("os.kill(os.getpid(), 9)", r"ended \((signal 9|exit status 137)\)"),  # the shell's, or of it
                                          ("time.sleep(1000)", "said nothing for 5 s")])
def test_a_program_that_goes_on_failing_is_an_error(work, trouble, said):
    """It names the program, what it does and the answer that it does not score; then the next batch is asked anew."""
    command = loop(work, f"if q['solution_str'] == 'bad': {trouble}")
    failed, fine = ask([requests("a", "bad", "ccc"), requests("a")], "command", command, 1)
    assert failed["kind"] == "io" and re.search(said, failed["error"]) and "left 2 of 3 answers unscored, the first of sums: bad" in failed["error"]
    assert command in failed["error"]
    assert fine["scores"] == [{"score": 1}]


@pytest.mark.parametrize("body,said", [
    ("print('hello')", "no JSON object: hello"),
    ("answer = [1]", "no JSON object: [1]"),
    ("answer.pop('id')", "no id"),
    ("answer['id'] += 100", "nothing of this id is to be answered"),
    ("print(json.dumps(answer), flush=True)", "nothing of this id is to be answered"),
    ("answer['score'] = None", "no number is the score"),
    ("answer['score'] = 'high'", "no number is the score"),
    ("answer['score'] = 1e999", "no JSON object"),
    ("answer['error'] = 'no such unit'", "the program reports an error"),
])
def test_nonsense_is_an_error(work, body, said):
    failed, = ask([requests("a", "b")], "command", loop(work, body), 20)
    assert failed["kind"] == "corrupt" and said in failed["error"] and "hint: each line of standard output is" in failed["error"], failed


def test_a_program_that_cannot_be_started(work):
    failed, = ask([requests("a")], "command", "/nowhere/reward", 5)
    assert "ended (exit status 127)" in failed["error"]


def test_nothing_is_left_running(work):
    """Processes that the program has started end with it."""
    command = loop(work, f"os.system('sleep 60 & echo $! > {work / 'pid'}')")
    ask([requests("a")], "command", command, 20)
    time.sleep(0.1)
    pid = int((work / "pid").read_text())
    status = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], stdout=subprocess.PIPE, text=True).stdout.strip()
    assert status[:1] in ("", "Z"), status  # "ZN" where tests run under nice
