#include "models/transformer/gated_delta_net.h"

#include <ATen/ATen.h>

#include <array>
#include <utility>
#include <vector>

#include "models/kernels/delta/delta_cuda.h"
#include "models/kernels/delta/delta_rule.h"
#include "models/kernels/product/linear.h"
#include "models/kernels/whole_vectors.h"

namespace ferry::models {
namespace {

// The projected rows of some tokens, in the sizes of one rank.
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
    const auto project = [&](Part part) {
      return linear_slice(x, in_proj_[part], {}, setup_.alignment());
    };
    const auto alpha = project(kAlpha);
    const auto beta = project(kBeta);
    const auto z = project(kZ);
    const auto decay = [&] {
      return -a_log_.to(at::kFloat).exp() * models::softplus(alpha.to(at::kFloat) + dt_bias_);
    };
    const auto mixed = at::cat({project(kQuery), project(kKey), project(kValue)}, 1);
    const auto gated = [&](const at::Tensor& attended) {
      const auto channels = setup_.config.linear_value_head_dim;
      return gated_rms_norm(attended.reshape({-1, channels}), z.reshape({-1, channels}), out_norm_,
                            setup_.config.layernorm_epsilon)
          .view({x.size(0), -1});
    };
    const auto rows = [&] {
      return ProjectedRows{.mixed = mixed, .decay = decay(), .beta = models::sigmoid(beta)};
    };
    if (context.inference == nullptr)
      return out_proj_.forward(gated(of_batch(rows(), *context.batch)));
    const auto& step_rows = context.inference->linear_rows();
    const auto& states = context.inference->linear_states(layer_);
    if (!has_kernels(mixed)) return out_proj_.forward(gated(step(rows(), step_rows, states)));
    const bool all_decode = std::cmp_equal(step_rows.decodes.size(), z.size(0));
    auto output = !step_rows.chunks.empty() ? gated(begin_sequences(rows(), step_rows, states))
                  : all_decode              ? at::empty_like(z)
                                            : at::zeros_like(z);  // padding rows, too
    delta_step_cuda({.mixed = mixed,
                     .conv_weight = conv_weight(),
                     .alpha = alpha,
                     .beta = beta,
                     .a_log = a_log_,
                     .dt_bias = dt_bias_,
                     .gate = z,
                     .norm = out_norm_,
                     .epsilon = setup_.config.layernorm_epsilon,
                     .key_heads = in_proj_[kKey].size(0) / setup_.config.linear_key_head_dim,
                     .rows = step_rows.decode_rows,
                     .slots = step_rows.decode_slots},
                    states.conv, states.recurrent, output);
    return out_proj_.forward(output);
  }

 private:
  enum Part : std::uint8_t { kQuery, kKey, kValue, kZ, kBeta, kAlpha };
  static constexpr std::array<const char*, 6> kParts{"query", "key", "value", "z", "beta", "alpha"};
  static constexpr std::size_t kConvolved = 3;  // query, key, value

  bool has_kernels(const at::Tensor& mixed) const {
    const auto& config = setup_.config;
    return setup_.alignment() == Alignment::kFast &&
           delta_cuda_supports(mixed, config.linear_key_head_dim, config.linear_value_head_dim);
  }

  at::Tensor conv_weight() const { return at::cat({conv1d_[0], conv1d_[1], conv1d_[2]}); }

  // Convolved rows of sequences, [sequences, tokens, ..].
  DeltaRows delta_rows(const ProjectedRows& rows) const {
    const auto& config = setup_.config;
    const auto keys = in_proj_[kKey].size(0);
    const auto heads = [&](std::int64_t begin, std::int64_t channels, std::int64_t dim) {
      return rows.mixed.narrow(2, begin, channels).unflatten(2, {channels / dim, dim});
    };
    return {.query = heads(0, keys, config.linear_key_head_dim),
            .key = heads(keys, keys, config.linear_key_head_dim),
            .value = heads(2 * keys, in_proj_[kValue].size(0), config.linear_value_head_dim),
            .decay = rows.decay,
            .beta = rows.beta};
  }
  DeltaRows one_sequence(const ProjectedRows& rows) const {
    return delta_rows({rows.mixed.unsqueeze(0), rows.decay.unsqueeze(0), rows.beta.unsqueeze(0)});
  }

