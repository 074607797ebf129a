"""ferry generate beside transformers: the same greedy tokens, the log-probabilities of its forward byte for byte, prompts from
everywhere, and an answer to each bad one."""
import json
import os
import shutil
import signal
import subprocess

import pyarrow
import pyarrow.parquet
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from generate_beside_transformers import chosen, compare, forward_log_probs, load, ours, random_prompts, theirs
from support import DATA, FERRY, ROOT, run_ok
from tiny_models import make_longrope

CHAT = ("{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}")


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A tiny model of 4096 positions with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("talker")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator([p.read_text() for p in sorted(ROOT.glob("docs/*.md"))],
                                  trainers.BpeTrainer(vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=CHAT).save_pretrained(folder)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(vocab_size=tokenizer.get_vocab_size(), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, intermediate_size=48, max_position_embeddings=4096, eos_token_id=0, bos_token_id=None)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def answers(*arguments, code=0, stdin=""):
    done = subprocess.run([FERRY, "generate", *map(str, arguments), "--json", "-q"], input=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, timeout=120)
    assert done.returncode == code, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def only(*arguments, **kwargs):
    """The one output of the one prompt."""
    (answer,) = answers(*arguments, **kwargs)
    (output,) = answer["outputs"]
    return output


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen2_tied", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "moonlight", "glm4_moe", "glm4", "smollm3", "olmo2", "olmo3", "phi3", "granite", "ernie4_5", "gemma3_text", "gemma3", "mistral3", "qwen2_5_vl", "kimi_k25", "gemma2", "ministral3", "ernie4_5_moe", "minimax_m2",
                                    "gpt_oss", "qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_tokens_and_log_probs_are_those_of_transformers_forward(family):
    """Greedy tokens are transformers' own, as long as its generate takes what its forward likes best."""
    checkpoint = DATA / f"hf_{family}/hf"
    model = load(checkpoint)
    prompts = random_prompts(model, 6, [3, 17, 30])
    greedy = ours(checkpoint, prompts, "--max-tokens", 24, "--temperature", 0)
    assert compare(model, prompts, greedy)[1] == 0
    agreed = 0
    for prompt, (mine, _), (generated, _) in zip(prompts, greedy, theirs(model, prompts, 24, 0, batched=False), strict=True):
        log_probs = forward_log_probs(model, prompt, mine)
        assert torch.equal(log_probs.max(-1).values, chosen(log_probs, mine))
        same = next((i for i, (a, b) in enumerate(zip(mine, generated, strict=True)) if a != b), len(mine))
        agreed += same
        if same < len(mine):  # its generate took a token that its own forward likes less, or as much
            assert log_probs[same, generated[same]] <= log_probs[same, mine[same]]
    assert agreed > 24
    sampled = ours(checkpoint, prompts, "--max-tokens", 24, "--seed", 5)
    assert compare(model, prompts, sampled)[1] == 0


def test_longrope_takes_as_many_tokens_as_turn_by_one_factor(tmp_path):
    """A longer sequence turns otherwise from its first token on."""
    make_longrope(tmp_path / "hf", 48)
    model = load(tmp_path / "hf")
    prompts = random_prompts(model, 4, [3, 24])
    assert compare(model, prompts, ours(tmp_path / "hf", prompts, "--max-tokens", 24, "--temperature", 0))[1] == 0
    done = subprocess.run([FERRY, "generate", tmp_path / "hf", "--prompt-ids", "1,2", "--max-model-len", "49"], capture_output=True, text=True)
    assert done.returncode == 2 and "longrope" in done.stderr and "48 positions" in done.stderr


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_a_delta_net_decodes_by_the_recurrence_of_transformers_generate(family, tmp_path):
    """In `fast`: a prompt by the rule in chunks, then token by token; prompts that end within a chunk, at its end, and in the next one."""
    checkpoint = tmp_path / "hf"
    shutil.copytree(DATA / f"hf_{family}/hf", checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    model = load(checkpoint, torch.float32)
    prompts = random_prompts(model, 6, [1, 17, 63, 64, 65, 130])
    how = ("--alignment", "fast", "--dtype", "fp32", "--max-tokens", 80, "--temperature", 0)
    expected = theirs(model, prompts, 80, 0, batched=False)
    for options in ((), ("--max-num-batched-tokens", 40, "--max-num-seqs", 4), ("--tp", 2)):
        for (mine, log_probs), (tokens, of_theirs) in zip(ours(checkpoint, prompts, *how, *options), expected, strict=True):
            assert mine == tokens
            assert torch.allclose(log_probs, of_theirs, atol=1e-4)


def test_processed_log_probs_are_those_of_the_tempered_distribution():
    checkpoint = DATA / "hf_qwen2/hf"
    model = load(checkpoint)
    (prompt,) = random_prompts(model, 1, [20])
    output = only(checkpoint, "--prompt-ids", ",".join(map(str, prompt)), "--temperature", 0.7, "--max-tokens", 30, "--ignore-eos", "--logprobs", 3)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output["token_ids"]])).logits[0, len(prompt) - 1:-1].float()
    expected = chosen(torch.log_softmax(logits / 0.7, -1), output["token_ids"])
    assert torch.equal(expected, torch.tensor(output["processed_logprobs"]))
    top = torch.log_softmax(logits, -1).topk(3).values
    assert torch.equal(top, torch.tensor([[t["model_logprob"] for t in row] for row in output["top_logprobs"]]))


