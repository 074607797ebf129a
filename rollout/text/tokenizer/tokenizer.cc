#include "rollout/text/tokenizer/tokenizer.h"

#include <algorithm>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/storage/file_io.h"
#include "rollout/text/tokenizer/tiktoken_file.h"

namespace ferry::rollout::text {
namespace {

using nlohmann::json;

const json& part_of(const TokenizerFile& file, const char* key) {
  static const json null;
  const auto found = file.settings.find(key);
  return found == file.settings.end() ? null : *found;
}

std::string place(std::string_view source, std::string_view part) {
  return fmt::format("{}: {}", source, part);
}

}  // namespace

struct Tokenizer::Scratch {
  Pieces pieces{};
  Bpe::Scratch model{};
  std::vector<AddedTokens::Stretch> stretches{};
  std::vector<AddedTokens::Stretch> inner_stretches{};
};

// RAII: borrows one of the tokenizer's scratches.
class Tokenizer::Lease {
 public:
  explicit Lease(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {
    const std::lock_guard lock(tokenizer_.scratch_mutex_);
    if (!tokenizer_.free_scratch_.empty()) {
      scratch_ = std::move(tokenizer_.free_scratch_.back());
      tokenizer_.free_scratch_.pop_back();
    }
    if (!scratch_) scratch_ = std::make_unique<Scratch>();
  }
  ~Lease() {
    const std::lock_guard lock(tokenizer_.scratch_mutex_);
    tokenizer_.free_scratch_.push_back(std::move(scratch_));
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  Scratch& operator*() const { return *scratch_; }

 private:
  const Tokenizer& tokenizer_;
  std::unique_ptr<Scratch> scratch_;
};

Tokenizer::Tokenizer(std::string_view json, std::string_view source)
    : Tokenizer(parse_tokenizer_file(json, source), source) {}

Tokenizer::Tokenizer(TokenizerFile file, std::string_view source)
    : normalizer_(part_of(file, "normalizer"), place(source, "normalizer")),
      pre_tokenizer_(part_of(file, "pre_tokenizer"), place(source, "pre_tokenizer")),
      model_(file, pre_tokenizer_.byte_level()),
      added_(file, model_, normalizer_),
      post_processor_(
          read_post_processor(part_of(file, "post_processor"), place(source, "post_processor"))),
      decoder_(part_of(file, "decoder"), place(source, "decoder")) {
  vocab_size_ = model_.size();
  for (const auto& token : added_.tokens()) {
    if (model_.id_of(token.content) == kNoToken) ++vocab_size_;
  }
}

Tokenizer::~Tokenizer() = default;

std::unique_ptr<Tokenizer> Tokenizer::find_in(const ModelFiles& files) {
  const std::string name = "tokenizer.json", config_name = "tokenizer_config.json";
  std::unique_ptr<Tokenizer> tokenizer;
  if (const auto json = files.read(name)) {
    tokenizer = std::make_unique<Tokenizer>(*json, files.where(name));
  } else if (auto file = read_tiktoken_file(files)) {
    tokenizer = std::make_unique<Tokenizer>(std::move(*file), files.where(kTiktokenModel));
  } else {
    return nullptr;
  }
  if (const auto config = files.read(config_name))
    tokenizer->read_config(*config, files.where(config_name));
  return tokenizer;
}

std::unique_ptr<Tokenizer> Tokenizer::from_files(const ModelFiles& files) {
  auto tokenizer = find_in(files);
  require(tokenizer != nullptr, ErrorKind::kNotFound,
          "{}: there is neither a tokenizer.json nor a {}", files.source(), kTiktokenModel);
  return tokenizer;
}

std::unique_ptr<Tokenizer> Tokenizer::from_folder(const std::filesystem::path& folder) {
  return from_files(ModelFiles(folder));
}

void Tokenizer::read_config(std::string_view text, std::string_view source) {
  const auto config = distckpt::parse_json(text, source);
  constexpr std::string_view kKey = "eos_token";
  if (!config.is_object() || !config.contains(kKey) || config[kKey].is_null()) return;
  const auto& value = config[kKey];
  const auto token = distckpt::json_string(
      value.is_object() ? distckpt::json_at(value, "content", source) : value, kKey, source);
  eos_token_id_ = token_to_id(token);
  require(eos_token_id_ != kNoToken, ErrorKind::kCorrupt, "{}: {} is \"{}\", which is no token",
          source, kKey, token);
}

std::vector<TokenId> Tokenizer::encode(std::string_view text, EncodeOptions options) const {
  const Lease scratch(*this);
  std::vector<TokenId> ids;
  if (options.add_special_tokens) ids = post_processor_.before;
  if (is_valid_utf8(text)) {
    encode_into(text, options.max_tokens, *scratch, ids);
  } else {
    encode_into(replace_invalid_utf8(text), options.max_tokens, *scratch, ids);
  }
  if (options.add_special_tokens) {
    ids.insert(ids.end(), post_processor_.behind.begin(), post_processor_.behind.end());
  }
  return ids;
}

// Finds added tokens that are not normalized, and then, in the normalized text between them, those
// that are.
void Tokenizer::encode_into(std::string_view text,
                            std::size_t max_tokens,
                            Scratch& scratch,
                            std::vector<TokenId>& ids) const {
  scratch.stretches.clear();
  added_.split(text, false, scratch.stretches);
  for (const auto& stretch : scratch.stretches) {
    if (ids.size() > max_tokens) return;
    if (stretch.id != kNoToken) {
      ids.push_back(stretch.id);
      continue;
    }
    auto inside = text.substr(stretch.begin, stretch.end - stretch.begin);
    const bool starts_input = stretch.begin == 0;
    std::string normalized;
    if (!normalizer_.empty()) {
      normalized = normalizer_.normalize(inside);
      inside = normalized;
    }
    if (!added_.any(true)) {
      encode_stretch(inside, starts_input, max_tokens, scratch, ids);
      continue;
    }
    scratch.inner_stretches.clear();
    added_.split(inside, true, scratch.inner_stretches);
    for (const auto& inner : scratch.inner_stretches) {
      if (inner.id != kNoToken) {
        ids.push_back(inner.id);
      } else {
        encode_stretch(inside.substr(inner.begin, inner.end - inner.begin),
                       starts_input && inner.begin == 0, max_tokens, scratch, ids);
      }
    }
  }
}

void Tokenizer::encode_stretch(std::string_view text,
                               bool starts_input,
                               std::size_t max_tokens,
                               Scratch& scratch,
                               std::vector<TokenId>& ids) const {
  auto& pieces = scratch.pieces;
  pre_tokenizer_.split(text, starts_input, pieces);
  for (const auto& piece : pieces.pieces) {
    if (ids.size() > max_tokens) return;
    model_.encode(pieces[piece], scratch.model, ids);
  }
}

TokenId Tokenizer::token_to_id(std::string_view token) const {
  const auto* added = added_.find(token);
  return added == nullptr ? model_.id_of(token) : added->id;
}

std::optional<std::string> Tokenizer::id_to_token(TokenId id) const {
  if (const auto* added = added_.find(id)) return added->content;
  const auto* token = model_.token_of(id);
  return token == nullptr ? std::nullopt : std::optional(*token);
}

std::vector<std::string> Tokenizer::token_bytes(std::size_t count, char added_token) const {
  std::vector<std::string> all(count);
  DecodeStream stream(*this);
  stream.run({"a"}, false);  // the first token of a text may lose a space
  for (std::size_t i = 0; i < count; ++i) {
    const auto id = static_cast<TokenId>(i);
    if (const auto* added = added_.find(id)) {
      all[i] = added_token + added->content;
    } else if (const auto* token = model_.token_of(id)) {
      auto bytes = decoder_.bytes_of(*token);
      all[i] = bytes ? std::move(*bytes) : stream.run({*token}, false);
      if (all[i].find(added_token) != std::string::npos) all[i].clear();
    }
  }
  return all;
}

std::vector<std::string> Tokenizer::added_tokens() const {
  std::vector<std::string> contents;
  for (const auto& token : added_.tokens()) contents.push_back(token.content);
  return contents;
}

const std::string* Tokenizer::token_for_decoder(TokenId id, DecodeOptions options) const {
  const auto* added = added_.find(id);
  const auto* token = added == nullptr ? model_.token_of(id) : &added->written;
  if (token != nullptr && options.skip_special_tokens && added_.is_special(*token)) return nullptr;
  return token;
}

std::string Tokenizer::decode(std::span<const TokenId> ids, DecodeOptions options) const {
  DecodeStream stream(*this, options);
  std::string text;
  for (const auto id : ids) text.append(stream.push(id));
  return text.append(stream.finish());
}

DecodeStream::DecodeStream(const Tokenizer& tokenizer, DecodeOptions options)
    : tokenizer_(tokenizer), options_(options), steps_(tokenizer.decoder_.fresh_steps()) {}

std::string DecodeStream::push(TokenId id) {
  const auto* token = tokenizer_.token_for_decoder(id, options_);
  return token == nullptr ? std::string() : run({*token}, false);
}

std::string DecodeStream::finish() {
  return run({}, true);
}

std::string DecodeStream::run(std::vector<std::string> tokens, bool finishing) {
  for (const auto& step : steps_) {
    std::vector<std::string> given;
    for (const auto& token : tokens) step->push(token, given);
    if (finishing) step->finish(given);
    tokens = std::move(given);
  }
  std::string text;
  for (const auto& token : tokens) text.append(token);
  return text;
}

}  // namespace ferry::rollout::text
