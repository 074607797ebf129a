// The language of chat templates against what jinja2 made of the same small templates, and errors.
#include "rollout/text/chat_template.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/temp_dir.h"

namespace ferry::rollout::text {
namespace chat_template_test {

using nlohmann::ordered_json;

std::filesystem::path data_folder() {
  const char* const root = std::getenv("FERRY_TEST_DATA");
  return std::filesystem::path(root == nullptr ? "tests/data" : root) / "chat_templates";
}

std::string render(const std::string& text, const ordered_json& variables) {
  return ChatTemplate(text, "template").apply(ordered_json::array(), {.variables = variables});
}

std::string error_of(const std::string& text,
                     const ordered_json& variables = ordered_json::object()) {
  try {
    return "no error: " + render(text, variables);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    return error.what();
  }
}

TEST(ChatTemplate, SaysWhatJinja2Said) {
  const auto recorded = ordered_json::parse(distckpt::read_text(data_folder() / "cases.json"));
  const auto& variables = recorded["variables"];
  int rendered = 0, refused = 0;
  for (const auto& one : recorded["cases"]) {
    const auto text = one["template"].get<std::string>();
    SCOPED_TRACE(text);
    if (one.contains("text")) {
      ++rendered;
      try {
        EXPECT_EQ(render(text, variables), one["text"].get<std::string>());
      } catch (const Error& error) {
        ADD_FAILURE() << error.what();
      }
    } else {
      ++refused;
      EXPECT_EQ(error_of(text, variables).find("no error"), std::string::npos)
          << one["error"] << ", but " << error_of(text, variables);
    }
  }
  EXPECT_GT(rendered, 60);
  EXPECT_GT(refused, 40);
}

TEST(ChatTemplate, NamesTheLineOfAnError) {
  EXPECT_EQ(error_of("a\nb\n{{ nothing.x }}"), "template, line 3: 'nothing' is undefined");
  EXPECT_EQ(error_of("\n{{ 1\n+ }}"), "template, line 3: unexpected '}}'");
  EXPECT_EQ(error_of("{% for x in [1] %}\n{{ raise_exception('stop') }}{% endfor %}"),
            "template, line 2: stop");
  EXPECT_EQ(error_of("{% macro f() %}\n{{ x.y }}{% endmacro %}\n{{ f() }}"),
            "template, line 2: 'x' is undefined");
}

TEST(ChatTemplate, RefusesByNameWhatItDoesNotKnow) {
  EXPECT_EQ(error_of("{% include 'x' %}"), "template, line 1: the tag 'include' is not supported");
  EXPECT_EQ(error_of("\n{% if false %}{{ 1 | groupby('x') }}{% endif %}"),
            "template, line 2: the filter groupby is not supported");
  EXPECT_EQ(error_of("{{ 1 is escaped }}"), "template, line 1: the test escaped is not supported");
  EXPECT_EQ(error_of("{{ 'a'.zfill(3) }}"),
            "template, line 1: the method zfill of a string is not supported");
  EXPECT_EQ(error_of("{{ f(*x) }}"), "template, line 1: an argument with a star is not supported");
  EXPECT_EQ(error_of("{{ 'a' | int(base=2) }}"),
            "template, line 1: the base of int is not supported");
  EXPECT_EQ(error_of("{{ '{:>3}'.format(1) }}"),
            "template, line 1: the field {:>3} of format is not supported");
}

TEST(ChatTemplate, NoTemplateCanHoldUpOrFillTheMachine) {
  EXPECT_EQ(error_of("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
            "template, line 1: calls are nested too deep");
  EXPECT_EQ(error_of("{{ " + std::string(5000, '(') + "1" + std::string(5000, ')') + " }}"),
            "template, line 1: nested too deep");
  EXPECT_EQ(error_of("{% for a in range(99999) %}{% for b in range(99999) %}{% set x = a * b %}"
                     "{% endfor %}{% endfor %}"),
            "template, line 1: the template takes too many steps");
  EXPECT_EQ(error_of("{{ ('x' * 10000000) * 10000000 }}"), "template, line 1: a text is too long");
  EXPECT_EQ(error_of("{% set ns = namespace(x='x') %}{% for a in range(99) %}"
                     "{% set ns.x = ns.x ~ ns.x %}{% endfor %}"),
            "template, line 1: a text is too long");
  EXPECT_EQ(error_of("{{ 9223372036854775807 + 1 }}"), "template, line 1: a number is too large");
}

TEST(ChatTemplate, ContinuesTheLastMessage) {
  const ChatTemplate chat("{% for m in messages %}<{{ m.content }}>{% endfor %}", "template");
  const ChatTemplate trimmed("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}",
                             "template");
  const auto messages = ordered_json::parse(R"([{"content": "a"}, {"content": " b "}])");
  EXPECT_EQ(chat.apply(messages, {.continue_final_message = true}), "<a>< b ");
  EXPECT_EQ(trimmed.apply(messages, {.continue_final_message = true}), "<a><b");
  const ChatTemplate deaf("{{ messages[0].content }}", "template");
  EXPECT_THROW(deaf.apply(messages, {.continue_final_message = true}), Error);
  EXPECT_THROW(
      chat.apply(messages, {.add_generation_prompt = true, .continue_final_message = true}), Error);
  EXPECT_THROW(chat.apply(ordered_json::array(), {.continue_final_message = true}), Error);
}

TEST(ChatTemplate, IsFoundWhereTransformersFindsIt) {
  const auto said = [](const std::filesystem::path& folder, bool with_tools = false) {
    return ChatTemplate::from_folder(folder, with_tools)->apply(ordered_json::array());
  };
  const support::TempDir folder;
  const auto config = folder.path() / "tokenizer_config.json";
  EXPECT_FALSE(ChatTemplate::from_folder(folder.path()).has_value());
  distckpt::write_text(config, R"({"bos_token": {"content": "<s>"}, "eos_token": "</s>"})");
  EXPECT_FALSE(ChatTemplate::from_folder(folder.path()).has_value());
  distckpt::write_text(config, R"({"bos_token": {"content": "<s>"}, "eos_token": "</s>",
      "chat_template": "{{ bos_token }}one{{ eos_token }}{{ pad_token }}"})");
  EXPECT_EQ(said(folder.path()), "<s>one</s>");
  distckpt::write_text(config, R"({"chat_template": [{"name": "default", "template": "plain"},
                                                   {"name": "tool_use", "template": "tools"}]})");
  EXPECT_EQ(said(folder.path()), "plain");
  EXPECT_EQ(said(folder.path(), true), "tools");
  distckpt::write_text(folder.path() / "chat_template.jinja", "file");
  EXPECT_EQ(said(folder.path()), "file");
}

}  // namespace chat_template_test
}  // namespace ferry::rollout::text
