"""The reference mapping of Hugging Face weights to full, unsharded Megatron tensors, in torch. It shares nothing with
Ferry's own tables. Running both models and comparing their logits has checked it.
"""
import hashlib
import re


HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def arch_of(c):
    """Plain description of the model used by everything below (also stored in sha256.json)."""
    t = c["model_type"]
    rp = c.get("rope_parameters") or {}
    a = dict(
        arch=t, vocab=c["vocab_size"], hidden=c["hidden_size"], layers=c["num_hidden_layers"],
        heads=c["num_attention_heads"], groups=c.get("num_key_value_heads") or c["num_attention_heads"],
        head_dim=c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"], ffn=c.get("intermediate_size") or 4 * c["hidden_size"],
        eps=c.get("rms_norm_eps") or c["layer_norm_epsilon"], rope_theta=c.get("rope_theta", rp.get("rope_theta", 10000.0)),
        tied=bool(c.get("tie_word_embeddings")),
        qkv_bias=t in ("qwen2", "qwen2_moe") or bool(c.get("attention_bias") and t in ("glm4_moe", "glm4", "seed_oss", "gpt_oss")),
        interleaved=t in ("ernie4_5", "glm4"), post_norms=t in ("glm4", "olmo2", "olmo3"),
        qk_norm=t in ("qwen3", "qwen3_moe", "olmo2", "olmo3") or bool(c.get("use_qk_norm")), rotary=rp.get("partial_rotary_factor", 1.0),
        one_qkv=t == "phi3", one_gate_up=t in ("glm4", "phi3"), experts=0, mla=False, mtp=0, max_pos=c["max_position_embeddings"],
    )
    if t == "smollm3":
        a.update(no_rope=[int(not turns) for turns in c["no_rope_layers"]])
    if t == "mixtral":
        a.update(experts=c["num_local_experts"], topk=c["num_experts_per_tok"], moe_ffn=c["intermediate_size"],
                 pre_softmax=False, shared=0)
    if t in ("qwen2_moe", "qwen3_moe"):
        a.update(experts=c.get("num_experts") or c["num_local_experts"], topk=c["num_experts_per_tok"],
                 moe_ffn=c["moe_intermediate_size"], pre_softmax=not c.get("norm_topk_prob", False),
                 shared=c.get("shared_expert_intermediate_size", 0) if t == "qwen2_moe" else 0, shared_gate=t == "qwen2_moe")
    if t == "gpt_oss":
        a.update(experts=c["num_local_experts"], topk=c["num_experts_per_tok"], moe_ffn=c["intermediate_size"], pre_softmax=False, shared=0,
                 sinks=True, window=c["sliding_window"], sliding=[x == "sliding_attention" for x in c["layer_types"]], yarn=rp)
    if t == "glm4_moe":
        a.update(experts=c["n_routed_experts"], topk=c["num_experts_per_tok"], moe_ffn=c["moe_intermediate_size"], pre_softmax=False,
                 shared=c["n_shared_experts"] * c["moe_intermediate_size"], shared_gate=False, score="sigmoid", expert_bias=True, n_group=c["n_group"],
                 topk_group=c["topk_group"], scaling=c["routed_scaling_factor"], dense_first=c["first_k_dense_replace"],
                 mtp=c.get("num_nextn_predict_layers") or 0)
    if t in HYBRID:
        a.update(qk_norm=True, gated=True, linear=[int(kind == "linear_attention") for kind in c["layer_types"]], conv=c["linear_conv_kernel_dim"],
                 key_heads=c["linear_num_key_heads"], value_heads=c["linear_num_value_heads"], key_dim=c["linear_key_head_dim"],
                 value_dim=c["linear_value_head_dim"], mtp=1)
        if c.get("num_experts"):
            a.update(experts=c["num_experts"], topk=c["num_experts_per_tok"], moe_ffn=c["moe_intermediate_size"], pre_softmax=False,
                     shared=c["shared_expert_intermediate_size"], shared_gate=True)
    if t in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"):
        a.update(experts=c["n_routed_experts"], topk=c["num_experts_per_tok"], moe_ffn=c["moe_intermediate_size"],
                 pre_softmax=True, shared=(c["n_shared_experts"] or 0) * c["moe_intermediate_size"], shared_gate=False,
                 score="softmax" if t == "deepseek_v2" else "sigmoid", expert_bias=t != "deepseek_v2", n_group=c["n_group"], topk_group=c["topk_group"],
                 scaling=c["routed_scaling_factor"], mla=True,
                 dense_first=c["mlp_layer_types"].count("dense") if "mlp_layer_types" in c else c["first_k_dense_replace"],
                 q_lora=c["q_lora_rank"], kv_lora=c["kv_lora_rank"], qk_nope=c["qk_nope_head_dim"],
                 qk_rope=c["qk_rope_head_dim"], v_dim=c["v_head_dim"], mtp=c.get("num_nextn_predict_layers") or 0)
    if t == "nemotron_h":
        a.update(pattern=c["hybrid_override_pattern"], mtp=c["num_nextn_predict_layers"], mtp_pattern=c["mtp_hybrid_override_pattern"],
                 mamba_heads=c["mamba_num_heads"], mamba_head_dim=c["mamba_head_dim"], mamba_groups=c["n_groups"], mamba_state=c["ssm_state_size"],
                 latent=c["moe_latent_size"], experts=c["n_routed_experts"], topk=c["num_experts_per_tok"], moe_ffn=c["moe_intermediate_size"],
                 pre_softmax=False, shared=c["moe_shared_expert_intermediate_size"], score="sigmoid", expert_bias=True, n_group=c["n_group"],
                 topk_group=c["topk_group"], scaling=c["routed_scaling_factor"])
    return a


