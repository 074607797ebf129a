#include "rollout/text/tokenizer/added_tokens.h"

#include <algorithm>

#include "distckpt/base/error.h"
#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::text {
namespace {

bool begins_with_word(std::string_view text) {
  std::size_t at = 0;
  return !text.empty() && CodePointSet::named("RustWord")->contains(next_code_point(text, at));
}
bool ends_with_word(std::string_view text) {
  return !text.empty() && begins_with_word(text.substr(previous_boundary(text, text.size())));
}

}  // namespace

AddedTokens::AddedTokens(const TokenizerFile& file,
                         const Bpe& model,
                         const Normalizer& normalizer) {
  const auto found = file.settings.find("added_tokens");
  if (found == file.settings.end() || found->is_null()) return;
  require(found->is_array(), ErrorKind::kCorrupt, "{}: added_tokens is not an array", file.source);
  auto next_id = static_cast<TokenId>(model.size());
  for (const auto& item : *found) {
    auto settings = item;
    if (settings.is_object()) settings["type"] = "AddedToken";
    const Component part(settings,
                         fmt::format("{}: added_tokens[{}]", file.source, tokens_.size()));
    AddedToken token{.content = part.string("content"),
                     .single_word = part.flag("single_word", false),
                     .lstrip = part.flag("lstrip", false),
                     .rstrip = part.flag("rstrip", false),
                     .normalized = part.flag("normalized", true),
                     .special = part.flag("special", false)};
    require(!token.content.empty(), ErrorKind::kCorrupt, "{}: content is empty", part.where());
    const auto index = static_cast<std::uint32_t>(tokens_.size());
    require(by_content_.emplace(token.content, index).second, ErrorKind::kCorrupt,
            "{}: \"{}\" is added twice", part.where(), token.content);
    token.id = model.id_of(token.content);
    if (token.id == kNoToken) token.id = next_id++;
    const auto id = part.count("id");
    require(static_cast<TokenId>(id) == token.id, ErrorKind::kCorrupt,
            "{}: \"{}\" has the id {}, by the vocabulary it is {}", part.where(), token.content, id,
            token.id);
    token.written = token.normalized ? normalizer.normalize(token.content) : token.content;
    by_id_.emplace(token.id, index);
    if (token.special) special_.emplace(token.content, true);
    require(!token.written.empty(), ErrorKind::kUsage,
            "{}: a token that the normalizer makes empty is not supported", part.where());
    (token.normalized ? normalized_ : plain_).insert(token.written, index);
    tokens_.push_back(std::move(token));
  }
}

const AddedToken* AddedTokens::find(std::string_view content) const {
  const auto found = by_content_.find(std::string(content));
  return found == by_content_.end() ? nullptr : &tokens_[found->second];
}
const AddedToken* AddedTokens::find(TokenId id) const {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : &tokens_[found->second];
}

void AddedTokens::split(std::string_view text, bool normalized, std::vector<Stretch>& into) const {
  const auto& tokens = finder(normalized);
  std::size_t done = 0;
  for (std::size_t at = 0; tokens.any() && at < text.size();) {
    if (!tokens.may_begin(text[at])) {
      ++at;
      continue;
    }
    const auto [match_end, index] = tokens.longest_at(text, at);
    if (match_end == at) {
      ++at;
      continue;
    }
    auto begin = at, end = match_end;
    at = match_end;  // even if the match is discarded
    const auto& token = tokens_[index];
    if (token.single_word &&
        (ends_with_word(text.substr(0, begin)) || begins_with_word(text.substr(end)))) {
      continue;
    }
    if (token.lstrip) begin = std::max(begin - white_space_suffix(text.substr(0, begin)), done);
    if (token.rstrip) end += white_space_prefix(text.substr(end));
    if (done < begin) into.push_back({done, begin, kNoToken});
    into.push_back({begin, end, token.id});
    done = end;
  }
  if (done != text.size()) into.push_back({done, text.size(), kNoToken});
}

void AddedTokens::Finder::insert(std::string_view text, std::uint32_t index) {
  if (nodes_.empty()) nodes_.emplace_back();
  begins_[static_cast<unsigned char>(text.front())] = true;
  std::uint32_t node = 0;
  for (const char byte : text) {
    auto& children = nodes_[node].children;
    const auto found = std::ranges::find(children, byte, &std::pair<char, std::uint32_t>::first);
    if (found != children.end()) {
      node = found->second;
      continue;
    }
    const auto child = static_cast<std::uint32_t>(nodes_.size());
    children.emplace_back(byte, child);
    nodes_.emplace_back();
    node = child;
  }
  nodes_[node].index = index;
}

std::pair<std::size_t, std::uint32_t> AddedTokens::Finder::longest_at(std::string_view text,
                                                                      std::size_t at) const {
  std::pair<std::size_t, std::uint32_t> longest{at, kNone};
  std::uint32_t node = 0;
  for (auto i = at; i < text.size(); ++i) {
    const auto& children = nodes_[node].children;
    const auto found = std::ranges::find(children, text[i], &std::pair<char, std::uint32_t>::first);
    if (found == children.end()) break;
    node = found->second;
    if (nodes_[node].index != kNone) longest = {i + 1, nodes_[node].index};
  }
  return longest;
}

}  // namespace ferry::rollout::text
