#include "trainer/engine/forward_sequences.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <optional>

#include "distckpt/base/error.h"
#include "models/distributed/world.h"
#include "models/tensor_parallel/mappings.h"
#include "trainer/engine/micro_batches.h"
#include "trainer/engine/router_replay.h"

namespace ferry::trainer {
namespace {

// Rows in the order of the packs, [tokens, ...], by sequences.
std::vector<at::Tensor> of_sequences(const at::Tensor& all,
                                     const std::vector<at::Tensor>& sequences,
                                     const std::vector<Partition>& parts) {
  std::vector<at::Tensor> results(sequences.size());
  std::int64_t begin = 0;
  for (const auto& part : parts) {
    for (const auto i : part) {
      const auto tokens = sequences[i].size(0);
      require(tokens > 0 && !results[i].defined(), ErrorKind::kBug,
              "sequence {} is empty, or in two micro-batches", i);
      results[i] = all.narrow(0, begin, tokens);
      begin += tokens;
    }
  }
  require(begin == all.size(0), ErrorKind::kBug, "{} tokens in micro-batches of {}", begin,
          all.size(0));
  return results;
}

// The same with `count` sequences: those that are added have one token, which nobody reads.
std::vector<at::Tensor> forward_padded(const Pipeline& pipeline,
                                       const std::vector<at::Tensor>& sequences,
                                       const std::vector<Partition>& parts,
                                       const TokenFunction& say,
                                       SequenceOptions options,
                                       std::size_t count) {
  auto padded = sequences;
  const auto token = at::zeros({1}, at::kLong);
  padded.resize(count, token);
  if (!options.scored.empty()) options.scored.resize(count, token.eq(0));
  if (!options.masks.empty())
    options.masks.resize(count, models::SamplingMask{.token_ids = token, .offsets = {0, 1}});
  if (!options.visual.sequences.empty()) options.visual.sequences.resize(count);
  auto* const routed_experts = options.routed_experts;
  std::vector<at::Tensor> replayed;
  if (routed_experts != nullptr && !routed_experts->empty()) {
    replayed = *routed_experts;
    replayed.resize(count, replayed.front().narrow(0, 0, 1));
    options.routed_experts = &replayed;
  }
  auto results = forward_sequences(pipeline, padded, parts, say, options);
  results.resize(sequences.size());
  if (routed_experts != nullptr) routed_experts->resize(sequences.size());
  return results;
}

}  // namespace

std::vector<at::Tensor> forward_sequences(const Pipeline& pipeline,
                                          const std::vector<at::Tensor>& sequences,
                                          const std::vector<Partition>& parts,
                                          const TokenFunction& say,
                                          const SequenceOptions& options) {
  std::size_t count = sequences.size();
  for (const auto& part : parts)
    for (const auto i : part) count = std::max(count, i + 1);
  if (count > sequences.size())
    return forward_padded(pipeline, sequences, parts, say, options, count);
  const auto& mesh = pipeline.chunks.front()->mesh();
  auto* const routed_experts = options.routed_experts;
  const auto batches = pack_micro_batches(sequences, parts, mesh, options.scored, options.masks,
                                          options.visual.sequences);
  std::int64_t num_tokens = 0;
  for (const auto& batch : batches) num_tokens += batch.num_tokens();
  std::vector<at::Tensor> of_batches(batches.size());  // on the last stage
  const LossFunction keep = [&](const models::GPTModel& model, const at::Tensor& hidden,
                                std::size_t i) {
    const auto all =
        models::gather_from_sequence_parallel_region(say(model, hidden, batches[i]), mesh.cp());
    of_batches[i] = batches[i].in_pack_order(all).narrow(0, 0, batches[i].num_tokens());
    return LossOutput{};
  };
  std::optional<RouteRecorder> recorder;
  RouteFunction routes;
  if (routed_experts != nullptr && routed_experts->empty())
    routes = recorder.emplace(pipeline, batches).routes();
  else if (routed_experts != nullptr)
    routes = replay_routes(pipeline, batches, parts, *routed_experts);
  forward_backward(pipeline, batches, keep,
                   {.forward_only = true,
                    .routes = routes,
                    .visual = visual_function(options.visual, pipeline.chunks, batches, parts)});

  const auto numbers = at::TensorOptions().dtype(at::kFloat).device(mesh.world().device());
  const auto mine = mesh.is_last_stage() ? at::cat(of_batches).to(at::kFloat)
                                         : at::zeros({num_tokens, options.channels}, numbers);
  const auto all = mesh.pp().broadcast(mine, mesh.pp().size() - 1).cpu();

  if (recorder) *routed_experts = of_sequences(recorder->collect(), sequences, parts);
  return of_sequences(all, sequences, parts);
}

}  // namespace ferry::trainer
