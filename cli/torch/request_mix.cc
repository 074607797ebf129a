#include "cli/torch/request_mix.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numbers>
#include <random>
#include <string_view>

#include "distckpt/base/error.h"
#include "trainer/data/record_file.h"

namespace ferry::cli {
namespace {

// The standard's distributions are another library's choice; these are not.
class Random {
 public:
  Random(std::uint64_t seed, std::uint64_t salt) : engine_(seed * 0x9E3779B97F4A7C15 + salt) {}

  std::int64_t between(std::int64_t least, std::int64_t most) {
    const auto span = static_cast<std::uint64_t>(most - least + 1);
    return least + static_cast<std::int64_t>(engine_() % span);
  }
  double exponential() { return -std::log1p(-uniform()); }
  // Box and Muller, 1958.
  double normal() {
    const double radius = std::sqrt(2 * exponential());
    return radius * std::cos(2 * std::numbers::pi * uniform());
  }

 private:
  double uniform() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }

  std::mt19937_64 engine_;
};

constexpr std::string_view kLogNormal = "lognormal";

// The lengths of prompts or answers: uniform from least to most, or log-normal if there is a mean.
struct Distribution {
  std::int64_t least = 1;
  std::int64_t most = 0;
  double mean = 0;
  double sigma = 0;

  std::int64_t draw(Random& random) const {
    if (mean == 0) return random.between(least, most);
    const double length = mean * std::exp(sigma * random.normal() - sigma * sigma / 2);
    return std::clamp(static_cast<std::int64_t>(std::min(length, 1e15)), least, most);
  }
};

Distribution parse_distribution(const std::string& text, const char* flag) {
  std::vector<std::string_view> parts;
  for (std::string_view rest(text);; rest.remove_prefix(parts.back().size() + 1)) {
    parts.push_back(rest.substr(0, rest.find(':')));
    if (parts.back().size() == rest.size()) break;
  }
  const auto parse = [](std::string_view part, auto& value) {
    const auto* const end = part.data() + part.size();
    const auto [stop, error] = std::from_chars(part.data(), end, value);
    return error == std::errc() && stop == end;
  };
  Distribution lengths;
  if (parts[0] == kLogNormal) {
    const bool good = parts.size() == 4 && parse(parts[1], lengths.mean) &&
                      parse(parts[2], lengths.sigma) && parse(parts[3], lengths.most);
    require(good && lengths.mean > 0 && lengths.sigma >= 0 && lengths.most >= 1, ErrorKind::kUsage,
            "{} {}: is not mean, sigma and the most such as lognormal:1060:1:4096", flag, text);
    return lengths;
  }
  const bool good =
      parts.size() <= 2 && parse(parts[0], lengths.least) && parse(parts.back(), lengths.most);
  require(good && lengths.least >= 1 && lengths.least <= lengths.most, ErrorKind::kUsage,
          "{} {}: is neither a length nor a range such as 100:1024", flag, text);
  return lengths;
}

struct Lengths {
  std::int64_t input_len = 0;
  std::int64_t output_len = 0;
  double arrival = 0;
};

std::vector<Lengths> read_lengths(const std::string& path) {
  const auto file = trainer::open_record_file(path);
  std::vector<Lengths> all;
  for (std::size_t i = 0; i < file->chunks().size(); ++i) {
    const auto chunk = file->open(i);
    for (std::int64_t row = 0; row < file->chunks()[i].num_records; ++row) {
      const auto record = chunk->at(row);
      const auto length = [&](const char* name) {
        const auto found = record.find(name);
        const bool good =
            found != record.end() && found->is_number_integer() && found->get<std::int64_t>() >= 1;
        require(good, ErrorKind::kCorrupt, "{}, {}: {} is no length", path, chunk->where(row),
                name);
        return found->get<std::int64_t>();
      };
      Lengths lengths{.input_len = length("input_len"), .output_len = length("output_len")};
      if (const auto arrival = record.find("arrival"); arrival != record.end()) {
        require(arrival->is_number() && arrival->get<double>() >= 0, ErrorKind::kCorrupt,
                "{}, {}: arrival is no time", path, chunk->where(row));
        lengths.arrival = arrival->get<double>();
      }
      all.push_back(lengths);
    }
  }
  require(!all.empty(), ErrorKind::kUsage, "{}: there is no record", path);
  return all;
}

std::vector<Lengths> draw_lengths(const MixOptions& options) {
  const auto input = parse_distribution(options.input_len, "--input-len");
  const auto output = parse_distribution(options.output_len, "--output-len");
  require(options.num_prompts >= 1, ErrorKind::kUsage, "--num-prompts {}: is not 1 or more",
          options.num_prompts);
  Random random(options.seed, 0);
  std::vector<Lengths> all(static_cast<std::size_t>(options.num_prompts));
  for (auto& one : all) {
    one.input_len = input.draw(random);
    one.output_len = output.draw(random);
  }
  return all;
}

}  // namespace

std::vector<MixRequest> make_mix(const MixOptions& options,
                                 std::int64_t vocab_size,
                                 std::uint64_t salt) {
  auto lengths = options.lengths.empty() ? draw_lengths(options) : read_lengths(options.lengths);
  const auto longest = std::ranges::max(lengths, {}, &Lengths::input_len).input_len;
  require(options.prefix_len >= 0 && options.prefix_len <= longest, ErrorKind::kUsage,
          "--prefix-len {}: is not from 0 to the longest prompt's {} tokens", options.prefix_len,
          longest);
  require(options.request_rate >= 0, ErrorKind::kUsage, "--request-rate {}: is not 0 or more",
          options.request_rate);
  Random arrivals(options.seed, 1);
  if (options.request_rate > 0) {
    double now = 0;
    for (auto& one : lengths) one.arrival = now += arrivals.exponential() / options.request_rate;
  }
  std::ranges::stable_sort(lengths, {}, &Lengths::arrival);
  Random tokens(options.seed, 2 + salt);
  std::vector<std::int64_t> prefix;
  for (std::int64_t i = 0; i < options.prefix_len; ++i)
    prefix.push_back(tokens.between(0, vocab_size - 1));
  std::vector<MixRequest> mix;
  for (const auto& one : lengths) {
    MixRequest request{.output_len = one.output_len, .arrival = one.arrival};
    for (std::int64_t i = 0; i < one.input_len; ++i)
      request.prompt_token_ids.push_back(i < options.prefix_len
                                             ? prefix[static_cast<std::size_t>(i)]
                                             : tokens.between(0, vocab_size - 1));
    mix.push_back(std::move(request));
  }
  return mix;
}

}  // namespace ferry::cli
