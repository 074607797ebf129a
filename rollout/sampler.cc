#include "rollout/sampler.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "models/kernels/log_probs.h"
#include "rollout/kernels/draw.h"

namespace ferry::rollout {
namespace {

bool is_shaped(const SamplingRow& row) {
  return row.params->truncates() || row.params->penalizes() || !row.forbidden.empty() ||
         row.constraint != nullptr || row.params->shifts_logits() ||
         !row.params->bad_words_token_ids.empty();
}

// True if the tokens before the last one of a word are the last of the answer (vLLM's bad_words).
bool completes(std::span<const std::int64_t> output, std::span<const std::int64_t> word) {
  const auto before = word.first(word.size() - 1);
  return output.size() >= before.size() && std::ranges::equal(output.last(before.size()), before);
}

// Appends the tokens whose logits change, each once, by id.
void add_changes(const SamplingRow& row, std::int64_t vocab_size, std::vector<LogitChange>& all) {
  std::unordered_map<std::int64_t, std::int32_t> counts;
  if (row.params->penalizes()) {
    for (const auto token : row.prompt) counts.try_emplace(token, 0);
    for (const auto token : row.output) ++counts[token];
  }
  for (const auto token : row.forbidden) counts[token] = LogitChange::kForbidden;
  for (const auto& word : row.params->bad_words_token_ids)
    if (completes(row.output, word)) counts[word.back()] = LogitChange::kForbidden;
  const auto first = static_cast<std::ptrdiff_t>(all.size());
  for (const auto& [token, count] : counts)
    if (token >= 0 && token < vocab_size)
      all.push_back({.token = static_cast<std::int32_t>(token), .count = count});
  std::sort(all.begin() + first, all.end(),
            [](const auto& a, const auto& b) { return a.token < b.token; });
}

DrawRow draw_row(const SamplingRow& row, std::int64_t index, std::int64_t vocab_size) {
  const auto& params = *row.params;
  const bool greedy = params.greedy();
  const bool some = !greedy && params.top_k > 0 && params.top_k < vocab_size;
  return {.seed = row.seed,
          .request = row.request,
          .position = row.position,
          .top_p = greedy ? 1 : params.top_p,
          .min_p = greedy ? 0 : params.min_p,
          .row = static_cast<std::int32_t>(index),
          .top_k = some ? static_cast<std::int32_t>(params.top_k) : 0,
          .inverse_temperature = greedy ? 1.0F : 1.0F / static_cast<float>(params.temperature),
          .greedy = greedy ? 1 : 0,
          .penalties = {.repetition = static_cast<float>(params.repetition_penalty),
                        .presence = static_cast<float>(params.presence_penalty),
                        .frequency = static_cast<float>(params.frequency_penalty)}};
}

// Does not wait for the copy.
at::Tensor upload(const std::vector<std::int64_t>& values, at::Device device) {
  const auto host = at::tensor(values);
  return device.is_cuda() ? host.pin_memory().to(device, /*non_blocking=*/true) : host;
}

// The logits with -inf for the tokens that the rows' constraints do not allow; the same tensor if
// no row has one. On a GPU the bits are found while it computes the logits.
at::Tensor constrained(const at::Tensor& logits,
                       std::int64_t vocab_size,
                       std::span<const SamplingRow> rows) {
  std::vector<std::int64_t> indices;
  for (std::size_t i = 0; i < rows.size(); ++i)
    if (rows[i].constraint != nullptr) indices.push_back(static_cast<std::int64_t>(i));
  if (indices.empty()) return logits;
  const auto device = logits.device();
  const auto count = static_cast<std::int64_t>(indices.size());
  const auto size = (vocab_size + 7) / 8;
  auto bits =
      at::empty({count, size}, at::TensorOptions(at::kByte).pinned_memory(device.is_cuda()));
  auto* row_bits = bits.mutable_data_ptr<std::uint8_t>();
  for (const auto i : indices) {
    rows[static_cast<std::size_t>(i)].constraint->write_allowed(
        {row_bits, static_cast<std::size_t>(size)});
    row_bits += size;
  }
  const auto of_byte = at::tensor({1, 2, 4, 8, 16, 32, 64, 128}, at::kByte).to(device);
  const auto forbidden = bits.to(device, /*non_blocking=*/true)
                             .unsqueeze(2)
                             .bitwise_and(of_byte)
                             .eq(0)
                             .view({count, size * 8})
                             .narrow(1, 0, vocab_size);
  auto all = logits.clone();
  if (count == logits.size(0)) {
    all.narrow(1, 0, vocab_size).masked_fill_(forbidden, kMinusInfinity);
    return all;
  }
  const auto index = upload(indices, device);
  auto some = logits.index_select(0, index);
  some.narrow(1, 0, vocab_size).masked_fill_(forbidden, kMinusInfinity);
  return all.index_copy_(0, index, some);
}

// The logits in fp32 with what rows add to them, and -inf for what they do not allow; the same
// tensor if no row does either.
at::Tensor shifted(const at::Tensor& logits,
                   std::int64_t vocab_size,
                   std::span<const SamplingRow> rows) {
  if (std::ranges::none_of(rows, [](const auto& row) { return row.params->shifts_logits(); }))
    return logits;
  const auto in_vocabulary = [&](std::int64_t token) { return token < vocab_size; };
  auto all = logits.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    auto row = all[static_cast<std::int64_t>(i)];
    const auto& params = *rows[i].params;
    if (!params.allowed_token_ids.empty()) {
      std::vector<std::int64_t> ids;
      std::ranges::copy_if(params.allowed_token_ids, std::back_inserter(ids), in_vocabulary);
      const auto index = upload(ids, all.device());
      const auto kept = row.index_select(0, index);
      row.fill_(kMinusInfinity).index_copy_(0, index, kept);
    }
    std::vector<std::int64_t> ids;
    std::vector<float> biases;
    for (const auto& [id, bias] : params.logit_bias) {
      if (!in_vocabulary(id)) continue;
      ids.push_back(id);
      biases.push_back(bias);
    }
    if (ids.empty()) continue;
    const auto index = upload(ids, all.device());
    row.index_copy_(0, index, row.index_select(0, index) + at::tensor(biases).to(all.device()));
  }
  return all;
}

// Rows whose distribution is the model's at a temperature, by temperature.
using RowsOfTemperature = std::map<double, std::vector<std::int64_t>>;

RowsOfTemperature plain_rows(std::span<const SamplingRow> rows) {
  RowsOfTemperature of_temperature;
  for (std::size_t i = 0; i < rows.size(); ++i)
    if (!is_shaped(rows[i]))
      of_temperature[rows[i].params->greedy() ? 1 : rows[i].params->temperature].push_back(
          static_cast<std::int64_t>(i));
  return of_temperature;
}

// Their log-probabilities, and their entropies if those are defined. `at_one`: all rows scored at
// temperature 1.
void score_plain_rows(const at::Tensor& logits,
                      models::VocabularyRange range,
                      const RowsOfTemperature& plain,
                      const models::ScoredRows& at_one,
                      SampledTokens& sampled) {
  for (const auto& [temperature, indices] : plain) {
    const bool all = static_cast<std::int64_t>(indices.size()) == logits.size(0);
    const auto index = all ? at::Tensor() : upload(indices, logits.device());
    const auto of = [&](const at::Tensor& x) { return all ? x : x.index_select(0, index); };
    const auto scored =
        temperature == 1
            ? models::ScoredRows{.statistics = at_one.statistics, .log_probs = of(at_one.log_probs)}
            : models::score_rows(of(logits), of(sampled.tokens), range, temperature,
                                 sampled.entropies.defined());
    const auto put = [&](at::Tensor& to, const at::Tensor& values) {
      if (all)
        to = values;
      else
        to.index_copy_(0, index, values);
    };
    put(sampled.processed_logprobs, scored.log_probs);
    if (!sampled.entropies.defined()) continue;
    const auto entropies = models::entropies_of(scored.statistics);
    put(sampled.entropies, temperature == 1 ? of(entropies) : entropies);
  }
}

at::Tensor cat_of(const std::vector<at::Tensor>& rows, at::Device device) {
  return rows.empty() ? at::empty({0}, at::TensorOptions(at::kLong).device(device)) : at::cat(rows);
}

// The log-probabilities and masks of rows that ask for their sampling mask, by the trainer's code.
void score_masked_rows(const at::Tensor& logits,
                       models::VocabularyRange range,
                       std::span<const SamplingRow> rows,
                       const std::vector<DrawRow>& shaped,
                       const at::Tensor& kept,
                       SampledTokens& sampled) {
  struct Places {
    std::vector<std::int64_t> rows{}, shaped{};
  };
  std::map<double, Places> of_temperature;
  for (std::size_t i = 0; i < shaped.size(); ++i) {
    const auto& params = *rows[static_cast<std::size_t>(shaped[i].row)].params;
    if (!params.return_sampling_mask) continue;
    auto& places = of_temperature[params.temperature];
    places.rows.push_back(shaped[i].row);
    places.shaped.push_back(static_cast<std::int64_t>(i));
  }
  std::vector<at::Tensor> ids(rows.size());
  for (const auto& [temperature, places] : of_temperature) {
    const auto index = upload(places.rows, logits.device());
    const auto here = kept.index_select(0, upload(places.shaped, logits.device()));
    const auto ends = here.sum(1).cumsum(0).cpu();
    models::SamplingMask mask{.token_ids = at::nonzero(here).select(1, 1), .offsets = {0}};
    mask.offsets.insert(mask.offsets.end(), ends.const_data_ptr<std::int64_t>(),
                        ends.const_data_ptr<std::int64_t>() + ends.numel());
    auto cut = logits.index_select(0, index);
    models::apply_sampling_mask(cut, mask, range);
    const auto scored = models::score_rows(cut, sampled.tokens.index_select(0, index), range,
                                           temperature, sampled.entropies.defined());
    sampled.processed_logprobs.index_copy_(0, index, scored.log_probs);
    if (sampled.entropies.defined())
      sampled.entropies.index_copy_(0, index, models::entropies_of(scored.statistics));
    for (std::size_t i = 0; i < places.rows.size(); ++i)
      ids[static_cast<std::size_t>(places.rows[i])] =
          mask.rows(static_cast<std::int64_t>(i), 1).token_ids;
  }
  auto& all = sampled.sampling_mask;
  all.offsets = {0};
  for (const auto& row : ids)
    all.offsets.push_back(all.offsets.back() + (row.defined() ? row.numel() : 0));
  std::erase_if(ids, [](const auto& row) { return !row.defined(); });
  all.token_ids = cat_of(ids, logits.device());
}

}  // namespace

