#include <string>

#include "rollout/text/tokenizer/tokenizer.h"
#include "serve/api/fields.h"
#include "serve/api/generation_request.h"
#include "tests/fuzz/property.h"
#include "tests/fuzz/targets.h"

namespace ferry::fuzz {
namespace {

// A byte is a token: 0 to 255 by its character, 256 the end.
std::string tokenizer_json() {
  auto vocab = nlohmann::json::object();
  for (int byte = 0; byte < 256; ++byte) {
    std::string name;
    rollout::text::append_utf8(rollout::text::character_of_byte(static_cast<unsigned char>(byte)),
                               name);
    vocab[name] = byte;
  }
  const nlohmann::json level{{"type", "ByteLevel"},
                             {"add_prefix_space", false},
                             {"trim_offsets", true},
                             {"use_regex", true}};
  return nlohmann::json{
      {"added_tokens", nlohmann::json::array()},
      {"normalizer", nullptr},
      {"pre_tokenizer", level},
      {"post_processor", nullptr},
      {"decoder", level},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", nlohmann::json::array()}}}}
      .dump();
}

const serve::ServedModel& model() {
  static const rollout::text::Tokenizer tokenizer(tokenizer_json(), "fuzz");
  static const serve::ServedModel served = [] {
    const auto chat = [] {
      return rollout::text::ChatTemplate(
          "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls }}\n{% endfor %}"
          "{{ tools }}",
          "fuzz");
    };
    return serve::ServedModel{.name = "m",
                              .max_model_len = 100'000,
                              .vocab_size = 256,
                              .tokenizer = &tokenizer,
                              .chat_template = chat(),
                              .tool_template = chat(),
                              .tool_format = rollout::text::ToolFormat::kHermes};
  }();
  return served;
}

}  // namespace

// A body that is taken has parameters that the engine takes; another one is the client's error.
void chat_request(std::string_view input) {
  try {
    const auto body = serve::parse_object(input);
    const auto request = body.contains("messages") || body.contains("prompt_token_ids")
                             ? serve::parse_chat_completion(body, model())
                             : serve::parse_completion(body, model());
    request.params.verify();
    expect(!request.prompts.empty(), "no prompt");
  } catch (const serve::ApiError& error) {
    expect(error.status() >= 400 && error.status() < 500 && *error.what() != 0, "status {}: {}",
           error.status(), error.what());
  }
}

}  // namespace ferry::fuzz
