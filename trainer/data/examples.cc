#include "trainer/data/examples.h"

#include <algorithm>
#include <string_view>

#include "distckpt/base/error.h"

namespace ferry::trainer {
namespace {

// A column that is null is one that is not there: Parquet has no other way to leave it out.
const Record* find(const Record& object, const std::string& key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

const Record& at(const Record& object, const std::string& key, const std::string& column) {
  const auto* found = find(object, key);
  require(found != nullptr, ErrorKind::kCorrupt, "{}: is missing", column);
  return *found;
}

const Record& of_type(const Record& value,
                      bool is_so,
                      const std::string& column,
                      std::string_view expected) {
  require(is_so, ErrorKind::kCorrupt, "{}: is a JSON {}, {} is expected", column, value.type_name(),
          expected);
  return value;
}

std::string text_of(const Record& value, const std::string& column) {
  return of_type(value, value.is_string(), column, "text").get<std::string>();
}

const Messages& messages_of(const Record& value, const std::string& column) {
  of_type(value, value.is_array(), column, "a list of messages");
  require(!value.empty(), ErrorKind::kCorrupt, "{}: has no message", column);
  for (std::size_t i = 0; i < value.size(); ++i) {
    const auto name = fmt::format("{}[{}]", column, i);
    const auto& message = of_type(value[i], value[i].is_object(), name, "a message");
    require(!text_of(at(message, "role", name + ".role"), name + ".role").empty(),
            ErrorKind::kCorrupt, "{}.role: is empty", name);
    if (find(message, "content") == nullptr && find(message, "tool_calls") != nullptr) continue;
    const auto& content = at(message, "content", name + ".content");
    if (!content.is_array()) {
      text_of(content, name + ".content");
      continue;
    }
    for (const auto& part : content) of_type(part, part.is_object(), name + ".content", "a part");
  }
  return value;
}

Record message(std::string_view role, std::string content) {
  return {{"role", role}, {"content", std::move(content)}};
}

// Text is what the user says.
Messages prompt_of(const Record& record, const std::string& key) {
  const auto& prompt = at(record, key, key);
  if (!prompt.is_string()) return messages_of(prompt, key);
  return Record::array({message("user", prompt.get<std::string>())});
}

Messages pair_of(const Record& record, const DataConfig& keys) {
  auto messages = prompt_of(record, keys.prompt_key);
  auto response = text_of(at(record, keys.response_key, keys.response_key), keys.response_key);
  messages.push_back(message("assistant", std::move(response)));
  return messages;
}

Record list_or_null(const Record& record, const std::string& key) {
  const auto* found = find(record, key);
  return found == nullptr ? Record() : of_type(*found, found->is_array(), key, "a list");
}

std::optional<bool> flag_of(const Record& record, const std::string& key) {
  const auto* found = find(record, key);
  if (found == nullptr) return std::nullopt;
  return of_type(*found, found->is_boolean(), key, "true or false").get<bool>();
}

}  // namespace

Conversation parse_conversation(const Record& record, const DataConfig& keys) {
  const auto* messages = find(record, keys.messages_key);
  require(messages != nullptr || find(record, keys.prompt_key) != nullptr, ErrorKind::kCorrupt,
          "{}: is missing, and so is {}", keys.messages_key, keys.prompt_key);
  Conversation conversation{.messages = messages != nullptr
                                            ? messages_of(*messages, keys.messages_key)
                                            : pair_of(record, keys),
                            .tools = list_or_null(record, keys.tools_key)};
  conversation.images =
      rollout::text::take_images(conversation.messages, list_or_null(record, keys.image_key));
  conversation.enable_thinking = flag_of(record, keys.enable_thinking_key);
  if (!conversation.enable_thinking) conversation.enable_thinking = keys.enable_thinking_default;
  require(std::ranges::any_of(conversation.messages,
                              [](const Record& one) { return one["role"] == "assistant"; }),
          ErrorKind::kCorrupt, "{}: the assistant says nothing, so there is nothing to learn",
          keys.messages_key);
  return conversation;
}

Record selected_tools(const Record& schemas, const Record& tool_selection) {
  constexpr const char* kColumn = "extra_info.tool_selection";
  if (schemas.is_null() || tool_selection.is_null()) return schemas;
  of_type(tool_selection, tool_selection.is_array(), kColumn, "a list of names");
  if (tool_selection.empty()) return schemas;
  Record selected = Record::array();
  for (const auto& name : tool_selection) {
    of_type(name, name.is_string(), kColumn, "a list of names");
    for (const auto& schema : schemas)
      if (schema.at("function").at("name") == name) selected.push_back(schema);
  }
  return selected;
}

PromptExample parse_prompt(const Record& record,
                           const std::string& prompt_key,
                           const std::string& image_key) {
  const auto& reward = at(record, "reward_model", "reward_model");
  of_type(reward, reward.is_object(), "reward_model", "an object");
  PromptExample example{
      .data_source = text_of(at(record, "data_source", "data_source"), "data_source"),
      .prompt = prompt_of(record, prompt_key),
      .reward_model = {
          .style = text_of(at(reward, "style", "reward_model.style"), "reward_model.style")}};
  example.images = rollout::text::take_images(example.prompt, list_or_null(record, image_key));
  const auto* truth = find(reward, "ground_truth");
  require(truth != nullptr || example.reward_model.style != "rule", ErrorKind::kCorrupt,
          "reward_model.ground_truth: is missing");
  if (truth != nullptr) example.reward_model.ground_truth = *truth;
  if (const auto* ability = find(record, "ability"); ability != nullptr && ability->is_string())
    example.ability = ability->get<std::string>();
  if (const auto* agent = find(record, "agent_name"))
    example.agent_name = text_of(*agent, "agent_name");
  if (const auto* extra = find(record, "extra_info"))
    example.extra_info = of_type(*extra, extra->is_object(), "extra_info", "an object");
  return example;
}

}  // namespace ferry::trainer