def test_answers_depend_on_nothing_but_the_request(talker):
    """Not on the batch, the chunks of a prompt, room for keys, prefixes that others share, or the mesh."""
    prompts = [list(range(5, 150)) + [i % 3 + 1] * (i % 7 + 1) for i in range(9)]
    records = [{"id": f"r{i}", "prompt_token_ids": p, "sampling_params": {"temperature": 0.5 + i % 3, "top_p": 1 - 0.1 * (i % 2), "n": 1 + i % 2,
                                                                         "repetition_penalty": 1 + 0.1 * (i % 4 == 3)}}
               for i, p in enumerate(prompts)]

    def run(records, *arguments):
        lines = "".join(json.dumps(r) + "\n" for r in records)
        return {a["id"]: a for a in answers(talker, "--input", "-", "--max-tokens", 20, *arguments, stdin=lines)}

    expected = run(records)
    assert list(expected) == [r["id"] for r in records]
    assert run(records[::-1]) == expected
    assert run(records[4:5]) == {"r4": expected["r4"]}
    for arguments in (["--max-num-seqs", 2], ["--max-num-batched-tokens", 48, "--max-num-seqs", 16], ["--num-blocks", 6],
                      ["--no-enable-prefix-caching"], ["--no-enable-chunked-prefill"], ["--tp", 2], ["--dp", 3]):
        assert run(records, *arguments) == expected, arguments


