#include "tests/support/models/random_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "distckpt/base/box.h"
#include "tests/support/naive_cast.h"
#include "tests/support/random_boxes.h"

namespace ferry::support {

using distckpt::Box;
using distckpt::BoxLink;
using distckpt::Dims;
using distckpt::DType;
using distckpt::kMaxRank;
using distckpt::ModelTensor;
using distckpt::Shape;
using distckpt::Shard;
using distckpt::size_of;
using distckpt::StorageId;
using distckpt::Transform;

namespace {

using Memory = std::vector<std::vector<std::byte>>;

// The ways in which a tensor is held with other dtypes than its own.
struct Conversions {
  bool widened = false;             // on either side, in parts
  std::vector<double> unrounded{};  // the source holds these, in fp32; the model their rounding
};

// Makes one side: first all tensors' parts as boxes of stored tensors, then their shards.
class SideBuilder {
 public:
  SideBuilder(Random& random,
              const std::vector<ModelTensor>& tensors,
              const std::vector<Conversions>& conversions,
              bool is_source)
      : random_(random), tensors_(tensors), conversions_(conversions), is_source_(is_source) {}

  // Cuts a copy of the tensor into boxes and stores each in a way of its own.
  void add_copy(std::uint32_t model, int copy) {
    const auto& tensor = tensors_[model];
    const auto space = random_.chance(50) ? tensor.grid() : tensor.shape;
    for (const auto& box : random_tiling(random_, space, cuts())) {
      const BoxLink link{.model = model, .model_box = box, .stored_box = {}, .copy = copy};
      const auto dtype = stored_dtype(model);
      const auto way = random_.between(0, 9);
      if (way < 3) {
        buckets_[dtype].push_back(link);
      } else if (way < 6 && box.rank() < kMaxRank) {
        stacks_[{dtype, box.size}].push_back(link);
      } else {
        add_single(link, dtype);
      }
    }
  }

  ModelSide finish() {
    for (auto& [dtype, links] : buckets_) add_bucket(dtype, links);
    for (auto& [key, links] : stacks_) add_stack(key.first, key.second, links);
    random_.shuffle(side_.map.links);
    random_.shuffle(side_.map.padding);
    place_shards();
    return std::move(side_);
  }

 private:
  int cuts() { return static_cast<int>(random_.between(0, 4)); }

  DType stored_dtype(std::uint32_t model) {
    const auto dtype = tensors_[model].dtype;
    const auto& conversion = conversions_[model];
    if (is_source_ && !conversion.unrounded.empty()) return DType::kF32;
    if (!conversion.widened || random_.chance(40)) return dtype;
    if (dtype == DType::kF32 || dtype == DType::kF64) return DType::kF64;
    return random_.chance(70) ? DType::kF32 : DType::kF64;
  }

  std::uint32_t add_stored(DType dtype, const Shape& shape) {
    return side_.layout.add_tensor({.name = fmt::format("stored.{}", num_stored_++),
                                    .dtype = dtype,
                                    .shape = shape,
                                    .shards = {}});
  }

  void add_link(BoxLink link, std::uint32_t stored, const Box& box) {
    link.stored = stored;
    link.stored_box = box;
    side_.map.links.push_back(link);
  }

  // A tensor of its own, with leading ones and sometimes with padding around the box.
  void add_single(BoxLink link, DType dtype) {
    Box box{.offset = {}, .size = link.model_box.size};
    if (box.rank() > 1 && random_.chance(40)) {
      permute(link, box);
    } else {
      while (box.rank() > 0 && box.size[0] == 1 && random_.chance(30)) {
        box.size = box.size.drop_front(1);
      }
    }
    while (box.rank() < kMaxRank && random_.chance(25)) box.size.push_front(1);
    Shape shape = box.size;
    const bool padded = random_.chance(30);
    for (int d = 0; d < shape.rank(); ++d) {
      box.offset.push_back(padded ? random_.between(0, 2) : 0);
      shape[d] += box.offset[d] + (padded ? random_.between(0, 2) : 0);
    }
    const auto stored = add_stored(dtype, shape);
    add_link(link, stored, box);
    for (const auto& part : subtract(Box::whole(shape), box)) {
      side_.map.padding.push_back({.stored = stored, .box = part});
    }
  }

