// A model's folder without a model: a tokenizer whose tokens are bytes, "<s>" that ends a text, and
// a chat template that writes the first letter of each role, its text, and "<s>".
#pragma once

#include <filesystem>
#include <string_view>

#include "distckpt/storage/file_io.h"
#include "tests/rollout/text/tokenizer/tiny_tokenizers.h"
#include "tests/support/temp_dir.h"

namespace ferry::support {

inline constexpr std::int64_t kEndOfText = 258;
inline constexpr std::string_view kLetters =
    "{% for message in messages %}{{ message.role[0] }}{{ message.content }}<s>{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}";

class ByteFolder {
 public:
  // Without a template if it is empty.
  explicit ByteFolder(std::string_view chat_template = kLetters) {
    distckpt::write_text(dir_ / "tokenizer.json", rollout::text::byte_level_tokenizer().dump());
    distckpt::write_text(dir_ / "tokenizer_config.json", "{\"eos_token\": \"<s>\"}");
    if (!chat_template.empty()) distckpt::write_text(dir_ / "chat_template.jinja", chat_template);
  }

  const std::filesystem::path& path() const { return dir_.path(); }

 private:
  TempDir dir_;
};

}  // namespace ferry::support
