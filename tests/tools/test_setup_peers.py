"""tools/setup_peers with a Python that downloads nothing: how it goes on after an interruption, and beside another run of it."""
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/usr/bin/env bash
# venv, pip and zipfile that make what setup_peers looks for. LOG gets the calls of pip; those whose words match SLOW take a minute, FAILING fail.
case $* in
  -V | -VV) echo "Python of the test"; exit ;;
  "-m venv "*) mkdir -p "$3/bin" "$3/site"; cp "$0" "$3/bin/python"; exit ;;
  "-c import sysconfig"*) echo "$(dirname "$0")/../site"; exit ;;
  "-c import torch"*) exit ;;
  "-m zipfile -e "*) mkdir -p "${@: -1}"; exit ;;
esac
echo "$*" >>"$LOG"
[[ $SLOW && $* =~ $SLOW ]] && sleep 60
[[ $FAILING && $* =~ $FAILING ]] && exit 1
while [[ $# -gt 0 ]]; do
  case $1 in
    --dest) mkdir -p "$2"; touch "$2/one.whl" ;;
    --target) mkdir -p "$2" ;;
  esac
  shift
done
"""


@pytest.fixture
def peers(tmp_path):
    """-> a function that starts setup_peers, whose output it keeps"""
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)

    def start(*options, failing="", slow=""):
        (tmp_path / "log").write_text("")
        return subprocess.Popen([ROOT / "tools/setup_peers", *options, tmp_path / "peers"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                env={**os.environ, "PYTHON": str(tmp_path / "python"), "LOG": str(tmp_path / "log"), "FAILING": failing, "SLOW": slow},
                                start_new_session=True)
    return start


def calls(tmp_path):
    return (tmp_path / "log").read_text().splitlines()


def is_finished(tmp_path):
    return (tmp_path / "peers/finished").exists()


def test_a_second_run_has_nothing_to_do(peers, tmp_path):
    assert peers("--libraries").wait() == 0 and not is_finished(tmp_path)
    assert [call for call in calls(tmp_path) if "requirements-nodeps" in call] and not [call for call in calls(tmp_path) if "download" in call]
    assert peers().wait() == 0 and is_finished(tmp_path)
    assert len([call for call in calls(tmp_path) if "download" in call]) == 5 and not [call for call in calls(tmp_path) if "requirements-nodeps" in call]
    assert peers().wait() == 0 and calls(tmp_path) == []


def test_pip_installs_what_is_listed_and_nothing_that_it_asks_for(peers, tmp_path):
    assert peers().wait() == 0
    installed = [call for call in calls(tmp_path) if " install " in call]
    assert len(installed) >= 3 and all("--no-deps" in call and "--no-compile" in call for call in installed)


@pytest.mark.parametrize("given, threads", [({}, "1"), ({"OMP_NUM_THREADS": "3"}, "3")])
def test_the_environment_has_one_thread_unless_the_caller_says_another_number(given, threads, peers, tmp_path):
    assert peers().wait() == 0
    script = f"source {tmp_path}/peers/env.sh; echo $OMP_NUM_THREADS"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    assert subprocess.run(["bash", "-c", script], env=environment | given, capture_output=True, text=True, check=True).stdout == f"{threads}\n"


@pytest.mark.parametrize("failing", ["megatron-core==0.16.1", "requirements.txt", "verifiers"])
def test_what_failed_is_done_again_and_nothing_else(failing, peers, tmp_path):
    assert peers(failing=failing).wait() != 0 and not is_finished(tmp_path)
    done = {path.parent.name for path in (tmp_path / "peers").glob("*/complete")}
    assert peers().wait() == 0 and is_finished(tmp_path)
    downloaded = [call for call in calls(tmp_path) if "download" in call]
    assert len(downloaded) == 5 - len(done - {"verifiers"}) and any(failing in call for call in calls(tmp_path))
    assert not [call for call in calls(tmp_path) if "requirements-nodeps" in call]


@pytest.mark.parametrize("slow", ["megatron-core==0.19.2", "requirements.txt"])
def test_one_that_is_stopped_leaves_no_process_behind(slow, peers, tmp_path):
    run = peers(slow=slow)
    until = time.monotonic() + 30
    while not any(slow in call for call in calls(tmp_path)):
        assert time.monotonic() < until and run.poll() is None
        time.sleep(.01)
    os.killpg(run.pid, signal.SIGTERM)
    assert run.wait(timeout=10) != 0 and not is_finished(tmp_path)
    # The next one waits for what holds the lock.
    assert peers().wait(timeout=30) == 0 and is_finished(tmp_path)


def test_one_waits_for_another(peers, tmp_path):
    first = peers(slow="requirements.txt")
    until = time.monotonic() + 30
    while not any("requirements.txt" in call for call in calls(tmp_path)):
        assert time.monotonic() < until
        time.sleep(.01)
    second = peers()
    assert "waiting for another" in second.stdout.readline()
    os.killpg(first.pid, signal.SIGTERM)
    assert second.wait(timeout=30) == 0 and is_finished(tmp_path)
