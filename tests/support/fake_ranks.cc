#include "tests/support/fake_ranks.h"

#include <barrier>
#include <cstddef>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "distckpt/base/error.h"

namespace ferry::support {

void run_as_ranks(int size, const std::function<void(const distckpt::RankGroup&)>& body) {
  const auto count = static_cast<std::size_t>(size);
  std::vector<std::string> said(count);
  std::vector<std::exception_ptr> failures(count);
  std::barrier<> everybody(size);
  {
    std::vector<std::jthread> threads;
    for (std::size_t rank = 0; rank < count; ++rank) {
      threads.emplace_back([&, rank] {
        distckpt::RankGroup group{.rank = static_cast<int>(rank), .size = size};
        group.all_gather_bytes = [&, rank](std::string_view mine) {
          said[rank] = mine;
          everybody.arrive_and_wait();
          auto all = said;
          everybody.arrive_and_wait();
          return all;
        };
        try {
          body(group);
        } catch (...) {
          failures[rank] = std::current_exception();
        }
        everybody.arrive_and_drop();
      });
    }
  }
  std::exception_ptr cancelled;
  for (const auto& failure : failures) {
    if (!failure) continue;
    try {
      std::rethrow_exception(failure);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kCancelled) throw;
      cancelled = failure;
    }
  }
  if (cancelled) std::rethrow_exception(cancelled);
}

}  // namespace ferry::support
