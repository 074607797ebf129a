#include "distckpt/formats/zarr.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::distckpt {
namespace {

constexpr std::string_view kDescription = ".zarray";

// The dtypes as numpy spells them. tensorstore's bfloat16 has no byte order.
std::optional<DType> dtype_from_zarr(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, DType>, 10> kNames{{
      {"bfloat16", DType::kBF16},
      {"<f2", DType::kF16},
      {"<f4", DType::kF32},
      {"<f8", DType::kF64},
      {"|b1", DType::kBool},
      {"|u1", DType::kU8},
      {"|i1", DType::kI8},
      {"<i2", DType::kI16},
      {"<i4", DType::kI32},
      {"<i8", DType::kI64},
  }};
  const auto found = std::ranges::find(kNames, name, &std::pair<std::string_view, DType>::first);
  return found == kNames.end() ? std::nullopt : std::optional(found->second);
}

class Description {
 public:
  explicit Description(const std::filesystem::path& path)
      : source_(path.string()), json_(parse_json(read_text(path, 1 << 20), source_)) {}

  void require_plain() const {
    const auto is = [&](std::string_view key, const nlohmann::json& expected) {
      const auto& value = json_at(json_, key, source_);
      require(value == expected, ErrorKind::kLayout, "{}: {} is {}, only {} is read", source_, key,
              value.dump(), expected.dump());
    };
    is("zarr_format", 2);
    is("compressor", nullptr);
    is("filters", nullptr);
    is("order", "C");
    const auto separator = json_.find("dimension_separator");
    require(separator == json_.end() || *separator == ".", ErrorKind::kLayout,
            "{}: dimension_separator is not \".\"", source_);
  }

  DType dtype() const {
    const auto& value = json_at(json_, "dtype", source_);
    const auto dtype =
        value.is_string() ? dtype_from_zarr(value.get_ref<const std::string&>()) : std::nullopt;
    require(dtype.has_value(), ErrorKind::kLayout, "{}: dtype {} is not read", source_,
            value.dump());
    return *dtype;
  }

  // Sizes, each at least `least`, whose product of bytes does not overflow.
  Dims sizes(std::string_view key, std::int64_t least, DType dtype) const {
    const auto& value = json_at(json_, key, source_);
    Dims dims;
    bool proper = value.is_array() && value.size() <= static_cast<std::size_t>(kMaxRank);
    for (std::size_t i = 0; proper && i < value.size(); ++i) {
      proper = value[i].is_number_integer() && value[i] >= least &&
               value[i] <= std::numeric_limits<std::int64_t>::max();
      if (proper) dims.push_back(value[i].get<std::int64_t>());
    }
    std::int64_t bytes = 0;
    const auto volume = proper ? checked_volume(dims) : std::nullopt;
    require(volume && !__builtin_mul_overflow(*volume, size_of(dtype), &bytes), ErrorKind::kCorrupt,
            "{}: {} is {}", source_, key, value.dump());
    return dims;
  }

  const std::string& source() const { return source_; }

 private:
  std::string source_;
  nlohmann::json json_;
};

std::string chunk_filename(const Dims& index) {
  return index.empty() ? "0" : fmt::format("{}", fmt::join(index.begin(), index.end(), "."));
}

std::int64_t count_chunk_files(const std::filesystem::path& folder) {
  return std::ranges::count_if(list_source(folder), [](const auto& path) {
    return !path.filename().string().starts_with('.');
  });
}

// The chunks of the tensor, each a file of `folder` that holds a whole chunk, also at the end.
void add_chunks(const std::filesystem::path& folder,
                const Dims& chunk,
                TensorLayout& tensor,
                Layout& layout) {
  const auto& shape = tensor.shape;
  Dims counts;  // not by ceil_div, whose sum could overflow
  for (int d = 0; d < shape.rank(); ++d)
    counts.push_back(shape[d] / chunk[d] + (shape[d] % chunk[d] == 0 ? 0 : 1));
  const auto expected = counts.product();  // at most the shape's
  const auto there = count_chunk_files(folder);
  require(there <= expected, ErrorKind::kCorrupt,
          "{}: {} chunks are there, shape {} in chunks of {} has {}", folder.string(), there,
          to_string(shape), to_string(chunk), expected);
  const auto chunk_bytes = chunk.product() * size_of(tensor.dtype);
  Dims index = Dims::filled(shape.rank(), 0);
  for (std::int64_t i = 0; i < expected; ++i) {
    const auto path = folder / chunk_filename(index);
    require(source_is_file(path), ErrorKind::kNotFound, "{}: is missing, {} of {} chunks are there",
            path.string(), there, expected);
    const auto size = ReadFile(path).size();
    require(size == chunk_bytes, ErrorKind::kCorrupt, "{}: has {} bytes, a chunk has {}",
            path.string(), size, chunk_bytes);
    Box box{.offset = index, .size = chunk};
    for (int d = 0; d < shape.rank(); ++d) {
      box.offset[d] *= chunk[d];
      box.size[d] = std::min(chunk[d], shape[d] - box.offset[d]);
    }
    const auto storage = layout.add_storage(FileStorage{.path = path, .size = size});
    auto shard = packed_shard(Box::whole(chunk), tensor.dtype, storage, 0);
    shard.box = box;
    tensor.shards.push_back(shard);
    for (int d = shape.rank() - 1; d >= 0; --d) {
      if (++index[d] < counts[d]) break;
      index[d] = 0;
    }
  }
}

}  // namespace

bool is_zarr_array(const std::filesystem::path& folder) {
  return source_is_file(folder / kDescription);
}

void add_zarr_array(const std::filesystem::path& folder, std::string name, Layout& layout) {
  const Description description(folder / kDescription);
  description.require_plain();
  const auto dtype = description.dtype();
  const auto chunk = description.sizes("chunks", 1, dtype);
  TensorLayout tensor{.name = std::move(name),
                      .dtype = dtype,
                      .shape = description.sizes("shape", 0, dtype),
                      .shards = {}};
  const auto& shape = tensor.shape;
  require(chunk.rank() == shape.rank(), ErrorKind::kCorrupt, "{}: shape {} in chunks of {}",
          description.source(), to_string(shape), to_string(chunk));
  with_context([&] { return fmt::format("reading {}", description.source()); },
               [&] { add_chunks(folder, chunk, tensor, layout); });
  layout.add_tensor(std::move(tensor));
}

}  // namespace ferry::distckpt
