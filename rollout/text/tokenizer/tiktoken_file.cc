#include "rollout/text/tokenizer/tiktoken_file.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <set>
#include <string_view>
#include <utility>

#include "distckpt/base/encodings.h"
#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "rollout/text/tokenizer/bpe.h"
#include "rollout/text/tokenizer/flat_maps.h"
#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::text {
namespace {

using nlohmann::json;

constexpr std::string_view kClass = "TikTokenTokenizer";

// pat_str of the class.
constexpr std::array<std::string_view, 8> kPattern{
    R"([\p{Han}]+)",
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*)"
    R"([\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?)",
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+)"
    R"([\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?)",
    R"(\p{N}{1,3})",
    R"( ?[^\s\p{L}\p{N}]+[\r\n]*)",
    R"(\s*[\r\n]+)",
    R"(\s+(?!\S))",
    R"(\s+)"};

// The special tokens behind the ranks, named or reserved (num_reserved_special_tokens).
constexpr std::size_t kSpecialTokens = 256;

// Special tokens that are skipped when ids are decoded if tokenizer_config.json has no such list.
constexpr std::array kAdditionalSpecialTokens{
    "<|im_end|>",        "<|im_user|>", "<|im_assistant|>", "<|start_header_id|>",
    "<|end_header_id|>", "[EOT]",       "<|im_system|>",    "<|im_middle|>"};

// The bytes of each token, by rank.
std::vector<std::string> read_ranks(std::string_view text, const std::string& source) {
  std::vector<std::pair<std::string, std::size_t>> read;
  for (std::size_t at = 0, number = 1; at < text.size(); ++number) {
    const auto end = std::min(text.find('\n', at), text.size());
    auto line = text.substr(at, end - at);
    at = end + 1;
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) continue;
    const auto space = line.find(' ');
    const auto token = line.substr(0, space);
    const auto rank = space == std::string_view::npos ? std::string_view() : line.substr(space + 1);
    std::size_t value = 0;
    const auto parsed = std::from_chars(rank.data(), rank.data() + rank.size(), value);
    require(!rank.empty() && parsed.ec == std::errc() && parsed.ptr == rank.data() + rank.size(),
            ErrorKind::kCorrupt, "{}: line {}: is no token in base64 and its rank", source, number);
    auto bytes = base64_bytes(token);
    require(bytes && !bytes->empty(), ErrorKind::kCorrupt, "{}: line {}: \"{}\" is not base64",
            source, number, token);
    read.emplace_back(std::move(*bytes), value);
  }
  require(!read.empty(), ErrorKind::kCorrupt, "{}: has no tokens", source);
  std::vector<std::string> tokens(read.size());
  for (auto& [bytes, rank] : read) {
    if (rank >= tokens.size()) continue;  // then another one is missing
    require(tokens[rank].empty(), ErrorKind::kCorrupt, "{}: two tokens have the rank {}", source,
            rank);
    tokens[rank] = std::move(bytes);
  }
  const auto missing = std::ranges::find(tokens, "") - tokens.begin();
  require(missing == std::ssize(tokens), ErrorKind::kCorrupt,
          "{}: no token has the rank {}, of {} tokens", source, missing, tokens.size());
  return tokens;
}

// GPT-2's characters for the bytes of a token, as a tokenizer.json has them.
std::string written(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes)
    append_utf8(character_of_byte(static_cast<unsigned char>(byte)), text);
  return text;
}

// The vocabulary, and as merges all pairs of tokens that make another one.
void fill_model(const std::vector<std::string>& tokens, TokenizerFile& file) {
  TokenTable ranks(tokens.size());
  for (std::size_t rank = 0; rank < tokens.size(); ++rank) {
    const auto id = static_cast<TokenId>(rank);
    const auto& token = file.vocab.emplace_back(written(tokens[rank]), id).first;
    require(ranks.insert(tokens[rank], id), ErrorKind::kCorrupt,
            "{}: the token \"{}\" has the ranks {} and {}", file.source, token,
            ranks.find(tokens[rank]), rank);
  }
  for (unsigned byte = 0; byte < 256; ++byte) {
    const auto character = static_cast<char>(byte);
    require(ranks.find({&character, 1}) != kNoToken, ErrorKind::kCorrupt,
            "{}: the byte 0x{:02X} has no rank", file.source, byte);
  }
  const auto name = [&](TokenId id) { return file.vocab[static_cast<std::size_t>(id)].first; };
  for (const std::string_view token : tokens) {
    for (std::size_t at = 1; at < token.size(); ++at) {
      const auto left = ranks.find(token.substr(0, at));
      const auto right = left == kNoToken ? kNoToken : ranks.find(token.substr(at));
      if (right != kNoToken) file.merges.emplace_back(name(left), name(right));
    }
  }
  file.has_vocab = file.has_merges = file.ranked_by_token = true;
}