def test_text_in_and_out(talker):
    tokenizer = transformers.AutoTokenizer.from_pretrained(talker)
    (answer,) = answers(talker, "The weights of", "--max-tokens", 40, "--seed", 1, "--ignore-eos")
    (output,) = answer["outputs"]
    assert answer["prompt"] == "The weights of" and answer["prompt_token_ids"] == tokenizer("The weights of")["input_ids"]
    whole = tokenizer.decode(answer["prompt_token_ids"] + output["token_ids"], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert whole == "The weights of" + output["text"]
    streamed = run_ok("generate", talker, "The weights of", "--max-tokens", 40, "--seed", 1, "--ignore-eos")
    assert streamed.stdout == output["text"] + "\n"
    assert "tokens/s" in streamed.stderr and "token after" in streamed.stderr and "KV cache" in streamed.stderr
    assert only(talker, "--max-tokens", 40, "--seed", 1, "--ignore-eos", stdin="The weights of") == output

    # A stop string ends the text before it; tokens are there up to the one that completed it.
    stop = output["text"][3:6]
    stopped = only(talker, "The weights of", "--max-tokens", 40, "--seed", 1, "--ignore-eos", "--stop", "never said", "--stop", stop)
    assert stopped["text"] == output["text"][:output["text"].index(stop)]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    count = len(stopped["token_ids"])
    assert stopped["token_ids"] == output["token_ids"][:count] and stopped["model_logprobs"] == output["model_logprobs"][:count]
    by_token = only(talker, "The weights of", "--max-tokens", 40, "--seed", 1, "--ignore-eos", "--stop-token-ids", output["token_ids"][6])
    first = output["token_ids"].index(output["token_ids"][6])
    assert by_token["token_ids"] == output["token_ids"][:first + 1]
    assert (by_token["finish_reason"], by_token["stop_reason"]) == ("stop", output["token_ids"][6])


def test_one_of_several_samples_may_stop(talker):
    whole = answers(talker, "The", "--n", 3, "--max-tokens", 24, "--seed", 2, "--ignore-eos")[0]["outputs"]
    stop = whole[1]["text"][2:5]
    parts = answers(talker, "The", "--n", 3, "--max-tokens", 24, "--seed", 2, "--ignore-eos", "--stop", stop)[0]["outputs"]
    for full, part in zip(whole, parts, strict=True):
        assert part["finish_reason"] == ("stop" if stop in full["text"] else "length")
        assert part["text"] == full["text"].split(stop)[0]
    assert parts[1]["stop_reason"] == stop


def test_chat_and_files(talker, work):
    tokenizer = transformers.AutoTokenizer.from_pretrained(talker)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a box?"}]
    (chat,) = answers(talker, "--chat", "--system", "Be brief.", "What is a box?", "--max-tokens", 5)
    assert chat["prompt_token_ids"] == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    records = [{"id": "chat", "messages": messages}, {"id": "verl", "prompt": messages, "data_source": "x"}, {"id": "said", "prompt": "What is a box?"}]
    (work / "prompts.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    by_file = answers(talker, "--chat", "--system", "Be brief.", "--input", work / "prompts.jsonl", "--max-tokens", 5, "--seed", 7)
    assert [a["id"] for a in by_file] == ["chat", "verl", "said"]
    assert all(a["prompt_token_ids"] == chat["prompt_token_ids"] and a["outputs"] == by_file[0]["outputs"] for a in by_file)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"id": str(i), "prompt": messages, "score": 0.5} for i in range(3)]), work / "prompts.parquet")
    table = answers(talker, "--chat", "--input", work / "prompts.parquet", "--max-tokens", 5, "--seed", 7)
    assert len(table) == 3 and all(a["outputs"] == by_file[0]["outputs"] for a in table)


def test_other_formats_give_the_same(talker, work):
    expected = only(talker, "The", "--max-tokens", 20, "--temperature", 0)
    run_ok("convert", talker, work / "mcore", "--tp", 2)
    assert only(work / "mcore", "The", "--max-tokens", 20, "--temperature", 0) == expected
    run_ok("convert", talker, work / "archive", "--to", "h5")
    assert only(work / "archive", "The", "--max-tokens", 20, "--temperature", 0) == expected


