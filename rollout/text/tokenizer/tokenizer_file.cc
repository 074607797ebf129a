#include "rollout/text/tokenizer/tokenizer_file.h"

#include <limits>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::text {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxDepth = 64;

// Receives the parser's events. Builds a JSON tree for all but the vocabulary and the merges.
class Reader : public nlohmann::json_sax<json> {
 public:
  explicit Reader(TokenizerFile& file) : file_(file) {}

  bool null() override { return value(json()); }
  bool boolean(bool flag) override { return value(json(flag)); }
  bool number_integer(number_integer_t number) override { return integer(number, json(number)); }
  bool number_unsigned(number_unsigned_t number) override {
    constexpr auto kLargest = std::numeric_limits<number_integer_t>::max();
    const auto bounded = static_cast<number_integer_t>(
        std::min<number_unsigned_t>(number, static_cast<number_unsigned_t>(kLargest)));
    return integer(bounded, json(number));
  }
  bool number_float(number_float_t number, const string_t&) override { return value(json(number)); }
  bool binary(binary_t&) override { return wrong("bytes", "text"); }
  bool string(string_t& text) override {
    if (part_ == Part::kMerges) return merge(text);
    if (part_ == Part::kMergePair) {
      require(pair_size_ < 2, ErrorKind::kCorrupt, "{}: model.merges[{}] has more than two tokens",
              file_.source, file_.merges.size());
      (pair_size_++ == 0 ? pair_.first : pair_.second) = std::move(text);
      return true;
    }
    return value(json(std::move(text)));
  }

  bool start_object(std::size_t) override {
    if (part_ != Part::kSettings) return wrong("an object", expected());
    if (here() == "model.vocab") {
      require_first(file_.has_vocab);
      part_ = Part::kVocab;
      return true;
    }
    return open(json::object());
  }
  bool key(string_t& name) override {
    if (part_ == Part::kVocab) {
      token_ = std::move(name);
      return true;
    }
    require(!open_.back()->contains(name), ErrorKind::kCorrupt, "{}: the key \"{}\" occurs twice",
            file_.source, name);
    key_ = std::move(name);
    return true;
  }
  bool end_object() override { return close(); }
  bool start_array(std::size_t) override {
    if (part_ == Part::kMerges) {
      part_ = Part::kMergePair;
      pair_size_ = 0;
      return true;
    }
    if (part_ != Part::kSettings) return wrong("an array", expected());
    if (here() == "model.merges") {
      require_first(file_.has_merges);
      part_ = Part::kMerges;
      return true;
    }
    return open(json::array());
  }
  bool end_array() override {
    if (part_ != Part::kMergePair) return close();
    require(pair_size_ == 2, ErrorKind::kCorrupt, "{}: model.merges[{}] has {} tokens, not two",
            file_.source, file_.merges.size(), pair_size_);
    file_.merges.push_back(std::move(pair_));
    part_ = Part::kMerges;
    return true;
  }
  bool parse_error(std::size_t position,
                   const std::string&,
                   const nlohmann::detail::exception&) override {
    fail(ErrorKind::kCorrupt, "{}: is not valid JSON at byte {}", file_.source, position);
  }

 private:
  enum class Part { kSettings, kVocab, kMerges, kMergePair };

  // The path of the next value if it is one of those two, else "".
  std::string_view here() const {
    if (open_.size() != 2 || model_ != open_.back()) return "";
    return key_ == "vocab" ? "model.vocab" : key_ == "merges" ? "model.merges" : "";
  }
  void require_first(bool& seen) const {
    require(!std::exchange(seen, true), ErrorKind::kCorrupt, "{}: the key \"{}\" occurs twice",
            file_.source, key_);
  }
  std::string_view expected() const { return part_ == Part::kVocab ? "an id" : "two tokens"; }
  bool wrong(std::string_view got, std::string_view wanted) const {
    fail(ErrorKind::kCorrupt, "{}: model.{} holds {} where {} is expected", file_.source,
         part_ == Part::kVocab ? "vocab" : "merges", got, wanted);
  }

