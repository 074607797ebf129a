// Measures the CPU time of the header of a safetensors file of many tensors: its JSON alone, and
// all that is checked.
//
//   header_bench [TENSORS]        default: 300,000
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>

#include "distckpt/base/json.h"
#include "distckpt/formats/safetensors.h"

namespace {

using namespace ferry::distckpt;

template <typename Body>
double best_seconds(Body&& body) {
  double best = 1e9;
  for (int i = 0; i < 5; ++i) {
    const auto start = std::clock();
    body();
    best = std::min(best, static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
  }
  return best;
}

}  // namespace

int main(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 300'000;
  std::vector<SafetensorsEntry> tensors;
  for (int i = 0; i < count; ++i) {
    tensors.push_back(
        {.name = fmt::format("model.layers.{}.mlp.experts.{}.up_proj.weight", i / 400, i % 400),
         .dtype = DType::kBF16,
         .shape = {1, 2}});
  }
  const auto header = make_safetensors_header("model.safetensors", std::move(tensors), {});
  constexpr std::size_t kLengthBytes = 8;
  const auto text = std::string_view(header.prefix).substr(kLengthBytes);
  const auto json = best_seconds([&] { parse_json(text, "header"); });
  const auto all = best_seconds([&] {
    parse_safetensors_prefix(header.prefix, header.filename, "header", header.file_size);
  });
  fmt::print("{} tensors, {:.1f} MB: JSON {:.2f} s, header {:.2f} s\n", count,
             static_cast<double>(text.size()) / 1e6, json, all);
}
