"""`ferry score`: code that tests are run on in a sandbox, beside verl's prime_code, and the rules."""
import json
import subprocess
import sys

import pytest

from ppo_run import samples, train, write_world
from ranks import TORCH_PROGRAM
from support import FERRY, PEERS

PROBE = subprocess.run([FERRY, "sandbox", "--", "true"], stderr=subprocess.PIPE, text=True)
pytestmark = pytest.mark.skipif("no namespaces" in PROBE.stderr, reason=f"this system allows no sandbox: {PROBE.stderr.strip()}")

ADD = {"inputs": [f"{i} {i + 1}\n" for i in range(3)], "outputs": [f"{2 * i + 1}\n" for i in range(3)]}
MANY = {"inputs": [str(i) for i in range(12)], "outputs": [str(i * i) for i in range(12)]}
CALL = {"fn_name": "add", "inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"]}
LISTS = {"fn_name": "twice", "inputs": ["[1, 2]", "[]"], "outputs": ["[2, 4]", "[]"]}
LINES = {"inputs": ["2\n1\n2"], "outputs": ["1\n2"]}

CASES = {  # name: (the answer, the tests)
    "right": ("Here:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\nDone.", ADD),
    "the last block counts": ("```python\nprint(0)\n```\nNo:\n```python\nprint(sum(map(int, input().split())))\n```", ADD),
    "no block": ("print(sum(map(int, input().split())))", ADD),
    "without a newline, with spaces": ("import sys\na, b = map(int, input().split())\nsys.stdout.write(f' {a + b} ')", ADD),
    "one of three": ("```python\nprint(1)\n```", ADD),
    "does not parse": ("```python\nprint(\n```", ADD),
    "raises behind its answer": ("```python\nprint(sum(map(int, input().split())))\nraise ValueError\n```", ADD),
    "main": ("```python\ndef solve():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    solve()\n```", ADD),
    "names that are taken for granted": ("```python\nprint(reduce(add, map(int, sys.stdin.read().split())))\n```", ADD),
    "near numbers": ("```python\na, b = map(int, input().split())\nprint(f'{a + b + 1e-9:.12f}')\n```", ADD),
    "lines": ("```python\nfor _ in range(int(input())): print(input())\n```", LINES),
    "the eleventh fails": ("```python\nn = int(input())\nprint(n * n if n < 11 else -1)\n```", MANY),
    "two of the first ten fail": ("```python\nn = int(input())\nprint(n * n if n not in (3, 8) else -1)\n```", MANY),
    "a function": ("```python\ndef add(a, b): return a + b\n```", CALL),
    "a method that prints": ("```python\nclass Solution:\n    def add(self, a, b):\n        print('hm')\n        return a + b\n```", CALL),
    "half a function": ("```python\ndef add(a, b): return 3\n```", CALL),
    "no function": ("```python\ndef sub(a, b): return 3\n```", CALL),
    "a tuple for a list": ("```python\ndef twice(values): return tuple(2 * v for v in values)\n```", LISTS),
}


def score(*questions, options=()):
    asked = "".join(json.dumps({"id": i, "data_source": "codecontests", "extra_info": {}} | question) + "\n" for i, question in enumerate(questions))
    done = subprocess.run([FERRY, "score", *options], input=asked, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["id"] for answer in said] == list(range(len(questions)))
    return said


def test_the_scores_are_verl_s():
    judge = ("import json, sys\nfrom prime_code import compute_score\n"
             "print(json.dumps([float(compute_score(text, tests, continuous=True)[0]) for text, tests in json.load(sys.stdin)]))")
    done = subprocess.run([sys.executable, "-c", judge], input=json.dumps(list(CASES.values())), capture_output=True, text=True, timeout=300,
                          env={"PYTHONPATH": str(PEERS / "verl091/verl/utils/reward_score"), "PATH": "/usr/bin:/bin"})
    expected = json.loads(done.stdout.splitlines()[-1])
    mine = score(*({"solution_str": text, "ground_truth": tests} for text, tests in CASES.values()))
    expected = dict(zip(CASES, expected))
    assert expected.pop("half a function") == 0  # verl forgets the name of the function where it runs tests one by one
    scores = {name: answer["score"] for name, answer in zip(CASES, mine)}
    assert scores.pop("half a function") == .5 and scores == expected
    assert mine[0]["acc"] == 1 and mine[0]["tests"] == 3 and mine[4]["acc"] == 0


