// A model's chat template: messages to the text that the model was trained on, the same bytes as
// transformers' apply_chat_template. Templates are Jinja; docs/text.md says how much of it is
// known.
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
  bool add_generation_prompt = false;  // ends with what introduces an answer
  bool continue_final_message =
      false;                       // ends inside of the last message, which the model goes on with
  nlohmann::ordered_json tools{};  // JSON schemas of functions, or null
  nlohmann::ordered_json documents{};  // or null
  // What else the template sees, such as {"enable_thinking": false}.
  nlohmann::ordered_json variables = nlohmann::ordered_json::object();
};

class ChatTemplate {
 public:
  // Throws Error that names `source`, the line, and what is not supported.
  ChatTemplate(std::string_view text, std::string source);
  ~ChatTemplate();
  ChatTemplate(ChatTemplate&&) noexcept;

  // chat_template.jinja, or the template in tokenizer_config.json: the one named "tool_use" where
  // there are several, such a one among them and `with_tools`; else the "default" one. The special
  // tokens of the configuration are known to it. Nothing: there is no template.
  static std::optional<ChatTemplate> from_files(const ModelFiles& files, bool with_tools = false);
  static std::optional<ChatTemplate> from_folder(const std::filesystem::path& folder,
                                                 bool with_tools = false);

  // `messages`: [{"role": "user", "content": "..."}, ...]. Throws Error with what the template
  // itself raises, or what goes wrong in it.
  std::string apply(const nlohmann::ordered_json& messages, const ChatOptions& options = {}) const;

  // bos_token and so on, which the template sees.
  void set_special_tokens(nlohmann::ordered_json tokens) { special_tokens_ = std::move(tokens); }

 private:
  std::string source_;
  std::string text_;
  std::unique_ptr<jinja::Node> root_;
  nlohmann::ordered_json special_tokens_ = nlohmann::ordered_json::object();
};

}  // namespace ferry::rollout::text