def padded_vocab(vocab, tp, div):
    m = div * tp
    return (vocab + m - 1) // m * m


def interleave_qkv(q, k, v, heads, groups, hd):
    """[heads*hd, ...], [groups*hd, ...] x2 -> [(groups * (heads/groups + 2)) * hd, ...] group major: q.. q k v | q.. q k v"""
    import torch
    r = heads // groups
    tail = tuple(q.shape[1:])
    q = q.reshape(groups, r, hd, *tail); k = k.reshape(groups, 1, hd, *tail); v = v.reshape(groups, 1, hd, *tail)
    return torch.cat([q, k, v], 1).reshape(groups * (r + 2) * hd, *tail).contiguous()


def gated_qkv(q, k, v, heads, groups, hd):
    """Does what interleave_qkv does with a q_proj that has each head's query and then its gate: q.. gate.. k v | q.. gate.. k v"""
    import torch
    q, gate = q.reshape(heads, 2, hd, -1).unbind(1)
    rows = heads // groups
    parts = []
    for g in range(groups):
        mine = slice(g * rows, (g + 1) * rows)
        parts += [q[mine].flatten(0, 1), gate[mine].flatten(0, 1), k.reshape(groups, hd, -1)[g], v.reshape(groups, hd, -1)[g]]
    return torch.cat(parts).contiguous()


def delta_net(a, g, hp):
    """{name: tensor} of a gated delta net, below self_attention."""
    import torch
    s = hp + "linear_attn."
    keys, values, heads = a["key_heads"] * a["key_dim"], a["value_heads"] * a["value_dim"], a["value_heads"] // a["key_heads"]
    if a["arch"] == "qwen3_next":  # for each key head its query, its key, and the values and gates of its value heads
        of_head = g(s + "in_proj_qkvz.weight").unflatten(0, (a["key_heads"], -1)).split(
            [a["key_dim"], a["key_dim"], heads * a["value_dim"], heads * a["value_dim"]], 1)
        q, k, v, z = (part.flatten(0, 1) for part in of_head)
        b, alpha = (part.flatten(0, 1) for part in g(s + "in_proj_ba.weight").unflatten(0, (a["key_heads"], -1)).chunk(2, 1))
    else:
        q, k, v = g(s + "in_proj_qkv.weight").split([keys, keys, values])
        z, b, alpha = (g(s + f"in_proj_{one}.weight") for one in "zba")
    out = {f"in_proj.weight.{n}": t for n, t in zip(("query", "key", "value", "z", "beta", "alpha"), (q, k, v, z, b, alpha))}
    out |= {f"conv1d.weight.{n}": t for n, t in zip(("query", "key", "value"), g(s + "conv1d.weight").split([keys, keys, values]))}
    out |= {"in_proj.layer_norm_weight": g(hp + "input_layernorm.weight"), "dt_bias": g(s + "dt_bias"), "A_log": g(s + "A_log"),
            "out_norm.weight": g(s + "norm.weight") - 1, "out_proj.weight": g(s + "out_proj.weight")}
    return {n: t.contiguous() for n, t in out.items()}


