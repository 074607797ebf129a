"""Models that often call tools, what answers them, and the settings of their runs."""
import json
import math
import sys

from ppo_run import ACTOR, ROLLOUT, write_prompts
from sft_run import write_model
from support import ROOT

TEMPLATE = ("{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}"
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>"
            "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")
SCHEMA = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}}}}
CALCULATOR = ROOT / "docs/examples/calculator.py"


def call(name, expression):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'expression': expression}})}</tool_call>"


CALLS = [call("calculator", "17*3"), call("calculator", "1/0"), call("calculator", "2**5-1"), call("nothing", "1")]


def write_world(folder, calls, family="Llama", **shape):
    """A model that often says one of these texts, each a token of its own, and often ends its turn."""
    import torch
    import transformers
    folder.mkdir(exist_ok=True)
    write_model(folder / "model", family, **{"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
                                            "num_key_value_heads": 2, "vocab_size": 312, "max_position_embeddings": 160} | shape)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.add_tokens(calls)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    with torch.no_grad():  # the first channel of every token is the same, so that a weight of it is a bias
        model.model.embed_tokens.weight[:, 0] = 10
        model.lm_head.weight[tokenizer.convert_tokens_to_ids([*calls, "<|end|>"]), 0] += 4.8 / math.sqrt(model.config.hidden_size)
    model.save_pretrained(folder / "model")
    write_prompts(folder / "train.jsonl", 12)
    (folder / "reward.py").write_text("""import json, sys
for line in sys.stdin:
    q = json.loads(line)
    print(json.dumps({"id": q["id"], "score": sum(map(ord, q["solution_str"])) % 7 / 6}), flush=True)
""")
    return folder


def write_tools(folder, command=f"{sys.executable} {CALCULATOR}"):
    (folder / "tools.json").write_text(json.dumps({"tools": [{"tool_schema": SCHEMA, "command": command}]}))
    return folder


def with_tools(world, **more):
    return {f"{ROLLOUT}.agent.default_agent_loop": "tool_agent", f"{ROLLOUT}.multi_turn.tool_config_path": str(world / "tools.json"),
            "data.max_prompt_length": 64, "data.max_response_length": 96, f"{ROLLOUT}.multi_turn.max_assistant_turns": 3,
            f"{ACTOR}.ppo_max_token_len_per_gpu": 256} | more


PARTIAL = {f"{ACTOR}.ranks": [0], f"{ROLLOUT}.ranks": [1], "async_training.staleness_threshold": 2, "async_training.partial_rollout": True,
           "data.gen_batch_size": 6, f"{ROLLOUT}.max_num_seqs": 5, "trainer.total_training_steps": 4}

ENVIRONMENT = """import json, sys
games = {}
for line in sys.stdin:
    q = json.loads(line)
    if q["method"] == "reset":
        games[q["session"]] = 0
        said = {"observation": f"find {q['ground_truth']}"}
    elif q["method"] == "close":
        games.pop(q["session"])
        continue
    else:
        games[q["session"]] += 1
        good = len(q["action"]) % 2
        said = {"observation": "go on", "reward": good / 4, "done": games[q["session"]] == 3, "info": {"acc": good}}
        if said["done"]: del games[q["session"]]
    print(json.dumps({"id": q["id"], **said}), flush=True)
"""
