#include "models/transformer/attention.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "models/kernels/attention/attention.h"
#include "models/kernels/product/linear.h"
#include "models/kernels/rms_norm.h"
#include "models/kernels/split_qkv.h"
#include "models/kernels/whole_vectors.h"
#include "models/tensor_parallel/mappings.h"
#include "models/transformer/gated_delta_net.h"

namespace ferry::models {
namespace {

// transformers gives the norms inside of latent attention this one, whatever the configuration
// says.
constexpr double kLatentNormEpsilon = 1e-6;

class CoreAttention {
 public:
  // sinks [heads/tp]; undefined: none.
  CoreAttention(const ModelSetup& setup, std::int64_t layer, at::Tensor sinks = {})
      : cp_(setup.mesh.cp()),
        layer_(layer),
        recomputed_(setup.recompute.selects(&Recompute::Modules::core_attn)),
        options_{.scale = softmax_scale(setup.config),
                 .window = setup.config.window_of(layer),
                 .softcap = setup.config.attn_logit_softcapping,
                 .sinks = std::move(sinks),
                 .alignment = setup.alignment(),
                 .deterministic = setup.deterministic} {}

  // [local, heads, ..] -> [local, heads * value_dim] Attention over latents, in generation: [rows,
  // heads, ..], [rows, rank + rotated].
  at::Tensor forward_latents(const at::Tensor& query,
                             const at::Tensor& latents,
                             const LatentUpProjection& up,
                             const LayerContext& context) const {
    return context.inference->attend_latents(layer_, query, latents, up, options_).flatten(1);
  }

  at::Tensor forward(const at::Tensor& query,
                     const at::Tensor& key,
                     const at::Tensor& value,
                     const LayerContext& context) const {
    if (context.inference != nullptr)
      return context.inference->attend(layer_, query, key, value, options_).flatten(1);
    if (!recomputed_) return compute(query, key, value, *context.batch);
    const auto body = [this, batch = *context.batch](const std::vector<at::Tensor>& inputs) {
      return std::vector{compute(inputs[0], inputs[1], inputs[2], batch)};
    };
    return recompute(body, {query, key, value})[0];
  }

 private:
  at::Tensor compute(const at::Tensor& query,
                     const at::Tensor& key,
                     const at::Tensor& value,
                     const SequencePartition& batch) const {
    return attention(query, everywhere(key, batch), everywhere(value, batch), batch.segments(),
                     options_)
        .flatten(1);
  }

  at::Tensor everywhere(const at::Tensor& mine, const SequencePartition& batch) const {
    return batch.in_pack_order(gather_from_sequence_parallel_region(mine, cp_));
  }

  const ProcessGroup& cp_;
  std::int64_t layer_;
  bool recomputed_;
  AttentionOptions options_;
};

class SelfAttention : public Attention {
 public:
  SelfAttention(const ModelSetup& setup,
                Parameters& parameters,
                const std::string& prefix,
                std::int64_t layer)
      : setup_(setup),
        turns_(setup.config.turns(layer)),
        turns_locally_(setup.config.turns_locally(layer)),
        core_(setup,
              layer,
              parameters.take_if(prefix + "self_attention.core_attention.softmax_offset")),
        norm_(parameters.take_if(prefix + "self_attention.linear_qkv.layer_norm_weight",
                                 setup.tensor_parallel.between_layers())),
        qkv_(setup.tensor_parallel, parameters, prefix + "self_attention.linear_qkv"),
        // Each rank norms its own heads.
        q_norm_(parameters.take_if(prefix + "self_attention.q_layernorm.weight",
                                   GradientOverTp::kPartial)),
        k_norm_(parameters.take_if(prefix + "self_attention.k_layernorm.weight",
                                   GradientOverTp::kPartial)),
        proj_(setup.tensor_parallel, parameters, prefix + "self_attention.linear_proj") {}

  const at::Tensor& norm() const override { return norm_; }

