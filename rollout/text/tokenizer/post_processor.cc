#include "rollout/text/tokenizer/post_processor.h"

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"

namespace ferry::rollout::text {
namespace {

using distckpt::json_at;
using nlohmann::json;

void append_special(const Component& part, const std::string& name, std::vector<TokenId>& ids) {
  const auto& special = json_at(part.member("special_tokens"), name, part.where());
  const auto& found = json_at(special, "ids", part.where());
  require(found.is_array(), ErrorKind::kCorrupt, "{}: the ids of {} are not an array", part.where(),
          name);
  for (const auto& id : found) {
    const auto number = distckpt::json_int(id, "an id of " + name, part.where());
    require(number >= 0 && number < (1 << 30), ErrorKind::kCorrupt, "{}: {} has the id {}",
            part.where(), name, number);
    ids.push_back(static_cast<TokenId>(number));
  }
}

// Reads the template for single texts; that for pairs is ignored.
PostProcessor read_template(const Component& part) {
  PostProcessor processor;
  bool behind = false;
  const auto& pieces = part.member("single");
  require(pieces.is_array(), ErrorKind::kCorrupt, "{}: single is not an array", part.where());
  for (const auto& piece : pieces) {
    require(piece.is_object() && piece.size() == 1, ErrorKind::kCorrupt,
            "{}: single holds {}, neither a Sequence nor a SpecialToken", part.where(),
            piece.dump());
    const auto& kind = piece.begin().key();
    const auto& settings = piece.begin().value();
    const auto id = distckpt::json_string_at(settings, "id", part.where());
    if (kind == "SpecialToken") {
      append_special(part, id, behind ? processor.behind : processor.before);
    } else if (kind == "Sequence" && id == "A" && !behind) {
      behind = true;
    } else {
      part.refuse(fmt::format("the piece {}", piece.dump()));
    }
  }
  if (!behind) part.refuse("a template without its text");
  return processor;
}

void add(const Component& part, PostProcessor& processor) {
  if (part.type() == "Sequence") {
    for (const auto& inner : part.sequence("processors")) add(inner, processor);
  } else if (part.type() == "TemplateProcessing") {
    auto outer = read_template(part);
    outer.before.insert(outer.before.end(), processor.before.begin(), processor.before.end());
    processor.before = std::move(outer.before);
    processor.behind.insert(processor.behind.end(), outer.behind.begin(), outer.behind.end());
  } else if (part.type() != "ByteLevel") {  // changes only offsets
    part.refuse_type();
  }
}

}  // namespace

PostProcessor read_post_processor(const json& settings, const std::string& where) {
  PostProcessor processor;
  if (!settings.is_null()) add(Component(settings, where), processor);
  return processor;
}

}  // namespace ferry::rollout::text
