#include "models/transformer/gated_delta_net.h"

#include <ATen/ATen.h>

#include <array>
#include <utility>
#include <vector>

#include "models/kernels/delta/delta_cuda.h"
#include "models/kernels/delta/delta_rule.h"
#include "models/kernels/product/linear.h"
#include "models/kernels/whole_vectors.h"
#include "models/tensor_parallel/mappings.h"

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
      const auto mine = of_my_heads(parts, batch);
      const auto output = norm_and_gate(of_batch(rows_of(mine), batch), mine[kZ]);
      return out_proj_.forward(
          all_to_all_hidden_to_sequence(batch.in_rank_order(output), setup_.mesh.cp()));
    }
    const auto& z = parts[kZ];
    const auto mixed = mixed_of(parts);
    const auto rows = [&] { return rows_of(parts); };
    const auto gated = [&](const at::Tensor& attended) { return norm_and_gate(attended, z); };
    const auto& step_rows = context.inference->linear_rows();
    const auto& states = context.inference->linear_states(layer_);
    if (!has_kernels(mixed)) return out_proj_.forward(gated(step(rows(), step_rows, states)));
    const bool all_decode = std::cmp_equal(step_rows.decodes.size(), z.size(0));
    auto output = !step_rows.chunks.empty() ? gated(begin_sequences(rows(), step_rows, states))
                  : all_decode              ? at::empty_like(z)
                                            : at::zeros_like(z);  // padding rows, too
    delta_step_cuda({.mixed = mixed,
                     .conv_weight = conv_weight(),
                     .alpha = parts[kAlpha],
                     .beta = parts[kBeta],
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
  static constexpr std::size_t kConvolved = 3;          // query, key, value
  using Parts = std::array<at::Tensor, kParts.size()>;  // [tokens, channels] each

  bool has_kernels(const at::Tensor& mixed) const {
    const auto& config = setup_.config;
    return setup_.alignment() == Alignment::kFast &&
           delta_cuda_supports(mixed, config.linear_key_head_dim, config.linear_value_head_dim);
  }

  // A tensor's share of this rank among context parallel ones, by heads along its first dimension.
  at::Tensor my_share(const at::Tensor& of_heads) const {
    const auto& cp = setup_.mesh.cp();
    const auto share = of_heads.size(0) / cp.size();
    return of_heads.narrow(0, cp.rank() * share, share);
  }

  at::Tensor conv_weight() const {
    return at::cat({my_share(conv1d_[0]), my_share(conv1d_[1]), my_share(conv1d_[2])});
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

  static at::Tensor mixed_of(const Parts& parts) {
    return at::cat({parts[kQuery], parts[kKey], parts[kValue]}, 1);
  }

  ProjectedRows rows_of(const Parts& parts) const {
    const auto rate = my_share(-a_log_.to(at::kFloat).exp());
    return {.mixed = mixed_of(parts),
            .decay = rate * models::softplus(parts[kAlpha].to(at::kFloat) + my_share(dt_bias_)),
            .beta = models::sigmoid(parts[kBeta])};
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

  // Each sequence of the batch begins anew -> [tokens, heads, value_dim].
  at::Tensor of_batch(const ProjectedRows& rows, const SequencePartition& batch) const {
    const auto weight = conv_weight();
    const auto& lengths = batch.padded_lengths();
    auto mixed = rows.mixed.split_with_sizes(lengths);
    for (auto& sequence : mixed) sequence = causal_conv1d(sequence, {}, weight);
    const auto joined = [](const std::vector<at::Tensor>& sequences) {
      return sequences.size() == 1 ? sequences[0] : at::cat(sequences);
    };
    if (has_kernels(rows.mixed)) {
      const ProjectedRows convolved{.mixed = joined(mixed), .decay = rows.decay, .beta = rows.beta};
      return packed_gated_delta_rule(one_sequence(convolved), lengths, {}).output.squeeze(0);
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
