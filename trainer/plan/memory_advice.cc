#include "trainer/plan/memory_advice.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "distckpt/base/integers.h"

namespace ferry::trainer {

using distckpt::ceil_div;
using models::Recompute;

std::string in_words(std::int64_t bytes) {
  constexpr double kMiB = 1 << 20;
  const auto mib = static_cast<double>(bytes) / kMiB;
  if (mib >= 1024) return fmt::format("{:.1f} GiB", mib / 1024);
  return mib >= 10 ? fmt::format("{:.0f} MiB", mib) : fmt::format("{:.1f} MiB", mib);
}

std::string in_words(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t begin = 0, end = 0; begin < ranks.size(); begin = end) {
    for (end = begin + 1; end < ranks.size() && ranks[end] == ranks[end - 1] + 1;) ++end;
    text += fmt::format("{}{}", begin == 0 ? "" : ", ", ranks[begin]);
    if (end - begin > 1) text += fmt::format("-{}", ranks[end - 1]);
  }
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", text);
}

std::string sharing_keys(std::string_view section, const models::TransformerConfig& model) {
  auto dense =
      fmt::format("{0}.tensor_model_parallel_size, {0}.pipeline_model_parallel_size", section);
  if (model.num_moe_experts == 0) return dense;
  return fmt::format("{}.expert_model_parallel_size, {}", section, dense);
}

MemoryAdvice::MemoryAdvice(MemorySettings settings,
                           const EngineConfig& engine,
                           ModelOnRank model,
                           bool trains)
    : settings_(std::move(settings)),
      optimizer_offload_(engine.optimizer_offload.value_or(false)),
      model_(std::move(model)),
      memory_(model_.memory(trains)) {}

const Recompute& MemoryAdvice::recompute_of(bool forward_only) const {
  return forward_only ? kForwardOnly : model_.recompute();
}

std::int64_t MemoryAdvice::needed(const BatchShape& batch, const Recompute& recompute) const {
  return batch_bytes(model_, recompute, batch.largest, batch.num_micro_batches).total();
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
    const auto all = usable(room + held, model_.on_host());
    std::vector<std::string> ways;
    const auto beside = all - memory_.parameters - memory_.gradients;
    if (beside > 0 && memory_.optimizer > 0 && memory_.on_host == 0)
      ways.push_back(fmt::format(
          "masters and moments fit when {} data parallel ranks share them",
          ceil_div(memory_.optimizer * model_.mesh().dp() * model_.mesh().cp(), beside)));
    if (all > 0)
      ways.push_back(fmt::format("all of it fits when {} times as many ranks share the model ({})",
                                 ceil_div(memory_.total(), all),
                                 sharing_keys(settings_.engine, model_.config())));
    return fmt::format("this rank has {}, {} in all, and room for {}{}{}", list(),
                       in_words(memory_.total()), in_words(all), ways.empty() ? "" : ": ",
                       fmt::join(ways, "; or "));
  };
  return {.name = fmt::format("{}, {}", name, in_words(bytes)), .what_fits = what_fits};
}

std::string MemoryAdvice::ways(const BatchShape& batch,
                               bool forward_only,
                               std::int64_t room) const {
  const auto& [prefix, size] = forward_only ? settings_.computing : settings_.learning;
  const auto& recompute = recompute_of(forward_only);
  const auto all = usable(room, model_.on_host());
  const auto fits = [&](const Recompute& how) {
    return tokens_that_fit(model_, how, batch.largest, batch.num_micro_batches, all);
  };
  std::vector<std::string> ways;
  // The formula falls short where it has room for as many as did not fit.
  const auto by_formula = fits(recompute);
  const auto tokens = by_formula < batch.largest.tokens ? by_formula : batch.largest.tokens * 4 / 5;
  if (tokens >= batch.longest_sequence && size.use_dynamic_bsz) {
    ways.push_back(fmt::format("{}max_token_len_per_gpu={}", prefix, tokens));
    const auto whole = tokens * model_.mesh().cp();
    if (whole < settings_.longest_sequence && whole > settings_.beside_longest)
      ways.back() += fmt::format(" {}={}", settings_.longest, whole - settings_.beside_longest);
  } else if (tokens >= batch.longest_sequence) {
    ways.push_back(
        fmt::format("micro-batches of {} tokens ({}micro_batch_size_per_gpu)", tokens, prefix));
  }
  const auto again = needed(batch, kForwardOnly);
  if (recompute.granularity != kForwardOnly.granularity && again <= all)
    ways.push_back(
        fmt::format("{0}.recompute_granularity=full {0}.recompute_method=uniform "
                    "{0}.recompute_num_layers=1, which needs {1}",
                    settings_.engine, in_words(again)));
  if (!model_.on_host() && !optimizer_offload_ && memory_.optimizer > 0 &&
      needed(batch, recompute) <= usable(room + memory_.optimizer, model_.on_host()))
    ways.push_back(fmt::format("{}.optimizer_offload=true, for {} more", settings_.engine,
                               in_words(memory_.optimizer)));
  if (ways.empty())
    ways.push_back(fmt::format(
        "none of these alone: {} tokens do with recompute, and a sequence has {}; share the model "
        "over more ranks ({}), or each sequence ({}.context_parallel_size)",
        fits(kForwardOnly), batch.longest_sequence, sharing_keys(settings_.engine, model_.config()),
        settings_.engine));
  return fmt::format("beside {}, what would fit: {}", list(), fmt::join(ways, "; or "));
}

Buffer MemoryAdvice::of_batch(const BatchShape& batch, bool forward_only) const {
  return {.name = fmt::format("the {} of micro-batches of up to {} tokens, {} by formula",
                              forward_only ? "forward passes" : "activations", batch.largest.tokens,
                              in_words(needed(batch, recompute_of(forward_only)))),
          .what_fits = [=, this](std::int64_t room) { return ways(batch, forward_only, room); }};
}

Buffer MemoryAdvice::of_loss(std::int64_t tokens) const {
  return {.name = fmt::format("the logits of {} tokens and their gradients, {} by formula", tokens,
                              in_words(logits_bytes(model_, tokens)))};
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

BatchShape MemoryAdvice::largest_batch(bool forward_only) const {
  const auto& size = (forward_only ? settings_.computing : settings_.learning).size;
  const auto& mesh = model_.mesh();
  const auto longest = settings_.longest_sequence;
  const auto sequences = std::max<std::int64_t>(settings_.batch_size / mesh.dp(), 1);
  const auto whole =
      std::min(size.use_dynamic_bsz ? size.max_token_len(mesh.cp(), longest)
                                    : longest * size.micro_batch_size_per_gpu.value_or(1),
               longest * sequences);
  return {.largest = {.tokens = ceil_div(whole, mesh.cp()), .keys = static_cast<double>(longest)},
          .longest_sequence = ceil_div(longest, mesh.cp()),
          .num_micro_batches = static_cast<std::size_t>(forward_only ? 1 : 2 * mesh.pp())};
}

std::string MemoryAdvice::expect(bool forward_only, std::int64_t free) const {
  const auto batch = largest_batch(forward_only);
  const auto bytes = needed(batch, recompute_of(forward_only));
  if (bytes <= usable(free, model_.on_host())) return "";
  free = std::max<std::int64_t>(free, 0);
  return fmt::format("micro-batches of up to {} tokens may need {}, and {} are free: {}",
                     batch.largest.tokens, in_words(bytes), in_words(free),
                     ways(batch, forward_only, free));
}

}  // namespace ferry::trainer
