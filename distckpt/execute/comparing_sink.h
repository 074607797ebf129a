// A sink that writes nothing: what would be written is compared with what is there already.
#pragma once

#include <span>
#include <vector>

#include "distckpt/plan/box_io.h"
#include "distckpt/plan/layout.h"

namespace ferry::distckpt {

class ComparingSink : public BoxSink {
 public:
  // Both outlive it; `there` is of `layout`.
  ComparingSink(const Layout& layout, BoxSource& there) : layout_(layout), there_(there) {}

  // Throws Error(kCorrupt) naming the storage whose bytes are others.
  void write(const Region& region,
             std::span<const std::byte> packed,
             std::vector<ChecksumPart>& parts) override;

 private:
  const Layout& layout_;
  BoxSource& there_;
};

}  // namespace ferry::distckpt
