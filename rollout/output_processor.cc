#include "rollout/output_processor.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "distckpt/base/error.h"

namespace ferry::rollout {

std::optional<Answer> OutputProcessor::add_request(
    const std::string& request_id,
    std::vector<std::int64_t> prompt_token_ids,
    SamplingParams params,
    const std::shared_ptr<const VisualPrompt>& visual) {
  require(!requests_.contains(request_id), ErrorKind::kUsage, "request {} is under way already",
          request_id);
  try {
    params.verify();
    require(tokenizer_ != nullptr || params.stop.empty(), ErrorKind::kUsage,
            "stop: strings need a tokenizer, and there is none; stop_token_ids do not");
  } catch (const Error& error) {
    return Answer{.request_id = request_id, .error = error};
  }
  Request request{
      .answer = {.request_id = request_id}, .number = num_requests_++, .added = Clock::now()};
  request.answer.completions.resize(static_cast<std::size_t>(params.n));
  for (std::int64_t i = 0; i < params.n; ++i)
    request.texts.emplace_back(
        tokenizer_, prompt_token_ids,
        text::DetokenizerOptions{.stop = params.stop, .min_tokens = params.min_tokens});
  engine_.add_request(request_id, std::move(prompt_token_ids), std::move(params), visual);
  requests_.emplace(request_id, std::move(request));
  return std::nullopt;
}

std::vector<Answer> OutputProcessor::step(const OnText& on_text) {
  std::vector<Answer> answers;
  for (auto& output : engine_.step()) {
    const auto found = requests_.find(output.request_id);
    auto& request = found->second;
    for (auto& sample : output.outputs) take(request, sample, on_text);
    if (output.error) {
      request.answer.completions.clear();
      request.answer.error = output.error;
    }
    if (request.num_finished < request.answer.completions.size()) continue;
    answers.push_back(std::move(request.answer));
    requests_.erase(found);
  }
  return answers;
}

std::vector<Answer> OutputProcessor::abort_all(const OnText& on_text) {
  std::vector<Answer> answers;
  std::vector<Request*> in_order;
  for (auto& [id, request] : requests_) in_order.push_back(&request);
  std::ranges::sort(in_order, {}, &Request::number);
  for (auto* request : in_order) {
    engine_.abort(request->answer.request_id);
    for (std::size_t i = 0; i < request->answer.completions.size(); ++i)
      if (request->answer.completions[i].finish_reason == FinishReason::kNone)
        finish(*request, i, FinishReason::kAbort, on_text);
    answers.push_back(std::move(request->answer));
  }
  requests_.clear();
  return answers;
}

void OutputProcessor::take(Request& request, CompletionOutput& output, const OnText& on_text) {
  if (request.answer.seconds_to_first_token == 0)
    request.answer.seconds_to_first_token =
        std::chrono::duration<double>(Clock::now() - request.added).count();
  const auto index = static_cast<std::size_t>(output.index);
  auto& completion = request.answer.completions[index];
  std::ranges::copy(output.routed_experts, std::back_inserter(completion.routed_experts));
  auto part = request.texts[index].take(output);
  output.tokens.resize(part.num_tokens);
  std::ranges::move(output.tokens, std::back_inserter(completion.tokens));
  give(request, index, part.text, on_text);
  if (part.is_ahead) engine_.abort(request.answer.request_id, output.index);
  completion.stop_token = part.stop_token;
  completion.stop_string = std::move(part.stop_string);
  completion.finish_reason = part.finish_reason;
  if (part.finish_reason != FinishReason::kNone) ++request.num_finished;
}

void OutputProcessor::finish(Request& request,
                             std::size_t index,
                             FinishReason reason,
                             const OnText& on_text) {
  give(request, index, request.texts[index].finish(), on_text);
  request.answer.completions[index].finish_reason = reason;
  ++request.num_finished;
}

void OutputProcessor::give(Request& request,
                           std::size_t index,
                           const std::string& text,
                           const OnText& on_text) {
  if (text.empty()) return;
  request.answer.completions[index].text += text;
  if (on_text) on_text(request.answer.request_id, static_cast<std::int64_t>(index), text);
}

}  // namespace ferry::rollout
