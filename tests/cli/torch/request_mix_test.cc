// The load of a bench: lengths that are given, drawn or read, and times of arrival.
#include "cli/torch/request_mix.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>

#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"

namespace ferry::cli {
namespace request_mix_test {

using support::fails;
using support::TempDir;

constexpr std::int64_t kVocab = 100;

std::vector<MixRequest> mix(const MixOptions& options, std::uint64_t salt = 0) {
  return make_mix(options, kVocab, salt);
}

TEST(RequestMix, HasTheLengthsThatAreGiven) {
  const auto requests = mix({.num_prompts = 3, .input_len = "7", .output_len = "2"});
  ASSERT_EQ(requests.size(), 3U);
  for (const auto& request : requests) {
    EXPECT_EQ(request.prompt_token_ids.size(), 7U);
    EXPECT_EQ(request.output_len, 2);
    EXPECT_EQ(request.arrival, 0);
    for (const auto token : request.prompt_token_ids) {
      EXPECT_GE(token, 0);
      EXPECT_LT(token, kVocab);
    }
  }
}

TEST(RequestMix, DrawsEveryLengthOfARange) {
  std::set<std::size_t> lengths;
  for (const auto& request : mix({.num_prompts = 200, .input_len = "3:6"}))
    lengths.insert(request.prompt_token_ids.size());
  EXPECT_EQ(lengths, (std::set<std::size_t>{3, 4, 5, 6}));
}

TEST(RequestMix, HasTheMeanOfALogNormalDistribution) {
  double sum = 0;
  std::int64_t longest = 0;
  for (const auto& request :
       mix({.num_prompts = 20000, .input_len = "1", .output_len = "lognormal:200:0.5:100000"})) {
    sum += static_cast<double>(request.output_len);
    longest = std::max(longest, request.output_len);
  }
  // The deviation is 200 sqrt(e^0.25 - 1); the mean of 20,000 is off by five of its own at most.
  const double deviation = 200 * std::sqrt(std::exp(0.25) - 1) / std::sqrt(20000);
  EXPECT_NEAR(sum / 20000, 200 - 0.5, 5 * deviation);  // lengths are rounded down
  EXPECT_GT(longest, 800);
}

TEST(RequestMix, CutsALogNormalDistributionAtItsMost) {
  for (const auto& request :
       mix({.num_prompts = 500, .input_len = "lognormal:60:2:64", .output_len = "1"}))
    EXPECT_LE(request.prompt_token_ids.size(), 64U);
}

TEST(RequestMix, SharesAPrefixAmongPrompts) {
  const auto requests = mix({.num_prompts = 8, .input_len = "12", .prefix_len = 5});
  std::set<std::vector<std::int64_t>> prefixes, rests;
  for (const auto& request : requests) {
    const auto end = request.prompt_token_ids.begin() + 5;
    prefixes.emplace(request.prompt_token_ids.begin(), end);
    rests.emplace(end, request.prompt_token_ids.end());
  }
  EXPECT_EQ(prefixes.size(), 1U);
  EXPECT_EQ(rests.size(), 8U);
}

TEST(RequestMix, IsTheSameForTheSameSeed) {
  const MixOptions options{.num_prompts = 5, .input_len = "4:9", .request_rate = 2, .seed = 3};
  const auto one = mix(options), another = mix(options);
  for (std::size_t i = 0; i < one.size(); ++i) {
    EXPECT_EQ(one[i].prompt_token_ids, another[i].prompt_token_ids);
    EXPECT_EQ(one[i].arrival, another[i].arrival);
  }
}

TEST(RequestMix, KeepsLengthsAndArrivalsUnderAnotherSalt) {
  const MixOptions options{.num_prompts = 5, .input_len = "4:9", .request_rate = 2};
  const auto one = mix(options, 0), salted = mix(options, 1);
  for (std::size_t i = 0; i < one.size(); ++i) {
    EXPECT_EQ(one[i].prompt_token_ids.size(), salted[i].prompt_token_ids.size());
    EXPECT_NE(one[i].prompt_token_ids, salted[i].prompt_token_ids);
    EXPECT_EQ(one[i].arrival, salted[i].arrival);
  }
}

TEST(RequestMix, ArrivesAtTheRateThatIsAskedFor) {
  const auto requests = mix({.num_prompts = 10000, .input_len = "1", .request_rate = 50});
  EXPECT_TRUE(std::ranges::is_sorted(requests, {}, &MixRequest::arrival));
  EXPECT_NEAR(requests.back().arrival, 200, 10);  // five deviations of 200 / sqrt(10,000)
}

TEST(RequestMix, ReadsRecordsInTheOrderOfTheirArrival) {
  const TempDir dir;
  distckpt::write_text(dir / "mix.jsonl",
                       "{\"input_len\": 3, \"output_len\": 30, \"arrival\": 2.5}\n"
                       "{\"input_len\": 4, \"output_len\": 40}\n");
  const auto requests = mix({.lengths = (dir / "mix.jsonl").string()});
  ASSERT_EQ(requests.size(), 2U);
  EXPECT_EQ(requests[0].output_len, 40);
  EXPECT_EQ(requests[1].output_len, 30);
  EXPECT_EQ(requests[1].arrival, 2.5);
}

TEST(RequestMix, NamesTheRecordWithoutALength) {
  const TempDir dir;
  distckpt::write_text(dir / "mix.jsonl",
                       "{\"input_len\": 3, \"output_len\": 30}\n{\"input_len\": 0}\n");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"mix.jsonl", "input_len is no length"},
                    [&] { mix({.lengths = (dir / "mix.jsonl").string()}); }));
}

TEST(RequestMix, RefusesAPrefixThatIsLongerThanThePrompts) {
  EXPECT_EQ(mix({.num_prompts = 1, .input_len = "12", .prefix_len = 12}).size(), 1U);
  for (const std::int64_t length : {-1, 13})
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"--prefix-len", "the longest prompt's 12 tokens"},
                      [&] { mix({.num_prompts = 1, .input_len = "12", .prefix_len = length}); }));
}

TEST(RequestMix, RefusesLengthsThatMakeNoSense) {
  for (const auto* length : {"", "0", "9:3", "1:2:3", "12x", "-4"}) {
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"--input-len", "is neither a length nor a range"}, [&] {
      mix({.input_len = length});
    })) << length;
  }
}

TEST(RequestMix, RefusesALogNormalDistributionWithoutItsNumbers) {
  for (const auto* length :
       {"lognormal", "lognormal:10:1", "lognormal:0:1:10", "lognormal:9:1:0"}) {
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"--output-len", "is not mean, sigma and the most"}, [&] {
      mix({.output_len = length});
    })) << length;
  }
}

}  // namespace request_mix_test
}  // namespace ferry::cli