  at::Tensor forward(const at::Tensor& normed, const LayerContext& context) const override {
    const auto& config = setup_.config;
    const auto mixed = whole_groups(qkv_.forward(setup_.tensor_parallel.enter(normed)));
    // [tokens, groups, queries of the group, their gates, key, value, channels]
    const auto tokens = mixed.size(0);
    const auto each = config.num_attention_heads / config.num_query_groups;
    const auto gates = config.attention_output_gate ? each : 0;
    const auto all = each + gates + 2;
    const auto groups = mixed.size(1) / (all * config.kv_channels);
    auto grouped = mixed.view({tokens, groups, all, config.kv_channels});
    const auto mine = each / ranks_of_group();
    const QueriesOfGroup queries{.first = setup_.mesh.coordinates().tp % ranks_of_group() * mine,
                                 .count = mine};
    at::Tensor gate;
    if (gates > 0) {
      gate = grouped.narrow(2, each + queries.first, queries.count).reshape({tokens, -1});
      grouped = at::cat({grouped.narrow(2, 0, each), grouped.narrow(2, 2 * each, 2)}, 2);
    }
    auto [query, key, value] =
        split(grouped, queries, turns_ ? &context.positions.of(turns_locally_) : nullptr);
    if (const auto& scale = context.positions.query_scale; scale.defined()) query = query * scale;
    const auto attended = core_.forward(query, key, value, context);
    return proj_.forward(gate.defined() ? attended * models::sigmoid(gate) : attended);
  }

 private:
  // `angles`: null where the layer does not turn.
  QueryKeyValue split(const at::Tensor& grouped,
                      QueriesOfGroup queries,
                      const RotaryAngles* angles) const {
    const auto& config = setup_.config;
    if (q_norm_.defined() && !config.qk_layernorm_full)
      return split_and_norm_qkv(
          grouped, queries, {.query = q_norm_, .key = k_norm_, .epsilon = config.layernorm_epsilon},
          config.norm_rounding(), angles);
    if (config.rotary_dim() == config.kv_channels && !config.rotary_interleaved &&
        !config.qk_layernorm_full)
      return split_qkv(grouped, queries, angles);
    auto parts = split_qkv(grouped, queries, nullptr);
    if (config.qk_layernorm_full) {
      parts.query = norm_of_all_heads(parts.query, q_norm_);
      parts.key = norm_of_all_heads(parts.key, k_norm_);
    }
    if (angles == nullptr) return parts;
    parts.query = apply_rotary(parts.query, *angles);
    parts.key = apply_rotary(parts.key, *angles);
    return parts;
  }

  // x [tokens, heads/tp, channels] -> like x, normed over the channels of all ranks' heads;
  // `weight` [channels of this rank].
  at::Tensor norm_of_all_heads(const at::Tensor& x, const at::Tensor& weight) const {
    const auto epsilon = setup_.config.layernorm_epsilon;
    const auto rounding = setup_.config.norm_rounding();
    const auto mine = x.flatten(1);
    if (setup_.mesh.shape().tp() == 1)
      return rms_norm(mine, weight, epsilon, rounding).view(x.sizes());
    const auto all = [&](const at::Tensor& part) {
      return gather_from_tensor_model_parallel_region(part, setup_.mesh.tp(),
                                                      /*replicated=*/false);
    };
    const auto normed = rms_norm(all(mine.contiguous()), all(weight.unsqueeze(0)).squeeze(0),
                                 epsilon, rounding, /*gathered=*/true);
    return normed.narrow(1, setup_.mesh.coordinates().tp * mine.size(1), mine.size(1))
        .contiguous()
        .view(x.sizes());
  }

  // The number of ranks that share the queries of one group.
  std::int64_t ranks_of_group() const {
    return std::max<std::int64_t>(1, setup_.mesh.shape().tp() / setup_.config.num_query_groups);
  }

  // [tokens, rows/tp] -> [tokens, rows of the groups that this rank's queries belong to]. Where
  // ranks are more than groups, the weights of a group are split over several, wherever the cuts
  // fall: all rows come together, and each rank takes its group's (Megatron-Core attention.py).
  at::Tensor whole_groups(const at::Tensor& mixed) const {
    if (ranks_of_group() == 1) return mixed;
    const auto all = gather_from_tensor_model_parallel_region(mixed, setup_.mesh.tp(),
                                                              /*replicated=*/false);
    const auto rows = all.size(1) / setup_.config.num_query_groups;
    return all.narrow(1, setup_.mesh.coordinates().tp / ranks_of_group() * rows, rows).contiguous();
  }