BAD = [
    ({"prompt_token_ids": [1, 400]}, "token 1 of the prompt is 400: the vocabulary has 400"),
    ({"prompt_token_ids": [-1]}, "token 0 of the prompt is -1"),
    ({"prompt_token_ids": []}, "the prompt is empty"),
    ({"prompt_token_ids": [1.5]}, "prompt_token_ids: 1.5 is not a token id"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt_token_ids": [1] * 96}, "longer than max_model_len, 96"),
    ({"prompt_token_ids": [1], "sampling_params": {"temperature": -1}}, "temperature: -1 is not"),
    ({"prompt_token_ids": [1], "sampling_params": {"n": 2, "temperature": 0}}, "n: 2 answers at temperature 0"),
    ({"prompt_token_ids": [1], "sampling_params": {"min_tokens": 9}}, "min_tokens: 9 are more than max_tokens, 4"),
    ({"prompt_token_ids": [1], "sampling_params": {"tempature": 1}}, "there is no tempature"),
    ({"prompt_token_ids": [1], "sampling_params": {"top_k": "all"}}, 'sampling_params.top_k: "all" is not a whole number'),
    ({"messages": []}, "messages need a chat template"),
    ({"prompt": "a", "prompt_token_ids": [1]}, "a record has one of prompt, messages and prompt_token_ids, not 2"),
    ({"text": "a"}, "a record has one of prompt, messages and prompt_token_ids, not 0"),
    ([1], "a prompt is a JSON object"),
]


def test_each_bad_prompt_has_its_answer_and_the_others_go_on(talker):
    good = {"prompt_token_ids": [5, 6]}
    lines = "".join(json.dumps(r) + "\n" for bad, _ in BAD for r in (bad, good)) + "{\n" + json.dumps(good) + "\n"
    got = answers(talker, "--input", "-", "--max-tokens", 4, "--max-model-len", 96, "--seed", 1, stdin=lines, code=2)
    assert len(got) == 2 * len(BAD) + 2
    for answer, (bad, message) in zip(got[::2], BAD, strict=False):
        assert message in answer["error"]["message"], (bad, answer)
    assert "line 31: is not valid JSON" in got[-2]["error"]["message"]
    assert all(a["outputs"] == got[-1]["outputs"] for a in got[1::2])


def test_what_can_never_fit_is_refused(talker):
    got = answers(talker, "--prompt-ids", "1,2", "--prompt-ids", ",".join(["1"] * 100), "--max-tokens", 40, "--num-blocks", 2, code=2)
    assert "outputs" in got[0] and "can never fit the KV cache, of 128 tokens" in got[1]["error"]["message"]


def test_bytes_that_are_no_text(talker):
    done = subprocess.run([FERRY, "generate", talker, "--json", "-q"], input=b"a\xff", stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == 2 and json.loads(done.stdout)["error"]["message"] == "the prompt is not UTF-8"


def test_without_a_tokenizer_ids_still_work(talker):
    checkpoint = DATA / "hf_llama/hf"
    ids, text = answers(checkpoint, "hello", "--prompt-ids", "1,2", "--max-tokens", 4, code=2)[::-1]
    assert len(ids["outputs"][0]["token_ids"]) == 4 and "text" not in ids["outputs"][0]
    assert "no tokenizer" in text["error"]["message"]
    assert run_ok("generate", checkpoint, "--prompt-ids", "1,2", "--max-tokens", 4, "--temperature", 0, "-q").stdout.startswith("--- 0 (length)\n[")


def test_a_family_that_megatrons_arguments_tell_is_said(tmp_path):
    """They do not tell Granite from Llama, which computes otherwise."""
    hf, prompt = DATA / "hf_granite/hf", ("--prompt-ids", "1,2", "--max-tokens", 1)
    run_ok("convert", hf, tmp_path / "megatron")
    said = "family     llama, by Megatron's arguments; --hf-config names another"
    assert said not in run_ok("generate", tmp_path / "megatron", *prompt).stderr
    shutil.rmtree(tmp_path / "megatron/release/ferry")
    assert said in run_ok("generate", tmp_path / "megatron", *prompt).stderr
    assert said not in run_ok("generate", tmp_path / "megatron", "--hf-config", hf, *prompt).stderr


@pytest.mark.parametrize("arguments, message", [
    (["--temperature", "-1"], "temperature: -1 is not"), (["--n", "2", "--temperature", "0"], "n: 2 answers"),
    (["--max-model-len", "5000"], "max_model_len is 5000: the model knows 4096 positions"), (["--system", "x"], "--system: is a message of a chat"),
    (["--tp", "3"], "4 attention heads cannot be split by tp 3"),
    (["--tokenizer", "/nowhere"], "--tokenizer /nowhere: there is neither a tokenizer.json nor a tiktoken.model"),
    (["--input", "/nowhere.jsonl"], "/nowhere.jsonl"), (["--kv-cache-memory-bytes", "much"], "--kv-cache-memory-bytes much: is not a size"),
    (["--logprobs", "2"], "--logprobs: has no effect without --json"), (["--load-format", "dummy", "--iteration", "5"], "--iteration and --hf-config"),
    (["--num-blocks", "9", "--kv-cache-memory-bytes", "1MiB"], "excludes --num-blocks"),
    (["--gpu-memory-utilization", "0.9"], "--gpu-memory-utilization: has no effect with --device cpu")])
def test_options_that_make_no_sense(talker, arguments, message):
    done = run_ok("generate", talker, "The", *arguments, code=2)
    assert message in done.stderr and done.stdout == ""


@pytest.mark.parametrize("arguments, message", [
    (["--prompt-ids", "1", "--chat"], "--chat: has no effect: all prompts are token ids"),
    (["--chat", "--system", "x", "--input", "chat.jsonl"], "--system: has no effect: all prompts are messages or token ids")])
def test_a_chat_that_no_prompt_is(talker, tmp_path, arguments, message):
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "x"}]}))
    assert message in run_ok("generate", talker, *arguments, code=2, cwd=tmp_path).stderr


