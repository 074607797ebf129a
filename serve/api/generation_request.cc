#include "serve/api/generation_request.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <span>
#include <string_view>
#include <utility>

#include "distckpt/base/error.h"
#include "serve/api/chat_prompt.h"
#include "serve/api/fields.h"
#include "serve/api/prompt_fields.h"
#include "serve/api/structured_outputs.h"
#include "serve/api/tagged_arguments.h"

namespace ferry::serve {
namespace {

constexpr std::size_t kMostPrompts = 1024;  // of one request
constexpr std::int64_t kRandomSeed = -1;    // as if none were given

// Fields whose neglect would change the answer.
void refuse_unsupported(const Fields& fields) {
  const auto refuse_if = [&](const char* name, bool is_set) {
    if (is_set) fields.refuse(name, "is not supported");
  };
  for (const char* name :
       {"suffix", "guided_grammar", "guided_whitespace_pattern", "structural_tag", "functions",
        "function_call", "logits_processors", "audio", "prompt_embeds", "logprob_token_ids",
        "thinking_token_budget"}) {
    const auto* const value = fields.find(name);
    refuse_if(name, value != nullptr && !(value->is_structured() && value->empty()));
  }
  bool beams = false;
  fields.read("use_beam_search", beams);
  refuse_if("use_beam_search", beams);
  std::int64_t n = 1;
  fields.read("n", n);
  std::int64_t best_of = n;
  fields.read("best_of", best_of);
  refuse_if("best_of", best_of != n);
  double length_penalty = 1;
  fields.read("length_penalty", length_penalty);
  refuse_if("length_penalty", length_penalty != 1);
  std::vector<std::string> modalities;
  fields.read_strings("modalities", modalities);
  if (std::ranges::any_of(modalities, [](const auto& one) { return one != "text"; }))
    fields.refuse("modalities", "has others than \"text\", which are not supported");
}

void read_sampling(const Fields& fields, rollout::SamplingParams& params) {
  fields.read("n", params.n);
  fields.read("temperature", params.temperature);
  fields.read("top_p", params.top_p);
  fields.read("top_k", params.top_k);
  fields.read("min_p", params.min_p);
  fields.read("repetition_penalty", params.repetition_penalty);
  fields.read("presence_penalty", params.presence_penalty);
  fields.read("frequency_penalty", params.frequency_penalty);
  std::optional<std::int64_t> seed;
  fields.read("seed", seed);
  if (seed && *seed != kRandomSeed) params.seed = static_cast<std::uint64_t>(*seed);
  fields.read_strings("stop", params.stop);
  fields.read("stop_token_ids", params.stop_token_ids);
  fields.read("ignore_eos", params.ignore_eos);
  fields.read("min_tokens", params.min_tokens);
}

// {"50256": -100}, by token ids; as vLLM has it, a number beyond [-100, 100] is its bound.
void read_logit_bias(const Fields& fields,
                     const ServedModel& model,
                     rollout::SamplingParams& params) {
  const auto* const biases = fields.find("logit_bias");
  if (biases == nullptr) return;
  if (!biases->is_object()) fields.refuse("logit_bias", "is not an object");
  for (const auto& [key, value] : biases->items()) {
    std::int64_t id = -1;
    const auto* const end = key.data() + key.size();
    const auto read = std::from_chars(key.data(), end, id);
    if (read.ec != std::errc() || read.ptr != end || id < 0 || id >= model.vocab_size)
      fields.refuse("logit_bias", fmt::format("{} is no token of the model", key));
    if (!value.is_number()) fields.refuse("logit_bias", fmt::format("{} has no number", key));
    params.logit_bias.emplace_back(id, std::clamp(value.get<float>(), -100.0F, 100.0F));
  }
}

void check_tokens(const Fields& fields,
                  const char* name,
                  const std::vector<std::int64_t>& ids,
                  const ServedModel& model) {
  for (const auto id : ids)
    if (id < 0 || id >= model.vocab_size)
      fields.refuse(name, fmt::format("{} is no token of the model", id));
}

void read_allowed_tokens(const Fields& fields,
                         const ServedModel& model,
                         rollout::SamplingParams& params) {
  if (!fields.has("allowed_token_ids")) return;
  fields.read("allowed_token_ids", params.allowed_token_ids);
  if (params.allowed_token_ids.empty()) fields.refuse("allowed_token_ids", "is an empty list");
  check_tokens(fields, "allowed_token_ids", params.allowed_token_ids, model);
}

// A word has the tokens that it has at the beginning of a text, and, if they are others as many,
// those behind a space (vLLM's SamplingParams.update_from_tokenizer).
void read_bad_words(const Fields& fields,
                    const ServedModel& model,
                    rollout::SamplingParams& params) {
  std::vector<std::string> words;
  fields.read_strings("bad_words", words);
  for (const auto& given : words) {
    const auto word = given.substr(std::min(given.find_first_not_of(" \t\n\r\v\f"), given.size()));
    if (word.empty()) fields.refuse("bad_words", "has a word without text");
    auto alone = model.encode(word, false, "bad_words"),
         behind = model.encode(" " + word, false, "bad_words");
    const bool differs = behind.size() == alone.size() && behind.front() != alone.front();
    params.bad_words_token_ids.push_back(std::move(alone));
    if (differs) params.bad_words_token_ids.push_back(std::move(behind));
  }
}

void read_stream(const Fields& fields, GenerationRequest& request) {
  fields.read("stream", request.stream);
  const auto* const options = fields.find("stream_options");
  if (options == nullptr) return;
  if (!request.stream) fields.refuse("stream_options", "is of streams alone");
  const Fields of_stream(*options, "stream_options.");
  of_stream.read("include_usage", request.include_usage);
  of_stream.read("continuous_usage_stats", request.continuous_usage_stats);
}

GenerationRequest read_common(const ordered_json& body, const ServedModel& model) {
  check_model(body, model);
  const Fields fields(body);
  refuse_unsupported(fields);
  GenerationRequest request;
  read_sampling(fields, request.params);
  check_tokens(fields, "stop_token_ids", request.params.stop_token_ids, model);
  read_stream(fields, request);
  fields.read("return_token_ids", request.return_token_ids);
  fields.read("return_tokens_as_token_ids", request.return_tokens_as_token_ids);
  fields.read("skip_special_tokens", request.skip_special_tokens);
  fields.read("include_stop_str_in_output", request.include_stop_str_in_output);
  read_logit_bias(fields, model, request.params);
  read_allowed_tokens(fields, model, request.params);
  read_bad_words(fields, model, request.params);
  if (!request.params.stop.empty()) model.require_tokenizer("stop");
  return request;
}

void ask_for_logprobs(GenerationRequest& request, std::int64_t most, const char* param) {
  if (most < 0 || most > kMostLogprobs)
    throw ApiError(400, fmt::format("{}: {} is not in [0, {}]", param, most, kMostLogprobs), param);
  request.logprobs = true;
  request.params.logprobs = most;
}

// Keeps the last tokens of prompts, or the first ones with the side "right"; -1: as many as the
// model takes, but for one of the answer.
void truncate_prompts(const Fields& fields, const ServedModel& model, GenerationRequest& request) {
  std::string side = "left";
  fields.read("truncation_side", side);
  if (side != "left" && side != "right")
    fields.refuse("truncation_side", "is neither \"left\" nor \"right\"");
  std::optional<std::int64_t> most;
  fields.read("truncate_prompt_tokens", most);
  if (!most) return;
  if (*most < -1 || *most == 0 || *most > model.max_model_len)
    fields.refuse("truncate_prompt_tokens",
                  fmt::format("is not -1, nor in [1, {}]", model.max_model_len));
  if (request.images) fields.refuse("truncate_prompt_tokens", "is not supported with images");
  const auto kept = *most == -1 ? model.max_model_len - 1 : *most;
  for (auto& prompt : request.prompts) {
    if (!std::cmp_greater(prompt.size(), kept)) continue;
    if (side == "left")
      prompt.erase(prompt.begin(), prompt.end() - kept);
    else
      prompt.resize(static_cast<std::size_t>(kept));
  }
}

// `max_tokens`: the client's name for it.
void check_params(const GenerationRequest& request, const std::string& max_tokens) {
  try {
    request.params.verify();
  } catch (const Error& error) {
    const std::string message = error.what();
    const auto colon = std::min(message.find(':'), message.size());
    const auto name = message.substr(0, colon);
    const auto& param = name == "max_tokens" ? max_tokens : name;
    throw ApiError(400, param + message.substr(colon), param);
  }
}

// `max_tokens` that is not given is all that there is room for. A token that is drawn and not
// returned needs none: its keys are never computed.
void check_length(GenerationRequest& request,
                  std::optional<std::int64_t> max_tokens,
                  const char* param,
                  const ServedModel& model) {
  std::int64_t longest = 0;
  for (const auto& prompt : request.prompts) {
    if (prompt.empty()) throw ApiError(400, "prompt: has no tokens", "prompt");
    for (const auto id : prompt)
      if (id < 0 || id >= model.vocab_size)
        throw ApiError(400, fmt::format("prompt: {} is no token of the model", id), "prompt");
    longest = std::max(longest, static_cast<std::int64_t>(prompt.size()));
  }
  const auto room = model.max_model_len - longest + (request.draws_nothing ? 1 : 0);
  if (room < 1 || max_tokens.value_or(1) > room) {
    const bool is_cut = request.are_texts && longest > model.max_model_len;
    const auto message = fmt::format(
        "the {} {} tokens, and the prompt has {}{}{}",
        model.is_limited_by_cache ? "KV cache holds" : "model takes", model.max_model_len,
        is_cut ? "more than " : "", is_cut ? model.max_model_len : longest,
        max_tokens && !request.draws_nothing ? fmt::format(", {} {}", param, *max_tokens) : "");
    throw ApiError(400, message, room < 1 ? "prompt" : param, "context_length_exceeded");
  }
  request.params.max_tokens = max_tokens.value_or(room);
  check_params(request, param);
}

// A text, a list of texts, token ids, or a list of lists of token ids.
void read_prompts(const Fields& fields, const ServedModel& model, GenerationRequest& request) {
  bool special = true;
  fields.read("add_special_tokens", special);
  const bool is_whole = fields.has("truncate_prompt_tokens");
  const auto add_text = [&](const std::string& text) {
    request.prompts.push_back(model.encode(text, special, "prompt", !is_whole));
    request.are_texts = !is_whole;
  };
  const auto* const prompt = fields.find("prompt");
  if (prompt == nullptr) throw ApiError(400, "prompt: is missing", "prompt");
  const auto is_list_of = [&](auto&& is_one) {
    return prompt->is_array() && !prompt->empty() && std::ranges::all_of(*prompt, is_one);
  };
  if (prompt->is_string()) {
    add_text(prompt->get_ref<const std::string&>());
  } else if (is_list_of([](const auto& one) { return one.is_string(); })) {
    for (const auto& one : *prompt) add_text(one.get_ref<const std::string&>());
  } else if (is_list_of([](const auto& one) { return one.is_array(); })) {
    for (const auto& one : *prompt) request.prompts.push_back(token_ids_of(one, "prompt"));
  } else if (is_list_of([](const auto& one) { return one.is_number(); })) {
    request.prompts.push_back(token_ids_of(*prompt, "prompt"));
  } else {
    fields.refuse("prompt", "is neither text, nor token ids, nor a list of one of them");
  }
  if (request.prompts.size() > kMostPrompts)
    fields.refuse("prompt", fmt::format("has more than {} prompts", kMostPrompts));
}

}  // namespace

void check_model(const ordered_json& body, const ServedModel& model) {
  std::string name = model.name;
  Fields(body).read("model", name);
  if (name != model.name)
    throw ApiError(404, fmt::format("the model `{}` does not exist", name), "model",
                   "model_not_found");
}

namespace {

// The name of the function that has to be called, empty for any; nothing if none has to be.
std::optional<std::string> forced_call(const Fields& fields) {
  const auto* const choice = fields.find("tool_choice");
  if (choice == nullptr || *choice == "auto" || *choice == "none") return std::nullopt;
  if (*choice == "required") return "";
  if (!choice->is_object())
    fields.refuse("tool_choice", "is not \"auto\", \"none\", \"required\" or a function");
  const Fields of_choice(*choice, "tool_choice.");
  std::string type = "function", name;
  of_choice.read("type", type);
  if (type != "function") of_choice.refuse("type", "is not \"function\": others are not supported");
  if (!of_choice.has("function")) of_choice.refuse("function", "is missing");
  Fields(*of_choice.find("function"), "tool_choice.function.").read("name", name);
  if (name.empty()) of_choice.refuse("function", "has no name");
  return name;
}

void read_thoughts(const Fields& fields, const ServedModel& model, GenerationRequest& request) {
  fields.read("include_reasoning", request.include_reasoning);
  if (!model.reasoning) return;
  const auto& tokenizer = model.require_tokenizer("messages");
  bool is_answer = false;
  fields.read("continue_final_message", is_answer);
  const std::vector<rollout::text::TokenId> prompt(request.prompts[0].begin(),
                                                   request.prompts[0].end());
  const auto size =
      is_answer ? prompt.size() : std::min(prompt.size(), rollout::text::kGenerationPrompt);
  const auto text = tokenizer.decode(std::span(prompt).last(size), {.skip_special_tokens = false});
  const auto* const variables = fields.find("chat_template_kwargs");
  const auto may_think = variables == nullptr ? std::nullopt : rollout::text::may_think(*variables);
  request.thoughts = rollout::text::thoughts_behind(
      {.text = text, .is_answer = is_answer, .may_think = may_think}, *model.reasoning);
  // Their markers are found in the text.
  const std::array marker{tokenizer.token_to_id(model.reasoning->end)};
  if (marker[0] != rollout::text::kNoToken && tokenizer.decode(marker).empty())
    request.skip_special_tokens = false;
}

// Calls are found unless the request says "none".
void read_tools(const Fields& fields, const ServedModel& model, GenerationRequest& request) {
  if (model.has_channels()) {
    request.tool_format = model.tool_format;
    request.skip_special_tokens = false;
  }
  if (const auto format = requested_format(fields)) hold_to(*format, model, request);
  auto tools = tools_of(fields);
  const auto* const choice = fields.find("tool_choice");
  const auto forced = forced_call(fields);
  if (tools.is_null()) {
    if (forced) fields.refuse("tool_choice", "needs tools");
    return;
  }
  if (choice != nullptr && *choice == "none") return;
  fields.read("parallel_tool_calls", request.parallel_tool_calls);
  unite_parameters(tools);
  request.tools = std::move(tools);
  request.tool_format = model.tool_format;
  if (request.tool_format) request.skip_special_tokens = false;  // that of a call may be such
  if (!forced) return;
  if (!request.tool_format)
    fields.refuse("tool_choice",
                  "needs a format of calls, which the chat template has not: "
                  "--tool-call-parser says which one");
  if (!request.params.structured_outputs.empty())
    fields.refuse("tool_choice", "asks for a call where another field asks for another format");
  hold_to(
      format_of_calls(*request.tool_format, request.tools, *forced, request.parallel_tool_calls),
      model, request);
}

}  // namespace

GenerationRequest parse_completion(const ordered_json& body, const ServedModel& model) {
  auto request = read_common(body, model);
  const Fields fields(body);
  if (const auto format = requested_format(fields)) hold_to(*format, model, request);
  if (fields.has("prompt_token_ids")) {
    fields.read("prompt_token_ids", request.prompts.emplace_back());
  } else {
    read_prompts(fields, model, request);
  }
  truncate_prompts(fields, model, request);
  read_echo(fields, model, request);
  std::optional<std::int64_t> most;
  fields.read("logprobs", most);
  if (most) ask_for_logprobs(request, *most, "logprobs");
  read_prompt_logprobs(fields, request);
  std::optional<std::int64_t> max_tokens = rollout::SamplingParams{}.max_tokens;
  fields.read("max_tokens", max_tokens);
  request.draws_nothing = max_tokens == 0 && !request.echoes.empty();
  if (request.draws_nothing) max_tokens = 1;  // which is not returned
  check_length(request, max_tokens, "max_tokens", model);
  return request;
}

GenerationRequest parse_chat_completion(const ordered_json& body, const ServedModel& model) {
  auto request = read_common(body, model);
  request.is_chat = true;
  const Fields fields(body);
  if (fields.has("prompt_token_ids")) {
    fields.read("prompt_token_ids", request.prompts.emplace_back());
  } else {
    request.are_texts = !fields.has("truncate_prompt_tokens");
    auto prompt = chat_prompt(body, model, request.are_texts);
    request.prompts.push_back(std::move(prompt.token_ids));
    request.images = std::move(prompt.images);
  }
  truncate_prompts(fields, model, request);
  bool echo = false;
  fields.read("echo", echo);
  if (echo) fields.refuse("echo", "is not supported in chats");
  read_thoughts(fields, model, request);
  read_tools(fields, model, request);
  bool logprobs = false;
  std::int64_t most = 0;
  fields.read("logprobs", logprobs);
  fields.read("top_logprobs", most);
  if (!logprobs && most > 0) fields.refuse("top_logprobs", "needs logprobs");
  if (logprobs) ask_for_logprobs(request, most, "top_logprobs");
  read_prompt_logprobs(fields, request);
  std::optional<std::int64_t> max_tokens;
  fields.read("max_tokens", max_tokens);
  const bool is_new_name = fields.has("max_completion_tokens");
  fields.read("max_completion_tokens", max_tokens);
  check_length(request, max_tokens, is_new_name ? "max_completion_tokens" : "max_tokens", model);
  return request;
}

}  // namespace ferry::serve