def nemotron_to_megatron(a, sd, vpad):
    """Maps Nemotron-H, whose layers hold one module each: what is not said here has the same bytes under another name."""
    import torch
    import torch.nn.functional as F
    inner, states = a["mamba_heads"] * a["mamba_head_dim"], a["mamba_groups"] * a["mamba_state"]
    out = {"decoder.final_norm.weight": sd["backbone.norm_f.weight"]}
    for mine, theirs in (("embedding.word_embeddings", "backbone.embeddings"), ("output_layer", "lm_head")):
        weight = sd[theirs + ".weight"]
        out[mine + ".weight"] = F.pad(weight, (0, 0, 0, vpad - weight.shape[0]))

    def split(name, tensor, parts):
        sizes = {"z": inner, "x": inner, "B": states, "C": states, "dt": a["mamba_heads"]}
        out.update({f"{name}.{part}": t.contiguous() for part, t in zip(parts, tensor.split([sizes[part] for part in parts]))})

    def layer(kind, mp, hp):
        of = {name[len(hp):]: t for name, t in sd.items() if name.startswith(hp)}
        norm = {"M": "mixer.in_proj.layer_norm_weight", "*": "self_attention.linear_qkv.layer_norm_weight",
                "-": "mlp.linear_fc1.layer_norm_weight", "E": "pre_mlp_layernorm.weight"}[kind]
        out[mp + norm] = of.pop("norm.weight")
        if kind == "M":
            split(mp + "mixer.in_proj.weight", of.pop("mixer.in_proj.weight"), ("z", "x", "B", "C", "dt"))
            for what in ("weight", "bias"):
                split(mp + "mixer.conv1d." + what, of.pop("mixer.conv1d." + what), ("x", "B", "C"))
        if kind == "*":
            out[mp + "self_attention.linear_qkv.weight"] = interleave_qkv(
                *(of.pop(f"mixer.{n}_proj.weight") for n in "qkv"), a["heads"], a["groups"], a["head_dim"])
        for name, tensor in of.items():
            if not name.startswith("mixer."):  # of the prediction layer itself
                continue
            if kind != "M":
                name = name.replace("mixer.o_proj", "self_attention.linear_proj").replace("mixer.gate.weight", "mlp.router.weight")
                name = name.replace("mixer.gate.e_score_correction_bias", "mlp.router.expert_bias").replace("up_proj", "linear_fc1")
                name = name.replace("down_proj", "linear_fc2").replace("mixer.experts", "mlp.experts.experts").replace("mixer.", "mlp.")
            out[mp + name] = tensor.float() if "expert_bias" in name else tensor

    for i, kind in enumerate(a["pattern"]):
        layer(kind, f"decoder.layers.{i}.", f"backbone.layers.{i}.")
    wrapped = len(a["mtp_pattern"])
    for j in range(a["mtp"]):
        for i, kind in enumerate(a["mtp_pattern"]):
            layer(kind, f"mtp.layers.{j}.mtp_model_layer.layers.{i}.", f"mtp.layers.{j * wrapped + i}.")
        for what, at in (("enorm", 0), ("hnorm", 0), ("eh_proj", 0), ("final_layernorm", wrapped - 1)):
            out[f"mtp.layers.{j}.{what}.weight"] = sd[f"mtp.layers.{j * wrapped + at}.{what}.weight"]
    return out


