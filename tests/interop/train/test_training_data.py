"""Training data that pyarrow writes, as our readers see it: every value as pyarrow itself reads it back."""
import datetime
import json
import math
import random
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support import FERRY

TOOL = FERRY.parent.parent / "tests/record_tool"


def records(*arguments, code=0):
    done = subprocess.run([TOOL, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)
    if "was built without Arrow" in done.stderr:
        pytest.skip("this build reads no Parquet")
    assert done.returncode == code, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()] if code == 0 else done.stderr


def rl_rows(count, seed=0):
    """Rows as verl's preprocessing scripts write them, with what is optional sometimes left out."""
    choose = random.Random(seed)
    for i in range(count):
        yield {
            "data_source": choose.choice(["openai/gsm8k", "lighteval/MATH"]),
            "prompt": [{"role": choose.choice(["system", "user"]), "content": f"Frage {i}: Größe \U0001f600 " * choose.randrange(4)}
                       for _ in range(choose.randrange(1, 4))],
            "ability": choose.choice(["math", None]),
            "reward_model": {"style": "rule", "ground_truth": str(choose.randrange(10**6))},
            "extra_info": choose.choice([None, {"split": "train", "index": i, "score": choose.choice([None, 0.25]), "tags": []},
                                         {"split": "test", "index": -i, "score": 1e300, "tags": ["a", None]}]),
        }


@pytest.mark.parametrize("options", [
    dict(compression="snappy", row_group_size=100),
    dict(compression="zstd", row_group_size=37, use_dictionary=False, data_page_version="2.0"),
    dict(compression="gzip", row_group_size=1000, data_page_size=512, write_page_checksum=True),
    dict(compression="none", row_group_size=1, version="1.0"),
    dict(compression="brotli", row_group_size=64, store_schema=False, write_page_index=True),
    dict(compression="lz4", row_group_size=333),
], ids=lambda options: options["compression"])
def test_rows_of_verl_are_those_of_pyarrow(work, options):
    table = pa.Table.from_pylist(list(rl_rows(333)))
    pq.write_table(table, work / "train.parquet", **options)
    expected = pq.read_table(work / "train.parquet").to_pylist()
    assert records(work / "train.parquet") == expected
    shuffled = records("--shuffle", 5, work / "train.parquet")
    assert shuffled != expected
    key = lambda row: json.dumps(row, sort_keys=True)
    assert sorted(shuffled, key=key) == sorted(expected, key=key)


def test_every_type_is_as_pyarrow_reads_it(work):
    columns = {
        "bool": pa.array([True, None, False]),
        "float16": pa.array([0.5, None, -2.0], pa.float16()),
        "float32": pa.array([0.1, 3e38, None], pa.float32()),
        "float64": pa.array([0.1, -1e-300, None]),
        "large_text": pa.array(["a", "", None], pa.large_string()),
        "encoded": pa.array(["x", None, "x"]).dictionary_encode(),
        "null": pa.nulls(3),
        "list": pa.array([[[1], []], None, [None, [2, None]]]),
        "large_list": pa.array([[1], [], None], pa.large_list(pa.int16())),
        "fixed_list": pa.array([[1, 2], None, [3, None]], pa.list_(pa.int8(), 2)),
        "nested": pa.array([{"a": {"b": [{"c": 1}]}}, {"a": None}, None]),
    }
    for bits in (8, 16, 32, 64):
        columns[f"int{bits}"] = pa.array([-(1 << bits - 1), None, (1 << bits - 1) - 1], f"int{bits}")
        columns[f"uint{bits}"] = pa.array([0, (1 << bits) - 1, None], f"uint{bits}")
    pq.write_table(pa.table(columns), work / "types.parquet")
    assert records(work / "types.parquet") == pq.read_table(work / "types.parquet").to_pylist()

    others = {
        "bytes": pa.array([b"\xff\x00", None]),
        "map": pa.array([[("k", 1), ("l", None)], None], pa.map_(pa.string(), pa.int64())),
        "date": pa.array([datetime.date(2026, 2, 28), None]),
        "decimal": pa.array([pa.scalar("1.50").cast(pa.decimal128(5, 2)).as_py(), None]),
        "nan": pa.array([math.nan, None]),
    }
    pq.write_table(pa.table(others), work / "others.parquet")
    first, second = records(work / "others.parquet")
    assert first == {"bytes": {"bytes": [255, 0], "subtype": None}, "map": [["k", 1], ["l", None]], "date": "2026-02-28",
                     "decimal": "1.50", "nan": None}  # JSON has no NaN: the tool prints null
    assert second == dict.fromkeys(others)


def test_files_of_both_kinds_follow_each_other(work):
    rows = list(rl_rows(50))
    pq.write_table(pa.Table.from_pylist(rows[:20]), work / "a.parquet")
    (work / "b.jsonl").write_text("".join(json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" for i, row in enumerate(rows[20:])))
    expected = pq.read_table(work / "a.parquet").to_pylist() + rows[20:]
    assert records(work / "a.parquet", work / "b.jsonl") == expected


def test_broken_files_are_errors_that_name_them(work):
    pq.write_table(pa.Table.from_pylist(list(rl_rows(200))), work / "good.parquet", row_group_size=50)
    data = (work / "good.parquet").read_bytes()
    choose = random.Random(1)
    for i in range(40):
        bad = bytearray(data)
        if i % 2:
            del bad[choose.randrange(len(bad)):]
        else:
            for _ in range(choose.randrange(1, 20)):
                bad[choose.randrange(len(bad))] = choose.randrange(256)
        (work / "bad.parquet").write_bytes(bad)
        done = subprocess.run([TOOL, work / "bad.parquet"], capture_output=True, timeout=60)
        assert done.returncode in (0, 2), f"{i}: exit {done.returncode}: {done.stderr[-500:]}"
        assert (done.returncode == 2) <= (b"bad.parquet" in done.stderr), f"{i}: {done.stderr[-500:]}"
        if i % 2:
            assert done.returncode == 2, f"{i}: {len(bad)} of {len(data)} bytes were read as a whole file"


def test_text_that_is_not_utf8_is_the_trouble_of_its_row(work):
    column = pa.StringArray.from_buffers(3, pa.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0])), pa.py_buffer(b"a\xff\xfeb"))
    pq.write_table(pa.table({"text": column}), work / "a.parquet")
    done = subprocess.run([TOOL, work / "a.parquet"], capture_output=True, text=True, timeout=60)
    if "was built without Arrow" in done.stderr:
        pytest.skip("this build reads no Parquet")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"text": "a"}, {"text": "b"}]
    assert f"{work}/a.parquet: row 1: text: is not UTF-8" in done.stderr
