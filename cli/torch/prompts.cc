#include "cli/torch/prompts.h"

#include <charconv>
#include <functional>
#include <map>
#include <sstream>
#include <string_view>

#include "distckpt/base/json.h"
#include "rollout/text/unicode/unicode.h"

namespace ferry::cli {
namespace {

using rollout::SamplingParams;
using trainer::Record;

template <typename Value>
Value value_of(const Record& json, const std::string& what, const char* expected) {
  if constexpr (std::is_same_v<Value, bool>) {
    if (json.is_boolean()) return json.get<bool>();
  } else if constexpr (std::is_integral_v<Value>) {
    const bool fits =
        json.is_number_unsigned() || (std::is_signed_v<Value> && json.is_number_integer());
    if (fits) return json.get<Value>();
  } else if constexpr (std::is_floating_point_v<Value>) {
    if (json.is_number()) return json.get<Value>();
  } else {
    if (json.is_string()) return json.get<std::string>();
  }
  fail(ErrorKind::kUsage, "{}: {} is not {}", what, json.dump(), expected);
}

template <typename Value>
std::vector<Value> list_of(const Record& json, const std::string& what, const char* expected) {
  require(json.is_array(), ErrorKind::kUsage, "{}: is not a list", what);
  std::vector<Value> values;
  for (const auto& value : json) values.push_back(value_of<Value>(value, what, expected));
  return values;
}

void set_params(const Record& json, SamplingParams& params) {
  using Set = std::function<void(const Record&, const std::string&)>;
  const auto number = [](auto& field) -> Set {
    return [&field](const Record& value, const std::string& name) {
      using Value = std::remove_reference_t<decltype(field)>;
      field = value_of<Value>(value, name,
                              std::is_floating_point_v<Value> ? "a number" : "a whole number");
    };
  };
  const std::map<std::string, Set> fields{
      {"n", number(params.n)},
      {"temperature", number(params.temperature)},
      {"top_k", number(params.top_k)},
      {"top_p", number(params.top_p)},
      {"min_p", number(params.min_p)},
      {"repetition_penalty", number(params.repetition_penalty)},
      {"presence_penalty", number(params.presence_penalty)},
      {"frequency_penalty", number(params.frequency_penalty)},
      {"max_tokens", number(params.max_tokens)},
      {"min_tokens", number(params.min_tokens)},
      {"seed",
       [&](const auto& value, const auto& name) {
         params.seed.reset();  // -1, as vLLM has it, is none
         if (value != -1)
           params.seed = value_of<std::uint64_t>(value, name, "a whole number from 0 on, or -1");
       }},
      {"logprobs",
       [&](const auto& value, const auto& name) {
         params.logprobs = value_of<std::int64_t>(value, name, "a whole number");
       }},
      {"ignore_eos",
       [&](const auto& value, const auto& name) {
         params.ignore_eos = value_of<bool>(value, name, "true or false");
       }},
      {"stop",
       [&](const auto& value, const auto& name) {
         params.stop = value.is_string() ? std::vector{value.template get<std::string>()}
                                         : list_of<std::string>(value, name, "text");
       }},
      {"stop_token_ids",
       [&](const auto& value, const auto& name) {
         params.stop_token_ids = list_of<std::int64_t>(value, name, "a token id");
       }},
  };
  require(json.is_object(), ErrorKind::kUsage, "sampling_params: is not an object");
  for (const auto& [name, value] : json.items()) {
    const auto field = fields.find(name);
    require(field != fields.end(), ErrorKind::kUsage, "sampling_params: there is no {}", name);
    if (!value.is_null()) field->second(value, "sampling_params." + name);
  }
  params.verify();
}

std::vector<std::int64_t> parse_ids(std::string_view text) {
  std::vector<std::int64_t> ids;
  const auto* at = text.data();
  const auto* const end = at + text.size();
  while (true) {
    std::int64_t id = 0;
    const auto [stop, error] = std::from_chars(at, end, id);
    require(error == std::errc() && (stop == end || *stop == ','), ErrorKind::kUsage,
            "--prompt-ids {}: is no list of token ids such as 1,2,3", text);
    ids.push_back(id);
    if (stop == end) return ids;
    at = stop + 1;
  }
}

}  // namespace

// Makes the next prompt; without an id of its own it is called by its number. An Error in `fill`
// becomes the prompt's own.
template <typename Fill>
void PromptReader::add(Fill&& fill) {
  Prompt prompt{.params = options_.params};
  try {
    fill(prompt);
    require(!ids_.contains(prompt.id), ErrorKind::kUsage, "id: another prompt is {} already",
            prompt.id);
  } catch (const Error& error) {
    prompt.error = error;
  }
  if (prompt.id.empty()) {
    prompt.id = std::to_string(prompts_.size());
    while (ids_.contains(prompt.id)) prompt.id += '_';
  }
  ids_.insert(prompt.id);
  prompts_.push_back(std::move(prompt));
}

void PromptReader::add_text(const std::string& text) {
  add([&](Prompt& prompt) { fill_from_text(prompt, text); });
}

void PromptReader::add_ids(const std::string& ids) {
  add([&](Prompt& prompt) { prompt.token_ids = parse_ids(ids); });
}

void PromptReader::add_file(const std::string& path) {
  const auto file = trainer::open_record_file(path);
  for (std::size_t i = 0; i < file->chunks().size(); ++i) {
    const auto chunk = file->open(i);
    for (std::int64_t row = 0; row < file->chunks()[i].num_records; ++row)
      add([&](Prompt& prompt) {
        with_context([&] { return fmt::format("reading {}, {}", path, chunk->where(row)); },
                     [&] { fill_from_record(prompt, chunk->at(row)); });
      });
  }
}

void PromptReader::add_lines(const std::string& jsonl, const std::string& source) {
  std::istringstream lines(jsonl);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.find_first_not_of(" \t\r") == line.npos) continue;
    add([&](Prompt& prompt) {
      fill_from_record(
          prompt, distckpt::parse_ordered_json(line, fmt::format("{}, line {}", source, number)));
    });
  }
}

