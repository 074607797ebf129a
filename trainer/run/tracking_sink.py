"""Logs the metrics of a run to wandb or mlflow while it goes on.

    python3 tracking_sink.py wandb|mlflow RUN PROJECT EXPERIMENT

It reads RUN/metrics.jsonl until its standard input ends, and says "ready" on its standard output once it has begun a run there.
RUN/<which>.json holds the identity of that run and the last step that it has: a run that is resumed goes on in it.
"""
import json
import os
import re
import select
import sys
from pathlib import Path


def configuration(run):
    text = (run / "config.toml").read_text()
    try:
        import tomllib
    except ImportError:  # before Python 3.11
        return {"config.toml": text}
    return tomllib.loads(text)


def flat(values, prefix=""):
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def begin_wandb(run, project, experiment, known):
    import wandb
    logged = wandb.init(project=project, name=experiment, id=known, resume="allow", dir=str(run), config=configuration(run),
                        entity=os.environ.get("WANDB_ENTITY"))
    return logged.id, lambda step, data: logged.log(data, step=step), logged.finish


def begin_mlflow(run, project, experiment, known):
    import mlflow
    mlflow.set_experiment(project)
    logged = mlflow.start_run(run_id=known, run_name=experiment)
    if known is None:
        params = [(name, str(value)[:500]) for name, value in flat(configuration(run))]
        for i in range(0, len(params), 100):
            mlflow.log_params(dict(params[i:i + 100]))

    def log(step, data):  # under the names that verl gives them: mlflow takes no others
        mlflow.log_metrics({re.sub(r"[^/\w.\- :]", "_", name.replace("@", "_at_")): value for name, value in data.items()}, step=step)
    return logged.info.run_id, log, mlflow.end_run


class Lines:
    """The whole lines of a file that grows, and may come only later."""

    def __init__(self, path):
        self.path, self.file, self.begun = path, None, ""

    def read(self):
        if self.file is None and self.path.exists():
            self.file = self.path.open()
        text = self.begun + (self.file.read() if self.file else "")
        *lines, self.begun = text.split("\n")
        return lines


def main(which, run, project, experiment):
    run, sink = Path(run), sys.stdout
    sys.stdout = sys.stderr  # for what the packages say
    state_path = run / f"{which}.json"
    state = json.loads(state_path.read_text()) if state_path.exists() else {"run": None, "step": -1}
    begin = {"wandb": begin_wandb, "mlflow": begin_mlflow}[which]
    state["run"], log, finish = begin(run, project, experiment, state["run"])
    logged = state["step"]

    def keep(step):
        partial = state_path.with_suffix(".json.part")
        partial.write_text(json.dumps({"run": state["run"], "step": step}) + "\n")
        partial.replace(state_path)

    keep(logged)
    print("ready", file=sink, flush=True)
    lines = Lines(run / "metrics.jsonl")
    ended = False
    while not ended:
        ended = bool(select.select([sys.stdin], [], [], 1.0)[0])
        for line in lines.read():
            row = json.loads(line)
            # Steps that the run did before it was resumed are there, and have the same numbers.
            if row["step"] <= logged:
                continue
            log(row["step"], {name: value if value is not None else float("nan") for name, value in row["data"].items()})
            keep(row["step"])
    finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
