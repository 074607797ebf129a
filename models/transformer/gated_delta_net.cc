#include "models/transformer/gated_delta_net.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "models/kernels/delta/delta_cuda.h"
#include "models/kernels/delta/delta_rule.h"
#include "models/kernels/product/linear.h"
#include "models/kernels/whole_vectors.h"
#include "models/tensor_parallel/mappings.h"
#include "models/transformer/recompute.h"

namespace ferry::models {
namespace {

// The input of the rule at some tokens, of some of the heads.
struct ProjectedRows {
  at::Tensor mixed;  // [tokens, channels]: query, key, value
  at::Tensor decay;  // [tokens, heads], fp32
  at::Tensor beta;   // [tokens, heads]

  ProjectedRows narrow(std::int64_t begin, std::int64_t count) const {
    const auto part = [&](const at::Tensor& x) { return x.narrow(0, begin, count); };
    return {part(mixed), part(decay), part(beta)};
  }
};

class GatedDeltaNet : public Attention {
 public:
  GatedDeltaNet(const ModelSetup& setup,
                Parameters& parameters,
                const std::string& prefix,
                std::int64_t layer)
      : setup_(setup), layer_(layer) {
    const auto module = prefix + "self_attention.";
    norm_ = parameters.take(module + "in_proj.layer_norm_weight",
                            setup.tensor_parallel.between_layers());
    for (std::size_t i = 0; i < kParts.size(); ++i)
      in_proj_[i] = parameters.take(module + "in_proj.weight." + kParts[i]);
    for (std::size_t i = 0; i < kConvolved; ++i)
      conv1d_[i] = parameters.take(module + "conv1d.weight." + kParts[i]);
    dt_bias_ = parameters.take(module + "dt_bias");
    a_log_ = parameters.take(module + "A_log");
    // Each rank norms its own heads.
    out_norm_ = parameters.take(module + "out_norm.weight", GradientOverTp::kPartial);
    out_proj_ = RowParallelLinear(setup.tensor_parallel, parameters, module + "out_proj");
  }

  const at::Tensor& norm() const override { return norm_; }

  at::Tensor forward(const at::Tensor& normed, const LayerContext& context) const override {
    const auto x = setup_.tensor_parallel.enter(normed);
    Parts parts;
    for (std::size_t i = 0; i < parts.size(); ++i)
      parts[i] = linear_slice(x, in_proj_[i], {}, setup_.alignment());
    if (context.inference == nullptr) {
      const auto& batch = *context.batch;
      const auto core = core_of(of_my_heads(parts, batch));
      const auto& lengths = batch.padded_lengths();
      const auto output = walks_tokens(core) ? walk(core, lengths) : by_formulas(core, lengths);
      return out_proj_.forward(
          all_to_all_hidden_to_sequence(batch.in_rank_order(output), setup_.mesh.cp()));
    }
    const auto core = core_of(parts);
    const auto& step_rows = context.inference->linear_rows();
    const auto& states = context.inference->linear_states(layer_);
    if (!has_kernels(core.mixed)) {
      const auto attended = step(rows_of(core), core.conv_weight, step_rows, states);
      return out_proj_.forward(norm_and_gate(attended, core.gate));
    }
    const bool all_decode = std::cmp_equal(step_rows.decodes.size(), core.gate.size(0));
    const auto output =
        all_decode ? at::empty_like(core.gate) : at::zeros_like(core.gate);  // padding rows, too
    if (!step_rows.chunks.empty()) walk_sequences(core, step_rows, states, output);
    delta_step_cuda(core, step_rows.decode_rows, step_rows.decode_slots, states.conv,
                    states.recurrent, output);
    return out_proj_.forward(output);
  }

 private:
  enum Part : std::uint8_t { kQuery, kKey, kValue, kZ, kBeta, kAlpha };
  static constexpr std::array<const char*, 6> kParts{"query", "key", "value", "z", "beta", "alpha"};
  static constexpr std::size_t kConvolved = 3;          // query, key, value
  using Parts = std::array<at::Tensor, kParts.size()>;  // [tokens, channels] each
  static constexpr std::array kTensors{
      &DeltaCore::mixed, &DeltaCore::conv_weight, &DeltaCore::alpha,   &DeltaCore::beta,
      &DeltaCore::gate,  &DeltaCore::a_log,       &DeltaCore::dt_bias, &DeltaCore::norm};

