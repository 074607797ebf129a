#include "serve/api/choices.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace ferry::serve {

using rollout::FinishReason;

namespace {

ordered_json reason_json(FinishReason reason) {
  if (reason == FinishReason::kNone) return {};
  return rollout::to_string(reason);
}

// JSON has no infinities; vLLM has this number for -inf.
ordered_json logprob_json(float logprob) {
  return logprob == -std::numeric_limits<float>::infinity() ? -9999.0F : logprob;
}

ordered_json bytes_json(const std::string& text) {
  auto bytes = ordered_json::array();
  for (const char c : text) bytes.push_back(static_cast<unsigned char>(c));
  return bytes;
}

ordered_json ids_json(const std::vector<rollout::TokenOutput>& tokens) {
  auto ids = ordered_json::array();
  for (const auto& token : tokens) ids.push_back(token.token_id);
  return ids;
}

}  // namespace

ordered_json usage_json(const Usage& usage) {
  return {{"prompt_tokens", usage.prompt_tokens},
          {"completion_tokens", usage.completion_tokens},
          {"total_tokens", usage.prompt_tokens + usage.completion_tokens}};
}

AnswerWriter::AnswerWriter(const GenerationRequest& request,
                           const ServedModel& model,
                           TokenTexts& texts,
                           std::string id,
                           std::int64_t created)
    : request_(request),
      model_(model),
      texts_(texts),
      id_(std::move(id)),
      created_(created),
      text_offsets_(static_cast<std::size_t>(request.num_samples()), 0) {}

ordered_json AnswerWriter::envelope(const char* object) const {
  return {{"id", id_},
          {"object", object},
          {"created", created_},
          {"model", model_.name},
          {"choices", ordered_json::array()}};
}

const std::vector<std::int64_t>& AnswerWriter::prompt_of(std::int64_t index) const {
  return request_.prompts[static_cast<std::size_t>(index / request_.params.n)];
}

std::string AnswerWriter::whole(std::vector<SamplePart> samples,
                                const Usage& usage,
                                std::int64_t version) {
  auto answer = envelope(request_.is_chat ? "chat.completion" : "text_completion");
  answer["system_fingerprint"] = fmt::format("weights-{}", version);
  for (auto& sample : samples) answer["choices"].push_back(choice(sample, true));
  answer["usage"] = usage_json(usage);
  if (request_.is_chat && request_.return_token_ids)
    answer["prompt_token_ids"] = request_.prompts.front();
  return dump(answer);
}

std::string AnswerWriter::first_chunk(std::int64_t index) {
  auto answer = envelope(request_.is_chat ? "chat.completion.chunk" : "text_completion");
  ordered_json choice{{"index", index}};
  if (request_.is_chat) {
    choice["delta"] = {{"role", "assistant"}, {"content", ""}};
    if (request_.return_token_ids) answer["prompt_token_ids"] = request_.prompts.front();
  } else {
    choice["text"] = "";
    choice["prompt_token_ids"] = prompt_of(index);
    choice["token_ids"] = ordered_json::array();
  }
  choice["logprobs"] = nullptr;
  choice["finish_reason"] = nullptr;
  answer["choices"].push_back(std::move(choice));
  return dump(answer);
}

std::string AnswerWriter::chunk(SamplePart part, const Usage& usage) {
  auto answer = envelope(request_.is_chat ? "chat.completion.chunk" : "text_completion");
  answer["choices"].push_back(choice(part, false));
  if (request_.continuous_usage_stats) answer["usage"] = usage_json(usage);
  return dump(answer);
}

std::string AnswerWriter::usage_chunk(const Usage& usage) {
  auto answer = envelope(request_.is_chat ? "chat.completion.chunk" : "text_completion");
  answer["usage"] = usage_json(usage);
  return dump(answer);
}

ordered_json AnswerWriter::choice(SamplePart& part, bool is_whole) {
  ordered_json choice{{"index", part.index}};
  if (!request_.is_chat) {
    choice["text"] = std::move(part.text);
  } else if (is_whole) {
    choice["message"] = {
        {"role", "assistant"}, {"content", std::move(part.text)}, {"refusal", nullptr}};
  } else {
    choice["delta"] = ordered_json::object();
    if (!part.text.empty()) choice["delta"]["content"] = std::move(part.text);
  }
  choice["logprobs"] = logprobs_of(part);
  choice["finish_reason"] = reason_json(part.finish_reason);
  if (part.finish_reason != FinishReason::kNone) choice["stop_reason"] = part.stop_reason;
  if (!request_.return_token_ids) return choice;
  if (!request_.is_chat && is_whole) choice["prompt_token_ids"] = prompt_of(part.index);
  choice["token_ids"] = ids_json(part.tokens);
  return choice;
}

ordered_json AnswerWriter::logprobs_of(const SamplePart& part) {
  if (!request_.logprobs) return {};
  return request_.is_chat ? chat_logprobs(part) : completion_logprobs(part);
}

const std::string& AnswerWriter::text_of(std::int64_t token_id, std::string& buffer) {
  if (!request_.return_tokens_as_token_ids) return texts_.of(token_id);
  return buffer = fmt::format("token_id:{}", token_id);
}

ordered_json AnswerWriter::completion_logprobs(const SamplePart& part) {
  auto offsets = ordered_json::array(), logprobs = offsets, texts = offsets, tops = offsets;
  std::string buffer;
  auto& offset = text_offsets_[static_cast<std::size_t>(part.index)];
  for (const auto& token : part.tokens) {
    const auto& text = text_of(token.token_id, buffer);
    offsets.push_back(offset);
    offset += static_cast<std::int64_t>(text.size());
    logprobs.push_back(logprob_json(token.logprob));
    texts.push_back(text);
    ordered_json top{{text, logprob_json(token.logprob)}};
    for (const auto& one : token.top)
      top.emplace(text_of(one.token_id, buffer), logprob_json(one.logprob));
    tops.push_back(std::move(top));
  }
  return {{"text_offset", std::move(offsets)},
          {"token_logprobs", std::move(logprobs)},
          {"tokens", std::move(texts)},
          {"top_logprobs", std::move(tops)}};
}

ordered_json AnswerWriter::chat_logprobs(const SamplePart& part) {
  std::string buffer;
  const auto one = [&](std::int64_t id, float logprob) -> ordered_json {
    const auto& text = text_of(id, buffer);
    return {{"token", text}, {"logprob", logprob_json(logprob)}, {"bytes", bytes_json(text)}};
  };
  auto content = ordered_json::array();
  for (const auto& token : part.tokens) {
    auto entry = one(token.token_id, token.logprob);
    auto& top = entry["top_logprobs"] = ordered_json::array();
    for (const auto& likely : token.top) top.push_back(one(likely.token_id, likely.logprob));
    content.push_back(std::move(entry));
  }
  return {{"content", std::move(content)}};
}

}  // namespace ferry::serve
