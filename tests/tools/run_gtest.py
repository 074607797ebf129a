#!/usr/bin/env python3
"""Runs the GoogleTest programs of a Meson build folder, each in as many shards as there are cores, and counts their tests.

    run_gtest.py BUILD SUMMARY.json [FILTER]        FILTER: only tests whose name contains it

Prints failures, and one line per program. SUMMARY.json becomes {"passed": n, "failed": n, "skipped": n}. A shard that
crashes counts as one more failed test than it reported.
"""
import concurrent.futures
import json
import os
import subprocess
import sys
import time
from pathlib import Path


def is_gtest(program):
    return b"gtest_output" in Path(program).read_bytes()


def run(test, shard, shards, reports, name_filter):
    """-> (passed, failed, skipped, seconds, output)"""
    report = reports / f"{test['name'].replace('/', '_')}.{shard}.json"
    report.unlink(missing_ok=True)
    command, gtest = list(test["cmd"]), is_gtest(test["cmd"][0])
    environment = {**os.environ, **test["env"], "GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(shard)}
    if gtest:
        command += ["--gtest_brief=1", f"--gtest_output=json:{report}"]
        if name_filter:
            command.append(f"--gtest_filter=*{name_filter}*")
    elif shard > 0 or (name_filter and name_filter not in test["name"]):
        return 0, 0, 0, 0.0, ""
    started = time.monotonic()
    try:
        done = subprocess.run(command, env=environment, cwd=test["workdir"], stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=600)
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, output = -1, f"{error}\n"
    seconds = time.monotonic() - started
    if not gtest or not report.exists():
        return int(code == 0), int(code != 0), 0, seconds, output
    passed = failed = skipped = 0
    for suite in json.loads(report.read_text())["testsuites"]:
        for case in suite["testsuite"]:
            if case["status"] == "NOTRUN":
                continue  # left out by the filter, or disabled
            if case.get("failures"):
                failed += 1
            elif case["result"] == "SKIPPED":
                skipped += 1
                output += f"skipped: {suite['name']}.{case['name']}: {' '.join(s['message'] for s in case.get('skipped', []))}\n"
            else:
                passed += 1
    if code != 0 and failed == 0:
        failed = 1
        output += f"{test['name']}, shard {shard} of {shards}, ended with exit status {code}\n"
    return passed, failed, skipped, seconds, output


def main():
    build, summary, name_filter = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""
    tests = json.loads(subprocess.run(["meson", "introspect", "--tests", build], stdout=subprocess.PIPE, check=True).stdout)
    reports = build / "reports"
    reports.mkdir(exist_ok=True)
    total = dict(passed=0, failed=0, skipped=0)
    shards = os.cpu_count() or 1
    runs = [(test, shard) for test in tests for shard in range(shards)]
    with concurrent.futures.ThreadPoolExecutor(shards) as pool:
        results = pool.map(lambda one: run(*one, shards, reports.resolve(), name_filter), runs)
        for test in tests:
            of_test = [next(results) for _ in range(shards)]
            passed, failed, skipped, seconds = (sum(result[i] for result in of_test) for i in range(4))
            total = dict(passed=total["passed"] + passed, failed=total["failed"] + failed, skipped=total["skipped"] + skipped)
            if failed or skipped:
                print("".join(result[4] for result in of_test), end="")
            if passed + failed + skipped:
                print(f"{test['name']}: {passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else "") + f" ({seconds:.1f} s)", flush=True)
    summary.write_text(json.dumps(total))


if __name__ == "__main__":
    main()
