// The speed at which texts become tokens and tokens texts: tests/bench/tokenizer_bench.py runs it
// beside the tokenizers package.
//
//   tokenizer_bench TOKENIZER_JSON CORPUS THREADS ROUNDS
//
// CORPUS is UTF-8, cut into texts of 64 KiB at line breaks. Prints one line of JSON: seconds to
// read the tokenizer, seconds of the fastest round of encoding and of decoding, megabytes, tokens,
// and the largest resident size in MiB, of which the corpus is a part.
#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

#include "distckpt/storage/file_io.h"
#include "rollout/text/tokenizer/tokenizer.h"
#include "tests/support/encode_batch.h"

namespace ferry {
namespace {

using rollout::text::Tokenizer;

double seconds_of(auto&& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::vector<std::string> texts_of(const std::string& corpus) {
  constexpr std::size_t kTextBytes = 64 << 10;
  std::vector<std::string> texts;
  for (std::size_t begin = 0; begin < corpus.size();) {
    auto end = std::min(begin + kTextBytes, corpus.size());
    if (const auto line = corpus.find('\n', end - 1); line != corpus.npos) end = line + 1;
    texts.push_back(corpus.substr(begin, end - begin));
    begin = end;
  }
  return texts;
}

double resident_mib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

void run(char** arguments) {
  const auto texts = texts_of(distckpt::read_text(arguments[2], std::int64_t{4} << 30));
  const auto json = distckpt::read_text(arguments[1]);
  const int threads = std::atoi(arguments[3]), rounds = std::atoi(arguments[4]);
  std::unique_ptr<Tokenizer> tokenizer;
  const auto read =
      seconds_of([&] { tokenizer = std::make_unique<Tokenizer>(json, arguments[1]); });
  std::size_t bytes = 0, tokens = 0;
  double encode = 1e9, decode = 1e9;
  for (const auto& text : texts) bytes += text.size();
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::vector<rollout::text::TokenId>> ids;
    encode = std::min(encode,
                      seconds_of([&] { ids = support::encode_batch(*tokenizer, texts, threads); }));
    decode = std::min(decode, seconds_of([&] {
                        for (const auto& one : ids) tokenizer->decode(one);
                      }));
    tokens = 0;
    for (const auto& one : ids) tokens += one.size();
  }
  fmt::print(R"({{"read": {}, "encode": {}, "decode": {}, "mb": {}, "tokens": {}, "mib": {}}})"
             "\n",
             read, encode, decode, static_cast<double>(bytes) / 1e6, tokens, resident_mib());
}

}  // namespace
}  // namespace ferry

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  ferry::run(argv);
}