  // The dimensions in another order, maybe without some of size one.
  void permute(BoxLink& link, Box& box) {
    std::vector<int> order(static_cast<std::size_t>(box.rank()));
    std::iota(order.begin(), order.end(), 0);
    random_.shuffle(order);
    std::size_t left = order.size();  // at least one is named
    Dims size;
    for (const int d : order) {
      if (left > 1 && box.size[d] == 1 && random_.chance(50)) {
        --left;
        continue;
      }
      link.axes.push_back(d);
      size.push_back(box.size[d]);
    }
    box.size = size;
  }

  // One row that holds box after box, aligned to four elements.
  void add_bucket(DType dtype, std::vector<BoxLink>& links) {
    random_.shuffle(links);
    std::vector<Box> boxes;
    std::vector<Box> gaps;
    std::int64_t position = 0;
    const auto advance = [&](std::vector<Box>& into, std::int64_t count) {
      into.push_back({.offset = {position}, .size = {count}});
      position += count;
    };
    for (const auto& link : links) {
      if (position % 4 != 0) advance(gaps, 4 - position % 4);
      advance(boxes, link.model_box.volume());
    }
    if (random_.chance(50)) advance(gaps, random_.between(1, 5));
    const auto stored = add_stored(dtype, {position});
    for (std::size_t i = 0; i < links.size(); ++i) {
      links[i].flat = true;
      add_link(links[i], stored, boxes[i]);
    }
    for (const auto& gap : gaps) side_.map.padding.push_back({.stored = stored, .box = gap});
  }

  // Boxes of one size on top of each other, as layers and experts are; maybe one place is empty.
  void add_stack(DType dtype, const Dims& size, std::vector<BoxLink>& links) {
    random_.shuffle(links);
    Shape shape = size;
    shape.push_front(std::ssize(links) + random_.between(0, 1));
    const auto stored = add_stored(dtype, shape);
    Box box = Box::whole(shape);
    box.size[0] = 1;
    for (const auto& link : links) {
      add_link(link, stored, box);
      ++box.offset[0];
    }
    if (box.offset[0] < shape[0]) side_.map.padding.push_back({.stored = stored, .box = box});
  }

  // Cuts every stored tensor into shards and gives each bytes in some storage.
  void place_shards() {
    const auto num_storages = random_.between(1, 3);
    side_.memory.resize(static_cast<std::size_t>(num_storages));
    std::vector<std::int64_t> ends(side_.memory.size(), 0);
    for (std::uint32_t i = 0; i < side_.layout.tensors().size(); ++i) {
      auto& tensor = side_.layout.tensor(i);
      for (const auto& box : random_tiling(random_, tensor.shape, cuts())) {
        const auto storage = static_cast<StorageId>(random_.between(0, num_storages - 1));
        auto& end = ends[storage];
        end += random_.between(0, 3);
        const auto [strides, length] = random_strides(box.size, size_of(tensor.dtype));
        tensor.shards.push_back(
            {.box = box, .at = {.storage = storage, .offset = end, .strides = strides}});
        end += length;
      }
    }
    for (std::size_t i = 0; i < ends.size(); ++i) {
      side_.memory[i].assign(static_cast<std::size_t>(ends[i]), kUntouched);
      side_.layout.add_storage(distckpt::MemoryStorage{
          .data = side_.memory[i].data(), .size = ends[i], .owner = nullptr});
    }
  }

