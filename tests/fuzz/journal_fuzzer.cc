#include <string>

#include "distckpt/journal.h"
#include "tests/fuzz/property.h"
#include "tests/fuzz/targets.h"

namespace ferry::fuzz {

// What a journal keeps of a log it keeps the next time as well, and it can be continued.
void journal(std::string_view input) {
  using distckpt::Journal;
  const distckpt::Digest fingerprint;
  const MemoryFile file(input);
  std::size_t kept = 0;
  const distckpt::TaskRecord last{.task = 0xFFFFFFFF, .blocks = {fingerprint}};
  const bool taken = accepts([&] {
    Journal log(file.path(), fingerprint, true);
    kept = log.num_finished() + (log.finished(last.task) == nullptr ? 1 : 0);
    log.append(last);
  });
  if (!taken) return;
  const Journal again(file.path(), fingerprint, true);
  expect(again.num_finished() == kept && again.finished(last.task) != nullptr &&
             again.finished(last.task)->blocks == last.blocks,
         "{} tasks are there, expected {}", again.num_finished(), kept);
}

}  // namespace ferry::fuzz
