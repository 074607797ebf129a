// The prompts of `ferry generate`: arguments, standard input, files of records. What is wrong with
// one is its own trouble.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "rollout/schedule/sampling_params.h"
#include "rollout/text/chat_template.h"
#include "rollout/text/tokenizer/tokenizer.h"
#include "rollout/vision/prompt_images.h"
#include "trainer/data/record_file.h"

namespace ferry::cli {

struct Prompt {
  std::string id{};
  std::optional<std::string> text{};  // what the tokens were made of
  std::vector<std::int64_t> token_ids{};
  std::vector<rollout::ProcessedImage> images{};
  rollout::SamplingParams params{};
  std::optional<Error> error{};
};

struct PromptOptions {
  const rollout::text::Tokenizer* tokenizer = nullptr;         // or null: ids alone
  const rollout::text::ChatTemplate* chat_template = nullptr;  // texts are what a user says
  std::string system{};                                        // message before them
  rollout::SamplingParams params{};
  // Asked where messages have images; nothing, or none: messages are text.
  std::function<std::optional<rollout::ImageReader>()> images{};
};

class PromptReader {
 public:
  explicit PromptReader(PromptOptions options) : options_(std::move(options)) {}

  void add_text(const std::string& text);
  void add_ids(const std::string& ids);  // "1,2,3"
  // Each record of a .jsonl or .parquet file: {"prompt": text or messages} or {"messages": [...]}
  // or {"prompt_token_ids": [...]}, perhaps with "id", "tools" and "sampling_params":
  // {"temperature": 0.5, ...}. Whatever else it holds is left alone. Throws Error if there is no
  // reading it.
  void add_file(const std::string& path);
  void add_lines(const std::string& jsonl, const std::string& source);

  // True if any prompt so far is text that the template makes a prompt of; and has the system's
  // message.
  bool applies_template() const { return applies_template_; }
  bool has_system() const { return has_system_; }

  // In the order they were added.
  std::vector<Prompt> take() { return std::move(prompts_); }

 private:
  template <typename Fill>
  void add(Fill&& fill);
  void fill_from_text(Prompt& prompt, const std::string& text);
  void fill_from_messages(Prompt& prompt,
                          const trainer::Record& messages,
                          const trainer::Record& tools);
  void fill_from_record(Prompt& prompt, const trainer::Record& record);
  void tokenize(Prompt& prompt, bool add_special_tokens) const;

  PromptOptions options_;
  std::vector<Prompt> prompts_;
  std::set<std::string> ids_;
  bool applies_template_ = false;
  bool has_system_ = false;
};

}  // namespace ferry::cli