def test_output_without_end_fails_a_test_and_no_run():
    said = score({"solution_str": "print('x' * 20_000_000)", "ground_truth": ADD},
                 {"solution_str": "import sys\nwhile True: sys.stdout.write('x' * 65536)", "ground_truth": ADD},
                 {"solution_str": CASES["right"][0], "ground_truth": ADD})
    assert [answer["score"] for answer in said] == [0, 0, 1]


def test_it_is_bound_in_time_and_place(tmp_path):
    hangs = "import time\nprint(1, flush=True)\ntime.sleep(600)"
    writes = f"open({str(tmp_path / 'x')!r}, 'w')\nprint(1)"
    endless = "while True: print('x' * 1000)"
    truth = json.dumps({"inputs": [""], "outputs": ["1"]})
    said = score(*({"solution_str": code, "ground_truth": truth} for code in (hangs, writes, endless, "print(1)")), options=["--seconds", "2"])
    assert [answer["score"] for answer in said] == [0, 0, 0, 1] and not any(tmp_path.iterdir())


NO_NAMESPACES = ["unshare", "-Ur", "sh", "-c", "echo 0 > /proc/sys/user/max_user_namespaces && exec \"$@\"", "sh"]


def test_nothing_is_scored_where_there_is_no_sandbox(tmp_path):
    question = json.dumps({"id": 0, "data_source": "codecontests", "solution_str": CASES["right"][0], "ground_truth": ADD, "extra_info": {}})
    rule = json.dumps({"id": 1, "data_source": "openai/gsm8k", "solution_str": "#### 7", "ground_truth": "7"})

    def ask(*options):
        return subprocess.run([*NO_NAMESPACES, FERRY, "score", *options], input=f"{question}\n{rule}\n", capture_output=True, text=True, timeout=60)

    done = ask()
    assert (done.returncode, done.stdout) == (2, "") and "no namespaces" in done.stderr and "no sandbox can be made here" in done.stderr
    done = ask("--rules")
    code, rules = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 0 and "no rule scores data_source codecontests" in code["error"] and rules["score"] == 1
    (tmp_path / "data.jsonl").write_text('{"prompt": [{"role": "user", "content": "x"}], "data_source": "apps", "reward_model": {"ground_truth": "1"}}\n')
    done = subprocess.run([*NO_NAMESPACES, FERRY, "train", "grpo", "--reward-command", "ferry score", f"data.train_files=['{tmp_path / 'data.jsonl'}']",
                           f"trainer.default_local_dir='{tmp_path / 'run'}'", "actor_rollout_ref.model.path='/no/such/model'", "trainer.device='cpu'"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no sandbox can be made here" in done.stderr, done.stderr


def test_a_program_s_own_status_is_no_missing_sandbox():
    said = score({"solution_str": "import sys; sys.exit(2)", "ground_truth": ADD}, {"solution_str": CASES["right"][0], "ground_truth": ADD})
    assert [answer["score"] for answer in said] == [0, 1]


def test_rules_score_other_data():
    said = score({"data_source": "openai/gsm8k", "solution_str": "#### 7", "ground_truth": "7"}, {"data_source": "openai/gsm8k", "solution_str": "7", "ground_truth": "7"},
                 {"data_source": "poems", "solution_str": "7", "ground_truth": "7"}, {"solution_str": "x", "ground_truth": "{}"})
    assert [answer.get("score") for answer in said] == [1, 0, None, None]
    assert "no rule scores data_source poems" in said[2]["error"] and "has no tests" in said[3]["error"]


LOOK = """import json, subprocess, sys
for line in sys.stdin:
    q = json.loads(line)
    seen = [subprocess.run(words + ["sh", "-c", "cat {0}/train.jsonl {1}/*"], capture_output=True, text=True).stdout for words in ({2!r}, [])]
    print(json.dumps({{"id": q["id"], "score": 0, "inside": seen[0], "outside": len(seen[1])}}), flush=True)
"""


@pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")
def test_a_run_hides_its_data_and_its_folder_in_sandboxes(work):
    world = write_world(work / "world")
    (work / "reward.py").write_text(LOOK.format(world, work / "run", [str(FERRY), "sandbox", "--"]))
    train(world, work / "run", **{"reward_model.command": f"{sys.executable} {work / 'reward.py'}", "trainer.total_training_steps": 1})
    assert {(one["inside"], one["outside"] > 0) for one in samples(work / "run", 1)} == {("", True)}
