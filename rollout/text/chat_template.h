// A model's chat template: makes of messages the text that the model was trained on, the same bytes
// as transformers' apply_chat_template. docs/text.md lists the supported parts of Jinja.
#pragma once

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "rollout/text/tokenizer/model_files.h"

namespace ferry::rollout::text {

namespace jinja {
struct Node;
}

struct ChatOptions {
  bool add_generation_prompt = false;   // the text ends with the introduction of an answer
  bool continue_final_message = false;  // the text ends inside the last message
  nlohmann::ordered_json tools{};       // JSON schemas of functions, or null
  nlohmann::ordered_json documents{};   // or null
  // Further variables of the template, such as {"enable_thinking": false}.
  nlohmann::ordered_json variables = nlohmann::ordered_json::object();
};

class ChatTemplate {
 public:
  // Throws Error that names `source`, the line, and what is not supported.
  ChatTemplate(std::string_view text, std::string source);
  ~ChatTemplate();
  ChatTemplate(ChatTemplate&&) noexcept;

  // Reads chat_template.jinja, or the template in tokenizer_config.json: of several the one named
  // "tool_use" if `with_tools` and there is one, else "default". The template sees the special
  // tokens of the configuration. Returns nothing if there is no template.
  static std::optional<ChatTemplate> from_files(const ModelFiles& files, bool with_tools = false);
  static std::optional<ChatTemplate> from_folder(const std::filesystem::path& folder,
                                                 bool with_tools = false);

  // `messages`: [{"role": "user", "content": "..."}, ...]. Throws Error with the template's own
  // exception, or with the reason why it fails.
  std::string apply(const nlohmann::ordered_json& messages, const ChatOptions& options = {}) const;

  const std::string& text() const { return text_; }

  // Sets the variables bos_token and so on.
  void set_special_tokens(nlohmann::ordered_json tokens) { special_tokens_ = std::move(tokens); }

 private:
  std::string source_;
  std::string text_;
  std::unique_ptr<jinja::Node> root_;
  nlohmann::ordered_json special_tokens_ = nlohmann::ordered_json::object();
};

}  // namespace ferry::rollout::text
