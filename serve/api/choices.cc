#include "serve/api/choices.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <string_view>
#include <unordered_map>
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

// The text of logprob_json(), quickly.
std::string number_text(float logprob) {
  if (!std::isfinite(logprob)) return dump(logprob_json(logprob));
  std::array<char, 32> buffer{};
  auto* const begin = buffer.data();
  const auto written = std::to_chars(begin, begin + buffer.size(), static_cast<double>(logprob));
  const std::string text(begin, written.ptr);
  return text.find_first_of(".e") == text.npos ? text + ".0" : text;
}

// Adds to the text of an object that has members.
void append_member(std::string& object, std::string_view name, std::string_view value) {
  object.back() = ',';
  object.append("\"").append(name).append("\":").append(value).append("}");
}

// In code points of UTF-8, as Python counts them.
std::int64_t num_characters(std::string_view text) {
  return std::ranges::count_if(text, [](char c) { return (c & 0xC0) != 0x80; });
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

// Under vLLM's name and under its older one.
void add_reasoning(SamplePart& part, ordered_json& message) {
  if (part.reasoning.empty()) return;
  message["reasoning"] = part.reasoning;
  message["reasoning_content"] = std::move(part.reasoning);
}

}  // namespace

ordered_json usage_json(const Usage& usage) {
  return {{"prompt_tokens", usage.prompt_tokens},
          {"completion_tokens", usage.completion_tokens},
          {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
          {"prompt_tokens_details", {{"cached_tokens", usage.cached_tokens}}}};
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
      text_offsets_(static_cast<std::size_t>(request.num_samples()), 0) {
  set_version(0);
}

void AnswerWriter::set_version(std::int64_t version) {
  if (version == version_ && !chunk_head_.empty()) return;
  version_ = version;
  chunk_head_ =
      dump(envelope(request_.is_chat ? "chat.completion.chunk" : "text_completion", version));
  chunk_head_.resize(chunk_head_.size() - 2);  // "]}"
}

ordered_json AnswerWriter::envelope(const char* object, std::int64_t version) const {
  return {{"id", id_},
          {"object", object},
          {"created", created_},
          {"model", model_.name},
          {"system_fingerprint", fmt::format("weights-{}", version)},
          {"choices", ordered_json::array()}};
}

std::size_t AnswerWriter::prompt_number(std::int64_t index) const {
  return static_cast<std::size_t>(index / request_.params.n);
}

const std::vector<std::int64_t>& AnswerWriter::prompt_of(std::int64_t index) const {
  return request_.prompts[prompt_number(index)];
}

std::string AnswerWriter::whole(std::vector<SamplePart> samples,
                                const Usage& usage,
                                std::int64_t version,
                                std::vector<PromptLogprobs> prompt_logprobs) {
  prompt_logprobs_ = std::move(prompt_logprobs);
  auto answer = envelope(request_.is_chat ? "chat.completion" : "text_completion", version);
  answer.erase("choices");
  answer["usage"] = usage_json(usage);
  if (request_.is_chat && request_.return_token_ids)
    answer["prompt_token_ids"] = request_.prompts.front();
  std::string choices = "[";
  for (auto& sample : samples) {
    choices += choices.size() > 1 ? "," : "";
    auto one = dump(choice(sample, true));
    if (!request_.is_chat && request_.prompt_logprobs)
      append_member(one, "prompt_logprobs", prompt_logprobs_of(sample.index));
    choices += one;
  }
  auto text = dump(answer);
  append_member(text, "choices", choices + ']');
  if (request_.is_chat && request_.prompt_logprobs)
    append_member(text, "prompt_logprobs", prompt_logprobs_of(0));
  return text;
}

// A stream has thousands of chunks, whose heads are the same.
std::string AnswerWriter::chunk_of(const ordered_json& choice, const ordered_json& more) const {
  auto text = chunk_head_;
  if (!choice.is_null()) text += dump(choice);
  text += ']';
  for (const auto& [key, value] : more.items()) text += fmt::format(",\"{}\":{}", key, dump(value));
  return text + '}';
}

std::string AnswerWriter::first_chunk(std::int64_t index) {
  ordered_json choice{{"index", index}}, more;
  if (request_.is_chat) {
    choice["delta"] = {{"role", "assistant"}, {"content", ""}};
    if (request_.return_token_ids) more["prompt_token_ids"] = request_.prompts.front();
  } else {
    choice["text"] = "";
    choice["prompt_token_ids"] = prompt_of(index);
    choice["token_ids"] = ordered_json::array();
  }
  choice["logprobs"] = nullptr;
  choice["finish_reason"] = nullptr;
  if (request_.continuous_usage_stats)
    more["usage"] =
        usage_json({.prompt_tokens = static_cast<std::int64_t>(prompt_of(index).size())});
  return chunk_of(choice, more);
}

std::string AnswerWriter::chunk(SamplePart part, const Usage& usage) {
  ordered_json more;
  if (request_.continuous_usage_stats) more["usage"] = usage_json(usage);
  return chunk_of(choice(part, false), more);
}

std::string AnswerWriter::usage_chunk(const Usage& usage) {
  return chunk_of(nullptr, {{"usage", usage_json(usage)}});
}

ordered_json AnswerWriter::calls_json(const SamplePart& part, bool is_whole) const {
  auto calls = ordered_json::array();
  for (std::size_t i = 0; i < part.calls.size(); ++i) {
    const auto number = part.first_call + i;
    ordered_json call;
    if (!is_whole) call["index"] = number;
    call["id"] = part.calls[i].id.empty() ? fmt::format("call_{}_{}_{}", id_, part.index, number)
                                          : part.calls[i].id;
    call["type"] = "function";
    call["function"] = {{"name", part.calls[i].name}, {"arguments", part.calls[i].arguments}};
    calls.push_back(std::move(call));
  }
  return calls;
}

ordered_json AnswerWriter::choice(SamplePart& part, bool is_whole) {
  ordered_json choice{{"index", part.index}};
  if (!request_.is_chat) {
    choice["text"] = std::move(part.text);
  } else if (is_whole) {
    const bool only_calls = part.text.empty() && !part.calls.empty();
    choice["message"] = {
        {"role", "assistant"},
        {"content", only_calls ? ordered_json() : ordered_json(std::move(part.text))},
        {"refusal", nullptr}};
    add_reasoning(part, choice["message"]);
    if (!part.calls.empty()) choice["message"]["tool_calls"] = calls_json(part, true);
  } else {
    choice["delta"] = ordered_json::object();
    add_reasoning(part, choice["delta"]);
    if (!part.text.empty()) choice["delta"]["content"] = std::move(part.text);
    if (!part.calls.empty()) choice["delta"]["tool_calls"] = calls_json(part, false);
  }
  choice["logprobs"] = logprobs_of(part);
  choice["finish_reason"] = reason_json(part.finish_reason);
  if (part.finish_reason == FinishReason::kStop && part.first_call + part.calls.size() > 0)
    choice["finish_reason"] = "tool_calls";
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
  const auto add_text = [&](std::int64_t id) {
    const auto& text = text_of(id, buffer);
    offsets.push_back(offset);
    offset += num_characters(text);
    texts.push_back(text);
  };
  const auto add = [&](const auto& token) {
    add_text(token.token_id);
    logprobs.push_back(logprob_json(token.logprob));
    ordered_json top{{texts.back().template get<std::string>(), logprob_json(token.logprob)}};
    const auto most = static_cast<std::size_t>(request_.params.logprobs.value_or(0));
    for (std::size_t i = 0; i < std::min(most, token.top.size()); ++i)
      top.emplace(text_of(token.top[i].token_id, buffer), logprob_json(token.top[i].logprob));
    tops.push_back(std::move(top));
  };
  if (!request_.echoes.empty()) {  // nothing says how likely the first token is
    add_text(prompt_of(part.index).front());
    logprobs.push_back(nullptr);
    tops.push_back(nullptr);
    for (const auto& token : prompt_logprobs_[prompt_number(part.index)]) add(token);
  }
  for (const auto& token : part.tokens) add(token);
  return {{"text_offset", std::move(offsets)},
          {"token_logprobs", std::move(logprobs)},
          {"tokens", std::move(texts)},
          {"top_logprobs", std::move(tops)}};
}

// In vLLM's shape: null, and objects by token ids. A long prompt has a million entries, which take
// seconds as values of JSON.
std::string AnswerWriter::prompt_logprobs_of(std::int64_t index) {
  std::unordered_map<std::int64_t, std::string> texts;
  std::string all = "[null";
  const auto add = [&](std::int64_t id, float logprob, std::int64_t rank) {
    auto& text = texts[id];
    if (text.empty()) text = dump(texts_.of(id));
    all.append("\"").append(std::to_string(id)).append(R"(":{"logprob":)");
    all.append(number_text(logprob)).append(R"(,"rank":)").append(std::to_string(rank));
    all.append(R"(,"decoded_token":)").append(text).append("}");
  };
  const auto most = static_cast<std::size_t>(request_.prompt_logprobs.value_or(0));
  for (const auto& token : prompt_logprobs_[prompt_number(index)]) {
    all += ",{";
    add(token.token_id, token.logprob, token.rank);
    for (std::size_t i = 0; i < std::min(most, token.top.size()); ++i) {
      const auto& [id, logprob] = token.top[i];
      if (id == token.token_id) continue;
      all += ',';
      add(id, logprob, static_cast<std::int64_t>(i) + 1);
    }
    all += '}';
  }
  return all + ']';
}

ordered_json AnswerWriter::chat_logprobs(const SamplePart& part) {
  std::string buffer;
  const auto one = [&](std::int64_t id, float logprob) -> ordered_json {
    const auto& text = text_of(id, buffer);
    const auto& bytes = request_.return_tokens_as_token_ids ? text : texts_.bytes_of(id);
    return {{"token", text}, {"logprob", logprob_json(logprob)}, {"bytes", bytes_json(bytes)}};
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
