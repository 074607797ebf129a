// The load of `ferry bench rollout`: how long prompts and answers are, and when requests arrive.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ferry::cli {

struct MixOptions {
  std::int64_t num_prompts = 256;
  std::string input_len = "1024";  // or "100:1024", uniform, or "lognormal:1060:1:4096": mean,
                                   // sigma of the logarithm, the most, at which longer ones are cut
  std::string output_len = "128";
  std::int64_t prefix_len = 0;  // tokens that all prompts begin with, of input_len
  std::string lengths{};        // a file of records {"input_len", "output_len", "arrival"} instead
  double request_rate = 0;      // a second, Poisson's arrivals; 0: all at once
  std::uint64_t seed = 0;
};

struct MixRequest {
  std::vector<std::int64_t> prompt_token_ids{};
  std::int64_t output_len = 0;
  double arrival = 0;  // seconds
};

// Sorted by arrival. A pure function of its arguments: the same on every rank. `salt` makes other
// prompts of the same lengths. Throws Error(kUsage) that names what makes no sense.
std::vector<MixRequest> make_mix(const MixOptions& options,
                                 std::int64_t vocab_size,
                                 std::uint64_t salt);

}  // namespace ferry::cli