// Throws unless the class of the tokenizer is the one whose pattern is known.
void require_class(const json& config, const std::string& source, const ModelFiles& files) {
  auto name = config.value("tokenizer_class", json());
  const auto map = config.value("auto_map", json::object());
  if (map.is_object() && map.contains("AutoTokenizer")) {
    name = map["AutoTokenizer"];
    if (name.is_array() && !name.empty()) name = json(name[0]);
  }
  const auto path = name.is_string() ? name.get<std::string>() : name.dump();  // module.Class
  const auto dot = path.rfind('.') + 1;
  require(std::string_view(path).substr(dot) == kClass, ErrorKind::kUsage,
          "{}: the tokenizer is a {}; {} is read only as Moonshot's {} reads it", source, path,
          kTiktokenModel, kClass);
  if (dot == 0) return;
  const auto module = path.substr(0, dot - 1);
  const auto file = module.substr(module.rfind('-') + 1) + ".py";  // without "repository--"
  if (file.find('/') != std::string::npos) return;
  const auto code = files.read(file);
  require(
      !code ||
          std::ranges::all_of(kPattern, [&](auto part) { return code->find(part) != code->npos; }),
      ErrorKind::kUsage, "{}: its pat_str is not that of Kimi, which is the only one that is read",
      files.where(file));
}

// The text of a token, which may stand in an object.
std::string content_of(const json& value, std::string_view key, const std::string& source) {
  return distckpt::json_string(
      value.is_object() ? distckpt::json_at(value, "content", source) : value, key, source);
}

// The tokens that transformers skips: those that have a role, and those of two lists.
std::set<std::string> special_tokens(const json& config, const std::string& source) {
  std::set<std::string> special;
  for (const char* key : {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token",
                          "cls_token", "mask_token"}) {
    const auto found = config.find(key);
    if (found != config.end() && !found->is_null()) special.insert(content_of(*found, key, source));
  }
  const auto add_list = [&](const char* key) {
    const auto found = config.find(key);
    if (found == config.end() || found->is_null()) return false;
    for (const auto& value : *found) special.insert(content_of(value, key, source));
    return true;
  };
  add_list("extra_special_tokens");
  if (!add_list("additional_special_tokens"))
    special.insert(kAdditionalSpecialTokens.begin(), kAdditionalSpecialTokens.end());
  return special;
}

// The special tokens behind the ranks, as a tokenizer.json lists them.
json added_tokens(const json& config, const std::string& source, std::size_t first) {
  const auto special = special_tokens(config, source);
  std::vector<json> tokens(kSpecialTokens);
  const auto named = config.value("added_tokens_decoder", json::object());
  require(named.is_object(), ErrorKind::kCorrupt, "{}: added_tokens_decoder is no object", source);
  for (const auto& [key, token] : named.items()) {
    std::size_t id = 0;
    const auto parsed = std::from_chars(key.data(), key.data() + key.size(), id);
    require(parsed.ec == std::errc() && parsed.ptr == key.data() + key.size() && id >= first &&
                id - first < kSpecialTokens,
            ErrorKind::kCorrupt,
            "{}: added_tokens_decoder has the id {}; {} tokens have ranks, and special ones are {} "
            "to {}",
            source, key, first, first, first + kSpecialTokens - 1);
    require(token.is_object(), ErrorKind::kCorrupt, "{}: added_tokens_decoder[{}] is no object",
            source, key);
    tokens[id - first] = token;
  }
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    auto& token = tokens[i];
    const auto id = first + i;
    if (token.is_null()) token = {{"content", fmt::format("<|reserved_token_{}|>", id)}};
    token["id"] = id;
    token["special"] = special.contains(content_of(token, "added_tokens_decoder", source));
    if (!token.contains("normalized")) token["normalized"] = false;
  }
  return tokens;
}

}  // namespace

std::optional<TokenizerFile> read_tiktoken_file(const ModelFiles& files) {
  const auto text = files.read(kTiktokenModel);
  if (!text) return std::nullopt;
  const std::string config_name = "tokenizer_config.json";
  const auto config_text = files.read(config_name);
  const auto config_source = files.where(config_name);
  require(config_text.has_value(), ErrorKind::kNotFound,
          "{}: there is no such file, which names the special tokens of {}", config_source,
          kTiktokenModel);
  const auto config = distckpt::parse_json(*config_text, config_source);
  require(config.is_object(), ErrorKind::kCorrupt, "{}: not a JSON object", config_source);
  require_class(config, config_source, files);

  TokenizerFile file{.source = files.where(kTiktokenModel)};
  const auto tokens = read_ranks(*text, file.source);
  fill_model(tokens, file);
  std::string pattern;
  for (const auto part : kPattern) pattern.append(pattern.empty() ? "" : "|").append(part);
  // The same parts that transformers' TikTokenConverter makes.
  const json cut{{"type", "Split"},
                 {"pattern", {{"Regex", pattern}}},
                 {"behavior", "Isolated"},
                 {"invert", false}};
  const json bytes{{"type", "ByteLevel"},
                   {"add_prefix_space", false},
                   {"trim_offsets", true},
                   {"use_regex", false}};
  file.settings = {
      {"model", {{"type", "BPE"}, {"ignore_merges", true}}},
      {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", json::array({cut, bytes})}}},
      {"decoder", bytes},
      {"added_tokens", added_tokens(config, config_source, tokens.size())},
  };
  return file;
}

}  // namespace ferry::rollout::text