// The largest logits of each row, by the order of rank_key: all keys differ, so topk is unique.
LikeliestTokens likeliest_tokens(const at::Tensor& logits,
                                 std::int64_t vocab_size,
                                 std::int64_t count,
                                 const at::Tensor& statistics) {
  const auto wide = logits.narrow(1, 0, vocab_size).to(at::kFloat);
  const auto usable = at::where(wide.isnan(), kMinusInfinity, wide + 0.0F);
  const auto bits = usable.view(at::kInt);
  const auto order = at::where(bits < 0, bits.bitwise_xor(0x7FFFFFFF), bits).to(at::kLong);
  const auto keys = order * (std::int64_t{1} << 32) - at::arange(vocab_size, order.options());
  LikeliestTokens found{.tokens = std::get<1>(keys.topk(std::min(count, vocab_size), 1))};
  found.logprobs = (wide.gather(1, found.tokens) - statistics[models::kMaximum].unsqueeze(1)) -
                   statistics[models::kLogSum].unsqueeze(1);
  return found;
}

std::vector<PromptTokenOutput> ScoredPrompt::tokens() const {
  const auto* const logprob = logprobs.const_data_ptr<float>();
  const auto* const rank = ranks.const_data_ptr<std::int64_t>();
  const auto most = likeliest.tokens.defined() ? likeliest.tokens.size(1) : 0;
  std::vector<PromptTokenOutput> all(static_cast<std::size_t>(logprobs.numel()));
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].token_id = sequence->token_ids[static_cast<std::size_t>(position) + i];
    all[i].logprob = logprob[i];
    all[i].rank = rank[i];
    for (auto j = static_cast<std::int64_t>(i) * most; std::ssize(all[i].top) < most; ++j)
      all[i].top.push_back({.token_id = likeliest.tokens.const_data_ptr<std::int64_t>()[j],
                            .logprob = likeliest.logprobs.const_data_ptr<float>()[j]});
  }
  return all;
}