def hf_to_megatron(a, sd, vpad, te=True):
    """Full Megatron tensors under *unstacked* names (decoder.layers.<i>.…, …experts.experts.<e>.…).
    te=False gives the local-spec names where they differ (MLA norms, MoE pre_mlp_layernorm)."""
    import torch
    import torch.nn.functional as F
    if a.get("pattern"):
        return nemotron_to_megatron(a, sd, vpad)
    sd = dict(sd)
    for k in [k for k in sd if k.endswith(".mlp.experts.gate_up_proj")]:  # as if each expert were apart
        experts = k.removesuffix("gate_up_proj")
        for e, (gate_up, down) in enumerate(zip(sd.pop(k), sd.pop(experts + "down_proj"))):
            names = [f"{experts}{e}.{what}_proj.weight" for what in ("gate", "up", "down")]
            if a.get("sinks"):  # transposed, and gate and up take turns
                sd.update(zip(names, (gate_up.T[0::2], gate_up.T[1::2], down.T.contiguous())))
            else:
                sd.update(zip(names, (*gate_up.chunk(2), down)))
    out, used = {}, set()
    def g(k):
        used.add(k); return sd[k]
    def pad(w): return F.pad(w, (0, 0, 0, vpad - w.shape[0]))
    out["embedding.word_embeddings.weight"] = pad(g("model.embed_tokens.weight"))
    if not a["tied"]:
        out["output_layer.weight"] = pad(g("lm_head.weight"))
    out["decoder.final_layernorm.weight"] = g("model.norm.weight")

    olmo = a["arch"] in ("olmo2", "olmo3")

    def layer(i, mp, moe):
        hp = f"model.layers.{i}." if i < a["layers"] or not a.get("linear") else "mtp.layers.0."
        if a.get("linear") and i < a["layers"] and a["linear"][i]:
            out.update({mp + "self_attention." + n: t for n, t in delta_net(a, g, hp).items()})
        elif a["mla"]:
            out[mp + "input_layernorm.weight"] = g(hp + "input_layernorm.weight")
            s = hp + "self_attn."
            if a["q_lora"]:
                out[mp + "self_attention.linear_q_down_proj.weight"] = g(s + "q_a_proj.weight")
                out[mp + "self_attention.linear_q_up_proj.weight"] = g(s + "q_b_proj.weight")
                out[mp + ("self_attention.linear_q_up_proj.layer_norm_weight" if te else "self_attention.q_layernorm.weight")] = g(s + "q_a_layernorm.weight")
            else:
                out[mp + "self_attention.linear_q_proj.weight"] = g(s + "q_proj.weight")
            out[mp + "self_attention.linear_kv_down_proj.weight"] = g(s + "kv_a_proj_with_mqa.weight")
            out[mp + "self_attention.linear_kv_up_proj.weight"] = g(s + "kv_b_proj.weight")
            out[mp + ("self_attention.linear_kv_up_proj.layer_norm_weight" if te else "self_attention.kv_layernorm.weight")] = g(s + "kv_a_layernorm.weight")
        else:
            if not olmo:
                out[mp + "self_attention.linear_qkv.layer_norm_weight"] = g(hp + "input_layernorm.weight")
            for kind in ["weight"] + (["bias"] if a["qkv_bias"] else []):
                qkv = g(hp + f"self_attn.qkv_proj.{kind}").split([a["head_dim"] * n for n in (a["heads"], a["groups"], a["groups"])]) \
                    if a.get("one_qkv") else [g(hp + f"self_attn.{n}_proj.{kind}") for n in "qkv"]
                out[mp + f"self_attention.linear_qkv.{kind}"] = (gated_qkv if a.get("gated") else interleave_qkv)(
                    *qkv, a["heads"], a["groups"], a["head_dim"])
            if a["qk_norm"]:
                out[mp + "self_attention.q_layernorm.weight"] = g(hp + "self_attn.q_norm.weight")
                out[mp + "self_attention.k_layernorm.weight"] = g(hp + "self_attn.k_norm.weight")
        if mp + "self_attention.out_proj.weight" not in out:
            out[mp + "self_attention.linear_proj.weight"] = g(hp + "self_attn.o_proj.weight")
        if a.get("sinks"):
            out[mp + "self_attention.linear_proj.bias"] = g(hp + "self_attn.o_proj.bias")
            out[mp + "self_attention.core_attention.softmax_offset"] = g(hp + "self_attn.sinks")
        post = g(hp + "post_attention_layernorm.weight")
        if olmo:  # norms of what attention and feed-forward give, and none of what they read
            out[mp + "post_self_attn_layernorm.weight"], out[mp + "post_mlp_layernorm.weight"] = post, g(hp + "post_feedforward_layernorm.weight")
        elif a.get("post_norms"):
            for norm in ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"):
                out[mp + norm] = g(hp + norm)
        gu = lambda p, x="gate_proj", y="up_proj": torch.cat([g(p + x + ".weight"), g(p + y + ".weight")], 0)
        if not moe:
            if not olmo:
                out[mp + ("mlp.linear_fc1.layer_norm_weight" if te or not a["mla"] else "pre_mlp_layernorm.weight")] = post
            out[mp + "mlp.linear_fc1.weight"] = g(hp + "mlp.gate_up_proj.weight") if a.get("one_gate_up") else gu(hp + "mlp.")
            out[mp + "mlp.linear_fc2.weight"] = g(hp + "mlp.down_proj.weight")
            return
        out[mp + ("pre_mlp_layernorm.weight" if te or a["mla"] else "mlp.linear_fc1.layer_norm_weight")] = post
        mx = a["arch"] == "mixtral"
        m = hp + ("block_sparse_moe." if mx else "mlp.")
        out[mp + "mlp.router.weight"] = g(m + ("router" if a.get("sinks") else "gate") + ".weight")
        if a.get("sinks"):
            out[mp + "mlp.router.bias"] = g(m + "router.bias")
            for e, (bias, down_bias) in enumerate(zip(g(m + "experts.gate_up_proj_bias"), g(m + "experts.down_proj_bias"))):
                out[mp + f"mlp.experts.experts.{e}.linear_fc1.bias"] = torch.cat([bias[0::2], bias[1::2]])
                out[mp + f"mlp.experts.experts.{e}.linear_fc2.bias"] = down_bias
        if a.get("expert_bias"):
            out[mp + "mlp.router.expert_bias"] = g(m + "gate.e_score_correction_bias").float()
        for e in range(a["experts"]):
            x = f"{m}experts.{e}."
            out[mp + f"mlp.experts.experts.{e}.linear_fc1.weight"] = gu(x, "w1", "w3") if mx else gu(x)
            out[mp + f"mlp.experts.experts.{e}.linear_fc2.weight"] = g(x + ("w2" if mx else "down_proj") + ".weight")
        if a["shared"]:
            x = m + ("shared_expert." if a["arch"] == "qwen2_moe" or a.get("linear") else "shared_experts.")
            out[mp + "mlp.shared_experts.linear_fc1.weight"] = gu(x)
            out[mp + "mlp.shared_experts.linear_fc2.weight"] = g(x + "down_proj.weight")
            if a.get("shared_gate"):
                out[mp + "mlp.shared_experts.gate_weight"] = g(m + "shared_expert_gate.weight")

    for i in range(a["layers"]):
        layer(i, f"decoder.layers.{i}.", a["experts"] > 0 and i >= a.get("dense_first", 0))
    for j in range(a["mtp"]):
        i = a["layers"] + j
        p, hp = f"mtp.layers.{j}.", f"model.layers.{i}."
        if a.get("linear"):
            for mine, theirs in (("enorm", "pre_fc_norm_embedding"), ("hnorm", "pre_fc_norm_hidden"), ("eh_proj", "fc"), ("final_layernorm", "norm")):
                out[f"{p}{mine}.weight"] = g(f"mtp.{theirs}.weight")
            layer(i, p + "transformer_layer.", a["experts"] > 0)
            continue
        out[p + "enorm.weight"] = g(hp + "enorm.weight")
        out[p + "hnorm.weight"] = g(hp + "hnorm.weight")
        out[p + "eh_proj.weight"] = g(hp + "eh_proj.weight")
        out[p + "final_layernorm.weight"] = g(hp + "shared_head.norm.weight")
        layer(i, p + "transformer_layer.", True)
        used.update({hp + "embed_tokens.weight", hp + "shared_head.head.weight"})
    left = set(sd) - used - {"lm_head.weight"}
    assert not left, f"HF keys without a Megatron counterpart: {sorted(left)}"
    return out


