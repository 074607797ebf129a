#include "trainer/dataset/sft_examples.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "distckpt/base/error.h"
#include "trainer/dataset/required_reader.h"
#include "trainer/dataset/template_variables.h"

namespace ferry::trainer {
namespace {

Messages first_of(const Messages& messages, std::size_t count) {
  Messages some = Messages::array();
  for (std::size_t i = 0; i < count; ++i) some.push_back(messages[i]);
  return some;
}

bool is_assistant(const Record& message) {
  return message.at("role") == "assistant";
}

}  // namespace

SftEncoder::SftEncoder(const std::filesystem::path& folder,
                       const DataConfig& data,
                       const models::TransformerConfig& config)
    : data_(data),
      tokenizer_(rollout::text::Tokenizer::from_folder(folder)),
      template_(rollout::text::ChatTemplate::from_folder(folder)),
      variables_(template_variables(data.apply_chat_template_kwargs)),
      vision_(config.vision),
      images_(rollout::find_image_reader(rollout::text::ModelFiles(folder), config, *tokenizer_)) {}

SftEncoder::~SftEncoder() = default;

void SftEncoder::require_seen(const Conversation& conversation) const {
  if (conversation.images.empty()) return;
  (void)required_reader(images_, "messages: have");
  require(template_.has_value(), ErrorKind::kUsage,
          "messages: have images, and the model has no chat template that places them");
}

SftExample SftEncoder::encode(const Conversation& conversation) const {
  require_seen(conversation);
  std::vector<rollout::ProcessedImage> images;
  if (!conversation.images.empty()) images = rollout::read_images(conversation.images, *images_);
  auto example = template_ ? encode_templated(conversation, images) : encode_plain(conversation);
  const bool is_cut = example.size() > data_.max_length;
  truncate(example);
  if (!images.empty())
    example.visual = rollout::make_visual_prompt(*vision_, example.tokens, std::move(images));
  const bool any = std::find(example.learned.begin() + !example.learned.empty(),
                             example.learned.end(), true) != example.learned.end();
  require(any || is_cut, ErrorKind::kCorrupt, "messages: no token of the assistant's to learn");
  return example;
}

SftExample SftEncoder::encode_templated(const Conversation& conversation,
                                        std::span<const rollout::ProcessedImage> images) const {
  const auto& messages = conversation.messages;
  auto variables = variables_;
  if (conversation.enable_thinking) variables["enable_thinking"] = *conversation.enable_thinking;
  const auto render = [&](std::size_t count, bool generation_prompt) {
    return template_->apply(first_of(messages, count), {.add_generation_prompt = generation_prompt,
                                                        .tools = conversation.tools,
                                                        .variables = variables});
  };
  const auto whole = render(messages.size(), false);
  SftExample example;
  std::size_t done = 0;
  std::size_t image = 0;
  const auto add = [&](const std::string& text, bool learned) {
    append(example,
           images.empty() ? text : rollout::expand_placeholders(text, images, *images_, image),
           learned);
  };
  const auto take_to = [&](const std::string& beginning, bool learned, std::size_t turn) {
    require(whole.starts_with(beginning) && beginning.size() >= done, ErrorKind::kCorrupt,
            "messages: the chat template says message {} otherwise when others follow it", turn);
    add(whole.substr(done, beginning.size() - done), learned);
    done = beginning.size();
  };
  for (std::size_t i = 0; i < messages.size(); ++i) {
    if (!is_assistant(messages[i])) continue;
    if (i > 0) take_to(render(i, true), false, i);
    take_to(i + 1 == messages.size() ? whole : render(i + 1, false), true, i);
  }
  add(whole.substr(done), false);
  if (!images.empty()) rollout::require_all_placed(image, images.size(), *images_);
  return example;
}

SftExample SftEncoder::encode_plain(const Conversation& conversation) const {
  const auto& messages = conversation.messages;
  require(messages.size() == 2 && messages[0].at("role") == "user" && is_assistant(messages[1]) &&
              messages[0].at("content").is_string() && messages[1].at("content").is_string(),
          ErrorKind::kCorrupt,
          "messages: without a chat template they are a prompt and a response");
  SftExample example;
  for (const auto id : tokenizer_->encode(messages[0].at("content").get<std::string>()))
    example.tokens.push_back(id);
  example.learned.assign(example.tokens.size(), false);
  append(example, messages[1].at("content").get<std::string>(), true);
  if (const auto end = tokenizer_->eos_token_id()) {
    example.tokens.push_back(*end);
    example.learned.push_back(true);
  }
  return example;
}

void SftEncoder::append(SftExample& example, const std::string& text, bool learned) const {
  for (const auto id : tokenizer_->encode(text, {.add_special_tokens = false}))
    example.tokens.push_back(id);
  example.learned.resize(example.tokens.size(), learned);
}

void SftEncoder::truncate(SftExample& example) const {
  if (example.size() <= data_.max_length) return;
  require(data_.truncation != Truncation::kError, ErrorKind::kCorrupt,
          "messages: {} tokens, more than data.max_length of {}", example.size(), data_.max_length);
  trainer::truncate(example.tokens, data_.max_length, data_.truncation);
  trainer::truncate(example.learned, data_.max_length, data_.truncation);
}

SftTensors tensors_of(const SftExample& example) {
  const auto size = example.size();
  SftTensors tensors{.tokens = at::empty({size}, at::kLong),
                     .labels = at::zeros({size}, at::kLong),
                     .weights = at::zeros({size}, at::kFloat)};
  auto* const tokens = tensors.tokens.mutable_data_ptr<std::int64_t>();
  auto* const labels = tensors.labels.mutable_data_ptr<std::int64_t>();
  auto* const weights = tensors.weights.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < size; ++i) tokens[i] = example.tokens[static_cast<std::size_t>(i)];
  for (std::int64_t i = 0; i + 1 < size; ++i) {
    labels[i] = tokens[i + 1];
    weights[i] = example.learned[static_cast<std::size_t>(i + 1)] ? 1.0F : 0.0F;
  }
  return tensors;
}

}  // namespace ferry::trainer
