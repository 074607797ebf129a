"""The event files that runs write for TensorBoard, read by a decoder of its own: TFRecord, CRC-32C, protobuf."""
import json
import math
import random
import struct
import subprocess

from support import FERRY

TOOL = FERRY.parent.parent / "tests/metric_tool"

TABLE = []
for byte in range(256):
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    TABLE.append(byte)


def masked_crc(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(data):
    while data:
        length, length_crc = struct.unpack_from("<QI", data)
        assert masked_crc(data[:8]) == length_crc
        message, (crc,) = data[12:12 + length], struct.unpack_from("<I", data, 12 + length)
        assert len(message) == length and masked_crc(message) == crc
        yield message
        data = data[16 + length:]


def fields(message):
    """[(number, value)] of a message of protobuf: bytes, integers, floats."""
    found = []

    def varint():
        nonlocal message
        value = shift = 0
        while True:
            byte, message = message[0], message[1:]
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value
    while message:
        tag = varint()
        if tag & 7 == 0:
            value = varint()
        elif tag & 7 == 2:
            length = varint()
            value, message = message[:length], message[length:]
            assert len(value) == length
        else:
            layout, length = {1: ("<d", 8), 5: ("<f", 4)}[tag & 7]
            (value,), message = struct.unpack(layout, message[:length]), message[length:]
        found.append((tag >> 3, value))
    return found


def events(folder):
    (path,) = folder.iterdir()
    for message in records(path.read_bytes()):
        event = dict(fields(message))
        if 5 in event:  # summary: values, each with tag and simple_value
            event[5] = {value[1].decode(): value[2] for value in (dict(fields(v)) for number, v in fields(event[5]) if number == 1)}
        yield event


def test_event_files_hold_every_number(work):
    choose = random.Random(0)
    names = ["train/loss", "perf/throughput", "timing_s/größe", "x" * 300]
    steps = [{"step": step, "time": 1.7e9 + step / 4, "data": {name: choose.uniform(-1, 1) * 10 ** choose.randrange(-30, 30) for name in names}}
             for step in [0, 1, 2, 127, 128, 300, 70_000, 2**40]]
    steps[2]["data"] = {}
    steps[3]["data"]["train/loss"] = None
    (work / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    subprocess.run([TOOL, work / "metrics.jsonl", work / "tb", "1"], check=True, timeout=60)
    version, *rest = events(work / "tb")
    assert version[3] == b"brain.Event:2"
    assert len(rest) == len(steps) - 1
    for event, step in zip(rest, steps[1:]):
        assert (event[1], event[2]) == (step["time"], step["step"])
        assert set(event[5]) == set(step["data"])
        for name, value in step["data"].items():
            if value is None:
                assert math.isnan(event[5][name])
            else:
                assert event[5][name] == struct.unpack("<f", struct.pack("<f", value))[0]


def test_a_run_that_goes_on_tells_tensorboard_from_where(work):
    (work / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "data": {"a": step}}) + "\n" for step in range(1, 6)))
    subprocess.run([TOOL, work / "metrics.jsonl", work / "tb", "4"], check=True, timeout=60)
    _, start, *rest = events(work / "tb")
    assert start[2] == 4 and dict(fields(start[7])) == {1: 1}  # SessionLog.START
    assert [event[2] for event in rest] == [4, 5]