  bool has_kernels(const at::Tensor& mixed) const {
    const auto& config = setup_.config;
    return delta_cuda_supports(mixed, config.linear_key_head_dim, config.linear_value_head_dim);
  }

  // On a GPU the rollout computes one token after another; in kBitwise so does the trainer.
  bool walks_tokens(const DeltaCore& core) const {
    return setup_.alignment() == Alignment::kBitwise && core.mixed.is_cuda();
  }

  // A tensor's share of this rank among context parallel ones, by heads along its first dimension.
  at::Tensor my_share(const at::Tensor& of_heads) const {
    const auto& cp = setup_.mesh.cp();
    const auto share = of_heads.size(0) / cp.size();
    return of_heads.narrow(0, cp.rank() * share, share);
  }

  // All heads of this rank's tokens -> its share of the heads, of all tokens of the pack
  // (Megatron-Core ssm/gated_delta_net/gdn.py).
  Parts of_my_heads(const Parts& parts, const SequencePartition& batch) const {
    const auto& cp = setup_.mesh.cp();
    if (cp.size() == 1) return parts;
    std::vector<at::Tensor> shares;
    std::vector<std::int64_t> widths;
    for (const auto& part : parts) widths.push_back(part.size(1) / cp.size());
    for (int rank = 0; rank < cp.size(); ++rank) {
      for (std::size_t i = 0; i < parts.size(); ++i)
        shares.push_back(parts[i].narrow(1, rank * widths[i], widths[i]));
    }
    const auto all = batch.in_pack_order(all_to_all_sequence_to_hidden(at::cat(shares, 1), cp));
    const auto split = all.split_with_sizes(widths, 1);
    Parts mine;
    for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = split[i].contiguous();
    return mine;
  }

  // All of the layer between its projections, of this rank's share of the heads.
  DeltaCore core_of(const Parts& mine) const {
    const auto& config = setup_.config;
    return {
        .mixed = at::cat({mine[kQuery], mine[kKey], mine[kValue]}, 1),
        .conv_weight = at::cat({my_share(conv1d_[0]), my_share(conv1d_[1]), my_share(conv1d_[2])}),
        .alpha = mine[kAlpha],
        .beta = mine[kBeta],
        .gate = mine[kZ],
        .a_log = my_share(a_log_),
        .dt_bias = my_share(dt_bias_),
        .norm = out_norm_,
        .epsilon = config.layernorm_epsilon,
        .key_heads = mine[kKey].size(1) / config.linear_key_head_dim};
  }

  static ProjectedRows rows_of(const DeltaCore& core) {
    const auto rate = -core.a_log.to(at::kFloat).exp();
    return {.mixed = core.mixed,
            .decay = rate * models::softplus(core.alpha.to(at::kFloat) + core.dt_bias),
            .beta = models::sigmoid(core.beta)};
  }

  // -> [tokens, channels of all heads]
  at::Tensor norm_and_gate(const at::Tensor& attended, const at::Tensor& z) const {
    const auto channels = setup_.config.linear_value_head_dim;
    return gated_rms_norm(attended.reshape({-1, channels}), z.reshape({-1, channels}), out_norm_,
                          setup_.config.layernorm_epsilon)
        .view(z.sizes());
  }

  // Convolved rows of sequences, [sequences, tokens, ..].
  DeltaRows delta_rows(const ProjectedRows& rows) const {
    const auto& config = setup_.config;
    const auto values = rows.decay.size(2) * config.linear_value_head_dim;
    const auto keys = (rows.mixed.size(2) - values) / 2;
    const auto heads = [&](std::int64_t begin, std::int64_t channels, std::int64_t dim) {
      return rows.mixed.narrow(2, begin, channels).unflatten(2, {channels / dim, dim});
    };
    return {.query = heads(0, keys, config.linear_key_head_dim),
            .key = heads(keys, keys, config.linear_key_head_dim),
            .value = heads(2 * keys, values, config.linear_value_head_dim),
            .decay = rows.decay,
            .beta = rows.beta};
  }
  DeltaRows one_sequence(const ProjectedRows& rows) const {
    return delta_rows({rows.mixed.unsqueeze(0), rows.decay.unsqueeze(0), rows.beta.unsqueeze(0)});
  }

