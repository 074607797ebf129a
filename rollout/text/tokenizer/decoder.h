// The decoder of a tokenizer.json as a chain of steps through which tokens flow one by one: the
// same code decodes a whole sequence and a stream, and a stream's parts concatenate to the whole.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::rollout::text {

// Takes tokens, and passes tokens on to the next step. It keeps what is not certain yet.
class DecoderStep {
 public:
  virtual ~DecoderStep() = default;
  virtual void push(std::string_view token, std::vector<std::string>& out) = 0;
  virtual void finish(std::vector<std::string>& /*out*/) {}
};

class Decoder {
 public:
  // Null `settings` join tokens with spaces, as the package does. Throws Error that names an
  // unsupported type.
  Decoder(const nlohmann::json& settings, const std::string& where);

  std::vector<std::unique_ptr<DecoderStep>> fresh_steps() const;  // for one sequence
  // The bytes that a token stands for, which need not be whole characters; nothing if it is text.
  std::optional<std::string> bytes_of(std::string_view token) const;

 private:
  std::vector<std::function<std::unique_ptr<DecoderStep>()>> makers_;
  bool is_byte_level_ = false;
  bool has_byte_fallback_ = false;
};

}  // namespace ferry::rollout::text
