#include "trainer/engine/memory_advice.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <utility>

#include "distckpt/base/integers.h"
#include "models/distributed/messages.h"
#include "models/distributed/world.h"

namespace ferry::trainer {
namespace {

using distckpt::ceil_div;
using models::GPTModel;
using models::Recompute;

constexpr Recompute kFull{.granularity = Recompute::Granularity::kFull};

// A pass that is not learned from keeps nothing but the layer that it is in, as one does that
// computes all layers again: what that keeps besides makes this an upper bound.
Recompute recompute_of(const std::vector<GPTModel*>& chunks, bool forward_only) {
  return forward_only ? kFull : chunks.front()->options().recompute;
}

}  // namespace

BatchShape shape_of(std::span<const models::SequencePartition> batches, std::int64_t cp) {
  BatchShape shape{.num_micro_batches = batches.size()};
  for (const auto& batch : batches) {
    double keys = 0;
    for (const auto& segment : batch.segments()) {
      keys += static_cast<double>(segment.num_queries) * static_cast<double>(segment.num_keys);
      shape.longest_sequence = std::max(shape.longest_sequence, ceil_div(segment.num_keys, cp));
    }
    const auto tokens = batch.tokens().size(0);
    if (tokens > shape.largest.tokens)
      shape.largest = {.tokens = tokens, .keys = keys / static_cast<double>(tokens)};
  }
  return shape;
}

MemoryAdvice::MemoryAdvice(MemorySettings settings,
                           const EngineConfig& engine,
                           const models::ModelMemory& memory,
                           const models::ParallelState& mesh)
    : settings_(std::move(settings)),
      optimizer_offload_(engine.optimizer_offload),
      memory_(memory),
      mesh_(mesh) {}

std::int64_t MemoryAdvice::usable(std::int64_t room) const {
  const double share = mesh_.world().device().is_cuda() ? 0.95 : 0.8;
  return static_cast<std::int64_t>(share * static_cast<double>(room));
}

std::string MemoryAdvice::list() const {
  if (memory_.gradients + memory_.optimizer == 0)
    return fmt::format("{} of parameters", in_words(memory_.parameters));
  return fmt::format("{} of parameters, {} of gradients and {} {}masters and moments",
                     in_words(memory_.parameters), in_words(memory_.gradients),
                     in_words(memory_.optimizer), memory_.on_host > 0 ? "for passing " : "of ");
}

Buffer MemoryAdvice::of_model(const std::string& name,
                              std::int64_t bytes,
                              std::int64_t held) const {
  const auto what_fits = [this, held](std::int64_t room) {
    const auto all = usable(room + held);
    std::vector<std::string> ways;
    const auto beside = all - memory_.parameters - memory_.gradients;
    if (beside > 0 && memory_.optimizer > 0 && memory_.on_host == 0)
      ways.push_back(fmt::format(
          "masters and moments fit when {} data parallel ranks share them",
          ceil_div(memory_.optimizer * mesh_.shape().dp() * mesh_.shape().cp(), beside)));
    if (all > 0)
      ways.push_back(
          fmt::format("all of it fits when {} times as many ranks share the model "
                      "({}.tensor_model_parallel_size, {}.pipeline_model_parallel_size)",
                      ceil_div(memory_.total(), all), settings_.engine, settings_.engine));
    return fmt::format("this rank has {}, {} in all, and room for {}{}{}", list(),
                       in_words(memory_.total()), in_words(all), ways.empty() ? "" : ": ",
                       fmt::join(ways, "; or "));
  };
  return {.name = fmt::format("{}, {}", name, in_words(bytes)), .what_fits = what_fits};
}

std::string MemoryAdvice::ways(const std::vector<GPTModel*>& chunks,
                               const BatchShape& batch,
                               bool forward_only,
                               std::int64_t room) const {
  const auto& [prefix, size] = forward_only ? settings_.computing : settings_.learning;
  const auto recompute = recompute_of(chunks, forward_only);
  const auto all = usable(room);
  const auto fits = [&](const Recompute& how, std::int64_t bytes) {
    return tokens_that_fit(chunks, how, batch.largest, batch.num_micro_batches, bytes);
  };
  std::vector<std::string> ways;
  const auto tokens = fits(recompute, all);
  if (tokens >= batch.longest_sequence && size.use_dynamic_bsz) {
    ways.push_back(fmt::format("{}max_token_len_per_gpu={}", prefix, tokens));
    const auto whole = tokens * mesh_.shape().cp();
    if (whole < settings_.longest_sequence && whole > settings_.beside_longest)
      ways.back() += fmt::format(" {}={}", settings_.longest, whole - settings_.beside_longest);
  } else if (tokens >= batch.longest_sequence) {
    ways.push_back(
        fmt::format("micro-batches of {} tokens ({}micro_batch_size_per_gpu)", tokens, prefix));
  }
  const auto again = batch_bytes(chunks, kFull, batch.largest, batch.num_micro_batches);
  if (recompute.granularity != kFull.granularity && again <= all)
    ways.push_back(
        fmt::format("{0}.recompute_granularity=full {0}.recompute_method=uniform "
                    "{0}.recompute_num_layers=1, which needs {1}",
                    settings_.engine, in_words(again)));
  const auto needed = batch_bytes(chunks, recompute, batch.largest, batch.num_micro_batches);
  if (mesh_.world().device().is_cuda() && !optimizer_offload_ && memory_.optimizer > 0 &&
      needed <= usable(room + memory_.optimizer))
    ways.push_back(fmt::format("{}.optimizer_offload=true, for {} more", settings_.engine,
                               in_words(memory_.optimizer)));
  if (ways.empty())
    ways.push_back(fmt::format(
        "none of these alone: {} tokens do with recompute, and a sequence has {}; share the model "
        "over more ranks, or each sequence ({}.context_parallel_size)",
        fits(kFull, all), batch.longest_sequence, settings_.engine));
  return fmt::format("beside {}, what would fit: {}", list(), fmt::join(ways, "; or "));
}

Buffer MemoryAdvice::of_batch(const std::vector<GPTModel*>& chunks,
                              const BatchShape& batch,
                              bool forward_only) const {
  const auto needed = batch_bytes(chunks, recompute_of(chunks, forward_only), batch.largest,
                                  batch.num_micro_batches);
  return {.name = fmt::format("the {} of micro-batches of up to {} tokens, {} by formula",
                              forward_only ? "forward passes" : "activations", batch.largest.tokens,
                              in_words(needed)),
          .what_fits = [=, this](std::int64_t room) {
            return ways(chunks, batch, forward_only, room);
          }};
}

Buffer MemoryAdvice::of_loss(const GPTModel& chunk, std::int64_t tokens) const {
  return {.name = fmt::format("the logits of {} tokens and their gradients, {} by formula", tokens,
                              in_words(logits_bytes(chunk, tokens)))};
}

Buffer MemoryAdvice::of_state_on_host() const {
  return {.name = fmt::format("masters and moments on the host, {}", in_words(memory_.on_host)),
          .what_fits = [](std::int64_t) {
            return std::string(
                "each rank of the machine has as much; moments in bfloat16 (exp_avg_dtype, "
                "exp_avg_sq_dtype) need two thirds, more data parallel ranks less");
          }};
}

Buffer MemoryAdvice::of_snapshot() const {
  return {.name = fmt::format(
              "the host's copy of what is saved, {}",
              in_words(memory_.parameters + std::max(memory_.optimizer, memory_.on_host))),
          .what_fits = [](std::int64_t) {
            return std::string("checkpoint.async_save=false needs no copy");
          }};
}

std::string MemoryAdvice::expect(const std::vector<GPTModel*>& chunks,
                                 bool forward_only,
                                 std::int64_t returning) const {
  const auto& [prefix, size] = forward_only ? settings_.computing : settings_.learning;
  const auto& shape = mesh_.shape();
  const auto longest = settings_.longest_sequence;
  const auto sequences = std::max<std::int64_t>(settings_.batch_size / shape.dp(), 1);
  const auto whole =
      std::min(size.use_dynamic_bsz ? size.max_token_len(shape.cp(), longest)
                                    : longest * size.micro_batch_size_per_gpu.value_or(1),
               longest * sequences);
  const BatchShape batch{
      .largest = {.tokens = ceil_div(whole, shape.cp()), .keys = static_cast<double>(longest)},
      .longest_sequence = ceil_div(longest, shape.cp()),
      .num_micro_batches = static_cast<std::size_t>(forward_only ? 1 : 2 * shape.pp())};
  const auto needed = batch_bytes(chunks, recompute_of(chunks, forward_only), batch.largest,
                                  batch.num_micro_batches);
  const auto free = room(mesh_.world().device()) - returning;
  if (needed <= usable(free)) return "";
  return fmt::format("micro-batches of up to {} tokens may need {}, and {} are free: {}",
                     batch.largest.tokens, in_words(needed),
                     in_words(std::max<std::int64_t>(free, 0)),
                     ways(chunks, batch, forward_only, std::max<std::int64_t>(free, 0)));
}

std::vector<std::string> gather_notes(const models::ProcessGroup& ranks,
                                      const std::vector<std::string>& mine) {
  std::map<std::string, std::vector<std::size_t>> ranks_of;
  const auto all = models::gather(ranks, mine);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    for (const auto& note : all[rank]) ranks_of[note].push_back(rank);
  }
  std::vector<std::string> notes;
  for (const auto& [note, of] : ranks_of)
    notes.push_back(
        fmt::format("rank{} {}: {}", of.size() == 1 ? "" : "s", fmt::join(of, ", "), note));
  return notes;
}

}  // namespace ferry::trainer
