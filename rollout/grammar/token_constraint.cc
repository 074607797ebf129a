#include "rollout/grammar/token_constraint.h"

#include <algorithm>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "rollout/grammar/format.h"

namespace ferry::rollout::grammar {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kMostBytes = 256 * kMiB;   // of one grammar
constexpr std::size_t kBytesAnyway = 16 * kMiB;  // of one grammar, whatever others have
constexpr std::size_t kMostBytesOfAll = 1024 * kMiB;
constexpr std::size_t kMostKeptOfOne = 64 * kMiB;   // without a text that uses it
constexpr std::size_t kMostKeptBytes = 256 * kMiB;  // of all that are kept
// The work of an automaton is about 0.1 microseconds. It may be some tenths of a second at first,
// and then some milliseconds for each token.
constexpr std::size_t kMostWork = 1'000'000;
constexpr std::size_t kWorkOfAToken = 50'000;

void set(std::span<std::uint8_t> bits, std::int64_t token) {
  bits[static_cast<std::size_t>(token / 8)] |= static_cast<std::uint8_t>(1 << token % 8);
}

void clear(std::span<std::uint8_t> bits, std::int64_t token) {
  bits[static_cast<std::size_t>(token / 8)] &= static_cast<std::uint8_t>(~(1 << token % 8));
}

}  // namespace

// Walks the tree of tokens, and leaves out what is below a byte that leads nowhere.
CompiledGrammar::Bits CompiledGrammar::walk(Automaton::State state) {
  Bits bits(static_cast<std::size_t>(distckpt::ceil_div(vocabulary_->size(), 8)));
  std::vector<Automaton::State> at(vocabulary_->max_depth() + 1);  // by depth
  at[0] = state;
  const auto nodes = vocabulary_->nodes();
  const auto tokens = vocabulary_->tokens();
  for (std::size_t i = 0; i < nodes.size();) {
    const auto& node = nodes[i];
    const auto to = automaton_.next(at[node.depth], node.byte);
    if (to == Automaton::kDead) {
      i = node.end;
      continue;
    }
    at[node.depth + std::size_t{1}] = to;
    for (const auto token : tokens.subspan(node.first_token, node.num_tokens)) set(bits, token);
    ++i;
  }
  return bits;
}

CompiledGrammar::CompiledGrammar(Program program,
                                 std::shared_ptr<const Vocabulary> vocabulary,
                                 std::shared_ptr<GrammarMemory> memory)
    : automaton_(std::move(program)),
      vocabulary_(std::move(vocabulary)),
      memory_(std::move(memory)) {
  require(automaton_.num_bytes() <= most_bytes(), ErrorKind::kUsage,
          "the format is too large beside those of other requests");
  automaton_.limit({.work = kMostWork});
  count();
}

std::size_t CompiledGrammar::most_bytes() const {
  const auto others = memory_->bytes - counted_;
  return std::clamp(kMostBytesOfAll - std::min(others, kMostBytesOfAll), kBytesAnyway, kMostBytes);
}

void CompiledGrammar::count() {
  const auto bytes =
      automaton_.num_bytes() + bits_.size() * static_cast<std::size_t>(vocabulary_->size() / 8);
  memory_->bytes += bytes - std::exchange(counted_, bytes);
}

std::span<const std::uint8_t> CompiledGrammar::tokens_after(Automaton::State state) {
  const auto most = most_bytes();
  automaton_.limit(
      {.work = std::min(automaton_.work_left() + kWorkOfAToken, kMostWork), .bytes = most});
  const auto found = bits_.find(state);
  if (found != bits_.end()) return found->second;
  try {
    auto bits = walk(state);
    if (bits_.size() * bits.size() > most / 4) bits_.clear();
    auto& kept = bits_[state] = std::move(bits);
    count();
    return kept;
  } catch (...) {
    count();
    throw;
  }
}

TokenConstraint::TokenConstraint(std::shared_ptr<CompiledGrammar> grammar,
                                 std::shared_ptr<const std::vector<std::int64_t>> ending_tokens)
    : grammar_(std::move(grammar)),
      ending_tokens_(std::move(ending_tokens)),
      state_(grammar_->automaton().start()) {}

void TokenConstraint::write_allowed(std::span<std::uint8_t> bits) {
  if (has_left()) {
    std::ranges::fill(bits, std::uint8_t{0});
  } else {
    try {
      std::ranges::copy(grammar_->tokens_after(state_), bits.begin());
    } catch (const Error&) {  // too large
      state_ = Automaton::kDead;
      std::ranges::fill(bits, std::uint8_t{0xFF});
      return;
    }
  }
  const auto size = grammar_->vocabulary().size();
  for (const auto token : *ending_tokens_)
    if (token < size) clear(bits, token);
  if (!may_end() && std::ranges::any_of(bits, [](auto byte) { return byte != 0; })) return;
  for (const auto token : *ending_tokens_)
    if (token < size) set(bits, token);
}

void TokenConstraint::accept(std::int64_t token) {
  const auto& bytes = grammar_->vocabulary().bytes_of(token);
  if (bytes.empty()) state_ = Automaton::kDead;
  try {
    for (const char byte : bytes) {
      if (has_left()) return;
      state_ = grammar_->automaton().next(state_, static_cast<std::uint8_t>(byte));
    }
  } catch (const Error&) {  // too large
    state_ = Automaton::kDead;
  }
}

bool TokenConstraint::may_end() const {
  return !has_left() && grammar_->automaton().accepts(state_);
}

bool TokenConstraint::is_complete() const {
  return has_left() || !grammar_->automaton().continues(state_);
}

std::shared_ptr<CompiledGrammar> StructuredOutputManager::compile(const std::string& format) {
  const auto found = std::ranges::find(recent_, format, &Entry::first);
  if (found != recent_.end()) {
    recent_.splice(recent_.begin(), recent_, found);
  } else {
    auto compiled = std::make_shared<CompiledGrammar>(make_program(read_format(format, tokenizer_)),
                                                      vocabulary_, memory_);
    compiled->tokens_after(compiled->automaton().start());  // throws what a client should know
    recent_.emplace_front(format, std::move(compiled));
  }
  auto compiled = recent_.front().second;
  trim();
  return compiled;
}

void StructuredOutputManager::trim() {
  std::size_t bytes = 0;
  for (auto one = recent_.begin(); one != recent_.end();) {
    bytes += one->second->num_bytes();
    const auto is_much = bytes > kMostKeptBytes || one->second->num_bytes() > kMostKeptOfOne;
    one = is_much ? recent_.erase(one) : std::next(one);
  }
}

}  // namespace ferry::rollout::grammar