def stack_full(full, a, te=True, homogeneous=None):
    """Unstacked -> the keys a torch_dist checkpoint holds (stacked layer axis / expert axis)."""
    import torch
    if homogeneous is None:
        homogeneous = not (a["experts"] and a.get("dense_first")) and not a.get("linear") and not a.get("pattern")
    groups, out = {}, {}
    for k, t in full.items():
        layer = expert = None
        m = re.match(r"decoder\.layers\.(\d+)\.(.*)", k)
        if m and homogeneous:
            layer, k = int(m[1]), "decoder.layers." + m[2]
        m = re.match(r"(.*\.experts\.experts)\.(\d+)\.(.*)", k)
        if m:
            expert, k = int(m[2]), f"{m[1]}.{m[3]}"
        if layer is None and expert is None:
            out[k] = t
        else:
            groups.setdefault(k, {})[(layer, expert)] = t
    for k, d in groups.items():
        ls = sorted({x[0] for x in d}, key=lambda v: -1 if v is None else v)
        es = sorted({x[1] for x in d}, key=lambda v: -1 if v is None else v)
        rows = [[d[(l, e)] for e in es] for l in ls]
        t = torch.stack([torch.stack(r) if es != [None] else r[0] for r in rows]) if ls != [None] else torch.stack(rows[0])
        out[k] = t
    return out


def sha(t):
    import torch
    t = t.detach().cpu().contiguous()
    return hashlib.sha256(t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"").hexdigest()


def describe(d):
    return {k: {"dtype": str(t.dtype).replace("torch.", ""), "shape": list(t.shape), "sha256": sha(t)}
            for k, t in sorted(d.items())}
