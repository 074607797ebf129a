"""Tiny models of Qwen3-VL with everything that reads images: a tokenizer with their tokens, a chat template, a processor."""
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = ("{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
            "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
            "{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")


def write_tokenizer(folder):
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(["what is in this image and that one"] * 10, trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def write_model(folder, family, seed=7, text={}, vision={}):
    """Random weights in bf16; 4 layers, 4 blocks with a deepstack of 2. `text` and `vision` change the shapes."""
    import torch
    import transformers as T
    T.logging.set_verbosity_error()
    changes = text, vision
    text = dict(vocab_size=304, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96,
                max_position_embeddings=512, rope_parameters={"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2],
                                                              "mrope_interleaved": True})
    if family == "Qwen3VLMoe":
        text.update(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    vision = dict(depth=4, hidden_size=48, intermediate_size=80, num_heads=3, patch_size=4, spatial_merge_size=2, temporal_patch_size=2,
                  out_hidden_size=64, num_position_embeddings=36, deepstack_visual_indexes=[0, 2])
    text, vision = text | changes[0], vision | changes[1]
    config = getattr(T, f"{family}Config")(text_config=text, vision_config=vision, tie_word_embeddings=False, image_token_id=5, video_token_id=6,
                                           vision_start_token_id=3, vision_end_token_id=4)
    torch.manual_seed(seed)
    model = getattr(T, f"{family}ForConditionalGeneration")(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(0.1 * noise + (1 if parameter.ndim == 1 and "norm" in name and name.endswith("weight") else 0))
        model.lm_head.weight[5:7] = 0  # no answer of the largest logits has an image's token
    model.save_pretrained(folder)
    write_tokenizer(folder)
    processor = T.Qwen2VLImageProcessor(patch_size=4, temporal_patch_size=2, merge_size=2, image_mean=[0.5, 0.45, 0.4], image_std=[0.5, 0.27, 0.3],
                                        size={"shortest_edge": 32 * 32, "longest_edge": 80 * 80})
    processor.save_pretrained(folder)


def load_peer(folder, dtype="bfloat16"):
    """transformers' model, and its processor."""
    import torch
    import transformers as T
    model = T.AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager").eval()
    processor = T.Qwen3VLProcessor(image_processor=T.Qwen2VLImageProcessor.from_pretrained(folder), tokenizer=T.AutoTokenizer.from_pretrained(folder),
                                   video_processor=T.Qwen3VLVideoProcessor(), chat_template=TEMPLATE)
    return model, processor


def answer_log_probs(peer, chat, tokens):
    """The log-probabilities [tokens, vocabulary] of transformers' forward of the finished sequence."""
    import torch
    model, processor = peer
    inputs = processor.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    prompt = inputs.pop("input_ids")[0].tolist()
    inputs.pop("attention_mask")
    types = inputs.pop("mm_token_type_ids")[0].tolist()
    assert 5 not in tokens  # transformers would look for its image
    whole = torch.tensor([prompt + tokens])
    with torch.no_grad():
        logits = model(whole, mm_token_type_ids=torch.tensor([types + [0] * len(tokens)]), **inputs).logits[0, len(prompt) - 1:-1]
    return torch.log_softmax(logits.float(), -1)
