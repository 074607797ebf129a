// Holds the tokens of a text to a grammar: which may come next, as bits that are kept by state of
// the automaton. Not thread-safe: of one engine.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "rollout/grammar/automaton.h"
#include "rollout/grammar/vocabulary.h"

namespace ferry::rollout::grammar {

// The memory of all grammars together, about: those in use, and those that are kept.
struct GrammarMemory {
  std::size_t bytes = 0;
};

// A grammar over a vocabulary, which texts share. It has so much work for each token that is drawn,
// and so much memory, that other texts do not wait for it.
class CompiledGrammar {
 public:
  // Throws Error(kUsage) if its memory is more than that of others leaves.
  CompiledGrammar(Program program,
                  std::shared_ptr<const Vocabulary> vocabulary,
                  std::shared_ptr<GrammarMemory> memory);
  ~CompiledGrammar() { memory_->bytes -= counted_; }
  CompiledGrammar(const CompiledGrammar&) = delete;
  CompiledGrammar& operator=(const CompiledGrammar&) = delete;

  Automaton& automaton() { return automaton_; }
  const Vocabulary& vocabulary() const { return *vocabulary_; }
  // Tokens whose bytes lead on: token i is bit i % 8 of byte i / 8. Valid until the next call.
  // Throws Error(kUsage) if that takes too much work or memory.
  std::span<const std::uint8_t> tokens_after(Automaton::State state);
  std::size_t num_bytes() const { return counted_; }

 private:
  using Bits = std::vector<std::uint8_t>;
  Bits walk(Automaton::State state);
  std::size_t most_bytes() const;
  void count();

  Automaton automaton_;
  std::shared_ptr<const Vocabulary> vocabulary_;
  std::shared_ptr<GrammarMemory> memory_;
  std::size_t counted_ = 0;  // of memory_
  std::unordered_map<Automaton::State, Bits> bits_;
};

// The place of one text in its grammar. It ends by one of `ending_tokens`, which are drawn where
// the grammar lets the text end, and nowhere else.
class TokenConstraint {
 public:
  TokenConstraint(std::shared_ptr<CompiledGrammar> grammar,
                  std::shared_ptr<const std::vector<std::int64_t>> ending_tokens);

  // The bits of tokens that may be drawn next, (vocabulary + 7) / 8 bytes. If the vocabulary cannot
  // write any text that fits, these are the ending tokens, if there are any. If the grammar is too
  // large, these are all tokens, and the text has left it.
  void write_allowed(std::span<std::uint8_t> bits);
  // A token that is no ending token.
  void accept(std::int64_t token);
  // True if the text fits as it is: an ending token behind another text is the last of an answer
  // that the vocabulary cannot write.
  bool may_end() const;
  // True if no text that begins like this one fits.
  bool has_left() const { return state_ == Automaton::kDead; }
  // Nothing but an ending token can follow.
  bool is_complete() const;

 private:
  std::shared_ptr<CompiledGrammar> grammar_;
  std::shared_ptr<const std::vector<std::int64_t>> ending_tokens_;
  Automaton::State state_;
};

// Compiles the formats of requests (format.h), and keeps them: requests of equal formats share what
// they have found out.
class StructuredOutputManager {
 public:
  // `vocab_size`: of the model.
  StructuredOutputManager(const text::Tokenizer& tokenizer, std::int64_t vocab_size)
      : tokenizer_(tokenizer),
        vocabulary_(std::make_shared<const Vocabulary>(tokenizer, vocab_size)) {}

  // `format`: its JSON text. Throws Error(kUsage) that says what of it is not supported, or that it
  // is too large.
  std::shared_ptr<CompiledGrammar> compile(const std::string& format);
  // Forgets what is not in use and is much. Called when texts have ended.
  void trim();

 private:
  using Entry = std::pair<std::string, std::shared_ptr<CompiledGrammar>>;

  const text::Tokenizer& tokenizer_;
  std::shared_ptr<const Vocabulary> vocabulary_;
  std::shared_ptr<GrammarMemory> memory_ = std::make_shared<GrammarMemory>();
  std::list<Entry> recent_;  // the last one used first
};

}  // namespace ferry::rollout::grammar
