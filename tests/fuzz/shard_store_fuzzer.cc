#include <charconv>
#include <string>

#include "distckpt/formats/archive/shard_store.h"
#include "distckpt/formats/archive/shard_store_index.h"
#include "distckpt/formats/archive/shard_store_layout.h"
#include "tests/fuzz/property.h"
#include "tests/fuzz/targets.h"

namespace ferry::fuzz {
namespace {

using distckpt::ShardStoreLayout;

struct ReadStore {
  ShardStoreLayout store{.files = {"fuzz"}};
  distckpt::ShardStoreContents contents{};
};

ReadStore read_store(std::string_view text, std::size_t num_chunks) {
  ReadStore result;
  result.contents = distckpt::read_index(text, 0, 1, num_chunks, "fuzz", result.store);
  return result;
}

}  // namespace

// A line with the number of chunks that a trailer would list, and the index. What is taken makes a
// layout in which every tensor is whole and has storages as many as there are chunks, and is
// written as an index that says the same.
void shard_store(std::string_view input) {
  const auto line = input.find('\n');
  std::size_t num_chunks = 0;
  if (line == std::string_view::npos ||
      std::from_chars(input.data(), input.data() + line, num_chunks).ptr != input.data() + line ||
      num_chunks > 10'000)
    return;
  ReadStore parsed;
  distckpt::Layout layout;
  if (!accepts([&] {
        parsed = read_store(input.substr(line + 1), num_chunks);
        layout = make_layout(parsed.store);
        check_layout(layout);
      }))
    return;
  expect(layout.storages().size() == num_chunks, "{} storages of {} chunks",
         layout.storages().size(), num_chunks);
  expect(layout.tensors().size() == parsed.store.tensors.size(), "a tensor is lost");
  const auto written = make_index(parsed.store, 0, parsed.contents);
  auto again = read_store(written, num_chunks);
  expect(make_index(again.store, 0, again.contents) == written, "reads back as something else");
}

}  // namespace ferry::fuzz
