#include <fstream>
#include <string>

#include "distckpt/execute/journal.h"
#include "tests/fuzz/property.h"
#include "tests/fuzz/targets.h"
#include "tests/support/temp_dir.h"

namespace ferry::fuzz {

// A journal keeps the same records of a log when opened again, and it can be continued.
void journal(std::string_view input) {
  using distckpt::Journal;
  const distckpt::Digest fingerprint;
  const support::TempDir folder;  // a journal is opened through no link, so none of a MemoryFile
  const auto path = folder / "journal";
  std::ofstream(path, std::ios::binary) << input;
  std::size_t kept = 0;
  const distckpt::TaskRecord last{.task = 0xFFFFFFFF, .blocks = {fingerprint}};
  const bool taken = accepts([&] {
    Journal log(path, fingerprint, true);
    kept = log.num_finished() + (log.finished(last.task) == nullptr ? 1 : 0);
    log.append(last);
  });
  if (!taken) return;
  const Journal again(path, fingerprint, true);
  expect(again.num_finished() == kept && again.finished(last.task) != nullptr &&
             again.finished(last.task)->blocks == last.blocks,
         "{} tasks are there, expected {}", again.num_finished(), kept);
}

}  // namespace ferry::fuzz
