#include "rollout/text/tokenizer/decoder.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "distckpt/base/error.h"
#include "rollout/text/regex/pattern.h"
#include "rollout/text/tokenizer/bpe.h"
#include "rollout/text/tokenizer/tokenizer_file.h"
#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::text {
namespace {

using Tokens = std::vector<std::string>;
using Makers = std::vector<std::function<std::unique_ptr<DecoderStep>()>>;

// Appends a maker of copies of `step`, one for each sequence.
template <typename Step>
void append(Makers& makers, Step step) {
  makers.push_back([step] { return std::make_unique<Step>(step); });
}

// Turns characters that stand for bytes into those bytes, and joins the bytes of all tokens.
class ByteLevelStep : public DecoderStep {
 public:
  void push(std::string_view token, Tokens& out) override {
    std::string bytes;
    pending_.append(bytes_of_token(token, bytes) ? std::string_view(bytes) : token);
    give(out, false);
  }
  void finish(Tokens& out) override { give(out, true); }

 private:
  // Passes on all bytes but those of an incomplete character at the end.
  void give(Tokens& out, bool all) {
    std::size_t keep = 0;
    for (std::size_t back = 1; !all && back <= std::min<std::size_t>(3, pending_.size()); ++back) {
      const auto tail = std::string_view(pending_).substr(pending_.size() - back);
      if ((static_cast<unsigned char>(tail[0]) & 0xC0) == 0x80) continue;
      const auto head = utf8_head(tail);
      if (!head.valid && !head.complete) keep = back;
      break;
    }
    const auto ready = std::string_view(pending_).substr(0, pending_.size() - keep);
    if (!ready.empty()) out.push_back(replace_invalid_utf8(ready));
    pending_.erase(0, ready.size());
  }

  std::string pending_;
};

std::optional<char> byte_of_fallback(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || !token.ends_with('>')) return {};
  auto digits = token.substr(3, 2);
  if (digits[0] == '+') digits.remove_prefix(1);  // Rust's numbers may have a sign
  unsigned byte = 0;
  const auto end = digits.data() + digits.size();
  const auto [stopped, error] = std::from_chars(digits.data(), end, byte, 16);
  if (error != std::errc() || stopped != end) return {};
  return static_cast<char>(byte);
}

// Turns "<0xE2>" into a byte. A run of bytes is text if the whole run is valid UTF-8; otherwise
// each byte becomes U+FFFD.
class ByteFallbackStep : public DecoderStep {
 public:
  void push(std::string_view token, Tokens& out) override {
    if (const auto byte = byte_of_fallback(token)) {
      bytes_.push_back(*byte);
      return;
    }
    finish(out);
    out.emplace_back(token);
  }
  void finish(Tokens& out) override {
    if (bytes_.empty()) return;
    if (is_valid_utf8(bytes_)) {
      out.push_back(bytes_);
    } else {
      out.insert(out.end(), bytes_.size(), "\xEF\xBF\xBD");
    }
    bytes_.clear();
  }

 private:
  std::string bytes_;
};

class ReplaceStep : public DecoderStep {
 public:
  ReplaceStep(Pattern pattern, std::string content)
      : pattern_(std::move(pattern)), content_(std::move(content)) {}
  void push(std::string_view token, Tokens& out) override {
    out.push_back(pattern_.replace(token, content_));
  }

 private:
  Pattern pattern_;
  std::string content_;
};

class MetaspaceStep : public DecoderStep {
 public:
  MetaspaceStep(const std::string& mark, bool prepends)
      : pattern_({false, mark}), drops_(prepends) {}
  void push(std::string_view token, Tokens& out) override {
    out.push_back(pattern_.replace(token, drops_ ? "" : " "));
    drops_ = false;  // only in front of the first token
  }

 private:
  Pattern pattern_;
  bool drops_;
};

