#include "trainer/dataset/prompt_examples.h"

#include <algorithm>
#include <utility>

#include "distckpt/base/error.h"
#include "rollout/text/eos_token_ids.h"
#include "rollout/text/harmony.h"
#include "rollout/text/tool_format.h"
#include "trainer/dataset/required_reader.h"
#include "trainer/dataset/template_variables.h"

namespace ferry::trainer {

using rollout::text::TokenId;

PromptEncoder::PromptEncoder(const std::filesystem::path& folder,
                             const PpoDataConfig& data,
                             nlohmann::ordered_json tools,
                             const models::TransformerConfig& config)
    : data_(data),
      tokenizer_(rollout::text::Tokenizer::from_folder(folder)),
      template_(rollout::text::ChatTemplate::from_folder(folder, !tools.is_null())),
      tool_template_(rollout::text::ChatTemplate::from_folder(folder, true)),
      variables_(template_variables(data.apply_chat_template_kwargs)),
      tools_(std::move(tools)),
      eos_token_ids_(
          rollout::text::eos_token_ids(rollout::text::ModelFiles(folder), tokenizer_.get())),
      vision_(config.vision),
      images_(rollout::find_image_reader(rollout::text::ModelFiles(folder), config, *tokenizer_)) {}

PromptEncoder::~PromptEncoder() = default;

std::string PromptEncoder::render(const Messages& messages,
                                  const nlohmann::ordered_json& tools) const {
  const auto& chosen = tools.is_null() ? template_ : tool_template_;
  require(chosen.has_value(), ErrorKind::kUsage,
          "a conversation of several turns needs the model's chat template, which has none");
  return chosen->apply(messages,
                       {.add_generation_prompt = true, .tools = tools, .variables = variables_});
}

std::vector<std::int64_t> PromptEncoder::encode_messages(const Messages& messages,
                                                         const nlohmann::ordered_json& tools,
                                                         const std::string& images) const {
  auto text = render(messages, tools);
  if (!images.empty()) text = rollout::expand_placeholders(text, read(images), *images_);
  const auto ids = tokenizer_->encode(text, {.add_special_tokens = false});
  return {ids.begin(), ids.end()};
}

namespace {

// The tokens that end an answer in a conversation. On channels another one ends the last message of
// an answer that a further one follows than that which ends the text.
std::vector<std::string> ends_of_answers(const rollout::text::Tokenizer& tokenizer,
                                         const std::vector<std::int64_t>& eos_token_ids,
                                         std::string_view chat_template) {
  std::vector<std::string> ends;
  for (const auto id : eos_token_ids)
    if (auto token = tokenizer.id_to_token(static_cast<TokenId>(id)))
      ends.push_back(std::move(*token));
  const auto format = rollout::text::tool_format_of_template(chat_template);
  if (format && has_channels(*format)) ends.emplace_back(rollout::text::kEndOfMessage);
  return ends;
}

}  // namespace

// The turn begins behind the last token before its text that ends an answer. Marks in place of the
// texts tell where they are, whatever else these contain.
std::vector<std::int64_t> PromptEncoder::encode_turn(const Messages& messages,
                                                     std::size_t count,
                                                     const nlohmann::ordered_json& tools) const {
  constexpr std::string_view kAnswer = "FERRYANSWERMARK", kTurn = "FERRYTURNMARK";
  require(count > 0 && count < messages.size(), ErrorKind::kBug, "a turn of {} messages of {}",
          count, messages.size());
  auto marked = messages;
  marked[messages.size() - count]["content"] = kTurn;
  auto& answer = marked[messages.size() - count - 1];
  answer["content"] = kAnswer;
  for (const char* name : {"reasoning_content", "reasoning"}) answer.erase(name);
  const auto text = render(marked, tools);
  const auto begin = text.find(kAnswer), end = text.find(kTurn);
  std::string ending;
  std::size_t at = std::string::npos;
  const auto& chosen = tools.is_null() ? template_ : tool_template_;
  for (const auto& token : ends_of_answers(*tokenizer_, eos_token_ids_, chosen->text())) {
    const auto found = end != text.npos ? text.rfind(token, end) : text.npos;
    if (found == text.npos || (at != text.npos && found < at)) continue;
    at = found;
    ending = token;
  }
  require(at != text.npos && (begin == text.npos || begin < at), ErrorKind::kUsage,
          "the chat template puts no token that ends an answer between it and the next message");
  // The text before the mark is the same in both, so the turn begins at the same place.
  marked[messages.size() - count]["content"] = messages[messages.size() - count]["content"];
  const auto whole = render(marked, tools);
  require(whole.starts_with(std::string_view(text).substr(0, end)), ErrorKind::kUsage,
          "the chat template changes what is before a message by the message");
  // The token comes before it, since some tokenizers treat the beginning of a text in another way.
  const auto ids = tokenizer_->encode(whole.substr(at), {.add_special_tokens = false});
  const auto first = tokenizer_->token_to_id(ending);
  require(!ids.empty() && ids.front() == first, ErrorKind::kUsage,
          "the tokenizer does not take {}, which ends an answer, as one token", ending);
  return {ids.begin() + 1, ids.end()};
}

nlohmann::ordered_json PromptEncoder::tools_of(const PromptExample& example) const {
  const auto& extra = example.extra_info;
  return selected_tools(tools_,
                        extra.is_object() ? extra.value("tool_selection", Record()) : Record());
}

EncodedPrompt PromptEncoder::encode(PromptExample example, bool shows_tools) const {
  std::vector<TokenId> ids;
  std::string images;
  if (template_) {
    auto text = render(example.prompt, shows_tools ? tools_of(example) : nlohmann::ordered_json());
    if (!example.images.empty()) {
      const auto& reader = required_reader(images_, "prompt: has");
      text =
          rollout::expand_placeholders(text, rollout::read_images(example.images, reader), reader);
      auto urls = nlohmann::json::array();
      for (const auto& source : example.images) urls.push_back(source.url());
      images = urls.dump();
    }
    ids = tokenizer_->encode(text, {.add_special_tokens = false});
  } else {
    require(example.images.empty() && example.prompt.size() == 1 &&
                example.prompt[0].at("content").is_string(),
            ErrorKind::kCorrupt, "prompt: without a chat template it is one message of text");
    ids = tokenizer_->encode(example.prompt[0].at("content").get<std::string>());
  }
  require(!ids.empty(), ErrorKind::kCorrupt, "prompt: has no tokens");
  EncodedPrompt encoded{.example = std::move(example),
                        .tokens = {ids.begin(), ids.end()},
                        .images = std::move(images)};
  auto& tokens = encoded.tokens;
  const auto surplus = static_cast<std::int64_t>(tokens.size()) - data_.max_prompt_length;
  if (surplus <= 0) return encoded;
  require(data_.filter_overlong_prompts || data_.truncation != Truncation::kError,
          ErrorKind::kUsage,
          "prompt: {} tokens, more than data.max_prompt_length of {}: raise it, or set "
          "data.filter_overlong_prompts or data.truncation",
          tokens.size(), data_.max_prompt_length);
  require(!data_.filter_overlong_prompts, ErrorKind::kCorrupt,
          "prompt: {} tokens, more than data.max_prompt_length of {}", tokens.size(),
          data_.max_prompt_length);
  require(encoded.images.empty(), ErrorKind::kCorrupt,
          "prompt: {} tokens, more than data.max_prompt_length of {}, and one with images is not "
          "cut",
          tokens.size(), data_.max_prompt_length);
  truncate(tokens, data_.max_prompt_length, data_.truncation);
  return encoded;
}

std::vector<rollout::ProcessedImage> PromptEncoder::read(const std::string& images) const {
  const auto& reader = required_reader(images_, "prompt: has");
  const auto found = std::ranges::find(decoded_, images, &Decoded::images);
  if (found != decoded_.end()) return found->visual->images;
  std::vector<rollout::text::ImageSource> sources;
  for (const auto& url : nlohmann::json::parse(images))
    sources.push_back({.place = url.get<std::string>()});
  return rollout::read_images(sources, reader);
}

std::shared_ptr<const rollout::VisualPrompt> PromptEncoder::visual_prompt(
    const std::string& images, std::span<const std::int64_t> prompt) const {
  constexpr std::size_t kMostDecoded = 8;
  if (images.empty()) return nullptr;
  const auto found = std::ranges::find_if(decoded_, [&](const Decoded& one) {
    return one.images == images && std::ranges::equal(one.prompt, prompt);
  });
  if (found != decoded_.end()) {
    decoded_.splice(decoded_.begin(), decoded_, found);
    return decoded_.front().visual;
  }
  decoded_.push_front({.images = images,
                       .prompt = {prompt.begin(), prompt.end()},
                       .visual = rollout::make_visual_prompt(*vision_, prompt, read(images))});
  if (decoded_.size() > kMostDecoded) decoded_.pop_back();
  return decoded_.front().visual;
}

std::optional<rollout::text::Thoughts> PromptEncoder::thoughts_behind(
    std::span<const std::int64_t> prompt, const rollout::text::ReasoningFormat& format) const {
  const auto size = std::min(prompt.size(), rollout::text::kGenerationPrompt);
  const auto text = decode(prompt.last(size), /*skip_special_tokens=*/false);
  return rollout::text::thoughts_behind(
      {.text = text, .may_think = rollout::text::may_think(variables_)}, format);
}

std::string PromptEncoder::decode(std::span<const std::int64_t> tokens,
                                  bool skip_special_tokens) const {
  const std::vector<TokenId> ids(tokens.begin(), tokens.end());
  return tokenizer_->decode(ids, {.skip_special_tokens = skip_special_tokens});
}

}  // namespace ferry::trainer
