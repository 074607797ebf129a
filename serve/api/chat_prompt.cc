#include "serve/api/chat_prompt.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string_view>
#include <system_error>
#include <utility>

#include "distckpt/base/error.h"
#include "rollout/text/content_parts.h"
#include "rollout/text/shallow_json.h"

namespace ferry::serve {
namespace {

constexpr std::string_view kFile = "file://";

// Parts of text become one text, as vLLM joins them; beside images they stay parts.
ordered_json content_of(const ordered_json& content, const std::string& param, bool sees) {
  if (!content.is_array()) {
    if (content.is_string() || content.is_null()) return content;
    throw ApiError(400, param + ": is neither text nor a list of parts", param);
  }
  std::string text;
  bool has_image = false;
  for (const auto& part : content) {
    std::string type, one;
    const Fields fields(part, param + ".");
    fields.read("type", type);
    if (type == "image_url" && sees) {
      if (!fields.has("image_url")) fields.refuse("image_url", "is missing");
      has_image = true;
      continue;
    }
    const char* const field = type == "refusal" ? "refusal" : "text";  // of an answer before
    if (type != "refusal" && type != "text" && type != "input_text")
      fields.refuse("type", sees ? "is neither \"text\" nor \"image_url\"" : "is not \"text\"");
    if (!fields.has(field)) fields.refuse(field, "is missing");
    fields.read(field, one);
    text += (text.empty() ? "" : "\n") + one;
  }
  return has_image ? content : ordered_json(std::move(text));
}

// Templates want a call's arguments as an object; the API has them as text.
void parse_arguments(ordered_json& message) {
  const auto calls = message.find("tool_calls");
  if (calls == message.end() || !calls->is_array()) return;
  for (auto& call : *calls) {
    if (!call.is_object() || !call.contains("function") || !call["function"].is_object()) continue;
    auto& function = call["function"];
    if (!function.contains("arguments") || !function["arguments"].is_string()) continue;
    const auto text = function["arguments"].get<std::string>();
    auto arguments = rollout::text::parse_exact_json(text.empty() ? "{}" : text);
    if (arguments.is_object()) function["arguments"] = std::move(arguments);
  }
}

// An answer's reasoning, which clients give back under either name, has both.
void name_reasoning(ordered_json& message) {
  const auto has = [&](const char* key) {
    return message.contains(key) && message[key].is_string();
  };
  for (const auto& [from, to] :
       {std::pair{"reasoning", "reasoning_content"}, std::pair{"reasoning_content", "reasoning"}})
    if (has(from) && !has(to)) message[to] = ordered_json(message[from]);
}

}  // namespace

ordered_json chat_messages(const ordered_json& body, bool sees) {
  const Fields fields(body);
  const auto* const given = fields.find("messages");
  if (given == nullptr || !given->is_array() || given->empty())
    fields.refuse("messages", "is not a list with a message");
  auto messages = ordered_json::array();
  for (std::size_t i = 0; i < given->size(); ++i) {
    const auto param = fmt::format("messages.{}.", i);
    const Fields of_message((*given)[i], param);
    std::string role;
    of_message.read("role", role);
    if (role.empty()) of_message.refuse("role", "is missing");
    auto message = (*given)[i];
    message["content"] =
        content_of(message.value("content", ordered_json()), param + "content", sees);
    parse_arguments(message);
    name_reasoning(message);
    messages.push_back(std::move(message));
  }
  return messages;
}

namespace {

std::filesystem::path real_path(std::string_view path) {
  std::error_code error;
  auto real = std::filesystem::weakly_canonical(path, error);
  require(!error, ErrorKind::kUsage, "{}: {}", path, error.message());
  return real;
}

// Only what the server's user allows is read: a client names files of the server.
std::string read_image(const rollout::text::ImageSource& source, const ServedImages& images) {
  if (source.place.starts_with("data:")) return source.read();
  require(source.place.starts_with(kFile) && !images.allowed_media_folder.empty(),
          ErrorKind::kUsage,
          "{}: is neither a data: URL nor a file below --allowed-local-media-path", source.name());
  const auto folder = real_path(images.allowed_media_folder);
  const auto file = real_path(std::string_view(source.place).substr(kFile.size()));
  const auto [of_folder, of_file] = std::ranges::mismatch(folder, file);
  require(of_folder == folder.end() && of_file != file.end(), ErrorKind::kUsage,
          "{}: is not below --allowed-local-media-path", source.name());
  return rollout::text::ImageSource{.place = file.string()}.read();
}

// Takes the images out of the messages.
ImageFiles read_images(ordered_json& messages, const ServedModel& model) {
  if (!model.images || !rollout::text::has_images(messages)) return nullptr;
  const auto sources = rollout::text::take_images(messages);
  require(static_cast<std::int64_t>(sources.size()) <= model.images->max_images, ErrorKind::kUsage,
          "{} images, more than {}", sources.size(), model.images->max_images);
  std::vector<std::string> files;
  for (const auto& source : sources) files.push_back(read_image(source, *model.images));
  return std::make_shared<const std::vector<std::string>>(std::move(files));
}

// The variables that the template sees beside messages, tools and documents.
ordered_json template_variables(const Fields& fields) {
  ordered_json variables = ordered_json::object();
  if (const auto* const given = fields.find("chat_template_kwargs")) {
    if (!given->is_object()) fields.refuse("chat_template_kwargs", "is not an object");
    variables = *given;
  }
  const auto refuse_template = [](const Fields& of) {
    if (of.has("chat_template")) of.refuse("chat_template", "is not supported: it is the model's");
  };
  refuse_template(fields);
  refuse_template(Fields(variables, "chat_template_kwargs."));
  std::string effort;
  fields.read("reasoning_effort", effort);
  if (!effort.empty() && !variables.contains("reasoning_effort"))
    variables["reasoning_effort"] = effort;
  return variables;
}

}  // namespace

ordered_json tools_of(const Fields& fields) {
  const auto* const tools = fields.find("tools");
  if (tools == nullptr) return {};
  if (!tools->is_array()) fields.refuse("tools", "is not a list");
  for (std::size_t i = 0; i < tools->size(); ++i) {
    const Fields of_tool((*tools)[i], fmt::format("tools.{}.", i));
    std::string type = "function", name;
    of_tool.read("type", type);
    if (type != "function") of_tool.refuse("type", "is not \"function\": others are not supported");
    if (!of_tool.has("function")) of_tool.refuse("function", "is missing");
    Fields(*of_tool.find("function"), fmt::format("tools.{}.function.", i)).read("name", name);
    if (name.empty()) of_tool.refuse("function", "has no name");
  }
  return tools->empty() ? ordered_json() : *tools;
}

ChatPrompt chat_prompt(const ordered_json& body, const ServedModel& model, bool is_prompt) {
  const Fields fields(body);
  rollout::text::ChatOptions options{.add_generation_prompt = true};
  fields.read("add_generation_prompt", options.add_generation_prompt);
  fields.read("continue_final_message", options.continue_final_message);
  if (options.continue_final_message && !fields.has("add_generation_prompt"))
    options.add_generation_prompt = false;
  options.tools = tools_of(fields);
  if (const auto* const documents = fields.find("documents")) options.documents = *documents;
  options.variables = template_variables(fields);
  const auto& chosen = options.tools.is_null() ? model.chat_template : model.tool_template;
  if (!chosen) throw ApiError(400, "the model has no chat template", "messages");
  bool special = false;  // the template writes them
  fields.read("add_special_tokens", special);
  try {
    auto messages = chat_messages(body, model.images.has_value());
    if (model.has_channels()) rollout::text::name_thinking(messages);
    auto images = read_images(messages, model);
    auto text = chosen->apply(messages, options);
    if (images) text = model.images->expand(text, images);
    return {.token_ids = model.encode(text, special, "prompt", is_prompt),
            .images = std::move(images)};
  } catch (const Error& error) {
    throw ApiError(400, error.what(), "messages");
  }
}

}  // namespace ferry::serve
