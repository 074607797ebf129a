#include "distckpt/plan/rank_group.h"

#include <cstddef>
#include <exception>

#include "distckpt/base/error.h"

namespace ferry::distckpt {

std::vector<std::string> RankGroup::gather(std::string_view mine) const {
  if (size == 1) return {std::string(mine)};
  auto all = all_gather_bytes(mine);
  require(static_cast<int>(all.size()) == size, ErrorKind::kBug,
          "a group of {} ranks gathered from {}", size, all.size());
  return all;
}

void run_together(const RankGroup& group, const std::function<void()>& body) {
  // The first byte tells success from an error without a message.
  std::string said = "+";
  std::exception_ptr failure;
  try {
    body();
  } catch (const Error& error) {
    failure = std::current_exception();
    said = fmt::format("-{}", error.what());
    for (const auto& frame : error.context()) said += "; while " + frame;
  } catch (const std::exception& error) {
    failure = std::current_exception();
    said = fmt::format("-{}", error.what());
  }
  const auto all = group.gather(said);
  if (failure) std::rethrow_exception(failure);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].starts_with('+')) continue;
    fail(ErrorKind::kCancelled, "rank {} failed: {}", rank, std::string_view(all[rank]).substr(1));
  }
}

}  // namespace ferry::distckpt