def test_an_interrupt_ends_what_is_under_way(talker):
    """An answer that was not finished says so; the others have their answers, and the exit status is 2."""
    command = [FERRY, "generate", talker, "--ignore-eos", "--max-tokens", "4000", "--seed", "1"]
    streaming = subprocess.Popen([*command, "The"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    begin = streaming.stdout.read(40)
    streaming.send_signal(signal.SIGINT)
    rest, talk = streaming.communicate(timeout=60)
    assert streaming.returncode == 2 and "error: cancelled" in talk and "tokens/s" in talk
    assert only(talker, "The", "--ignore-eos", "--max-tokens", 400, "--seed", 1)["text"].startswith(begin) and rest

    lines = json.dumps({"prompt_token_ids": [1], "sampling_params": {"max_tokens": 1}}) + "\n" + json.dumps({"prompt_token_ids": [2]}) + "\n"
    batch = subprocess.Popen([*command, "--input", "-", "--json"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    batch.stdin.write(lines)
    batch.stdin.close()
    first = json.loads(batch.stdout.readline())
    batch.send_signal(signal.SIGINT)
    (second,) = map(json.loads, batch.stdout.read().splitlines())
    assert batch.wait(timeout=60) == 2
    batch.stdout.close(), batch.stderr.close()
    assert first["outputs"][0]["finish_reason"] == "length" and second["outputs"][0]["finish_reason"] == "abort"
    assert 0 < len(second["outputs"][0]["token_ids"]) < 4000


def test_the_benchmark_has_no_gpu_memory_either(talker):
    said = run_ok("bench", "rollout", talker, "--gpu-memory-utilization", "0.5", code=2).stderr
    assert "--gpu-memory-utilization: has no effect" in said and "--kv-cache-memory-bytes" in said


def test_a_missing_program_of_models_says_how_it_is_built(tmp_path):
    shutil.copy(FERRY, tmp_path / "ferry")
    done = subprocess.run([tmp_path / "ferry", "generate", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2 and "ferry-torch does not lie beside" in done.stderr and "pip install ferry-torch" in done.stderr and "./quickstart --rl" in done.stderr
    asked = subprocess.run([tmp_path / "ferry", "generate", "--help"], capture_output=True, text=True)
    assert asked.returncode == 0 and "Usage: ferry generate" in asked.stdout and "pip install ferry-torch" in asked.stdout
    (tmp_path / "ferry-torch").write_text("#!/no/such/interpreter\n")
    (tmp_path / "ferry-torch").chmod(0o755)
    done = subprocess.run([tmp_path / "ferry", "generate", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2 and "ferry-torch: cannot be started: No such file" in done.stderr


def test_threads_of_models_wait_asleep_unless_somebody_says_otherwise(tmp_path):
    """OpenMP's threads that wait awake take the cores of those that compute."""
    shutil.copy(FERRY, tmp_path / "ferry")
    (tmp_path / "ferry-torch").write_text("#!/bin/sh\necho $OMP_WAIT_POLICY\n")
    (tmp_path / "ferry-torch").chmod(0o755)
    others = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    said = [subprocess.run([tmp_path / "ferry", "generate"], env=others | more, capture_output=True, text=True).stdout.strip()
            for more in ({}, {"OMP_WAIT_POLICY": "active"})]
    assert said == ["passive", "active"]
