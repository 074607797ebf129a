import json
import subprocess

import pytest

from support import FERRY


class TextTool:
    """The program tests/text_tool, asked line by line."""

    def __init__(self):
        self.process = subprocess.Popen([FERRY.parent.parent / "tests/text_tool"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(self, **request):
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer

    def error(self, **request):
        with pytest.raises(AssertionError) as caught:
            self(**request)
        return str(caught.value)


@pytest.fixture(scope="module")
def tool():
    tool = TextTool()
    yield tool
    tool.process.stdin.close()
    assert tool.process.wait(timeout=30) == 0