std::vector<ScoredPrompt> score_prompts(
    std::span<const ScheduledSequence> scheduled,
    const at::Tensor& hidden,
    PromptRows rows,
    const std::function<at::Tensor(const at::Tensor&)>& logits_of) {
  std::vector<ScoredPrompt> prompts;
  std::int64_t next_row = 0;
  for (const auto& [sequence, num_new_tokens] : scheduled) {
    const auto row = std::exchange(next_row, next_row + num_new_tokens);
    const auto begin = sequence->num_computed_tokens;
    const auto count = std::min(num_new_tokens, sequence->num_prompt_tokens - 1 - begin);
    if (!sequence->wants_prompt_logprobs || count <= 0) continue;
    const auto most = sequence->params->prompt_logprobs.value_or(0);
    std::vector<at::Tensor> logprobs, ranks, top_tokens, top_logprobs;
    for (std::int64_t i = 0; i < count; i += rows.max_rows) {
      const auto some = std::min(rows.max_rows, count - i);
      const auto logits = logits_of(hidden.narrow(0, row + i, some));
      const auto behind = sequence->token_ids.begin() + begin + i + 1;
      const auto labels = upload({behind, behind + some}, logits.device());
      const auto scored =
          models::score_rows(logits, labels, {.first = 0, .count = rows.vocab_size}, 1);
      const auto known = logits.narrow(1, 0, rows.vocab_size);
      logprobs.push_back(scored.log_probs);
      ranks.push_back(known.ge(known.gather(1, labels.unsqueeze(1))).sum(1));
      if (most == 0) continue;
      auto likeliest = likeliest_tokens(logits, rows.vocab_size, most, scored.statistics);
      top_tokens.push_back(std::move(likeliest.tokens));
      top_logprobs.push_back(std::move(likeliest.logprobs));
    }
    auto& prompt = prompts.emplace_back(ScoredPrompt{.sequence = sequence, .position = begin + 1});
    prompt.logprobs = at::cat(logprobs);
    prompt.ranks = at::cat(ranks);
    if (most > 0)
      prompt.likeliest = {.tokens = at::cat(top_tokens), .logprobs = at::cat(top_logprobs)};
  }
  return prompts;
}

