#include "trainer/engine/sft_memory.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "models/distributed/world.h"

namespace ferry::trainer {
namespace {

// Allocators lose some to rounding and to holes, the host's heap more.
std::int64_t usable(std::int64_t room, bool on_gpu) {
  return static_cast<std::int64_t>((on_gpu ? 0.95 : 0.8) * static_cast<double>(room));
}

std::int64_t divide_up(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

std::string list_of(const models::ModelMemory& memory) {
  return fmt::format("{} of parameters, {} of gradients and {} of masters and moments",
                     in_words(memory.parameters), in_words(memory.gradients),
                     in_words(memory.optimizer));
}

}  // namespace

Buffer model_buffer(const std::string& name,
                    std::int64_t bytes,
                    std::int64_t held,
                    const models::ModelMemory& memory,
                    const models::ParallelState& mesh) {
  const auto what_fits = [memory, held, dp = mesh.shape().dp() * mesh.shape().cp(),
                          on_gpu = mesh.world().device().is_cuda()](std::int64_t room) {
    const auto all = usable(room + held, on_gpu);
    std::vector<std::string> ways;
    const auto beside = all - memory.parameters - memory.gradients;
    if (beside > 0)
      ways.push_back(fmt::format("masters and moments fit when {} data parallel ranks share them",
                                 divide_up(memory.optimizer * dp, beside)));
    if (all > 0)
      ways.push_back(
          fmt::format("all of it fits when {} times as many ranks share the model "
                      "(engine.tensor_model_parallel_size, engine.pipeline_model_parallel_size)",
                      divide_up(memory.total(), all)));
    return fmt::format("this rank has {}, {} in all, and room for {}{}{}", list_of(memory),
                       in_words(memory.total()), in_words(all), ways.empty() ? "" : ": ",
                       fmt::join(ways, "; or "));
  };
  return {.name = fmt::format("{}, {}", name, in_words(bytes)), .what_fits = what_fits};
}

void BatchShape::add(std::int64_t tokens,
                     std::span<const std::int64_t> seqlens,
                     const Partition& part,
                     std::int64_t cp) {
  double squares = 0;
  double sum = 0;
  for (const auto index : part) {
    const auto length = static_cast<double>(seqlens[index]);
    squares += length * length;
    sum += length;
    longest_sequence = std::max(longest_sequence, divide_up(seqlens[index], cp));
  }
  if (tokens > largest.tokens) largest = {.tokens = tokens, .keys = sum > 0 ? squares / sum : 0};
}

Buffer activations_buffer(const SftConfig& config,
                          const std::vector<models::GPTModel*>& chunks,
                          const BatchShape& batch,
                          const models::ModelMemory& memory) {
  const auto recompute = chunks.front()->options().recompute;
  const auto needed = batch_bytes(chunks, recompute, batch.largest, batch.num_micro_batches);
  const auto what_fits = [=, &config](std::int64_t room) {
    const bool on_gpu = config.trainer.device == DeviceKind::kCuda;
    const auto all = usable(room, on_gpu);
    const models::Recompute full{.granularity = models::Recompute::Granularity::kFull};
    const auto fits = [&](const models::Recompute& how, std::int64_t bytes) {
      return tokens_that_fit(chunks, how, batch.largest, batch.num_micro_batches, bytes);
    };
    std::vector<std::string> ways;
    const auto tokens = fits(recompute, all);
    if (tokens >= batch.longest_sequence && config.data.use_dynamic_bsz) {
      const auto whole = tokens * chunks.front()->mesh().shape().cp();
      ways.push_back(fmt::format("data.max_token_len_per_gpu={}", tokens));
      if (whole < config.data.max_length) ways.back() += fmt::format(" data.max_length={}", whole);
    } else if (tokens >= batch.longest_sequence) {
      ways.push_back(
          fmt::format("micro-batches of {} tokens (data.micro_batch_size_per_gpu)", tokens));
    }
    const auto again = batch_bytes(chunks, full, batch.largest, batch.num_micro_batches);
    if (recompute.granularity != full.granularity && again <= all)
      ways.push_back(fmt::format(
          "engine.recompute_granularity=full engine.recompute_method=uniform, which needs {}",
          in_words(again)));
    if (on_gpu && !config.engine.optimizer_offload &&
        needed <= usable(room + memory.optimizer, on_gpu))
      ways.push_back(
          fmt::format("engine.optimizer_offload=true, for {} more", in_words(memory.optimizer)));
    if (ways.empty())
      ways.push_back(
          fmt::format("none of these alone: {} tokens do with recompute, and a sequence has {}; "
                      "share the model "
                      "over more ranks, or each sequence (engine.context_parallel_size)",
                      fits(full, all), batch.longest_sequence));
    return fmt::format("beside {}, what would fit: {}", list_of(memory), fmt::join(ways, "; or "));
  };
  return {.name = fmt::format("the activations of micro-batches of up to {} tokens, {} by formula",
                              batch.largest.tokens, in_words(needed)),
          .what_fits = what_fits};
}

Buffer logits_buffer(const models::GPTModel& chunk, std::int64_t tokens) {
  return {.name = fmt::format("the logits of {} tokens and their gradients, {} by formula", tokens,
                              in_words(logits_bytes(chunk, tokens)))};
}

Buffer snapshot_buffer(std::int64_t bytes) {
  return {.name = fmt::format("the host's copy of what is saved, {}", in_words(bytes)),
          .what_fits = [](std::int64_t) {
            return std::string("checkpoint.async_save=false needs no copy");
          }};
}

}  // namespace ferry::trainer