void PromptReader::fill_from_record(Prompt& prompt, const Record& record) {
  require(record.is_object(), ErrorKind::kUsage, "a prompt is a JSON object with a member prompt");
  const auto member = [&](const char* name) {
    const auto found = record.find(name);
    return found == record.end() ? Record() : *found;
  };
  const auto id = member("id");
  if (!id.is_null()) prompt.id = id.is_string() ? id.get<std::string>() : id.dump();
  if (const auto params = member("sampling_params"); !params.is_null())
    set_params(params, prompt.params);
  const auto text = member("prompt"), messages = member("messages"),
             ids = member("prompt_token_ids");
  const int given = !text.is_null() + !messages.is_null() + !ids.is_null();
  require(given == 1, ErrorKind::kUsage,
          "a record has one of prompt, messages and prompt_token_ids, not {}", given);
  if (!ids.is_null()) {
    prompt.token_ids = list_of<std::int64_t>(ids, "prompt_token_ids", "a token id");
  } else if (text.is_string()) {
    fill_from_text(prompt, text.get<std::string>());
  } else {
    fill_from_messages(prompt, text.is_null() ? messages : text, member("tools"));
  }
}

void PromptReader::fill_from_text(Prompt& prompt, const std::string& text) {
  prompt.text = text;
  require(rollout::text::is_valid_utf8(text), ErrorKind::kUsage, "the prompt is not UTF-8");
  if (options_.chat_template == nullptr) return tokenize(prompt, /*add_special_tokens=*/true);
  applies_template_ = true;
  has_system_ = !options_.system.empty();
  require(!text.empty(), ErrorKind::kUsage, "the prompt is empty");
  auto messages = Record::array();
  if (!options_.system.empty())
    messages.push_back({{"role", "system"}, {"content", options_.system}});
  messages.push_back({{"role", "user"}, {"content", text}});
  fill_from_messages(prompt, messages, {});
}

void PromptReader::fill_from_messages(Prompt& prompt, const Record& messages, const Record& tools) {
  applies_template_ = applies_template_ || options_.chat_template != nullptr;
  require(options_.chat_template != nullptr, ErrorKind::kUsage,
          "messages need a chat template: ask for it by --chat");
  require(messages.is_array() && !messages.empty(), ErrorKind::kUsage,
          "messages: is not a list of messages");
  auto shown = messages;
  std::optional<rollout::ImageReader> reader;
  if (rollout::text::has_images(messages)) {
    if (options_.images) reader = options_.images();
    require(reader.has_value(), ErrorKind::kUsage,
            "messages: have images, and the model's images are not computed");
    prompt.images = rollout::read_images(rollout::text::take_images(shown), *reader);
  }
  prompt.text =
      options_.chat_template->apply(shown, {.add_generation_prompt = true, .tools = tools});
  if (reader) prompt.text = rollout::expand_placeholders(*prompt.text, prompt.images, *reader);
  tokenize(prompt, /*add_special_tokens=*/false);  // the template writes them itself
}

void PromptReader::tokenize(Prompt& prompt, bool add_special_tokens) const {
  if (options_.tokenizer == nullptr)
    throw Error(ErrorKind::kUsage, "the checkpoint has no tokenizer, and the prompt is text",
                "name a folder with a tokenizer by --tokenizer, or give token ids");
  const auto ids =
      options_.tokenizer->encode(*prompt.text, {.add_special_tokens = add_special_tokens});
  prompt.token_ids.assign(ids.begin(), ids.end());
  require(!prompt.token_ids.empty(), ErrorKind::kUsage, "the prompt is empty");
}

}  // namespace ferry::cli
