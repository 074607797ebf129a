// A tokenizer that a tokenizer.json or a tiktoken.model describes: text to ids and back, the same
// ids and the same text as the packages tokenizers 0.23.3 and tiktoken 0.14.0. Thread-safe after
// construction.
#pragma once

#include <cstddef>
#include <filesystem>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "rollout/text/tokenizer/added_tokens.h"
#include "rollout/text/tokenizer/bpe.h"
#include "rollout/text/tokenizer/decoder.h"
#include "rollout/text/tokenizer/model_files.h"
#include "rollout/text/tokenizer/normalizer.h"
#include "rollout/text/tokenizer/post_processor.h"
#include "rollout/text/tokenizer/pre_tokenizer.h"
#include "rollout/text/tokenizer/tokenizer_file.h"

namespace ferry::rollout::text {

struct EncodeOptions {
  bool add_special_tokens = true;  // those of the post-processor, such as <s>
  // Once there are more, the rest of the text is left out: it is too long anyway.
  std::size_t max_tokens = std::numeric_limits<std::size_t>::max();
};

struct DecodeOptions {
  bool skip_special_tokens = true;
};

class DecodeStream;

class Tokenizer {
 public:
  // `json` is the text of a tokenizer.json. Throws Error that names `source` and what is wrong.
  Tokenizer(std::string_view json, std::string_view source);
  // Takes a parsed file.
  Tokenizer(TokenizerFile file, std::string_view source);
  ~Tokenizer();
  // Reads tokenizer.json, else tiktoken.model (tiktoken_file.h), and the tokens that begin, end and
  // pad from tokenizer_config.json if there is one. Throws Error(kNotFound) if there is neither.
  static std::unique_ptr<Tokenizer> from_files(const ModelFiles& files);
  // The same, or null.
  static std::unique_ptr<Tokenizer> find_in(const ModelFiles& files);
  static std::unique_ptr<Tokenizer> from_folder(const std::filesystem::path& folder);

  // Parts of `text` that are not UTF-8 count as U+FFFD, like Python's
  // errors="replace".
  std::vector<TokenId> encode(std::string_view text, EncodeOptions options = {}) const;
  // Skips unknown ids.
  std::string decode(std::span<const TokenId> ids, DecodeOptions options = {}) const;

  std::size_t vocab_size() const { return vocab_size_; }  // with the added tokens
  TokenId token_to_id(std::string_view token) const;      // or kNoToken
  std::optional<std::string> id_to_token(TokenId id) const;

  // The bytes that tokens 0 to count - 1 write behind other tokens. An added token's are its
  // content with `added_token` in front, a byte that no UTF-8 has. An id without a token, and a
  // token that has this byte, have none.
  std::vector<std::string> token_bytes(std::size_t count, char added_token) const;
  std::vector<std::string> added_tokens() const;  // their contents

  std::optional<TokenId> eos_token_id() const { return eos_token_id_; }

 private:
  friend class DecodeStream;

  // The memory of one call of encode(), reused by later ones.
  struct Scratch;
  class Lease;

  void read_config(std::string_view json, std::string_view source);
  void encode_into(std::string_view text,
                   std::size_t max_tokens,
                   Scratch& scratch,
                   std::vector<TokenId>& ids) const;
  void encode_stretch(std::string_view text,
                      bool starts_input,
                      std::size_t max_tokens,
                      Scratch& scratch,
                      std::vector<TokenId>& ids) const;
  // The token for the decoder; null for an unknown id or one that is skipped.
  const std::string* token_for_decoder(TokenId id, DecodeOptions options) const;

  Normalizer normalizer_;
  PreTokenizer pre_tokenizer_;
  Bpe model_;
  AddedTokens added_;
  PostProcessor post_processor_;
  Decoder decoder_;
  std::size_t vocab_size_ = 0;
  std::optional<TokenId> eos_token_id_;

  mutable std::mutex scratch_mutex_;
  mutable std::vector<std::unique_ptr<Scratch>> free_scratch_;
};

// Decodes ids one by one during generation. The texts that push() and finally finish() return
// concatenate to the result of decode().
class DecodeStream {
 public:
  // The tokenizer outlives the stream.
  explicit DecodeStream(const Tokenizer& tokenizer, DecodeOptions options = {});

  // Returns the text that is certain now, without an incomplete character at its end.
  std::string push(TokenId id);
  std::string finish();

 private:
  friend class Tokenizer;

  std::string run(std::vector<std::string> tokens, bool finishing);

  const Tokenizer& tokenizer_;
  DecodeOptions options_;
  std::vector<std::unique_ptr<DecoderStep>> steps_;
};

}  // namespace ferry::rollout::text
