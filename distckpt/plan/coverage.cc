#include "distckpt/plan/coverage.h"

#include <algorithm>
#include <vector>

#include "distckpt/base/error.h"

namespace ferry::distckpt {
namespace {

using Indices = std::vector<std::uint32_t>;

// Cuts dimension `dim` wherever a box begins or ends, and descends into each slab with the boxes
// that span it. For a grid every box is looked at once per dimension. Boxes that cut each other's
// slabs in every dimension are looked at far more often: `looks` is what is left of the number
// granted.
std::optional<CoverageDefect> descend(const Shape& shape,
                                      std::span<const Box> boxes,
                                      Indices members,
                                      int dim,
                                      Box slab,
                                      std::int64_t& looks) {
  if (dim == shape.rank()) {
    if (members.size() == 1) return std::nullopt;
    return CoverageDefect{.box = slab, .times = static_cast<int>(members.size())};
  }
  if (members.empty()) return CoverageDefect{.box = slab, .times = 0};
  looks -= std::ssize(members);
  if (looks < 0) {
    fail(ErrorKind::kLayout, "{} boxes cut the shape {} so irregularly that they cannot be checked",
         boxes.size(), to_string(shape));
  }
  std::ranges::sort(members, {}, [&](std::uint32_t i) { return boxes[i].offset[dim]; });
  std::vector<std::int64_t> cuts{0, shape[dim]};
  for (const auto i : members) {
    cuts.push_back(boxes[i].offset[dim]);
    cuts.push_back(boxes[i].end(dim));
  }
  std::ranges::sort(cuts);
  const auto repeats = std::ranges::unique(cuts);
  cuts.erase(repeats.begin(), repeats.end());

  Indices active;
  std::size_t next = 0;
  for (std::size_t c = 0; c + 1 < cuts.size(); ++c) {
    std::erase_if(active, [&](std::uint32_t i) { return boxes[i].end(dim) <= cuts[c]; });
    while (next < members.size() && boxes[members[next]].offset[dim] == cuts[c]) {
      active.push_back(members[next++]);
    }
    slab.offset[dim] = cuts[c];
    slab.size[dim] = cuts[c + 1] - cuts[c];
    if (auto defect = descend(shape, boxes, active, dim + 1, slab, looks)) return defect;
  }
  return std::nullopt;
}

}  // namespace

std::optional<CoverageDefect> find_coverage_defect(const Shape& shape, std::span<const Box> boxes) {
  Indices members;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    if (!boxes[i].inside(shape)) {
      fail(ErrorKind::kLayout, "the box {} leaves the shape {}", to_string(boxes[i]),
           to_string(shape));
    }
    if (!boxes[i].empty()) members.push_back(static_cast<std::uint32_t>(i));
  }
  const auto whole = Box::whole(shape);
  if (whole.empty()) return std::nullopt;
  constexpr std::int64_t kLooksPerBox = 1'000;
  constexpr std::int64_t kLooks = 1'000'000;
  auto looks = kLooks + kLooksPerBox * std::ssize(members);
  return descend(shape, boxes, std::move(members), 0, whole, looks);
}

void require_exactly_once(std::string_view tensor,
                          const Shape& shape,
                          std::span<const Box> boxes,
                          std::string_view verb) {
  const auto defect = with_context([&] { return fmt::format("checking {}", tensor); },
                                   [&] { return find_coverage_defect(shape, boxes); });
  if (!defect) return;
  fail(ErrorKind::kLayout, "{}: elements {} of shape {} are {} {} times, expected once", tensor,
       to_string(defect->box), to_string(shape), verb, defect->times);
}

}  // namespace ferry::distckpt
