"""`trainer.logger` with wandb and mlflow: what their own packages keep, offline, is what metrics.jsonl has."""
import json
import os
import re
import struct
import sys

import pytest

from ranks import finish
from sft_run import settings, start_ranks, train, write_model, write_rows, conversations

STEPS = 6


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracked")
    write_model(folder / "model")
    write_rows(folder / "train.jsonl", conversations())
    return folder


@pytest.fixture(autouse=True)
def offline(work, monkeypatch):
    for name, value in {"FERRY_PYTHON": sys.executable, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true",
                        "MLFLOW_TRACKING_URI": f"file://{work}/mlruns", "HOME": str(work)}.items():
        monkeypatch.setenv(name, value)


def logged(run):
    """{step: values} of metrics.jsonl"""
    steps = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        steps.setdefault(line["step"], {}).update(line["data"])
    return steps


def wandb_records(path):
    """The messages of a .wandb file: a log as LevelDB has it, blocks of 32 KiB, behind 7 bytes."""
    from wandb.proto import wandb_internal_pb2
    data, at, begun = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        begun += data[at + 7:at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(begun)
            begun = b""
            yield record


def wandb_runs(run):
    """-> of each begun run: (id, project, name, keys of its configuration, {step: values})"""
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        steps = {}
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "run":
                about = (record.run.run_id, record.run.project, record.run.display_name, {update.key for update in record.run.config.update})
            if record.WhichOneof("record_type") == "history":
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                steps.setdefault(row.pop("_step"), {}).update({k: v for k, v in row.items() if not k.startswith("_")})
        yield *about, steps


def test_wandb_has_the_metrics_and_goes_on_with_a_resumed_run(world, work):
    run = work / "run"
    more = {"trainer.logger": ["console", "wandb"], "trainer.project_name": "counting", "checkpoint.save_freq": 3}
    train(world, run, **more, **{"trainer.total_training_steps": 3})
    train(world, run, **more, **{"trainer.total_training_steps": STEPS})
    (first, project, name, keys, before), (second, *_, after) = wandb_runs(run)
    assert first == second and (project, name) == ("counting", "run") and {"trainer", "model", "data"} <= keys
    assert sorted(before) == [1, 2, 3] and sorted(after) == [4, 5, 6]
    assert before | after == logged(run)


def test_mlflow_has_the_metrics(world, work):
    import mlflow
    run = work / "run"
    train(world, run, **{"trainer.logger": ["file", "mlflow"], "trainer.experiment_name": "again"})
    client = mlflow.MlflowClient()
    kept = client.get_run(json.loads((run / "mlflow.json").read_text())["run"])
    assert kept.info.status == "FINISHED" and kept.info.run_name == "again" and kept.data.params["trainer.experiment_name"] == "again"
    assert client.get_experiment(kept.info.experiment_id).name == "ferry"
    steps = logged(run)
    assert sorted(steps) == list(range(1, STEPS + 1))
    for name in steps[1]:
        history = client.get_metric_history(kept.info.run_id, re.sub(r"[^/\w.\- :]", "_", name.replace("@", "_at_")))
        assert {metric.step: metric.value for metric in history} == {step: values[name] for step, values in steps.items()}


def test_interpreter_without_the_package_is_named_before_the_first_step(world, work, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(work))
    (work / "wandb.py").write_text("raise ImportError('no wandb here')\n")
    ((status, said),) = finish(start_ranks(1, settings(world, work / "run", **{"trainer.logger": ["file", "wandb"]})), timeout=120)
    assert status == 2 and "trainer.logger: wandb did not begin: exit status 1" in said and "no wandb here" in said and "FERRY_PYTHON" in said
    assert not (work / "run/metrics.jsonl").read_text()


def test_tracker_that_dies_does_not_end_the_run(world, work, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(work))
    (work / "wandb.py").write_text("import os\nclass Run:\n    id = 'x'\n    finish = None\n    def log(self, data, step):\n        os._exit(7)\n"
                                   "def init(**settings):\n    return Run()\n")
    ((status, said),) = finish(start_ranks(1, settings(world, work / "run", **{"trainer.logger": ["file", "wandb"]})), timeout=120)
    assert status == 0 and "warning: trainer.logger: wandb lacks a part of the metrics: exit status 7" in said
    assert len(logged(work / "run")) == STEPS