Draws draws_of(std::span<const SamplingRow> rows, std::int64_t vocab_size) {
  Draws draws;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    auto draw = draw_row(rows[i], static_cast<std::int64_t>(i), vocab_size);
    if (!is_shaped(rows[i])) {
      draws.plain.push_back(draw);
      continue;
    }
    draw.first_change = static_cast<std::int64_t>(draws.changes.size());
    add_changes(rows[i], vocab_size, draws.changes);
    draw.num_changes = static_cast<std::int32_t>(static_cast<std::int64_t>(draws.changes.size()) -
                                                 draw.first_change);
    draws.shaped.push_back(draw);
  }
  return draws;
}

SampledTokens sample(const at::Tensor& logits,
                     std::int64_t vocab_size,
                     std::span<const SamplingRow> rows) {
  return sample(logits, vocab_size, rows, draws_of(rows, vocab_size));
}

SampledTokens sample(const at::Tensor& logits,
                     std::int64_t vocab_size,
                     std::span<const SamplingRow> rows,
                     const Draws& draws) {
  // The kernels read fp32 and bf16; fp32 has each number of fp16.
  if (logits.scalar_type() == at::kHalf)
    return sample(logits.to(at::kFloat), vocab_size, rows, draws);
  require(logits.dim() == 2 && logits.size(0) == static_cast<std::int64_t>(rows.size()) &&
              logits.is_contiguous() && vocab_size > 0 && vocab_size <= logits.size(1) &&
              (logits.scalar_type() == at::kFloat || logits.scalar_type() == at::kBFloat16),
          ErrorKind::kBug, "sampler: logits [{}, {}] of {} rows and {} tokens", logits.size(0),
          logits.size(-1), rows.size(), vocab_size);
  require(vocab_size <= kMostTokens, ErrorKind::kUsage,
          "sampler: a vocabulary of {} tokens, the most are {}", vocab_size, kMostTokens);
  const auto fp32 = logits.options().dtype(at::kFloat);
  SampledTokens sampled{.tokens = at::empty({logits.size(0)}, fp32.dtype(at::kLong)),
                        .logprobs = {},
                        .processed_logprobs = at::empty({logits.size(0)}, fp32)};
  if (rows.empty()) {
    sampled.logprobs = sampled.processed_logprobs;
    return sampled;
  }
  DrawnRows drawn{.tokens = sampled.tokens, .processed_logprobs = sampled.processed_logprobs};
  if (std::ranges::any_of(rows, [](const auto& row) { return row.params->return_sampling_mask; }))
    drawn.kept = at::empty({static_cast<std::int64_t>(draws.shaped.size()), vocab_size},
                           fp32.dtype(at::kBool));
  const auto usable_logits = constrained(shifted(logits, vocab_size, rows), vocab_size, rows);
  (logits.is_cuda() ? draw_on_gpu : draw_on_host)(usable_logits, vocab_size, draws, drawn);
  if (std::ranges::any_of(rows, [](const auto& row) { return row.params->return_entropy; }))
    sampled.entropies = at::empty({logits.size(0)}, fp32);
  const models::VocabularyRange range{.first = 0, .count = vocab_size};
  const auto plain = plain_rows(rows);
  const auto scored = models::score_rows(logits, sampled.tokens, range, /*temperature=*/1,
                                         sampled.entropies.defined() && plain.contains(1));
  sampled.logprobs = scored.log_probs;
  score_plain_rows(logits, range, plain, scored, sampled);
  if (drawn.kept.defined())
    score_masked_rows(logits, range, rows, draws.shaped, drawn.kept, sampled);
  std::int64_t most = 0;
  for (const auto& row : rows) most = std::max(most, row.params->logprobs.value_or(0));
  if (most == 0) return sampled;
  auto likeliest = likeliest_tokens(logits, vocab_size, most, scored.statistics);
  sampled.top_tokens = std::move(likeliest.tokens);
  sampled.top_logprobs = std::move(likeliest.logprobs);
  return sampled;
}

}  // namespace ferry::rollout