  // The bits of a token after another; the gradients of the formulas, which compute the layer once
  // more for them.
  at::Tensor walk(const DeltaCore& core, const std::vector<std::int64_t>& lengths) const {
    const DeltaCore sizes{.epsilon = core.epsilon, .key_heads = core.key_heads};
    const auto body = [this, sizes, lengths](const std::vector<at::Tensor>& inputs) {
      auto own = sizes;
      for (std::size_t i = 0; i < kTensors.size(); ++i) own.*kTensors[i] = inputs[i];
      const auto trains = [](const at::Tensor& x) { return x.requires_grad(); };
      if (at::GradMode::is_enabled() && std::ranges::any_of(inputs, trains))
        return std::vector{by_formulas(own, lengths)};
      std::vector<DeltaSpan> spans;
      std::int64_t begin = 0;
      for (const auto length : lengths) {
        spans.push_back({.row_begin = begin, .num_rows = length});
        begin += length;
      }
      auto output = at::empty_like(own.gate);
      delta_walk_cuda(own, spans, {}, {}, output);
      return std::vector{output};
    };
    std::vector<at::Tensor> inputs;
    for (const auto member : kTensors) inputs.push_back(core.*member);
    return recompute(body, inputs)[0];
  }

  // Each sequence begins anew -> [tokens, channels of all heads]. Differentiable.
  at::Tensor by_formulas(const DeltaCore& core, const std::vector<std::int64_t>& lengths) const {
    return norm_and_gate(of_batch(rows_of(core), core.conv_weight, lengths), core.gate);
  }

  // -> [tokens, heads, value_dim]
  at::Tensor of_batch(const ProjectedRows& rows,
                      const at::Tensor& weight,
                      const std::vector<std::int64_t>& lengths) const {
    auto mixed = rows.mixed.split_with_sizes(lengths);
    for (auto& sequence : mixed) sequence = causal_conv1d(sequence, {}, weight);
    const auto joined = [](const std::vector<at::Tensor>& sequences) {
      return sequences.size() == 1 ? sequences[0] : at::cat(sequences);
    };
    if (has_kernels(rows.mixed)) {
      const ProjectedRows convolved{.mixed = joined(mixed), .decay = rows.decay, .beta = rows.beta};
      return packed_gated_delta_rule(one_sequence(convolved), lengths).squeeze(0);
    }
    std::vector<at::Tensor> outputs;
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      auto mine = rows.narrow(begin, lengths[i]);
      mine.mixed = mixed[i];
      outputs.push_back(
          chunk_gated_delta_rule(one_sequence(mine), {}, setup_.alignment()).output.squeeze(0));
      begin += lengths[i];
    }
    return joined(outputs);
  }

  // Writes the rows of a step's sequences that begin or have several.
  static void walk_sequences(const DeltaCore& core,
                             const LinearRows& step_rows,
                             const LinearStates& states,
                             const at::Tensor& output) {
    std::vector<DeltaSpan> spans;
    std::vector<at::Tensor> before;
    for (const auto& sequence : step_rows.chunks) {
      const auto mixed = core.mixed.narrow(0, sequence.row_begin, sequence.num_rows);
      before.push_back(keep_last(mixed, sequence, states));
      if (sequence.num_computed == 0) states.recurrent[sequence.slot].zero_();
      spans.push_back(
          {.row_begin = sequence.row_begin, .num_rows = sequence.num_rows, .slot = sequence.slot});
    }
    delta_walk_cuda(core, spans, at::stack(before), states.recurrent, output);
  }

  // Keeps the last rows of a sequence for the convolution of those to come, and returns what lay
  // before the first, [kernel - 1, channels].
  static at::Tensor keep_last(const at::Tensor& mixed,
                              const SequenceRows& sequence,
                              const LinearStates& states) {
    const auto kept = states.conv[sequence.slot];
    auto before = sequence.num_computed == 0 ? at::zeros_like(kept) : kept.clone();
    kept.copy_(at::cat({before, mixed}).narrow(0, sequence.num_rows, before.size(0)));
    return before;
  }