  // Each sequence of the batch begins anew -> [tokens, heads, value_dim].
  at::Tensor of_batch(const ProjectedRows& rows, const SequencePartition& batch) const {
    const auto weight = conv_weight();
    if (has_kernels(rows.mixed)) {
      std::vector<at::Tensor> mixed;
      std::vector<std::int64_t> lengths;
      for (const auto& segment : batch.segments()) {
        lengths.push_back(segment.num_queries);
        mixed.push_back(causal_conv1d(
            rows.mixed.narrow(0, segment.query_begin, segment.num_queries), {}, weight));
      }
      const ProjectedRows convolved{.mixed = mixed.size() == 1 ? mixed[0] : at::cat(mixed),
                                    .decay = rows.decay,
                                    .beta = rows.beta};
      return packed_gated_delta_rule(one_sequence(convolved), lengths, {}).output.squeeze(0);
    }
    std::vector<at::Tensor> outputs;
    for (const auto& segment : batch.segments()) {
      auto mine = rows.narrow(segment.query_begin, segment.num_queries);
      mine.mixed = causal_conv1d(mine.mixed, {}, weight);
      outputs.push_back(
          chunk_gated_delta_rule(one_sequence(mine), {}, setup_.alignment()).output.squeeze(0));
    }
    return outputs.size() == 1 ? outputs[0] : at::cat(outputs);
  }

  // The sequences of a step that begin or have several rows; the other rows' results are zeros.
  at::Tensor begin_sequences(const ProjectedRows& rows,
                             const LinearRows& step_rows,
                             const LinearStates& states) const {
    const auto weight = conv_weight();
    std::vector<at::Tensor> mixed;
    std::vector<at::Tensor> decay;
    std::vector<at::Tensor> beta;
    std::vector<at::Tensor> before;
    std::vector<std::int64_t> lengths;
    for (const auto& sequence : step_rows.chunks) {
      const auto mine = rows.narrow(sequence.row_begin, sequence.num_rows);
      mixed.push_back(convolve(mine.mixed, sequence, states, weight));
      decay.push_back(mine.decay);
      beta.push_back(mine.beta);
      const auto state = states.recurrent[sequence.slot];
      before.push_back(sequence.num_computed == 0 ? at::zeros_like(state) : state);
      lengths.push_back(sequence.num_rows);
    }
    const auto result = packed_gated_delta_rule(
        one_sequence({.mixed = at::cat(mixed), .decay = at::cat(decay), .beta = at::cat(beta)}),
        lengths, at::stack(before));
    const auto of_rows = result.output.squeeze(0);
    auto output =
        at::zeros({rows.mixed.size(0), of_rows.size(1), of_rows.size(2)}, of_rows.options());
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      const auto& sequence = step_rows.chunks[i];
      states.recurrent[sequence.slot].copy_(result.state[static_cast<std::int64_t>(i)]);
      output.narrow(0, sequence.row_begin, lengths[i]).copy_(of_rows.narrow(0, begin, lengths[i]));
      begin += lengths[i];
    }
    return output;
  }

  // Convolves rows of a sequence behind the tokens before them, and keeps the last ones.
  static at::Tensor convolve(const at::Tensor& mixed,
                             const SequenceRows& sequence,
                             const LinearStates& states,
                             const at::Tensor& weight) {
    const auto kept = states.conv[sequence.slot];
    const auto before = sequence.num_computed == 0 ? at::zeros_like(kept) : kept.clone();
    const auto inputs = at::cat({before, mixed});
    kept.copy_(inputs.narrow(0, sequence.num_rows, before.size(0)));
    return causal_conv1d(mixed, before, weight);
  }

  // A step of generation, which goes on from the states of the sequences.
  at::Tensor step(const ProjectedRows& rows,
                  const LinearRows& step_rows,
                  const LinearStates& states) const {
    const auto weight = conv_weight();
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
    all.mixed = convolve(rows.mixed, sequence, states, weight);
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
