// Finds calls of tools in a model's text as it comes.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "rollout/text/tool_format.h"

namespace ferry::rollout::text {

struct ToolCall {
  std::string name{};
  std::string arguments{};  // a JSON object

  bool operator==(const ToolCall&) const = default;
};

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
