// Prints the records of files of training data as JSON, one a line: what
// tests/interop/train/test_training_data.py holds against pyarrow's reading.
//   record_tool FILE...              in the order of the files
//   record_tool --shuffle SEED FILE...   as an epoch visits them
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/base/error.h"
#include "trainer/data/record_stream.h"

int main(int argc, char** argv) {
  using namespace ferry;
  try {
    std::vector<std::string> arguments(argv + 1, argv + argc);
    trainer::StreamOptions options{.order = {.shuffle = false}, .drop_last = false};
    if (arguments.size() > 2 && arguments[0] == "--shuffle") {
      options.order = {.seed = std::stoull(arguments[1]), .shuffle_buffer_bytes = 1 << 16};
      arguments.erase(arguments.begin(), arguments.begin() + 2);
    }
    trainer::RecordStream stream({arguments.begin(), arguments.end()}, options);
    while (stream.cursor().epoch == 0) {
      for (const auto& record :
           stream.next_batch(1000, [](const trainer::Record& one) { return one; }))
        fmt::print("{}\n", record.dump());
    }
    for (const auto& row : stream.malformed().first) fmt::print(stderr, "{}\n", row.describe());
    return 0;
  } catch (const Error& error) {
    fmt::print(stderr, "{}", error.report());
    return 2;
  }
}
