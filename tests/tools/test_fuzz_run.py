"""`tests/fuzz/run` with stand-ins for the compiler, the build and the fuzz targets."""
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TARGETS = ["safetensors", "pickle", "zip"]
# A target that says when it begins and, once as many have begun as there are cores, when it ends. It is asked about known inputs first.
FUZZER = """#!/bin/sh
case "$*" in *-max_total_time*) ;; *) exit 0 ;; esac
name=$(basename "$0" _fuzzer)
echo "begin $name" >>"$LOG"
for i in $(seq 200); do [ "$(grep -c begin "$LOG")" -ge "$CORES" ] && break; sleep 0.1; done
echo "end $name" >>"$LOG"
if [ "$name" = "$FAILS" ]; then echo "a defect of $name"; exit 77; fi
echo "#9 DONE cov: 42 x"
echo "stat::number_of_executed_units: 7"
"""


@pytest.fixture
def fuzz(tmp_path):
    """-> runs it on a machine of so many cores: (the finished process, what the stand-ins did, line by line)"""
    clone, log = tmp_path / "clone", tmp_path / "log"
    (clone / "tests/fuzz").mkdir(parents=True)
    shutil.copy(ROOT / "tests/fuzz/run", clone / "tests/fuzz/run")
    for name in TARGETS:
        shutil.copytree(ROOT / "tests/fuzz/seeds" / name, clone / "tests/fuzz/seeds" / name)

    def program(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    program(clone / "tools/configure", "#!/bin/sh\n")
    program(tmp_path / "bin/clang++-16", "#!/bin/sh\n")
    program(tmp_path / "bin/ninja", '#!/bin/sh\necho "$(basename "$0") $*" >>"$LOG"\n')
    for name in TARGETS:
        program(clone / f"build-fuzz/tests/fuzz/{name}_fuzzer", FUZZER)

    def run(*arguments, cores=2, fails=""):
        program(tmp_path / "bin/nproc", f"#!/bin/sh\necho {cores}\n")
        log.write_text("")
        environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "LOG": str(log), "CORES": str(cores), "FAILS": fails,
                                    "FUZZ_SEED": "1", "FUZZ_SUMMARY": str(tmp_path / "summary.json")}
        done = subprocess.run([clone / "tests/fuzz/run", *arguments], env=environment, capture_output=True, text=True, timeout=60)
        return done, log.read_text().splitlines()
    return run


@pytest.mark.parametrize("cores", [1, 2])
def test_as_many_targets_run_at_a_time_as_there_are_cores(fuzz, cores, tmp_path):
    done, did = fuzz("10", *TARGETS, cores=cores)
    assert done.returncode == 0, done.stderr
    assert did[0] == "ninja -C build-fuzz" and sorted(did[1:]) == sorted(f"{what} {name}" for what in ("begin", "end") for name in TARGETS)
    running = [0]
    for line in did[1:]:
        running.append(running[-1] + (1 if line.startswith("begin") else -1))
    assert max(running) == cores
    assert sorted(line.partition(":")[0] for line in done.stdout.splitlines()) == sorted(TARGETS)
    assert done.stdout.count("; 7 executions in at most 10 s, 42 edges") == len(TARGETS)
    assert json.loads((tmp_path / "summary.json").read_text()) == {"passed": 3, "failed": 0, "skipped": 0}


def test_a_target_that_fails_is_counted_and_the_others_run(fuzz, tmp_path):
    done, did = fuzz("10", *TARGETS, fails="pickle")
    assert done.returncode == 1 and len(did) == 1 + 2 * len(TARGETS)
    assert "a defect of pickle" in done.stdout and "pickle: FAILED, see build-fuzz/pickle.log" in done.stdout
    assert json.loads((tmp_path / "summary.json").read_text()) == {"passed": 2, "failed": 1, "skipped": 0}


def test_targets_are_built_alone(fuzz, tmp_path):
    done, did = fuzz("--build")
    assert (done.returncode, did) == (0, ["ninja -C build-fuzz"]) and not (tmp_path / "summary.json").exists()
