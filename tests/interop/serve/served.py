"""A running `ferry serve`, a tiny model that talks, and what both do."""
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import threading
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ranks import TORCH_PROGRAM, free_port
from support import FERRY, ROOT

CHAT = ("{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
        "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
NAME = "talker"


def make_talker(folder, special_tokens=(), eos_token="<|end|>"):
    """A tiny model of 4096 positions with a tokenizer and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator([p.read_text() for p in sorted(ROOT.glob("docs/*.md"))],
                                  trainers.BpeTrainer(vocab_size=400, special_tokens=[eos_token, *special_tokens], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos_token, chat_template=CHAT).save_pretrained(folder)
    config = transformers.LlamaConfig(vocab_size=tokenizer.get_vocab_size(), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, intermediate_size=48, max_position_embeddings=4096, eos_token_id=0, bos_token_id=None)
    save_weights(folder, config, 3)
    return folder


def save_weights(folder, config, seed):
    torch.manual_seed(seed)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def teach(folder, template, said, messages, tools=None):
    """A model that answers one question by these words: random but for its output layer, wide enough to tell the places of the answer apart."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    prompt = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)["input_ids"]
    answer = tokenizer(said)["input_ids"]
    config = transformers.AutoConfig.from_pretrained(folder)
    config.hidden_size, config.head_dim, config.initializer_range = 128, 32, 0.2
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).float()
    with torch.no_grad():
        hidden = model.model(torch.tensor([prompt + answer])).last_hidden_state[0, len(prompt) - 1:-1]
    optimizer = torch.optim.Adam([model.lm_head.weight], lr=3e-2)
    for _ in range(400):
        loss = torch.nn.functional.cross_entropy(hidden @ model.lm_head.weight.T, torch.tensor(answer))
        if loss.item() < 0.001:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


class Served:
    def __init__(self, process, port, others=(), said=()):
        self.process, self.port, self.others = process, port, others
        self.said = said  # on stderr, before it served
        self.url = f"http://127.0.0.1:{port}"
        self.log = []
        threading.Thread(target=self.keep_log, daemon=True).start()

    def keep_log(self):
        for line in self.process.stderr:
            self.log.append(line)

    def ask(self, method, path, body=None, headers=None, timeout=60):
        """-> (status, headers, the bytes of the body)"""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json"} | (headers or {}))
        answer = connection.getresponse()
        result = answer.status, dict(answer.getheaders()), answer.read()
        connection.close()
        return result

    def post(self, path, status=200, timeout=60, **body):
        got, _, answer = self.ask("POST", path, body, timeout=timeout)
        assert got == status, (got, answer)
        return json.loads(answer) if answer else None

    def get(self, path, status=200):
        got, _, answer = self.ask("GET", path)
        assert got == status, (got, answer)
        return answer

    def complete(self, prompt, status=200, path="/v1/completions", **fields):
        return self.post(path, status, **({"model": NAME, "prompt": prompt} | fields))

    def metric(self, name):
        """The sum of a metric's samples."""
        lines = [line for line in self.get("/metrics").decode().splitlines() if re.match(rf"{re.escape(name)}[ {{]", line)]
        assert lines, name
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def threads(self):
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))

    def descriptors(self):
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def resident_bytes(self):
        (line,) = [line for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
        return int(line.split()[1]) * 1024


@contextlib.contextmanager
def serve(checkpoint, *arguments, port=0, ranks=1, descriptors=None, fails=False):
    """Each rank is a process, of at most so many descriptors; `others` of what this yields are those behind the first. `fails`: all end with status 2."""
    program = FERRY if ranks == 1 else TORCH_PROGRAM
    limit = [] if descriptors is None else ["prlimit", f"--nofile={descriptors}"]
    command = [str(word) for word in (*limit, program, "serve", checkpoint, "--port", port, "--served-model-name", NAME, *arguments)]
    meeting = {} if ranks == 1 else {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}

    def start(rank):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if meeting else {}
        return subprocess.Popen(command, stderr=subprocess.PIPE if rank == 0 else None, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"} | meeting | place)

    processes = [start(rank) for rank in range(ranks)]
    process, *others = processes
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if found := re.match(r"serving +http://127\.0\.0\.1:(\d+)$", line):
                break
        else:
            raise AssertionError("".join(said))
        yield Served(process, int(found[1]), others, said)
        if fails:
            assert [one.wait(timeout=30) for one in processes] == [2] * ranks
            return
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert {one.wait(timeout=60) for one in processes} - {-signal.SIGKILL} == {0}
    finally:
        for one in processes:
            one.kill()
            one.wait()