  const ModelSetup& setup_;
  bool turns_, turns_locally_;
  CoreAttention core_;
  at::Tensor norm_;
  ColumnParallelLinear qkv_;
  at::Tensor q_norm_, k_norm_;
  RowParallelLinear proj_;
};

// Multi-latent attention, with its keys and values expanded. The projections down are whole on
// every rank and applied to the tokens between the layers.
class MLASelfAttention : public Attention {
 public:
  MLASelfAttention(const ModelSetup& setup,
                   Parameters& parameters,
                   const std::string& prefix,
                   std::int64_t layer)
      : setup_(setup), core_(setup, layer) {
    const auto between = setup.tensor_parallel.between_layers();
    const auto base = prefix + "self_attention.";
    norm_ = parameters.take(prefix + "input_layernorm.weight", between);
    low_rank_queries_ = setup.config.q_lora_rank > 0;
    if (low_rank_queries_) {
      q_down_ = parameters.take(base + "linear_q_down_proj.weight", between);
      q_norm_ = parameters.take(base + "linear_q_up_proj.layer_norm_weight", between);
    }
    q_ = ColumnParallelLinear(setup.tensor_parallel, parameters,
                              base + (low_rank_queries_ ? "linear_q_up_proj" : "linear_q_proj"));
    kv_down_ = parameters.take(base + "linear_kv_down_proj.weight", between);
    kv_norm_ = parameters.take(base + "linear_kv_up_proj.layer_norm_weight", between);
    kv_up_ = ColumnParallelLinear(setup.tensor_parallel, parameters, base + "linear_kv_up_proj");
    proj_ = RowParallelLinear(setup.tensor_parallel, parameters, base + "linear_proj");
  }

  const at::Tensor& norm() const override { return norm_; }

  at::Tensor forward(const at::Tensor& normed, const LayerContext& context) const override {
    const auto& config = setup_.config;
    const auto& parallel = setup_.tensor_parallel;
    const auto alignment = setup_.alignment();
    auto latent_query = normed;
    if (low_rank_queries_) {
      latent_query = rms_norm(linear(normed, q_down_, {}, alignment), q_norm_, kLatentNormEpsilon);
    }
    const auto query = q_.forward(parallel.enter(latent_query));
    const auto compressed = linear(normed, kv_down_, {}, alignment);
    const auto latent = rms_norm(compressed.narrow(1, 0, config.kv_lora_rank).contiguous(),
                                 kv_norm_, kLatentNormEpsilon);
    const auto rotated = parallel.enter(
        compressed.narrow(1, config.kv_lora_rank, config.qk_pos_emb_head_dim).contiguous());

    const auto tokens = query.size(0);
    const auto heads = config.num_attention_heads / setup_.mesh.shape().tp();
    const auto turn = [&](const at::Tensor& t) {
      return apply_rotary(t, context.positions.angles);
    };
    const auto q = query.view({tokens, heads, config.qk_head_dim + config.qk_pos_emb_head_dim});
    const auto q_rotated = turn(q.narrow(2, config.qk_head_dim, config.qk_pos_emb_head_dim));
    const auto whole_query = at::cat({q.narrow(2, 0, config.qk_head_dim), q_rotated}, 2);
    const auto turned = turn(rotated.unsqueeze(1));  // [tokens, 1, channels]
    if (context.inference != nullptr && alignment == Alignment::kFast) {
      const LatentUpProjection up{.weight = kv_up_.weight().view({heads, -1, config.kv_lora_rank}),
                                  .key_dim = config.qk_head_dim};
      return proj_.forward(
          core_.forward_latents(whole_query, at::cat({latent, turned.squeeze(1)}, 1), up, context));
    }
    const auto key_value = kv_up_.forward(parallel.enter(latent));
    const auto kv = key_value.view({tokens, heads, config.qk_head_dim + config.v_head_dim});
    const auto k_rotated = turned.expand({tokens, heads, config.qk_pos_emb_head_dim});
    return proj_.forward(
        core_.forward(whole_query, at::cat({kv.narrow(2, 0, config.qk_head_dim), k_rotated}, 2),
                      kv.narrow(2, config.qk_head_dim, config.v_head_dim).contiguous(), context));
  }

 private:
  const ModelSetup& setup_;
  CoreAttention core_;
  bool low_rank_queries_ = false;
  at::Tensor norm_, q_down_, q_norm_, kv_down_, kv_norm_;
  ColumnParallelLinear q_, kv_up_;
  RowParallelLinear proj_;
};

}  // namespace

std::unique_ptr<Attention> make_attention(const ModelSetup& setup,
                                          Parameters& parameters,
                                          const std::string& prefix,
                                          std::int64_t layer) {
  if (setup.config.is_linear_attention_layer(layer))
    return make_gated_delta_net(setup, parameters, prefix, layer);
  if (setup.config.multi_latent_attention)
    return std::make_unique<MLASelfAttention>(setup, parameters, prefix, layer);
  return std::make_unique<SelfAttention>(setup, parameters, prefix, layer);
}

}  // namespace ferry::models
