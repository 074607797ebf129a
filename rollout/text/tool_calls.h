// Finds calls of tools in a model's text as it comes. Each family of models writes them as its chat
// template does; the parsers have vLLM's names.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::rollout::text {

struct ToolCall {
  std::string name{};
  std::string arguments{};  // a JSON object

  bool operator==(const ToolCall&) const = default;
};

enum class ToolFormat : std::uint8_t {
  // <tool_call>...</tool_call> around {"name", "arguments"} (Hermes, Qwen 2.5, Qwen 3). The next
  // two
  // differ in what a call that has to be made looks like: each is read as all three.
  kHermes,
  kQwen3Coder,  // around <function=name> and <parameter=key>
  kGlm45,       // around a name, <arg_key> and <arg_value>
  // The whole text is {"name", "parameters"}, or several between semicolons, perhaps behind
  // <|python_tag|> (Llama 3.1, 3.2).
  kLlama3Json,
  // Calls between DeepSeek's own tokens: a type, a name and a block of JSON (V3, R1), or a name and
  // JSON (V3.1). Both are read as either.
  kDeepSeekV3,
  kDeepSeekV31,
};

// `name`: one of tool_format_names(). Nothing for another one.
std::optional<ToolFormat> tool_format(std::string_view name);
std::vector<std::string> tool_format_names();
// The format that a chat template writes, or nothing.
std::optional<ToolFormat> tool_format_of_template(std::string_view chat_template);
// The format's markers are special tokens, which have to be part of the text.
bool has_special_markers(ToolFormat format);

class ToolCallParser {
 public:
  // `tools`: of the request, whose schemas say which arguments are strings where a format does not;
  // may be null.
  ToolCallParser(ToolFormat format, const nlohmann::ordered_json& tools);

  struct Part {
    std::string content{};  // text that belongs to no call
    std::vector<ToolCall> calls{};
  };
  // Takes text; returns what is certain now.
  Part take(std::string_view text);
  // The rest, at the end of the text. A call without an end or that does not parse is content.
  Part finish();

 private:
  void scan(bool is_last, Part& part);
  void give_content(std::string_view text, bool is_last, Part& part);
  bool read_call(std::string_view body, std::vector<ToolCall>& calls) const;
  bool read_json_calls(std::string_view text, std::vector<ToolCall>& calls) const;
  bool read_deepseek_call(std::string_view body, std::vector<ToolCall>& calls) const;
  bool read_function_tag(std::string_view body, std::vector<ToolCall>& calls) const;
  bool read_arg_keys(std::string_view body, std::vector<ToolCall>& calls) const;
  nlohmann::ordered_json argument(const std::string& tool,
                                  const std::string& key,
                                  std::string value) const;

  ToolFormat format_;
  const nlohmann::ordered_json& tools_;
  std::string pending_{};  // text that may become a call
  std::string space_{};    // white space, which goes if a call follows
  bool in_call_ = false;
  bool has_called_ = false;
  bool is_content_ = false;  // kLlama3Json: the text is no call
};

}  // namespace ferry::rollout::text
