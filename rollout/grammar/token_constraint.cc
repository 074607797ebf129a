#include "rollout/grammar/token_constraint.h"

#include <algorithm>
#include <utility>

#include "distckpt/base/integers.h"
#include "rollout/grammar/format.h"

namespace ferry::rollout::grammar {
namespace {

constexpr std::size_t kMostBitBytes = std::size_t{64} << 20;    // of one grammar
constexpr std::size_t kMostKeptBytes = std::size_t{256} << 20;  // of all that are kept
constexpr std::size_t kBytesPerState = 1200;                    // of an automaton, about

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

std::span<const std::uint8_t> CompiledGrammar::tokens_after(Automaton::State state) {
  const auto found = bits_.find(state);
  if (found != bits_.end()) return found->second;
  auto bits = walk(state);
  if (bits_.size() * bits.size() > kMostBitBytes) bits_.clear();
  return bits_[state] = std::move(bits);
}

std::size_t CompiledGrammar::num_bytes() const {
  return bits_.size() * static_cast<std::size_t>(vocabulary_->size() / 8) +
         automaton_.num_states() * kBytesPerState;
}

TokenConstraint::TokenConstraint(std::shared_ptr<CompiledGrammar> grammar,
                                 std::shared_ptr<const std::vector<std::int64_t>> ending_tokens)
    : grammar_(std::move(grammar)),
      ending_tokens_(std::move(ending_tokens)),
      state_(grammar_->automaton().start()) {}

void TokenConstraint::write_allowed(std::span<std::uint8_t> bits) {
  if (has_left())
    std::ranges::fill(bits, std::uint8_t{0});
  else
    std::ranges::copy(grammar_->tokens_after(state_), bits.begin());
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
  for (const char byte : bytes) {
    if (has_left()) return;
    state_ = grammar_->automaton().next(state_, static_cast<std::uint8_t>(byte));
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
    recent_.emplace_front(format, std::make_shared<CompiledGrammar>(
                                      make_program(read_format(format, tokenizer_)), vocabulary_));
  }
  auto compiled = recent_.front().second;
  std::size_t bytes = 0;
  for (auto one = recent_.begin(); one != recent_.end();) {
    bytes += one->second->num_bytes();
    one = bytes > kMostKeptBytes ? recent_.erase(one) : std::next(one);
  }
  return compiled;
}

}  // namespace ferry::rollout::grammar