  // Strides in bytes that keep the elements apart, and the bytes they span: row-major, or the
  // dimensions in any order and with gaps.
  std::pair<Dims, std::int64_t> random_strides(const Dims& size, std::int64_t element_size) {
    std::vector<int> order(static_cast<std::size_t>(size.rank()));
    std::iota(order.rbegin(), order.rend(), 0);  // innermost first
    const bool plain = random_.chance(50);
    if (!plain) random_.shuffle(order);
    Dims strides = Dims::filled(size.rank(), 0);
    std::int64_t stride = element_size;
    for (const auto d : order) {
      if (!plain && random_.chance(30)) stride += element_size * random_.between(1, 2);
      strides[d] = stride;
      stride *= size[d];
    }
    return {strides, stride};
  }

  Random& random_;
  const std::vector<ModelTensor>& tensors_;
  const std::vector<Conversions>& conversions_;
  bool is_source_;
  ModelSide side_;
  int num_stored_ = 0;
  std::map<DType, std::vector<BoxLink>> buckets_;
  std::map<std::pair<DType, Dims>, std::vector<BoxLink>> stacks_;
};

// The bytes of one element of a stored tensor.
std::byte* find_element(const ModelSide& side,
                        Memory& memory,
                        std::uint32_t stored,
                        const Dims& at) {
  for (const auto& shard : side.layout.tensor(stored).shards) {
    if (!contains(shard.box, at)) continue;
    std::int64_t address = shard.at.offset;
    for (int d = 0; d < at.rank(); ++d) {
      address += (at[d] - shard.box.offset[d]) * shard.at.strides[d];
    }
    return memory[shard.at.storage].data() + address;
  }
  throw std::logic_error("an element in no shard");
}

// The element of the stored tensor that the one at `at` of the model's box is.
Dims stored_element(const BoxLink& link, const Dims& at, std::int64_t index) {
  if (link.axes.empty()) return element_of(link.stored_box, index);
  auto stored = link.stored_box.offset;
  const int first = stored.rank() - link.axes.rank();
  for (int i = 0; i < link.axes.rank(); ++i) {
    const auto axis = static_cast<int>(link.axes[i]);
    stored[first + i] += at[axis] - link.model_box.offset[axis];
  }
  return stored;
}

void fill_memory(const RandomModel& model,
                 const ModelSide& side,
                 const std::vector<Conversions>* unrounded,
                 Memory& memory) {
  for (const auto& link : side.map.links) {
    const auto& tensor = model.tensors[link.model];
    const auto element_size = size_of(tensor.dtype);
    const auto dtype = side.layout.tensor(link.stored).dtype;
    for (std::int64_t i = 0; i < link.model_box.volume(); ++i) {
      const auto at = element_of(link.model_box, i);
      const bool in_grid = at.rank() == tensor.grid().rank();
      const auto index = index_of(in_grid ? tensor.grid() : tensor.shape, at);
      const auto* from = model.bytes[link.model].data() + index * element_size;
      auto* const into = find_element(side, memory, link.stored, stored_element(link, at, i));
      if (unrounded != nullptr && !(*unrounded)[link.model].unrounded.empty()) {
        const auto& values = (*unrounded)[link.model].unrounded;
        naive_round(values[static_cast<std::size_t>(index)], dtype, into);
      } else if (dtype == tensor.dtype) {
        std::memcpy(into, from, static_cast<std::size_t>(element_size));
      } else {
        naive_round(naive_value(tensor.dtype, from), dtype, into);
      }
    }
  }
}

// Makes every element of the padding zero, or anything else.
void fill_padding(const ModelSide& side, Memory& memory, Random* junk) {
  for (const auto& padding : side.map.padding) {
    const auto size = size_of(side.layout.tensor(padding.stored).dtype);
    for (std::int64_t i = 0; i < padding.box.volume(); ++i) {
      auto* const into = find_element(side, memory, padding.stored, element_of(padding.box, i));
      std::memset(into, junk != nullptr ? static_cast<int>(junk->between(1, 255)) : 0,
                  static_cast<std::size_t>(size));
    }
  }
}

// Not NaN: casts keep of a NaN only that it is one. Finite and small enough for any dtype if
// `finite`.
void make_value(Random& random, DType dtype, bool finite, std::byte* element) {
  do {
    random.fill(std::span(element, static_cast<std::size_t>(size_of(dtype))));
  } while (naive_value(dtype, element) != naive_value(dtype, element) ||
           (finite && !(std::abs(naive_value(dtype, element)) < 60000.0)));
}

std::vector<std::byte> make_bytes(Random& random,
                                  const ModelTensor& tensor,
                                  Conversions& conversions) {
  auto bytes = random.bytes(tensor.num_bytes());
  const auto size = static_cast<std::size_t>(size_of(tensor.dtype));
  const bool rounded = conversions.widened && size == 2 && random.chance(40);
  for (std::size_t at = 0; at < bytes.size() && conversions.widened; at += size) {
    if (rounded) {
      std::array<std::byte, 4> single{};
      make_value(random, DType::kF32, true, single.data());
      conversions.unrounded.push_back(naive_value(DType::kF32, single.data()));
      naive_round(conversions.unrounded.back(), tensor.dtype, &bytes[at]);
    } else {
      make_value(random, tensor.dtype, false, &bytes[at]);
    }
  }
  return bytes;
}

ModelTensor make_tensor(Random& random, std::size_t index, bool large) {
  constexpr std::array kDTypes{DType::kBF16, DType::kBF16, DType::kF32,    DType::kF16,
                               DType::kF64,  DType::kU8,   DType::kF8E4M3, DType::kI64};
  ModelTensor tensor{.name = fmt::format("model.{}", index), .shape = {}};
  const auto kind = static_cast<std::size_t>(random.between(0, std::ssize(kDTypes) - 1));
  tensor.dtype = large ? DType::kF32 : kDTypes[kind];
  const auto rank = static_cast<int>(random.between(0, 4));
  tensor.shape = large ? Shape{random.between(2, 3), random.between(600, 900), 311}
                       : random_shape(random, rank, random.chance(5) ? 0 : 1, 9);
  if (rank > 0 && random.chance(30)) {
    tensor.interleaved = random.between(2, 3);
    tensor.shape[tensor.shape.rank() - 1] *= tensor.interleaved;
  }
  return tensor;
}

}  // namespace

RandomModel random_model(std::uint64_t seed, const RandomModelOptions& options) {
  Random random(seed);
  RandomModel model;
  std::vector<Conversions> conversions(static_cast<std::size_t>(options.num_tensors));
  for (auto& conversion : conversions) {
    const auto index = model.tensors.size();
    model.tensors.push_back(make_tensor(random, index, options.large && index == 0));
    const auto& tensor = model.tensors.back();
    conversion.widened =
        tensor.dtype >= DType::kF16 && (!options.large || index > 0) && random.chance(40);
    model.bytes.push_back(make_bytes(random, tensor, conversion));
    if (!conversion.unrounded.empty()) model.cast = Transform::kCast;
  }
  for (const bool is_source : {true, false}) {
    SideBuilder builder(random, model.tensors, conversions, is_source);
    for (std::uint32_t i = 0; i < model.tensors.size(); ++i) {
      const int copies = random.chance(20) ? 2 : 1;
      for (int copy = 0; copy < copies; ++copy) builder.add_copy(i, copy);
    }
    (is_source ? model.source : model.target) = builder.finish();
  }
  model.padding_is_zero = random.chance(50);
  fill_memory(model, model.source, &conversions, model.source.memory);
  fill_padding(model.source, model.source.memory, model.padding_is_zero ? nullptr : &random);
  model.expected = model.target.memory;
  fill_memory(model, model.target, nullptr, model.expected);
  fill_padding(model.target, model.expected, nullptr);
  return model;
}

}  // namespace ferry::support
