// Parts of a plan's pieces as elements of the model's tensors: read, cast or dequantised, and
// stored. Slabs, in which tensors that lie in another order are held for a while (schedule.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <span>
#include <vector>

#include "distckpt/plan/box_io.h"
#include "distckpt/plan/copy_plan.h"
#include "distckpt/plan/schedule.h"

namespace ferry::distckpt {

// Memory from the caller's resource, aligned for O_DIRECT and for devices.
class Buffer {
 public:
  Buffer(std::pmr::memory_resource* resource, std::int64_t size)
      : resource_(resource),
        size_(static_cast<std::size_t>(size)),
        data_(size == 0 ? nullptr
                        : static_cast<std::byte*>(resource->allocate(size_, kAlignment))) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (data_ != nullptr) resource_->deallocate(data_, size_, kAlignment);
  }

  // Throws Error(kBug) if it is smaller.
  std::span<std::byte> first(std::int64_t size);

 private:
  static constexpr std::size_t kAlignment = 4096;
  std::pmr::memory_resource* resource_;
  std::size_t size_;
  std::byte* data_;
};

class PieceIo {
 public:
  // All must outlive it; `sink` may be null where nothing is written. `scratch` is the size of its
  // buffers.
  PieceIo(const CopyPlan& plan,
          std::int64_t scratch,
          std::pmr::memory_resource* resource,
          BoxSource& source,
          BoxSink* sink)
      : plan_(plan),
        source_(source),
        sink_(sink),
        scratch_(resource, scratch),
        stored_(resource, scratch) {}

  BoxSource& source() { return source_; }
  BoxSink* sink() { return sink_; }
  // Its memory for elements of the model's tensor, which it does not use by itself.
  std::span<std::byte> scratch(std::int64_t size) { return scratch_.first(size); }

  // Fills `into` with the part `box` of a piece: elements of the tensor less `less`, packed, in the
  // order of `order` (order_of). Throws Error(kLayout) for one that its dtype does not hold.
  void read(const ModelTensor& tensor,
            const Piece& piece,
            int less,
            const Box& box,
            const std::vector<int>& order,
            Transform transform,
            std::span<std::byte> into,
            std::vector<ChecksumPart>& parts);

  // The way back, to the sink.
  void write(const ModelTensor& tensor,
             const Piece& piece,
             int less,
             const Box& box,
             const std::vector<int>& order,
             std::span<const std::byte> packed,
             std::vector<ChecksumPart>& parts);

  // Packed elements of the tensor as a target piece holds them: in its dtype, less `taken`.
  static void store(const ModelTensor& tensor,
                    std::span<const std::byte> from,
                    const Piece& piece,
                    int taken,
                    std::span<std::byte> into,
                    const Box& box);

 private:
  void dequantize_piece(const ModelTensor& tensor,
                        const Piece& piece,
                        const Box& box,
                        const std::vector<int>& wanted,
                        std::span<std::byte> into,
                        std::vector<ChecksumPart>& parts);
  float read_global(const ScalePiece& scale);

  const CopyPlan& plan_;
  BoxSource& source_;
  BoxSink* sink_;
  Buffer scratch_;
  Buffer stored_;  // elements as a file holds them
};

// A part of a piece in its storage.
Region region_of(const Piece& piece, const Box& box);

// Elements of one slab, packed in the order of a cover.
class Slab {
 public:
  Slab(std::pmr::memory_resource* resource, std::int64_t size) : buffer_(resource, size) {}

  bool holds(std::int64_t element) const { return held_.begin <= element && element < held_.end; }
  // Lets go what it holds.
  void clear() { held_ = {}; }

  // Makes it hold elements [held.begin, held.end) of `slab`, a slab of the tensor.
  void begin(const ModelTensor& tensor,
             const FlatRange& slab,
             const FlatRange& held,
             std::vector<int> order);
  const FlatRange& held() const { return held_; }

  // Reads them from a cover, or writes them to one.
  void load(const ModelTensor& tensor,
            const Cover& cover,
            Transform transform,
            PieceIo& io,
            std::vector<ChecksumPart>& parts);
  void store(const ModelTensor& tensor,
             const Cover& cover,
             PieceIo& io,
             std::vector<ChecksumPart>& parts);

  // Copies elements `range` of the tensor, row-major and packed at `elements`.
  void get(const ModelTensor& tensor, const FlatRange& range, std::byte* elements);
  void set(const ModelTensor& tensor, const FlatRange& range, const std::byte* elements);

 private:
  std::byte* at(const Dims& element);
  // Calls visit(piece, part of it that it holds), a tile at a time.
  template <typename Visit>
  void visit_tiles_of(const ModelTensor& tensor,
                      const Cover& cover,
                      const std::vector<int>& order,
                      Visit&& visit);
  // The elements of `tile` where they follow each other in the order of `order`; else nothing.
  std::span<std::byte> in_place(const Box& tile, const std::vector<int>& order, std::int64_t size);

  Buffer buffer_;
  FlatRange held_{};
  Dims first_{};    // element of the slab
  Dims strides_{};  // by dimension of the grid, in bytes
  std::vector<int> order_{};
  std::span<std::byte> bytes_{};
};

}  // namespace ferry::distckpt
