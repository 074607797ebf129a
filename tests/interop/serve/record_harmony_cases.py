"""Writes tests/data/harmony/cases.json: answers of GPT-OSS, and the messages that openai-harmony 0.0.8 reads in them.

It needs the package and its vocabulary, which it downloads, or finds as o200k_base.tiktoken in TIKTOKEN_ENCODINGS_BASE.
"""
import json
from pathlib import Path

CASES = Path(__file__).parents[2] / "data/harmony/cases.json"
CALL = '{"city": "Z\u00fcrich \\"x\\" <b>", "days": 3}'
ANSWERS = [
    [("analysis", None, None, "It is cold there."), ("final", None, None, "Yes.\n\n  Very <cold>.\n")],
    [("final", None, None, "Yes.")],
    [("analysis", None, None, "One."), ("analysis", None, None, "Two."), ("final", None, None, "Three.")],
    [("analysis", None, None, "A tool knows."), ("commentary", "functions.weather", "<|constrain|>json", CALL)],
    [("commentary", None, None, "Let me see."), ("commentary", "functions.weather", "json", CALL)],
    [("analysis", "functions.weather", None, CALL)],
    [("commentary", "functions.weather", "<|constrain|>json", CALL), ("commentary", "functions.a.b-c_1", "<|constrain|>json", "{}")],
]
TEXTS = [
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{}<|call|>",
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
    " to=functions.weather<|channel|>commentary json<|message|>{\"city\": \"Bern\"}<|call|>",
    "<|channel|>commentary to=functions.weather<|constrain|>json<|message|>\n{\"city\": \"Bern\"}\n<|call|>",
    "<|channel|>final<|message|>Yes, to=functions.weather, and < and |.<|return|>",
    "<|channel|>final<|message|><|return|>",
]


def record():
    from openai_harmony import Conversation, HarmonyEncodingName, Message, Role, load_harmony_encoding

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    texts = []
    for answer in ANSWERS:
        messages = []
        for channel, recipient, content_type, content in answer:
            message = Message.from_role_and_content(Role.ASSISTANT, content).with_channel(channel)
            message = message.with_recipient(recipient) if recipient else message
            messages.append(message.with_content_type(content_type) if content_type else message)
        text = "".join(encoding.decode(encoding.render(message)) for message in messages)
        texts.append(text.removeprefix("<|start|>assistant"))  # the template's
    cases = []
    for text in texts + TEXTS:
        read = encoding.parse_messages_from_completion_tokens(encoding.encode(text, allowed_special="all"), Role.ASSISTANT)
        cases.append({"text": text, "messages": [
            {"channel": one.channel, "recipient": one.recipient, "content": "".join(part.text for part in one.content)} for one in read]})
    return cases


if __name__ == "__main__":
    CASES.parent.mkdir(exist_ok=True)
    CASES.write_text(json.dumps({"package": "openai-harmony 0.0.8", "cases": record()}, indent=1, ensure_ascii=False) + "\n")