  json* put(json&& item) {
    if (open_.empty()) {
      file_.settings = std::move(item);
      return &file_.settings;
    }
    auto& parent = *open_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(item));
      return &parent.back();
    }
    return &(parent[key_] = std::move(item));
  }
  bool open(json&& container) {
    require(open_.size() < kMaxDepth, ErrorKind::kCorrupt,
            "{}: JSON is nested more than {} levels deep", file_.source, kMaxDepth);
    const bool is_model = open_.size() == 1 && open_.back()->is_object() && key_ == "model";
    open_.push_back(put(std::move(container)));
    if (is_model) model_ = open_.back();
    return true;
  }
  bool close() {
    if (part_ == Part::kSettings) {
      open_.pop_back();
    } else {
      part_ = Part::kSettings;
    }
    return true;
  }
  bool value(json&& item) {
    if (part_ != Part::kSettings) return wrong(item.type_name(), expected());
    put(std::move(item));
    return true;
  }
  bool integer(number_integer_t number, json&& item) {
    if (part_ != Part::kVocab) return value(std::move(item));
    require(number >= 0 && number < (1 << 30), ErrorKind::kCorrupt,
            "{}: the token \"{}\" has the id {}", file_.source, token_, item.dump());
    file_.vocab.emplace_back(std::move(token_), static_cast<TokenId>(number));
    return true;
  }
  // "first second", the form of files before 2024.
  bool merge(const std::string& text) {
    if (text.starts_with("#version")) return true;
    const auto space = text.find(' ');
    require(space != std::string::npos && text.find(' ', space + 1) == std::string::npos,
            ErrorKind::kCorrupt, "{}: model.merges[{}] is \"{}\", not two tokens", file_.source,
            file_.merges.size(), text);
    file_.merges.emplace_back(text.substr(0, space), text.substr(space + 1));
    return true;
  }

  TokenizerFile& file_;
  std::vector<json*> open_;
  const json* model_ = nullptr;
  std::string key_;
  Part part_ = Part::kSettings;
  std::string token_;
  std::pair<std::string, std::string> pair_;
  int pair_size_ = 0;
};

}  // namespace

TokenizerFile parse_tokenizer_file(std::string_view text, std::string_view source) {
  TokenizerFile file{.source = std::string(source)};
  // The parser takes a NUL for the end of its input, and would not read on.
  const auto nul = text.find('\0');
  require(nul == std::string_view::npos, ErrorKind::kCorrupt, "{}: is not valid JSON at byte {}",
          source, nul);
  Reader reader(file);
  json::sax_parse(text, &reader);
  require(file.settings.is_object(), ErrorKind::kCorrupt, "{}: not a JSON object", source);
  return file;
}

Component::Component(const json& settings, std::string where)
    : settings_(&settings), where_(std::move(where)) {
  require(settings.is_object(), ErrorKind::kCorrupt, "{}: is not a JSON object", where_);
  type_ = string("type");
}

void Component::refuse(std::string_view what) const {
  fail(ErrorKind::kUsage, "{}: {} is not supported", where_, what);
}
void Component::refuse_type() const {
  refuse(fmt::format("the type {}", type_));
}

const json* Component::find(std::string_view key) const {
  const auto found = settings_->find(key);
  return found == settings_->end() || found->is_null() ? nullptr : &*found;
}
const json& Component::member(std::string_view key) const {
  const auto* found = find(key);
  require(found != nullptr, ErrorKind::kCorrupt, "{}: {} is missing", where_, key);
  return *found;
}
bool Component::flag(std::string_view key, bool otherwise) const {
  const auto* found = find(key);
  if (found == nullptr) return otherwise;
  require(found->is_boolean(), ErrorKind::kCorrupt, "{}: {} is neither true nor false", where_,
          key);
  return found->get<bool>();
}
std::string Component::string(std::string_view key) const {
  return distckpt::json_string(member(key), key, where_);
}
std::string Component::string(std::string_view key, std::string_view otherwise) const {
  return find(key) == nullptr ? std::string(otherwise) : string(key);
}
char32_t Component::character(std::string_view key) const {
  const auto text = string(key);
  std::size_t at = 0;
  const auto c = text.empty() ? 0 : next_code_point(text, at);
  require(at != 0 && at == text.size(), ErrorKind::kCorrupt, "{}: {} is \"{}\", not one character",
          where_, key, text);
  return c;
}
std::uint32_t Component::count(std::string_view key) const {
  const auto number = distckpt::json_int(member(key), key, where_);
  require(number >= 0 && number <= 1'000'000, ErrorKind::kCorrupt, "{}: {} is {}", where_, key,
          number);
  return static_cast<std::uint32_t>(number);
}
std::vector<Component> Component::sequence(std::string_view key) const {
  const auto& items = member(key);
  require(items.is_array(), ErrorKind::kCorrupt, "{}: {} is not an array", where_, key);
  std::vector<Component> found;
  for (const auto& item : items) {
    found.emplace_back(item, fmt::format("{}.{}[{}]", where_, key, found.size()));
  }
  return found;
}
std::pair<bool, std::string> Component::pattern(std::string_view key) const {
  const auto& found = member(key);
  const bool regex = found.contains("Regex");
  const std::string_view kind = regex ? "Regex" : "String";
  require(found.is_object() && found.size() == 1 && found.contains(kind) &&
              found.at(std::string(kind)).is_string(),
          ErrorKind::kCorrupt, "{}: {} is neither a String nor a Regex", where_, key);
  auto text = found.at(std::string(kind)).get<std::string>();
  require(!text.empty(), ErrorKind::kUsage, "{}: an empty {} is not supported", where_, key);
  return {regex, std::move(text)};
}

}  // namespace ferry::rollout::text