  // A step of generation, which goes on from the states of the sequences.
  at::Tensor step(const ProjectedRows& rows,
                  const at::Tensor& weight,
                  const LinearRows& step_rows,
                  const LinearStates& states) const {
    const auto dim = setup_.config.linear_value_head_dim;
    auto output =
        at::zeros({rows.mixed.size(0), in_proj_[kValue].size(0) / dim, dim}, rows.mixed.options());
    const auto continue_chunks = [&](const std::vector<SequenceRows>& sequences) {
      for (const auto& sequence : sequences)
        output.narrow(0, sequence.row_begin, sequence.num_rows)
            .copy_(go_on(rows.narrow(sequence.row_begin, sequence.num_rows), sequence, states,
                         weight));
    };
    continue_chunks(step_rows.chunks);
    if (setup_.alignment() == Alignment::kBitwise)
      continue_chunks(step_rows.decodes);
    else if (!step_rows.decodes.empty())
      output.index_copy_(0, step_rows.decode_rows, decode(rows, step_rows, states, weight));
    return output;
  }

  // The rows of one sequence, by the chunked rule. In kBitwise the rows since the last whole chunk
  // are computed again, so that chunks begin where those of the whole sequence do.
  at::Tensor go_on(const ProjectedRows& rows,
                   const SequenceRows& sequence,
                   const LinearStates& states,
                   const at::Tensor& weight) const {
    const bool bitwise = setup_.alignment() == Alignment::kBitwise;
    const bool begins = sequence.num_computed == 0;
    const auto mine = [&](const at::Tensor& of_slots) { return of_slots[sequence.slot]; };
    auto all = rows;
    all.mixed = causal_conv1d(rows.mixed, keep_last(rows.mixed, sequence, states), weight);
    const auto open = bitwise ? sequence.num_computed % kDeltaChunk : 0;
    if (open > 0) {
      const auto with = [&](const at::Tensor& kept, const at::Tensor& more) {
        return at::cat({mine(kept).narrow(0, 0, open), more});
      };
      all = {with(states.mixed, all.mixed), with(states.decay, all.decay),
             with(states.beta, all.beta)};
    }
    const auto state = begins ? at::Tensor() : mine(states.recurrent).unsqueeze(0);
    const auto result = chunk_gated_delta_rule(one_sequence(all), state, setup_.alignment());
    mine(states.recurrent).copy_((bitwise ? result.state_of_chunks : result.state).squeeze(0));
    if (bitwise) {
      const auto tokens = all.mixed.size(0);
      const auto rest = all.narrow(tokens - tokens % kDeltaChunk, tokens % kDeltaChunk);
      const auto keep = [&](const at::Tensor& kept, const at::Tensor& of_rows) {
        mine(kept).narrow(0, 0, of_rows.size(0)).copy_(of_rows);
      };
      keep(states.mixed, rest.mixed);
      keep(states.decay, rest.decay);
      keep(states.beta, rest.beta);
    }
    return result.output.squeeze(0).narrow(0, open, sequence.num_rows);
  }

  // One row of each of several sequences, by the recurrent rule -> [sequences, heads, value_dim].
  at::Tensor decode(const ProjectedRows& rows,
                    const LinearRows& step_rows,
                    const LinearStates& states,
                    const at::Tensor& weight) const {
    const auto& slots = step_rows.decode_slots;
    const auto pick = [&](const at::Tensor& x) { return x.index_select(0, step_rows.decode_rows); };
    const auto mixed = pick(rows.mixed);
    const auto before = states.conv.index_select(0, slots);
    states.conv.index_copy_(0, slots, at::cat({before.slice(1, 1), mixed.unsqueeze(1)}, 1));
    const auto convolved = causal_conv1d_update(mixed, before, weight);
    const auto result = recurrent_gated_delta_rule(
        delta_rows(
            {convolved.unsqueeze(1), pick(rows.decay).unsqueeze(1), pick(rows.beta).unsqueeze(1)}),
        states.recurrent.index_select(0, slots));
    states.recurrent.index_copy_(0, slots, result.state);
    return result.output.squeeze(1);
  }

  const ModelSetup& setup_;
  std::int64_t layer_;
  at::Tensor norm_;
  std::array<at::Tensor, kParts.size()> in_proj_;
  std::array<at::Tensor, kConvolved> conv1d_;
  at::Tensor dt_bias_, a_log_, out_norm_;
  RowParallelLinear out_proj_;
};

}  // namespace

std::unique_ptr<Attention> make_gated_delta_net(const ModelSetup& setup,
                                                Parameters& parameters,
                                                const std::string& prefix,
                                                std::int64_t layer) {
  return std::make_unique<GatedDeltaNet>(setup, parameters, prefix, layer);
}

}  // namespace ferry::models