// Removes a character up to `start` times from the front of a token, and up to `stop` times from
// its end. `fused`: all tokens are parts of one, and `stop` is zero.
class StripStep : public DecoderStep {
 public:
  StripStep(char32_t content, std::size_t start, std::size_t stop, bool fused)
      : start_(start), stop_(stop), left_(start), fused_(fused) {
    append_utf8(content, content_);
  }
  void push(std::string_view token, Tokens& out) override {
    if (!fused_) left_ = start_;
    for (; left_ > 0 && token.starts_with(content_); --left_) token.remove_prefix(content_.size());
    if (!token.empty()) left_ = 0;
    for (auto left = stop_; left > 0 && token.ends_with(content_); --left) {
      token.remove_suffix(content_.size());
    }
    out.emplace_back(token);
  }

 private:
  std::string content_;
  std::size_t start_, stop_, left_;
  bool fused_;
};

class JoinWithSpaces : public DecoderStep {
 public:
  void push(std::string_view token, Tokens& out) override {
    if (!first_) out.emplace_back(" ");
    first_ = false;
    out.emplace_back(token);
  }

 private:
  bool first_ = true;
};

// `fused`: the input is one token in parts. A step that needs the whole token is refused.
void add(const Component& part, Makers& makers, bool& fused) {
  const auto& type = part.type();
  const auto refuse_fused = [&] {
    if (fused) part.refuse(fmt::format("{} behind Fuse or ByteLevel", type));
  };
  if (type == "Sequence") {
    for (const auto& inner : part.sequence("decoders")) add(inner, makers, fused);
  } else if (type == "ByteLevel") {
    refuse_fused();
    append(makers, ByteLevelStep());
    fused = true;
  } else if (type == "ByteFallback") {
    refuse_fused();
    append(makers, ByteFallbackStep());
  } else if (type == "Replace") {
    refuse_fused();
    append(makers, ReplaceStep(Pattern(part.pattern("pattern")), part.string("content")));
  } else if (type == "Metaspace") {
    refuse_fused();
    std::string mark;
    append_utf8(part.character("replacement"), mark);
    const bool prepends =
        part.string("prepend_scheme", "always") != "never" && part.flag("add_prefix_space", true);
    append(makers, MetaspaceStep(mark, prepends));
  } else if (type == "Fuse") {
    fused = true;  // no step of its own, because the texts are joined at the end
  } else if (type == "Strip") {
    const auto start = part.count("start"), stop = part.count("stop");
    if (fused && stop > 0) part.refuse("a stop behind Fuse or ByteLevel");
    append(makers, StripStep(part.character("content"), start, stop, fused));
  } else {
    part.refuse_type();
  }
}

}  // namespace

Decoder::Decoder(const nlohmann::json& settings, const std::string& where) {
  bool fused = false;
  if (settings.is_null()) {
    append(makers_, JoinWithSpaces());
  } else {
    add(Component(settings, where), makers_, fused);
  }
  const auto has = [&](const char* type) {
    if (!settings.is_object()) return false;
    if (settings.value("type", nlohmann::json()) == type) return true;
    const auto parts = settings.value("decoders", nlohmann::json::array());
    return std::ranges::any_of(
        parts, [&](const auto& part) { return part.value("type", nlohmann::json()) == type; });
  };
  is_byte_level_ = has("ByteLevel");
  has_byte_fallback_ = has("ByteFallback");
}

std::optional<std::string> Decoder::bytes_of(std::string_view token) const {
  std::string bytes;
  if (is_byte_level_) return bytes_of_token(token, bytes) ? bytes : std::string(token);
  if (!has_byte_fallback_) return std::nullopt;
  const auto byte = byte_of_fallback(token);
  return byte ? std::optional(std::string(1, *byte)) : std::nullopt;
}

std::vector<std::unique_ptr<DecoderStep>> Decoder::fresh_steps() const {
  std::vector<std::unique_ptr<DecoderStep>> steps;
  for (const auto& make : makers_) steps.push_back(make());
  return steps;
}

}  // namespace ferry::rollout::text
