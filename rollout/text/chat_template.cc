#include "rollout/text/chat_template.h"

#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/storage/file_io.h"
#include "rollout/text/jinja/evaluator.h"
#include "rollout/text/jinja/library.h"
#include "rollout/text/jinja/syntax.h"
#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::text {
namespace {

using nlohmann::ordered_json;

// transformers renders this behind the last message to find its end.
constexpr std::string_view kTag = "CONTINUE_FINAL_MESSAGE_TAG ";
constexpr std::string_view kBareTag = "CONTINUE_FINAL_MESSAGE_TAG";

// Marks the end of the last message, and returns its text; of a list of parts, the last text.
std::string mark_final_message(ordered_json& messages) {
  require(messages.is_array() && !messages.empty() && messages.back().is_object() &&
              messages.back().contains("content") && !messages.back()["content"].is_null(),
          ErrorKind::kUsage, "the last message has no content to continue");
  auto* content = &messages.back()["content"];
  if (content->is_array()) {
    ordered_json* last = nullptr;
    for (auto& part : *content) {
      if (part.is_object() && part.contains("text")) last = &part["text"];
    }
    require(last != nullptr, ErrorKind::kUsage, "the last message has no text to continue");
    content = last;
  }
  require(content->is_string(), ErrorKind::kUsage, "the content of the last message is no text");
  auto text = content->get<std::string>();
  *content = text + std::string(kTag);
  return text;
}

std::string cut_at_mark(std::string rendered, std::string_view final_text) {
  const auto at = rendered.rfind(kBareTag);
  require(at != rendered.npos &&
              rendered.find(jinja::stripped(final_text, nullptr, true, true)) != rendered.npos,
          ErrorKind::kUsage,
          "the last message does not appear in the rendered chat, so it cannot be continued");
  const bool with_space = std::string_view(rendered).substr(at).starts_with(kTag);
  rendered.resize(at);
  // A tag without its space means that the template trims the message: trim the rest as well.
  return with_space ? rendered : jinja::stripped(rendered, nullptr, false, true);
}

// The text of a special token, which may be a member of an object with its properties.
ordered_json token_text(const ordered_json& token) {
  return token.is_object() && token.contains("content") ? token["content"] : token;
}

std::optional<std::string> template_of(const ordered_json& config,
                                       bool with_tools,
                                       const std::string& source) {
  const auto found = config.find("chat_template");
  if (found == config.end() || found->is_null()) return std::nullopt;
  if (found->is_string()) return found->get<std::string>();
  require(found->is_array(), ErrorKind::kCorrupt, "{}: chat_template is neither text nor a list",
          source);
  const auto named = [&](std::string_view name) -> std::optional<std::string> {
    for (const auto& one : *found) {
      if (one.is_object() && one.value("name", "") == name && one.contains("template") &&
          one["template"].is_string()) {
        return one["template"].get<std::string>();
      }
    }
    return std::nullopt;
  };
  if (with_tools) {
    if (auto text = named("tool_use")) return text;
  }
  auto text = named("default");
  require(text.has_value(), ErrorKind::kCorrupt, "{}: chat_template has none named default",
          source);
  return text;
}

}  // namespace

ChatTemplate::ChatTemplate(std::string_view text, std::string source)
    : source_(std::move(source)), text_(text) {
  require(is_valid_utf8(text), ErrorKind::kCorrupt, "{}: is not UTF-8", source_);
  try {
    root_ = jinja::parse_template(text);
    jinja::require_known_names(*root_);
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("{}, {}", source_, error.what()));
  }
}
ChatTemplate::~ChatTemplate() = default;
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;

std::optional<ChatTemplate> ChatTemplate::from_folder(const std::filesystem::path& folder,
                                                      bool with_tools) {
  return from_files(ModelFiles(folder), with_tools);
}

std::optional<ChatTemplate> ChatTemplate::from_files(const ModelFiles& files, bool with_tools) {
  const std::string name = "chat_template.jinja", config_name = "tokenizer_config.json";
  const auto config_source = files.where(config_name);
  auto config = ordered_json::object();
  if (const auto json = files.read(config_name)) {
    config = distckpt::parse_ordered_json(*json, config_source);
    require(config.is_object(), ErrorKind::kCorrupt, "{}: not a JSON object", config_source);
  }
  auto source = files.where(name);
  auto text = files.read(name);
  if (!text) {
    source = config_source + ": chat_template";
    text = template_of(config, with_tools, config_source);
  }
  if (!text) return std::nullopt;
  ChatTemplate found(*text, source);
  auto tokens = ordered_json::object();
  for (const char* key : {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token",
                          "cls_token", "mask_token"}) {
    if (config.contains(key) && !config[key].is_null()) tokens[key] = token_text(config[key]);
  }
  found.set_special_tokens(std::move(tokens));
  return found;
}

std::string ChatTemplate::apply(const ordered_json& messages, const ChatOptions& options) const {
  require(!options.continue_final_message || !options.add_generation_prompt, ErrorKind::kUsage,
          "a chat cannot both continue its last message and prompt for another one");
  auto chat = messages;
  std::string final_text;
  if (options.continue_final_message) final_text = mark_final_message(chat);
  jinja::Dict variables;
  for (const auto& [name, value] : special_tokens_.items()) {
    variables.set(name, jinja::Value::of_json(value));
  }
  variables.set("messages", jinja::Value::of_json(chat));
  variables.set("tools", jinja::Value::of_json(options.tools));
  variables.set("documents", jinja::Value::of_json(options.documents));
  variables.set("add_generation_prompt", options.add_generation_prompt);
  for (const auto& [name, value] : options.variables.items()) {
    variables.set(name, jinja::Value::of_json(value));
  }
  try {
    auto text = jinja::render(*root_, variables);
    return options.continue_final_message ? cut_at_mark(std::move(text), final_text) : text;
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("{}, {}", source_, error.what()));
  }
}

}  // namespace ferry::rollout::text
