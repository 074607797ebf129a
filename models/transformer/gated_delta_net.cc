#include "models/transformer/gated_delta_net.h"

#include <ATen/ATen.h>

#include <array>
#include <vector>

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
    const auto decay =
        -a_log_.to(at::kFloat).exp() * models::softplus(project(kAlpha).to(at::kFloat) + dt_bias_);
    const ProjectedRows rows{.mixed = at::cat({project(kQuery), project(kKey), project(kValue)}, 1),
                             .decay = decay,
                             .beta = models::sigmoid(project(kBeta))};
    const auto attended = context.inference == nullptr ? of_batch(rows, *context.batch)
                                                       : step(rows, *context.inference);
    const auto channels = setup_.config.linear_value_head_dim;
    const auto gated =
        gated_rms_norm(attended.reshape({-1, channels}), project(kZ).reshape({-1, channels}),
                       out_norm_, setup_.config.layernorm_epsilon);
    return out_proj_.forward(gated.view({x.size(0), -1}));
  }

 private:
  enum Part : std::uint8_t { kQuery, kKey, kValue, kZ, kBeta, kAlpha };
  static constexpr std::array<const char*, 6> kParts{"query", "key", "value", "z", "beta", "alpha"};
  static constexpr std::size_t kConvolved = 3;  // query, key, value

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
    std::vector<at::Tensor> outputs;
    for (const auto& segment : batch.segments()) {
      auto mine = rows.narrow(segment.query_begin, segment.num_queries);
      mine.mixed = causal_conv1d(mine.mixed, {}, weight);
      outputs.push_back(
          chunk_gated_delta_rule(one_sequence(mine), {}, setup_.alignment()).output.squeeze(0));
    }
    return outputs.size() == 1 ? outputs[0] : at::cat(outputs);
  }

  // A step of generation, which goes on from the states of the sequences.
  at::Tensor step(const ProjectedRows& rows, const InferenceContext& inference) const {
    const auto& step_rows = inference.linear_rows();
    const auto& states = inference.linear_states(layer_);
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
    const auto before = begins ? at::zeros_like(mine(states.conv)) : mine(states.conv).clone();
    const auto inputs = at::cat({before, rows.mixed});
    mine(states.conv).copy_(inputs.narrow(0, sequence.num_rows, before.size(0)));

    auto all = rows;
    all.mixed = causal_conv1d(rows.mixed, before, weight);
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
