// DecodeGraphs of a build without CUDA.
#include <utility>

#include "distckpt/base/error.h"
#include "rollout/decode_graphs.h"

namespace ferry::rollout {

struct DecodeGraphs::Graphs {};

DecodeGraphs::DecodeGraphs(std::function<DecodedRows(std::int64_t rows)> forward)
    : forward_(std::move(forward)) {}
DecodeGraphs::~DecodeGraphs() = default;

std::int64_t DecodeGraphs::bucket_of(std::int64_t rows) {
  return rows;
}

DecodedRows DecodeGraphs::replay(std::int64_t) {
  throw Error(ErrorKind::kBug, "built without CUDA: there are no graphs");
}

}  // namespace ferry::rollout
