#include "serve/generation.h"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <iterator>
#include <utility>

namespace ferry::serve {

using rollout::FinishReason;

namespace {

// Log-probabilities that are written in a few milliseconds, in which no other client is served.
constexpr std::int64_t kFewLogprobs = 4096;

std::int64_t num_prompt_logprobs(const GenerationRequest& request) {
  if (!request.params.prompt_logprobs) return 0;
  std::int64_t count = 0;
  for (const auto& prompt : request.prompts) count += static_cast<std::int64_t>(prompt.size());
  return count * (1 + *request.params.prompt_logprobs) * request.params.n;
}

double seconds_between(Generation::Clock::time_point begin, Generation::Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

}  // namespace

Generation::Generation(GenerationRequest request,
                       const ServedModel& model,
                       TokenTexts& texts,
                       EngineFleet& engine,
                       std::shared_ptr<Exchange> exchange,
                       std::string id,
                       RespondLater respond_later)
    : request_(std::move(request)),
      engine_(engine),
      exchange_(std::move(exchange)),
      id_(std::move(id)),
      respond_later_(std::move(respond_later)),
      is_long_(num_prompt_logprobs(request_) > kFewLogprobs),
      own_texts_(model.tokenizer),
      writer_(request_, model, is_long_ ? own_texts_ : texts, id_, std::time(nullptr)),
      prompt_logprobs_(request_.prompts.size()),
      is_answered_(request_.prompts.size(), false),
      cached_tokens_(request_.prompts.size(), 0) {
  samples_.reserve(static_cast<std::size_t>(request_.num_samples()));
  for (const auto& prompt : request_.prompts) {
    usage_.prompt_tokens += static_cast<std::int64_t>(prompt.size());
    for (std::int64_t i = 0; i < request_.params.n; ++i) {
      const auto index = static_cast<std::int64_t>(samples_.size());
      samples_.push_back(
          {.text = rollout::SampleText(
               model.tokenizer, prompt,
               {.stop = request_.params.stop,
                .min_tokens = request_.params.min_tokens,
                .skip_special_tokens = request_.skip_special_tokens,
                .include_stop_str_in_output = request_.include_stop_str_in_output})});
      samples_.back().part.index = index;
      if (request_.tool_format || request_.thoughts)
        samples_.back().answer.emplace(request_.thoughts, request_.tool_format, request_.tools);
    }
  }
}

std::string Generation::engine_id(std::size_t prompt) const {
  return fmt::format("{}-{}", id_, prompt);
}

void Generation::start() {
  for (std::size_t i = 0; i < request_.prompts.size(); ++i)
    engine_.add_request(engine_id(i), request_.prompts[i], request_.params, request_.images);
}

void Generation::fail(const ApiError& error) {
  for (std::size_t i = 0; i < is_answered_.size(); ++i) {
    if (!is_answered_[i]) engine_.abort(engine_id(i));
  }
  is_over_ = true;
  if (!exchange_->has_begun()) {
    exchange_->respond({.status = error.status(), .body = error.body()});
  } else {  // a stream has its status already
    write_event(error.body());
    write_event("[DONE]");
    exchange_->end();
  }
}

void Generation::abort(const ApiError& error, EngineMetrics& metrics) {
  auto& counted = metrics_ != nullptr ? *metrics_ : metrics;
  counted.finished[rollout::to_string(FinishReason::kAbort)] +=
      static_cast<std::int64_t>(samples_.size() - num_over_);
  fail(error);
}

void Generation::take(std::size_t prompt,
                      rollout::RequestOutput output,
                      std::int64_t version,
                      EngineMetrics& metrics) {
  if (is_over_) return;
  writer_.set_version(version);
  metrics_ = &metrics;
  if (output.num_cached_tokens) {
    const auto before = std::exchange(cached_tokens_[prompt], *output.num_cached_tokens);
    usage_.cached_tokens += *output.num_cached_tokens - before;  // 0 unless an engine failed
  }
  if (output.finished) is_answered_[prompt] = true;
  if (output.error) return fail(api_error(*output.error));
  if (!output.prompt_logprobs.empty()) prompt_logprobs_[prompt] = std::move(output.prompt_logprobs);
  const auto n = static_cast<std::size_t>(request_.params.n);
  const std::span<Sample> samples = std::span(samples_).subspan(prompt * n, n);
  for (auto& one : output.outputs) {
    auto& sample = samples[static_cast<std::size_t>(one.index)];
    if (!sample.is_over) take_sample(sample, output.request_id, one, metrics);
    if (is_over_) return;  // the client does not read
  }
  if (output.finished) {
    for (auto& sample : samples) {
      if (sample.is_over) continue;
      give(sample, {.text = sample.text.finish(), .finish_reason = FinishReason::kAbort}, metrics);
      if (is_over_) return;
    }
  } else if (std::ranges::all_of(samples, &Sample::is_over)) {
    engine_.abort(output.request_id);
    is_answered_[prompt] = true;
  }
  if (num_over_ == samples_.size()) finish(version);
}

void Generation::take_sample(Sample& sample,
                             const std::string& id,
                             rollout::CompletionOutput& output,
                             EngineMetrics& metrics) {
  if (request_.draws_nothing)
    output = {.index = output.index, .finish_reason = FinishReason::kLength};
  auto taken = sample.text.take(output);
  if (taken.is_ahead) engine_.abort(id, output.index);
  SamplePart part{.text = std::move(taken.text), .finish_reason = taken.finish_reason};
  output.tokens.resize(taken.num_tokens);
  count_tokens(sample, output, taken.num_tokens, metrics);
  part.tokens = std::move(output.tokens);
  if (!request_.echoes.empty() && !std::exchange(sample.has_echo, true))
    part.text.insert(0, request_.echoes[prompt_of(sample)]);
  part.stop_reason = stop_reason_of(taken);
  give(sample, std::move(part), metrics);
}

// A stop that the request asked for, as vLLM has it: null for the model's own ends of text.
ordered_json Generation::stop_reason_of(const rollout::SampleText::Part& part) const {
  if (part.stop_string) return *part.stop_string;
  if (part.stop_token && std::ranges::find(request_.params.stop_token_ids, *part.stop_token) !=
                             request_.params.stop_token_ids.end())
    return *part.stop_token;
  return {};
}

void Generation::count_tokens(Sample& sample,
                              const rollout::CompletionOutput& output,
                              std::size_t num_tokens,
                              EngineMetrics& metrics) {
  const auto now = Clock::now();
  const auto prompt = prompt_of(sample);
  if (sample.first_token == Clock::time_point()) {
    const auto waited = seconds_between(started_, now);
    sample.first_token = now;
    metrics.time_to_first_token.add(waited);
    if (output.prefill_seconds) {
      metrics.request_prefill_time.add(*output.prefill_seconds);
      metrics.request_queue_time.add(std::max(0.0, waited - *output.prefill_seconds));
    }
    if (sample.part.index % request_.params.n == 0)
      metrics.prompt_tokens += static_cast<std::int64_t>(request_.prompts[prompt].size());
  } else {
    metrics.inter_token_latency.add(seconds_between(sample.last_token, now));
  }
  sample.last_token = now;
  sample.num_tokens += static_cast<std::int64_t>(num_tokens);
  usage_.completion_tokens += static_cast<std::int64_t>(num_tokens);
  metrics.generation_tokens += static_cast<std::int64_t>(num_tokens);
}

// A sample is a request to vLLM's engine, which its metrics count.
void Generation::count_end(const Sample& sample,
                           FinishReason reason,
                           EngineMetrics& metrics) const {
  ++metrics.finished[rollout::to_string(reason)];
  const auto& prompt = request_.prompts[prompt_of(sample)];
  metrics.e2e_request_latency.add(seconds_between(started_, Clock::now()));
  metrics.request_prompt_tokens.add(static_cast<double>(prompt.size()));
  metrics.request_generation_tokens.add(static_cast<double>(sample.num_tokens));
  metrics.request_params_n.add(static_cast<double>(request_.params.n));
  metrics.request_params_max_tokens.add(static_cast<double>(request_.params.max_tokens));
  const auto decode = seconds_between(sample.first_token, sample.last_token);
  metrics.request_decode_time.add(decode);
  if (sample.num_tokens > 1)
    metrics.request_time_per_output_token.add(decode / static_cast<double>(sample.num_tokens - 1));
}

// Takes thoughts and calls of tools out of the part's text.
void Generation::read_answer(Sample& sample, SamplePart& part) const {
  if (!sample.answer) return;
  auto found = sample.answer->take(part.text);
  if (part.finish_reason != FinishReason::kNone) {
    auto rest = sample.answer->finish();
    found.content += rest.content;
    found.reasoning += rest.reasoning;
    std::ranges::move(rest.calls, std::back_inserter(found.calls));
  }
  const std::size_t most = request_.parallel_tool_calls ? found.calls.size()
                           : sample.num_calls == 0      ? 1
                                                        : 0;
  found.calls.resize(std::min(found.calls.size(), most));
  part.text = std::move(found.content);
  if (request_.include_reasoning) part.reasoning = std::move(found.reasoning);
  part.calls = std::move(found.calls);
  part.first_call = sample.num_calls;
  sample.num_calls += part.calls.size();
}

std::size_t Generation::prompt_of(const Sample& sample) const {
  return static_cast<std::size_t>(sample.part.index / request_.params.n);
}

Usage Generation::usage_of(const Sample& sample) const {
  return {.prompt_tokens = static_cast<std::int64_t>(request_.prompts[prompt_of(sample)].size()),
          .completion_tokens = sample.num_tokens,
          .cached_tokens = cached_tokens_[prompt_of(sample)]};
}

// Writes a part to a stream, or keeps it.
void Generation::give(Sample& sample, SamplePart part, EngineMetrics& metrics) {
  auto& whole = sample.part;
  part.index = whole.index;
  read_answer(sample, part);
  if (part.finish_reason != FinishReason::kNone) {
    sample.is_over = true;
    ++num_over_;
    count_end(sample, part.finish_reason, metrics);
  }
  if (!request_.stream) {
    whole.text += part.text;
    whole.reasoning += part.reasoning;
    std::ranges::move(part.calls, std::back_inserter(whole.calls));
    std::ranges::move(part.tokens, std::back_inserter(whole.tokens));
    whole.finish_reason = part.finish_reason;
    whole.stop_reason = std::move(part.stop_reason);
    return;
  }
  if (!exchange_->has_begun())
    exchange_->begin(200, "text/event-stream", {{"Cache-Control", "no-cache"}});
  if (!std::exchange(sample.has_begun, true) && (request_.is_chat || request_.return_token_ids))
    write_event(writer_.first_chunk(part.index));
  const bool has_tokens = request_.logprobs || request_.return_token_ids;
  if (!part.text.empty() || !part.reasoning.empty() || !part.calls.empty() || has_tokens ||
      part.finish_reason != FinishReason::kNone)
    write_event(writer_.chunk(std::move(part), usage_of(sample)));
}

void Generation::write_event(const std::string& json) {
  exchange_->write("data: " + json + "\n\n");
}

void Generation::finish(std::int64_t version) {
  is_over_ = true;
  if (!request_.stream) {
    // A request that is over is this function's alone.
    const auto make_body = [self = shared_from_this(), version] {
      std::vector<SamplePart> parts;
      for (auto& sample : self->samples_) parts.push_back(std::move(sample.part));
      return self->writer_.whole(std::move(parts), self->usage_, version,
                                 std::move(self->prompt_logprobs_));
    };
    if (is_long_) return respond_later_(exchange_, make_body);
    return exchange_->respond({.body = make_body()});
  }
  if (request_.include_usage) write_event(writer_.usage_chunk(usage_));
  write_event("[DONE]");
  exchange_->end();
}

}  // namespace ferry::serve
