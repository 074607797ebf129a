// Fills the tables of a Bpe from a file.
#include <algorithm>

#include "distckpt/base/error.h"
#include "rollout/text/tokenizer/bpe.h"
#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::text {

namespace {

constexpr std::size_t kLargestId = 1 << 24;

struct ByteAlphabet {
  std::array<char32_t, 256> characters{};
  std::array<int, 0x144> bytes{};

  ByteAlphabet() {
    bytes.fill(-1);
    char32_t next = 0x100;
    for (unsigned byte = 0; byte < 256; ++byte) {
      const bool printable =
          (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      characters[byte] = printable ? static_cast<char32_t>(byte) : next++;
      bytes[characters[byte]] = static_cast<int>(byte);
    }
  }
};

const ByteAlphabet& byte_alphabet() {
  static const ByteAlphabet alphabet;
  return alphabet;
}

}  // namespace

char32_t character_of_byte(unsigned char byte) {
  return byte_alphabet().characters[byte];
}

int byte_of_character(char32_t c) {
  const auto& bytes = byte_alphabet().bytes;
  return c < bytes.size() ? bytes[c] : -1;
}

bool bytes_of_token(std::string_view token, std::string& bytes) {
  bytes.clear();
  for (std::size_t at = 0; at < token.size();) {
    const int byte = byte_of_character(next_code_point(token, at));
    if (byte < 0) return false;
    bytes.push_back(static_cast<char>(byte));
  }
  return true;
}

Bpe::Bpe(TokenizerFile& file, bool byte_level) : source_(file.source), byte_level_(byte_level) {
  const auto found = file.settings.find("model");
  require(found != file.settings.end() && found->is_object(), ErrorKind::kCorrupt,
          "{}: model is missing", source_);
  auto settings = *found;
  if (!settings.contains("type")) settings["type"] = "BPE";  // files of 2020
  const Component model(settings, fmt::format("{}: model", source_));
  if (model.type() != "BPE") model.refuse_type();
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!model.string(key, "").empty()) model.refuse(key);
  }
  if (settings.contains("dropout") && settings["dropout"] != nullptr && settings["dropout"] != 0) {
    model.refuse("dropout");
  }
  byte_fallback_ = model.flag("byte_fallback", false);
  fuse_unk_ = model.flag("fuse_unk", false);
  ignore_merges_ = model.flag("ignore_merges", false);
  read_vocabulary(file);
  const auto unknown = model.string("unk_token", "");
  has_unknown_ = settings.contains("unk_token") && settings["unk_token"] != nullptr;
  unknown_ = ids_.find(unknown);
  read_alphabet();
  read_merges(file);
}

void Bpe::read_vocabulary(TokenizerFile& file) {
  require(file.has_vocab && !file.vocab.empty(), ErrorKind::kCorrupt,
          "{}: model.vocab is missing, empty or no object", source_);
  require(file.has_merges, ErrorKind::kCorrupt, "{}: model.merges is missing or no array", source_);
  size_ = file.vocab.size();
  std::size_t end = 0;
  for (const auto& [token, id] : file.vocab) end = std::max(end, static_cast<std::size_t>(id) + 1);
  require(end <= kLargestId, ErrorKind::kCorrupt, "{}: model.vocab has the id {}", source_,
          end - 1);
  tokens_.resize(end);
  taken_.resize(end);
  ids_ = TokenTable(size_);
  for (auto& [token, id] : file.vocab) {
    const auto index = static_cast<std::size_t>(id);
    require(!taken_[index], ErrorKind::kCorrupt,
            "{}: the tokens \"{}\" and \"{}\" both have the id {}", source_, tokens_[index], token,
            id);
    taken_[index] = true;
    tokens_[index] = std::move(token);
    require(ids_.insert(tokens_[index], id), ErrorKind::kCorrupt, "{}: the key \"{}\" occurs twice",
            source_, tokens_[index]);
  }
  file.vocab.clear();
}

void Bpe::read_alphabet() {
  byte_ids_.fill(kNoToken);
  for (unsigned byte = 0; byte < 256; ++byte) {
    std::string name;
    if (byte_level_) {
      append_utf8(character_of_byte(static_cast<unsigned char>(byte)), name);
    } else {
      name = fmt::format("<0x{:02X}>", byte);
    }
    byte_ids_[byte] = ids_.find(name);
  }
  if (byte_level_) {
    require(!byte_fallback_ || std::ranges::find(byte_ids_, kNoToken) == byte_ids_.end(),
            ErrorKind::kUsage,
            "{}: byte_fallback of a byte-level model without all bytes is not supported", source_);
    byte_fallback_ = false;  // every byte is in the vocabulary
    if (!ignore_merges_) return;
    words_.resize(tokens_.size());
    word_ids_ = TokenTable(size_);
    for (std::size_t id = 0; id < tokens_.size(); ++id) {
      if (!taken_[id] || !bytes_of_token(tokens_[id], words_[id])) continue;
      word_ids_.insert(words_[id], static_cast<TokenId>(id));
    }
    return;
  }
  for (std::size_t id = 0; id < tokens_.size(); ++id) {
    const auto& token = tokens_[id];
    if (token.empty() || utf8_length(token[0]) != token.size()) continue;
    std::size_t at = 0;
    const auto c = next_code_point(token, at);
    if (c >= character_ids_.size()) character_ids_.resize(c + 1, kNoToken);
    character_ids_[c] = static_cast<TokenId>(id);
  }
}

void Bpe::read_merges(const TokenizerFile& file) {
  merges_ = MergeTable(file.merges.size());
  if (!byte_level_) inner_pairs_ = PairFilter(file.merges.size() * 16);
  std::string joined;
  for (std::size_t rank = 0; rank < file.merges.size(); ++rank) {
    const auto& [left, right] = file.merges[rank];
    const auto id_of_part = [&](const std::string& token) {
      const auto id = ids_.find(token);
      require(id != kNoToken, ErrorKind::kCorrupt,
              "{}: model.merges[{}] has the token \"{}\", which is not in the vocabulary", source_,
              rank, token);
      return id;
    };
    const auto left_id = id_of_part(left), right_id = id_of_part(right);
    joined.assign(left).append(right);
    const auto id = id_of_part(joined);
    merges_.set(left_id, right_id,
                {.rank = static_cast<std::uint32_t>(
                     file.ranked_by_token ? static_cast<std::size_t>(id) : rank),
                 .id = id});
    if (byte_level_) continue;
    char32_t last = 0;
    for (std::size_t at = 0; at < joined.size();) {
      const bool first = at == 0;
      const auto c = next_code_point(joined, at);
      if (!first) inner_pairs_.insert(last, c);
      last = c;
    }
  }
}

}  // namespace ferry::rollout::text
